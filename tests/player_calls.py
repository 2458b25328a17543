"""Puts something in place of functions of ggml, whoever calls them: the player or Python."""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable
from typing import Any

import pytest

from offload.engine import Engine
from offload.ggml.backend import Stream
from offload.ggml.graph import Graph
from offload.stream.cpu_side import HostGraph
from offload.stream.play import GraphPlayer, calls
from offload.stream.program import Program

COMPUTE = C.CFUNCTYPE(C.c_int, C.c_void_p, C.c_void_p)
SET = C.CFUNCTYPE(None, C.c_void_p, C.c_void_p, C.c_void_p, C.c_size_t, C.c_size_t)
Compute = Callable[[int, int], int]  # (address of a stream, address of a graph) -> ggml_status

_kept: list[object] = []  # C keeps addresses only


def computing(patch: pytest.MonkeyPatch, make: Callable[[Compute], Compute]) -> None:
    """Compute every graph by `make(inner)`, which may call `inner`. It must not raise."""
    by_python = Stream.compute
    found = make(COMPUTE(calls().compute))
    thunk = COMPUTE(found)
    _kept.append(thunk)

    def compute(stream: Stream, graph: Graph) -> int:
        return make(lambda *_: by_python(stream, graph))(stream.address, graph.address)

    patch.setattr(calls(), "compute", C.cast(thunk, C.c_void_p).value)
    patch.setattr(Stream, "compute", compute)


def uploading(patch: pytest.MonkeyPatch, see: Callable[[int, int], None]) -> None:
    """Call `see` with the addresses of tensor and values before each upload of the player."""
    inner = SET(calls().set)

    def upload(stream: int, tensor: int, values: int, offset: int, n_bytes: int) -> None:
        see(tensor, values)
        inner(stream, tensor, values, offset, n_bytes)

    thunk = SET(upload)
    _kept.append(thunk)
    patch.setattr(calls(), "set", C.cast(thunk, C.c_void_p).value)


def reading(
    patch: pytest.MonkeyPatch, before: Callable[[int], None], after: Callable[[int, int], None]
) -> None:
    """Call `before` with the address of a tensor that the player reads, and `after` with the
    addresses of the tensor and its values, which `sim` reads at once."""
    inner = SET(calls().get)

    def read(stream: int, tensor: int, values: int, offset: int, n_bytes: int) -> None:
        before(tensor)
        inner(stream, tensor, values, offset, n_bytes)
        after(tensor, values)

    thunk = SET(read)
    _kept.append(thunk)
    patch.setattr(calls(), "get", C.cast(thunk, C.c_void_p).value)


def played_layers(patch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that gets each layer of each program that is compiled from now on."""
    compile_graph, found = GraphPlayer.compile, list[Any]()

    def compiled(player: GraphPlayer, *arguments: Any) -> Program:
        program = compile_graph(player, *arguments)
        found.extend(program.layers)
        return program

    patch.setattr(GraphPlayer, "compile", compiled)
    return found


def host_graphs(engine: Engine) -> tuple[set[int], set[int]]:
    """Return the addresses of the CPU's graphs, and of the graphs that place their rows."""
    assert engine.device is not None
    splits = [executor._split for executor in engine.device.executors.values()]
    made = [made for split in splits if split is not None for made in split._made]
    hosts = [one for one in made if isinstance(one, HostGraph)]
    return {one.graph.address for one in hosts}, {one.entry.struct.placing for one in hosts}
