"""--route-cached on a simulated device: routers choose as the numpy form does, and are counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from routed_choices import SpiedChoices, routing_of, turn_on
from splits import at_random, logits_of, sim_options, split_streaming

from lab.options import Streaming, engine_options
from lab.synth import write_preset
from offload.decode import SMALL_BATCH
from offload.engine import EngineOptions, open_engine
from offload.ggml.backend import Stream
from offload.schedule.cached_choice import ChoiceCounts, RouteOptions
from offload.schedule.splitter import all_on_device
from offload.stream.cached_routing import CachedRouting

PRESETS = {
    "deepseek2": "deepseek-v2-lite",
    "deepseek3": "deepseek-v3",  # a selection bias and groups
    "kimi": "kimi-k2",
    "qwen3moe": "qwen3-30b-a3b",
    "glm4moe": "glm-4.5-air",  # a selection bias
    "gpt-oss": "gpt-oss-20b",  # biases, and weights by softmax of the chosen
    "llama4": "llama-4-scout",  # selects by logits
    "qwen35moe": "qwen3.5-35b-a3b",
    "minimax-m2": "minimax-m2",
    "qwen3next": "qwen3-next-80b-a3b",
}
BATCHES = (5, 1, 2, 64, 3, 1, 1, 17, 1)
STRONG = RouteOptions(1.0)
Rows = NDArray[np.float32]
logits = partial(logits_of, batches=BATCHES)


def routed(path: Path, route: RouteOptions, slots: str = "half") -> EngineOptions:
    split = at_random(1) if slots == "half" else all_on_device
    options = sim_options(split_streaming(split, path, slots), n_ubatch=64, n_outputs=128)
    return replace(options, streaming=replace(options.streaming, route=route, record_routing=True))


@pytest.fixture(scope="module", params=PRESETS)
def model(request: pytest.FixtureRequest, models: Path) -> Iterator[tuple[Path, Rows]]:
    """A random model of an architecture, and the logits of all of it resident."""
    path = models / f"routed-{request.param}.gguf"
    write_preset(PRESETS[request.param], path, size="tiny", seed=1)
    whole = sim_options(Streaming(), 1, n_ubatch=64, n_outputs=128)
    with open_engine(path, engine_options(whole, stream_experts=False)) as engine:
        yield path, logits(engine)


@pytest.mark.parametrize("n_kept", [0, 2])
def test_the_device_chooses_as_the_numpy_form_does(
    model: tuple[Path, Rows], n_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = model
    spied = SpiedChoices(monkeypatch)
    with open_engine(path, routed(path, RouteOptions(1.0, n_kept))) as engine:
        turn_on(engine)
        rows = logits(engine)
        spied.assert_same(engine)
        counts, n_used = routing_of(engine).counts, engine.facts.n_experts_used
        assert not routing_of(engine).n_unchanged
    if n_used <= n_kept:  # llama4 uses one expert
        assert np.array_equal(rows, expected)
        assert counts.n_kept == counts.n_choices
        return
    assert spied.n_other > 0, "nothing was preferred"
    assert not np.array_equal(rows, expected)
    assert 0 < counts.n_kept < counts.n_choices
    assert counts.n_cached > counts.n_own_cached


def test_batches_of_every_size_choose_as_the_numpy_form_does(
    model: tuple[Path, Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = model
    spied = SpiedChoices(monkeypatch)
    with open_engine(path, routed(path, RouteOptions(1.0, 1))) as engine:
        turn_on(engine)
        for n in range(1, SMALL_BATCH + 1):
            engine.sequences.extend(0, [(7 * n + 3 * i) % engine.n_vocab for i in range(n)])
            engine.sequences.rewind(0, 0)
        spied.assert_same(engine)
        assert routing_of(engine).counts.n_choices % sum(range(SMALL_BATCH + 1)) == 0
        assert spied.n_other > 0 or engine.facts.n_experts_used == 1


def test_several_sequences_choose_as_the_numpy_form_does(
    model: tuple[Path, Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = model
    spied = SpiedChoices(monkeypatch)
    options = engine_options(routed(path, RouteOptions(1.0, 1)), n_sequences=3)
    with open_engine(path, options) as engine:
        turn_on(engine)
        for sizes in ((3, 1), (1, 1, 1), (20, 1, 40), (1,), (2, 5, 2), (1, 1, 1)):
            parts = [
                (sequence, [(11 * i + sequence) % engine.n_vocab for i in range(n)], n)
                for sequence, n in enumerate(sizes)
            ]
            engine.sequences.extend_batch(parts)
        spied.assert_same(engine)
        assert spied.n_other > 0 or engine.facts.n_experts_used == 1


def test_penalties_are_the_strength_times_the_mean_range_and_uploaded_after_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier graphs may still read the penalties that are replaced."""
    path = write_preset(PRESETS["qwen3moe"], tmp_path / "m.gguf", size="tiny", seed=1)
    see, upload, wait = ChoiceCounts.see, CachedRouting._upload, Stream.synchronize
    begin = CachedRouting.begin
    calls: list[str] = []
    lost: list[float] = []

    def spied(counts: ChoiceCounts, group: int, scores: Rows, penalty: Rows, *rest: Any) -> None:
        mean = counts.ranges[group].mean if group in counts.ranges else 0.0
        assert penalty.min() in (0.0, np.float32(-0.25 * mean))
        lost.append(float(penalty.min()))
        see(counts, group, scores, penalty, *rest)

    def begun(routing: CachedRouting, *arguments: Any, **more: Any) -> None:
        calls.append("begin")
        begin(routing, *arguments, **more)

    def uploaded(routing: CachedRouting) -> None:
        calls.append("upload")
        upload(routing)

    def waited(stream: Stream) -> None:
        calls.append("wait")
        wait(stream)

    with open_engine(path, routed(path, RouteOptions(0.25))) as engine:
        engine.opened.routing.is_on = routing_of(engine).is_on = True
        monkeypatch.setattr(ChoiceCounts, "see", spied)
        monkeypatch.setattr(CachedRouting, "begin", begun)
        monkeypatch.setattr(CachedRouting, "_upload", uploaded)
        monkeypatch.setattr(Stream, "synchronize", waited)
        logits(engine)
        monkeypatch.undo()
    assert min(lost) < 0.0
    uploads = [i for i, call in enumerate(calls) if call == "upload"]
    assert len(uploads) > 2
    assert all(calls[i - 1] == "wait" for i in uploads[1:]), "the first is of a new table"


