// Requests to the server that this page came from, with the user's key, which the browser keeps until its tab is closed.

// The page is at / or /ui, perhaps below a prefix of a reverse proxy.
const root = location.pathname.replace(/\/(ui)?$/, "");
const KEY = "quire-key";

export const hasKey = () => sessionStorage.getItem(KEY) !== null;
export const setKey = key => key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY);

// An answer that is not 2xx: its status, and the server's own message and code.
export class Refused extends Error {
  constructor(status, message, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// `fetch` of a path of the server, such as /v1/models. Raises Refused.
export async function request(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = {...(options.body ? {"Content-Type": "application/json"} : {}), ...(key ? {Authorization: `Bearer ${key}`} : {})};
  const answer = await fetch(root + path, {cache: "no-store", ...options, headers});
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => null);
  throw new Refused(answer.status, body?.error?.message ?? `status ${answer.status}`, body?.error?.code);
}
