"""Compares modelled times of verification batches with speeds that others measured with drafts.

Each line of draft_pairs.jsonl is a pair of published runs of one model on one machine, without and
with drafts, with experts or layers on the CPU or the disk. The mean number of tokens in a round and
the speedup imply what a verification batch took, in units of a plain decode. Two models are asked:

- The plan's: a part of a layer takes the longer of reading and computing, and tokens choose
  experts evenly.
- Two terms: reading plus computing, and neighbouring tokens share experts. Its two numbers come
  from published cost curves and counted experts (docs/background.md, costs), and not from these
  pairs. So all pairs check it.

Fills docs/validation.md. No model is opened, and nothing is measured here.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import typer

from lab import filled
from lab.mtp_model import ACCEPTED
from lab.published import PAGE, Case, Prediction, facts_by_model
from offload.model import ModelFacts
from offload.plan.machine import Machine, ModelWork, Part, Sharing, cpu_s
from offload.routing.routing import SHARING_USUAL, union_of_neighbours

PAIRS = Path(__file__).with_name("draft_pairs.jsonl")
NEAR = 0.20  # error that is aimed at for 80 % of the pairs
ROW_SHARE = 0.2  # computing of one row on the CPU, in T(1) (docs/background.md, costs)
# Sizes of the files, in GiB (README.md).
_FILE_GIB = {
    "GLM-4.6": 201, "DeepSeek-R1": 377, "Qwen3-Next-80B-A3B": 45, "Qwen3.6-35B-A3B": 20,
    "GLM-5.3-Flash": 180,
}  # fmt: skip
_FEW_ROWS = 8  # rows from which on reading hides behind computing, as in prompts


@dataclass(frozen=True)
class Pair(Case):
    """Published runs without and with drafts. `tg_tps` is the speed without."""

    n_drafted: int = 1
    tokens_per_round: float = 1.0
    draft_tps: float = 1.0
    disk: bool = False  # experts are read from the disk, whose rate is `ram_gbs`

    @property
    def speedup(self) -> float:
        return self.draft_tps / self.tg_tps


def read_pairs(path: Path = PAIRS) -> list[Pair]:
    return [Pair(**json.loads(line)) for line in path.read_text("utf-8").splitlines()]


@dataclass(frozen=True)
class _Neighbours(ModelWork):
    """A model's work in batches of tokens that share some experts."""

    exponent: float = SHARING_USUAL

    def union(self, n_tokens: float) -> float:
        return float(union_of_neighbours(n_tokens, self.n_used, self.n_experts, self.exponent))


def two_terms_s(part: Part, machine: Machine, n_rows: float) -> float:
    """The CPU's seconds for a part: reading it, plus computing its rows. Equal to the plan's for
    one row."""
    read_s = part.size_bytes * part.read_cost / machine.ram_bytes_per_s
    row_s = 2 * part.n_weights * part.cpu_cost / machine.cpu_flops
    own_s = min(ROW_SHARE * read_s, row_s)
    few_s = read_s - own_s + own_s * min(n_rows, _FEW_ROWS)
    return float(np.maximum(few_s, row_s * n_rows))


