// An answer's speed, acceptance rate and link use over time: counted from the chunks of its stream,
// drawn as small plots.

import { el, svg } from "./dom.js";

const LEAST_STEP_S = 0.05;
const MOST_SAMPLES = 160;
const MOST_POINTS = 40; // of a plot: its points are means over several samples
const WIDTH = 96;
const HEIGHT = 26;

/** Counters as they grew: `samples` are [seconds, tokens, drafted, accepted, bytes]. */
export class Meter {
  constructor(kept = {}) {
    this.samples = kept.samples ?? [];
    this.timings = kept.timings ?? null; // the server's, at the end
    this.usage = kept.usage ?? null;
    this.step_s = kept.step_s ?? LEAST_STEP_S;
    this.n_chunks = 0;
  }

  /** Count a chunk that came at `now_s`. Where the server sends no timings, a chunk is a token. */
  chunk(chunk, now_s) {
    if (chunk.usage) this.usage = chunk.usage;
    const delta = chunk.choices?.[0]?.delta;
    const hasText = Boolean(delta?.content || delta?.reasoning_content || delta?.tool_calls);
    const t = chunk.timings;
    if (!hasText && !t) return; // a sign of life, which takes time and has no tokens
    if (hasText) this.n_chunks += 1;
    if (t) this.timings = t;
    this.start_s ??= now_s;
    const at_s = t ? t.predicted_ms / 1e3 : now_s - this.start_s;
    const n = t ? t.predicted_n : this.n_chunks;
    this.#sample([at_s, n, t?.draft_n ?? 0, t?.draft_n_accepted ?? 0, t?.streamed_bytes ?? 0]);
  }

  #sample(sample) {
    const last = this.samples[this.samples.length - 1];
    if (last && sample[0] - last[0] < this.step_s) return;
    this.samples.push(sample);
    if (this.samples.length > MOST_SAMPLES) {
      this.samples = this.samples.filter((_, at) => at % 2 === 0);
      this.step_s *= 2;
    }
  }

  /** Tokens of the answer. An answer of less than `step_s` may have no sample after its first chunk. */
  get n_tokens() {
    return this.timings?.predicted_n ?? this.usage?.completion_tokens ?? this.samples.at(-1)?.[1] ?? 0;
  }

  get speed() {
    return this.#rates((a, b) => (b[1] - a[1]) / (b[0] - a[0]));
  }

  /** Share of drafted tokens that were kept; steps without a draft are left out. */
  get acceptance() {
    return this.#rates((a, b) => (b[2] > a[2] ? (b[3] - a[3]) / (b[2] - a[2]) : null));
  }

  /** Streamed bytes per second. */
  get link() {
    return this.#rates((a, b) => (b[4] - a[4]) / (b[0] - a[0]));
  }

  #rates(rate) {
    const found = [];
    const step = Math.ceil(this.samples.length / MOST_POINTS);
    for (let at = step; at < this.samples.length; at += step) {
      const value = rate(this.samples[at - step], this.samples[at]);
      if (value !== null && Number.isFinite(value)) found.push(value);
    }
    return found;
  }
}

/** The plots of a meter, kept up to date by `show`. `name`: the model, if the server has several. */
export class MeterView {
  constructor() {
    this.plots = {
      speed: new Plot("speed", "Speed"),
      acceptance: new Plot("acceptance", "Accepted drafts"),
      link: new Plot("link", "Link"),
    };
    this.summary = el("p", { class: "meter-summary" });
    const plots = el("div", { class: "plots" }, ...Object.values(this.plots).map((plot) => plot.root));
    this.root = el("div", { class: "meter", hidden: true }, plots, this.summary);
  }

