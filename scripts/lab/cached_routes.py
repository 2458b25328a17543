"""Fills the tables of docs/hybrid.md on cached routing: misses, kept choices and modelled speeds.

    scripts/lab/run cached-routes [--record]

Recorded and drawn scores of routers are replayed token by token, by the rule of `--route-cached`
(offload/schedule/cached_choice.py) and the rule of eviction (`Lrfu`). No model is opened. With
`--record` the embedded pair's target is run first, and its routers' scores are kept.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import typer
from numpy.typing import NDArray

from lab.hybrid_model import (
    DRAWN,
    GIB,
    N_LAYERS,
    N_TOKENS,
    NO_DAY,
    curve,
    draw_scores,
    plan_of,
)
from lab.options import Streaming, engine_options
from lab.synth.published import published_facts
from lab.tables import filled, page_of
from offload.engine import open_engine
from offload.model import ModelFacts
from offload.routing.routing import HitCurve
from offload.schedule.cache import NEVER as NEVER_USED
from offload.schedule.cache import Lrfu
from offload.schedule.cached_choice import (
    ChoiceCounts,
    MeanRange,
    RouteOptions,
    Scores,
    best,
    choose,
    penalties,
)
from offload.schedule.splitter import all_on_device
from offload.times.decodes import best_s
from offload.times.min_batch import NEVER, MinBatch
from offload.times.work import model_work
from specoffload.config.hardware import PRESETS
from specoffload.config.resolution import demo_file
from specoffload.opening.draft_model import real_text

PAGE = page_of("cached-routes")
RECORDED = Path(__file__).with_name("pair_scores.npz")
SHARES = (1 / 16, 1 / 8, 1 / 4, 2 / 5)  # parts of all experts for which there are slots
STRENGTHS = (0.1, 0.25, 0.5, 1.0)
LEAST_KEPT = 0.95  # share of the router's choices
MOST_MISSES = 0.6  # goal: misses with the preference, as a share of those without it
PAIR = "embedded pair"
PAIR_USED = 4  # experts that a token of the embedded pair uses
ROUTINGS = ("prose", "drifting")  # of hybrid_model's drawn ones
N_BISECTIONS = 8
_NO_STRENGTH = 1e-30  # a preference that is too weak to change any choice
# What a router selects by, if z are the scores that its matrix gives.
GATES = {
    "Qwen3-235B-A22B": "softmax",
    "DeepSeek-R1": "sigmoid",
    "gpt-oss-120b": "none",
    "GLM-4.6": "sigmoid",
}
CARDS = {
    "Qwen3-235B-A22B": "rtx-4090-ddr5",
    "DeepSeek-R1": "rtx-4090-ddr5",
    "gpt-oss-120b": "rtx-5070ti-ddr5",
    "GLM-4.6": "rtx-4090-ddr5",
}


@dataclass(frozen=True)
class Router:
    """How a model's routers select: how many experts, by what, and in which groups."""

    n_experts: int
    n_used: int
    gate: str
    n_groups: int = 1
    n_groups_used: int = 1  # groups from which a token's experts are chosen

    def selected_by(self, z: NDArray[np.float64]) -> Scores:
        """The scores by which it selects, from those of its matrix: [..., n_experts]."""
        if self.gate == "softmax":
            z = np.exp(z - z.max(axis=-1, keepdims=True))
            z = z / z.sum(axis=-1, keepdims=True)
        elif self.gate == "sigmoid":
            z = 1.0 / (1.0 + np.exp(-z))
        if self.n_groups_used < self.n_groups:
            grouped = z.reshape(*z.shape[:-1], self.n_groups, -1)
            value = np.sort(grouped, axis=-1)[..., -2:].sum(axis=-1)  # its two best experts
            nth = np.argsort(np.argsort(-value, axis=-1), axis=-1)
            masked = np.where(nth[..., None] < self.n_groups_used, grouped, -np.inf)
            z = masked.reshape(z.shape)
        return z.astype(np.float32)


def router_of(title: str, facts: ModelFacts) -> Router:
    groups = (facts.number(f"expert_group_{kind}") or 1 for kind in ("count", "used_count"))
    return Router(facts.n_experts, facts.n_experts_used, GATES[title], *groups)


