// What a request says besides its messages: kept in this browser, empty where the server decides.

import { el, iconButton } from "./dom.js";
import { key, read, write } from "./server.js";

const KEPT = "specoffload.settings";

// name in the request, label, least, most, step, what it does
const FIELDS = [
  ["temperature", "Temperature", 0, 5, 0.05, "0 always takes the likeliest token; higher is more varied."],
  ["top_k", "Top k", 0, 1000, 1, "Only the k likeliest tokens; 0: all."],
  ["top_p", "Top p", 0, 1, 0.01, "Only the likeliest tokens that together have this probability."],
  ["min_p", "Min p", 0, 1, 0.01, "Only tokens with at least this share of the likeliest token's probability."],
  ["repeat_penalty", "Repeat penalty", 0, 2, 0.01, "Above 1, tokens of the last text are less likely."],
  ["presence_penalty", "Presence penalty", -2, 2, 0.05, "Makes tokens less likely if the text has them already."],
  ["frequency_penalty", "Frequency penalty", -2, 2, 0.05, "Makes tokens less likely the more often the text has them."],
  ["max_tokens", "Longest answer", 1, 1e6, 1, "In tokens."],
  ["seed", "Seed", 0, 2 ** 32 - 2, 1, "The same seed draws the same answer."],
];

const SHOWN = [["", "as it suits the model"], ["markdown", "as Markdown"], ["code", "as plain text"]];

export class Settings {
  constructor() {
    this.values = {};
    try {
      this.values = JSON.parse(read(KEPT) ?? "{}");
    } catch {
      // What was kept is not JSON: as if there were nothing.
    }
  }

  get system() {
    return this.values.system ?? "";
  }

  /** Answers are code of this language; "": they are Markdown; null: as the model is known to write. */
  get language() {
    return { markdown: "", code: "text" }[this.values.shown] ?? null;
  }

  /** The fields of a request that the user has chosen. */
  get sampling() {
    const chosen = FIELDS.map(([name]) => [name, this.values[name]]).filter(([, value]) => value !== undefined);
    return { ...Object.fromEntries(chosen), ...(this.values.more ?? {}) };
  }

  save(values) {
    this.values = values;
    write(KEPT, JSON.stringify(values));
  }
}

/** Fill the dialog and show it. `on` are: conversation, defaults, save(system), clear(), download(). */
export function openSettings(dialog, settings, on) {
  const system = el("textarea", { id: "set-system", rows: "4", placeholder: "None" });
  system.value = on.conversation.system;
  const inputs = FIELDS.map(([name, , least, most, step]) => {
    const given = on.defaults[name === "max_tokens" ? "n_predict" : name];
    const input = el("input", {
      id: `set-${name}`, name, type: "number", min: least, max: most, step, inputmode: "decimal",
      placeholder: placeholder(name, given), "aria-describedby": `about-${name}`,
    });
    input.value = settings.values[name] ?? "";
    return input;
  });
  const shown = el("select", { id: "set-shown" }, ...SHOWN.map(([value, label]) => el("option", { value }, label)));
  shown.value = settings.values.shown ?? "";
  const more = el("textarea", {
    id: "set-more", rows: "3", spellcheck: "false", class: "mono", placeholder: '{"grammar": "…"}',
    "aria-describedby": "about-more",
  });
  more.value = settings.values.more ? JSON.stringify(settings.values.more, null, 2) : "";
  more.addEventListener("input", () => more.setCustomValidity(""));
  const keyField = el("input", { id: "set-key", type: "password", autocomplete: "off", placeholder: "None needed" });
  keyField.value = key.get();

  const form = el(
    "form",
    { method: "dialog", onsubmit: (event) => submit(event) },
    el("div", { class: "dialog-head" }, el("h2", { id: "settings-title" }, "Settings"), iconButton("close", "Close", () => dialog.close())),
    el(
      "div",
      { class: "dialog-body" },
      field("set-system", "System prompt", system, "For this conversation and for new ones."),
      el("fieldset", {}, el("legend", {}, "Sampling"), el("p", { class: "about" }, "An empty field leaves the choice to the server."),
        el("div", { class: "grid" }, ...FIELDS.map(([name, label, , , , about], at) => field(`set-${name}`, label, inputs[at], about, `about-${name}`)))),
      field("set-more", "More fields of the request", more, "A JSON object: grammar, tools, response_format and the like.", "about-more"),
      field("set-shown", "Answers are shown", shown, "The copy button always takes the text that the model wrote."),
      field("set-key", "API key", keyField, "Stored in this browser, and sent only to this server."),
      el("fieldset", {}, el("legend", {}, "Conversations"), el("p", { class: "about" }, "They are stored in this browser and nowhere else."),
        el("div", { class: "row" },
          el("button", { type: "button", class: "button", onclick: on.download }, "Save all as JSON"),
          el("button", { type: "button", class: "button danger", onclick: (event) => confirmClear(event.currentTarget) }, "Delete all"))),
    ),
    el("div", { class: "dialog-foot" },
      el("button", { type: "button", class: "button", onclick: () => form.reset() || empty() }, "Reset"),
      el("button", { type: "submit", class: "button primary" }, "Save")),
  );

  function empty() {
    for (const input of [...inputs, more, shown]) input.value = "";
  }

  function confirmClear(button) {
    if (button.dataset.asked) {
      on.clear();
      dialog.close();
      return;
    }
    button.dataset.asked = "yes";
    button.textContent = "Really delete all";
  }

  function submit(event) {
    const values = { system: system.value };
    if (shown.value) values.shown = shown.value;
    for (const input of inputs) if (input.value !== "") values[input.name] = Number(input.value);
    try {
      if (more.value.trim()) values.more = asObject(more.value);
    } catch (error) {
      event.preventDefault();
      more.setCustomValidity(`This must be a JSON object: ${error.message}`);
      more.reportValidity();
      return;
    }
    settings.save(values);
    key.set(keyField.value.trim());
    on.save(system.value);
  }

  dialog.replaceChildren(form);
  dialog.showModal();
}

function placeholder(name, given) {
  if (given === undefined || (name === "max_tokens" && given === -1)) return "to the end";
  return name === "seed" && given === -1 ? "random" : String(Number(given.toFixed?.(4) ?? given));
}

function asObject(text) {
  const found = JSON.parse(text);
  if (typeof found !== "object" || found === null || Array.isArray(found)) throw new Error("it is none");
  return found;
}

function field(id, label, input, about, aboutId) {
  return el("div", { class: "field" }, el("label", { for: id }, label), input, el("p", { class: "about", id: aboutId }, about));
}

/** Ask for the key; `done` when one was given. */
export function askKey(dialog, done) {
  if (dialog.open) return;
  const message = key.get() ? "The server does not know the key below." : "The person who runs the server has the key: it was started with --api-key.";
  const input = el("input", { id: "key", type: "password", autocomplete: "off", required: true });
  input.value = key.get();
  dialog.replaceChildren(
    el(
      "form",
      {
        method: "dialog",
        onsubmit: () => {
          key.set(input.value.trim());
          done();
        },
      },
      el("div", { class: "dialog-head" }, el("h2", { id: "key-title" }, "This server asks for a key")),
      el("div", { class: "dialog-body" }, el("p", {}, message), field("key", "API key", input, "Stored in this browser, and sent only to this server.")),
      el("div", { class: "dialog-foot" }, el("button", { type: "submit", class: "button primary" }, "Use it")),
    ),
  );
  dialog.showModal();
}
