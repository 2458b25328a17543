"""Bound threads and placed pages change no logits. Notes say which are not where they should be."""

from __future__ import annotations

import ctypes as C
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from resolved import config_of

from lab.options import Streaming, engine_options
from numa.machine import read_topology
from numa.memory import PlacedMemory
from numa.place import PAGE_BYTES, Candidate, Strategy
from numa.threads import Processors
from numa.topology import Core, MemoryNode, Topology
from offload.engine import Engine, EngineOptions, open_engine
from offload.ggml.backend import Stream
from offload.ggml.library import abi
from offload.model_file import read_facts
from offload.plan.store_layout import plan_layout
from offload.schedule.splitter import stay
from offload.threads.numa_plan import NumaPlan, PagePlacer, make_numa_plan
from specoffload.bench import llama_server
from specoffload.commands.tune import _with_threads
from specoffload.config.options import DraftOptions
from specoffload.config.resolution import demo_file
from specoffload.cpu_load import Watch
from specoffload.session.session import Session

CPUS = tuple(sorted(os.sched_getaffinity(0)))
PLACING = [Strategy.SINGLE, Strategy.INTERLEAVE, Strategy.ROWS, Strategy.DISTRIBUTE]


def needs_two(test: Callable[..., None]) -> Callable[..., None]:
    skips = pytest.mark.skipif(len(CPUS) < 2, reason="needs two processors")
    return pytest.mark.several_processors(skips(test))


def two_nodes(cpus: Sequence[int] = CPUS) -> Topology:
    """This machine, described as two nodes of one processor each.

    The second node is invented, so all pages are on the first.
    """
    here = read_topology()
    gib = 1 << 30
    return replace(
        here,
        nodes=(
            MemoryNode(0, tuple(cpus[:1]), 4 * gib, 4 * gib, (10, 20)),
            MemoryNode(1, tuple(cpus[1:2]), 4 * gib, 4 * gib, (20, 10)),
        ),
        cores=tuple(Core((cpu,), i) for i, cpu in enumerate(cpus[:2])),
        allowed_cpus=tuple(cpus[:2]),
        allowed_nodes=(0, 1),
        gpus=(),
        from_kernel=True,
    )


def plan_of(topology: Topology, strategy: Strategy, n_threads: int) -> NumaPlan:
    node = 0 if strategy is Strategy.SINGLE else None
    return make_numa_plan(topology, Candidate(strategy, n_threads, node))


@pytest.mark.parametrize(
    ("device", "words"), [("sim", "numa rows: streamed weights placed"), ("cpu", "page cache")]
)
@needs_two
def test_the_start_up_lines_say_where_threads_and_pages_are(
    tiny_moe: Path, device: str, words: str
) -> None:
    numa = plan_of(two_nodes(), Strategy.ROWS, 2)
    with open_engine(tiny_moe, engine_options(device=device, n_ctx=64, numa=numa)) as engine:
        assert engine.numa_notes[0].startswith("threads bound to processors: decode 2 on")
        assert any(words in note for note in engine.numa_notes)
    with open_engine(tiny_moe, engine_options(device=device, n_ctx=64)) as engine:
        assert engine.numa_notes == ()


