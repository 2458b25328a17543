"""Layers split between the CPU and `sim` give the resident model's bits, whatever the split.

Both sides compute with the CPU's kernels here, one row at a time, so results must be bit-identical.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from budgets import limited
from gguf import GGUFReader
from numpy.typing import NDArray
from player_calls import Compute, computing, host_graphs, played_layers, uploading
from splits import all_host, at_random, flat_costs, logits_of, sim_options, split_streaming

from lab.options import Streaming, engine_options
from lab.synth import write_preset
from offload.decode import SMALL_BATCH
from offload.engine import Engine, EngineOptions, open_engine
from offload.errors import DeviceFailed
from offload.ggml.backend import RouterIds, SlotIds, Stream
from offload.ggml.graph import Graph
from offload.ggml.library import abi
from offload.ggml.memory import HostRange
from offload.ggml.player import View
from offload.ggml.tensor import Tensor
from offload.measuring import measure_split, take_splits
from offload.model_file import read_facts
from offload.plan.placement import make_plan
from offload.schedule.schedule import Schedule
from offload.schedule.slots import StreamCounters
from offload.schedule.splitter import ByCosts, Splitter, all_on_device, stay
from offload.stream import split_path as path_module
from offload.stream.copying import ThreadCopier, Transfer
from offload.stream.forms import NoForm
from offload.stream.play import GraphPlayer
from offload.stream.program import Program
from offload.trace.trace import COUNTER, CPU, Trace

Rows = NDArray[np.float32]
PRESETS = {
    "deepseek2": "deepseek-v2-lite",
    "qwen3moe": "qwen3-30b-a3b",
    "glm4moe": "glm-4.5-air",
    "gpt-oss": "gpt-oss-20b",  # biases
    "llama4": "llama-4-scout",  # weights before the FFN
    "qwen35moe": "qwen3.5-35b-a3b",
    "minimax-m2": "minimax-m2",
}
BATCHES = (1, 2, 5, 1, 17, 64, 3, 1)


SPLITS: dict[str, Callable[[], Splitter]] = {
    "stay": lambda: stay,
    "all-host": lambda: all_host,
    "all-device": lambda: all_on_device,
    "random": lambda: at_random(1),
}


options = partial(sim_options, n_ubatch=64, n_outputs=128)
logits = partial(logits_of, batches=BATCHES)


def split_by(splitter: Splitter, path: Path, slots: str) -> EngineOptions:
    return options(split_streaming(splitter, path, slots))


def pairs(engine: Engine) -> tuple[int, int, int]:
    counters = engine.counters()
    return counters.n_pairs_hit, counters.n_pairs_streamed, counters.n_pairs_host


@pytest.fixture(scope="module", params=PRESETS)
def model(request: pytest.FixtureRequest, models: Path) -> Iterator[tuple[Path, Rows]]:
    """A random model of an architecture, and the logits of all of it resident."""
    path = models / f"hybrid-{request.param}.gguf"
    write_preset(PRESETS[request.param], path, size="tiny", seed=1)
    with open_engine(path, engine_options(options(Streaming(), 1), stream_experts=False)) as engine:
        yield path, logits(engine)


@pytest.mark.parametrize(
    ("split", "slots"),
    [
        ("stay", "half"),
        ("all-host", "least"),
        ("all-device", "all"),
        ("random", "half"),
        ("random", "least"),
    ],
)
def test_a_split_layer_gives_the_resident_models_bits(
    model: tuple[Path, Rows], split: str, slots: str
) -> None:
    path, expected = model
    with open_engine(path, split_by(SPLITS[split](), path, slots)) as engine:
        assert np.array_equal(logits(engine), expected)
        assert not engine.opened.weights.ways.now.declined
        n_hit, n_streamed, n_host = pairs(engine)
    assert (n_host == 0) == (split == "all-device")
    assert (n_hit + n_streamed == 0) == (split == "all-host")
    if split == "stay":
        assert n_streamed == 0, "the device computes only experts that are in slots already"


def test_every_size_of_a_batch_gives_the_resident_models_bits(model: tuple[Path, Rows]) -> None:
    path, _ = model

    def of_every_size(engine: Engine) -> Iterator[Rows]:
        for n in range(1, SMALL_BATCH + 1):
            tokens = [(11 * i + 3 * n) % engine.n_vocab for i in range(n)]
            yield engine.sequences.extend(0, tokens)
            engine.sequences.rewind(0, 0)

    resident = engine_options(options(Streaming(), 1), stream_experts=False)
    with (
        open_engine(path, resident) as whole,
        open_engine(path, split_by(at_random(2), path, "half")) as split,
    ):
        both = zip(of_every_size(whole), of_every_size(split), strict=True)
        for n, (expected, found) in enumerate(both, 1):
            assert np.array_equal(found, expected), n
        assert min(pairs(split)) > 0


@pytest.mark.parametrize("quant", ["q8_0", "f16"])
@pytest.mark.parametrize("slots", ["all", "half", "least"])
def test_no_token_is_shown_a_slot_twice(
    models: Path, slots: str, quant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA needs this for products of several tokens, or of weights that are not quantised."""
    path = write_preset("qwen3-30b-a3b", models / f"twice-{quant}.gguf", quant=quant, seed=1)
    upload, played = Stream.upload, played_layers(monkeypatch)
    seen: list[int] = []
    wrong: list[Any] = []

    def check(values: NDArray[np.int32]) -> None:
        seen.append(len(values))
        if quant == "f16" or seen[-1] > 1:
            wrong.extend(token for token in values.tolist() if len(set(token)) < len(token))

    def checked(stream: Stream, values: SlotIds | RouterIds) -> None:
        if isinstance(values, SlotIds):
            check(values.values)
        upload(stream, values)

    def uploaded(tensor: int, position: int) -> None:
        for layer in [layer for layer in played if layer.slot_ids_tensor == tensor]:
            n, n_used = layer.n_tokens, layer.n_used
            values = HostRange(position, 4 * n * n_used).array().view(np.int32).reshape(n, n_used)
            check(values)
            view = View.from_address(layer.views)
            n_shown = Tensor(view.tensor).shape[view.axis]
            wrong.extend(slot for slot in values.ravel().tolist() if not 0 <= slot < n_shown)

    monkeypatch.setattr(Stream, "upload", checked)
    uploading(monkeypatch, uploaded)
    for made in SPLITS.values():
        with open_engine(path, split_by(made(), path, slots)) as engine:
            logits(engine)
            counters = engine.counters()
            # Layers of whole graphs read the router's own ids.
            n_whole = counters.whole_graphs * engine.facts.n_layers
            assert n_whole > 0 or (slots, made) != ("all", SPLITS["all-device"])
            assert counters.split_layers == len(seen) + n_whole
            engine.sequences.rewind(0, 0)
            measure_split(engine)
        assert n_whole or set(seen) >= set(BATCHES)
        assert not wrong
        seen.clear()
        played.clear()


