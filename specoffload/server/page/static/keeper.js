// Keeps conversations while they change, and tells other tabs of it.
//
// A question is kept at once: first in localStorage, which is written before anything else happens,
// then in the database. A growing answer is kept about once a second, and when the page is left.
// Tabs that show the same conversation hear of each write. What is newer wins, message by message.

import { Conversation } from "./conversations.js";
import { read, write } from "./server.js";

const EVERY_MS = 1000;
const UNSAVED = "specoffload.unsaved.";
const N_UNSAVED = 2; // the question and its answer

const tab = Math.random().toString(36).slice(2);

export class Keeper {
  #waiting = new Map(); // conversation id -> {conversation, timer}
  #channel = "BroadcastChannel" in globalThis ? new BroadcastChannel("specoffload") : null;

  /** `on`: changed(conversation) and removed(id) for what other tabs did, failed(error). */
  constructor(shelf, on) {
    this.shelf = shelf;
    this.on = on;
    this.#channel?.addEventListener("message", ({ data }) => void this.#heard(data));
    addEventListener("pagehide", () => this.#waiting.forEach(({ conversation }) => this.#note(conversation)));
  }

  /** Put what a page could not save before it was closed into the database. */
  async recover() {
    for (const name of unsavedNames()) {
      try {
        await this.shelf.put(new Conversation(JSON.parse(read(name))));
      } catch {
        // It is not JSON, or the database takes nothing: the rest is kept nevertheless.
      }
      write(name, "");
    }
  }

  /** Keep the conversation now. */
  async save(conversation) {
    this.#stop(conversation);
    if (conversation.isEmpty) return;
    this.#note(conversation);
    await this.#put(conversation);
  }

  /** Keep the conversation within a second. */
  saveSoon(conversation) {
    if (this.#waiting.has(conversation.id)) return;
    const timer = setTimeout(() => {
      this.#stop(conversation);
      void this.#put(conversation);
    }, EVERY_MS);
    this.#waiting.set(conversation.id, { conversation, timer });
  }

  async remove(conversation) {
    this.#stop(conversation);
    write(this.#name(conversation), "");
    await this.shelf.remove(conversation);
    this.#channel?.postMessage({ removed: conversation.id });
  }

  async #put(conversation) {
    try {
      await this.shelf.put(conversation);
    } catch (error) {
      return this.on.failed(error);
    }
    if (!this.#waiting.has(conversation.id)) write(this.#name(conversation), "");
    this.#channel?.postMessage({ changed: conversation.id });
  }

  #stop(conversation) {
    clearTimeout(this.#waiting.get(conversation.id)?.timer);
    this.#waiting.delete(conversation.id);
  }

  #name(conversation) {
    return `${UNSAVED}${tab}.${conversation.id}`;
  }

  /** The last messages, written before this returns. */
  #note(conversation) {
    if (!this.shelf.isLasting || conversation.isEmpty) return;
    const last = conversation.path().slice(-N_UNSAVED);
    const messages = Object.fromEntries(last.map((m) => [m.id, m]));
    write(this.#name(conversation), JSON.stringify({ ...conversation, messages }));
  }

  async #heard({ changed, removed }) {
    if (removed) return this.on.removed(removed);
    const found = await this.shelf.get(changed);
    if (found) this.on.changed(found);
  }
}

function unsavedNames() {
  try {
    return Object.keys(localStorage).filter((name) => name.startsWith(UNSAVED));
  } catch {
    return []; // storage is switched off
  }
}
