"""Opening a session: its settings, and that a failed opening frees everything opened before."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import ModuleType

import pytest
import resolved
from budgets import ON_GPU, budget
from vocabularies import write

from lab.options import Streaming
from offload import engine as engine_module
from offload.device import choose_device
from offload.engine import Engine
from offload.errors import DeviceUnavailable
from offload.ggml.backend import Device
from offload.model_file import read_facts
from offload.opening import start as engine_start
from offload.plan.weights import device_bytes
from offload.times.context_memory import ContextOptions, context_memory
from offload.times.min_batch import NEVER, MinBatch
from offload.times.search import TimingRequest
from offload.times.table import CostTable, DecodeTime, Way
from specdec.errors import SpecDecError, VocabularyMismatch
from specdec.options import OF_TEXT, SpecOptions
from specoffload.config.options import DraftEngine, DraftOptions
from specoffload.config.resolution import Config, demo_file
from specoffload.config.speculation import NO_DRAFTS
from specoffload.generation.generation import GenerateOptions
from specoffload.opening import planner, start
from specoffload.session.session import Session
from specoffload.speculation import costs


def config_of(**options: object) -> Config:
    return resolved.config_of(**{"threads": 1, "ctx_size": 256, "device": "sim", **options})


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Every engine that a session opened, in order."""
    opened: list[Engine] = []

    class Remembered(Engine):
        def __init__(self, *args: object, **named: object) -> None:
            super().__init__(*args, **named)  # type: ignore[arg-type]
            opened.append(self)

    for module in (engine_module, start):
        monkeypatch.setattr(module, "Engine", Remembered)
    return opened


def all_are_closed(engines: list[Engine]) -> bool:
    return all(engine.model.handle is None for engine in engines)


# -- --min-batch auto ------------------------------------------------------------------------------


