// The conversation that is shown: its messages, and staying at its end while an answer grows.

import { byId } from "./dom.js";
import { MessageView } from "./message.js";

const NEAR_END_PX = 60;

export class Thread {
  #views = new Map(); // message id -> view
  #due = null; // of the next drawing of the growing message
  #drawn_ms = 0;

  constructor(acts) {
    this.acts = acts;
    this.root = byId("thread");
    this.scroller = byId("scroller");
    this.toEnd = byId("to-end");
    this.follows = true;
    this.scroller.addEventListener("scroll", () => this.#scrolled(), { passive: true });
    this.toEnd.addEventListener("click", () => this.end());
    new ResizeObserver(() => this.#stay()).observe(this.root);
  }

  /** Show a conversation's branch; `growing` is the message that is being written. */
  show(conversation, growing) {
    if (conversation !== this.conversation) this.#views.clear();
    this.conversation = conversation;
    const path = conversation.path();
    for (const id of this.#views.keys()) if (!path.some((m) => m.id === id)) this.#views.delete(id);
    const views = path.map((message) => {
      const known = this.#views.get(message.id);
      const view = known ?? new MessageView(message, conversation, this.acts);
      this.#views.set(message.id, view);
      if (known || message === growing) view.update({ growing: message === growing });
      return view.root;
    });
    const isSame = views.length === this.root.childElementCount && views.every((view, at) => view === this.root.children[at]);
    if (!isSame) this.root.replaceChildren(...views); // which takes the focus from a field in them
  }

  /** Draw the growing message soon, as often as its length allows. */
  grow(message) {
    if (this.#due !== null) return;
    this.#due = requestAnimationFrame((now_ms) => {
      this.#due = null;
      const view = this.#views.get(message.id);
      if (!view || this.acts.running() !== message) return;
      if (now_ms - this.#drawn_ms < this.wait_ms) return this.grow(message);
      view.update({ growing: true });
      const took_ms = performance.now() - now_ms;
      this.wait_ms = Math.min(400, 6 * took_ms); // a sixth of the time at most
      this.#drawn_ms = now_ms;
    });
  }

  view(message) {
    return this.#views.get(message.id);
  }

  /** Go to the end, and stay there. */
  end() {
    this.follows = true;
    this.scroller.scrollTop = this.scroller.scrollHeight;
    this.toEnd.hidden = true;
  }

  #stay() {
    if (this.follows) this.scroller.scrollTop = this.scroller.scrollHeight;
    else this.#scrolled();
  }

  #scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    this.follows = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
    this.toEnd.hidden = this.follows;
  }
}
