"""Compares modelled times of verification batches with speeds that others measured with drafts.

Each line of draft_pairs.jsonl is a pair of published runs of one model on one machine, without and
with drafts, with experts or layers on the CPU or the disk. The mean number of tokens in a round and
the speedup imply what a verification batch took, in units of a plain decode. The machine model is
asked for the same. Its two numbers for batches of few tokens come from published cost curves and
counted experts (docs/background.md, costs), and not from these pairs. So all pairs check it.

Fills docs/validation.md. No model is opened, and nothing is measured here.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import typer

from lab.mtp_model import ACCEPTED
from lab.published import PAGE, Prediction, facts_by_model, way_s
from lab.published_cases import Case
from lab.tables import filled
from offload.model import ModelFacts
from offload.routing.routing import SHARING_LEAST, SHARING_MOST
from offload.times.cpu_kernels import ROW_SHARE
from offload.times.hits import Sharing
from offload.times.work import WeightWork

PAIRS = Path(__file__).with_name("draft_pairs.jsonl")
NEAR = 0.20  # error that is aimed at for 80 % of the pairs
# What colibri's round of four tokens spent on the disk, on products, and on attention and all else
# (JustVugg/colibri issue 640; issue 93 has 0.53, 0.36 and 0.11).
COLIBRI_ROUND = (0.48, 0.34, 0.18)
# Sizes of the files, in GiB (README.md).
_FILE_GIB = {
    "GLM-4.6": 201, "DeepSeek-R1": 377, "Qwen3-Next-80B-A3B": 45, "Qwen3.6-35B-A3B": 20,
    "GLM-5.3-Flash": 180, "Qwen3.8-Flash-Next": 113,
}  # fmt: skip


@dataclass(frozen=True)
class Pair(Case):
    """Published runs without and with drafts. `tg_tps` is the speed without."""

    n_drafted: int = 1
    draft_tps: float = 1.0
    disk: bool = False  # experts are read from the disk, whose rate is `ram_gbs`
    # `n_resident_layers` of the run with drafts, whose drafter takes device memory. None: the same.
    resident_layers_drafting: float | None = None

    @property
    def speedup(self) -> float:
        return self.draft_tps / self.tg_tps

    @property
    def place(self) -> str:
        """The model, the card and the CPU. Many runs of one place say one thing."""
        return f"{self.model}, {self.gpu}, {self.cpu}"

    @property
    def corrects(self) -> bool:
        """True if the pair's place may correct the model; the others only check it."""
        return hashlib.sha256(self.place.encode()).digest()[-1] % 2 == 1


def read_pairs(path: Path = PAIRS) -> list[Pair]:
    return [Pair(**json.loads(line)) for line in path.read_text("utf-8").splitlines()]


