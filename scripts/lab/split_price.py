"""Prices a split layer in virtual time: with a wait of the host, and with a doorbell.

Both ways run on the stand-in for CUDA, under its clock (docs/gpu.md). They are the program itself:
the real player, libllama and ggml-cuda. Prototypes (doorbell.c) make calls of the CUDA runtime in
the order of these ways, and of ways that were not built. Their device computes as long in each
layer as it was seen to compute in the program if it waits.

    scripts/lab/run split-price --write    time all rows, keep them, and write docs/gpu.md
    scripts/lab/run split-price --page     only write docs/gpu.md again, from the kept rows
    scripts/lab/run split-price --json     only the program itself, on one card

`scripts/lab/split_price.json` keeps the rows with the machine, the date and the commit. A test
compares the table of docs/gpu.md with them.
"""

from __future__ import annotations

import argparse
import ctypes as C
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from lab import ROOT
from lab.options import engine_options
from lab.tables import filled, page_of
from lab.timing import seconds
from lab.virtual_gpu import (
    CARDS,
    again_on_standin,
    has_clock,
    set_rate,
    use_card,
    use_virtual_time,
)

PAGE = page_of("split-price")
KEPT = ROOT / "scripts" / "lab" / "split_price.json"
WORTH = 0.03  # least share of a decode for which the doorbell is built
AHEAD = "0, ahead"
_ENVIRONMENT = {"STANDIN_CLOCK": "1", "STANDIN_SKIP": "products", "STANDIN_FILL": "0"}
_N_VOCAB = 16384

# Seconds beside bytes / rate. docs/gpu.md has the ranges that are published, with sources.
LATENCIES = {
    "copy_latency_s": 4e-6,  # and 2 us on the engine
    "event_wait_s": 1.5e-6,
    "value_write_s": 3e-6,
    "value_wait_s": 3e-6,
    "mapped_s": 1.5e-6,
}
HOST_GRAPH_S = 5e-6  # to begin and end a graph on all threads of the CPU
# The host's time for a layer, as seen in the timeline of decodes on an AMD EPYC: from its ids to
# the submission of its products, and for submitting a graph beside the runtime's own call. What
# follows the CPU's rows is the rest of the player's 4 to 9 us (docs/results.md).
DIVIDE_S, AFTER_S, SUBMIT_S, LAUNCH_S = 2e-6, 3e-6, 4e-6, 2.2e-6
LAYERS_AHEAD = 4  # layers that the prototype enqueues before it answers the first of them


@dataclass(frozen=True)
class Shape:
    """A model of real widths, with few layers and experts. `title`: the published model.

    `goes_ahead`: False if the player never computes its layers ahead, as with recurrent states.
    """

    title: str
    preset: str
    n_layer: int
    n_expert: int
    overrides: tuple[tuple[str, Any], ...] = ()
    goes_ahead: bool = True


SHAPES = (
    Shape("Qwen3-30B-A3B", "qwen3-30b-a3b", 9, 32),
    # Of Qwen3.8-Flash-Next's widths. The pinned llama.cpp does not know its architecture.
    Shape("Qwen3.8-Flash-Next", "qwen3-next-80b-a3b", 9, 40,
          (("n_embd", 2560), ("n_ff_exp", 640)), goes_ahead=False),
    Shape("gpt-oss-120b", "gpt-oss-120b", 9, 16),
    Shape("DeepSeek-R1", "deepseek-r1", 8, 16),
)  # fmt: skip
PRICED = ("RTX 4090", "RTX 3060")


@dataclass(frozen=True)
class Price:
    """A layer's virtual seconds in each way, for one token. `scale` multiplies LATENCIES.

    `n_host`: experts that the CPU computes; AHEAD: none, and the player computes layers ahead.
    `today_s` and `built_s` are the program, with a wait and with a doorbell. `copied_s` and
    `pinned_doorbell_s` are their prototypes. In the ways named `pinned`, kernels write and read
    pinned memory in place of copies. `doorbell_s` is a doorbell with copies, a prototype.

    `bound_s`: what no order of a layer's work can beat, the device's work before the experts and
    then the longer one of device and CPU. `rest_s`: a decode's time outside of split layers.
    """

    model: str
    card: str
    n_host: str
    scale: float
    n_layers: int
    today_s: float
    built_s: float
    copied_s: float | None  # None: today nothing is placed if the CPU computes nothing
    pinned_s: float | None
    doorbell_s: float
    pinned_doorbell_s: float
    bound_s: float
    rest_s: float

    @property
    def decode_s(self) -> float:
        """A decode whose layers all are like this one, today."""
        return self.n_layers * self.today_s + self.rest_s

    def saved_share(self, layer_s: float | None) -> float | None:
        """The share of that decode that is saved if a layer takes `layer_s`."""
        return None if layer_s is None else self.n_layers * (self.today_s - layer_s) / self.decode_s