@dataclass(frozen=True)
class RouterScores:
    """Scores by which the routers of a text's tokens select: [n_tokens, n_layers, n_experts]."""

    scores: Scores
    n_used: int

    @cached_property
    def mean_ranges(self) -> NDArray[np.float64]:
        """The mean range of each layer's scores before each token: [n_tokens, n_layers]."""
        n_tokens, n_layers, _ = self.scores.shape
        found = np.zeros((n_tokens, n_layers))
        for layer in range(n_layers):
            mean = MeanRange()
            for token in range(n_tokens):
                found[token, layer] = mean.mean
                mean.see(self.scores[token, layer][None])
        return found


@dataclass(frozen=True)
class Replayed:
    """Shares of the choices in the second half of a text. The first half only fills the slots."""

    kept: float  # choices that the router would have made, too
    misses: float  # choices whose expert is in no slot


def replay(text: RouterScores, share: float, route: RouteOptions) -> Replayed:
    """Decode the text one token at a time, with slots for `share` of all experts.

    All layers share the slots, and each missing expert gets one. So the slots hold the experts that
    rank highest by the rule of eviction.
    """
    n_tokens, n_layers, n_experts = text.scores.shape
    n_slots, n_used = int(share * n_layers * n_experts + 1e-9), text.n_used
    rule = Lrfu.for_model(n_layers, n_used, n_experts)
    ranks = [np.frombuffer(rule.ranks(layer)) for layer in range(n_layers)]
    n_choices = n_kept = n_missed = now = 0
    for token, scores in enumerate(text.scores):
        cached = _highest(np.stack(ranks), n_slots)
        means = text.mean_ranges[token].tolist()
        lost = [penalties(*its, route.strength) for its in zip(cached, means, strict=True)]
        chosen = choose(scores, np.stack(lost), route.n_kept, n_used)
        if token >= n_tokens // 2:
            own = best(scores, n_used)
            n_choices += chosen.size
            n_kept += int((own[:, :, None] == chosen[:, None, :]).any(axis=2).sum())
            n_missed += int((~np.take_along_axis(cached, chosen, axis=1)).sum())
        for layer, experts in enumerate(chosen.tolist()):
            now += 1
            rule.touched([(layer, expert) for expert in experts], now)
    return Replayed(n_kept / n_choices, n_missed / n_choices)


def _highest(ranks: NDArray[np.float64], n: int) -> NDArray[np.bool_]:
    """True for the `n` experts that rank highest, of those that were ever used.

    Of equal ranks, the last by number is the highest, as in `recorded_hits`.
    """
    cached = np.zeros(ranks.size, np.bool_)
    cached[np.argsort(ranks, axis=None, kind="stable")[ranks.size - n :]] = True
    was_used: NDArray[np.bool_] = ranks != NEVER_USED
    return cached.reshape(ranks.shape) & was_used


def strongest(text: RouterScores, share: float, n_kept: int = RouteOptions.n_kept) -> float:
    """The greatest strength that keeps LEAST_KEPT of the choices, by bisection."""
    low, high = 0.0, 1.0
    if replay(text, share, RouteOptions(high, n_kept)).kept >= LEAST_KEPT:
        return high
    for _ in range(N_BISECTIONS):
        middle = (low + high) / 2
        is_enough = replay(text, share, RouteOptions(middle, n_kept)).kept >= LEAST_KEPT
        low, high = (middle, high) if is_enough else (low, middle)
    return low


# -- texts -----------------------------------------------------------------------------------------


@cache
def drawn(router: Router, routing: str) -> RouterScores:
    z = draw_scores(router.n_experts, DRAWN[routing], N_TOKENS, N_LAYERS)
    return RouterScores(router.selected_by(z), router.n_used)


@cache
def recorded() -> RouterScores:
    with np.load(RECORDED) as file:
        return RouterScores(file["scores"].astype(np.float32), PAIR_USED)


