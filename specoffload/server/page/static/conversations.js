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

  /** Add a message; `images` are data URLs. */
  add(role, content, parent = this.leaf, images = []) {
    const message = { id: newId(), parent, role, content, changed: Date.now() };
    if (images?.length) message.images = images;
    this.messages[message.id] = message;
    this.leaf = message.id;
    this.updated = Date.now();
    if (!this.title && role === "user") this.title = titleOf(content) || "Image";
    return message;
  }

  /** Messages at the same place, oldest first. */
  siblings(message) {
    return Object.values(this.messages).filter((m) => m.parent === message.parent && m.role === message.role);
  }

  /** Take what is newer in another copy; `running` is the message that is being written here. */
  absorb(other, { running = null, keepsLeaf = running !== null } = {}) {
    for (const theirs of Object.values(other.messages)) {
      if (theirs.id === running?.id) continue;
      const ours = this.messages[theirs.id];
      if (!ours) this.messages[theirs.id] = theirs;
      else if ((theirs.changed ?? 0) > (ours.changed ?? 0)) Object.assign(ours, theirs);
    }
    if (other.updated <= this.updated) return;
    Object.assign(this, { title: other.title, system: other.system, updated: other.updated });
    if (!keepsLeaf) this.leaf = other.leaf;
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

  rename(title) {
    this.title = title;
    this.updated = Date.now();
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

  async get(id) {
    const kept = this.isLasting ? await this.#do("readonly", (store) => store.get(id)) : null;
    return kept ? new Conversation(kept) : null;
  }

  /** Keep the conversation. What another tab has added to it since stays, and is added here too. */
  async put(conversation) {
    if (!this.isLasting) return;
    await this.#do("readwrite", (store) => {
      const reading = store.get(conversation.id);
      reading.onsuccess = () => {
        if (reading.result) conversation.absorb(reading.result, { keepsLeaf: true });
        store.put({ ...conversation });
      };
      return reading;
    });
  }

  async remove(conversation) {
    if (this.isLasting) await this.#do("readwrite", (store) => store.delete(conversation.id));
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
