"""`specoffload worker` with real processes and sockets on loopback."""

from __future__ import annotations

import contextlib
import ctypes as C
import errno
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import httpx
import psutil
import pytest
from our_worker import SIM, RunningWorker, working
from program import ENVIRONMENT, serving
from relay import Relay
from running import eventually
from worker import has_rpc

from offload.errors import DeviceUnavailable, WorkerUnavailable
from offload.ggml import rpc
from offload.model_file import model_hash, read_facts
from offload.remote.address import Address, RemoteOptions
from offload.remote.hello import (
    LayersAsked,
    WorkerFacts,
    WorkerState,
    ask_for,
    check,
    look_for,
    status_of,
)
from offload.remote.offers import offers_of
from offload.remote.passing import pass_on
from offload.remote.probe import COUNT_DEVICES, GREETING
from offload.worker.serving import WorkerOptions
from specoffload.server import worker as server_worker
from specoffload.server.worker import Computing, Worker

pytestmark = pytest.mark.skipif(not has_rpc(), reason="libllama is compiled without ggml's RPC")

CLIENT = Path(__file__).with_name("worker_client.py")


@pytest.fixture(scope="module")
def worker(tiny_moe: Path) -> Iterator[RunningWorker]:
    with working(tiny_moe, "--device", SIM) as running:
        yield running


def decode(
    model: Path, at: Address, sizes: list[int], relay: Relay | None = None
) -> tuple[str, list[tuple[int, int]]]:
    """Run the client. Returns its last line, and the bytes and turns of each decode."""
    command = [sys.executable, str(CLIENT), str(model), str(at), ",".join(map(str, sizes))]
    marks, line = [], ""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in process.stdout:
            if line == "mark\n":
                marks.append((relay.n_bytes, relay.n_turns) if relay else (0, 0))
                process.stdin.write("\n")
                process.stdin.flush()
    assert process.returncode == 0, line
    return line.strip(), [(b - a, d - c) for (a, c), (b, d) in zip(marks, marks[1:], strict=False)]


@pytest.mark.parametrize("preset", ["deepseek-v3", "qwen3moe", "glm4moe", "gpt-oss"])
@pytest.mark.parametrize("device", [SIM, "cpu"])
def test_a_worker_that_streams_computes_the_same_logits(
    preset: str, device: str, models: Path
) -> None:
    from lab.synth import write_preset

    path = write_preset(preset, models / f"worker-{preset}.gguf", size="tiny", seed=5)
    with working(path, "--device", device, "--hybrid", "off") as running:
        said, _ = decode(path, running.address, [5, 1, 1, 3, 1, 33, 64, 1, 2, 64, 1])
        assert said.startswith("difference 0.0 of "), running.text
        counters = running.counters()
        assert (counters["streamed_experts"] > 0) is (device == SIM)
        assert (counters["hits"] > 0) is (device == SIM)


def test_split_layers_compute_the_same_logits(tiny_moe: Path) -> None:
    with working(tiny_moe, "--device", SIM, "--hybrid", "on") as running:
        said, _ = decode(tiny_moe, running.address, [5, 1, 1, 3, 1, 33, 64, 1, 2, 64, 1])
        assert said.startswith("difference 0.0 of "), running.text
        counters = running.counters()
        assert counters["split_layers"] > 0
        assert counters["n_pairs_host"] > 0


@pytest.mark.parametrize("preset", ["deepseek-v3", "gpt-oss"])
def test_a_worker_measures_at_its_start_which_experts_the_cpu_computes(
    preset: str, models: Path
) -> None:
    from lab.synth import write_preset

    path = write_preset(preset, models / f"worker-{preset}.gguf", size="tiny", seed=5)
    with working(path, "--device", f"{SIM},bw=2MB/s") as running:
        said, _ = decode(path, running.address, [5, 1, 1, 3, 1, 2, 64, 1])
        assert said.startswith("difference 0.0 of "), running.text
        assert re.search(r"ready: .*split layers: an expert takes the CPU \d+ us", running.text)
        counters = running.counters()
        assert counters["n_pairs_host"] > 0, running.text


