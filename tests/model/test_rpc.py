"""Engines use devices of other machines, here by ggml's RPC on loopback."""

from __future__ import annotations

import json
import logging
import re
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from plans import planned_for
from relay import Relay
from remote_engine import logits, options
from resolved import config_of, spec_of
from typer.testing import CliRunner
from worker import Worker, free_port, has_rpc, working

from lab.options import engine_options
from lab.synth import write_preset
from offload import probe as probing
from offload.device import choose_device
from offload.engine import Engine, open_engine
from offload.errors import DeviceUnavailable, DoesNotFit, LibraryMismatch, WorkerUnavailable
from offload.ggml import rpc
from offload.ggml.backend import Device
from offload.ggml.library.lib import library
from offload.remote.address import Address, RemoteOptions
from offload.remote.probe import greet
from offload.remote.speed import DeviceSpeed, measured_speed
from specoffload.cli import app
from specoffload.config.command_line import read_command_line
from specoffload.config.environment import read_environment, read_host
from specoffload.config.options import PlanOptions
from specoffload.config.resolution import demo_file, resolve
from specoffload.generation.generation import GenerateOptions
from specoffload.opening.start import open_target, session_start
from specoffload.session.session import Session

needs_rpc = pytest.mark.skipif(
    not has_rpc(), reason="the library is compiled without ggml's RPC: scripts/setup"
)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with working() as worker:
        yield worker


def test_a_library_without_rpc_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library(), "ggml_backend_reg_by_name", lambda name: None)
    assert not has_rpc()
    one_worker = RemoteOptions((Address("127.0.0.1", 1),))
    with pytest.raises(LibraryMismatch, match="without ggml's RPC: run scripts/setup again, or"):
        open_engine(demo_file("target.gguf"), options("cpu", one_worker))


@needs_rpc
@pytest.mark.parametrize("preset", ["deepseek-v3", "qwen3-235b-a22b", "glm-4.6", "gpt-oss-120b"])
def test_remote_layers_give_the_logits_of_one_process(
    preset: str, models: Path, worker: Worker
) -> None:
    path = write_preset(preset, models / f"rpc-{preset}.gguf", size="tiny", seed=4)
    with open_engine(path, options("sim")) as engine:
        expected = logits(engine)
    for order in ("auto", "last"):
        remote = RemoteOptions((worker.address,), order=order)
        with open_engine(path, options("sim", remote)) as engine:
            assert engine.opened.remote is not None
            assert 0 < sum(map(len, engine.opened.remote.layers)) < engine.facts.n_layers
            np.testing.assert_array_equal(logits(engine), expected)
            assert engine.counters().streamed_bytes > 0  # local experts stream


@needs_rpc
@pytest.mark.parametrize("order", ["auto", "only"])
def test_f32_layers_of_a_cpu_give_the_logits_of_one_process(
    order: str, exact: Path, worker: Worker
) -> None:
    with open_engine(exact, options("cpu")) as engine:
        expected = logits(engine)
    remote = RemoteOptions((worker.address,), order=order)  # type: ignore[arg-type]
    for n_remote in (None, 1):
        o = options("cpu", remote)
        o = engine_options(o, n_gpu_layers=n_remote)
        with open_engine(exact, o) as engine:
            assert engine.opened.remote is not None
            n_there = (n_remote or engine.facts.n_layers) + (order == "only")
            assert sum(map(len, engine.opened.remote.layers)) == n_there
            np.testing.assert_array_equal(logits(engine), expected)


LAYERS = [((1, 7), "auto"), ((3, 1), "auto"), ((6, 3), "last")]


