// What an empty conversation shows: the model, and ideas to begin with.

import { el } from "./dom.js";

const IDEAS = ["Explain speculative decoding to a ten-year-old.", "Write a haiku about memory bandwidth.", "What is the difference between RAM and VRAM?"];
// Lines like those that the pair was trained on. It continues others with nonsense.
const DEMO_IDEAS = ["class StreamWriter(Codec,codecs.StreamWriter):", "def __init__(self, name):", "def test_read(self):"];

/** Elements for a model whose state `words` say. `isDemo`: it only continues code. `choose` gets the idea that is clicked.
 * `load` has the model loaded; null: there is nothing to load. */
export function welcomeParts(isDemo, words, choose, load = null) {
  return [
    el("h2", {}, isDemo ? "The demo pair" : "What would you like to know?"),
    isDemo
      ? el("p", {}, "A small model, trained on Python source, that comes with the program. It continues code and answers no questions. ", el("code", {}, "specoffload serve -hf USER/REPO"), " fetches a model to talk to.")
      : el("p", {}, `${words} What you write goes only to this server.`),
    ...(load ? [el("button", { type: "button", class: "button load", onclick: load }, "Load it now")] : []),
    el("div", { class: "ideas" }, ...(isDemo ? DEMO_IDEAS : IDEAS).map((idea) => el("button", { type: "button", class: isDemo ? "idea code-like" : "idea", onclick: () => choose(idea) }, idea))),
  ];
}