@needs_two
def test_a_processor_lost_while_running_is_noticed_and_logged(
    tiny_dense: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    numa = plan_of(two_nodes(), Strategy.ROWS, 2)
    monkeypatch.setattr("offload.threads.engine_threads._CHECK_EVERY", 3)
    with open_engine(tiny_dense, engine_options(device="cpu", n_ctx=64, numa=numa)) as engine:
        engine.sequences.extend(0, [1])
        lost = numa.decode.cpus[1]
        monkeypatch.setattr(
            "offload.threads.engine_threads._bound_cpus", lambda: {numa.decode.cpus[0]}
        )
        engine.sequences.extend(0, [1])
        assert engine.opened.threads.notes == [], "only every third decode is checked"
        engine.sequences.extend(0, [1])
        assert any(f"processor {lost} as planned" in note for note in engine.opened.threads.notes)
        assert any(f"processor {lost}" in record.getMessage() for record in caplog.records)


def logits_of(path: Path, options: EngineOptions) -> NDArray[np.float32]:
    with open_engine(path, options) as engine:
        rows = [
            engine.sequences.extend(0, [(11 * i + 3 * n) % engine.n_vocab for i in range(n)])
            for n in (1, 2, 9)
        ]
    return np.concatenate(rows)


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("n_threads", [1, 2])
@needs_two
def test_every_strategy_and_thread_count_gives_the_same_bits(
    tiny_moe: Path, device: str, n_threads: int
) -> None:
    plain = engine_options(device=device, n_ctx=256, n_threads=1, n_threads_batch=1)
    expected = logits_of(tiny_moe, plain)
    assert np.isfinite(expected).all()
    assert expected.std() > 0
    more = engine_options(plain, n_threads=n_threads, n_threads_batch=n_threads)
    assert np.array_equal(logits_of(tiny_moe, more), expected)
    for strategy in PLACING:
        numa = plan_of(two_nodes(), strategy, n_threads)
        assert np.array_equal(logits_of(tiny_moe, engine_options(plain, numa=numa)), expected), (
            strategy
        )


@needs_two
def test_each_thread_is_found_where_the_plan_has_it(tiny_dense: Path) -> None:
    before = os.sched_getaffinity(0)
    numa = plan_of(two_nodes(), Strategy.ROWS, 2)
    with open_engine(tiny_dense, engine_options(device="cpu", n_ctx=64, numa=numa)) as engine:
        assert engine.opened.threads.bound == {"decode": numa.decode.cpus, "batch": numa.batch.cpus}
        assert engine.opened.threads.notes == []
        engine.sequences.extend(0, [1])
        engine.opened.threads.check()
        assert engine.opened.threads.bound["decode"] == numa.decode.cpus
    assert os.sched_getaffinity(0) == before, "the calling thread is left as it was"


def test_a_team_of_one_binds_the_calling_thread_during_the_decode_only(tiny_dense: Path) -> None:
    before = os.sched_getaffinity(0)
    cpu = CPUS[-1]
    topology = two_nodes((cpu, *[c for c in CPUS if c != cpu]))
    numa = plan_of(topology, Strategy.SINGLE, 1)
    assert numa.decode.cpus == (cpu,)
    with open_engine(tiny_dense, engine_options(device="cpu", n_ctx=64, numa=numa)) as engine:
        assert engine.opened.threads.bound["decode"] == (cpu,)
        with engine.opened.threads.computing(1):
            assert os.sched_getaffinity(0) == {cpu}
        assert os.sched_getaffinity(0) == before


def tasks() -> list[int]:
    return [int(task.name) for task in Path("/proc/self/task").iterdir()]


@needs_two
def test_threads_run_on_the_given_processors_only(tiny_dense: Path) -> None:
    """As on a machine with performance cores, of which one is given here."""
    before, cpu = os.sched_getaffinity(0), CPUS[-1]
    plain = engine_options(device="cpu", n_ctx=256, n_threads=2, n_threads_batch=2)
    expected = logits_of(tiny_dense, plain)
    for task in tasks():  # tests before this one bound threads of OpenMP, which stay
        os.sched_setaffinity(task, before)
    chosen = replace(plain, decode_on=Processors((cpu,)), batch_on=Processors((cpu,)))
    assert np.array_equal(logits_of(tiny_dense, chosen), expected)
    with open_engine(tiny_dense, chosen) as engine:
        threads = engine.opened.threads
        assert threads.sentence == f"threads run on processor {cpu}"
        with threads.computing(2):
            assert os.sched_getaffinity(0) == {cpu}
        engine.sequences.extend(0, [1, 2])
        assert {cpu} in [os.sched_getaffinity(task) for task in tasks()]
        assert threads.notes == []
    assert os.sched_getaffinity(0) == before, "the calling thread is left as it was"
    for task in tasks():
        os.sched_setaffinity(task, before)


@needs_two
def test_strict_threads_are_found_on_a_processor_each(tiny_dense: Path) -> None:
    """`--cpu-strict 1 -C ... -Cb ...` with one thread for a token, and two for batches."""
    before, cpus = os.sched_getaffinity(0), CPUS[:2]
    plain = engine_options(device="cpu", n_ctx=256, n_threads=1, n_threads_batch=2)
    expected = logits_of(tiny_dense, plain)
    for task in tasks():
        os.sched_setaffinity(task, before)
    one, two = Processors(cpus[1:], strict=True), Processors(cpus, strict=True)
    strict = replace(plain, decode_on=one, batch_on=two)
    assert np.array_equal(logits_of(tiny_dense, strict), expected)
    with open_engine(tiny_dense, strict) as engine:
        threads = engine.opened.threads
        assert threads.bound == {"decode": cpus[1:], "batch": cpus}
        assert threads.notes == []
        assert threads.sentence == (
            f"threads run for one token on processor {cpus[1]}, one thread each and for several "
            f"tokens on processors {cpus[0]}-{cpus[1]}, one thread each"
        )
        with threads.computing(1):
            assert os.sched_getaffinity(0) == {cpus[1]}
    assert os.sched_getaffinity(0) == before, "the calling thread is left as it was"
    for task in tasks():
        os.sched_setaffinity(task, before)


def test_a_processor_that_is_not_there_is_named_and_the_engine_computes(tiny_dense: Path) -> None:
    gone = max(CPUS) + 300
    numa = plan_of(two_nodes((CPUS[0], gone)), Strategy.ROWS, 2)
    plain = engine_options(device="cpu", n_ctx=256)
    expected = logits_of(tiny_dense, plain)
    assert np.array_equal(logits_of(tiny_dense, engine_options(plain, numa=numa)), expected)
    with open_engine(tiny_dense, engine_options(plain, numa=numa)) as engine:
        assert any(f"processor {gone}" in note for note in engine.opened.threads.notes)


def test_a_processor_beyond_the_mask_leaves_the_threads_alone_and_says_so(tiny_dense: Path) -> None:
    numa = plan_of(two_nodes((CPUS[0], 600)), Strategy.ROWS, 2)
    with open_engine(tiny_dense, engine_options(device="cpu", n_ctx=64, numa=numa)) as engine:
        assert "600" in engine.opened.threads.notes[0]
        assert engine.opened.threads.bound == {}
        assert np.isfinite(engine.sequences.extend(0, [1, 2])).all()


@needs_two
@pytest.mark.parametrize("strategy", PLACING)
def test_the_store_s_memory_is_placed_and_refusals_are_said(
    tiny_moe: Path, strategy: Strategy
) -> None:
    """The second node may not exist. Then the kernel refuses it, or pages stay on the first."""
    facts = read_facts(tiny_moe)
    streamed = facts.expert_weights
    layout = plan_layout(facts.weights[entry.name] for entry in streamed)
    placer = PagePlacer(plan_of(two_nodes(), strategy, 2), streamed)
    with PlacedMemory(layout.size_bytes + PAGE_BYTES) as arena:
        placer(arena, layout)
        assert arena.placement is not None
        assert arena.placement.strategy is strategy
        nodes = {node for r in arena.placement.ranges for node in r.nodes}
        assert nodes == ({0} if strategy is Strategy.SINGLE else {0, 1})
        assert placer.notes[0].startswith(f"numa {strategy}: streamed weights placed by")
        # The kernel silently ignores nodes of an interleave mask that do not exist.
        if strategy in (Strategy.ROWS, Strategy.DISTRIBUTE) and not real_node_1():
            assert len(placer.notes) > 1, "the missing node must be named"


def real_node_1() -> bool:
    return Path("/sys/devices/system/node/node1").exists()


@needs_two
def test_throughput_is_back_soon_after_another_program_takes_a_processor() -> None:
    """Two engines on two processors: one may use both, the other is fixed to one thread."""
    watch = Watch()
    time.sleep(0.5)
    if watch.others().is_busy:
        pytest.skip("other programs use the processors already")
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, CPUS[:2])  # inherited by the threads that the engines start
    options = engine_options(device="cpu", n_ctx=1024, n_threads=2, n_threads_batch=2)
    one_thread = engine_options(options, n_threads=1, n_threads_batch=1)
    model = demo_file("target.gguf")
    spin = f"import os; os.sched_setaffinity(0, {{{CPUS[1]}}})\nwhile True: pass"
    try:
        with open_engine(model, options) as engine, open_engine(model, one_thread) as fixed:
            decodes_per_s(engine, 3.0)
            spinner = subprocess.Popen([sys.executable, "-c", spin])
            try:
                assert soon_as_fast(engine, fixed)
            finally:
                spinner.kill()
                spinner.wait()
            # Two threads are not faster on every machine, so one may stay. Speeds are compared.
            with open_engine(model, options) as fresh:
                assert soon_as_fast(engine, fresh)
    finally:
        os.sched_setaffinity(0, allowed)


