"""Split layers without a wait of the host give the bits of split layers with it.

On other devices than CUDA's, both ways are the same.
"""

from __future__ import annotations

import contextlib
import ctypes as C
import itertools
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from on_gpu import Logits, assert_same, options, slots_for
from own_layer_steps import steps_of

from lab.options import Streaming
from lab.synth import write_preset
from lab.synth.shape import find_preset, resolve
from lab.synth.write import plan_shape, write
from offload.backends import CUDA
from offload.device import DeviceChoice
from offload.engine import Engine, EngineOptions, open_engine
from offload.errors import DeviceFailed
from offload.ggml import cuda_driver
from offload.ggml.backend import Device
from offload.measuring import measure_split
from offload.schedule.splitter import ByCosts, all_on_device, stay
from offload.stream import bell_rows, doorbell, play
from offload.stream.bell_use import BELLS
from offload.stream.program import Program
from offload.times.min_batch import NEVER, MinBatch

SHAPE = {"n_embd": 256, "n_ff_exp": 256, "n_expert": 64}
ROUNDS = 7  # the first ones are careful, and capture graphs


def opened(gpu: DeviceChoice, streaming: Streaming, **changes: object) -> EngineOptions:
    return options(gpu, streaming, **{
        "n_ctx": 2048, "n_outputs": 256, "min_batch": MinBatch(NEVER, NEVER),
        **changes,
    })  # fmt: skip


def decoded(
    engine: Engine, sizes: Sequence[int], n_rounds: int = ROUNDS
) -> tuple[Logits, dict[int, list[int]]]:
    """Logits of changing tokens, and the layers of each decode that ran without a wait, by size."""
    rows, rung = [], dict[int, list[int]]()
    for turn in range(n_rounds):
        for n in sizes:
            before = engine.counters()
            tokens = [(13 * i * i + 7 * turn + n) % engine.n_vocab for i in range(n)]
            rows.append(engine.sequences.extend(0, tokens))
            after = engine.counters()
            rung.setdefault(n, []).append(after.layers_rung - before.layers_rung)
            waits = after.router_reads - before.router_reads
            assert rung[n][-1] in (0, after.split_layers - before.split_layers)
            assert not rung[n][-1] or not waits
            n_cpu, n_hit = (
                getattr(after, name) - getattr(before, name)
                for name in ("n_pairs_host", "n_pairs_hit")
            )
            crossed = {n_cpu, n_cpu + n_hit} if rung[n][-1] else {0}  # or all rows
            assert after.rows_by_kernels - before.rows_by_kernels in crossed
    return np.concatenate(rows), rung


def both(
    gpu: DeviceChoice, path: Path, sizes: Sequence[int], **changes: object
) -> dict[int, list[int]]:
    """Check that both ways have the same bits. Return the layers of the way without waits."""
    found = []
    for rings in (False, True):
        streaming = slots_for(path, "half", hybrid=True, splitter=stay, doorbell=rings)
        with open_engine(path, opened(gpu, streaming, **changes)) as engine:
            logits, rung = decoded(engine, sizes)
            assert engine.counters().n_pairs_host > 0
            found.append(logits)
        assert rings or not any(sum(n) for n in rung.values())
    assert_same(gpu, found[1], found[0])
    return rung


PRESETS = ("deepseek-v3", "gpt-oss-20b", "glm4moe", "qwen35moe", "llama4", "minimax-m2")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_token_has_the_bits_of_a_decode_that_waits(
    async_gpu: DeviceChoice, models: Path, preset: str
) -> None:
    """They have biases, leading dense layers, shared experts, recurrent states."""
    path = write_preset(preset, models / f"doorbell-{preset}.gguf", size="tiny", seed=1)
    rung = both(async_gpu, path, (1,), flash_attn="auto", mla=True)
    if async_gpu.device.backend is CUDA:
        assert max(rung[1]) > 0, "llama4's few experts all get slots, and its graph is then whole"