class ScoreRecorder(ChoiceCounts):
    """Keeps the scores that it is shown, in place of counting choices."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, list[Scores]] = {}  # by group

    def see(
        self, group: int, scores: Scores, penalty: Scores, cached: NDArray[np.bool_], n_kept: int,
        n_used: int,
    ) -> None:  # fmt: skip
        self.rows.setdefault(group, []).append(scores.copy())


def record(path: Path = RECORDED) -> None:
    """Decode the built-in text with the embedded pair's target, and keep its routers' scores."""
    streaming = Streaming(hybrid=True, splitter=all_on_device, route=RouteOptions(_NO_STRENGTH))
    never = MinBatch(NEVER, NEVER)
    options = engine_options(
        device="sim", streaming=streaming, min_batch=never, n_ctx=N_TOKENS + 64, n_threads=1,
        n_threads_batch=1,
    )  # fmt: skip
    recorder = ScoreRecorder()
    with open_engine(demo_file("target.gguf"), options) as engine:
        (device,) = engine.opened.devices
        assert device.routing is not None
        device.routing.counts = recorder
        device.routing.turn_on()
        for token in real_text(engine)[:N_TOKENS]:
            engine.sequences.extend(0, [token], 1)
    rows = [np.concatenate(recorder.rows[group]) for group in sorted(recorder.rows)]
    np.savez_compressed(path, scores=np.stack(rows, axis=1).astype(np.float16))


def texts(facts: dict[str, ModelFacts]) -> Iterator[tuple[str, str, RouterScores]]:
    """Each model, the name of its routing, and its scores."""
    yield PAIR, "recorded", recorded()
    for title in GATES:
        for routing in ROUTINGS:
            yield title, routing, drawn(router_of(title, facts[title]), routing)


# -- tables ----------------------------------------------------------------------------------------


def miss_row(title: str, routing: str, text: RouterScores, share: float) -> str:
    """The row of a text with slots for `share` of the experts."""
    exact = replay(text, share, RouteOptions())

    def cell(its: Replayed) -> str:
        of_exact = its.misses / exact.misses
        words = f"{of_exact:.2f}, {its.kept:.0%}"
        return f"**{words}**" if of_exact <= MOST_MISSES and its.kept >= LEAST_KEPT else words

    most = strongest(text, share)
    cells = [cell(replay(text, share, RouteOptions(strength))) for strength in STRENGTHS]
    cells.append(f"{most:.2f}: {cell(replay(text, share, RouteOptions(most)))}")
    return f"| {title} | {routing} | {share:.0%} | {exact.misses:.0%} | {' | '.join(cells)} |"


def miss_table(facts: dict[str, ModelFacts]) -> str:
    heads = ["model", "routing", "slots", "misses, S = 0", *(f"S = {s:g}" for s in STRENGTHS)]
    heads.append(f"the S that keeps {LEAST_KEPT:.0%}")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    lines += [miss_row(*its, share) for its in texts(facts) for share in SHARES]
    return "\n".join(lines)


def speed_row(title: str, facts: ModelFacts, routing: str) -> str:
    """The modelled tokens/s of a model on its card."""
    hardware = PRESETS[CARDS[title]]
    machine, gib = hardware.machine, hardware.vram // GIB
    hits = curve(routing, title, facts.n_experts, facts.n_experts_used)
    sharing = plan_of(facts, gib, machine, hybrid=True, hits=hits).sharing
    work, text = model_work(facts), drawn(router_of(title, facts), routing)
    n_streamed = work.n_expert_layers - sharing.n_resident
    share = float(sharing.n_cached / (n_streamed * work.n_experts))

    def cell(strength: float) -> str:
        its = replay(text, share, RouteOptions(strength))
        of_share = HitCurve(((share, 1.0 - its.misses),), N_TOKENS, NO_DAY)
        seconds = best_s(machine, replace(work, hits=of_share), sharing, 1, hybrid=True)
        return f"{1 / float(seconds):.1f} ({its.misses:.0%}, {its.kept:.0%})"

    cells = [title, CARDS[title], routing, f"{share:.0%}", *map(cell, (0.0, *STRENGTHS))]
    return f"| {' | '.join(cells)} |"


def speed_table(facts: dict[str, ModelFacts], titles: Sequence[str] = tuple(GATES)) -> str:
    heads = ["model", "machine", "routing", "slots", *(f"S = {s:g}" for s in (0.0, *STRENGTHS))]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    lines += [speed_row(title, facts[title], routing) for title in titles for routing in ROUTINGS]
    return "\n".join(lines)


def page() -> str:
    """The text of docs/hybrid.md with new tables."""
    with tempfile.TemporaryDirectory() as folder:
        facts = {title: published_facts(title, Path(folder)) for title in GATES}
    parts = {"cached misses": miss_table(facts), "cached speeds": speed_table(facts)}
    return filled(PAGE, parts)


def main(*, again: bool = typer.Option(False, "--record", help="Run the pair first.")) -> None:
    """Fill the tables."""
    if again:
        record()
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