@needs_rpc
@pytest.mark.parametrize(("shares", "order"), LAYERS)
def test_each_layer_is_where_the_plan_says(
    shares: tuple[float, ...],
    order: Literal["auto", "last"],
    models: Path,
    worker: Worker,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = write_preset("mistral-large", models / "rpc-layers.gguf", seed=4, n_layer=8)
    remote = RemoteOptions((worker.address,), order=order)
    with (
        caplog.at_level(logging.DEBUG, "offload.llama"),
        open_engine(path, engine_options(options("sim", remote), tensor_split=shares)) as engine,
    ):
        found = re.findall(r"layer +(\d+) assigned to device (\S+),", caplog.text)
        assert engine.opened.remote is not None
        theirs = engine.opened.remote.layers[0]
        assert {int(i): name.startswith("RPC") for i, name in found} == {
            i: i in theirs for i in range(engine.facts.n_layers + 1)
        }


@needs_rpc
def test_two_workers_and_local_layers_between(models: Path, worker: Worker) -> None:
    path = write_preset("deepseek-v3", models / "rpc-two.gguf", size="tiny", seed=4)
    with open_engine(path, options("sim")) as engine:
        expected = logits(engine)
    with working() as second:
        remote = RemoteOptions((worker.address, second.address))
        with open_engine(
            path, engine_options(options("sim", remote), tensor_split=(1.0, 1.0, 2.0))
        ) as engine:
            assert engine.opened.remote is not None
            assert [len(its) for its in engine.opened.remote.layers] == [2, 1]
            np.testing.assert_array_equal(logits(engine), expected)
        o = engine_options(options("sim", remote), tensor_split=(1.0, 0.0, 2.0))
        with open_engine(path, o) as engine:
            assert "; no layers are left for RPC1" in " ".join(engine.opened.notes)


@needs_rpc
def test_two_local_devices_and_a_worker(models: Path, worker: Worker) -> None:
    path = write_preset("deepseek-v3", models / "rpc-three.gguf", seed=4, n_layer=6)
    with open_engine(path, options("sim")) as engine:
        expected = logits(engine)
    for order in ("auto", "last"):
        remote = RemoteOptions((worker.address,), order=order)
        o = engine_options(options("sim,sim", remote), tensor_split=(2.0, 3.0, 2.0))
        with open_engine(path, o) as engine:
            assert len(engine.opened.weights.parts) == 2
            np.testing.assert_array_equal(logits(engine), expected)


@needs_rpc
@pytest.mark.parametrize("order", ["auto", "last"])
def test_layers_are_divided_by_measured_time(
    order: Literal["auto", "last"], models: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All devices are timed by the same products. The slower one gets fewer layers."""
    path = write_preset("qwen3moe", models / "rpc-time.gguf", size="tiny", seed=4, n_layer=8)
    with open_engine(path, options("sim")) as engine:
        expected = logits(engine)
    remote = RemoteOptions((worker.address,), order=order)
    asked = engine_options(options("sim", remote), tensor_split=(), n_ctx=4096)
    n_remote = []
    for here, there in ((1e9, 4e9), (4e9, 1e9)):

        def speed(device: Device, here: float = here, there: float = there) -> DeviceSpeed:
            rate = there if device.name.startswith("RPC") else here
            return DeviceSpeed(rate, 1e3 * rate, 1e-4, 1e9)

        with monkeypatch.context() as patched:
            patched.setattr(probing, "measured_speed", speed)
            with open_engine(path, asked) as engine:
                assert engine.opened.remote is not None
                n_remote.append(sum(map(len, engine.opened.remote.layers)))
                assert any(
                    "divided by expected time (RPC0: " in note for note in engine.opened.notes
                )
                np.testing.assert_array_equal(logits(engine), expected)
    assert 0 < n_remote[1] < n_remote[0]


@needs_rpc
def test_the_speed_of_a_remote_device_is_measured(worker: Worker) -> None:
    (device,) = rpc.add_worker(str(worker.address))
    there, here = measured_speed(device), measured_speed(choose_device("cpu").device)
    for speed in (there, here):
        assert 1e8 < speed.bytes_per_s < 1e12
        assert 1e9 < speed.flops < 1e14
        assert 1e-6 < speed.round_trip_s < 1.0
        assert 1e6 < speed.sent_bytes_per_s < 1e12


@needs_rpc
def test_the_plan_command_counts_remote_devices(models: Path, worker: Worker) -> None:
    path = write_preset("qwen3moe", models / "rpc-plan.gguf", size="tiny", seed=4, n_layer=8)

    def planned(*words: str) -> Any:
        result = CliRunner().invoke(app, ["plan", str(path), "--json", *words])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    there = ("--rpc", str(worker.address))
    by_time = planned("--vram", "2GiB", *there)
    remote, local = by_time["devices"]
    assert [remote["name"], local["name"]] == ["RPC0", "GPU"]
    assert remote["layers"][0] == 0
    assert remote["layers"][1] + 1 == local["layers"][0]
    assert local["layers"][1] == 7
    assert "divided by expected time (RPC0: " in " ".join(by_time["reasons"])
    by_shares = planned("--vram", "2GiB", "-ts", "1,2", *there)
    assert [device["layers"] for device in by_shares["devices"]] == [[0, 2], [3, 7]]
    (only,) = planned("--device", "RPC0", *there)["devices"]
    assert only["layers"] == [0, 7]
    nobody = f"127.0.0.1:{free_port()}"
    result = CliRunner().invoke(app, ["plan", str(path), "--rpc", nobody])
    assert isinstance(result.exception, WorkerUnavailable)
    assert "cannot be reached within 3 s" in str(result.exception)


# -- what crosses the network


@needs_rpc
@pytest.mark.parametrize("device", ["sim", "cpu"])
def test_only_activations_cross_the_network_in_one_round_trip(
    device: str, models: Path, worker: Worker
) -> None:
    width, path = 6144, models / "rpc-wide.gguf"
    if not path.exists():
        write_preset("qwen3moe", path, size="tiny", seed=5, n_embd=width, n_layer=4)
    with Relay(worker.address) as relay:
        remote = RemoteOptions((relay.address,))
        with open_engine(path, options(device, remote)) as engine:
            assert engine.opened.remote is not None
            assert not engine.opened.remote.has_head
            for n_tokens in (64, 1):
                for is_measured in (False, False, True):  # the first decodes send their graph
                    before = relay.n_bytes, relay.n_turns
                    engine.sequences.extend(0, [7] * n_tokens)
                    n_bytes = relay.n_bytes - before[0]
                    if is_measured:
                        activations = n_tokens * 4 * width * 2  # to the worker, and back
                        assert activations <= n_bytes <= 1.2 * activations
                        assert relay.n_turns - before[1] == 1


# -- a draft model on a worker

POLICY = ("--spec-policy", "fixed")  # the default one drafts by measured times


@needs_rpc
def test_a_remote_draft_drafts_the_same_tokens(worker: Worker) -> None:
    def answer(*flags: str) -> tuple[str, float]:
        words = ("-c", "512", "-t", "1", "--temp", "0", "--draft-max", "4", *POLICY, *flags)
        line = read_command_line("run", words, read_environment({}))
        config = resolve(line.options, read_host(line.environment))
        with Session(config) as session:
            pieces = list(session.generate("Once upon a time", GenerateOptions(n_predict=60)))
            assert isinstance(session.draft, Engine)
            assert (session.draft.opened.remote is not None) is ("-devd" in flags)
            stats = pieces[-1].stats
            assert stats is not None
            return "".join(piece.text for piece in pieces), stats.acceptance_rate or 0.0

    here = answer("--device", "cpu")
    there = answer("--device", "cpu", "--rpc", str(worker.address), "-devd", "RPC0")
    assert there == here
    assert here[1] > 0


@needs_rpc
def test_a_remote_draft_gives_the_logits_of_a_local_one(exact: Path, worker: Worker) -> None:
    here = engine_options(options("cpu"), wrapped=False)
    with open_engine(exact, here) as engine:
        expected = logits(engine)
    device, remote = RemoteOptions((worker.address,)).of("RPC0")
    with open_engine(exact, engine_options(here, device=device, remote=remote)) as engine:
        np.testing.assert_array_equal(logits(engine), expected)


@needs_rpc
def test_an_equal_graph_of_a_remote_draft_is_sent_once(worker: Worker) -> None:
    with Relay(worker.address) as relay:
        device, remote = RemoteOptions((relay.address,)).of("RPC0")
        o = engine_options(options("cpu"), wrapped=False, device=device, remote=remote)
        with open_engine(demo_file("draft.gguf"), o) as engine:

            def sent(n_tokens: int) -> int:
                before = relay.n_bytes
                engine.sequences.extend(0, [7] * n_tokens)
                return relay.n_bytes - before

            for n_tokens in (1, 4):
                first, *others = (sent(n_tokens) for _ in range(4))
                rows = 4 * n_tokens * engine.n_vocab
                assert first - rows > 10_000, "the nodes of the graph"
                for n_bytes in others:
                    assert rows <= n_bytes < rows + 0.2 * (first - rows), "it computes it again"


def test_a_remote_draft_needs_a_worker_and_libllama() -> None:
    with pytest.raises(DeviceUnavailable, match="--device rpc0: RPC0 needs --rpc HOST:PORT"):
        RemoteOptions().of("rpc0")
    with pytest.raises(DeviceUnavailable, match="-devd rpc0: RPC0 needs --rpc HOST:PORT"):
        RemoteOptions().of("rpc0", "-devd")
    with pytest.raises(DeviceUnavailable, match="RPC0 is named 2 times; name each device once"):
        RemoteOptions((Address("h", 1),)).of("RPC0,rpc0")
    with pytest.raises(DeviceUnavailable, match="remote devices come before or after all local"):
        RemoteOptions((Address("h", 1),)).of("CUDA0,RPC0,CUDA1")


# -- what is not there


@needs_rpc
def test_workers_and_devices_that_are_not_there_are_one_sentence(worker: Worker) -> None:
    model = demo_file("target.gguf")
    nobody = RemoteOptions((Address("127.0.0.1", free_port()),))
    with pytest.raises(WorkerUnavailable, match=r"cannot be reached within 3 s \(Connection refu"):
        open_engine(model, options("cpu", nobody))
    unknown = RemoteOptions((worker.address,), devices=("RPC7",))
    with pytest.raises(DeviceUnavailable, match="device RPC7: the workers of --rpc have RPC0"):
        open_engine(model, options("cpu", unknown))
    twice = RemoteOptions((worker.address, Address("localhost", worker.address.port)))
    with pytest.raises(DeviceUnavailable, match=r"both are the worker at 127\.0\.0\.1:.* once"):
        open_engine(model, options("sim", twice))
    one = RemoteOptions((worker.address,))
    with open_engine(
        model, engine_options(options("sim", one), tensor_split=(1.0, 2.0, 3.0))
    ) as engine:
        said = " ".join(engine.opened.notes)
        assert "only the first 2 of 3 shares count, for 2 devices (RPC0, sim)" in said
    with pytest.raises(DeviceUnavailable, match="--tensor-split leaves sim no layers"):
        open_engine(model, engine_options(options("sim", one), tensor_split=(1.0, 0.0)))


@needs_rpc
def test_a_busy_worker_says_that_it_serves_one_client(worker: Worker) -> None:
    only = RemoteOptions((worker.address,))
    with (
        open_engine(demo_file("target.gguf"), options("cpu", only)),
        pytest.raises(WorkerUnavailable, match="it serves one at a time"),
    ):
        greet(worker.address, answer_s=0.2)
    greet(worker.address)  # the worker is free again


@needs_rpc
def test_another_version_is_refused(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "VERSION", (99, 0))
    with pytest.raises(WorkerUnavailable, match="speaks version .* and this library 99.0; install"):
        open_engine(demo_file("target.gguf"), options("cpu", RemoteOptions((worker.address,))))


@needs_rpc
def test_shares_beyond_a_workers_memory_are_refused(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.ggml.backend.Device.memory_bytes", lambda self: (1 << 30, 1 << 30))
    one = RemoteOptions((worker.address,))
    with pytest.raises(
        DoesNotFit, match="--tensor-split gives remote device 0 .* fit: it has 1.0 GiB free"
    ):
        open_engine(demo_file("target.gguf"), options("sim", one))
    with pytest.raises(DoesNotFit, match="no layer fits the devices of --rpc"):
        open_engine(demo_file("target.gguf"), options("cpu", one))


CLOSED = "closes connections at once: it serves another client, is missing behind a tunnel"


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (b"", CLOSED),
        (None, CLOSED),  # the connection is reset
        (b"HTTP/1.1 400 Bad Request, and more of it", "is not an RPC server of ggml"),
    ],
)
def test_other_servers_are_no_workers(answer: bytes | None, sentence: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                if answer is None:
                    reset = struct.pack("ii", 1, 0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                    return
                connection.recv(100)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(WorkerUnavailable, match=sentence):
            greet(Address(*listener.getsockname()))
        thread.join()


@pytest.mark.parametrize("kind", [ConnectionResetError, ConnectionAbortedError, BrokenPipeError])
def test_a_reset_is_the_same_sentence_while_connecting(
    kind: type[OSError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports a reset by `connect`, or by the first call after it."""

    def reset(*_: object, **__: object) -> socket.socket:
        raise kind(104, "Connection reset by peer")

    monkeypatch.setattr(socket, "create_connection", reset)
    with pytest.raises(WorkerUnavailable, match=CLOSED):
        greet(Address("127.0.0.1", 1))


@needs_rpc
@pytest.mark.usefixtures("steady_links")
@pytest.mark.parametrize("order", ["auto", "last"])
def test_a_start_with_a_worker_opens_the_layout_that_plan_prints(
    order: Literal["auto", "last"], models: Path, worker: Worker
) -> None:
    path = write_preset("qwen3moe", models / "rpc-layout.gguf", size="tiny", seed=4, n_layer=8)
    remote = RemoteOptions((worker.address,), order=order)
    for shares in ((1.0, 2.0), (2.0, 1.0)):
        config = config_of(
            model=path, device="sim", threads=1, ctx_size=256, tensor_split=shares,
            spec=spec_of({"--spec-type": "none"}),
        )  # fmt: skip
        config = replace(config, remote=remote)
        planned = planned_for(config, PlanOptions()).layout
        with open_target(session_start(config)) as engine:
            assert engine.layout == planned
            assert len(engine.layout.remote) == 1
