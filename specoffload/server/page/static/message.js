// One message as it is seen.

import { copy, el, icon, iconButton } from "./dom.js";
import { picture } from "./images.js";
import { Markdown } from "./markdown.js";
import { Meter, MeterView } from "./meter.js";

/** `acts` are the thread's: edit(message, text), retry(message), show(message), language(), waitingFor(message). */
export class MessageView {
  constructor(message, conversation, acts) {
    this.message = message;
    this.conversation = conversation;
    this.acts = acts;
    const isUser = message.role === "user";
    this.body = el("div", { class: isUser ? "bubble" : "prose" });
    this.actions = el("div", { class: "actions" });
    this.root = el(
      "article",
      { class: `message ${message.role}`, "aria-label": isUser ? "You" : "The model", dataset: { id: message.id } },
      ...(isUser ? [this.body] : this.#answerParts()),
      this.actions,
    );
    this.update();
  }

  #answerParts() {
    this.markdown = new Markdown(this.body);
    this.waitingFor = el("span", {}, "reading the prompt");
    this.waiting = el("div", { class: "waiting", role: "status" }, el("span", { class: "pulse" }), this.waitingFor);
    this.thoughts = el("div", { class: "thoughts" });
    this.thoughtsTitle = el("summary", {}, "Reasoning");
    this.reasoning = el("details", { class: "reasoning", hidden: true }, this.thoughtsTitle, this.thoughts);
    this.reasoning.addEventListener("toggle", () => (this.wasToggled = this.reasoning.open !== this.isThinking));
    this.tools = el("div", { class: "tools" });
    this.error = el("div", { class: "error", role: "alert", hidden: true });
    this.meter = new MeterView();
    return [this.waiting, this.reasoning, this.body, this.tools, this.error, this.meter.root];
  }

  /** Show the message as it is now; `growing` while more of it comes. */
  update({ growing = false } = {}) {
    const m = this.message;
    if (m.role === "user") this.body.replaceChildren(...(m.images ?? []).map(picture), m.content);
    else this.#updateAnswer(growing);
    this.root.setAttribute("aria-busy", String(growing));
    this.#updateActions(growing);
  }

  #updateAnswer(growing) {
    const m = this.message;
    const { reasoning, content, thinking } = parts(m);
    const hasText = Boolean(content || reasoning || m.tool_calls?.length);
    this.waiting.hidden = !growing || hasText;
    if (!this.waiting.hidden) this.#say(this.acts.waitingFor(m));
    this.reasoning.hidden = !reasoning;
    this.thoughts.textContent = reasoning;
    this.isThinking = growing && thinking;
    this.thoughtsTitle.textContent = this.isThinking ? "Reasoning …" : "Reasoning";
    if (!this.wasToggled) this.reasoning.open = this.isThinking;
    this.markdown.show(this.#asCode(content), { growing });
    this.body.classList.toggle("growing", growing && Boolean(content));
    this.#updateTools(m.tool_calls ?? []);
    const said = growing ? "" : (m.error ?? remark(m));
    this.error.hidden = !said;
    this.error.classList.toggle("mild", !m.error);
    this.error.textContent = said;
    this.meter.show(m.meter instanceof Meter ? m.meter : new Meter(m.meter), { growing, name: m.model });
  }

  /** The element is a live region, so it changes only with its words. */
  #say(words) {
    if (this.waitingFor.textContent !== words) this.waitingFor.textContent = words;
  }

  /** A model that writes only code fences none. */
  #asCode(content) {
    const language = this.acts.language() ?? this.message.language;
    if (!language || !content) return content;
    return `~~~~~~${language}\n${content}${content.endsWith("\n") ? "" : "\n"}~~~~~~`;
  }

  #updateTools(calls) {
    const shown = JSON.stringify(calls);
    if (shown === this.shownCalls) return;
    this.shownCalls = shown;
    this.tools.replaceChildren(
      ...calls.map((call) =>
        el(
          "details",
          { class: "tool", open: true },
          el("summary", {}, icon("tool"), el("span", {}, "Tool call: "), el("code", {}, call.function.name)),
          el("pre", { tabindex: "0" }, pretty(call.function.arguments)),
        ),
      ),
    );
  }

  #updateActions(growing) {
    const siblings = this.conversation.siblings(this.message);
    const state = `${growing} ${siblings.length} ${siblings.indexOf(this.message)}`;
    if (state === this.actionsState) return;
    this.actionsState = state;
    const m = this.message;
    const copyButton = iconButton("copy", "Copy", () => copy(parts(m).content, copyButton));
    this.actions.replaceChildren(
      ...(growing ? [] : [copyButton]),
      ...(m.role === "user" ? [iconButton("edit", "Edit", () => this.edit())] : []),
      ...(m.role === "assistant" && !growing ? [iconButton("retry", "Ask again", () => this.acts.retry(m))] : []),
      ...(siblings.length > 1 ? [this.#switcher(siblings)] : []),
    );
  }

  /** Steps between the versions of a message. */
  #switcher(siblings) {
    const at = siblings.indexOf(this.message);
    const step = (name, label, to) =>
      iconButton(name, label, () => this.acts.show(siblings[to]), { disabled: !siblings[to] });
    return el(
      "span",
      { class: "versions" },
      step("left", "Previous version", at - 1),
      el("span", { "aria-label": `Version ${at + 1} of ${siblings.length}` }, `${at + 1} / ${siblings.length}`),
      step("right", "Next version", at + 1),
    );
  }

  /** Turn the message into a field; sending it opens a branch beside it. */
  edit() {
    const field = el("textarea", { class: "edit-field", "aria-label": "Edit the message", rows: "3" });
    field.value = this.message.content;
    const cancel = () => {
      form.replaceWith(this.body);
      this.actions.hidden = false;
    };
    const form = el(
      "form",
      {
        class: "edit-form",
        onsubmit: (event) => {
          event.preventDefault();
          if (!field.value.trim()) return;
          cancel();
          this.acts.edit(this.message, field.value);
        },
        onkeydown: (event) => {
          if (event.key === "Escape") {
            event.stopPropagation();
            cancel();
            this.actions.querySelector("[aria-label=Edit]")?.focus();
          } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
            event.preventDefault();
            form.requestSubmit();
          }
        },
      },
      field,
      el(
        "div",
        { class: "edit-actions" },
        el("button", { type: "button", class: "button", onclick: cancel }, "Cancel"),
        el("button", { type: "submit", class: "button primary" }, "Send"),
      ),
    );
    this.body.replaceWith(form);
    this.actions.hidden = true;
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  }
}

/** What is said below an answer that did not end by itself. */
function remark(message) {
  if (message.stream) return "Another tab of this browser is writing this answer.";
  if (message.stopped) return "Stopped.";
  if (message.cutOff) return message.cutOff;
  return message.finish_reason === "length" ? "The answer ended at its length limit." : "";
}

/** An answer's reasoning and text, also where the server leaves <think> in the text. */
export function parts(message) {
  const content = message.content ?? "";
  if (message.reasoning) return { reasoning: message.reasoning, content, thinking: !content };
  const tagged = content.match(/^\s*<think>([\s\S]*?)(<\/think>([\s\S]*)|$)/);
  if (!tagged) return { reasoning: "", content, thinking: false };
  return { reasoning: tagged[1].trim(), content: (tagged[3] ?? "").trimStart(), thinking: !tagged[2] };
}

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // not whole yet
  }
}
