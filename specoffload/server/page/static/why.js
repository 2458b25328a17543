// What the server chose when it started, why, and what that meant for the last answer: in words.

import { el } from "./dom.js";
import { number, size } from "./meter.js";

const GATHERS = new Set(["device", "streamed"]);

const count = (n) => {
  if (n >= 1e9) return `${number(n / 1e9)} billion`;
  return n >= 1e6 ? `${number(n / 1e6)} million` : n.toLocaleString("en");
};

/** A number with its noun, such as "1 token", "2 tokens" or "1.25 tokens". */
const plural = (n, noun) => `${Number.isInteger(n) ? n : number(n)} ${noun}${n === 1 ? "" : "s"}`;

/** `props` and `model` are the server's answers, `meter` the last answer's, if there is one. */
export function showWhy(root, props, model, meter) {
  const spec = meter?.timings?.speculation;
  root.replaceChildren(
    section("The model", facts(props, model)),
    section("What was chosen, and why", notes(props.notes ?? [])),
    ...(spec ? [section("The last answer", lastAnswer(meter.timings, spec))] : []),
    section("The server", table([
      ["Requests at once", props.total_slots],
      ["Running, waiting", `${props.requests_processing ?? 0}, ${props.requests_deferred ?? 0}`],
      ["Restarts of the engine", props.engine_restarts ?? 0],
    ])),
  );
}

function section(title, ...parts) {
  return el("section", {}, el("h2", {}, title), ...parts);
}

function facts(props, model) {
  const meta = model?.meta ?? {};
  const n_ctx = meta.n_ctx ?? props.default_generation_settings?.n_ctx;
  return table([
    ["Name", model?.id ?? props.model_alias],
    ["Architecture", meta.architecture],
    ["Parameters", meta.n_params && count(meta.n_params)],
    ["Size", meta.size && size(meta.size)],
    ["Context", n_ctx && `${n_ctx.toLocaleString("en")} tokens`],
  ]);
}

function table(rows) {
  const shown = rows.filter(([, value]) => value !== undefined && value !== null);
  return el("dl", { class: "facts" }, ...shown.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))]));
}

/** Lines like "draft: tiny.gguf, 1.4M parameters", gathered under what they are about. */
function notes(lines) {
  const groups = new Map();
  let before = "";
  for (const line of lines) {
    // "device sim: ..." is about the device; a line about none belongs to the weights or device before.
    const found = line.match(/^(device)(?: )(.+)$/s) ?? line.match(/^([a-z]+(?: [a-z]+)?): (.+)$/s);
    const topic = found ? found[1] : GATHERS.has(before) ? before : "";
    groups.set(topic, [...(groups.get(topic) ?? []), found ? found[2] : line]);
    before = topic;
  }
  const rest = groups.get("") ?? [];
  groups.delete("");
  const sentence = (text) => el("p", {}, text);
  const note = (title, words) => el("div", { class: "note" }, el("h3", {}, title), el("div", {}, ...words.map(sentence)));
  return el(
    "div",
    { class: "notes" },
    ...[...groups].map(([topic, words]) => note(topic[0].toUpperCase() + topic.slice(1), words)),
    ...(rest.length ? [note("Also", rest)] : []),
  );
}

function lastAnswer(timings, spec) {
  const rounds = spec.rounds_per_draft_length ?? {};
  const time = [["drafting", spec.draft_ms], ["verifying", spec.verify_ms], ["taking back", spec.rollback_ms]];
  return el(
    "div",
    {},
    el("p", {}, `${plural(timings.predicted_n, "token")} in ${plural(spec.rounds, "round")}, ${plural(spec.tokens_per_round, "token")} a round. ` +
      `${timings.draft_n_accepted} of ${plural(timings.draft_n, "drafted token")} kept (${Math.round(100 * spec.acceptance_rate)} %).`),
    el("div", { class: "bars-row" },
      bars("Draft lengths, in rounds", Object.entries(rounds).map(([n, r]) => [n, r, `${plural(r, "round")} drafted ${plural(Number(n), "token")}`])),
      bars("Kept, by place in the draft", spec.acceptance_per_position.map((share, at) => [at + 1, share, `place ${at + 1}: ${Math.round(100 * share)} % kept`]), 1),
      bars("Milliseconds", time.map(([name, ms]) => [name, ms, `${name}: ${number(ms)} ms`]))),
    ...(spec.reasons?.length ? [el("h3", {}, "Why those lengths"), el("ul", {}, ...spec.reasons.slice(0, 6).map(reason))] : []),
  );
}

/** A kind of reason with the numbers of its last round, which stand for those of the others. */
function reason({ reason: why, kind, rounds }) {
  return el("li", {}, `${why || "nothing to decide"} (${plural(rounds, "round")}${why === kind ? "" : "; the numbers are the last round's"})`);
}

/** Bars with their names below; `most` is the height of a full one. */
function bars(title, entries, most = Math.max(...entries.map(([, value]) => value), 1e-9)) {
  const columns = entries.slice(0, 24).map(([name, value, words]) => {
    const bar = el("div", { class: "bar" });
    bar.style.height = `${Math.max(2, (100 * value) / most)}%`;
    return el("li", { title: words }, el("span", { class: "unseen" }, words), el("div", { class: "bar-room", "aria-hidden": "true" }, bar), el("span", { class: "bar-name", "aria-hidden": "true" }, String(name)));
  });
  return el("figure", { class: "bars" }, el("figcaption", {}, title), el("ul", {}, ...columns));
}
