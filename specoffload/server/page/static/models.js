// Which model answers, if the server has several.

import { el } from "./dom.js";
import { getJson, read, write } from "./server.js";

const CHOSEN = "specoffload.model";

/** The choice of a model. `select` is shown if there are several; `changed` is called after a choice. */
export class Models {
  #select;
  #several = false;
  #id = null;

  constructor(select, changed) {
    this.#select = select;
    select.addEventListener("change", () => {
      write(CHOSEN, select.value);
      changed();
    });
  }

  /** Fields of a request that choose the model. */
  get fields() {
    return this.#several && this.#id ? { model: this.#id } : {};
  }

  /** Ask the server: `{model, props}`. A model that is not loaded has no props (null). */
  async read() {
    const { data } = await getJson("v1/models");
    this.#several = data.some((one) => one.status);
    if (!this.#several) return { model: data[0], props: await getJson("props") };
    const isLoaded = (one) => one.status.value === "loaded";
    const model = data.find((one) => one.id === read(CHOSEN)) ?? data.find(isLoaded) ?? data[0];
    this.#id = model.id;
    this.#show(data);
    await getJson("props"); // asks for the key, if the server has one
    const props = isLoaded(model) ? await getJson(`props?model=${encodeURIComponent(model.id)}`) : null;
    return { model, props };
  }

  #show(data) {
    const shown = data.map((one) => [one.id, one.status.value === "loaded" ? one.id : `${one.id} (${one.status.value})`]);
    const now = JSON.stringify([this.#id, shown]);
    this.#select.hidden = false;
    if (this.#select.dataset.shown === now || document.activeElement === this.#select) return;
    this.#select.dataset.shown = now;
    this.#select.replaceChildren(...shown.map(([value, words]) => el("option", { value }, words)));
    this.#select.value = this.#id;
  }
}