class Comparison:
    """The machine model's expectations for one published pair."""

    def __init__(self, pair: Pair, facts: ModelFacts | None) -> None:
        self.pair, of_case = pair, Prediction(pair, facts)
        self._machines = {n: of_case.machine(n) for n in (1, 1 + pair.n_drafted)}
        self._sharing = of_case.sharing
        self._sharing_drafting = self._sharing
        if pair.resident_layers_drafting is not None:
            n_resident = pair.resident_layers_drafting
            self._sharing_drafting = replace(self._sharing, n_resident=n_resident)
        self._work = self._whole = of_case.at_context()
        if pair.disk:  # a draft step's other weights are in memory, which is much faster
            self._work = replace(self._whole, dense=WeightWork(), head=WeightWork())

    def with_sharing(self, exponent: float) -> Comparison:
        """The same for neighbouring tokens that use n^`exponent` times one token's experts."""
        found = copy(self)
        found._work = replace(self._work, sharing_exponent=exponent)
        found._whole = replace(self._whole, sharing_exponent=exponent)
        for name in ("growth", "drafting"):
            found.__dict__.pop(name, None)
        return found

    def _batch_s(self, n_tokens: int, layers: float | None = None) -> float:
        """Seconds of a decode of `n_tokens`; `layers`: of this many layers, and the output."""
        work, sharing = self._work, self._sharing
        if layers is not None:
            share = layers / float(work.n_layers)
            sharing = Sharing(
                sharing.n_slots, sharing.n_resident * share, sharing.n_dense_streamed * share
            )
            work = replace(work, n_layers=layers, n_expert_layers=work.n_expert_layers * share)
        return way_s(self.pair, self._machines[n_tokens], work, sharing, n_tokens)

    @cached_property
    def step(self) -> float:
        """A draft step in units of T(1): the MTP layer, where the others are, and the output."""
        return self._layer_s(1) / self._batch_s(1)

    def _layer_s(self, n_tokens: int) -> float:
        """Seconds of the MTP layer and the output in a batch of `n_tokens`."""
        layer_s = self._batch_s(n_tokens, layers=1.0) - self._machines[n_tokens].per_decode_s
        return max(0.0, layer_s)

    @cached_property
    def drafting(self) -> float:
        """All that a round takes beside its batch, in units of T(1).

        ik_llama.cpp brings the MTP layer's cache up to date in a pass of its own, over the batch.
        """
        steps = self.pair.n_drafted * self.step
        if not self.pair.engine.startswith("ik_llama.cpp"):
            return steps
        return steps + self._layer_s(1 + self.pair.n_drafted) / self._batch_s(1)

    @cached_property
    def growth(self) -> float:
        """T(n)/T(1) of the verification batch, by the model."""
        n = 1 + self.pair.n_drafted
        if self.pair.disk:
            return self._growth_from_disk(n)
        batch_s = way_s(self.pair, self._machines[n], self._work, self._sharing_drafting, n)
        return batch_s / self._batch_s(1)

    def _growth_from_disk(self, n_tokens: int) -> float:
        """T(n)/T(1) of colibri: each part of its round grew as the model says."""
        work = self._whole
        dense, expert = work.dense, work.expert
        dense_bytes = dense.size_bytes * work.n_layers + work.head.size_bytes
        expert_bytes = work.n_expert_layers * work.n_used * expert.size_bytes
        unions = work.union(n_tokens) / work.union(1)
        few = 1 + ROW_SHARE * (n_tokens - 1)
        rows = n_tokens / unions
        of_experts = unions * (1 + ROW_SHARE * (rows - 1))
        products = np.average((few, of_experts), weights=(dense_bytes, expert_bytes))
        shares = zip(COLIBRI_ROUND, (unions, products, few), strict=True)
        return float(1 / sum(share / growth for share, growth in shares))

    @property
    def implied(self) -> float:
        """T(n)/T(1) by the published speeds, less the modelled draft steps."""
        return self.pair.tokens_per_round / self.pair.speedup - self.drafting

    @property
    def speedup(self) -> float:
        """The speedup by the model, with the published number of tokens in a round."""
        return self.pair.tokens_per_round / (self.growth + self.drafting)


def comparisons(pairs: Sequence[Pair]) -> list[Comparison]:
    found = facts_by_model(pairs)
    return [Comparison(pair, found.get(pair.model)) for pair in pairs]


def _row(name: str, ratios: Sequence[float]) -> str:
    near = sum(abs(r - 1) <= NEAR for r in ratios) / len(ratios)
    middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
    return f"| {name} | {middle:.2f} | {near:.0%} | {low:.2f} to {high:.2f} | {len(ratios)} |"


def _by_place(some: Sequence[Comparison], ratios: Sequence[float]) -> list[float]:
    """The median ratio of each model on each machine, since many runs of one say one thing."""
    places: dict[str, list[float]] = {}
    for one, ratio in zip(some, ratios, strict=True):
        places.setdefault(one.pair.place, []).append(ratio)
    return [statistics.median(of_place) for of_place in places.values()]


