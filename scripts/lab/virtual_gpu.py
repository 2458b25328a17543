"""Times the program on cards that are not here: the real host code on a stand-in with a clock.

The stand-in for CUDA (tests/cuda_standin) runs the real ggml-cuda without a GPU. Its clock gives
kernels, copies and calls the time that they would take on a card with a preset's rates, and takes
the host's time from the processor time of the program's own threads. docs/gpu.md has the result,
and says what the clock knows and what it does not know.

    scripts/lab/run virtual-gpu --write    time all tables, keep their rows, and write docs/gpu.md
    scripts/lab/run virtual-gpu --plan     only compute the plan's times again, from the kept rows

`scripts/lab/virtual_gpu.json` keeps the rows with the machine, the date and the commit. The tables
of docs/gpu.md are made from this file, and a test compares them.
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
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lab import ROOT
from lab.options import engine_options
from lab.tables import filled, page_of
from lab.timing import decode_s

CARDS = {"RTX 4090": "rtx-4090-ddr5", "RTX 3060": "rtx-3060-ddr4", "H100": "h100"}
PAGE = page_of("virtual-gpu")
KEPT = ROOT / "scripts" / "lab" / "virtual_gpu.json"
NEAR = 0.15  # difference from the plan's prediction that is looked into
_ENVIRONMENT = {"STANDIN_CLOCK": "1", "STANDIN_SKIP": "products", "STANDIN_DEVICES": "2"}
_library = C.CDLL(None)  # with the stand-in preloaded its functions are found here


def has_clock() -> bool:
    return hasattr(_library, "standin_now_s") and os.environ.get("STANDIN_CLOCK") == "1"


def use_virtual_time() -> None:
    """Let `time.perf_counter` be the calling thread's virtual time, in modules imported later.

    A thread's time does not pass while it waits for another thread. So tasks of thread pools begin
    no earlier than they were submitted, and who waits for one goes on when it has ended.
    """
    _library.standin_now_s.restype = _library.standin_waited_s.restype = C.c_double
    _library.standin_wait_until_s.argtypes = [C.c_double]
    _library.standin_set_rate.argtypes = [C.c_char_p, C.c_double]

    def now_s() -> float:
        return float(_library.standin_now_s())

    time.perf_counter = now_s
    submit, result = ThreadPoolExecutor.submit, Future.result

    def submit_timed(
        self: ThreadPoolExecutor, task: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        submitted_s, ended = now_s(), list[float]()

        def run() -> Any:
            _library.standin_wait_until_s(submitted_s)
            try:
                return task(*args, **kwargs)
            finally:
                ended.append(now_s())

        future = submit(self, run)
        future.ended = ended  # type: ignore[attr-defined]
        return future

    def result_timed(self: Future[Any], timeout: float | None = None) -> Any:
        try:
            return result(self, timeout)
        finally:
            for ended_s in getattr(self, "ended", ()):
                _library.standin_wait_until_s(ended_s)

    ThreadPoolExecutor.submit = submit_timed  # type: ignore[method-assign,assignment]
    Future.result = result_timed  # type: ignore[method-assign]


def set_rate(name: str, value: float) -> None:
    """Set a rate of tests/cuda_standin/clock.hpp."""
    if _library.standin_set_rate(name.encode(), value):
        raise ValueError(f"the stand-in has no rate named {name}")


def use_card(preset: str) -> Any:
    """Set the rates of a preset of `--hardware`, and return its `Machine`.

    The fixed times of kernels, copies and calls stay those of clock.hpp.
    """
    from offload.times.decodes import ATTENTION_SHARE
    from offload.times.prompts import PROMPT_ATTENTION
    from specoffload.config.hardware import PRESETS

    machine = PRESETS[preset].machine
    set_rate("vram_bytes_per_s", machine.vram_bytes_per_s)
    set_rate("flops", machine.gpu_flops)
    set_rate("attention_flops", PROMPT_ATTENTION * ATTENTION_SHARE * machine.gpu_flops)
    set_rate("link_bytes_per_s", machine.link_bytes_per_s)
    return machine


@dataclass(frozen=True)
class Virtual:
    """A cell of the table: the virtual step, and what the plan's model predicts for it.

    The prediction rests on `shares`, and that of decodes and drafts also on `hit_share` (see
    lab.gpu_cases). Counted values are None if they were not kept.
    """

    card: str
    setup: str
    case: str
    step_s: float
    plan_s: float
    shares: Sequence[Sequence[int]]  # one list per device: first layer, end layer, number of slots
    hit_share: float | None = None  # of the uses of streamed experts
    copy_s: float | None = None  # copied bytes ÷ the rate of one link
    router_reads: float | None = None
    n_deferred: float | None = None
    host_s: float | None = None  # of a step in which the decoding thread waited for nothing

    @property
    def ratio(self) -> float:
        return self.step_s / self.plan_s

    @property
    def differs(self) -> bool:
        return abs(self.ratio - 1) > NEAR


def measure_cases(path: Path, wanted: Sequence[str] = ()) -> Iterator[Virtual]:
    """Time all cases of the `wanted` setups on all cards. See lab.gpu_cases."""
    from lab.gpu_cases import SETUPS, Timed, options_of, predicted_s
    from offload.device import devices
    from offload.engine import open_engine
    from offload.model_file import read_facts

    facts = read_facts(path)
    gpus = [device.name for device in devices() if device.on_gpu]
    for setup in SETUPS:
        if wanted and setup.name not in wanted:
            continue
        with open_engine(path, options_of(facts, setup, gpus, 1)) as engine:
            timed = Timed(setup, engine, lambda: float(_library.standin_waited_s()))
            list(timed.rows(0))  # for warm-up: captures graphs, and fills slots
            for seed, (card, preset) in enumerate(CARDS.items(), 1):
                machine = use_card(preset)
                for row in timed.rows(seed):
                    plan_s = predicted_s(machine, facts, setup, row.case, row.shares, row.hit_share)
                    shares = [(each.first, each.end, each.n_slots) for each in row.shares]
                    yield Virtual(
                        card, setup.name, row.case, row.step_s, plan_s, shares, row.hit_share,
                        row.copied_bytes / machine.link_bytes_per_s, row.router_reads,
                        row.n_deferred, row.host_s,
                    )  # fmt: skip


def planned_again(rows: Sequence[Virtual]) -> list[Virtual]:
    """The cells with the times that today's plan predicts for the table's model. Needs no GPU."""
    from lab.gpu_cases import MODEL, SETUPS, Share, predicted_s
    from lab.synth import plan_preset, write_header_only
    from offload.model_file import read_facts
    from specoffload.config.hardware import PRESETS

    setups = {setup.name: setup for setup in SETUPS}
    with tempfile.TemporaryDirectory() as folder:
        planned = plan_preset("qwen3-30b-a3b", routing="drifting", **MODEL)
        facts = read_facts(write_header_only(planned, Path(folder) / "header.gguf"))
    found = []
    for row in rows:
        machine, shares = PRESETS[CARDS[row.card]].machine, [Share(*each) for each in row.shares]
        plan_s = predicted_s(machine, facts, setups[row.setup], row.case, shares, row.hit_share)
        found.append(replace(row, plan_s=plan_s))
    return found


@dataclass(frozen=True)
class Turns:
    """Decodes of one token with all experts in slots, beside those of a resident model."""

    card: str
    resident_s: float
    in_slots_s: float

    @property
    def ratio(self) -> float:
        return self.in_slots_s / self.resident_s


def measure_turns(path: Path, n_turns: int = 16, n_each: int = 16) -> Iterator[Turns]:
    """Let both models decode `n_each` tokens in turns on each card.

    The times are those of the fastest turn, each a median. Other programs' use of the processor's
    caches can only make the host slower.
    """
    from lab.gpu_cases import SETUPS, Timed, options_of
    from offload.device import devices
    from offload.engine import open_engine
    from offload.model_file import read_facts

    facts = read_facts(path)
    gpus = [device.name for device in devices() if device.on_gpu]
    resident, in_slots = SETUPS[:2]
    with (
        open_engine(path, options_of(facts, resident, gpus, 1)) as first,
        open_engine(path, options_of(facts, in_slots, gpus, 1)) as second,
    ):
        Timed(in_slots, second)  # fills the slots
        for card, preset in CARDS.items():
            use_card(preset)
            turns = []
            for turn in range(n_turns + 2):  # two for warm-up
                both = (first, second) if turn % 2 else (second, first)
                s = {id(engine): _decode_s(engine, turn, n_each) for engine in both}
                turns.append((s[id(first)], s[id(second)]))
            del turns[:2]
            resident_s, in_slots_s = map(min, zip(*turns, strict=True))
            yield Turns(card, resident_s, in_slots_s)


def _decode_s(engine: Any, seed: int, n: int) -> float:
    """Return the median seconds of `n` decodes of one token, after two for warm-up."""
    times = []
    engine.sequences.rewind(0, 0)
    for i in range(n + 2):
        token = (17 * i * i + 101 * seed + 3) % engine.n_vocab
        times.append(decode_s(engine.sequences, [token], 1))
    return statistics.median(times[2:])


@dataclass(frozen=True)
class OverlapCase:
    """A batch whose weights stream. With an RTX 4090 its copies take about as long as the
    computation, because overlap matters most then. Only the last case is limited by copies."""

    name: str
    n_tokens: int
    slots: float  # share of the streamed weights that has slots
    n_ubatch: int = 1024
    is_dense: bool = False
    n_warm: int = 2  # steps until the same experts are kept in slots


OVERLAP_CASES = (
    OverlapCase("dense stream", 512, 0.25, is_dense=True),
    OverlapCase("expert prefill", 1024, 0.4, n_warm=8),
    OverlapCase("prompt of 4 ubatches", 4096, 0.4),
    OverlapCase("verification batch", 16, 0.5),
)
_DENSE: dict[str, Any] = {"n_embd": 4096, "n_ff": 14336, "n_head": 32, "n_head_kv": 8}


@dataclass(frozen=True)
class Overlap:
    """Times of one case with an RTX 4090's rates. `copy_s` is copied bytes ÷ the link's rate."""

    case: str
    copy_s: float
    compute_s: float  # step with all weights resident
    serial_s: float  # step in which nothing overlaps
    step_s: float

    @property
    def ratio(self) -> float:
        return self.step_s / max(self.copy_s, self.compute_s)


def measure_overlap(folder: Path, repetitions: int = 9) -> Iterator[Overlap]:
    """Time the overlap cases. Each step has new tokens."""
    from lab.gpu_cases import write_model
    from lab.synth import write_preset

    machine = use_card(CARDS["RTX 4090"])
    for case in OVERLAP_CASES:
        path = folder / "dense.gguf"
        if not case.is_dense:
            path = write_model(folder, {"n_expert": 32, "n_layer": 24})
        elif not path.exists():
            write_preset("mistral-large", path, size="tiny", seed=1, quant="q4_K", n_layer=16,
                         **_DENSE)  # fmt: skip
        compute_s, _ = _steps(path, case, "resident", repetitions)
        serial_s, _ = _steps(path, case, "serial", max(3, repetitions // 3))
        step_s, copied_bytes = _steps(path, case, "overlapped", repetitions)
        copy_s = copied_bytes / machine.link_bytes_per_s
        yield Overlap(case.name, copy_s, compute_s, serial_s, step_s)


def _steps(path: Path, case: OverlapCase, way: str, n: int) -> tuple[float, float]:
    """Return the median seconds of `n` steps after warm-up, and a step's copied bytes."""
    from lab.options import Streaming
    from offload.engine import open_engine
    from offload.model_file import read_facts
    from offload.plan.placement import PlanRequest, make_plan
    from offload.times.min_batch import MinBatch

    layers: dict[str, Any] = {"n_gpu_layers": 0} if case.is_dense else {"n_cpu_moe": 999}
    whole = make_plan(read_facts(path), PlanRequest(**layers))
    ahead: dict[str, Any] = {"depth": 0, "prefetch": False} if way == "serial" else {}
    streaming = Streaming(
        vram_bytes=whole.resident_bytes + int(whole.slot_bytes * case.slots), **layers, **ahead
    )
    options = engine_options(
        device="CUDA0", streaming=Streaming() if way == "resident" else streaming,
        stream_experts=way != "resident", min_batch=MinBatch(1, 1), n_ctx=case.n_tokens + 256,
        n_batch=case.n_tokens, n_ubatch=case.n_ubatch, n_outputs=64, n_threads=1,
        n_threads_batch=1, flash_attn="auto",
    )  # fmt: skip
    times = []
    n_warm = case.n_warm if way == "overlapped" else 2
    with open_engine(path, options) as engine:
        for i in range(n + n_warm):
            if i == n_warm:
                before = engine.counters()
            tokens = [(17 * k * k + 101 * i + 3) % engine.n_vocab for k in range(case.n_tokens)]
            engine.sequences.rewind(0, 0)
            times.append(decode_s(engine.sequences, tokens, 1))
        copied_bytes = engine.counters().streamed_bytes - before.streamed_bytes
    return statistics.median(times[n_warm:]), copied_bytes / n


