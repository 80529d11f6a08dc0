// The server: requests, errors in its words, and streams. Paths are relative, so that the page works behind a prefix.

const KEY = "gnnlm-api-key";
let askForKey = async () => null;

export class Trouble extends Error {
  constructor(message, { status = 0, code = null, wait = null } = {}) {
    super(message);
    Object.assign(this, { status, code, wait });
  }
}

// `ask(message)` resolves to a key, or to null if there is none to give.
export function whenKeyIsNeeded(ask) {
  let asking = null; // several refused requests are one question
  askForKey = (message) => (asking ??= ask(message).finally(() => (asking = null)));
}

export const isAbort = (error) => error?.name === "AbortError";

async function send(path, body, signal, method = "POST") {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
    const options = { headers, signal, cache: "no-store", credentials: "same-origin", redirect: "error" };
    if (body !== undefined) {
      options.method = method;
      options.body = JSON.stringify(body);
      headers["Content-Type"] = "application/json";
    }
    let answer;
    try {
      answer = await fetch(path, options);
    } catch (error) {
      if (isAbort(error)) throw error;
      throw new Trouble("The server cannot be reached. Is gnnlm serve still running?");
    }
    if (answer.ok) return answer;
    const trouble = await troubleOf(answer);
    if (answer.status !== 401) throw trouble;
    if (sessionStorage.getItem(KEY) !== key) continue; // another request has got a key meanwhile
    const given = await askForKey(key === null ? "" : "The server did not accept this key.");
    if (given === null) throw trouble;
    sessionStorage.setItem(KEY, given);
  }
}

async function troubleOf(answer) {
  const wait = answer.headers.get("Retry-After");
  let error = {};
  try {
    error = (await answer.json()).error ?? {};
  } catch {
    // not ours: a proxy's page, perhaps
  }
  const message = error.message ?? `The server answered ${answer.status} ${answer.statusText}.`;
  return new Trouble(sentence(message), { status: answer.status, code: error.code, wait });
}

function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}

export async function post(path, body, signal) {
  return (await send(path, body, signal)).json();
}

export async function put(path, body) {
  return (await send(path, body, undefined, "PUT")).json();
}

export async function get(path, query = {}, signal) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== "");
  const words = new URLSearchParams(given).toString();
  return (await send(words ? `${path}?${words}` : path, undefined, signal)).json();
}

// The events of a stream, as objects; an end that the server did not announce is an error.
export async function* stream(path, body, signal) {
  const answer = await send(path, body, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Trouble("The connection ended half-way.", { code: "cut" });
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const parsed = JSON.parse(data);
        if (parsed.error) throw new Trouble(sentence(parsed.error.message), { code: parsed.error.code });
        yield parsed;
      }
    }
  } catch (error) {
    if (isAbort(error) || error instanceof Trouble) throw error;
    throw new Trouble("The connection was lost half-way.", { code: "cut" });
  } finally {
    reader.cancel().catch(() => {});
  }
}
