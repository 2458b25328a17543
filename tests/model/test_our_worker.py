"""`specoffload worker` computes layers from its own copy of the model's file, on loopback."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import pytest
from budgets import budget
from lossless_parts import EXACT
from numpy.typing import NDArray
from our_worker import SIM, RunningWorker, working
from relay import Relay
from remote_engine import logits, options
from worker import has_rpc

from lab.options import Streaming, engine_options
from lab.synth import write_preset
from lab.synth.block import VARIANTS, write_block
from lab.synth.eagle import write_target
from offload import mla
from offload.device import DeviceChoice, choose_device
from offload.engine import Engine, open_engine
from offload.errors import DeviceFailed, DeviceUnavailable, DoesNotFit
from offload.ggml.backend import Device
from offload.ggml.library.lib import library
from offload.ggml.tensor import Buffer
from offload.mla import MlaTiming
from offload.model_file import read_facts
from offload.remote.address import RemoteOptions
from offload.remote.hello import LayersAsked
from offload.sequences.block_draft import BlockDraft
from offload.worker.device import WorkerDevice
from offload.worker.serving import WorkerOptions, _decide, _open

pytestmark = pytest.mark.skipif(
    not has_rpc(), reason="the library is compiled without ggml's RPC: scripts/setup"
)
PROMPTS = (100, 3, 1, 200)  # tokens of each batch


@pytest.fixture(scope="module")
def worker(tiny_moe: Path) -> Iterator[RunningWorker]:
    with working(tiny_moe, "--device", SIM) as running:
        yield running


@pytest.mark.parametrize("preset", ["deepseek-v3", "qwen3-235b-a22b", "glm-4.6", "gpt-oss-120b"])
def test_layers_of_two_machines_give_the_logits_of_one(preset: str, models: Path) -> None:
    path = write_preset(preset, models / f"our-{preset}.gguf", size="tiny", seed=4)
    with open_engine(path, options("sim")) as engine:
        expected = logits(engine)
    with working(path, "--device", SIM, "--n-cpu-moe", "99") as running:
        for order in ("auto", "last"):
            remote = RemoteOptions((running.address,), order=order)
            with open_engine(path, options("sim", remote)) as engine:
                assert engine.opened.remote is not None
                (layers,) = engine.opened.remote.layers
                assert 0 < len(layers) < engine.facts.n_layers
                np.testing.assert_array_equal(logits(engine), expected)
                assert engine.counters().streamed_bytes > 0  # local experts stream
            assert running.status()["layers"] == [layers.first, min(layers.end, 4)]
            counters = running.counters()  # missing experts are copied, or computed by its CPU
            assert counters["streamed_experts"] + counters["n_pairs_host"] > 0
            assert engine.facts.n_layers == 4


@pytest.mark.parametrize("hybrid", ["off", "auto"])
@pytest.mark.parametrize("preset", ["deepseek-v3", "qwen3-235b-a22b", "gpt-oss-120b"])
def test_prompts_that_a_worker_computes_in_passes_give_the_logits_of_one_machine(
    preset: str, hybrid: str, models: Path
) -> None:
    path = write_preset(preset, models / f"passing-{preset}.gguf", size="tiny", seed=4)
    prompts = engine_options(options("cpu"), n_ubatch=256, most_ubatch=256, n_outputs=256)
    with open_engine(path, prompts) as engine:
        expected = logits(engine, PROMPTS)
    least = budget(path, Streaming(n_gpu_layers=99), "least")
    flags = (
        "--device",
        f"sim:vram={-(-least // 1024)}KiB",
        "--n-cpu-moe",
        "99",
        "--min-batch",
        "1",
    )
    with working(path, *flags, "--hybrid", hybrid) as running:
        remote = RemoteOptions((running.address,), order="only")
        with open_engine(path, engine_options(prompts, remote=remote)) as engine:
            np.testing.assert_array_equal(logits(engine, PROMPTS), expected)
        counters = running.counters()
        assert counters["passes"] > 0, running.text


def test_a_worker_computes_sequences_with_cells_of_their_own(models: Path) -> None:
    path = write_preset("deepseek-v3", models / "own-cells.gguf", size="tiny", seed=4)
    three = engine_options(options("sim"), n_ctx=1536, n_sequences=3, kv_unified=False)

    def rows(engine: Engine) -> NDArray[np.float32]:
        found = []
        for sizes in ((40, 7, 100), (1, 1, 1), (3, 1, 2)):
            parts = [(s, [(13 * i + 5 * n) % 90 for i in range(n)], 1) for s, n in enumerate(sizes)]
            found += engine.sequences.extend_batch(parts)
        return np.concatenate(found)

    with open_engine(path, three) as engine:
        expected = rows(engine)
    with working(path, "--device", SIM, "--n-cpu-moe", "99") as running:
        remote = RemoteOptions((running.address,), order="last")
        asked = engine_options(three, remote=remote, tensor_split=(1.0, 1.0))
        with open_engine(path, asked) as engine:
            assert engine.opened.remote is not None
            np.testing.assert_array_equal(rows(engine), expected)


def test_one_round_trip_and_two_hand_overs_of_activations(models: Path) -> None:
    width, path = 6144, models / "our-wide.gguf"
    write_preset("qwen3moe", path, size="tiny", seed=5, n_embd=width, n_layer=3)
    with working(path, "--device", "sim:vram=24MiB") as running, Relay(running.address) as relay:
        remote = RemoteOptions((relay.address,))
        with open_engine(path, options("sim", remote)) as engine:
            for n in (1, 64, 1, 64, 1, 1):
                before = relay.n_bytes, relay.n_turns
                engine.sequences.extend(0, [3] * n, n_logits=1)
                n_bytes, n_turns = relay.n_bytes - before[0], relay.n_turns - before[1]
            assert n_turns == 1
            assert 2 * 4 * width <= n_bytes <= 1.2 * 2 * 4 * width
            assert relay.n_bytes < engine.facts.size_bytes / 4


@pytest.mark.parametrize("order", ["auto", "only"])
def test_a_client_without_a_gpu_leaves_all_layers_to_the_worker(
    order: Literal["auto", "only"], tiny_moe: Path, worker: RunningWorker
) -> None:
    with open_engine(tiny_moe, options("cpu")) as engine:
        expected = logits(engine)
    with open_engine(
        tiny_moe, options("cpu", RemoteOptions((worker.address,), order=order))
    ) as engine:
        assert worker.counters()["graphs"] > 0, "a warm-up takes the worker's memory at the start"
        np.testing.assert_array_equal(logits(engine), expected)
    assert "reading weights: 100 %" in worker.text


def test_a_worker_with_another_file_is_refused(tiny_dense: Path, worker: RunningWorker) -> None:
    with pytest.raises(DeviceUnavailable, match=r"has another file: its tiny_moe.gguf has hash"):
        open_engine(tiny_dense, options("cpu", RemoteOptions((worker.address,))))


def test_a_worker_computes_on_the_processors_of_its_mask(tiny_moe: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    with open_engine(tiny_moe, options("cpu")) as engine:
        expected = logits(engine)
    with working(tiny_moe, "--device", SIM, "--cpu-mask", hex(1 << cpu), "-t", "1") as running:
        remote = RemoteOptions((running.address,), order="only")
        with open_engine(tiny_moe, options("cpu", remote)) as engine:
            np.testing.assert_array_equal(logits(engine), expected)
            serving = psutil.Process(running.process.pid).children(recursive=True)
            found = [
                psutil.Process(thread.id).cpu_affinity() for p in serving for thread in p.threads()
            ]
    assert [cpu] in found
    assert running.process.pid not in [p.pid for p in serving]


def test_a_draft_model_on_a_worker_may_be_another_file(tiny_dense: Path, tiny_moe: Path) -> None:
    draft = engine_options(options("cpu"), wrapped=False)
    with open_engine(tiny_dense, draft) as engine:
        expected = logits(engine)
    with working(tiny_moe, "--device", "cpu") as running:
        remote = RemoteOptions((running.address,), order="only")
        with open_engine(tiny_dense, engine_options(draft, remote=remote)) as engine:
            np.testing.assert_allclose(logits(engine), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_worker_computes_the_passes_of_block_drafts(variant: str, models: Path) -> None:
    """It has the last layers, so the draft is there, too. Its blocks are those of one machine."""
    target = write_target(models, "qwen3moe")
    draft = write_block(models, target, variant, mapped=variant == "dspark-conf")
    several = engine_options(options("cpu"), row_file=draft, n_sequences=3, **EXACT)
    with open_engine(target, several) as engine:
        expected = blocks_of(engine)
    with working(target, "--device", "sim:vram=16MiB") as running:
        remote = RemoteOptions((running.address,), order="only")
        with open_engine(target, engine_options(several, remote=remote)) as engine:
            assert engine.opened.no_rows_reason == ""
            for got, wanted in zip(blocks_of(engine), expected, strict=True):
                np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4)
    assert "refused" not in running.text


def blocks_of(engine: Engine) -> list[NDArray[np.float32]]:
    """The logits of blocks after texts of three sequences, and then of longer texts."""
    layers, rows = engine.opened.row_draft, []
    assert isinstance(layers, BlockDraft)
    texts = [[(7 * i + 3 * s) % 500 for i in range(9 + 4 * s)] for s in range(3)]
    for n_more in (0, 1, 5):
        for s, text in enumerate(texts):
            new = text if not n_more else [(11 * i + s) % 500 for i in range(n_more)]
            text += new if n_more else []
            engine.sequences.extend(s, new, 1)
        parts = [(s, layers.tail(s, [*text, 7 + s])) for s, text in enumerate(texts)]
        for block in layers.draft_blocks(parts, 5):
            first, _ = block.place(0, None)
            second, _ = block.place(1, int(first.argmax()))
            rows += [np.nan_to_num(row, neginf=-1e9) for row in (first, second)]
    return rows


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_worker_takes_its_slots_before_the_first_prompt(
    is_refused: bool, tiny_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate, taken = Device.allocate, []
    failed: list[BaseException] = []

    def counted(device: Device, size_bytes: int, what: str) -> Buffer:
        taken.append(what)
        if "slots" in what and is_refused:
            raise DoesNotFit(f"{what}: refused")
        return allocate(device, size_bytes, what)

    asked = LayersAsked(0, read_facts(tiny_moe).n_layers)
    worker = WorkerOptions(tiny_moe, SIM)
    start = _decide(worker, choose_device(SIM), asked)
    device, _ = _open(worker, start, lambda *_: None, failed.append, failed.append)
    monkeypatch.setattr(Device, "allocate", counted)
    with pytest.raises(DeviceFailed) if is_refused else nullcontext():
        library().ggml_backend_dev_init(device.address, None)
    assert any("slots" in what for what in taken)
    assert [isinstance(e, DoesNotFit) for e in failed] == [True] * is_refused


def open_worker(path: Path, choice: DeviceChoice) -> tuple[WorkerDevice, list[str]]:
    """Return a worker's offer to a client that wants all layers of `path`, and start-up lines."""
    asked = LayersAsked(0, read_facts(path).n_layers)
    failed: list[BaseException] = []
    options = WorkerOptions(path, SIM)
    return _open(options, _decide(options, choice, asked), lambda *_: None, failed.append,
                 failed.append)  # fmt: skip