N_LAYERS = 16  # of the table's model (lab.gpu_cases)


def table(rows: Sequence[Virtual]) -> str:
    """A row for each case, with three columns for each card.

    The last column is the host's time for a layer, of the card with the median.
    """
    cards = list(dict.fromkeys(row.card for row in rows))
    heads = [x for card in cards for x in (f"{card}: virtual", "plan", "virtual ÷ plan")]
    heads.append("host, µs a layer")
    lines = [f"| setup | step | {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
    for setup, case in dict.fromkeys((row.setup, row.case) for row in rows):
        cells, host_s = [], []
        for row in (row for row in rows if (row.setup, row.case) == (setup, case)):
            ratio = f"{row.ratio:.2f}"
            cells += [_ms(row.step_s), _ms(row.plan_s), f"**{ratio}**" if row.differs else ratio]
            host_s += [] if row.host_s is None else [row.host_s]
        cells.append(f"{1e6 * statistics.median(host_s) / N_LAYERS:.0f}" if host_s else "")
        lines.append(f"| {setup} | {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class Reason:
    """Why some cells of the table differ from the plan. `cases` are beginnings of their names."""

    title: str
    setups: tuple[str, ...]
    cases: tuple[str, ...]
    words: str
    cards: tuple[str, ...] = tuple(CARDS)

    def explains(self, row: Virtual) -> bool:
        """True if the reason is that of a cell, should the cell differ."""
        return (
            row.setup in self.setups and row.card in self.cards and row.case.startswith(self.cases)
        )


_KERNELS = (
    "The clock takes 60 µs for a layer's kernels, as the plan did before it counted them. The plan "
    "has 76 µs now. No card has said which is right for this model."
)
REASONS = (
    Reason(
        "Decodes with half in slots, RTX 4090",
        ("50 % in slots",),
        ("decode",),
        "The comparison is unfair. The step is the median decode, and the plan has the mean hits. "
        "Misses come together where a text changes its topic: the mean decode copied 18 experts "
        "and the median one 8, which is 1.1 ms. The plan also lets all 16 layers of each decode "
        "wait, because a decode with the mean hits misses something.",
        ("RTX 4090",),
    ),
    Reason(
        "Decodes and drafts with few slots",
        ("10 % in slots", "3 % in slots"),
        ("decode", "drafts"),
        "The plan counts copies of missing experts alone. Experts that the schedule guesses are "
        "copied, too, and many guesses are wrong: with 10 % in slots and an RTX 4090, a decode "
        "missed 67 experts and copied 101. Routers of this model follow from the tokens alone, so "
        "guesses from the layers before are worse than with a trained model.",
    ),
    Reason(
        "Prompts in passes",
        ("10 % in slots", "3 % in slots"),
        ("prompt",),
        "The host takes 9 to 12 ms for a layer of 2,048 tokens, in which an RTX 4090's link copies "
        "the layer's experts in 12 ms and an H100's in 6. The plan has the host's time from "
        "another day's runs of the same cases.",
    ),
    Reason(
        "Resident prompts, H100",
        ("resident", "resident, two devices"),
        ("prompt",),
        "The clock is wrong, at least for a part. One thread computes the embeddings here, 3 µs "
        "for a token, and a card this fast waits for them. The clock cannot count the threads of "
        "ggml's CPU backend, so the engine has one.",
        ("H100",),
    ),
    Reason(
        "Drafts on two devices with half in slots, H100",
        ("50 % in slots, two devices",),
        ("drafts",),
        "A term is missing in the plan. With two devices these drafts take 1.0 to 1.9 ms longer "
        "than with one on every card, beside what the plan expects of the second device. The H100 "
        "has the shortest steps. The cause is not known. Until 27 November 2026 the plan expected "
        "more experts of a draft's tokens, which hid the difference.",
        ("H100",),
    ),
    Reason(
        "Kernels, one token on an RTX 3060",
        ("50 % in slots",),
        ("decode",),
        _KERNELS,
        ("RTX 3060",),
    ),
    Reason(
        "Kernels, one token on two devices",
        ("resident, two devices", "50 % in slots, two devices"),
        ("decode",),
        _KERNELS,
    ),
)


def differences(rows: Sequence[Virtual]) -> str:
    """A list of the cells that differ from the plan, by reason, with virtual less planned time."""
    differing = [row for row in rows if row.differs]
    lines = [f"{len(differing)} of {len(rows)} cells differ by more than {100 * NEAR:.0f} %:", ""]
    for reason in REASONS:
        if cells := [row for row in differing if reason.explains(row)]:
            found = "; ".join(_cells(cells))
            words = f"- **{reason.title}** ({found}). {reason.words}"
            lines += [textwrap.fill(words, 150, subsequent_indent="  ", break_on_hyphens=False)]
    return "\n".join(lines)


def _cells(rows: Sequence[Virtual]) -> Iterator[str]:
    """For each case of the cells, its name and each card's virtual less planned time."""
    for setup, case in dict.fromkeys((row.setup, row.case) for row in rows):
        each = [row for row in rows if (row.setup, row.case) == (setup, case)]
        cards = ", ".join(f"{row.card} {_signed_ms(row.step_s - row.plan_s)}" for row in each)
        yield f"{setup}, {case}: {cards} ms"


def _signed_ms(seconds: float) -> str:
    return ("+" if seconds >= 0 else "\u2212") + _ms(abs(seconds), 2)


def overlap_table(rows: Sequence[Overlap]) -> str:
    lines = ["| case | copies | computation | one by one | step | step ÷ max |", "|---" * 6 + "|"]
    for row in rows:
        times = (row.copy_s, row.compute_s, row.serial_s, row.step_s)
        lines.append(f"| {row.case} | {' | '.join(map(_ms, times))} | {row.ratio:.3f} |")
    return "\n".join(lines)


def turns_table(rows: Sequence[Turns]) -> str:
    lines = ["| card | resident | all in slots | all in slots ÷ resident |", "|---" * 4 + "|"]
    for row in rows:
        cells = (_ms(row.resident_s), _ms(row.in_slots_s), f"{row.ratio:.3f}")
        lines.append(f"| {row.card} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ms(seconds: float, n_digits: int = 3) -> str:
    return f"{1e3 * seconds:.{n_digits}g}" if seconds < 0.0995 else f"{1e3 * seconds:.0f}"


# -- kept rows ------------------------------------------------------------------------------------


def load() -> dict[str, Any]:
    """The kept tables by name (`cases`, `overlap`, `turns`), each with its machine and `rows`."""
    found: dict[str, Any] = json.loads(KEPT.read_text("utf-8"))
    return found


def kept_cases(kept: dict[str, Any]) -> list[Virtual]:
    return [Virtual(**row) for row in kept["cases"]["rows"]]


def kept_steps_s(card: str | None) -> dict[tuple[str, str], float]:
    """The kept virtual seconds of a card's steps by setup and case. Empty for other cards."""
    return {(row.setup, row.case): row.step_s for row in kept_cases(load()) if row.card == card}


def kept_text(kept: dict[str, Any]) -> str:
    """The file's text, with a line for each row."""
    parts = []
    for name, part in kept.items():
        rows = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in part["rows"])
        head = "".join(f'"{key}": {json.dumps(part[key])}, ' for key in part if key != "rows")
        parts.append(f' "{name}": {{{head}"rows": [\n  {rows}\n ]}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def page(kept: dict[str, Any]) -> str:
    """The text of docs/gpu.md with the tables of the kept rows."""
    return filled(PAGE, tables({name: part["rows"] for name, part in kept.items()}))


def tables(rows: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    """The text of each table by the name of its place in docs/gpu.md."""
    found = {}
    if "turns" in rows:
        found["virtual turns"] = turns_table([Turns(**row) for row in rows["turns"]])
    if "cases" in rows:
        cases = [Virtual(**row) for row in rows["cases"]]
        found["virtual steps"] = table(cases)
        found["virtual differences"] = differences(cases)
    if "overlap" in rows:
        found["virtual overlap"] = overlap_table([Overlap(**row) for row in rows["overlap"]])
    return found


# -- the command ----------------------------------------------------------------------------------


def again_on_standin(module: str, settings: Mapping[str, str]) -> int:
    """Run a module of the lab on the stand-in for CUDA, with the arguments of this command.

    `settings` are variables of the environment. Returns the exit status.
    """
    command, python = ROOT / "scripts" / "on-cuda-standin", ROOT / ".venv-cuda" / "bin" / "python"
    again = [str(command), str(python), "-m", module, *sys.argv[1:]]
    return subprocess.run(again, env=os.environ | settings, check=False).returncode


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, prog="scripts/lab/run virtual-gpu",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--setup", action="append", help="only this setup; may be repeated")
    parser.add_argument("--only", choices=("cases", "turns", "overlap"), help="one of the tables")
    parser.add_argument(
        "--small", action="store_true", help="8 layers of 32 experts, and fewer steps"
    )
    parser.add_argument("--model-dir", type=Path, help="folder to keep the written model in")
    parser.add_argument("--json", action="store_true", help="print one line of JSON alone")
    parser.add_argument(
        "--write", action="store_true", help="keep the rows, and put the tables into docs/gpu.md"
    )
    parser.add_argument("--plan", action="store_true", help="compute the plan's times again")
    args = parser.parse_args()
    if args.write and (args.setup or args.small):
        parser.error("--write: needs all setups and the whole model")
    if args.plan:
        kept = load()
        rows = planned_again(kept_cases(kept))
        kept["cases"]["rows"] = [_as_dict(row) for row in rows]
        _write(kept)
        return
    if not has_clock():
        sys.exit(again_on_standin("lab.virtual_gpu", _ENVIRONMENT))
    use_virtual_time()
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(args, Path(scratch))
    if args.json:
        with_ratios = {
            name: [_as_dict(row) | {"ratio": row.ratio} for row in rows]
            for name, rows in found.items()
        }
        print(json.dumps(with_ratios))
        return
    dicts = {name: [_as_dict(row) for row in rows] for name, rows in found.items()}
    print(*tables(dicts).values(), sep="\n\n")
    if args.write:
        from specoffload.commands.bench import commit, machine

        where = {"cpu": machine()["cpu"], "date": datetime.now(UTC).date().isoformat(),
                 "commit": commit()}  # fmt: skip
        _write(load() | {name: where | {"rows": rows} for name, rows in dicts.items()})


def _write(kept: dict[str, Any]) -> None:
    KEPT.write_text(kept_text(kept), "utf-8")
    PAGE.write_text(page(kept), "utf-8")


def _as_dict(row: Virtual | Overlap | Turns) -> dict[str, Any]:
    """A row's fields, without those that were not kept."""
    return {key: value for key, value in asdict(row).items() if value is not None}


def measure(args: argparse.Namespace, scratch: Path) -> dict[str, Sequence[Any]]:
    """The rows of the tables by name."""
    from lab.gpu_cases import FEW, write_model

    began_s, found = time.monotonic(), dict[str, Sequence[Any]]()

    def said(rows: Iterator[Any]) -> Sequence[Any]:
        kept = []
        for row in rows:
            if not args.json:
                print(f"{time.monotonic() - began_s:4.0f} s: {row}", file=sys.stderr, flush=True)
            kept.append(row)
        return kept

    if args.only in (None, "turns"):
        found["turns"] = said(measure_turns(write_model(args.model_dir or scratch, FEW)))
    if args.only in (None, "cases"):
        path = write_model(args.model_dir or scratch, FEW if args.small else {})
        found["cases"] = said(measure_cases(path, args.setup or ()))
        if args.model_dir is None:
            path.unlink()
    if args.only in (None, "overlap"):
        found["overlap"] = said(measure_overlap(scratch, 3 if args.small else 9))
    return found


if __name__ == "__main__":
    main()