@pytest.fixture(scope="module")
def expected(tiny_moe: Path) -> Rows:
    with open_engine(
        tiny_moe, engine_options(options(Streaming(), 1), stream_experts=False)
    ) as engine:
        return logits(engine)


@pytest.mark.parametrize("preset", ["qwen3-30b-a3b", "qwen3.5-35b-a3b"])
def test_factors_of_experts_are_the_cpus_too(models: Path, preset: str) -> None:
    """Some quantisations have scales such as `ffn_gate_exps.scale` (see build_lora_mm_id)."""
    path = models / f"hybrid-scales-{preset}.gguf"
    write_preset(preset, path, seed=1, expert_scales=True)
    names = {tensor.name for tensor in GGUFReader(path).tensors}
    assert {f"blk.1.ffn_{kind}_exps.scale" for kind in ("gate", "up", "down")} <= names
    with open_engine(path, engine_options(options(Streaming(), 1), stream_experts=False)) as engine:
        expected = logits(engine)
    for split in ("random", "all-host"):
        with open_engine(path, split_by(SPLITS[split](), path, "half")) as engine:
            assert np.array_equal(logits(engine), expected), split
            assert engine.opened.weights.hybrid is not None
            assert not engine.opened.weights.ways.now.declined
            assert pairs(engine)[2] > 0