  show(meter, { growing = false, name } = {}) {
    const t = meter.timings;
    this.root.hidden = meter.n_tokens === 0;
    if (this.root.hidden) return;
    const last = meter.samples[meter.samples.length - 1];
    const recent = (values) => values.slice(-4).reduce((sum, x) => sum + x, 0) / Math.min(4, values.length);
    const mean_speed = last[0] > 0 ? last[1] / last[0] : 0;
    const speed = growing && meter.speed.length ? recent(meter.speed) : (t?.predicted_per_second ?? mean_speed);
    this.plots.speed.show(`${number(speed)} tokens/s`, meter.speed);
    this.plots.acceptance.show(t?.draft_n ? `${Math.round((100 * t.draft_n_accepted) / t.draft_n)} %` : null, meter.acceptance, 1);
    const bytes = t?.streamed_bytes ?? 0;
    this.plots.link.show(bytes && t.predicted_ms ? `${size(bytes / (t.predicted_ms / 1e3))}/s` : null, meter.link);
    const parts = growing ? [] : [name, summary(meter, last)];
    this.summary.textContent = parts.filter(Boolean).join(" · ");
  }
}

function summary(meter, last) {
  const t = meter.timings;
  const n = meter.n_tokens;
  const parts = [`${n} ${n === 1 ? "token" : "tokens"} in ${seconds(t ? t.predicted_ms / 1e3 : last[0])}`];
  if (t) {
    const where = t.cache_disk_n ? "read from the disk" : "from the cache";
    const kept = t.cache_n ? `, ${t.cache_n} of them ${where}` : "";
    parts.push(`prompt: ${t.prompt_n + (t.cache_n ?? 0)} tokens in ${seconds(t.prompt_ms / 1e3)}${kept}`);
    if (t.waited_ms >= 100) parts.unshift(`waited ${seconds(t.waited_ms / 1e3)}`);
    if (t.speculation) parts.push(`${number(t.speculation.tokens_per_round)} tokens per step`);
    if (t.routing) parts.push(routed(t.routing));
  }
  return parts.join(" · ");
}

/** What --route-cached changed, in the words of `specoffload run`. */
function routed({ kept, hits, hits_without }) {
  const percent = (share) => `${(100 * share).toFixed(1)} %`;
  return `routing kept ${percent(kept)} of the router's choices: ${percent(hits)} were in slots, ${percent(hits_without)} without`;
}

/** A number that changes, with its course behind it. */
class Plot {
  constructor(kind, label) {
    this.label = label;
    this.value = el("span", { class: "plot-value" });
    this.area = svg("path", { class: "plot-area" });
    this.line = svg("path", { class: "plot-line" });
    const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "plot-picture", preserveAspectRatio: "none", "aria-hidden": "true" }, this.area, this.line);
    this.root = el("div", { class: `plot ${kind}` }, el("span", { class: "plot-label" }, label), this.value, picture);
  }

  /** Without a `value` there is nothing to plot, and the plot is not there. */
  show(value, values, most = Math.max(...values, 0)) {
    this.root.hidden = value === null;
    if (value === null) return;
    this.value.textContent = value;
    const line = path(values, most);
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", line && `${line} L${WIDTH} ${HEIGHT} L0 ${HEIGHT} Z`);
  }
}

function path(values, most) {
  if (values.length < 2 || most <= 0) return "";
  const points = values.map((value, at) => {
    const x = (at / (values.length - 1)) * WIDTH;
    const y = HEIGHT - 1 - Math.min(1, Math.max(0, value / most)) * (HEIGHT - 3);
    return `${x.toFixed(1)} ${y.toFixed(1)}`;
  });
  return `M${points.join(" L")}`;
}

export function number(x) {
  if (x >= 100) return Math.round(x).toString();
  return x >= 10 ? x.toFixed(1) : x.toFixed(2);
}

export const seconds = (s) => (s < 1 ? `${Math.round(1e3 * s)} ms` : `${number(s)} s`);

export function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  let x = bytes;
  while (x >= 1000 && at < units.length - 1) {
    x /= 1000;
    at += 1;
  }
  return `${number(x)} ${units[at]}`;
}