def test_nothing_changes_if_every_expert_is_in_a_slot(
    model: tuple[Path, Rows],
) -> None:
    path, expected = model
    with open_engine(path, routed(path, STRONG, slots="all")) as engine:
        logits(engine)  # fills the slots
        engine.sequences.rewind(0, 0)
        routing_of(engine).is_on = True
        assert np.array_equal(logits(engine), expected)
        counts = routing_of(engine).counts
    assert counts.n_kept == counts.n_choices > 0


def test_nothing_changes_until_it_is_turned_on(model: tuple[Path, Rows]) -> None:
    path, expected = model
    with open_engine(path, routed(path, STRONG)) as engine:
        assert np.array_equal(logits(engine), expected)
        assert routing_of(engine).counts.n_choices == 0
    with open_engine(path, routed(path, RouteOptions(0.0))) as engine:
        (device,) = engine.opened.devices
        assert device.routing is None
        assert np.array_equal(logits(engine), expected)


def test_every_size_of_a_batch_is_counted_and_prompts_are_not(
    model: tuple[Path, Rows],
) -> None:
    """A prompt whose last part is small is still a prompt."""
    path, _ = model
    with open_engine(path, routed(path, STRONG)) as engine:
        routing = routing_of(engine)
        routing.is_on = True
        engine.sequences.extend(0, [5] * 3)
        n_layers = routing.counts.n_choices
        engine.sequences.extend(0, [5] * 63)
        assert routing.counts.n_choices == n_layers * 22
        before = routing.counts.n_choices
        engine.sequences.extend(0, [5] * 70)  # 64 and 6 tokens
        assert routing.counts.n_choices == before


def test_routers_that_cannot_be_changed_are_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_preset(PRESETS["qwen3moe"], tmp_path / "m.gguf", size="tiny", seed=1)
    with open_engine(path, routed(path, STRONG)) as engine:
        routing = routing_of(engine)
        assert not routing.n_unchanged
        monkeypatch.setattr(routing, "_supports", lambda node: False)
        with caplog.at_level("WARNING", "offload.stream.cached_routing"):
            logits(engine)
        assert routing.n_unchanged
    (told,) = [message for message in caplog.messages if "--route-cached" in message]
    assert "has no effect on" in told
