"""Compares the machine model with speeds that others measured, and makes docs/validation.md.

Each line of published.jsonl is one run of llama.cpp, ik_llama.cpp or KTransformers: a model, its
file's size, a machine, and where the weights were. The plan's functions are asked for the time of
*that* way, so the comparison tests the model of the machine and not our own scheduling. No model is
opened, and nothing is measured here.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import typer

from lab import ROOT, filled
from lab.synth.published import published_facts
from offload.model import ModelFacts
from offload.plan.llama_cpp import copied_s
from offload.times.context import ContextOptions
from offload.times.decodes import cpu_s
from offload.times.hits import Sharing
from offload.times.machine import CORE_FLOPS, TYPICAL, Machine, ram_seen, vram_seen
from offload.times.prompts import with_prompt
from offload.times.work import ModelWork, Part, cpu_cost, model_work, read_cost, with_context
from specoffload.config.hardware_parts import CARDS

GIB = 1 << 30
CASES = ROOT / "scripts" / "lab" / "published.jsonl"
PAGE = ROOT / "docs" / "validation.md"
PLOT = ROOT / "docs" / "validation.png"
REPACKED_CORE_FLOPS = 200e9  # operations per second of one core in prompts, with repacked blocks
# Other programs' copies of weights that are not pinned: a share of the pinned rate, and a limit, as
# one thread moves them through pinned buffers.
UNPINNED_SHARE, MOST_UNPINNED_BYTES_PER_S = 0.64, 22e9
PINNED_SHARE = 25 / 32  # rate of pinned copies, as a share of the link's data sheet
# Operations per second of one core in prompts: these engines but llama.cpp repack the weights.
_CORE_FLOPS = {
    "llama.cpp": CORE_FLOPS, "ik_llama.cpp": REPACKED_CORE_FLOPS,
    "KTransformers 0.2": REPACKED_CORE_FLOPS,
}  # fmt: skip
# Facts of the files, not of the machines: what a header written by us does not say of theirs.
HEAD_BITS, EMBEDDING_BITS = 6.56, 4.5  # bits a weight of files with 4-bit experts
DENSE_BITS = 8.5  # of files that keep all but the experts in 8 bits
DECODE_ERROR, PROMPT_ERROR = 0.25, 0.40  # errors that are aimed at
NO_GPU = "none"  # the card of a case that was run on the CPU alone
# The model as it was before these cases corrected it, with the rates of data sheets.
BEFORE = Machine(
    per_switch_s=40e-6, per_wait_s=40e-6, per_batch_wait_s=40e-6, per_decode_s=0, per_new_layer_s=0
)


def unpinned_seen(bytes_per_s: float) -> float:
    """Return the rate of copies from memory that is not pinned, from the rate of pinned copies."""
    return min(UNPINNED_SHARE * bytes_per_s, MOST_UNPINNED_BYTES_PER_S)


@dataclass(frozen=True)
class Case:
    """One published run. Speeds are in tokens/s."""

    id: str
    model: str
    quant: str
    file_gib: float
    gpu: str
    n_gpus: int
    pcie_gbs: float
    cpu: str
    n_cores: int
    ram_gbs: float
    n_channels: int
    n_sockets: int
    engine: str
    source: str
    tg_tps: float
    context: int
    ubatch: int
    n_prompt: int
    flags: str = ""
    pp_tps: float | None = None
    prompt: str = ""  # how the engine computed prompts: "streams" or "on the CPU"
    n_resident_layers: float = 0  # layers whose experts were on the GPU
    n_layers_on_gpu: int | None = None  # of a dense model
    dense: dict[str, int] = field(default_factory=dict)  # facts of a dense model without a preset
    notes: str = ""
    guessed: str = ""  # facts that the source does not give

    @property
    def corrects(self) -> bool:
        """True if the case may be used to correct the machine model; others only check it."""
        return hashlib.sha256(self.id.encode()).digest()[-1] % 2 == 1

    @property
    def way(self) -> str:
        if self.n_layers_on_gpu is not None:
            return f"{self.n_layers_on_gpu} of {self.dense['n_layers']} layers on the GPU"
        n = f"{self.n_resident_layers:g}"
        return "experts on the CPU" + (f", {n} layers' on the GPU" if n != "0" else "")

    @property
    def on_one_socket(self) -> bool:
        return "bound to one socket" in self.notes

    @property
    def is_pinned(self) -> bool:
        """True if the engine keeps weights in pinned memory, and does not map the file."""
        return any(f"--load-mode {mode}" in self.flags for mode in ("dio", "none"))

    @property
    def n_before(self) -> int:
        """Tokens of the context before the prompt. A context may count the prompt itself."""
        return 0 if self.context == self.n_prompt else self.context

    @property
    def machine(self) -> str:
        """The card, the CPU and the rate of RAM, by which errors are counted."""
        return f"{self.gpu}, {self.cpu}, {self.ram_gbs:g} GB/s"


def read_cases(path: Path = CASES) -> list[Case]:
    return [Case(**json.loads(line)) for line in path.read_text("utf-8").splitlines()]


def by_machine(some: Sequence[Prediction], *, before: bool = False) -> dict[str, float]:
    """Return the median ratio of decodes by machine.

    Many cases of one machine say one thing, so they count once. `before`: with data sheets' rates.
    """
    found: dict[str, list[float]] = {}
    for p in some:
        found.setdefault(p.case.machine, []).extend(decode_ratios([p], before=before))
    return {name: statistics.median(ratios) for name, ratios in found.items()}


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
            head = Part(n_head * HEAD_BITS / 8, n_head)
            layer_bytes = (file_bytes - head.size_bytes) / n_layers
            return ModelWork(n_layers, Part(layer_bytes, layer_bytes * 8 / 4.85), head)
        work = model_work(self._facts)
        n_dense = work.dense.n_weights * work.n_layers
        n_pieces = work.n_experts * work.n_expert_layers
        n_all = n_dense + 2 * work.head.n_weights + n_pieces * work.expert.n_weights
        keeps = any(name in case.quant for name in ("_R4", "IQ6_K", "mix", "Q8"))
        bits = DENSE_BITS if keeps else min(DENSE_BITS, max(5.5, 1.1 * 8 * file_bytes / n_all))
        others = n_dense * bits + work.head.n_weights * (HEAD_BITS + EMBEDDING_BITS)
        return replace(
            work,
            dense=replace(work.dense, size_bytes=n_dense * bits / 8 / work.n_layers),
            head=replace(work.head, size_bytes=work.head.n_weights * HEAD_BITS / 8),
            expert=Part(
                (file_bytes - others / 8) / n_pieces,
                work.expert.n_weights,
                cpu_cost(case.quant),
                read_cost(case.quant),
            ),
        )

    def machine(self, *, before: bool = False) -> Machine:
        case = self.case
        flops = case.n_cores * _CORE_FLOPS[case.engine]
        _, vram_gbs, tflops = CARDS.get(case.gpu, (0, case.ram_gbs, flops / 1e12))
        if before:
            rates = 0.8 * case.ram_gbs * 1e9, None
            return replace(
                BEFORE, ram_bytes_per_s=rates[0], vram_bytes_per_s=vram_gbs * 1e9, cpu_flops=flops
            )
        ram, shared = ram_seen(case.ram_gbs * 1e9, case.n_channels, case.n_sockets)
        if case.gpu == NO_GPU:
            return replace(
                TYPICAL, ram_bytes_per_s=ram, vram_bytes_per_s=ram, gpu_flops=flops,
                cpu_flops=flops, per_switch_s=0.0, per_layer_s=0.0,
            )  # fmt: skip
        if case.on_one_socket:
            ram, shared = ram_seen(case.ram_gbs * 1e9 / 2, case.n_channels // 2)
        return replace(
            TYPICAL, ram_bytes_per_s=ram, shared_ram_bytes_per_s=shared,
            vram_bytes_per_s=vram_seen(vram_gbs * 1e9), gpu_flops=tflops * 1e12, cpu_flops=flops,
            link_bytes_per_s=(
                PINNED_SHARE * case.pcie_gbs * 1e9
                if case.is_pinned
                else unpinned_seen(case.pcie_gbs * 1e9)
            ),
        )  # fmt: skip

    @property
    def sharing(self) -> Sharing:
        case = self.case
        if case.n_layers_on_gpu is not None:
            return Sharing(n_dense_streamed=case.dense["n_layers"] - case.n_layers_on_gpu)
        # Slots for one layer's experts: nothing is kept, and no copy hides behind computation.
        return Sharing(self.work.n_experts, case.n_resident_layers)

    def _at(self, n_context: int, n_prompt: int = 0) -> ModelWork:
        kind = "q8_0" if "q8_0" in self.case.flags else "f16"
        options = ContextOptions(max(1, n_context), type_k=kind, type_v=kind)
        if self._facts is None:
            n_bytes = self.case.dense["kv_bytes_per_token"] * (n_context + n_prompt / 2)
            return replace(self.work, context=Part(n_bytes, 4 * n_bytes))
        if n_prompt:
            return with_prompt(self.work, self._facts, options, n_prompt, n_context)
        return with_context(self.work, self._facts, options)

    def at_context(self) -> ModelWork:
        """The work of decodes at the case's context."""
        return self._at(self.case.context)

    @cached_property
    def decode_tps(self) -> float:
        return 1 / float(cpu_s(self.machine(), self.at_context(), self.sharing, 1))

    @cached_property
    def decode_tps_before(self) -> float:
        return 1 / float(cpu_s(self.machine(before=True), self.work, self.sharing, 1))

    @cached_property
    def prompt_tps(self) -> float | None:
        """Tokens/s of the prompt, which is computed in ubatches. Each copies all weights again."""
        case = self.case
        if case.pp_tps is None or not case.prompt:
            return None
        seconds = copied_s if case.prompt == "streams" else cpu_s
        work = self._at(case.n_before, case.n_prompt)
        whole, rest = divmod(case.n_prompt, case.ubatch)
        sizes = [case.ubatch] * whole + [rest] * (rest > 0)
        s_by_size = {n: float(seconds(self.machine(), work, self.sharing, n)) for n in set(sizes)}
        return case.n_prompt / sum(s_by_size[n] for n in sizes)


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
    gpt_oss = [p for p in all_of if p.case.model == "gpt-oss-120b"]
    lines.append(f"| decode, gpt-oss-120b | all | {Errors(decode_ratios(gpt_oss), DECODE_ERROR)} |")
    before = Errors(decode_ratios(parts["all"], before=True), DECODE_ERROR)
    lines.append(f"| decode, data sheets' rates | all | {before} |")
    for name, some in parts.items():
        lines.append(f"| prompt | {name} | {Errors(prompt_ratios(some), PROMPT_ERROR)} |")
    for way in ("streams", "on the CPU"):
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