def test_an_idle_link_brings_what_the_cpu_computed(tiny_moe: Path, expected: Rows) -> None:
    """A copy takes 5 s, longer than one token's four experts and shorter than two layers."""
    with open_engine(tiny_moe, split_by(flat_costs(5.0), tiny_moe, "half")) as engine:
        assert np.array_equal(logits(engine), expected)
        for i in range(8):
            engine.sequences.extend(0, [7 * i + 1])
        counters = engine.counters()
        assert 0 < counters.n_promoted <= counters.streamed_experts
        assert counters.n_pairs_hit > 0


@pytest.mark.parametrize(("copy_s", "prefetch"), [(1e6, True), (5.0, False)])
def test_nothing_is_promoted_over_a_busy_link_or_without_prefetch(
    tiny_moe: Path, expected: Rows, copy_s: float, prefetch: bool
) -> None:
    chosen = split_by(flat_costs(copy_s), tiny_moe, "half")
    with open_engine(tiny_moe, engine_options(chosen, prefetch=prefetch)) as engine:
        assert np.array_equal(logits(engine), expected)
        assert engine.counters().n_promoted == 0
        assert engine.counters().n_pairs_host > 0


@pytest.fixture(scope="module")
def deeper_moe(models: Path) -> Path:
    shape = {"n_layer": 6, "n_expert": 8, "n_expert_used": 2}
    return write_preset("qwen3-30b-a3b", models / "deeper.gguf", size="tiny", seed=1, **shape)


def around_prompts(path: Path) -> tuple[Rows, StreamCounters, tuple[int, int]]:
    """Decode, evaluate two prompts of two ubatches each, and decode after each.

    Returns the logits, the counters, and (hits, uses) of the decodes after the prompts.
    """
    streaming = Streaming(hybrid=True, splitter=stay)
    half = limited(path, streaming, "half")
    chosen = options(half | Streaming(vram_bytes=half["vram_bytes"] + 120_000), 65)
    rows, hits, uses = [], 0, 0
    with open_engine(path, engine_options(chosen, n_ubatch=80)) as engine:
        assert engine.opened.plan is not None
        (pool,) = engine.opened.plan.layout.pools
        assert 3 * pool.n_experts <= pool.n_slots < 5 * pool.n_experts
        for prompt in range(3):
            if prompt:
                tokens = [(11 * i + prompt) % engine.n_vocab for i in range(160)]
                rows.append(engine.sequences.extend(0, tokens, n_logits=4))
                engine.sequences.rewind(0, 0)
            before = pairs(engine)
            for i in range(24):
                rows.append(engine.sequences.extend(0, [7 * (i % 6) + 1]))
                if prompt and i == 7:
                    n_hit, n_streamed, n_host = np.subtract(pairs(engine), before)
                    hits, uses = hits + n_hit, uses + n_hit + n_streamed + n_host
            engine.sequences.rewind(0, 0)
        return np.concatenate(rows), engine.counters(), (hits, uses)