def test_what_a_worker_measured_is_used_at_its_next_start(tiny_moe: Path, tmp_path: Path) -> None:
    device = ("--device", f"{SIM},bw=2MB/s")
    for said in ("(measured now)", "(measured on 20"):
        with working(tiny_moe, *device, profiles=tmp_path) as running:
            decode(tiny_moe, running.address, [5, 1, 1])
            assert running.says(said), running.text
            assert running.counters()["n_pairs_host"] > 0
    change_kept(tmp_path, cpu_s=15e-3, copy_s=1e-4)
    with working(tiny_moe, *device, profiles=tmp_path) as running:
        decode(tiny_moe, running.address, [5, 1, 1])
        assert running.says("(measured on 20")
        assert running.counters()["n_pairs_host"] == 0, "copies are cheaper by these costs"
    with working(tiny_moe, "--device", f"{SIM},bw=3MB/s", profiles=tmp_path) as running:
        decode(tiny_moe, running.address, [5, 1, 1])
        assert running.says("(measured now)"), "they are of another device"
        assert running.counters()["n_pairs_host"] > 0


def change_kept(folder: Path, cpu_s: float, copy_s: float) -> None:
    """Change the times of an expert in the costs of split layers that a worker has kept."""
    n_changed = 0
    for path in folder.rglob("*.json"):
        kept = json.loads(path.read_text("utf-8"))
        for worker in kept.get("workers", ()):
            host, n_changed = worker["costs"]["host"], n_changed + 1
            host["by_rows_s"] = dict.fromkeys(host["by_rows_s"], cpu_s)
            worker["costs"]["copy_s"] = copy_s
        path.write_text(json.dumps(kept), "utf-8")
    assert n_changed


def test_experts_that_do_not_fit_memory_are_read_from_the_disk(tiny_moe: Path) -> None:
    with working(tiny_moe, "--device", SIM, "--ram", "1000KiB") as running:
        said, _ = decode(tiny_moe, running.address, [5, 1, 33, 1])
        assert said.startswith("difference 0.0 of "), running.text
        assert running.says("others are read from the disk when they are needed"), running.text


def test_only_activations_cross_the_network_in_one_round_trip(models: Path) -> None:
    from lab.synth import write_preset

    width, path = 6144, models / "worker-wide.gguf"
    write_preset("qwen3moe", path, size="tiny", seed=5, n_embd=width, n_layer=2)
    facts = read_facts(path)
    head = facts.weights["output.weight"].entry.shape[1]
    with working(path, "--device", "sim:vram=16MiB") as running, Relay(running.address) as relay:
        _, steps = decode(path, relay.address, [64, 64, 1, 1, 1, 1, 1], relay)
    assert relay.n_bytes < facts.size_bytes / 4
    for n_tokens, (n_bytes, n_turns) in ((64, steps[1]), (1, steps[-1])):
        activations = n_tokens * 4 * (width + head)  # from the client, and back
        assert activations <= n_bytes <= 1.2 * activations
        assert n_turns == 1


def test_the_worker_says_what_it_is_before_ggml_connects(
    worker: RunningWorker, tiny_moe: Path
) -> None:
    status = status_of(worker.address)
    assert status is not None
    assert status.hash == model_hash(read_facts(tiny_moe))
    assert (status.device, status.total_bytes) == (SIM, 1 << 20)
    mine = WorkerFacts(status.version, status.library, "mine.gguf", status.hash)
    check(worker.address, status, mine)
    for other, said in (
        (replace(mine, hash="abc"), "another file: its tiny_moe.gguf has hash"),
        (replace(mine, version="0.0.1"), f"runs specoffload {status.version}, and this machine"),
        (replace(mine, library="0.0.2"), "runs llama-cpp-python"),
    ):
        with pytest.raises(DeviceUnavailable, match=said):
            check(worker.address, status, other)


def test_a_server_that_is_not_ours_has_no_status() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address("127.0.0.1", listener.getsockname()[1])

        def close_one() -> None:
            listener.accept()[0].close()  # a stock rpc-server expects ggml's greeting

        threading.Thread(target=close_one, daemon=True).start()
        assert status_of(address) is None
    assert status_of(address) is None


def test_a_slow_worker_of_ours_does_not_count_as_a_stock_one() -> None:
    """A stock worker would get all weights over the network."""
    with ExitStack() as closing:
        listener = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
        firsts = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection = closing.enter_context(listener.accept()[0])
                    firsts.append(connection.recv(1))
                    if firsts[-1] == b"\x0e":  # only HTTP is slow
                        connection.sendall(struct.pack("<Q4B24x", 28, *rpc.VERSION, 0, 0))

        thread = threading.Thread(target=serve)
        thread.start()
        options = RemoteOptions((Address("127.0.0.1", listener.getsockname()[1]),))
        with pytest.raises(WorkerUnavailable, match=r"does not answer within 3 s: it hangs, or"):
            offers_of(options, None, asks=True)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert firsts == [b"G"]