def test_the_crossover_of_mla_that_a_worker_measures_reaches_its_device(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_preset("deepseek-v3", models / "our-mla.gguf", size="tiny", seed=4)
    times = (MlaTiming(1, 2.0, 1.0), MlaTiming(2, 2.0, 1.0), MlaTiming(4, 1.0, 2.0))
    asked: list[bool] = []

    def measured(*_: object, token_major: bool) -> tuple[MlaTiming, ...]:
        asked.append(token_major)
        return times

    choice = choose_device(SIM)
    monkeypatch.setattr(mla, "measure_crossover", measured)
    monkeypatch.setattr(Device, "kind", "gpu")
    device, _ = open_worker(path, choice)
    assert asked == [True]
    assert device.mla.crossover == mla.choose_crossover(times) == 2


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_worker_on_a_gpu_says_that_row_numbers_are_not_checked(
    on_gpu: bool, tiny_moe: Path
) -> None:
    _, notes = open_worker(tiny_moe, replace(choose_device(SIM), on_gpu=on_gpu))
    assert any("row numbers" in note and "--allow" in note for note in notes) == on_gpu


def test_a_share_that_the_worker_cannot_hold_is_one_sentence(tiny_moe: Path) -> None:
    with working(tiny_moe, "--device", "sim:vram=64KiB") as running:
        remote = RemoteOptions((running.address,), order="only")
        with pytest.raises(DeviceUnavailable, match="of GPU memory are too few: at least"):
            open_engine(tiny_moe, options("cpu", remote))
