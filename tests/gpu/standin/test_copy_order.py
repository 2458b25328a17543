"""The order of copies from the host, for which a device has one engine: slot ids come first."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import standin_calls
from on_gpu import options, slots_for

from lab.synth import write_preset
from offload.device import DeviceChoice
from offload.engine import open_engine
from offload.schedule.splitter import all_on_device, stay
from offload.times.min_batch import NEVER, MinBatch

EXPERT_BYTES = 8704  # bytes of one matrix of an expert of the model below; tables are smaller
PER_THREAD = 2  # cudaStreamPerThread, on which libllama uploads a graph's inputs


@pytest.fixture(scope="module")
def path(models: Path) -> Path:
    return write_preset("qwen3moe", models / "gpu_copies.gguf", n_layer=6, n_expert=32, seed=3)


def after_each_read(copies: list[dict[str, int]]) -> list[list[int]]:
    """The streams of the copies to the device, in a list for each read from the device."""
    groups = groupby(copies, lambda copy: copy["to_device"])
    return [[copy["stream"] for copy in group] for is_to, group in groups if is_to]


@pytest.mark.parametrize(
    ("n_tokens", "chosen"),
    [
        (1, {}),
        (5, {}),
        (1, {"prefetch": False}),
        (3, {"hybrid": True, "splitter": all_on_device}),
        (4, {"n_gpu_layers": 0}),  # dense weights stream too, so Python executes the graph
        (24, {"slots": "least", "n_gpu_layers": 99, "passes": "on"}),
    ],
    ids=["player", "five tokens", "no guesses", "split", "Python", "passes"],
)
def test_slot_ids_are_enqueued_before_the_copies_of_experts(
    standin: DeviceChoice, path: Path, n_tokens: int, chosen: dict[str, Any]
) -> None:
    """After ids were read, the first copy to the device is on the stream that read them.

    Kernels read the tables of passes from pinned memory, so nothing but experts is copied there.
    """
    streaming = slots_for(path, **{"slots": "half", **chosen})
    least = NEVER if streaming.get("hybrid") else 1
    opened = options(
        standin, streaming, min_batch=MinBatch(least, 1), n_ubatch=max(16, n_tokens), n_ctx=512
    )
    with open_engine(path, opened) as engine:
        engine.sequences.extend(0, [1] * n_tokens)
        before = engine.counters()
        standin_calls.record_copies(is_on=True)
        for i in range(4):
            tokens = [(13 * k + 7 * i + 5) % engine.n_vocab for k in range(n_tokens)]
            engine.sequences.extend(0, tokens)
        recorded, after = standin_calls.copies(), engine.counters()
        standin_calls.record_copies(is_on=False)
    copies = [copy for copy in recorded if copy["stream"] != PER_THREAD]
    compute = {copy["stream"] for copy in copies if not copy["to_device"]}
    assert len(compute) == 1
    in_passes = n_tokens == 24
    if in_passes:
        sent = [copy for copy in copies if copy["to_device"]]
        assert sent
        assert after.passes > before.passes
        assert all(copy["bytes"] >= EXPERT_BYTES for copy in sent), "tables would wait for experts"
        assert not compute & {copy["stream"] for copy in sent}
        return
    enqueued = [streams for streams in after_each_read(copies) if compute & {*streams}]
    with_experts = [streams for streams in enqueued if {*streams} - compute]
    assert after.copies > before.copies
    assert after.passes == before.passes
    assert len(enqueued) >= 4 * engine.facts.n_layers
    assert len(with_experts) >= 4
    assert all(streams[0] in compute for streams in enqueued)


@pytest.mark.parametrize("rings", [False, True])
def test_rows_of_layers_with_a_doorbell_pass_no_copy_engine(
    standin: DeviceChoice, models: Path, rings: bool
) -> None:
    """Only the logits are copied to the host. Without a doorbell, each layer's ids and rows are."""
    shape: dict[str, Any] = {"n_embd": 256, "n_ff_exp": 256, "n_expert": 64}
    path = write_preset("qwen3-30b-a3b", models / "copies.gguf", quant="q4_K", seed=1, **shape)
    streaming = slots_for(path, "half", hybrid=True, splitter=stay, prefetch=False, doorbell=rings)
    opened = options(standin, streaming, min_batch=MinBatch(NEVER, NEVER), n_ctx=512)
    with open_engine(path, opened) as engine:
        for i in range(8):  # the first ones capture graphs
            engine.sequences.extend(0, [5 + i])
        before = engine.counters()
        standin_calls.record_copies(is_on=True)
        for i in range(4):
            engine.sequences.extend(0, [7 * i + 5])
        recorded, after = standin_calls.copies(), engine.counters()
        standin_calls.record_copies(is_on=False)
    n_cpu = after.n_pairs_host - before.n_pairs_host
    n_layers = after.split_layers - before.split_layers
    assert n_cpu > 0
    assert after.layers_rung - before.layers_rung == (n_layers if rings else 0)
    assert after.rows_by_kernels - before.rows_by_kernels == (n_cpu if rings else 0)
    n_read = sum(not copy["to_device"] for copy in recorded)
    assert n_read == (4 if rings else 4 + 2 * n_layers)
    n_experts = after.n_promoted - before.n_promoted
    n_sent = sum(copy["to_device"] for copy in recorded if copy["stream"] != PER_THREAD)
    assert n_sent <= 4 + 3 * n_experts or not rings, "tables, and promoted experts"
