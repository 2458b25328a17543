"""Two simulated devices give what one gives, with other features: disk, NUMA, slots, bench."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import in_process
import numpy as np
import pytest
import test_disk
from numpy.typing import NDArray
from test_devices import logits, options, sims, written
from test_hybrid import flat_costs
from test_slots import SPECS, open_slots, together
from test_threads import needs_two, plan_of, two_nodes

from lab.options import Streaming, engine_options
from lab.synth import write_preset
from numa.place import Strategy
from offload.engine import Engine, open_engine
from offload.model_file import read_facts
from offload.schedule.splitter import all_on_device
from offload.times.min_batch import MinBatch
from specoffload.generation.generation import GenerateOptions
from specoffload.session.session import Session

TWO: dict[str, Any] = {"device": "sim,sim", "tensor_split": (1.0, 1.0)}
Rows = NDArray[np.float32]


@pytest.fixture(scope="module")
def path(models: Path) -> Path:
    return written("qwen3moe", models)


@pytest.fixture(scope="module")
def expected(path: Path) -> Rows:
    """Logits of one device, which streams."""
    with open_engine(path, options("sim")) as engine:
        return logits(engine)


def used_by_each(engine: Engine, count: str) -> list[int]:
    return [getattr(counters, count) for counters in engine.counters_by_device().values()]


@pytest.mark.parametrize("mode", ["streamed", "split"])
def test_experts_from_the_disk(path: Path, mode: str) -> None:
    """Pages of experts that are not in memory hold NaN."""
    streaming = Streaming(hybrid=mode == "split", splitter=all_on_device)
    ram_bytes = read_facts(path).expert_bytes // 3
    with open_engine(path, test_disk.options("sim", None, streaming)) as engine:
        expected = test_disk.logits(engine)
    with open_engine(
        path, engine_options(test_disk.options("sim", ram_bytes, streaming), **TWO)
    ) as engine:
        assert len(engine.opened.devices) == 2
        assert np.array_equal(test_disk.logits(engine), expected)
        memory = test_disk.experts_of(engine)
        assert memory.used_bytes <= ram_bytes
        assert memory.counters.reads.read_bytes > ram_bytes
        assert all(used_by_each(engine, "split_layers" if mode == "split" else "streamed_experts"))


def test_weights_in_the_page_cache(path: Path, expected: Rows) -> None:
    mapped = engine_options(options("sim,sim", tensor_split=(1, 1)), keep_page_cache=True)
    with open_engine(path, mapped) as engine:
        assert np.array_equal(logits(engine), expected)
        assert all(used_by_each(engine, "streamed_experts"))


@needs_two
def test_weights_on_memory_nodes(path: Path, expected: Rows) -> None:
    numa = plan_of(two_nodes(), Strategy.ROWS, 2)
    with open_engine(path, options("sim,sim", tensor_split=(1, 1), numa=numa)) as engine:
        assert np.array_equal(logits(engine), expected)
        assert any("numa rows: streamed weights placed" in note for note in engine.numa_notes)


def test_embeddings(path: Path) -> None:
    found = []
    for device in ("sim", "sim,sim"):
        asked = engine_options(device=device, n_ctx=256, n_ubatch=64, pooling="mean")
        with open_engine(path, engine_options(asked, min_batch=MinBatch(1, 1))) as engine:
            assert engine.opened.embedder is not None
            engine.sequences.extend(0, [1, 2, 3])
            found.append(engine.opened.embedder.embed(list(range(40)))[0])
            engine.sequences.extend(0, [4])
            assert all(used_by_each(engine, "streamed_experts"))
    assert np.array_equal(*found)


# -- sessions --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(models: Path) -> Path:
    """A target in f32, whose answers do not depend on how batches are cut."""
    shape: dict[str, Any] = {"n_layer": 6, "n_expert": 16, "n_expert_used": 2}
    path = models / "combinations.gguf"
    return write_preset("qwen3-30b-a3b", path, seed=3, quant="f32", vocab="bytes", **shape)


def texts_of(n: int) -> list[list[int]]:
    return [[(31 * nth + 7 * i) % 250 for i in range(9 + 4 * nth)] for nth in range(n)]


@contextmanager
def opened(
    target: Path, shares: tuple[float, ...], rates: tuple[str, ...], **more: Any
) -> Iterator[Session]:
    """A session of four slots on one device for each share, with slots for half of the experts."""
    several = {"tensor_split": shares} if len(shares) > 1 else {}
    device = sims(target, shares, rates)
    with open_slots(
        target, SPECS["alone"], 4, device=device, hybrid="on", **several, **more
    ) as session:
        # The costs that the start measured depend on the load of this machine.
        ways = session.target.opened.weights.ways
        ways.change(splitter=flat_costs(5.0), splitters={})
        assert len(session.target.opened.devices) == len(shares)
        yield session


ONE, BOTH = ((1.0,), ("1GB/s",)), ((2.0, 3.0), ("2GB/s", "1GB/s"))


def test_promotions_while_requests_come_and_go(target: Path) -> None:
    """Split layers of many requests in four slots, with copies for later decodes between them."""
    answers: list[list[list[int]]] = []
    for shares, rates in (ONE, BOTH):
        with opened(target, shares, rates) as session:
            generate = GenerateOptions(n_predict=16, ignore_eos=True)
            found = together(session, texts_of(6), generate)
            answers.append([answer.tokens for answer in found])
            assert all(used_by_each(session.target, "n_promoted"))
            assert all(used_by_each(session.target, "n_pairs_hit"))
    assert answers[0] == answers[1]


def test_kept_prompts_and_saved_slots(target: Path, tmp_path: Path) -> None:
    """A sequence's state spans the devices. It goes on, and also on another number of devices."""
    generate = GenerateOptions(n_predict=6, ignore_eos=True)
    more: dict[str, Any] = {"slot_save_path": tmp_path, "cache_ram_bytes": 1 << 28}
    text = texts_of(3)[-1]
    with opened(target, *BOTH, **more) as session:
        (answer,) = together(session, [text], generate)
        saved = session.change_slot(0, "save", "chat")
        longer = [*text, *answer.tokens, 1, 2, 3]
        (wanted,) = together(session, [longer], generate)
        session.forget()
        (anew,) = together(session, [longer], generate)
        assert (wanted.stats.n_cached_tokens, anew.stats.n_cached_tokens) == (saved.n_tokens, 0)
        assert wanted.tokens == anew.tokens
    for shares, rates in (BOTH, ONE):
        with opened(target, shares, rates, **more) as session:
            assert session.change_slot(1, "restore", "chat").n_tokens == saved.n_tokens
            (got,) = together(session, [longer], generate)
            assert (got.tokens, got.stats.n_cached_tokens) == (wanted.tokens, saved.n_tokens)


def test_bench_measures_both_devices(target: Path) -> None:
    facts = read_facts(target)
    done = in_process.command(
        "bench", target, "--min-batch", "3", "--device", "sim,sim", "-ts", "1,1", "--vram",
        str((facts.size_bytes - facts.expert_bytes) + facts.expert_bytes // 4), "-n", "2", "-r",
        "1", "-c", "256", "-ub", "32", "-t", "1", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["counters"]["streamed_bytes"] > 0
    assert set(result["ways"]) >= {"in place", "streamed"}
    assert all(entry["seconds"] > 0 for entries in result["ways"].values() for entry in entries)
    assert {row["path"] for row in result["rows"]} == {"llama.cpp -ub 512", "wrapped"}
