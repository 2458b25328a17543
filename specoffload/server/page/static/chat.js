// Asks the server, and writes what comes into the conversation.

import { Meter } from "./meter.js";
import { parts } from "./message.js";
import { cancelStream, newStreamId, readStream, streamChat } from "./server.js";

const PAUSES_MS = [500, 1000, 2000]; // before a lost stream is asked for again
const CUT_OFF = "This answer was cut off: the server has no more of it. “Ask again” begins it anew.";

/** The answers that are being written, by conversation; each can be stopped. */
export class Answers {
  #running = new Map(); // conversation id -> {message, controller}

  /** `on.change(conversation, message, growing)` after each change that can be seen. */
  constructor(on) {
    this.on = on;
  }

  running(conversation) {
    return this.#running.get(conversation.id)?.message ?? null;
  }

  stop(conversation) {
    const running = this.#running.get(conversation.id);
    if (!running) return;
    cancelStream(running.message.stream);
    running.controller.abort();
  }

  /** Write an answer behind the conversation's leaf; `language`: the model writes only that. */
  async write(conversation, sampling, language = "") {
    const body = { ...sampling, messages: wire(conversation), timings_per_token: true };
    const message = conversation.add("assistant", "");
    if (language) message.language = language;
    if (body.model) message.model = body.model;
    message.stream = newStreamId();
    await this.#follow(conversation, message, (signal) => streamChat(body, message.stream, signal));
  }

  /** Go on with an answer that was being written when the page was left. */
  async resume(conversation, message) {
    if (this.running(conversation)) return;
    await this.#follow(conversation, message, null);
  }

  /** Read the stream of `begin`. If it is lost, or there is no `begin`, ask for it again. */
  async #follow(conversation, message, begin) {
    const controller = new AbortController();
    const { signal } = controller;
    this.#running.set(conversation.id, { message, controller });
    this.on.change(conversation, message, true);
    let lost = null;
    for (let attempt = begin ? 0 : 1; ; attempt += 1) {
      const chunks = attempt === 0 ? begin(signal) : readStream(message.stream, signal);
      try {
        await this.#read(conversation, message, chunks);
        break;
      } catch (error) {
        if (error.name === "AbortError") {
          message.stopped = true;
          break;
        }
        // The page may have been loaded again before the server knew the stream's name.
        const isEarly = error.status === 404 && !begin && attempt === 1 && isEmpty(message);
        const isUnreached = attempt === 0 && error.body?.isUnreached === true;
        // A page that is being left loses its connections, and the next page goes on with the answer.
        if (isUnreached) await pause(PAUSES_MS[0], signal);
        const isLost = isEarly || (error.status === 0 && !isUnreached);
        if (!isLost || attempt === PAUSES_MS.length) {
          fail(message, error.status === 404 ? lost : error);
          break;
        }
        if (!isEarly) lost ??= error;
        await pause(PAUSES_MS[attempt], signal);
      }
    }
    const { samples, timings, usage } = message.meter ?? {};
    Object.assign(message, { meter: { samples, timings, usage }, stream: null, changed: Date.now() });
    this.#running.delete(conversation.id);
    this.on.change(conversation, message, false);
  }

  /** Read a stream from its beginning. Text that is there already stays until there is more of it. */
  async #read(conversation, message, chunks) {
    const read = { content: "", reasoning: "", tool_calls: [], meter: new Meter() };
    const take = () => Object.assign(message, read, { changed: Date.now() });
    const known = length(message);
    if (!known) take();
    for await (const chunk of chunks) {
      read.meter.chunk(chunk, performance.now() / 1e3);
      add(read, chunk);
      if (length(read) < known) continue;
      take();
      this.on.change(conversation, message, true);
    }
    take();
  }
}

const length = (m) => (m.content?.length ?? 0) + (m.reasoning?.length ?? 0) + JSON.stringify(m.tool_calls ?? []).length - 2;
const isEmpty = (message) => length(message) === 0;

function fail(message, error) {
  if (error) Object.assign(message, { error: error.message, status: error.status });
  else message.cutOff = CUT_OFF;
}

/** Wait, or until `signal` says that nobody does. */
function pause(time_ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, time_ms);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    });
  });
}

/** The conversation as the API wants it. */
export function wire(conversation) {
  const messages = conversation.path().map((m) => {
    const sent = { role: m.role, content: m.role === "assistant" ? parts(m).content : asked(m) };
    if (m.tool_calls?.length) sent.tool_calls = m.tool_calls;
    return sent;
  });
  const system = conversation.system.trim();
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}

/** What a user asked: text, or parts if there are images. */
function asked(m) {
  if (!m.images?.length) return m.content;
  const images = m.images.map((url) => ({ type: "image_url", image_url: { url } }));
  return m.content ? [...images, { type: "text", text: m.content }] : images;
}

function add(message, chunk) {
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const delta = choice.delta ?? {};
  if (delta.content) message.content += delta.content;
  if (delta.reasoning_content) message.reasoning += delta.reasoning_content;
  for (const part of delta.tool_calls ?? []) takeCall(message.tool_calls, part);
  if (choice.finish_reason) message.finish_reason = choice.finish_reason;
}

/** Calls come in parts, told apart by their index. */
function takeCall(calls, part) {
  const at = part.index ?? calls.length;
  calls[at] ??= { id: part.id, type: "function", function: { name: "", arguments: "" } };
  calls[at].id ??= part.id;
  calls[at].function.name += part.function?.name ?? "";
  calls[at].function.arguments += part.function?.arguments ?? "";
}
