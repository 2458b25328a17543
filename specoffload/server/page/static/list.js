// The list of conversations: opening, renaming and deleting them.

import { byId, el, iconButton } from "./dom.js";

export class List {
  #isRenaming = false;

  /** `acts`: running(conversation), open(conversation), rename(conversation, title),
   * remove(conversation), and ended(), after which the list is to be shown again. */
  constructor(acts) {
    this.acts = acts;
    this.root = byId("conversations");
  }

  /** Show the conversations. While one is being renamed, nothing changes. */
  show(conversations, current) {
    if (this.#isRenaming) return;
    this.root.replaceChildren(...conversations.map((one) => this.#row(one, one === current)));
  }

  #row(one, isCurrent) {
    const name = one.title || "Untitled";
    const running = this.acts.running(one) ? el("span", { class: "pulse", role: "img", "aria-label": "being answered" }) : null;
    const row = el(
      "li",
      { class: isCurrent ? "current" : "" },
      el("button", { type: "button", class: "conversation", title: name, "aria-current": isCurrent ? "true" : null, onclick: () => this.acts.open(one) }, running, el("span", {}, name)),
      iconButton("edit", `Rename “${name}”`, () => this.#rename(row, one), { class: "row-action" }),
      iconButton("bin", `Delete “${name}”`, (event) => this.#confirmRemove(event.currentTarget, one), { class: "row-action" }),
    );
    return row;
  }

  /** Turn a row into a field. Enter and leaving the field keep the name, Escape does not. */
  #rename(row, conversation) {
    const field = el("input", { class: "rename-field", "aria-label": "Name of the conversation", maxlength: "120" });
    field.value = conversation.title;
    this.#isRenaming = true;
    const end = (title) => {
      if (!this.#isRenaming) return; // removing a field with the focus blurs it
      this.#isRenaming = false;
      if (title && title !== conversation.title) this.acts.rename(conversation, title);
      this.acts.ended();
    };
    field.addEventListener("keydown", (event) => {
      if ((event.key !== "Enter" && event.key !== "Escape") || event.isComposing) return;
      event.stopPropagation();
      end(event.key === "Enter" ? field.value.trim() : "");
      this.root.querySelector(".current .conversation")?.focus();
    });
    field.addEventListener("blur", () => end(field.value.trim()));
    row.replaceChildren(field);
    field.select();
  }

  /** The first press asks, the second deletes. */
  #confirmRemove(button, conversation) {
    if (button.dataset.asked) return this.acts.remove(conversation);
    button.dataset.asked = "yes";
    button.replaceChildren("Delete?");
    button.addEventListener("blur", () => this.acts.ended(), { once: true });
  }
}