# -- today -----------------------------------------------------------------------------------------


def _leaving(n_host: int) -> Any:
    """A splitter that copies missing experts until the CPU has `n_host` of a token's experts.

    A copy takes longer than these experts take the CPU, and less than one expert more.
    """
    from offload.schedule.division import SplitCosts
    from offload.schedule.splitter import ByCosts

    unit_s = 1e-9  # so short that a decode without a wait never seems to lose by it
    host_s = unit_s * np.array([0.0, 1.0, 1.0])
    return ByCosts(SplitCosts(host_s, np.zeros(3), 0.0, 0.0, unit_s * (n_host + 0.5)))


@dataclass(frozen=True)
class Layers:
    """A decode's split layers on the device's clock, and the host's time from one to the next."""

    period_s: float
    span_s: float  # from the beginning of the first graph to the end of the last one
    before_s: tuple[float, ...]  # attention and router, by layer
    products_s: tuple[float, ...]  # the experts' products, and what needs no rows of the CPU


_FEW_GRAPHS = 3  # most graphs of a decode whose layers are computed ahead


class Timeline:
    """The file STANDIN_TIMELINE, which the stand-in writes."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def graphs(self) -> list[tuple[float, float, int]]:
        """Begin and end in seconds, and kernels, of the graphs since the last call."""
        C.CDLL(None).fflush(None)
        with self._path.open() as file:
            file.seek(self._at)
            lines = file.read()
            self._at = file.tell()
        found = []
        for line in lines.splitlines():
            what, _, begin, end, n = line.split()
            if what == "graph":
                found.append((1e-6 * float(begin), 1e-6 * float(end), int(n)))
        return found


def _decode(engine: Any, token: int) -> None:
    engine.sequences.extend(0, [token], n_logits=1)


def _is_steady(engine: Any, token: int, n_host: int, n_layers: int) -> bool:
    """True if the CPU computes `n_host` experts in each layer of the next decode."""
    before = engine.counters()
    _decode(engine, token)
    after = engine.counters()
    n_split = int(after.split_layers - before.split_layers)
    return (
        n_split == n_layers and int(after.n_pairs_host - before.n_pairs_host) == n_host * n_layers
    )


def _layers(graphs: Sequence[tuple[float, float, int]], n_layers: int, n_each: int) -> Layers:
    """Take a decode apart. `n_each`: graphs of a layer, the last of which places the CPU's rows."""
    begins = [graphs[n_each * i][0] for i in range(n_layers)]
    before = [graphs[n_each * i] for i in range(1, n_layers)]
    products = [graphs[n_each * i + 1] for i in range(1, n_layers)] if n_each > 1 else []
    return Layers(
        (begins[-1] - begins[1]) / (n_layers - 2),
        graphs[-1][1] - graphs[0][0],
        tuple(end - begin for begin, end, _ in before),
        tuple(end - begin for begin, end, _ in products),
    )


