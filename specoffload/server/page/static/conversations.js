// Conversations, kept in this browser (IndexedDB). A conversation is a tree: editing a message or
// asking again adds a branch beside the old one, so that nothing is lost.

const DATABASE = "specoffload";
const STORE = "conversations";

const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(9)), (b) => b.toString(36)).join("");

export class Conversation {
  constructor(kept = {}) {
    this.id = kept.id ?? newId();
    this.title = kept.title ?? "";
    this.system = kept.system ?? "";
    this.updated = kept.updated ?? Date.now();
    this.leaf = kept.leaf ?? null; // the last message of the branch that is shown
    this.messages = kept.messages ?? {}; // id -> {id, parent, role, content, ...}
  }

  get isEmpty() {
    return this.leaf === null;
  }

  /** Messages from the first to the leaf. */
  path(leaf = this.leaf) {
    const found = [];
    for (let m = this.messages[leaf]; m; m = this.messages[m.parent]) found.unshift(m);
    return found;
  }

  add(role, content, parent = this.leaf) {
    const message = { id: newId(), parent, role, content };
    this.messages[message.id] = message;
    this.leaf = message.id;
    this.updated = Date.now();
    if (!this.title && role === "user") this.title = titleOf(content);
    return message;
  }

  /** Messages at the same place, oldest first. */
  siblings(message) {
    return Object.values(this.messages).filter((m) => m.parent === message.parent && m.role === message.role);
  }

  /** Show the branch of `message`, down to what was written last in it. */
  show(message) {
    let leaf = message;
    for (;;) {
      const children = Object.values(this.messages).filter((m) => m.parent === leaf.id);
      if (!children.length) break;
      leaf = children[children.length - 1];
    }
    this.leaf = leaf.id;
  }

  remove(message) {
    delete this.messages[message.id];
    if (this.leaf === message.id) this.leaf = message.parent;
  }
}

function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > 60 ? `${line.slice(0, 59)}…` : line;
}

/** Where conversations are kept; in memory alone if the browser allows no more. */
export class Shelf {
  static async open() {
    const shelf = new Shelf();
    try {
      shelf.database = await new Promise((resolve, reject) => {
        const opening = indexedDB.open(DATABASE, 1);
        opening.onupgradeneeded = () => opening.result.createObjectStore(STORE, { keyPath: "id" });
        opening.onsuccess = () => resolve(opening.result);
        opening.onerror = () => reject(opening.error);
      });
    } catch {
      shelf.database = null;
    }
    return shelf;
  }

  get isLasting() {
    return this.database !== null;
  }

  /** All of them, the newest first. */
  async all() {
    const kept = this.isLasting ? await this.#do("readonly", (store) => store.getAll()) : [];
    return kept.map((one) => new Conversation(one)).sort((a, b) => b.updated - a.updated);
  }

  async put(conversation) {
    if (this.isLasting) await this.#do("readwrite", (store) => store.put({ ...conversation }));
  }

  async remove(conversation) {
    if (this.isLasting) await this.#do("readwrite", (store) => store.delete(conversation.id));
  }

  async clear() {
    if (this.isLasting) await this.#do("readwrite", (store) => store.clear());
  }

  #do(mode, work) {
    return new Promise((resolve, reject) => {
      const transaction = this.database.transaction(STORE, mode);
      const request = work(transaction.objectStore(STORE));
      transaction.oncomplete = () => resolve(request.result);
      transaction.onerror = transaction.onabort = () => reject(transaction.error);
    });
  }
}