class _SlowComputing:
    """Loads layers when it is told to. Stands for the computing process."""

    started: ClassVar[list[_SlowComputing]] = []

    def __init__(self, *_: object) -> None:
        self.asked: LayersAsked | None = None
        self.state, self.device, self.is_spent = WorkerState(), WorkerState(device="sim"), False
        self.may_finish, self.is_closed = threading.Event(), False
        self.started.append(self)

    def load(self, asked: LayersAsked) -> None:
        self.asked = asked

    def states(self) -> Iterator[WorkerState]:
        yield WorkerState(doing="reading weights")
        assert self.may_finish.wait(20)
        yield WorkerState(error="ended") if self.is_closed else WorkerState(is_ready=True)

    def close(self) -> None:
        self.is_closed = True
        self.may_finish.set()


@pytest.fixture
def slow_worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setattr(server_worker, "Computing", _SlowComputing)
    monkeypatch.setattr(server_worker, "_TURN_S", 0.2)
    monkeypatch.setattr(_SlowComputing, "started", [])
    facts = WorkerFacts("1", "1", "m.gguf", "hash")
    options = WorkerOptions(Path("m.gguf"))
    return Worker(options, facts, lambda _: None, lambda *_: None, n_layers=6)


def test_a_client_does_not_end_the_loading_of_another_one(slow_worker: Worker) -> None:
    first = slow_worker.load(LayersAsked(0, 3), "10.0.0.1:7")
    assert next(first).doing
    for other in ("10.0.0.2:8", "10.0.0.1:9"):  # another machine, and another program of the first
        (refused,) = slow_worker.load(LayersAsked(3, 6), other)
        assert refused.is_busy
        assert refused.error.startswith("this worker is loading layers 0 to 2 for 10.0.0.1:7, and")
    same = slow_worker.load(LayersAsked(0, 3), "10.0.0.2:8")
    assert next(same).doing
    (computing,) = _SlowComputing.started
    computing.may_finish.set()
    assert [*first][-1].is_ready
    assert [*same][-1].is_ready
    later = slow_worker.load(LayersAsked(3, 6), "10.0.0.2:8")
    assert next(later).doing
    assert computing.is_closed


def test_a_client_that_leaves_while_it_loads_makes_room(slow_worker: Worker) -> None:
    first = slow_worker.load(LayersAsked(0, 3), "10.0.0.1:7")
    assert next(first).doing
    first.close()  # as when a write to the client fails
    assert next(slow_worker.load(LayersAsked(3, 6), "10.0.0.2:8")).doing


def test_a_closed_worker_starts_no_process_that_would_outlive_it(slow_worker: Worker) -> None:
    """Python waits at its exit for such a process, which ignores signals."""
    slow_worker.close()
    with pytest.raises(ConnectionAbortedError):
        next(slow_worker.load(LayersAsked(0, 3), "10.0.0.1:7"))
    (only,) = _SlowComputing.started
    assert only.is_closed


def test_a_second_client_is_told(tiny_moe: Path) -> None:
    with working(tiny_moe, "--device", SIM, "--allow", "127.0.0.0/8") as running:
        with socket.create_connection((running.address.host, running.address.port)) as first:
            first.sendall(GREETING + COUNT_DEVICES)
            assert len(first.recv(8)) == 8
            eventually(lambda: running.status()["serving"] is not None, 10)
            serving = f"serves 127.0.0.1:{first.getsockname()[1]} already"
            other = "127.0.0.2"
            with socket.create_connection(
                (running.address.host, running.address.port), source_address=(other, 0)
            ) as second:
                second.sendall(b"\x0e")
                assert second.recv(1) == b""
            # A server that waits for its worker does not start its engine in vain.
            with pytest.raises(WorkerUnavailable, match=f"{serving}, and it serves one client"):
                look_for(running.address)
            with pytest.raises(DeviceUnavailable, match=f"{serving}, and it serves one client"):
                list(ask_for(running.address, LayersAsked(0, 1)))
        assert running.says(f"{other}:"), running.text
        assert running.says(serving), running.text
        eventually(lambda: running.status()["serving"] is None, 10)
        look_for(running.address)
        assert [s for s in ask_for(running.address, LayersAsked(0, 1))][-1].is_ready