class Today:
    """The program with one model. A single token is decoded again and again, so that each decode
    uses the same experts."""

    TOKEN = 17

    def __init__(self, shape: Shape, folder: Path, timeline: Timeline) -> None:
        from lab.options import Streaming
        from lab.synth import write_preset
        from offload.device import devices
        from offload.engine import open_engine
        from offload.model_file import read_facts
        from offload.plan.placement import PlanRequest, make_plan
        from offload.schedule.splitter import stay
        from offload.times.min_batch import NEVER, MinBatch

        path = folder / "price.gguf"
        write_preset(
            shape.preset, path, size="full", seed=3, n_vocab=_N_VOCAB, n_layer=shape.n_layer,
            n_expert=shape.n_expert, **dict(shape.overrides),
        )  # fmt: skip
        facts = read_facts(path)
        plan = make_plan(facts, PlanRequest(n_cpu_moe=999))
        streaming = Streaming(
            vram_bytes=plan.resident_bytes + int(0.75 * plan.slot_bytes), n_cpu_moe=999,
            hybrid=True, splitter=stay, prefetch=False,
        )  # fmt: skip
        gpu = next(device.name for device in devices() if device.on_gpu)
        self._engine = open_engine(path, engine_options(
            device=gpu, streaming=streaming, stream_experts=True, n_ctx=4096, n_threads=1,
            min_batch=MinBatch(NEVER, NEVER), n_threads_batch=1, flash_attn="auto",
        ))  # fmt: skip
        path.unlink()
        self._timeline = timeline
        self.n_used, self.n_embd = facts.n_experts_used, facts.number("embedding_length")
        self.n_layers = len(plan.layout.groups)

    def close(self) -> None:
        self._engine.close()

    def fill(self, n_host: int) -> None:
        """Let slots hold all but `n_host` of the token's experts. Call it with fewer each time."""
        engine, leaving = self._engine, _leaving(n_host)
        self.rings(False)  # a decode without a wait copies nothing
        for _ in range(4):
            with engine.opened.weights.ways.trying(
                engine.opened.weights.ways.now.splitting_by(leaving)
            ):
                for _ in range(3):
                    _decode(engine, self.TOKEN)
            for _ in range(3):  # copies arrive
                _decode(engine, self.TOKEN)
            if _is_steady(engine, self.TOKEN, n_host, self.n_layers):
                return
        raise RuntimeError(f"the CPU does not compute {n_host} experts in each layer")

    def built_s(self, n_decodes: int = 15) -> float:
        """Seconds of a layer that runs without a wait, in the median decode."""
        found = []
        for n in range(n_decodes + 5):  # the first decodes are careful
            self._timeline.graphs()
            _decode(self._engine, self.TOKEN)
            graphs = self._timeline.graphs()
            if len(graphs) != 2 * self.n_layers + 1:
                raise RuntimeError(f"{len(graphs)} graphs in a decode of {self.n_layers} layers")
            if n >= 5:
                found.append((graphs[-2][0] - graphs[3][0]) / (self.n_layers - 2))
        return statistics.median(found)

    def rings(self, value: bool) -> None:
        """Let split layers run without a wait, or not."""
        ways = self._engine.opened.weights.ways
        ways.change(rings=value)

    def layers(self, n_host: int, n_decodes: int = 15) -> Layers:
        """The median decode, each layer of which waits for its ids."""
        found = []
        for _ in range(n_decodes):
            self._timeline.graphs()
            _decode(self._engine, self.TOKEN)
            graphs = self._timeline.graphs()
            n_each = 3 if n_host else 1
            if len(graphs) not in (n_each * self.n_layers + 1, n_each * self.n_layers):
                raise RuntimeError(f"{len(graphs)} graphs in a decode of {self.n_layers} layers")
            found.append(_layers(graphs, self.n_layers, n_each))
        period_s = statistics.median(each.period_s for each in found)
        return min(found, key=lambda each: abs(each.period_s - period_s))

    def ahead_s(self, waiting: Layers, most_decodes: int = 500) -> float:
        """Seconds of a layer computed ahead. `waiting`: decodes in which each layer waits.

        The player goes ahead once its averages have forgotten the decodes with missing experts. It
        may still wait between groups of layers.
        """
        found = dict[int, list[float]]()  # by graphs, between which it waits
        for _ in range(most_decodes):
            self._timeline.graphs()
            _decode(self._engine, self.TOKEN)
            graphs = self._timeline.graphs()
            spans = found.setdefault(len(graphs), [])
            spans.append(graphs[-1][1] - graphs[0][0])
            if len(graphs) <= _FEW_GRAPHS and len(spans) == 20:
                n_waits_less = self.n_layers - (len(graphs) - 1)
                return waiting.period_s - (waiting.span_s - statistics.median(spans)) / n_waits_less
        raise RuntimeError(f"a decode has {len(graphs)} graphs, so its layers wait for the host")


# -- the doorbell ----------------------------------------------------------------------------------

_MOST_AHEAD = 64


class _Layer(C.Structure):
    _fields_ = [(name, C.c_double) for name in ("before_s", "products_s", "host_s")]


class _Decoder(C.Structure):
    _fields_ = [
        *((name, C.c_int64) for name in ("way", "is_pinned", "n_layers", "n_ahead")),
        ("layers", C.POINTER(_Layer)), ("row_bytes", C.c_int64), ("n_rows", C.c_int64),
        *((name, C.c_double) for name in ("divide_s", "after_s", "submit_s", "launch_s")),
        ("compute", C.c_void_p), ("doorbell", C.c_void_p),
        ("routed", C.c_void_p * _MOST_AHEAD), ("landed", C.c_void_p * _MOST_AHEAD),
        *((name, C.c_void_p) for name in ("state", "landing", "read", "results")),
        ("rung", C.c_void_p), ("answered", C.c_void_p), ("n_done", C.c_uint32),
    ]  # fmt: skip


