// Which model answers, if the server has several, and what is said of its state.

import { el } from "./dom.js";
import { getJson, postJson, read, write } from "./server.js";

const CHOSEN = "specoffload.model";

/** "loaded", "loading", "sleeping", "unloaded" or "failed"; a server's only model is "loaded". */
export function stateOf(model) {
  if (!model?.status) return "loaded";
  return model.status.failed ? "failed" : model.status.value;
}

/** An entry of the list of models. */
export function optionWords(model) {
  const state = stateOf(model);
  return state === "loaded" ? model.id : `${model.id} (${state})`;
}

/** Why a model failed, as one sentence; "" if it is not told. */
function reasonOf(model) {
  const reason = model.status?.message ?? "";
  return !reason || /[.!?]$/.test(reason) ? reason : `${reason}.`;
}

export function failedWords(model, { withReason = true } = {}) {
  const reason = withReason ? reasonOf(model) : "";
  return `${model.id} could not be loaded${reason ? `: ${reason}` : "."}`;
}

/** What the page says of a model before its first answer. `loads`: a message loads it. `isAwaited`: it was asked for. */
export function stateWords(model, { loads = true, isAwaited = false } = {}) {
  const name = model?.id ?? "The model";
  if (isAwaited) return `${name} is being loaded as soon as there is room for it. A message waits until it is ready.`;
  const next = loads ? "Your first message loads it, and waits for it." : "This server loads a model only when it is told to.";
  switch (stateOf(model)) {
    case "failed":
      return `${failedWords(model)} ${loads ? "A message tries again." : next}`;
    case "loading":
      return `${name} is being loaded. A message waits until it is ready.`;
    case "sleeping":
      return `${name} sleeps, because nobody used it. Your first message wakes it.`;
    case "unloaded":
      return `${name} is not loaded. ${next}`;
    default:
      return `${name} is ready.`;
  }
}

/** The model to go back to after `failed`: the last that worked, or one that is open. Null: none. */
export function afterFailure(models, failed, lastThatWorked) {
  const others = models.filter((one) => one.id !== failed && stateOf(one) !== "failed");
  return others.find((one) => one.id === lastThatWorked) ?? others.find((one) => stateOf(one) === "loaded") ?? null;
}

/** The choice of a model. `select` is shown if there are several. */
export class Models {
  #select;
  #several = false;
  #id = null;
  #works = null; // the last chosen model that was open
  #tried = null; // a model whose start this page has asked for
  #isReasonTold = false; // a message says already why that start failed

  /** `on.chosen()` after a choice, `on.moved(words)` when the page itself chooses another model. */
  constructor(select, on) {
    this.#select = select;
    this.on = on;
    select.addEventListener("change", () => {
      this.#choose(select.value);
      on.chosen();
    });
  }

  get areSeveral() {
    return this.#several;
  }

  /** Fields of a request that choose the model. */
  get fields() {
    return this.#several && this.#id ? { model: this.#id } : {};
  }

  /** True while the chosen model, for which this page has asked, is neither open nor has failed. */
  get isAwaited() {
    return this.#id !== null && this.#id === this.#tried;
  }

  /** If this model has failed when the server is asked next, the choice goes back to one that works. */
  tried(id, { isReasonTold = false } = {}) {
    this.#tried = id;
    this.#isReasonTold = isReasonTold;
  }

  /** Have the chosen model loaded. */
  async load() {
    await postJson("models/load", { model: this.#id });
    this.tried(this.#id);
  }

  /** Ask the server: `{model, props, loads}`. A model that is not loaded has no props (null). */
  async read() {
    const { data } = await getJson("v1/models");
    this.#several = data.some((one) => one.status);
    if (!this.#several) return { model: data[0], props: await getJson("props"), loads: true };
    let model = this.#chosen(data);
    const isFailure = stateOf(model) === "failed" && this.#tried === model.id;
    const other = isFailure ? afterFailure(data, model.id, this.#works) : null;
    if (other) {
      this.on.moved(`${failedWords(model, { withReason: !this.#isReasonTold })} Messages go to ${other.id} again.`);
      model = other;
      this.#choose(other.id);
    }
    this.#id = model.id;
    if (stateOf(model) === "loaded") this.#works = model.id;
    if (isFailure || this.#works === this.#tried) this.#tried = null;
    this.#show(data);
    const own = await getJson("props"); // asks for the key, if the server has one
    const props = stateOf(model) === "loaded" ? await this.#props(model.id) : null;
    return { model, props, loads: own.models_autoload !== false };
  }

  /** A model's settings, or null if it was closed in the meantime. This question opens none. */
  async #props(id) {
    try {
      return await getJson(`props?model=${encodeURIComponent(id)}&autoload=false`);
    } catch (error) {
      if (error.status === 400 || error.status === 503) return null;
      throw error;
    }
  }

  #choose(id) {
    this.#id = id;
    write(CHOSEN, id);
  }

  #chosen(data) {
    const found = data.find((one) => one.id === (this.#id ?? read(CHOSEN)));
    if (found) return found;
    const other = data.find((one) => stateOf(one) === "loaded") ?? data[0];
    if (this.#id) this.on.moved(`${this.#id} is not served any more. Messages go to ${other.id}.`);
    return other;
  }

  /** Entries are changed in place, so that an open list stays open. */
  #show(data) {
    const select = this.#select;
    select.hidden = false;
    const known = new Map([...select.options].map((option) => [option.value, option]));
    for (const one of data) {
      const option = known.get(one.id) ?? el("option", { value: one.id });
      const words = optionWords(one);
      if (option.textContent !== words) option.textContent = words;
      if (!known.delete(one.id)) select.append(option);
    }
    for (const gone of known.values()) gone.remove();
    if (select.value !== this.#id) select.value = this.#id;
  }
}