def test_other_programs_cannot_connect_to_the_computing_process(tiny_moe: Path) -> None:
    def refused(port: int, host: str = "127.0.0.1", from_port: int = 0) -> bool:
        with socket.socket() as other:
            other.settimeout(0.3)
            other.bind((host, from_port))
            return other.connect_ex(("127.0.0.1", port)) == errno.EAGAIN  # no answer in time

    with working(tiny_moe, "--device", SIM) as running:
        port = [s for s in ask_for(running.address, LayersAsked(0, 1))][-1].port
        assert refused(port)
        with socket.create_connection((running.address.host, running.address.port)) as client:
            client.sendall(GREETING + COUNT_DEVICES)
            assert len(received(client, 32 + 12)) == 32 + 12
            (passed_on,) = (
                there.laddr.port for there in psutil.Process(running.process.pid).net_connections()
                if there.raddr and there.raddr.port == port
            )  # fmt: skip
            assert refused(port)
            assert refused(port, "127.0.0.3", passed_on)
        eventually(lambda: running.status()["serving"] is None, 10)
        assert refused(port)
        said, _ = decode(tiny_moe, running.address, [5, 1])
        assert said.startswith("difference 0.0 of "), running.text


def computing_process() -> psutil.Process:
    """The computing process of a `Computing` of this process."""
    (process,) = [
        child for child in psutil.Process().children()
        if any("spawn_main" in word for word in child.cmdline())
    ]  # fmt: skip
    return process


def test_a_computing_process_that_does_not_close_its_door_is_ended(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_worker, "_ADMIT_S", 0.5)
    computing = Computing(WorkerOptions(tiny_moe, SIM), lambda _: None)
    try:
        computing.load(LayersAsked(0, 1))
        assert list(computing.states())[-1].is_ready
        before = computing.counters()
        assert before
        monkeypatch.setattr(server_worker, "_COUNT_S", 0.1)
        with computing.connection():
            process = computing_process()
            process.suspend()
            assert computing.counters() == before, "those of the last answer"
        assert computing.is_spent, "the next client gets another process"
        assert not process.is_running()
        assert computing.counters() == {}
    finally:
        computing.close()


@pytest.mark.parametrize("server_ends", [True, False])
def test_a_computation_that_does_not_end_is_noticed(server_ends: bool) -> None:
    (client, ours), (server, its) = connected(), connected()
    with client, ours, server, its:
        threading.Timer(0.2, client.close).start()
        if server_ends:
            threading.Thread(target=lambda: (its.recv(1), its.close()), daemon=True).start()
        client.sendall(b"12")
        assert pass_on(ours, server, 1.0) is server_ends
        if not server_ends:
            assert its.recv(2) == b"12"
            its.close()