def soon_as_fast(engine: Engine, other: Engine) -> bool:
    """Return True if `engine` decodes at 0.8 of the other's speed for a second, within a minute.

    tests/pure/memory_nodes/test_thread_governor.py holds how long the governor takes. Here the
    kernel moves threads as it likes, and each move may cost one round.
    """
    deadline_s = time.monotonic() + 60.0
    while time.monotonic() < deadline_s:
        if decodes_per_s(engine, 1.0) >= 0.8 * decodes_per_s(other, 1.0):
            return True
    return False


def decodes_per_s(engine: Engine, seconds: float) -> float:
    n_decodes, start = 0, time.perf_counter()
    while time.perf_counter() < start + seconds:
        engine.sequences.extend(0, [n_decodes % 50])
        n_decodes += 1
        if engine.sequences.length(0) > 500:
            engine.sequences.rewind(0, 0)
    return n_decodes / (time.perf_counter() - start)


def pool_of(stream: Stream) -> int | None:
    """Address of the thread pool of a stream on ggml's CPU backend, or None.

    Without a pool and without OpenMP, ggml starts and joins threads for each graph.
    """
    context = abi.ggml_backend.from_address(stream.address).context
    return C.c_void_p.from_address(context + 8).value  # field after n_threads in ggml-cpu.cpp