def test_min_batch_auto_is_measured_set_and_told(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECOFFLOAD_MEASURE_S", "6")  # enough for both sides on a busy machine
    with Session(config_of(min_batch="auto", spec=NO_DRAFTS)) as session:
        (why,) = (note for note in session.notes if note.startswith("--min-batch auto"))
        chosen = session.target.min_batch.words(("experts",))
        assert why == f"--min-batch auto: the GPU computes {chosen}"
        assert f"the GPU computes {chosen} (--min-batch)" in " ".join(session.notes)
        counters = session.target.counters()
        assert counters.streamed_bytes or counters.split_layers, "the GPU was one of the two sides"
        assert session.target.sequences.length(0) == 0
        pieces = list(session.generate("def f(", GenerateOptions(n_predict=4, ignore_eos=True)))
        assert sum(len(piece.tokens) for piece in pieces) == 4


def test_a_number_of_tokens_streams_where_slots_are_few(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The plan would leave such batches to the CPU."""
    few = {
        "model": tiny_moe, "spec": NO_DRAFTS, "min_batch": "1", "device": "sim:bw=1MB/s",
        "vram_bytes": budget(tiny_moe, Streaming(n_gpu_layers=ON_GPU), "least"),
        "n_gpu_layers": ON_GPU,
    }  # fmt: skip
    with Session(config_of(**few)) as session:
        target = session.target
        for n in (1, 2, 3, 17, 100):
            before = target.counters()
            target.sequences.extend(0, [7] * n)
            assert target.counters().cuts > before.cuts
        assert target.counters().passes > 0
        assert not any(device.declined for device in target.opened.devices)
    assert "--min-batch" not in caplog.text
    monkeypatch.setattr(Device, "supports", lambda self, node: not node.is_op("MUL_MAT_ID"))
    with Session(config_of(**few)):
        pass
    assert "--min-batch: the CPU computes some of these batches: sim" in caplog.text


@pytest.mark.parametrize(("streamed_s", "experts"), [(0.5, (1, 65)), (2.0, (NEVER, NEVER))])
def test_min_batch_auto_takes_the_side_that_was_faster(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    streamed_s: float,
    experts: tuple[int, int],
) -> None:
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path))

    def measured(
        _: Engine,
        tokens: list[int],
        table: CostTable,
        request: TimingRequest,
        *__: object,
        **___: object,
    ) -> float:
        for way in request.ways:
            seconds = streamed_s if way is Way.STREAMED else 1.0
            for n in (1, 64, 512):
                table.add(way, n, DecodeTime(seconds, n_timed=1))
        return 0.0

    monkeypatch.setattr(costs, "measure", measured)
    with Session(config_of(spec=NO_DRAFTS, ctx_size=1024)) as session:
        found = session.target.min_batch
        assert (found.experts, found.prefill_experts) == experts


def test_nothing_is_measured_where_nothing_streams_or_nothing_may_be() -> None:
    with Session(config_of(spec=NO_DRAFTS, device="cpu")) as session:
        assert not any("--min-batch" in note for note in session.notes)
    with Session(config_of(use_profile=False)) as session:
        assert any("nothing is measured, by rule" in note for note in session.notes)
        assert session.target.min_batch == MinBatch(128, 32)


# -- room for the draft ----------------------------------------------------------------------------


@pytest.mark.parametrize("curve", [None, "1,1.1,1.2,1.3"])
def test_units_of_one_decode_are_not_expected_seconds(curve: str | None) -> None:
    """Costs in units of one decode are no seconds, so the thread governor gets none."""
    config = config_of(device="cpu", use_profile=False)
    config = replace(config, spec=replace(config.spec, batch_costs=curve))
    with Session(config) as session:
        assert session.target.opened.threads.expected_s(1) is None


def test_threads_are_governed_by_measured_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path))

    def measured(_: Engine, tokens: list[int], table: CostTable, *__: object, **___: object) -> int:
        for n, seconds in ((1, 0.25), (2, 0.5), (4, 1.5)):
            table.add(Way.IN_PLACE, n, DecodeTime(seconds, n_timed=1))
        return 0

    monkeypatch.setattr(costs, "measure", measured)
    with Session(config_of(device="cpu")) as session:
        expected_s = [session.target.opened.threads.expected_s(n) for n in (1, 2, 3, 4)]
        assert expected_s == pytest.approx([0.25, 0.5, 1.0, 1.5])


def test_the_target_leaves_room_for_the_draft_and_its_context() -> None:
    of_draft = DraftOptions(engine=DraftEngine.LLAMA)
    config = config_of(spec_given={"--spec-policy": "fixed"}, of_draft=of_draft)
    facts = read_facts(demo_file("draft.gguf"))
    with Session(config) as session:
        reserved = session.target.start.options.wanted.reserve_bytes
        assert session.draft is not None
        context = context_memory(facts, ContextOptions(256, 512))
        assert reserved == device_bytes(facts) + context.total_bytes
    with Session(replace(config, spec=replace(config.spec, draft=None))) as session:
        assert session.target.start.options.wanted.reserve_bytes == 0


# -- failures midway -------------------------------------------------------------------------------


def test_a_draft_that_cannot_be_translated_is_refused_before_anything_is_opened(
    engines: list[Engine], tmp_path: Path
) -> None:
    draft = write(tmp_path / "draft.gguf", "none")
    why = r"draft\.gguf has no tokenizer\. .*--spec-replace.* Name another file with --draft"
    with pytest.raises(VocabularyMismatch, match=why):
        Session(config_of(draft=draft))
    assert not engines


@pytest.mark.parametrize("engine", [DraftEngine.AUTO, DraftEngine.TORCH])
def test_libllama_drafts_if_torch_cannot_be_imported(
    engine: DraftEngine, break_torch: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft's device looks like CUDA, although libllama computes on the CPU."""
    break_torch("import ctypes; ctypes.CDLL('libcublas.so.99')")
    place = replace(choose_device("cpu"), name="CUDA0", on_gpu=True)
    monkeypatch.setattr("specoffload.opening.draft._place", lambda *_: place)
    config = config_of(device="cpu", spec_given={"--spec-policy": "fixed"})
    config = replace(config, spec=replace(config.spec, of_draft=DraftOptions(engine=engine)))
    if engine is DraftEngine.TORCH:
        with pytest.raises(DeviceUnavailable, match=r"libcublas\.so\.99.*--draft-engine llama"):
            Session(config)
        return
    with Session(config) as session:
        (note,) = (note for note in session.notes if note.startswith("draft engine"))
        assert note.startswith("draft engine: libllama (torch is installed and cannot be imported")
        pieces = list(session.generate("def f(", GenerateOptions(n_predict=4, ignore_eos=True)))
        assert sum(len(piece.tokens) for piece in pieces) == 4


def test_a_draft_that_does_not_open_leaves_nothing_open(
    engines: list[Engine], tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(demo_file("draft.gguf").read_bytes()[:-1000])
    with pytest.raises(Exception, match=r"damaged\.gguf"):
        Session(config_of(draft=damaged))
    assert all_are_closed(engines)


def test_speculation_that_does_not_fit_leaves_nothing_open(engines: list[Engine]) -> None:
    spec = {"--spec-type": "suffix,draft", "--spec-suffix-corpus": "missing.txt"}
    with pytest.raises(SpecDecError):
        Session(config_of(spec_given=spec))
    assert len(engines) == 2
    assert all_are_closed(engines)


def test_ctrl_c_while_min_batch_is_measured_leaves_nothing_open(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(engine: Engine, tokens: list[int], *_: object, **__: object) -> None:
        engine.sequences.extend(0, tokens[:2])
        raise KeyboardInterrupt

    monkeypatch.setattr(costs, "measure", interrupted)
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        Session(config_of(min_batch="auto"))
    assert len(engines) == 2
    assert all_are_closed(engines)


def test_ctrl_c_at_any_report_of_progress_leaves_nothing_open(
    engines: list[Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress is reported while weights are loaded and while the profile is measured."""
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path))
    reports: list[float] = []
    Session(config_of(), lambda _, share: reports.append(share)).close()
    assert all_are_closed(engines)
    measuring = next(i for i, share in enumerate(reports) if i and share < reports[i - 1])
    for at in (1, 2, measuring - 1, measuring + 1):
        for file in tmp_path.iterdir():
            file.unlink()
        left = iter(range(at))

        def interrupt(step: str, share: float, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            Session(config_of(), interrupt)
        assert all_are_closed(engines), f"after {at} of {len(reports)} reports"


@pytest.mark.parametrize("device", ["sim", "sim,sim"])
def test_no_step_of_progress_goes_back_or_comes_twice(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path))
    reports: list[tuple[str, float]] = []
    Session(config_of(device=device), lambda *report: reports.append(report)).close()
    steps = [(step, [share for _, share in of]) for step, of in groupby(reports, itemgetter(0))]
    assert [step for step, _ in steps] == ["reading weights", "measuring this machine"]
    for step, shares in steps:
        assert shares == sorted(shares), step
        assert 0.0 <= shares[0] <= shares[-1] == 1.0, step


@pytest.mark.parametrize("ctx_size", [None, 256])
def test_a_start_looks_and_decides_once(
    ctx_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context of its own choice once made it probe the machine and decide again."""
    calls: list[str] = []

    def counted(module: ModuleType, name: str) -> None:
        function = getattr(module, name)

        def counting(*args: object, **named: object) -> object:
            calls.append(name)
            return function(*args, **named)

        monkeypatch.setattr(module, name, counting)

    for module in (planner, engine_start):
        counted(module, "probe")
        counted(module, "decide")
    counted(start, "Planner")
    with Session(config_of(ctx_size=ctx_size, spec=NO_DRAFTS, min_batch=MinBatch())) as session:
        assert session.target.start.layout is session.target.layout
    assert calls == ["Planner", "probe", "decide"]


def test_closing_twice_is_closing_once(engines: list[Engine]) -> None:
    session = Session(config_of(spec=NO_DRAFTS))
    session.close()
    session.close()
    assert all_are_closed(engines)


# -- without speculation ---------------------------------------------------------------------------


def test_without_speculation_nothing_of_it_is_opened_or_on_the_way() -> None:
    with Session(config_of(spec=NO_DRAFTS, device="cpu")) as session:
        assert session.speculation is None
        assert session.draft is None
        assert "every token is decoded alone" in session.notes
        *_, last = session.generate("def f(", GenerateOptions(n_predict=6, ignore_eos=True))
    assert last.stats is not None
    assert last.stats.n_tokens == last.stats.n_rounds == 6
    assert last.stats.n_drafted == last.stats.n_draft_steps == 0


# -- the KV cache


def test_the_types_of_the_cache_and_full_windows_reach_the_engine(
    tiny_moe: Path, tiny_dense: Path
) -> None:
    chosen = {"type_k": "q8_0", "flash_attn": "on", "swa_full": True, "spec": NO_DRAFTS}
    with Session(config_of(model=tiny_moe, **chosen)) as session:  # MLA: one cache for both
        opened = session.target.layout.context
        assert (opened.type_k, opened.type_v, opened.swa_full) == ("q8_0", "q8_0", True)
        pieces = list(session.generate("def", GenerateOptions(n_predict=2)))
        assert sum(len(piece.tokens) for piece in pieces) == 2
    other = {"type_k": "bf16", "type_v": "f32", "spec": NO_DRAFTS}
    with Session(config_of(model=tiny_dense, **other)) as session:
        context = session.target.layout.context
        assert (context.type_k, context.type_v) == (
            "bf16",
            "f32",
        )


def test_the_draft_has_types_of_its_own() -> None:
    of_draft = DraftOptions(type_k="bf16", type_v="bf16")
    with Session(config_of(of_draft=of_draft, use_profile=False)) as session:
        assert session.draft is not None
        assert session.draft.layout.context.type_k == "bf16"
        assert session.target.layout.context.type_k == "f16"


_DIES_AT_ITS_FIRST_TOKEN = """
from offload.ggml.library.lib import library
from offload.ggml.context import Context
from specoffload.opening.start import open_target, session_start
import resolved
from budgets import ON_GPU, budget
from vocabularies import write

def stop(self, *batch):
    library().structs._lib.ggml_abort(b"ops.cpp", 1, b"GGML_ASSERT(row < n) failed")

Context.decode = stop
config = resolved.config_of(threads=1, ctx_size=256, device="cpu", warmup={warmup})
open_target(session_start(config))
"""


@pytest.mark.parametrize("warmup", [True, False])
def test_a_file_that_stops_the_library_does_so_while_it_is_opened(warmup: bool) -> None:
    """The child process calls the library's abort when it decodes its first token."""
    program = _DIES_AT_ITS_FIRST_TOKEN.format(warmup=warmup)
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == (2 if warmup else 0)
    sentence = r"specoffload: cannot open \S+\.gguf, the library stopped at an assertion: .*row < n"
    assert bool(re.search(sentence, ended.stderr)) == warmup


# -- what a start decides --------------------------------------------------------------------------


def test_a_start_leaves_the_configuration_as_the_user_said_it() -> None:
    """On a CPU alone, a start chooses a context, drops drafters of the text, and ignores flags."""
    config = replace(config_of(device="cpu", ctx_size=None, draft=None), gpu_flags=("-ngl",))
    spec = replace(config.spec.without_drafts, options=SpecOptions(drafters=OF_TEXT))
    config = replace(config, spec=spec)
    decided = start.session_start(config)
    assert decided.config is config
    assert (decided.choices.n_ctx, decided.choices.spec.options.drafters) == (2048, ())
    assert len(decided.notes) == len(config.reasons) + 2, "on the context, and on -ngl"
    with Session(config) as session:
        assert session.config is config
        assert session.target.n_ctx == 2048
        assert {*decided.notes, *decided.choices.spec.reasons} <= {*session.notes}


# -- flags that need a GPU -------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_flags_that_need_a_gpu_are_named_if_the_cpu_computes_alone(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(config_of(device=device, spec_given={"--spec": "none"}), gpu_flags=("-ngl",))
    with Session(config) as session:
        said = [line for line in session.notes if line.startswith("-ngl ignored: the CPU")]
    warned = [r.getMessage() for r in caplog.records if "-ngl ignored" in r.getMessage()]
    assert (len(said), len(warned)) == ((1, 1) if device == "cpu" else (0, 0))


def test_cells_for_drafts_of_several_requests_are_no_training_overflow(
    engines: list[Engine], caplog: pytest.LogCaptureFixture
) -> None:
    """Only contexts of drafts are longer than the model was trained for, and no text is."""
    files = {"model": demo_file("target.gguf"), "draft": demo_file("draft.gguf")}
    config = config_of(**files, ctx_size=2048)
    with (
        caplog.at_level(logging.DEBUG, "offload.llama"),
        Session(replace(config, parallel=4)),
    ):
        pass
    said = [r for r in caplog.records if "training context overflow" in r.getMessage()]
    assert {r.levelno for r in said} == {logging.DEBUG}