def test_a_prompt_leaves_decodes_their_experts_and_copies_no_more(
    deeper_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    got, counters, (hits, uses) = around_prompts(deeper_moe)
    assert counters.layers_out_of_order > 0
    monkeypatch.setattr(Schedule, "saves_out_of_order", lambda *_: False)
    expected, in_order, (fewer_hits, same_uses) = around_prompts(deeper_moe)
    assert in_order.layers_out_of_order == 0
    assert np.array_equal(got, expected)
    assert counters.streamed_bytes < in_order.streamed_bytes
    assert uses == same_uses
    assert hits > fewer_hits


# Models with a shared expert of at least four nodes: gate, up, GLU and down.
WITH_SHARED = ("deepseek2", "glm4moe", "llama4", "qwen35moe")


def test_the_shared_expert_goes_ahead_of_the_cpus_rows(model: tuple[Path, Rows]) -> None:
    path, expected = model
    has_shared = path.stem.removeprefix("hybrid-") in WITH_SHARED
    with open_engine(path, split_by(all_host, path, "half")) as engine:
        assert np.array_equal(logits(engine), expected)
        counters = engine.counters()
        if has_shared:
            assert counters.n_nodes_ahead >= 4 * counters.split_layers
        else:
            assert counters.n_nodes_ahead == 0


def test_the_device_has_the_shared_expert_before_the_cpus_part_ends(
    tiny_moe: Path, expected: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the CPU's part waits for the shared expert. The graph's own order would time out."""
    given, n_waited = set[str](), 0
    missing: list[int] = []
    changed = threading.Condition()
    hosts: set[int] = set()

    def made(inner: Compute) -> Compute:
        def compute(stream: int, graph: int) -> int:
            if graph in hosts:
                wait()
                return inner(stream, graph)
            status = inner(stream, graph)
            with changed:
                given.update(node.name for node in Graph(graph).nodes())
                changed.notify_all()
            return status

        return compute

    def wait() -> None:
        nonlocal n_waited
        with changed:
            if not changed.wait_for(lambda: any(n.startswith("ffn_moe_down-") for n in given), 20):
                missing.append(-1)
            layer = max(
                (int(n.split("-")[1]) for n in given if n[:13] == "ffn_moe_down-"), default=0
            )
            if not changed.wait_for(lambda: f"ffn_shexp-{layer}" in given, timeout=20):
                missing.append(layer)
            given.clear()
        n_waited += 1

    with open_engine(tiny_moe, split_by(at_random(6), tiny_moe, "half")) as engine:
        assert np.array_equal(logits(engine), expected)
        engine.sequences.rewind(0, 0)
        hosts |= host_graphs(engine)[0]
        computing(monkeypatch, made)
        assert np.array_equal(logits(engine), expected)
        assert not missing
        monkeypatch.undo()
    assert n_waited > len(BATCHES)


def test_a_decode_without_logits_has_nothing_to_split_in_its_last_layer(
    tiny_moe: Path, expected: Rows
) -> None:
    with open_engine(tiny_moe, split_by(stay, tiny_moe, "half")) as engine:
        engine.sequences.extend(0, [3, 4], n_logits=0)
        engine.sequences.extend(0, [5], n_logits=0)
        engine.sequences.rewind(0, 0)
        assert np.array_equal(logits(engine), expected)


def test_an_unknown_form_runs_as_before_and_says_why(
    tiny_moe: Path, expected: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise NoForm("its rows are folded")

    monkeypatch.setattr(path_module, "find_form", refuse)
    with open_engine(tiny_moe, split_by(stay, tiny_moe, "least")) as engine:
        assert np.array_equal(logits(engine), expected)
        assert "its rows are folded" in engine.opened.weights.ways.now.declined
        assert engine.counters().split_layers == 0
        cuts = engine.counters().cuts
        engine.sequences.extend(0, [1, 2])
        assert engine.counters().cuts == cuts, "the CPU computes it, as below min-batch"


@pytest.mark.parametrize("prefetch", [True, False])
def test_layers_are_split_by_what_was_measured_of_them(
    tiny_moe: Path, expected: Rows, prefetch: bool
) -> None:
    """This also holds without prefetching, when no expert has a slot yet."""
    chosen = split_by(stay, tiny_moe, "half")
    with open_engine(tiny_moe, engine_options(chosen, prefetch=prefetch)) as engine:
        (costs,) = measure_split(engine).values()
        assert engine.opened.weights.ways.now.splitter is stay
        assert engine.sequences.length(0) == 0
        arrays = costs.costs()
        assert arrays.copy_s > 0
        assert arrays.host_s[1] > 0
        layout = make_plan(read_facts(tiny_moe)).layout
        n_bytes = layout.groups[0].matrix_bytes
        assert arrays.kinds == pytest.approx([n / sum(n_bytes.values()) for n in n_bytes.values()])
        engine.opened.weights.ways.change(splitter=ByCosts(arrays))
        assert np.array_equal(logits(engine), expected)
        assert sum(pairs(engine)) > 0


class Broken(Exception):
    pass


def test_biases_are_read_by_ids_in_range_when_a_layer_is_measured(models: Path) -> None:
    """Later nodes overwrite the router's ids. Ids out of range would end the process."""
    path = write_preset("gpt-oss", models / "measured-gpt-oss.gguf", seed=4)
    with open_engine(path, split_by(stay, path, "half")) as engine:
        engine.sequences.extend(0, [1, 2, 3])
        ((_, sides),) = take_splits(engine)
        assert sides.step.ids is not None  # type: ignore[attr-defined]
        ids = sides.step.ids  # type: ignore[attr-defined]
        ctypes.memset(ids.tensor.position, 0xFF, ids.size_bytes)
        assert sides.device_s(2) > 0


def _fail_at(patch: pytest.MonkeyPatch, graphs: set[int]) -> None:
    computing(patch, lambda inner: lambda stream, graph: (
        -1 if graph in graphs else inner(stream, graph)
    ))  # fmt: skip


def _fail_on_the_cpu(patch: pytest.MonkeyPatch, engine: Engine) -> None:
    _fail_at(patch, host_graphs(engine)[0])


def _fail_to_place(patch: pytest.MonkeyPatch, engine: Engine) -> None:
    _fail_at(patch, host_graphs(engine)[1])


def _fail_on_the_device(patch: pytest.MonkeyPatch, engine: Engine) -> None:
    n_computed = 0

    def made(inner: Compute) -> Compute:
        def fail(stream: int, graph: int) -> int:
            nonlocal n_computed
            n_computed += 1
            return -1 if n_computed == 4 else inner(stream, graph)

        return fail

    computing(patch, made)


def _fail_to_copy(patch: pytest.MonkeyPatch, engine: Engine) -> None:
    def fail(self: ThreadCopier, transfer: Transfer) -> None:
        raise Broken("the link is down")

    patch.setattr(ThreadCopier, "_copy", fail)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (_fail_on_the_cpu, "computing experts of layer .* on the CPU failed with ggml status -1"),
        (_fail_to_place, "placing experts' rows"),
        (_fail_on_the_device, "status"),
        (_fail_to_copy, "the link is down"),
    ],
)
def test_a_fault_ends_the_request_and_the_next_one_has_the_right_bits(
    tiny_moe: Path,
    expected: Rows,
    fault: Callable[[pytest.MonkeyPatch, Engine], None],
    message: str,
) -> None:
    with open_engine(tiny_moe, split_by(at_random(3), tiny_moe, "half")) as engine:
        engine.sequences.extend(0, [4, 5, 6])
        engine.sequences.rewind(0, 0)
        with pytest.MonkeyPatch.context() as patch:
            fault(patch, engine)
            with pytest.raises(DeviceFailed, match=message):
                engine.sequences.extend(0, [1, 2, 3, 250, 99])
        assert engine.sequences.length(0) == 0
        assert np.array_equal(logits(engine), expected)


