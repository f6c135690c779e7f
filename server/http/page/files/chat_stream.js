// A streamed answer: server-sent events, and the turn that they add up to.

import {Refused, request} from "./api.js";

// Yields the data of each event.
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", data = [];
  try {
    for (;;) {
      const {value, done} = await reader.read();
      const lines = (rest + (value ?? "")).split(/\r\n|\n|\r(?!$)/);
      rest = done ? "" : lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// An answer before its first event. `isJson`: it was asked for with a `response_format`. Times are milliseconds of
// performance.now(), durations seconds.
export const newAnswer = (isJson = false) => ({
  role: "assistant", content: "", reasoning: "", calls: [], scored: [], chunks: 0, created: Date.now(),
  model: null, usage: null, first: null, thought: null, total: null, speed: null, finish: null, error: null,
  isJson,
});

// The tokens of an event with log-probabilities, of chat completions or of completions: {text, name, logprob, top}.
function scored(logprobs, decoder) {
  if (logprobs.content) return logprobs.content.map(each => ({
    text: each.bytes ? decoder.decode(new Uint8Array(each.bytes), {stream: true}) : each.token,
    name: each.token, logprob: each.logprob, top: (each.top_logprobs ?? []).map(one => [one.token, one.logprob]),
  }));
  return (logprobs.tokens ?? []).map((token, at) => ({
    text: token, name: token, logprob: logprobs.token_logprobs[at],
    top: Object.entries(logprobs.top_logprobs?.[at] ?? {}),
  }));
}

// Adds what an event says to the answer. `call.arguments` is JSON text, perhaps not yet whole.
export function add(turn, event, decoder) {
  if (event.error) throw new Refused(null, event.error.message, event.error.code);
  turn.model ??= event.model;
  if (event.usage) turn.usage = {
    prompt: event.usage.prompt_tokens, output: event.usage.completion_tokens,
    cached: event.usage.prompt_tokens_details?.cached_tokens ?? 0,
  };
  const choice = event.choices?.[0];
  if (!choice) return;
  const delta = choice.delta ?? {content: choice.text};
  turn.content += delta.content ?? "";
  turn.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
  for (const part of delta.tool_calls ?? []) {
    const call = turn.calls[part.index ?? 0] ??= {id: "", name: "", arguments: "", result: null};
    call.id ||= part.id ?? "";
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  if (choice.logprobs) turn.scored.push(...scored(choice.logprobs, decoder));
  turn.finish = choice.finish_reason ?? turn.finish;
}

// Asks, and adds the answer to `turn` as it comes, with a call of `changed` after each event. What goes wrong becomes
// `turn.error`.
export async function ask(path, body, signal, turn, changed) {
  const begun = performance.now(), decoder = new TextDecoder();
  const since = then => (performance.now() - then) / 1000;
  let first = null, last = null, ended = false;
  try {
    const answer = await request(path, {method: "POST", body: JSON.stringify(body), signal});
    for await (const data of events(answer.body)) {
      if (ended = data === "[DONE]") break;
      const before = turn.content.length + turn.reasoning.length + turn.calls.length + turn.scored.length;
      const calls = turn.calls.at(-1)?.arguments.length;
      add(turn, JSON.parse(data), decoder);
      const after = turn.content.length + turn.reasoning.length + turn.calls.length + turn.scored.length;
      if (after > before || turn.calls.at(-1)?.arguments.length !== calls) {
        last = performance.now();
        first ??= last;
        turn.chunks += 1;
        turn.first ??= since(begun);
        if (turn.reasoning && turn.thought === null && (turn.content || turn.calls.length)) turn.thought = since(first);
      }
      changed();
    }
    if (!ended && !turn.finish) throw new Error("The connection ended before the answer was complete.");
  } catch (error) {
    if (error.name === "AbortError") turn.finish = "stopped";
    else turn.error = {
      status: error.status ?? null, code: error.code ?? null,
      message: error instanceof TypeError ? `No connection to the server (${error.message}).` : error.message,
    };
  }
  if (turn.reasoning && first !== null) turn.thought ??= since(first);
  if (first !== null) turn.total = (last - begun) / 1000;
  // Not of few events, such as tool calls that come in one piece when they are whole.
  const count = turn.usage?.output ?? turn.chunks;
  if (turn.chunks > count / 8 && last - first > 20) turn.speed = (count - 1) / ((last - first) / 1000);
  turn.calls = turn.calls.filter(Boolean);
}