def cuda_headers() -> Path:
    """Return the folder of the headers with which scripts/build-cuda-standin compiles."""
    headers = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
    if not (headers / "cuda.h").exists():
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        headers = cache / "specoffload" / "cuda-standin" / "cuda-13.0"
    return headers


def compile_doorbell(folder: Path) -> C.CDLL:
    """Compile the prototypes."""
    library = folder / "doorbell.so"
    source = ROOT / "scripts" / "lab" / "doorbell.c"
    subprocess.run(
        ["cc", "-O2", "-Wall", "-Wextra", "-fPIC", "-shared", "-isystem", str(cuda_headers()),
         str(source),
         "-o", str(library)],
        check=True,
    )  # fmt: skip
    C.CDLL("libcuda.so.1", mode=C.RTLD_GLOBAL)
    found = C.CDLL(str(library))
    found.doorbell_sum.restype = C.c_int64
    return found


WAITING, DOORBELL = range(2)  # ways of doorbell.c


class Prototype:
    """A prototype with layers of given lengths, each (before, products, host) in seconds."""

    def __init__(
        self, library: C.CDLL, way: int, layers: Sequence[tuple[float, float, float]],
        row_bytes: int, n_rows: int, *, is_pinned: bool = False, n_ahead: int = LAYERS_AHEAD,
    ) -> None:  # fmt: skip
        self._library = library
        self._layers = (_Layer * len(layers))(*(_Layer(*each) for each in layers))
        self._decoder = _Decoder(
            way=way, is_pinned=is_pinned, n_layers=len(layers), n_ahead=n_ahead,
            layers=self._layers, row_bytes=row_bytes, n_rows=n_rows, divide_s=DIVIDE_S,
            after_s=AFTER_S, submit_s=SUBMIT_S, launch_s=LAUNCH_S,
        )  # fmt: skip
        self._call("open")

    def _call(self, name: str) -> None:
        error = getattr(self._library, f"doorbell_{name}")(C.byref(self._decoder))
        if error:
            raise RuntimeError(f"doorbell_{name}: the runtime refused a call ({error})")

    def decode(self) -> None:
        self._call("decode")

    @property
    def sums(self) -> tuple[int, int]:
        """Layers that were decoded, and layers whose results arrived."""
        arrived = self._library.doorbell_sum(C.byref(self._decoder))
        return self._decoder.n_done, arrived


def prototype_s(
    library: C.CDLL, way: int, today: Layers, host_s: float, row_bytes: int, n_rows: int,
    *, is_pinned: bool,
) -> float:  # fmt: skip
    """Seconds of a layer, from decodes of two lengths."""
    one = [(b, p, host_s) for b, p in zip(today.before_s, today.products_s, strict=True)]
    took_s = []
    for n in (4, 12):
        prototype = Prototype(library, way, one * n, row_bytes, n_rows, is_pinned=is_pinned)
        times = [seconds(prototype.decode) for _ in range(7)]
        done, arrived = prototype.sums
        if done != arrived:
            raise RuntimeError(f"the results of {arrived} of {done} layers arrived")
        took_s.append(statistics.median(times))
    return (took_s[1] - took_s[0]) / (8 * len(one))


# -- both ------------------------------------------------------------------------------------------


def use_experts_time() -> None:
    """Let the CPU's experts take the priced machine's time instead of this processor's, and let the
    doorbell's words take virtual time."""
    from offload.stream import doorbell, play

    library: Any = C.CDLL(None)
    play.calls().compute = C.cast(library.standin_compute, C.c_void_p).value
    see, tell = library.standin_see_word, library.standin_write_word
    doorbell.FIRST_TRIAL = 1 << 30  # measured times choose no way
    doorbell.virtual_words = C.cast(see, C.c_void_p).value, C.cast(tell, C.c_void_p).value


def always_ring() -> None:
    """Let no costs choose the way, not those either with which slots are filled."""
    from offload.stream import doorbell

    setattr(doorbell.RingChoice, "pays", True)  # noqa: B010


def set_latencies(scale: float = 1.0) -> None:
    for name, latency_s in LATENCIES.items():
        set_rate(name, scale * latency_s)
    set_rate("host_graph_s", HOST_GRAPH_S)


