// How much of the context a conversation uses: counted by the server with its last answer.

import { el } from "./dom.js";

const NEARLY = 0.8; // share from which the figure is coloured

/** Number of tokens that the next message begins with, or null before the first answer. */
export function usedTokens(path) {
  const timings = path.findLast((m) => m.meter?.timings)?.meter.timings;
  return timings ? timings.prompt_n + (timings.cache_n ?? 0) + timings.predicted_n : null;
}

/** Show it in `root`; `model` and `props` are the server's answers, or null. */
export function showContext(root, path, model, props) {
  const n_used = usedTokens(path);
  const n_ctx = model?.meta?.n_ctx ?? props?.default_generation_settings?.n_ctx;
  root.hidden = n_used === null || !n_ctx;
  if (root.hidden) return;
  const share = Math.min(1, n_used / n_ctx);
  root.classList.toggle("nearly", share >= NEARLY);
  root.title = "Tokens of this conversation, of those that the model can read at once";
  const meter = el("progress", { max: "1", value: share.toFixed(3), "aria-hidden": "true" });
  root.replaceChildren(meter, `${n_used.toLocaleString("en")} of ${n_ctx.toLocaleString("en")} tokens of context`);
}