def test_a_decode_that_a_signal_ends_anywhere_in_split_layers_is_redone(
    tiny_moe: Path, expected: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each decode is ended one computation later than the decode before it."""
    n_computed = n_ended = 0
    ends_at = -1

    def made(inner: Compute) -> Compute:
        def end(stream: int, graph: int) -> int:
            nonlocal n_computed, n_ended
            n_computed += 1
            n_ended += n_computed == ends_at
            return int(abi.GGML_STATUS_ABORTED) if n_computed == ends_at else inner(stream, graph)

        return end

    computing(monkeypatch, made)
    with open_engine(tiny_moe, split_by(at_random(5), tiny_moe, "half")) as one:
        one.sequences.extend(0, [1, 2, 3, 250, 99])
        one.sequences.rewind(0, 0)
        n_all, n_computed = n_computed, 0
        for nth in range(1, n_all + 1):
            ends_at, n_computed = nth, 0
            one.sequences.extend(0, [1, 2, 3, 250, 99])
            one.sequences.rewind(0, 0)
        assert n_ended > n_all / 2 > 3, (
            "at least half of the computations are reached, as the CPU has no part in some layers"
        )
        ends_at = -1
        assert np.array_equal(logits(one), expected)


@pytest.mark.parametrize("slots", ["half", "least"])
def test_a_copy_for_later_that_fails_is_told_by_the_next_decode_and_never_computed_with(
    tiny_moe: Path, expected: Rows, slots: str
) -> None:
    """Decodes that do not need the copy go on. A later decode raises the copy's error."""

    def decode(engine: Engine) -> None:
        for n in range(9):
            engine.sequences.extend(0, [7 * n % engine.n_vocab])
        engine.settle()

    with open_engine(tiny_moe, split_by(stay, tiny_moe, slots)) as engine:
        for _ in range(3):
            with pytest.MonkeyPatch.context() as patch:
                _fail_to_copy(patch, engine)
                with pytest.raises(DeviceFailed, match="the link is down"):
                    decode(engine)
            engine.sequences.rewind(0, 0)
        assert engine.counters().n_promoted > 0
        assert np.array_equal(logits(engine), expected)


def test_a_trace_has_what_the_player_did_and_its_program(tiny_moe: Path, expected: Rows) -> None:
    trace = Trace()
    chosen = split_by(at_random(4), tiny_moe, "half")
    with open_engine(tiny_moe, engine_options(chosen, trace=trace)) as engine:
        assert np.array_equal(logits(engine), expected)
        counters = engine.counters()
    names = [event.name.split(" ")[0] for event in trace.events() if event.lane != COUNTER]
    reads = [event for event in trace.events() if event.name == "read router ids"]
    assert len(reads) == counters.split_layers
    assert all(0 < event.start_s < event.end_s for event in reads)
    computed = [event.name.split(" ") for event in trace.events() if event.lane == CPU]
    assert sum(int(words[2]) for words in computed if "pairs" in words) == counters.n_pairs_host
    assert names.count("nodes") > counters.split_layers
    lines = str(trace.totals["program"]).split("\n")
    assert [line.split(" ")[0] for line in lines] == [
        *("submit", "read", "record", "divide", "arrive", "arrive", "arrive", "overlap", "host")
    ]


@pytest.mark.parametrize(
    ("word", "value"), [((0, 1), 10**6), ((1, 0), 99), ((3, 1), -1), ((-1, 0), 1)]
)
def test_a_program_that_names_what_is_not_there_is_refused(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch, word: tuple[int, int], value: int
) -> None:
    compile_graph = Program._compile

    def wrong(program: Program, layers_per_wait: int) -> tuple[Any, ...]:
        words, *others = compile_graph(program, layers_per_wait)
        words[word] = value
        return words, *others

    monkeypatch.setattr(Program, "_compile", wrong)
    with (
        open_engine(tiny_moe, split_by(all_host, tiny_moe, "half")) as engine,
        pytest.raises(DeviceFailed, match=r"stopped at instruction \d+ .* bug: .* --device cpu"),
    ):
        logits(engine)


def test_a_program_in_a_wrong_order_stops_the_decode_and_the_next_one_is_right(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch, expected: Rows
) -> None:
    with open_engine(tiny_moe, split_by(all_host, tiny_moe, "half")) as engine:
        programs = list[Program]()
        begin = GraphPlayer._arm

        def wrong(player: GraphPlayer, program: Program, clocked: bool) -> None:
            begin(player, program, clocked)
            if not programs:
                program.words[[1, 3]] = program.words[[3, 1]]  # read and divide
            programs.append(program)

        monkeypatch.setattr(GraphPlayer, "_arm", wrong)
        with pytest.raises(DeviceFailed, match=r"stopped at instruction 1 .* --device cpu"):
            engine.sequences.extend(0, [3])
        programs[0].words[[1, 3]] = programs[0].words[[3, 1]]
        engine.sequences.rewind(0, 0)
        assert np.array_equal(logits(engine), expected)