def measure(folder: Path, wanted: Sequence[str] = ()) -> Iterator[Price]:
    """The rows of the table."""
    library = compile_doorbell(folder)
    for shape, work, today in _opened(folder, wanted):
        yield from (replace(row, model=shape.title) for row in _rows(library, work, shape, today))


def _opened(folder: Path, wanted: Sequence[str]) -> Iterator[tuple[Shape, Any, Today]]:
    """Each wanted shape, its work and today's program on it, which is closed after its turn."""
    from lab.synth.published import published_facts
    from offload.times.work import model_work

    use_experts_time()
    always_ring()
    timeline = Timeline(Path(os.environ["STANDIN_TIMELINE"]))
    for shape in SHAPES:
        if wanted and shape.title not in wanted:
            continue
        work = model_work(published_facts(shape.title, folder))
        today = Today(shape, folder, timeline)
        try:
            yield shape, work, today
        finally:
            today.close()


def _rows(library: C.CDLL, work: Any, shape: Shape, today: Today) -> Iterator[Price]:
    device = dict[tuple[str, float], Layers]()
    for n_host in sorted({0, 1, today.n_used // 2}, reverse=True):
        for nth, (card, scale) in enumerate((c, s) for c in PRICED for s in (1.0, 2.0)):
            machine = use_card(CARDS[card])
            set_latencies(scale)
            expert_s = float(work.expert.cpu_seconds(machine, 1))
            set_rate("host_expert_s", expert_s)
            if not nth:
                today.fill(n_host)
            today.rings(True)
            built_s = today.built_s()
            today.rings(False)
            with _each_layer_waits():
                found = today.layers(n_host)
            if n_host:
                device[card, scale] = found
            host_s = HOST_GRAPH_S + n_host * expert_s if n_host else 0.0
            row = _price(library, machine, work, today, device[card, scale], n_host, host_s)
            row = replace(
                row, card=card, scale=scale, n_host=str(n_host), today_s=found.period_s,
                built_s=built_s,
            )  # fmt: skip
            yield row
            if not n_host and shape.goes_ahead:
                yield replace(row, n_host=AHEAD, today_s=today.ahead_s(found))


def _each_layer_waits() -> Any:
    """Let the player compute no layer ahead, as in decodes in which many layers lack experts."""
    from unittest.mock import patch

    from offload.stream.layers_ahead import Waits

    return patch.object(Waits, "choose", lambda self, n_layers: 1)


def bound_s(device: Layers, host_s: float) -> float:
    """Seconds of a layer that no order can beat. `host_s`: of the CPU's work."""
    both = zip(device.before_s, device.products_s, strict=True)
    return statistics.mean(before + max(products, host_s) for before, products in both)


def rung(folder: Path, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A layer of the program with a doorbell beside its bound, on the first card."""
    for shape, work, today in _opened(folder, wanted):
        expert_s = float(work.expert.cpu_seconds(use_card(CARDS[PRICED[0]]), 1))
        set_latencies()
        set_rate("host_expert_s", expert_s)
        for n_host in (today.n_used // 2, 1):
            today.fill(n_host)
            today.rings(True)
            layer_s = today.built_s()
            today.rings(False)
            with _each_layer_waits():
                device = today.layers(n_host)
            least_s = bound_s(device, HOST_GRAPH_S + n_host * expert_s)
            yield {"model": shape.title, "n_host": n_host, "layer_s": layer_s,
                   "waiting_s": device.period_s, "bound_s": least_s,
                   "ratio": layer_s / least_s}  # fmt: skip


def _price(
    library: C.CDLL, machine: Any, work: Any, today: Today, device: Layers, n_host: int,
    host_s: float,
) -> Price:  # fmt: skip
    """The prototypes' times. `device`: what today's device computes in each layer."""
    n_other = work.n_layers - work.n_expert_layers
    dense_s = (
        work.kernels_per_layer * machine.per_kernel_s
        + work.dense.size_bytes / machine.vram_bytes_per_s
    )
    head_s = work.head.size_bytes / machine.vram_bytes_per_s

    def layer_s(way: int, *, is_pinned: bool) -> float:
        n_rows = max(1, n_host) if is_pinned and way == DOORBELL else today.n_used
        sizes = 4 * today.n_embd, n_rows
        return prototype_s(library, way, device, host_s, *sizes, is_pinned=is_pinned)

    return Price(
        "", "", "", 1.0, int(work.n_expert_layers), 0.0, 0.0,
        copied_s=layer_s(WAITING, is_pinned=False) if host_s else None,
        pinned_s=layer_s(WAITING, is_pinned=True) if host_s else None,
        doorbell_s=layer_s(DOORBELL, is_pinned=False),
        pinned_doorbell_s=layer_s(DOORBELL, is_pinned=True),
        bound_s=bound_s(device, host_s),
        rest_s=float(machine.per_decode_s + n_other * dense_s + head_s),
    )  # fmt: skip


# -- the table -------------------------------------------------------------------------------------


def table(rows: Sequence[Price]) -> str:
    heads = (
        "model", "card", "on the CPU", "bound", "waiting", "its prototype", "pinned", "doorbell",
        "its prototype", "with copies", "decode, ms", "saved: doorbell", "pinned",
        "doorbell with copies", "doorbell, slow",
    )  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    titles = [shape.title for shape in SHAPES]
    slow = {(row.model, row.card, row.n_host): row for row in rows if row.scale != 1.0}
    by_place = sorted(
        (row for row in rows if row.scale == 1.0),
        key=lambda row: (titles.index(row.model), PRICED.index(row.card), _nth(row)),
    )
    for row in by_place:
        other = slow[row.model, row.card, row.n_host]
        times = (row.bound_s, row.today_s, row.copied_s, row.pinned_s, row.built_s,
                 row.pinned_doorbell_s, row.doorbell_s)  # fmt: skip
        saved = (
            row.saved_share(row.built_s), row.saved_share(row.pinned_s),
            row.saved_share(row.doorbell_s), other.saved_share(other.built_s),
        )  # fmt: skip
        cells = (row.model, row.card, row.n_host, *map(_us, times), f"{1e3 * row.decode_s:.3g}",
                 *map(_percent, saved))  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _nth(row: Price) -> float:
    return -1.0 if row.n_host == AHEAD else float(row.n_host)


def _us(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e6 * seconds:.0f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %".replace("-", "\u2212")


def load() -> dict[str, Any]:
    """The kept rows with their machine."""
    found: dict[str, Any] = json.loads(KEPT.read_text("utf-8"))
    return found


def kept_rows(kept: dict[str, Any]) -> list[Price]:
    return [Price(**row) for row in kept["rows"]]


def kept_text(kept: dict[str, Any]) -> str:
    """The file's text, with a line for each row."""
    rows = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in kept["rows"])
    head = "".join(f'"{key}": {json.dumps(kept[key])}, ' for key in kept if key != "rows")
    return f'{{{head}"rows": [\n  {rows}\n]}}\n'


def page(kept: dict[str, Any]) -> str:
    """The text of docs/gpu.md with the table of the kept rows."""
    return filled(PAGE, {"split price": table(kept_rows(kept))})


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, prog="scripts/lab/run split-price",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--model", action="append", help="only this model; may be repeated")
    parser.add_argument("--write", action="store_true", help="keep the rows, and write docs/gpu.md")
    parser.add_argument("--page", action="store_true", help="write docs/gpu.md from the kept rows")
    parser.add_argument("--json", action="store_true", help="the program's layers alone, as JSON")
    args = parser.parse_args()
    if args.write and args.model:
        parser.error("--write: needs all models")
    if args.page:
        PAGE.write_text(page(load()), "utf-8")
        return
    if not has_clock():
        with tempfile.TemporaryDirectory() as scratch:
            settings = _ENVIRONMENT | {"STANDIN_TIMELINE": f"{scratch}/timeline"}
            sys.exit(again_on_standin("lab.split_price", settings))
    use_virtual_time()
    if args.json:
        with tempfile.TemporaryDirectory() as scratch:
            print(json.dumps({"rung": [*rung(Path(scratch), args.model or ())]}))
        return
    began_s, rows = time.monotonic(), list[Price]()
    with tempfile.TemporaryDirectory() as scratch:
        for row in measure(Path(scratch), args.model or ()):
            print(f"{time.monotonic() - began_s:4.0f} s: {row}", file=sys.stderr, flush=True)
            rows.append(row)
    print(table(rows))
    if args.write:
        from specoffload.commands.bench import commit, machine

        where = {"cpu": machine()["cpu"], "date": datetime.now(UTC).date().isoformat(),
                 "commit": commit()}  # fmt: skip
        kept = where | {"rows": [asdict(row) for row in rows]}
        KEPT.write_text(kept_text(kept), "utf-8")
        PAGE.write_text(page(kept), "utf-8")


if __name__ == "__main__":
    main()