def test_the_end_of_a_computing_process_is_said_before_its_connection_ends(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    computing = Computing(WorkerOptions(tiny_moe, SIM), lambda state: said.append(state.error))
    try:
        join = computing._process.join  # the thread that reports the end is late
        monkeypatch.setattr(computing._process, "join", lambda: (time.sleep(0.5), join())[1])
        computing.load(LayersAsked(0, 1))
        assert list(computing.states())[-1].is_ready
        with computing.connection():
            process = computing_process()
            process.kill()
            eventually(lambda: process.status() == psutil.STATUS_ZOMBIE, 10)
        assert said[-1] == "the computing process ended (signal 9)"
    finally:
        computing.close()
    assert len([error for error in said if error]) == 1


def received(connection: socket.socket, n_bytes: int) -> bytes:
    """Return as many bytes, or fewer if the peer closes the connection."""
    found = b""
    while len(found) < n_bytes and (piece := connection.recv(n_bytes - len(found))):
        found += piece
    return found


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def test_addresses_that_are_not_allowed_get_nothing(tiny_moe: Path) -> None:
    with working(tiny_moe, "--device", "cpu", "--allow", "127.0.0.9") as running:
        with pytest.raises(httpx.HTTPError):
            running.status()
        assert running.says("127.0.0.1 was refused: it is not among --allow", 10), running.text


def kill_computing_process(worker: RunningWorker) -> None:
    pid = worker.process.pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text():
            os.kill(int(child), signal.SIGKILL)
    eventually(lambda: "error: the computing process ended (signal 9)" in worker.text, 10)


def test_a_stop_that_another_thread_gets_ends_the_worker(tiny_moe: Path) -> None:
    """The kernel chooses the thread, and the main one sleeps until it is woken."""
    with working(tiny_moe, "--device", SIM) as running:
        pid = running.process.pid
        threads = [thread.id for thread in psutil.Process(pid).threads() if thread.id != pid]
        assert C.CDLL(None).tgkill(pid, threads[0], signal.SIGTERM) == 0
        assert running.ended() == 0


def test_a_server_goes_on_when_the_computing_process_has_died(tiny_moe: Path) -> None:
    def answer(url: str) -> httpx.Response:
        body = {"prompt": "hello", "max_tokens": 8, "ignore_eos": True}
        return httpx.post(url + "/v1/completions", json=body, timeout=60)

    with (
        working(tiny_moe, "--device", SIM) as running,
        serving("--model", str(tiny_moe), "--device", "RPC0,sim:vram=4MiB", "-ts", "1,1",
                "--rpc", str(running.address)) as server,
    ):  # fmt: skip
        expected = answer(server.url).json()["choices"][0]["text"]
        kill_computing_process(running)
        eventually(lambda: httpx.get(server.url + "/health").status_code == 503, 10)
        assert f"the worker at {running.address}" in httpx.get(server.url + "/health").text
        eventually(lambda: answer(server.url).status_code == 200, 60)
        assert answer(server.url).json()["choices"][0]["text"] == expected
        assert running.text.count("loading layers 0 to 2") == 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--listen", "nowhere"), "--listen nowhere: must be HOST:PORT"),
        (("--listen", "127.0.0.1:99999"), "must be HOST:PORT with a port from 0 to 65535"),
        (("--allow", "10.0.0.300"), "must be an address or a network such as 10.0.0.0/24"),
        (("--device", "CUDA7"), "device CUDA7: this machine has"),
        (("--device", "sim,sim"), "--device sim,sim: a worker offers one device, and these are 2"),
        (("--tensor-split", "1,1"), "--tensor-split"),
        (("--ctx-size", "4096"), "--ctx-size"),
        (("--listen", "0.0.0.0:0"), "--rpc-secret-file FILE lets only those connect that know"),
        (("--listen", "0.0.0.0:0", "--allow", "10.0.0.1"), "and --insecure lets everybody"),
        (("--rpc-secret-file", "/dev/null"), "it is not a regular file: '/dev/null'"),
        (("--rpc-secret-file", "/nowhere"), "--rpc-secret-file /nowhere: cannot be read as UTF-8"),
    ],
)
def test_bad_flags_are_one_sentence(flags: tuple[str, ...], said: str, tiny_moe: Path) -> None:
    with working(tiny_moe, *flags) as running:
        assert running.ended() == 2
    assert running.says(said), running.text
    assert len([line for line in running.lines if line.startswith("specoffload:")]) == 1


def test_a_port_in_use_is_one_sentence(worker: RunningWorker, tiny_moe: Path) -> None:
    with working(tiny_moe, "--device", "cpu", "--listen", str(worker.address)) as running:
        assert running.ended() == 2
    assert running.says(f"--listen {worker.address}: the port is already in use"), running.text


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_signals_end_it_cleanly(number: signal.Signals, code: int, tiny_moe: Path) -> None:
    with working(tiny_moe, "--device", SIM, "--listen", "0.0.0.0:0", "--insecure") as running:
        assert running.says("warning: every machine that reaches it can use this worker"), (
            running.text
        )
        assert [s for s in ask_for(running.address, LayersAsked(0, 2))][-1].is_ready
        running.process.send_signal(number)
        assert running.ended() == code
    assert "Traceback" not in running.text


def test_requests_that_are_wrong_are_refused(worker: RunningWorker) -> None:
    url = f"http://{worker.address}/layers"
    body = json.dumps({"first": 3, "end": 1})
    answer = httpx.post(url, content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]) == (400, "/layers: layers 3 to 1 are none")
    assert httpx.post(url, content=body, headers={"Content-Type": "text/plain"}).status_code == 404
    assert httpx.get(url).status_code == 404
    for length in ("-1", "many"):  # rfile.read(-1) would read as much as a client sends
        with socket.create_connection((worker.address.host, worker.address.port)) as client:
            head = f"Content-Type: application/json\r\nContent-Length: {length}"
            client.sendall(f"POST /layers HTTP/1.0\r\n{head}\r\n\r\n".encode())
            client.settimeout(5)
            assert b" 404 " in client.recv(100)
