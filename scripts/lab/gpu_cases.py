"""The cases of docs/gpu.md's table of step times, and how each is timed and predicted.

All cases use one model of Qwen3-30B-A3B's widths with fewer layers. Nothing here knows what kind of
device computes. `scripts/lab/run virtual-gpu` times the cases on the stand-in for CUDA, whose clock
is virtual, and `scripts/gpu-check steps-table` times them on a card.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lab.options import Streaming, engine_options
from lab.synth import write_preset
from lab.synth.routing import drawn_text
from offload.engine import Engine, EngineOptions
from offload.model import ModelFacts, layer_of
from offload.plan.placement import PlanRequest, make_plan
from offload.plan.search import overlap_s
from offload.times.context_memory import ContextOptions
from offload.times.decodes import streamed_s
from offload.times.hits import Sharing
from offload.times.machine import Machine
from offload.times.min_batch import MinBatch
from offload.times.prompts import with_prompt
from offload.times.work import model_work, with_context

MODEL: dict[str, Any] = {"size": "full", "n_layer": 16, "n_vocab": 16384, "quant": "q4_K"}
FEW: dict[str, Any] = {"n_layer": 8, "n_expert": 32}
SMALL: dict[str, Any] = {
    "size": "tiny", "quant": "q4_K", "n_embd": 256, "n_ff": 256, "n_ff_exp": 256, "n_expert": 32,
}  # fmt: skip
DRAFTS = (1, 5, 2, 9, 3)  # tokens of decodes that follow each other, as drafts change them
DECODE, CHANGING = "decode", "drafts of changing length"
N_WARM, N_TIMED, N_TURNS = 64, 48, 12
_N_CTX = 4608


@dataclass(frozen=True)
class Setup:
    """An engine of the table. `share` of the experts has slots; None: all weights are resident."""

    name: str
    share: float | None = None
    n_devices: int = 1
    prompts: tuple[int, ...] = (512, 4096)
    n_ubatch: int = 2048


SETUPS = (
    Setup("resident"),
    Setup("100 % in slots", 1.0, prompts=()),
    Setup("95 % in slots", 0.95, prompts=()),
    Setup("50 % in slots", 0.5),
    Setup("resident, two devices", n_devices=2, prompts=(4096,), n_ubatch=512),
    Setup("50 % in slots, two devices", 0.5, 2, prompts=(4096,), n_ubatch=512),
    # Less than two layers: prompts are computed in passes.
    Setup("10 % in slots", 0.1),
    Setup("3 % in slots", 0.03),
)


@dataclass(frozen=True)
class Share:
    """A device's layers `first` to `end - 1`, the output being the last one, and its slots."""

    first: int
    end: int
    n_slots: int


@dataclass(frozen=True)
class Row:
    """A case's time per step, and what happened in it.

    A step is one decode, one prompt, or one decode of the mean over `DRAFTS`.
    """

    setup: str
    case: str
    step_s: float
    copied_bytes: float  # to all devices
    hit_share: float | None  # of the uses of streamed experts; None: nothing streams
    router_reads: float
    shares: tuple[Share, ...]  # of the devices
    n_deferred: float  # graphs that a device computed beside the next ubatch of the others
    host_s: float | None = None  # of a step in which the decoding thread waited for nothing

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def prompt_name(n_tokens: int) -> str:
    return f"prompt of {n_tokens:,}"


def write_model(folder: Path, changes: dict[str, Any]) -> Path:
    """Write the model with some changes, unless it is there."""
    name = "-".join(f"{key}-{value}" for key, value in changes.items())
    path = folder / f"table-{name}.gguf"
    if not path.exists():
        write_preset("qwen3-30b-a3b", path, seed=3, routing="drifting", **{**MODEL, **changes})
    return path


