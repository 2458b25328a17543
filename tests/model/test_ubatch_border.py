"""An only device copies for the next ubatch of a prompt while it computes the end of this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lab.options import Streaming, engine_options
from lab.synth import write_preset
from offload.decode import Batch
from offload.engine import Engine, EngineOptions, open_engine
from offload.model_file import read_facts
from offload.plan.placement import PlanRequest, make_plan
from offload.times.min_batch import MinBatch
from offload.trace.trace import COMPUTE, COPY, Trace

N_UBATCH = 80  # more than the player's batches
N_TOKENS = 4 * N_UBATCH + 7


@pytest.fixture(scope="module")
def path(models: Path) -> Path:
    return write_preset("qwen3moe", models / "border.gguf", n_layer=6, n_expert=8, seed=2)


def options(path: Path, share: float = 0.5, **chosen: Any) -> EngineOptions:
    """Options with slots for `share` of the experts."""
    plan = make_plan(read_facts(path), PlanRequest())
    vram_bytes = plan.resident_bytes + int(plan.slot_bytes * share)
    return engine_options(
        device="sim", streaming=Streaming(vram_bytes=vram_bytes, **chosen),
        min_batch=MinBatch(1, 1), n_ctx=512, n_ubatch=N_UBATCH, n_batch=512, n_outputs=64,
        flash_attn="off", n_threads=1, n_threads_batch=1,
    )  # fmt: skip


def logits(engine: Engine, n_tokens: int = N_TOKENS) -> NDArray[np.float32]:
    """Logits after a prompt, and after one of another length that follows it."""
    engine.sequences.rewind(0, 0)
    tokens = [(13 * i + 5) % engine.n_vocab for i in range(n_tokens)]
    first = engine.sequences.extend(0, tokens, 3)
    return np.concatenate([first, engine.sequences.extend(0, tokens[:100], 2)])


@pytest.fixture(scope="module")
def expected(path: Path) -> NDArray[np.float32]:
    with open_engine(path, options(path, 1.0, depth=0)) as engine:
        return logits(engine)


@pytest.mark.parametrize("depth", [1, 8])
@pytest.mark.parametrize("share", [0.34, 0.5, 0.8])
def test_copies_that_begin_early_change_no_logit(
    path: Path, expected: NDArray[np.float32], share: float, depth: int
) -> None:
    with open_engine(path, options(path, share, depth=depth)) as engine:
        for _ in range(2):
            assert np.array_equal(logits(engine), expected)
        counters = engine.counters()
    # Each prompt has 5 ubatches. Its last one is too small for a graph that Python executes.
    assert counters.n_early >= 2 * 3


@pytest.mark.parametrize("chosen", [{"depth": 0}, {"cache": False}], ids=["depth 0", "no cache"])
def test_nothing_begins_early_where_it_cannot(
    path: Path, expected: NDArray[np.float32], chosen: dict[str, Any]
) -> None:
    with open_engine(path, options(path, **chosen)) as engine:
        assert np.array_equal(logits(engine), expected)
        assert engine.counters().n_early == 0


@pytest.mark.parametrize("is_early", [True, False], ids=["early", "switched off"])
def test_the_next_ubatch_copies_before_the_last_node_is_computed(
    path: Path, is_early: bool
) -> None:
    trace = Trace()
    with open_engine(path, options(path, 0.34, trace=trace)) as engine:
        logits(engine)
        assert engine.device is not None
        for executor in engine.device.executors.values():
            executor.may_start_next = is_early
        engine.sequences.rewind(0, 0)
        trace.restart()
        engine.sequences.extend(0, [i % engine.n_vocab for i in range(4 * N_UBATCH)], 1)
        engine.settle()
        events = trace.events()
    computed = [event for event in events if event.lane == COMPUTE and event.name[:6] == "nodes "]
    begins = [i for i, event in enumerate(computed) if event.name.startswith("nodes 0-")]
    # The slots hold two layers of six, so each ubatch copies the first layer's gates again.
    gates = [e for e in events if e.lane == COPY and e.name.startswith("blk.0.ffn_gate_exps")]
    assert len(begins) == len(gates) == 4
    start_s = sorted(event.start_s for event in gates)
    end_s = [computed[i - 1].end_s for i in begins[1:]]  # of the ubatches but the last
    # A busy processor may delay the copying thread at one border, but not at all three.
    assert any(map(float.__lt__, start_s[1:], end_s)) == is_early


@pytest.mark.parametrize("chosen", [{}, {"depth": 0}, {"cache": False}])
def test_only_wanted_rows_read_the_routers_choice(
    path: Path, expected: NDArray[np.float32], chosen: dict[str, Any]
) -> None:
    """Reading it would wait for the ubatch, and the device would idle until the next graph."""
    with open_engine(path, options(path, **chosen)) as engine:
        tokens = [(13 * i + 5) % engine.n_vocab for i in range(4 * N_UBATCH)]
        reads = []
        for n_logits in (1, N_UBATCH + 1, 0):
            engine.sequences.rewind(0, 0)
            before = engine.counters().router_reads
            engine.sequences.extend(0, tokens, n_logits)
            reads.append(engine.counters().router_reads - before)
        # In the last two ubatches of the second prompt logits are wanted, in the last one all.
        assert reads == [1, 1, 0]
        assert np.array_equal(logits(engine), expected)


def test_a_prompt_begins_to_copy_before_libllama_builds_its_graph(
    path: Path, expected: NDArray[np.float32]
) -> None:
    prompt = [3] * N_UBATCH
    with open_engine(path, options(path)) as engine:
        engine.sequences.extend(0, prompt, 1)
        assert engine.device is not None
        assert engine.counters().n_early == 0  # no such prompt was seen before
        early, copied = [], []
        compute = engine.device._of

        def seen(*args: Any) -> Any:
            early.append(engine.counters().n_early)
            copied.append(engine.counters().copies)
            return compute(*args)

        engine.device._of = seen  # type: ignore[method-assign]
        engine.sequences.rewind(0, 0)
        before = engine.counters().copies
        engine.sequences.extend(0, prompt, 1)
        assert early == [1]
        assert copied[0] > before
        engine.sequences.rewind(0, 0)
        engine.sequences.extend(0, prompt[1:], 1)  # another size, which was not seen
        assert early == [1, 1]
        assert np.array_equal(logits(engine), expected)


def test_what_a_prompt_copied_early_is_forgotten_if_another_batch_comes(
    path: Path, expected: NDArray[np.float32]
) -> None:
    with open_engine(path, options(path)) as engine:
        engine.sequences.extend(0, [3] * N_UBATCH, 1)
        assert engine.device is not None
        n, wanted = N_UBATCH, [False] * N_UBATCH
        with engine.device.decode(Batch([3] * n, range(n), [0] * n, wanted, n)):
            assert engine.counters().n_early == 1  # libllama refuses the decode
        assert np.array_equal(logits(engine), expected)