class Comparison:
    """The expectations of both models of T(n) for one published pair."""

    def __init__(self, pair: Pair, facts: ModelFacts | None) -> None:
        self.pair, of_case = pair, Prediction(pair, facts)
        self._machine, self._sharing = of_case.machine(), of_case.sharing
        work = of_case.at_context()
        if pair.disk:  # other weights are in memory, which is much faster than the disk
            work = replace(work, dense=Part(), head=Part())
        self._work = work

    def _batch_s(self, n_tokens: int, *, two_terms: bool, layers: float | None = None) -> float:
        """Seconds of a decode of `n_tokens`; `layers`: of this many layers, and the output."""
        work, sharing, machine = self._work, self._sharing, self._machine
        if layers is not None:
            share = layers / float(work.n_layers)
            sharing = Sharing(
                sharing.n_slots, sharing.n_resident * share, sharing.n_dense_streamed * share
            )
            work = replace(work, n_layers=layers, n_expert_layers=work.n_expert_layers * share)
        seconds = float(cpu_s(machine, work, sharing, n_tokens))
        if not two_terms:
            return float(seconds)
        n_dense = sharing.n_dense_streamed
        dense_s = float(work.dense.cpu_seconds(machine, n_tokens))
        seconds += n_dense * (two_terms_s(work.dense, machine, n_tokens) - dense_s)
        if work.n_experts:
            near = _Neighbours(**vars(work))
            n_cpu, union = work.n_expert_layers - sharing.n_resident, near.union(n_tokens)
            experts_s = union * two_terms_s(work.expert, machine, n_tokens * work.n_used / union)
            seconds += n_cpu * (
                experts_s - float(work.used(n_tokens).cpu_seconds(machine, n_tokens))
            )
            # Resident experts are read once for all tokens that share them.
            gpu = machine.vram_bytes_per_s, machine.gpu_flops
            resident = near.used(n_tokens).seconds(*gpu, n_tokens)
            seconds += sharing.n_resident * float(
                resident - work.used(n_tokens).seconds(*gpu, n_tokens)
            )
        return float(seconds)

    @cached_property
    def step(self) -> float:
        """A draft step in units of T(1): the MTP layer, where the others are, and the output."""
        one_s = self._batch_s(1, two_terms=False)
        layer_s = self._batch_s(1, two_terms=False, layers=1.0) - self._machine.per_decode_s
        return max(0.0, layer_s) / one_s

    def growth(self, *, two_terms: bool) -> float:
        """T(n)/T(1) of the verification batch, by the model."""
        n = 1 + self.pair.n_drafted
        several_s = self._batch_s(n, two_terms=two_terms)
        return several_s / self._batch_s(1, two_terms=two_terms)

    @property
    def implied(self) -> float:
        """T(n)/T(1) by the published speeds, less the modelled draft steps."""
        pair = self.pair
        return pair.tokens_per_round / pair.speedup - pair.n_drafted * self.step

    def speedup(self, *, two_terms: bool) -> float:
        """The speedup by the model, with the published number of tokens in a round."""
        round_s = self.growth(two_terms=two_terms) + self.pair.n_drafted * self.step
        return self.pair.tokens_per_round / round_s


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
        places.setdefault(f"{one.pair.model} {one.pair.gpu} {one.pair.cpu}", []).append(ratio)
    return [statistics.median(of_place) for of_place in places.values()]


def summary(some: Sequence[Comparison]) -> str:
    lines = ["| modelled ÷ published | median | within 20 % | range | n |", "|---|---|---|---|---|"]
    for name, two_terms in (("the plan's model", False), ("two terms", True)):
        growth = [c.growth(two_terms=two_terms) / c.implied for c in some]
        gains = [c.speedup(two_terms=two_terms) / c.pair.speedup for c in some]
        lines.append(_row(f"T(n)/T(1), {name}", growth))
        lines.append(_row(f"T(n)/T(1), {name}, by machine and model", _by_place(some, growth)))
        lines.append(_row(f"speedup, {name}", gains))
    return "\n".join(lines)


def table(some: Sequence[Comparison]) -> str:
    heads = ("pair", "model, file", "machine", "n", "tokens per round", "speedup: published",
             "plan's model", "two terms", "T(n)/T(1): implied", "plan's model", "two terms",
             "not in the source")  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for c in some:
        pair = c.pair
        where = "the disk" if pair.disk else f"{pair.gpu}, {pair.cpu}"
        cells = (
            f"[{pair.id}]({pair.source})", f"{pair.model} {pair.quant}", where,
            str(1 + pair.n_drafted), f"{pair.tokens_per_round:.2f}", f"{pair.speedup:.2f}",
            f"{c.speedup(two_terms=False):.2f}", f"**{c.speedup(two_terms=True):.2f}**",
            f"{c.implied:.2f}", f"{c.growth(two_terms=False):.2f}",
            f"**{c.growth(two_terms=True):.2f}**", pair.guessed,
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
}


def mtp_table() -> str:
    """Return a table of speedups by MTP that both models of T(n) expect.

    All experts are on the CPU of one machine.
    """
    heads = ("model", "drafted tokens", "tokens per round", "speedup: plan's model", "two terms")
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
        lines.append(
            f"| {pair.model} | {pair.n_drafted} | {pair.tokens_per_round:.2f} | "
            f"{c.speedup(two_terms=False):.2f} | **{c.speedup(two_terms=True):.2f}** |"
        )
    return "\n".join(lines)


def page(some: Sequence[Comparison]) -> str:
    """The text of docs/validation.md with new tables of pairs."""
    parts = {"pairs summary": summary(some), "pairs": table(some), "mtp": mtp_table()}
    return filled(PAGE, parts)


def main() -> None:
    """Compare both models with published pairs, and fill the page."""
    some = comparisons(read_pairs())
    PAGE.write_text(page(some), encoding="utf-8")
    typer.echo(summary(some))


if __name__ == "__main__":
    typer.run(main)