def test_the_cpus_side_of_split_layers_computes_with_a_pool_that_stays(tiny_moe: Path) -> None:
    options = engine_options(device="sim", n_ctx=64, n_threads=1, n_threads_batch=1)
    options = engine_options(options, streaming=Streaming(hybrid=True, splitter=stay))
    with open_engine(tiny_moe, options) as engine:
        assert engine.opened.weights.hybrid is not None
        engine.sequences.extend(0, [1])
        assert engine.counters().split_layers > 0
        one = pool_of(engine.opened.weights.hybrid.team.stream)
        engine.sequences.extend(0, [2, 3])
        assert one is not None
        assert pool_of(engine.opened.weights.hybrid.team.stream) == one, (
            "as many threads, so the same pool"
        )


def test_alternating_numbers_are_taken_in_the_order_of_the_mask() -> None:
    topology = read_topology(Path("/nowhere"))
    cores = tuple(Core((cpu,), cpu % 2) for cpu in (0, 2, 4, 1, 3, 5))
    gib = 1 << 30
    nodes = (
        MemoryNode(0, (0, 2, 4), gib, gib, (10, 20)),
        MemoryNode(1, (1, 3, 5), gib, gib, (20, 10)),
    )
    topology = replace(
        topology,
        nodes=nodes,
        cores=cores,
        allowed_cpus=(0, 1, 2, 3, 4, 5),
        allowed_nodes=(0, 1),
        from_kernel=True,
    )
    planned = make_numa_plan(topology, Candidate(Strategy.ROWS, 4))
    plan = planned.in_mask_order(openmp=True)
    assert plan.decode.cpus == tuple(sorted(planned.decode.cpus))
    assert plan.decode.nodes == tuple(cpu % 2 for cpu in plan.decode.cpus)
    assert any("alternate" in reason for reason in plan.reasons)
    rotated = planned.in_mask_order(openmp=False)
    assert rotated.decode.cpus[0] == max(planned.decode.cpus)


@pytest.mark.parametrize(
    ("flags", "said"),
    [({"cpu_mask": "-C"}, "--cpu-mask"), ({"cpu_strict_batch": "x"}, "--cpu-strict-batch")],
)
def test_tune_searches_no_threads_if_flags_say_where_they_run(
    flags: dict[str, str], said: str, tmp_path: Path
) -> None:
    config = config_of(device="cpu", cpu_mask=((CPUS[0],),))
    tuned, (_, here, why) = _with_threads(config, flags, 60.0)
    assert tuned is config
    assert (here, why) == ("1 thread", f"not searched: {said} was given")


def test_the_llama_server_of_bench_runs_on_the_same_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_server, "_help_text", lambda _: "")
    on = config_of(device="cpu", cpu_mask=((CPUS[0],),), cpu_strict=True).decode_on
    tuned = llama_server.TunedLlama(0, 0, 512, on_gpu=False)
    program, model = tmp_path / "llama-server", tmp_path / "m.gguf"
    words = llama_server._command(program, model, tuned, (), n_ctx=512, n_threads=1, on=on)
    assert words[5:11] == ["-t", "1", "--cpu-mask", hex(1 << CPUS[0]), "--cpu-strict", "1"]
    words = llama_server._command(program, model, tuned, (), n_ctx=512, n_threads=1)
    assert "--cpu-mask" not in words


@needs_two
def test_a_draft_model_has_processors_of_its_own() -> None:
    draft = demo_file("draft.gguf")
    config = config_of(
        draft=draft, device="cpu", ctx_size=512, use_profile=False, threads=1,
        cpu_mask=((CPUS[0],),), of_draft=DraftOptions(cpu_mask=((CPUS[1],),), cpu_strict=True),
    )  # fmt: skip
    with Session(config) as session:
        assert session.target.opened.threads.sentence == f"threads run on processor {CPUS[0]}"
        assert session.draft is not None
        threads = session.draft.opened.threads  # type: ignore[attr-defined]
        assert threads.bound == {"decode": CPUS[1:2], "batch": CPUS[1:2]}
        assert threads.notes == []