def summary(some: Sequence[Comparison]) -> str:
    lines = ["| modelled ÷ published | median | within 20 % | range | n |", "|---|---|---|---|---|"]
    for name, those in (
        ("corrected by", [c for c in some if c.pair.corrects]),
        ("checked by", [c for c in some if not c.pair.corrects]),
        ("all", some),
    ):
        growth = [c.growth / c.implied for c in those]
        lines.append(_row(f"T(n)/T(1), {name}", growth))
        by_place = _by_place(those, growth)
        lines.append(_row(f"T(n)/T(1), by machine and model, {name}", by_place))
        lines.append(_row(f"speedup, {name}", [c.speedup / c.pair.speedup for c in those]))
    return "\n".join(lines)


def table(some: Sequence[Comparison]) -> str:
    heads = ("pair", "model, file", "machine", "n", "tokens per round", "speedup: published",
             "modelled", "T(n)/T(1): implied", "modelled", "ratio",
             "not in the source")  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for c in some:
        pair = c.pair
        where = "the disk" if pair.disk else f"{pair.gpu}, {pair.cpu}"
        cells = (
            f"[{pair.id}]({pair.source}){'' if pair.corrects else ' ✓'}",
            f"{pair.model} {pair.quant}", where,
            str(1 + pair.n_drafted), f"{pair.tokens_per_round:.2f}", f"{pair.speedup:.2f}",
            f"{c.speedup:.2f}", f"{c.implied:.2f}", f"{c.growth:.2f}",
            f"**{c.growth / c.implied:.2f}**", pair.guessed,
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# Tokens in a round of 1, 2 and 3 drafted tokens, by the published acceptance of each place.
_ROUNDS = {
    **{
        model: tuple(1.0 + sum(accepted[: i + 1]) for i in range(3))
        for model, accepted in ACCEPTED.items()
    },
    "Qwen3.6-35B-A3B": (1.884, 2.63, 3.138),  # llama.cpp #22673
    "GLM-5.3-Flash": (1.924, 2.737, 3.337),  # llama.cpp #27917
    "Qwen3.8-Flash-Next": (1.873, 2.635, 3.3),  # ik_llama.cpp #2369 (docs/hybrid-model.md)
}


def mtp_table() -> str:
    """Return a table of the speedups by MTP that the machine model expects.

    All experts are on the CPU of one machine. The range is from neighbouring tokens that share no
    experts to those that share most.
    """
    heads = ("model", "drafted tokens", "tokens per round", "T(n)/T(1)", "speedup", "range")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    pairs = [
        Pair(
            id="", model=model, quant="Q4_K_M", file_gib=_FILE_GIB[model], gpu="RTX 4090", n_gpus=1,
            pcie_gbs=32, cpu="", n_cores=16, ram_gbs=89.6, n_channels=2, n_sockets=1,
            engine="llama.cpp", source="", tg_tps=1.0, context=4096, ubatch=512, n_prompt=0,
            n_drafted=n, tokens_per_round=rounds[n - 1],
        )
        for model, rounds in _ROUNDS.items()
        for n in (1, 2, 3)
    ]  # fmt: skip
    for c in comparisons(pairs):
        pair = c.pair
        least, most = (c.with_sharing(x).speedup for x in (SHARING_LEAST, SHARING_MOST))
        lines.append(
            f"| {pair.model} | {pair.n_drafted} | {pair.tokens_per_round:.2f} | {c.growth:.2f} | "
            f"**{c.speedup:.2f}** | {least:.2f} to {most:.2f} |"
        )
    return "\n".join(lines)


def page(some: Sequence[Comparison]) -> str:
    """The text of docs/validation.md with new tables of pairs."""
    parts = {"pairs summary": summary(some), "pairs": table(some), "mtp": mtp_table()}
    return filled(PAGE, parts)


def main() -> None:
    """Compare the machine model with published pairs, and fill the page."""
    some = comparisons(read_pairs())
    PAGE.write_text(page(some), encoding="utf-8")
    typer.echo(summary(some))


if __name__ == "__main__":
    typer.run(main)
