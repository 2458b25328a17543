"""Compares the machine model with speeds that others measured, and makes docs/validation.md.

Each line of published.jsonl is one run of llama.cpp, ik_llama.cpp or KTransformers: a model, its
file's size, a machine, and where the weights were. The plan's functions are asked for the time of
*that* way, so the comparison tests the model of the machine and not our own scheduling. No model is
opened, and nothing is measured here.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import typer

from lab import ROOT
from lab.published_cases import (
    AHEAD,
    NO_GPU,
    ON_CPU,
    READ_BY_DEVICE,
    SPLIT,
    Case,
    measured_hits,
    read_cases,
)
from lab.rival_ways import copied_ahead_s, misses_on_cpu_s
from lab.synth.published import published_facts
from lab.tables import filled, page_of
from offload.model import ModelFacts, is_experts, layer_of
from offload.plan.llama_cpp import copied_s, read_by_device_s
from offload.times.context_memory import ContextOptions
from offload.times.cpu_kernels import cpu_kernel
from offload.times.decodes import cpu_s, hybrid_s
from offload.times.hits import Sharing
from offload.times.machine import (
    CAPTURED_KERNEL_S,
    CORE_FLOPS,
    TYPICAL,
    Machine,
    ram_seen,
    vram_seen,
)
from offload.times.prompts import with_prompt
from offload.times.work import ModelWork, WeightWork, model_work, with_context
from specoffload.config.hardware_parts import CARDS

GIB = 1 << 30
PAGE = page_of("published")
PLOT = ROOT / "docs" / "validation.png"
# Seconds that each kernel takes beside its bytes if the host launches kernels one by one. Like the
# time in a captured graph, it was fitted to the half of the cases that may correct the model.
LAUNCHED_KERNEL_S = 3.2e-6
# Cards whose kernels take longer, captured or not (docs/validation.md, kernels).
SLOW_KERNELS_S = {"Tesla V100": 6e-6}
# Seconds in which an indexer chooses a token's keys, for each layer that has one, if it does so for
# one row after the other: llama.cpp #28129 has prompts of 61,767 tokens with and without.
CHOICE_S = 26e-6
REPACKED_CORE_FLOPS = 200e9  # operations per second of one core in prompts, with repacked blocks
# Other programs' copies of weights that are not pinned: a share of the pinned rate, and a limit, as
# one thread moves them through pinned buffers.
UNPINNED_SHARE, MOST_UNPINNED_BYTES_PER_S = 0.64, 22e9
PINNED_SHARE = 25 / 32  # rate of pinned copies, as a share of the link's data sheet
# Engines that repack weights for prompts on the CPU.
_REPACKING = ("ik_llama.cpp", "KTransformers")
# Facts of the files, not of the machines: what a header written by us does not say of theirs.
HEAD_BITS, EMBEDDING_BITS = 6.56, 4.5  # bits a weight of files with 4-bit experts
DENSE_BITS = 8.5  # of files that keep all but the experts in 8 bits
# Names of types of such files. The header of GSQ-RCO was read by others (anyei/llamacpp-v100).
_KEEPING_8_BITS = ("_R4", "IQ6_K", "mix", "Q8", "GSQ-RCO")
# Matrices of hyper-connections are not quantised, and published files hold them in 16 bits.
_HC_BITS = 16
_TABLE = "per_layer_token_embd.weight"  # looked up, and never multiplied
DECODE_ERROR, PROMPT_ERROR = 0.25, 0.40  # errors that are aimed at
# The model as it was before these cases corrected it, with the rates of data sheets.
BEFORE = Machine(
    per_switch_s=40e-6, per_wait_s=40e-6, per_batch_wait_s=40e-6, per_decode_s=0,
    per_new_layer_s=0, per_kernel_s=1.5e-6,
)  # fmt: skip


def unpinned_seen(bytes_per_s: float, ram_bytes_per_s: float) -> float:
    """Return the rate of copies from memory that is not pinned, from the rate of pinned copies.

    `ram_bytes_per_s` is what RAM gives the CPU and the card together. Each byte moves three times
    in RAM: it is read, written to a pinned buffer, and read by the card.
    """
    most = min(MOST_UNPINNED_BYTES_PER_S, ram_bytes_per_s / 3)
    return min(UNPINNED_SHARE * bytes_per_s, most)


def by_machine(some: Sequence[Prediction], *, before: bool = False) -> dict[str, float]:
    """Return the median ratio of decodes by machine.

    Many cases of one machine say one thing, so they count once. `before`: with data sheets' rates.
    """
    found: dict[str, list[float]] = {}
    for p in some:
        found.setdefault(p.case.machine, []).extend(decode_ratios([p], before=before))
    return {name: statistics.median(ratios) for name, ratios in found.items()}


def way_s(case: Case, machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: int) -> float:
    """Seconds of a decode of `n_tokens` in the way in which the case was run."""
    seconds = {READ_BY_DEVICE: read_by_device_s, ON_CPU: misses_on_cpu_s, SPLIT: hybrid_s}
    if case.misses:
        return float(seconds[case.misses](machine, work, sharing, n_tokens, case.hits))
    return float(cpu_s(machine, work, sharing, n_tokens))


class Prediction:
    """What the machine model expects of a case."""

    def __init__(self, case: Case, facts: ModelFacts | None) -> None:
        self.case, self._facts = case, facts

    @cached_property
    def work(self) -> ModelWork:
        """The model's work with the file's size. Experts take what other weights leave."""
        case = self.case
        file_bytes = case.file_gib * GIB
        if self._facts is None:
            n_layers, n_head = case.dense["n_layers"], case.dense["head_weights"]
            head = WeightWork(n_head * HEAD_BITS / 8, n_head)
            layer_bytes = (file_bytes - head.size_bytes) / n_layers
            return ModelWork(n_layers, WeightWork(layer_bytes, layer_bytes * 8 / 4.85), head)
        work = model_work(self._facts, measured_hits(case.model))
        n_dense = work.dense.n_weights * work.n_layers
        n_pieces = work.n_experts * work.n_expert_layers
        n_table = sum(math.prod(e.shape) for e in self._facts.loaded if e.name == _TABLE)
        n_all = n_dense + 2 * work.head.n_weights + n_table + n_pieces * work.expert.n_weights
        keeps = any(name in case.quant for name in _KEEPING_8_BITS)
        bits = DENSE_BITS if keeps else min(DENSE_BITS, max(5.5, 1.1 * 8 * file_bytes / n_all))
        n_wide, wide_bits = self._unquantised
        dense_bits = (n_dense - n_wide) * bits + wide_bits
        kernel = cpu_kernel(case.quant)
        others = dense_bits + work.head.n_weights * (HEAD_BITS + EMBEDDING_BITS)
        others += n_table * EMBEDDING_BITS
        return replace(
            work,
            dense=replace(work.dense, size_bytes=dense_bits / 8 / work.n_layers),
            head=replace(work.head, size_bytes=work.head.n_weights * HEAD_BITS / 8),
            expert=WeightWork(
                (file_bytes - others / 8) / n_pieces,
                work.expert.n_weights,
                kernel.cpu_cost,
                kernel.read_cost,
                kernel.row_share,
            ),
        )

    @property
    def _unquantised(self) -> tuple[int, int]:
        """The layers' dense weights that files do not quantise, and their bits."""
        assert self._facts is not None
        found = [
            (math.prod(entry.shape), _HC_BITS if ".hc_" in entry.name else 32)
            for entry in self._facts.loaded
            if entry.type == "f32" and len(entry.shape) > 1
            if layer_of(entry.name) >= 0 and not is_experts(entry)
        ]
        return sum(n for n, _ in found), sum(n * bits for n, bits in found)

    def machine(self, n_tokens: int = 1, *, before: bool = False) -> Machine:
        """The machine as the case's engine uses it in batches of `n_tokens`."""
        case = self.case
        repacks = case.engine.startswith(_REPACKING)
        flops = case.n_cores * (REPACKED_CORE_FLOPS if repacks else CORE_FLOPS)
        _, vram_gbs, tflops = CARDS.get(case.gpu, (0, case.ram_gbs, flops / 1e12))
        if before:
            return replace(
                BEFORE, ram_bytes_per_s=0.8 * case.ram_gbs * 1e9,
                vram_bytes_per_s=vram_gbs * 1e9, cpu_flops=flops,
            )  # fmt: skip
        ram, shared = ram_seen(case.ram_gbs * 1e9, case.n_channels, case.n_sockets)
        if case.gpu == NO_GPU:
            return replace(
                TYPICAL, ram_bytes_per_s=ram, vram_bytes_per_s=ram, gpu_flops=flops,
                cpu_flops=flops, per_switch_s=0.0, per_kernel_s=0.0,
            )  # fmt: skip
        if case.on_one_socket:
            ram, shared = ram_seen(case.ram_gbs * 1e9 / 2, case.n_channels // 2)
        return replace(
            TYPICAL, ram_bytes_per_s=ram, shared_ram_bytes_per_s=shared,
            vram_bytes_per_s=vram_seen(vram_gbs * 1e9), gpu_flops=tflops * 1e12, cpu_flops=flops,
            per_kernel_s=SLOW_KERNELS_S.get(
                case.gpu, CAPTURED_KERNEL_S if case.captures(n_tokens) else LAUNCHED_KERNEL_S
            ),
            link_bytes_per_s=(
                PINNED_SHARE * case.pcie_gbs * 1e9
                if case.is_pinned
                else unpinned_seen(case.pcie_gbs * 1e9, shared or ram)
            ),
        )  # fmt: skip

    @property
    def sharing(self) -> Sharing:
        case = self.case
        if case.n_layers_on_gpu is not None:
            return Sharing(n_dense_streamed=case.dense["n_layers"] - case.n_layers_on_gpu)
        n_resident = min(case.n_resident_layers, self.work.n_expert_layers)
        n_streamed = self.work.n_expert_layers - n_resident
        # Without a cache there are slots for one layer's experts: nothing is kept, and no copy
        # hides behind computation.
        n_slots = case.slots * n_streamed * self.work.n_experts or self.work.n_experts
        return Sharing(n_slots, n_resident)

    def _at(self, n_context: int, n_prompt: int = 0) -> ModelWork:
        kind = "q8_0" if "q8_0" in self.case.flags else "f16"
        options = ContextOptions(max(1, n_context), type_k=kind, type_v=kind)
        if self._facts is None:
            n_bytes = self.case.dense["kv_bytes_per_token"] * (n_context + n_prompt / 2)
            return replace(self.work, context=WeightWork(n_bytes, 4 * n_bytes))
        if n_prompt:
            return with_prompt(self.work, self._facts, options, n_prompt, n_context)
        return with_context(self.work, self._facts, options)

    def at_context(self) -> ModelWork:
        """The work of decodes at the case's context."""
        return self._at(self.case.context)

    def batch_s(self, n_tokens: int) -> float:
        """Seconds of a decode of `n_tokens` in the case's way."""
        machine = self.machine(n_tokens)
        return way_s(self.case, machine, self.at_context(), self.sharing, n_tokens)

    @property
    def draft_step_s(self) -> float:
        """Seconds of a draft step: a layer of the model, where the others are, and the output."""
        machine, work = self.machine(), self.work
        head_s = work.head.size_bytes / machine.vram_bytes_per_s
        return float((self.batch_s(1) - head_s) / work.n_layers + head_s + machine.per_decode_s)

    @cached_property
    def decode_tps(self) -> float:
        case, n = self.case, self.case.n_drafted
        return case.tokens_per_round / (self.batch_s(1 + n) + n * self.draft_step_s)

    @cached_property
    def decode_tps_before(self) -> float:
        return 1 / float(cpu_s(self.machine(before=True), self.work, self.sharing, 1))

    @cached_property
    def prompt_tps(self) -> float | None:
        """Tokens/s of the prompt, which is computed in ubatches. Each copies all weights again."""
        case = self.case
        if case.pp_tps is None or not case.prompt:
            return None
        ways = {"streams": copied_s, AHEAD: copied_ahead_s, "on the CPU": cpu_s}
        seconds = ways[case.prompt]
        work = self._at(case.n_before, case.n_prompt)
        whole, rest = divmod(case.n_prompt, case.ubatch)
        sizes = [case.ubatch] * whole + [rest] * (rest > 0)
        s_by_size = {n: float(seconds(self.machine(n), work, self.sharing, n)) for n in set(sizes)}
        choosing_s = case.n_prompt * self.n_choosing * CHOICE_S if case.chooses_by_row else 0.0
        return case.n_prompt / (sum(s_by_size[n] for n in sizes) + choosing_s)

    @property
    def n_choosing(self) -> int:
        """Layers whose indexer chooses keys."""
        if self._facts is None:
            return 0
        names = {e.name for e in self._facts.loaded if "indexer" in e.name}
        return len({layer_of(name) for name in names})


@dataclass(frozen=True)
class Errors:
    """How far ratios of predicted to published speeds are from 1."""

    ratios: Sequence[float]
    limit: float

    def __str__(self) -> str:
        near = sum(abs(r - 1) <= self.limit for r in self.ratios) / len(self.ratios)
        return (
            f"{statistics.median(self.ratios):.2f} | {near:.0%} | "
            f"{min(self.ratios):.2f} to {max(self.ratios):.2f} | {len(self.ratios)}"
        )


def facts_by_model(cases: Sequence[Case]) -> dict[str, ModelFacts]:
    """Return the facts of each published model that the cases name."""
    names = dict.fromkeys(case.model for case in cases if not case.dense)
    with tempfile.TemporaryDirectory() as folder:
        return {name: published_facts(name, Path(folder)) for name in names}


def predictions(cases: Sequence[Case]) -> list[Prediction]:
    found = facts_by_model(cases)
    return [Prediction(case, found.get(case.model)) for case in cases]


def decode_ratios(some: Sequence[Prediction], *, before: bool = False) -> list[float]:
    return [(p.decode_tps_before if before else p.decode_tps) / p.case.tg_tps for p in some]


def prompt_ratios(some: Sequence[Prediction]) -> list[float]:
    return [p.prompt_tps / p.case.pp_tps for p in some if p.prompt_tps and p.case.pp_tps]


def summary(all_of: Sequence[Prediction]) -> str:
    heads = ("what", "cases", "median", "near", "range", "n")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    parts = {
        "corrected by": [p for p in all_of if p.case.corrects],
        "checked by": [p for p in all_of if not p.case.corrects],
        "all": list(all_of),
    }
    for name, some in parts.items():
        lines.append(f"| decode | {name} | {Errors(decode_ratios(some), DECODE_ERROR)} |")
    for name, some in parts.items():
        errors = Errors(list(by_machine(some).values()), DECODE_ERROR)
        lines.append(f"| decode, by machine | {name} | {errors} |")
    for model in ("gpt-oss-120b", "Qwen3.6-35B-A3B", "Qwen3.8-Flash-Next"):
        for name, some in parts.items():
            its = [p for p in some if p.case.model == model]
            lines.append(
                f"| decode, {model} | {name} | {Errors(decode_ratios(its), DECODE_ERROR)} |"
            )
    before = Errors(decode_ratios(parts["all"], before=True), DECODE_ERROR)
    lines.append(f"| decode, data sheets' rates | all | {before} |")
    for name, some in parts.items():
        lines.append(f"| prompt | {name} | {Errors(prompt_ratios(some), PROMPT_ERROR)} |")
    for way in ("streams", AHEAD, "on the CPU"):
        for name, some in parts.items():
            its = [p for p in some if p.case.prompt == way]
            lines.append(f"| prompt, {way} | {name} | {Errors(prompt_ratios(its), PROMPT_ERROR)} |")
    return "\n".join(lines)


def _machine_words(case: Case) -> str:
    gpu = f"{case.n_gpus} × {case.gpu}" if case.n_gpus > 1 else case.gpu
    return f"{gpu}, {case.cpu}, {case.ram_gbs:g} GB/s"


def misses(all_of: Sequence[Prediction]) -> str:
    """The machines whose decodes are further off than what is aimed at."""
    heads = "| machine | models | decode, predicted ÷ published | cases |"
    lines = [heads, "|---|---|---|---|"]
    for name, ratio in by_machine(all_of).items():
        if abs(ratio - 1) > DECODE_ERROR:
            its = [p.case for p in all_of if p.case.machine == name]
            models = ", ".join(dict.fromkeys(case.model for case in its))
            lines.append(f"| {name} | {models} | {ratio:.2f} | {', '.join(c.id for c in its)} |")
    return "\n".join(lines)


def table(all_of: Sequence[Prediction]) -> str:
    heads = ("case", "model, file", "machine", "engine", "way", "context", "decode: published",
             "predicted", "ratio", "prompt: published", "predicted", "ratio")  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for p in all_of:
        case = p.case
        prompt = ["", "", ""]
        if p.prompt_tps and case.pp_tps:
            ratio = p.prompt_tps / case.pp_tps
            prompt = [f"{case.pp_tps:.0f}", f"{p.prompt_tps:.0f}", f"{ratio:.2f}"]
        cells = (
            f"[{case.id}]({case.source}){'' if case.corrects else ' ✓'}",
            f"{case.model} {case.quant}, {case.file_gib:g} GiB", _machine_words(case), case.engine,
            case.way, str(case.context), f"{case.tg_tps:g}", f"{p.decode_tps:.1f}",
            f"**{p.decode_tps / case.tg_tps:.2f}**", *prompt,
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(all_of: Sequence[Prediction], path: Path = PLOT) -> None:
    """Draw predicted against published speeds on logarithmic axes."""
    import matplotlib  # noqa: PLC0415 (of the extra `plot`)

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415
    from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter  # noqa: PLC0415

    figure, axes = plt.subplots(1, 2, figsize=(11, 5.2))
    engines = sorted({p.case.engine for p in all_of})
    for axis, title, error in zip(
        axes, ("Decode", "Prompt"), (DECODE_ERROR, PROMPT_ERROR), strict=True
    ):
        for engine in engines:
            points = [
                (p.case.tg_tps, p.decode_tps)
                if title == "Decode"
                else (p.case.pp_tps, p.prompt_tps)
                for p in all_of
                if p.case.engine == engine
            ]
            points = [(x, y) for x, y in points if x and y]
            axis.scatter(*zip(*points, strict=True) if points else ([], []), s=22, label=engine)
        low, high = (4, 100) if title == "Decode" else (15, 2500)
        axis.plot([low, high], [low, high], color="black", linewidth=0.8)
        axis.fill_between(
            [low, high], [low * (1 - error), high * (1 - error)],
            [low * (1 + error), high * (1 + error)], alpha=0.12, color="grey",
        )  # fmt: skip
        axis.set(xscale="log", yscale="log", title=f"{title}, ± {error:.0%} shaded",
                 xlabel="published, tokens/s", ylabel="predicted, tokens/s")  # fmt: skip
        ticks = [n for n in (5, 10, 20, 50, 100, 200, 500, 1000, 2000) if low < n < high]
        for ruler in (axis.xaxis, axis.yaxis):
            ruler.set_major_locator(FixedLocator(ticks))
            ruler.set_major_formatter(ScalarFormatter())
            ruler.set_minor_locator(NullLocator())
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def page(all_of: Sequence[Prediction]) -> str:
    """The text of docs/validation.md with new tables."""
    return filled(
        PAGE, {"summary": summary(all_of), "misses": misses(all_of), "cases": table(all_of)}
    )


def main() -> None:
    """Compare the machine model with published speeds; write the page and the plot."""
    all_of = predictions(read_cases())
    PAGE.write_text(page(all_of), encoding="utf-8")
    draw(all_of)
    typer.echo(summary(all_of))


if __name__ == "__main__":
    typer.run(main)
