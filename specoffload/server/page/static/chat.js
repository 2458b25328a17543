// Asks the server, and writes what comes into the conversation.

import { Meter } from "./meter.js";
import { parts } from "./message.js";
import { streamChat } from "./server.js";

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
    this.#running.get(conversation.id)?.controller.abort();
  }

  /** Write an answer behind the conversation's leaf; `language`: the model writes only that. */
  async write(conversation, sampling, language = "") {
    const body = { ...sampling, messages: wire(conversation), timings_per_token: true };
    const message = conversation.add("assistant", "");
    if (language) message.language = language;
    const meter = new Meter();
    message.meter = meter;
    const controller = new AbortController();
    this.#running.set(conversation.id, { message, controller });
    this.on.change(conversation, message, true);
    try {
      for await (const chunk of streamChat(body, controller.signal)) {
        meter.chunk(chunk, performance.now() / 1e3);
        take(message, chunk);
        this.on.change(conversation, message, true);
      }
    } catch (error) {
      if (error.name === "AbortError") message.stopped = true;
      else {
        message.error = error.message;
        message.status = error.status;
      }
    }
    message.meter = { samples: meter.samples, timings: meter.timings, usage: meter.usage };
    this.#running.delete(conversation.id);
    this.on.change(conversation, message, false);
  }
}

/** The conversation as the API wants it. */
export function wire(conversation) {
  const messages = conversation.path().map((m) => {
    const sent = { role: m.role, content: m.role === "assistant" ? parts(m).content : m.content };
    if (m.tool_calls?.length) sent.tool_calls = m.tool_calls;
    return sent;
  });
  const system = conversation.system.trim();
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}

function take(message, chunk) {
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const delta = choice.delta ?? {};
  if (delta.content) message.content += delta.content;
  if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
  for (const part of delta.tool_calls ?? []) takeCall((message.tool_calls ??= []), part);
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
