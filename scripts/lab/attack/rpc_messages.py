"""Records what a client of a worker sends, and sends parts of it again to another connection.

The format is that of ggml-rpc.cpp of the pinned release.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lab.options import engine_options
from offload.engine import open_engine
from offload.remote.address import Address, RemoteOptions
from offload.times.min_batch import MinBatch

TENSOR = np.dtype(
    [("id", "<u8"), ("type", "<u4"), ("buffer", "<u8"), ("ne", "<u4", 4), ("nb", "<u4", 4),
     ("op", "<u4"), ("params", "<i4", 16), ("flags", "<i4"), ("src", "<u8", 10),
     ("view_src", "<u8"), ("view_offs", "<u8"), ("data", "<u8"), ("name", "S64"),
     ("use_count", "<i4")]
)  # fmt: skip
ALLOC, BASE, SET, GET, GRAPH, HELLO, CLEAR, AGAIN = 0, 3, 6, 8, 10, 14, 5, 16
_ANSWERED = {ALLOC, 1, 2, BASE, 7, GET, 9, 11, 13, HELLO, 15}
_GREETING = bytes(24)
_TIMEOUT_S = 90.0
_BATCHES = (1, 5, 2)  # tokens of the recorded decodes


@dataclass(frozen=True)
class Sent:
    """One message of a client, and the worker's answer if it gives one."""

    command: int
    body: bytes
    answer: bytes


@dataclass(frozen=True)
class Recorded:
    """One graph of a client, what it set before, and what it read afterwards."""

    model: str
    buffers: dict[int, tuple[int, int]]  # remote address -> (first byte's address, bytes)
    inputs: tuple[Sent, ...]
    graph: bytes
    read: Sent


@dataclass
class Graph:
    """A graph's message in parts."""

    nodes: NDArray[np.uint64]
    tensors: NDArray[np.void]
    device: int = 0

    @classmethod
    def of(cls, body: bytes) -> Graph:
        device, n_nodes = struct.unpack_from("<II", body)
        nodes = np.frombuffer(body, "<u8", n_nodes, 8).copy()
        tensors = np.frombuffer(body, TENSOR, offset=12 + 8 * n_nodes).copy()
        return cls(nodes, tensors, device)

    def body(self) -> bytes:
        head = struct.pack("<II", self.device, len(self.nodes)) + self.nodes.tobytes()
        return head + struct.pack("<I", len(self.tensors)) + self.tensors.tobytes()


class Line:
    """A connection to a worker, greeted. Raises OSError if the worker ends it."""

    def __init__(self, at: Address) -> None:
        self._socket = socket.create_connection((at.host, at.port), _TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.name = "{}:{}".format(*self._socket.getsockname())
        self.ask(HELLO, _GREETING)

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, command: int, body: bytes) -> None:
        self._socket.sendall(struct.pack("<BQ", command, len(body)) + body)

    def ask(self, command: int, body: bytes) -> bytes:
        self.send(command, body)
        (n,) = struct.unpack("<Q", self._exactly(8))
        return self._exactly(n)

    def _exactly(self, n: int) -> bytes:
        parts = []
        while n:
            part = self._socket.recv(min(n, 1 << 20))
            if not part:
                raise ConnectionResetError("the worker has closed the connection")
            parts.append(part)
            n -= len(part)
        return b"".join(parts)

    def place(self, recorded: Recorded) -> dict[int, tuple[int, int, int]]:
        """Allocate the recorded buffers. Returns (new buffer, new first byte, old first byte)."""
        moved = {}
        for old, (first, size) in recorded.buffers.items():
            (new, _) = struct.unpack("<QQ", self.ask(ALLOC, struct.pack("<IQ", 0, size)))
            (base,) = struct.unpack("<Q", self.ask(BASE, struct.pack("<Q", new)))
            self.send(CLEAR, struct.pack("<QB", new, 0))
            moved[old] = new, base, first
        return moved