@pytest.mark.parametrize("quant", ["q4_K", "mxfp4", "iq1_m", "bf16"])
def test_several_tokens_have_the_bits_of_a_decode_that_waits(
    async_gpu: DeviceChoice, models: Path, quant: str
) -> None:
    """iq1_m and bf16 have products in which the backend itself waits, so their layers wait, too."""
    path = models / f"doorbell-{quant}.gguf"
    write_preset("qwen3-30b-a3b", path, quant=f"q8_0,experts={quant}", seed=1, **SHAPE)
    sizes = (1, 2, 5, 9, 40)
    rung = both(async_gpu, path, sizes, n_ubatch=64)
    if async_gpu.device.backend is CUDA:
        expected = {n: not doorbell.waits_inside({quant}, n) for n in sizes}
        assert {n: min(of_size) > 0 for n, of_size in rung.items()} == expected
        assert expected[5] == (quant in {"q4_K", "mxfp4"})


@pytest.mark.parametrize("sizes", [(1,), (2, 5, 40)])
def test_all_rows_have_the_same_bits_as_the_cpus_rows_alone(
    async_gpu: DeviceChoice, many: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    """If the CPU's rows are too far from the output, a kernel reads all rows of their memory."""
    monkeypatch.setattr(bell_rows, "span_of", lambda *_: None)
    rung = both(async_gpu, many, sizes, n_ubatch=64)
    if async_gpu.device.backend is CUDA:
        assert all(min(of_size) > 0 for of_size in rung.values())


def test_sequences_and_rewinds_have_the_bits_of_decodes_that_wait(
    async_gpu: DeviceChoice, moe: Path
) -> None:
    found = []
    for rings in (False, True):
        streaming = slots_for(moe, "half", hybrid=True, splitter=stay, doorbell=rings)
        with open_engine(moe, opened(async_gpu, streaming, n_sequences=3)) as engine:
            rows = []
            for turn in range(8):
                batch = [(s, [(7 * turn + s) % engine.n_vocab, 3 + s]) for s in range(3)]
                rows += [engine.sequences.extend(s, tokens) for s, tokens in batch]
                if turn % 3 == 2:
                    engine.sequences.rewind(1, 2)
            found.append(np.concatenate(rows))
    assert_same(async_gpu, found[1], found[0])


def test_64_streams_have_the_bits_of_decodes_that_wait(async_gpu: DeviceChoice, many: Path) -> None:
    """Batches of changing streams and sizes. One of all 64 waits, and smaller ones ring."""
    found, rung = [], 0
    for rings in (False, True):
        rng = np.random.default_rng(46)
        streaming = slots_for(many, "half", hybrid=True, splitter=stay, doorbell=rings)
        changes = {"n_sequences": 64, "n_ctx": 64 * 64, "n_ubatch": 64, "flash_attn": "auto"}
        with open_engine(many, opened(async_gpu, streaming, **changes)) as engine:
            rows = []
            for _ in range(6):
                order = rng.permutation(64)
                ends = np.sort(rng.choice(np.arange(1, 64), 3, replace=False))
                for streams in np.split(order, ends):
                    n_tokens = 1 + int(len(streams) < 20)
                    parts = [
                        (int(s), rng.integers(4, engine.n_vocab, n_tokens).tolist(), n_tokens)
                        for s in streams
                    ]
                    rows += engine.sequences.extend_batch(parts)
                for s in rng.choice(64, 8, replace=False).tolist():
                    engine.sequences.rewind(s, engine.sequences.length(s) - 1)
            whole = [(s, [7 + s], 1) for s in range(64)]
            rows += engine.sequences.extend_batch(whole)
            rung = engine.counters().layers_rung
            assert rings or not rung
        found.append(np.concatenate(rows))
    assert_same(async_gpu, found[1], found[0])
    if async_gpu.device.backend is CUDA:
        assert rung > 0


def with_own_layer(name: str, path: Path) -> Path:
    """Write a model with a layer for multi-token prediction, of types that need no wait."""
    preset = find_preset(name)
    metadata: dict[str, object] = {"nextn_predict_layers": 1}
    if "expert_group_count" in preset.metadata:
        metadata |= {"expert_group_count": 0, "expert_group_used_count": 0}
    n_layer = int(str(preset.tiny["block_count"]))
    n_layer += "nextn_predict_layers" not in preset.metadata
    shape = resolve(name, "tiny", quant="q8_0", n_layer=n_layer, metadata=metadata, n_expert=64)
    return write(plan_shape(shape, "bytes"), path, 5)


@pytest.mark.parametrize("preset", ["glm-4.6", "qwen3.5-35b-a3b"])
@pytest.mark.parametrize("n_sequences", [1, 3])
def test_drafts_by_own_layers_and_their_texts_are_those_of_decodes_that_wait(
    async_gpu: DeviceChoice, models: Path, preset: str, n_sequences: int
) -> None:
    """Drafts are accepted at random, so rows and recurrent states of every length are rewound."""
    path = models / f"doorbell-mtp-{preset}.gguf"
    if not path.exists():
        with_own_layer(preset, path)
    found, rung = [], 0
    for rings in (False, True):
        streaming = slots_for(path, "half", hybrid=True, splitter=stay, doorbell=rings)
        changes = {"mtp": True, "n_sequences": n_sequences, "n_ubatch": 64, "n_rs_seq": 4}
        with open_engine(path, opened(async_gpu, streaming, **changes)) as engine:
            steps = [*steps_of(engine)]
            rung = engine.counters().layers_rung
            assert rings or not rung
        found.append(steps)
    assert found[1] == found[0]
    assert len(found[0]) > 5 * n_sequences
    if async_gpu.device.backend is CUDA:
        assert rung > 0


@pytest.fixture(scope="module")
def many(models: Path) -> Path:
    """A model with more experts than slots, lent ones included."""
    return write_preset(
        "qwen3-30b-a3b", models / "doorbell-many.gguf", quant="q4_K", seed=1, **SHAPE
    )


@pytest.fixture
def cuda(async_gpu: DeviceChoice) -> DeviceChoice:
    if async_gpu.device.backend is not CUDA:
        pytest.skip(f"{async_gpu.name} has no words that its streams wait for")
    return async_gpu


def test_measured_costs_divide_the_layers_that_pay(
    cuda: DeviceChoice, many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers wait again if streaming a missing expert saves more than the wait costs."""
    streaming = slots_for(many, "half", hybrid=True, splitter=stay)
    with open_engine(many, opened(cuda, streaming)) as engine:
        assert engine.opened.weights.hybrid is not None
        (costs,) = measure_split(engine).values()
        engine.opened.weights.ways.change(splitter=ByCosts(costs.costs()))
        monkeypatch.setattr(doorbell.RingChoice, "pays", True)
        _, rung = decoded(engine, (1,), 3)
        assert min(rung[1]) > 0
        monkeypatch.setattr(doorbell.RingChoice, "pays", False)
        _, rung = decoded(engine, (1,), 3)
        assert max(rung[1]) == 0
        with engine.opened.weights.ways.trying(
            engine.opened.weights.ways.now.splitting_by(all_on_device)
        ):
            monkeypatch.setattr(doorbell.RingChoice, "pays", True)
            _, rung = decoded(engine, (1,), 3)
        assert max(rung[1]) == 0, "missing experts are copied in the decode"


def test_the_first_decodes_of_a_graph_are_careful(
    cuda: DeviceChoice, moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend captures a graph in them. It may then wait for all streams."""
    monkeypatch.setattr(doorbell, "_UNUSED_S", math.inf)  # no pause counts on a busy machine
    told: dict[int, list[int]] = {}
    ring = Program.ring

    def rang(self: Program, *of_decode: Any) -> bool:
        rings = ring(self, *of_decode)
        if rings:
            told.setdefault(id(self), []).append(self.player.is_careful)
        return rings

    monkeypatch.setattr(Program, "ring", rang)
    streaming = slots_for(moe, "half", hybrid=True, splitter=stay, doorbell=True)
    with open_engine(moe, opened(cuda, streaming)) as engine:
        decoded(engine, (1,))
    for of_graph in told.values():
        assert of_graph == ([1, 1, 1, 1] + [0] * len(of_graph))[: len(of_graph)]
    assert max(map(len, told.values())) > 4


class Ended(BaseException):
    """In place of the end of the process."""


def end(sentence: str) -> NoReturn:
    raise Ended(sentence)


def faulty(monkeypatch: pytest.MonkeyPatch, name: str, replaced: Callable[..., int | None]) -> None:
    """Let the driver's calls of a function make `replaced`, which may call the real one."""
    real = cuda_driver.Driver.call

    def call(self: cuda_driver.Driver, its: str, *arguments: Any) -> None:
        given = replaced(*arguments) if its == name else arguments
        if given is not None:
            real(self, its, *given)

    monkeypatch.setattr(cuda_driver.Driver, "call", call)
    monkeypatch.setattr(cuda_driver, "_TRIAL_S", 0.2)


def refuse(*_: object) -> None:
    raise doorbell.NoDriver("no words")


@pytest.mark.parametrize(
    ("name", "replaced", "why"),
    [
        ("cuStreamWaitValue32_v2", refuse, "no words"),
        ("cuStreamWriteValue32_v2", lambda *_: None, "the host does not see a word"),
        ("cuStreamWaitValue32_v2", lambda *_: None, "the device does not wait"),
    ],
)
def test_a_trial_that_fails_keeps_the_wait_and_says_why(
    cuda: DeviceChoice, many: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str,
    replaced: Callable[..., Any],
) -> None:  # fmt: skip
    if why == "the device does not wait" and os.environ.get("STANDIN_JITTER"):
        pytest.skip("a device with delays may be late where it should wait")
    faulty(monkeypatch, name, replaced)
    streaming = slots_for(many, "half", hybrid=True, splitter=stay)
    with open_engine(many, opened(cuda, streaming)) as engine:
        _, rung = decoded(engine, (1,), 3)
        said = [
            note for note in engine.opened.notes if "waits for the GPU in each split layer" in note
        ]
    assert max(rung[1]) == 0
    assert len(said) == 1
    assert said[0].startswith(f"{cuda.name}: the host waits")
    assert why in said[0]
    assert why in BELLS.why_not
    monkeypatch.undo()
    told = []
    monkeypatch.setattr(BELLS, "why_not", "an earlier process had trouble")
    monkeypatch.setattr(BELLS, "listeners", [told.append])
    with open_engine(many, opened(cuda, streaming)) as engine:
        _, rung = decoded(engine, (1,), 3)
        assert any(BELLS.why_not in note for note in engine.opened.notes)
    assert max(rung[1]) == 0
    assert not told


def test_a_device_that_hangs_in_the_trial_ends_the_process_with_a_sentence(
    cuda: DeviceChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees nothing that the host writes. The test lets it go on."""
    other = cuda.device.pinned_memory(4)
    assert other is not None
    word = C.c_uint32.from_address(other.base)
    word.value = 0
    faulty(
        monkeypatch, "cuStreamWaitValue32_v2",
        lambda stream, _, *rest: (stream, C.addressof(word), *rest),
    )  # fmt: skip
    monkeypatch.setattr(doorbell.log, "end", end)
    began_s = time.monotonic()
    with pytest.raises(Ended, match=r"waits for the host for ever.*SPECOFFLOAD_WITHOUT=doorbell"):
        doorbell.try_bell(cuda.device)
    assert time.monotonic() - began_s < 5
    assert "for ever" in BELLS.why_not
    word.value = 1
    time.sleep(0.1)
    other.close()


def test_memory_that_is_not_pinned_keeps_the_wait(
    cuda: DeviceChoice, many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy from pageable memory would take its bytes before the CPU has computed them."""
    found = []
    pinned = Device.pinned_memory
    for most_bytes in (1 << 30, 1 << 19, 4096, 0):
        monkeypatch.setattr(BELLS, "why_not", "")
        monkeypatch.setattr(
            Device, "pinned_memory",
            lambda device, n, most=most_bytes: pinned(device, n) if n <= most else None,
        )  # fmt: skip
        streaming = slots_for(many, "half", hybrid=True, splitter=stay)
        with open_engine(many, opened(cuda, streaming)) as engine:
            got, rung = decoded(engine, (1,))
        assert_same(cuda, got, found[0] if found else got)
        found.append(got)
        assert (max(rung[1]) > 0) == (most_bytes == 1 << 30)


_ARGUMENTS = {
    "wait": (C.c_void_p, C.c_uint64, C.c_uint32, C.c_uint),
    "write": (C.c_void_p, C.c_uint64, C.c_uint32, C.c_uint),
    "wait_for": (C.c_void_p, C.c_void_p, C.c_uint),
    "record": (C.c_void_p, C.c_void_p),
}


@contextlib.contextmanager
def refusing(bell: doorbell.Doorbell, name: str, nth: int) -> Iterator[None]:
    """Let the `nth` call of a driver's function fail with the error 700."""
    prototype = C.CFUNCTYPE(C.c_int, *_ARGUMENTS[name])
    own = getattr(bell.struct, name)
    real, calls = prototype(own), itertools.count(1)
    thunk = prototype(lambda *given: 700 if next(calls) == nth else real(*given))
    setattr(bell.struct, name, C.cast(thunk, C.c_void_p).value)
    yield
    setattr(bell.struct, name, own)


@pytest.mark.parametrize("name", _ARGUMENTS)
@pytest.mark.parametrize("nth", [1, 3])
def test_a_refused_call_ends_the_decode_and_the_next_one_is_served(
    cuda: DeviceChoice, many: Path, name: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[doorbell.Doorbell] = []

    def keep(device: Device) -> doorbell.Doorbell:
        made.append(doorbell.Doorbell(device))
        return made[-1]

    monkeypatch.setattr(play, "Doorbell", keep)
    with open_engine(
        many, opened(cuda, slots_for(many, "half", hybrid=True, splitter=stay))
    ) as engine:
        expected, _ = decoded(engine, (1,))
        engine.sequences.rewind(0, 0)
        with (
            refusing(made[0], name, nth),
            pytest.raises(DeviceFailed, match=r"refused a call in layer \d+ \(error 700\)"),
        ):
            decoded(engine, (1,))
        engine.sequences.rewind(0, 0)
        got, rung = decoded(engine, (1,))
        assert min(rung[1]) > 0
    assert_same(cuda, got, expected)


def decode_until_ctrl_c(engine: Engine, delay_s: float) -> None:
    threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT)).start()
    until_s = time.monotonic() + 20
    while time.monotonic() < until_s:
        decoded(engine, (1,), 3)
        engine.sequences.rewind(0, 0)


@pytest.mark.parametrize("delay_s", [0.0, 0.002, 0.01, 0.05])
def test_ctrl_c_ends_the_decode_and_the_next_one_is_served(
    cuda: DeviceChoice, many: Path, delay_s: float
) -> None:
    with open_engine(
        many, opened(cuda, slots_for(many, "half", hybrid=True, splitter=stay))
    ) as engine:
        expected, _ = decoded(engine, (1,))
        engine.sequences.rewind(0, 0)
        with pytest.raises(KeyboardInterrupt):
            decode_until_ctrl_c(engine, delay_s)
        engine.sequences.rewind(0, 0)
        got, rung = decoded(engine, (1,))
        assert min(rung[1]) > 0
    assert_same(cuda, got, expected)
