// Requests to the server that this page came from. Paths are relative, so that a proxy may move them.

const KEY = "specoffload.key";

/** An answer that is an error, in the server's words. */
export class ServerError extends Error {
  constructor(status, message, body) {
    super(message);
    this.status = status;
    this.body = body;
  }
}

export const key = {
  get: () => read(KEY) ?? "",
  set: (value) => write(KEY, value),
};

export function read(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

export function write(name, value) {
  try {
    if (value) localStorage.setItem(name, value);
    else localStorage.removeItem(name);
  } catch {
    // Storage is switched off: it holds until the page is closed.
  }
}

async function request(path, options = {}) {
  const headers = { ...options.headers, ...(options.body && { "Content-Type": "application/json" }) };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "The server does not answer. Is it still running?", { isUnreached: true });
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw new ServerError(response.status, body.error?.message ?? `HTTP ${response.status}`, body);
}

export const getJson = async (path) => (await request(path)).json();
export const postJson = async (path, body) => (await request(path, { method: "POST", body: JSON.stringify(body) })).json();

/** `{ready: true}`, with `loading` of several models, or what is known of the loading: `{ready: false, message, step, progress}`. */
export async function health() {
  try {
    const { loading } = await getJson("health");
    return { ready: true, loading };
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    const { step, progress } = error.body ?? {};
    return { ready: false, status: error.status, message: error.message, step, progress };
  }
}

const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/** A name for a stream, under which the server keeps it. Nobody can guess it. */
export const newStreamId = () => Array.from(crypto.getRandomValues(new Uint8Array(32)), (b) => LETTERS[b & 63]).join("");

/** The chunks of a streamed chat completion. Throws ServerError, before or amid them. */
export async function* streamChat(body, id, signal) {
  const sent = JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } });
  const headers = { "X-Stream-Id": id };
  yield* chunks(await request("v1/chat/completions", { method: "POST", body: sent, headers, signal }));
}

/** The chunks of a stream that was begun before, from its first one. */
export async function* readStream(id, signal) {
  yield* chunks(await request(`v1/streams/${id}`, { signal }));
}

/** End a stream, which would go on without its reader. The server may not know it yet. */
export async function cancelStream(id) {
  for (const wait_ms of [0, 500, 2000]) {
    await new Promise((resolve) => setTimeout(resolve, wait_ms));
    try {
      return void (await request(`v1/streams/${id}`, { method: "DELETE", keepalive: true }));
    } catch (error) {
      if (error.status !== 404) return; // the server is gone, and the stream with it
    }
  }
}

/** The status of an error amid a stream, whose code may be a word such as "context_length_exceeded". */
const statusOf = ({ code, type }) => (typeof code === "number" ? code : type === "server_error" ? 500 : 400);

async function* chunks(response) {
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(statusOf(chunk.error), chunk.error.message, chunk);
    yield chunk;
  }
  throw new ServerError(0, "The connection ended before the answer did.");
}

/** The data of server-sent events; comments are left out. */
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        throw error.name === "AbortError" ? error : new ServerError(0, "The connection was lost before the answer ended.");
      });
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trim();
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // frees the server's slot when the reader leaves early
  }
}