def moved_to(tensors: NDArray[np.void], moved: dict[int, tuple[int, int, int]]) -> None:
    """Point tensors in recorded buffers to the new ones."""
    recorded = tensors["buffer"].copy()  # a new buffer may have the address of another old one
    for old, (new, base, first) in moved.items():
        here = recorded == old
        tensors["data"][here] += np.uint64((base - first) % 2**64)
        tensors["buffer"][here] = new


def moved_body(body: bytes, moved: dict[int, tuple[int, int, int]]) -> bytes:
    """Return a message that begins with a tensor, for the new buffers."""
    tensor = np.frombuffer(body, TENSOR, 1).copy()
    moved_to(tensor, moved)
    return tensor.tobytes() + body[TENSOR.itemsize :]


# -- recording


@dataclass
class _Recorder:
    """A relay that keeps the bytes of connections that greet ggml's server."""

    to: Address
    streams: list[tuple[bytearray, bytearray]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listener.getsockname()[1])
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection((self.to.host, self.to.port))
                kept = bytearray(), bytearray()
                self.streams.append(kept)
                ends = ((client, server, kept[0]), (server, client, kept[1]))
                for arguments in ends:
                    threading.Thread(target=_copy, args=arguments, daemon=True).start()


def _copy(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 20):
            kept += data
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def record(model: Path, worker: Address) -> list[Recorded]:
    """Decode a few batches with the worker from a process of its own. Returns their graphs."""
    recorder = _Recorder(worker)
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_decode, args=(model, recorder.address))
    process.start()
    process.join(_TIMEOUT_S)
    recorder.close()
    if process.exitcode != 0:
        raise RuntimeError(f"the recorded client ended with {process.exitcode}")
    found: list[Recorded] = []
    for up, down in recorder.streams:
        if up[:1] == bytes([HELLO]):
            found += _graphs(model.name, list(_messages(bytes(up), bytes(down))))
    return found


def _decode(model: Path, at: Address) -> None:
    for flash_attn in ("on", "off"):
        options = engine_options(
            device="cpu", remote=RemoteOptions((at,), order="only"), min_batch=MinBatch(1, 1),
            n_ctx=256, n_ubatch=64, n_outputs=64, n_threads=1, n_threads_batch=1,
            flash_attn=flash_attn,
        )  # fmt: skip
        with open_engine(model, options) as engine:
            for n in _BATCHES:
                engine.sequences.extend(0, [(7 * i + n) % engine.n_vocab for i in range(n)])


def _messages(up: bytes, down: bytes) -> Iterator[Sent]:
    at = there = 0
    while at < len(up):
        command, n = struct.unpack_from("<BQ", up, at)
        body = up[at + 9 : at + 9 + n]
        at += 9 + n
        answer = b""
        if command in _ANSWERED:
            (n,) = struct.unpack_from("<Q", down, there)
            answer = down[there + 8 : there + 8 + n]
            there += 8 + n
        yield Sent(command, body, answer)


def _graphs(model: str, sent: list[Sent]) -> Iterator[Recorded]:
    sizes: dict[int, int] = {}
    bases: dict[int, int] = {}
    inputs: list[Sent] = []
    graph = b""
    for message in sent:
        if message.command == ALLOC:
            address, size = struct.unpack("<QQ", message.answer)
            sizes[address] = size
            inputs = [m for m in inputs if _buffer_of(m.body) != address]  # a freed one was there
        elif message.command == BASE:
            (bases[struct.unpack("<Q", message.body)[0]],) = struct.unpack("<Q", message.answer)
        elif message.command == SET:
            inputs.append(message)
        elif message.command == GRAPH:
            graph = message.body
        elif message.command == GET and graph:
            used = set(Graph.of(graph).tensors["buffer"].tolist()) & bases.keys()
            # The same memory is written again and again. The latest writes come last.
            latest = {m.body[: TENSOR.itemsize]: m for m in reversed(inputs)}
            last = [m for m in reversed(latest.values()) if _buffer_of(m.body) in used]
            kept = {address: (bases[address], sizes[address]) for address in used}
            yield Recorded(model, kept, tuple(last), graph, message)
            graph = b""


def _buffer_of(body: bytes) -> int:
    return int(np.frombuffer(body, TENSOR, 1)["buffer"][0])