def options_of(
    facts: ModelFacts, setup: Setup, devices: Sequence[str], n_threads: int
) -> EngineOptions:
    """Options of a setup's engine on the first of `devices`, which computes all batches."""
    streaming = Streaming()
    if setup.share is not None:
        plan = make_plan(facts, PlanRequest(n_cpu_moe=999))
        one_token_bytes = sum(pool.n_used * pool.slot_bytes for pool in plan.layout.pools)
        slot_bytes = max(int(setup.share * plan.slot_bytes), one_token_bytes * setup.n_devices)
        n_bytes = plan.resident_bytes + slot_bytes
        streaming = Streaming(vram_bytes=n_bytes // setup.n_devices, n_cpu_moe=999, passes="on")
    return engine_options(
        device=",".join(devices[: setup.n_devices]), streaming=streaming,
        stream_experts=setup.share is not None, min_batch=MinBatch(1, 1), n_ctx=_N_CTX,
        n_batch=_N_CTX, n_ubatch=setup.n_ubatch, n_outputs=64, n_threads=n_threads,
        n_threads_batch=n_threads, flash_attn="auto",
        tensor_split=(1,) * setup.n_devices if setup.n_devices > 1 else (),
    )  # fmt: skip


class Timed:
    """Times the cases of one setup in an open engine."""

    def __init__(
        self, setup: Setup, engine: Engine, waited_s: Callable[[], float] | None = None
    ) -> None:
        """`waited_s` returns the seconds for which the calling thread has waited, if known."""
        self._setup, self._engine, self._waited_s = setup, engine, waited_s
        self._shares = shares_of(setup, engine)
        if setup.share == 1.0:
            _fill(engine)

    def rows(self, seed: int) -> Iterator[Row]:
        """Time each case once, with a text of its own for each `seed`."""
        n_vocab = self._engine.n_vocab
        text = drawn_text(n_vocab, N_WARM + N_TIMED + N_TURNS * sum(DRAFTS), seed=seed)
        self._engine.sequences.rewind(0, 0)
        for token in text[:N_WARM]:
            self._engine.sequences.extend(0, [token], n_logits=1)
        yield self._row(DECODE, [[t] for t in text[N_WARM:][:N_TIMED]], statistics.median)
        yield self._row(CHANGING, list(_in_turns(text[N_WARM + N_TIMED :])), statistics.mean)
        for n_tokens in self._setup.prompts:
            steps = [_prompt(n_vocab, n_tokens, 3 * seed + i) for i in range(3)]
            yield self._row(prompt_name(n_tokens), steps, statistics.median, rewinds=True)

    def _row(
        self,
        case: str,
        steps: Sequence[Sequence[int]],
        average: Callable[[Sequence[float]], float],
        *,
        rewinds: bool = False,
    ) -> Row:
        sequences, times, host = self._engine.sequences, list[float](), list[float]()
        waited_s = self._waited_s or (lambda: 0.0)
        n_first = len(steps) // 3  # for warm-up: each size has come several times
        for i, tokens in enumerate(steps):
            if i == n_first:
                before = self._engine.counters()
            if rewinds:
                sequences.rewind(0, 0)
            start_s, before_s = time.perf_counter(), waited_s()
            sequences.extend(0, list(tokens), n_logits=1 if rewinds else len(tokens))
            times.append(time.perf_counter() - start_s)
            host.append(times[-1] - (waited_s() - before_s))
        after, timed = self._engine.counters(), times[n_first:]
        hits, misses = after.hits - before.hits, after.misses - before.misses
        return Row(
            self._setup.name, case, average(timed),
            (after.streamed_bytes - before.streamed_bytes) / len(timed),
            hits / (hits + misses) if hits + misses else None,
            (after.router_reads - before.router_reads) / len(timed), self._shares,
            (after.n_deferred - before.n_deferred) / len(timed),
            None if self._waited_s is None else average(host[n_first:]),
        )  # fmt: skip


def _in_turns(text: Sequence[int]) -> Iterator[list[int]]:
    at = 0
    for i in range(N_TURNS * len(DRAFTS)):
        n = DRAFTS[i % len(DRAFTS)]
        yield [*text[at : at + n]]
        at += n


def _prompt(n_vocab: int, n_tokens: int, seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng((n_tokens, seed)).integers(0, n_vocab, n_tokens)]


def shares_of(setup: Setup, engine: Engine) -> tuple[Share, ...]:
    """The layers of an engine's devices, and their slots."""
    n = engine.facts.n_layers
    firsts, slots = [0], [0]
    if setup.n_devices > 1:
        firsts = [0, -(-(n + 1) // 2)]  # as libllama divides resident layers
    if setup.share is not None:
        layers = [
            {layer_of(e.name) for e in part.plan.streamed} for part in engine.opened.weights.parts
        ]
        firsts = [0, *(min(found) for found in layers[1:])]
        slots = [
            sum(p.n_slots for p in part.plan.layout.pools) for part in engine.opened.weights.parts
        ]
    ends = [*firsts[1:], n + 1]
    slots = slots * len(firsts) if len(slots) < len(firsts) else slots
    return tuple(Share(*each) for each in zip(firsts, ends, slots, strict=True))


def _fill(engine: Engine) -> None:
    """Copy all experts into their slots."""
    for device in engine.opened.devices:
        layers = {layer: [1] * engine.facts.n_experts for layer in range(engine.facts.n_layers)}
        for _ in device.fill(layers):
            pass


def predicted_s(
    machine: Machine,
    facts: ModelFacts,
    setup: Setup,
    case: str,
    shares: Sequence[Share],
    hits: float | None,
) -> float:
    """Return the seconds that the plan's model of the machine predicts for a case's step.

    `shares` are those of the setup's devices. `hits`: the share of hits that was counted in the
    case's decodes, as a plan uses those of a model that it knows. None: nothing streams. Prompts'
    hits are those that the plan expects.
    """
    each_s, n_ubatches = [], 1
    for share in shares:
        part = facts.part(share.first, share.end)
        work = model_work(part)
        n_pieces = work.n_expert_layers * work.n_experts
        holds_all = setup.share is None or share.n_slots >= n_pieces
        sharing = Sharing(n_resident=work.n_expert_layers) if holds_all else Sharing(share.n_slots)
        handed_s = machine.per_switch_s if share.first else 0.0
        if case in (DECODE, CHANGING):
            work = with_context(work, part, ContextOptions(N_WARM + N_TIMED))
            sizes = (1,) if case == DECODE else DRAFTS
            steps = (float(streamed_s(machine, work, sharing, n, hits)) + handed_s for n in sizes)
            # In drafts of changing length, a single token follows a batch of another size, too.
            anew_s = 0.0 if case == DECODE else machine.per_new_layer_s * work.n_layers
            each_s.append(statistics.mean(steps) + anew_s * sizes.count(1) / len(sizes))
        else:
            n_tokens = next(n for n in setup.prompts if case == prompt_name(n))
            work = with_prompt(work, part, ContextOptions(), n_tokens)
            n_ubatch = min(n_tokens, setup.n_ubatch)
            n_ubatches = n_tokens // n_ubatch
            ubatch_s = float(streamed_s(machine, work, sharing, n_ubatch)) + handed_s
            each_s.append(n_ubatches * ubatch_s)
    *front_s, last_s = each_s
    return sum(each_s) - float(overlap_s(sum(front_s), last_s, n_ubatches))
