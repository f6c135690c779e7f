// Conversations in the browser's storage: each under a key of its own, so that tabs do not overwrite each other's.

const PREFIX = "quire-chat:";

// The id of the conversation with this key; null for null, which stands for all keys; undefined for other keys.
export const idOf = key => key === null ? null : key.startsWith(PREFIX) ? key.slice(PREFIX.length) : undefined;

// What is not stored: log-probabilities, a hundred times as long as their text, and pictures: a few would be all that
// browsers keep for a page.
const stored = conversation => JSON.stringify(conversation,
  (name, value) => name === "scored" ? [] : name === "pictures" ? value.map(() => null) : value);

function parsed(text) {
  try {
    const found = JSON.parse(text);
    if (typeof found?.id !== "string" || !Array.isArray(found.turns)) return null;
    for (const turn of found.turns)
      if (turn.role === "assistant" && !turn.error) turn.finish ??= "stopped";  // the page was closed meanwhile
    return found;
  } catch {
    return null;
  }
}

export class Store {
  #storage = null;

  constructor() {
    try {
      localStorage.getItem(PREFIX);
      this.#storage = localStorage;
    } catch {}  // the user has blocked it
  }

  get works() {
    return this.#storage !== null;
  }

  #keys() {
    return this.works ? Object.keys(this.#storage).filter(key => key.startsWith(PREFIX)) : [];
  }

  get(id) {
    return this.works ? parsed(this.#storage.getItem(PREFIX + id)) : null;
  }

  // All of them, the last changed first.
  all() {
    const found = this.#keys().map(key => parsed(this.#storage.getItem(key))).filter(Boolean);
    return found.sort((one, other) => other.changed - one.changed);
  }

  // Keeps a conversation. If the storage is full, the oldest others go. Returns these, and whether it is kept now.
  save(conversation) {
    const dropped = [];
    if (!this.works) return {dropped, kept: false};
    const text = stored(conversation);
    for (;;) {
      try {
        this.#storage.setItem(PREFIX + conversation.id, text);
        return {dropped, kept: true};
      } catch {
        const oldest = this.all().findLast(each => each.id !== conversation.id);
        if (!oldest) return {dropped, kept: false};
        this.remove(oldest.id);
        dropped.push(oldest);
      }
    }
  }

  remove(id) {
    this.#storage?.removeItem(PREFIX + id);
  }

  clear() {
    for (const key of this.#keys()) this.#storage.removeItem(key);
  }
}
