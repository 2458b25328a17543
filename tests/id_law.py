"""Checks every id tensor that a path hands to a backend by the one law, `broken_law`.

Python uploads slot ids in `IdExchange.send`, the player in its uploads of slot ids and of the table
for computing ahead, and a worker's measurement of split layers draws experts itself.
"""

from __future__ import annotations

import ctypes as C
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
from numpy.typing import NDArray

from offload.ggml import player as api
from offload.ggml.backend import SlotIds, copy_now
from offload.stream import play
from offload.stream.program import Program
from offload.stream.slot_ids import IdExchange
from offload.worker import split_costs

_SET = C.CFUNCTYPE(None, C.c_void_p, C.c_void_p, C.c_void_p, C.c_size_t, C.c_size_t)


@dataclasses.dataclass
class Found:
    """The number of checked uploads by path, and a sentence for each that broke the law."""

    n_checked: dict[str, int] = dataclasses.field(default_factory=dict)
    broken: list[str] = dataclasses.field(default_factory=list)

    def check(self, path: str, ids: NDArray[np.int32], n_slots: int, *, repeats: bool) -> None:
        self.n_checked[path] = self.n_checked.get(path, 0) + 1
        words = broken_law(ids, n_slots, repeats=repeats)
        if words:
            self.broken.append(f"{path}: {words}")


def broken_law(ids: NDArray[np.int32], n_slots: int, *, repeats: bool) -> str:
    """Say how slot ids break the law for products with experts; "" if they keep it.

    `ids` [n_tokens, n_used] must be from 0 to `n_slots` - 1, and distinct for each token unless the
    product permits a repetition (`repeats`). All ids that reach a backend have to keep it.
    """
    if ids.size == 0:
        return ""
    if ids.min() < 0 or ids.max() >= n_slots:
        return f"slots {ids.min()} to {ids.max()} of {n_slots}"
    in_order = np.sort(ids, axis=1)
    twice = (in_order[:, 1:] == in_order[:, :-1]).any(axis=1)
    if not repeats and twice.any():
        return f"{int(twice.sum())} of {len(ids)} tokens name a slot twice"
    return ""


def _array(address: int, n: int) -> NDArray[np.int32]:
    return np.ctypeslib.as_array((C.c_int32 * n).from_address(address))


def _check_table(found: Found, program: Program, first: int, end: int) -> None:
    """Check the table's layers of which an entry from `first` to `end` was uploaded."""
    ahead = api.PlayerAhead.from_address(program.player.ahead)
    starts = (C.c_int64 * len(program.layers)).from_address(ahead.table_at)
    for layer, start in zip(program.layers, starts, strict=True):
        if start >= end or start + layer.n_experts <= first:
            continue
        table = _array(ahead.table + 4 * start, layer.n_experts)
        again, there = table.copy(), np.zeros(layer.n_experts, np.uint8)
        taken, changed = np.zeros(layer.n_slots, np.uint8), np.zeros(2, np.int64)
        may_share = layer.n_used == 1 or bool(layer.may_repeat)
        can = api.native().table_slots(
            layer.slot_of, layer.state, layer.last_use, layer.n_experts, layer.n_slots, may_share,
            0, again.ctypes.data, there.ctypes.data, taken.ctypes.data, changed.ctypes.data,
        )  # fmt: skip
        # Layers that are not computed ahead may have any entries.
        if can and (again == table).all():
            repeats = layer.n_used == 1 or (may_share and layer.n_tokens == 1)
            found.check("table", table[None], layer.n_slots, repeats=repeats)


@contextmanager
def watched() -> Iterator[Found]:
    """Check all uploads of ids of engines that are opened meanwhile."""
    found = Found()
    programs: WeakSet[Program] = WeakSet()
    by_tensor: dict[int, WeakSet[Program]] = {}
    real = play.calls()
    upload = C.cast(real.set, _SET)

    def set_async(stream: int, tensor: int, data: int, offset: int, n_bytes: int) -> None:
        for program in by_tensor.get(tensor, ()):
            for layer in program.layers:
                if layer.slot_ids_tensor == tensor and layer.slot_ids == data:
                    n_tokens, n_used = layer.n_tokens, layer.n_used
                    ids = _array(data, n_tokens * n_used).reshape(n_tokens, n_used)
                    repeats = bool(layer.may_repeat) and n_tokens == 1
                    found.check("player", ids, layer.n_slots_seen, repeats=repeats)
        if not by_tensor.get(tensor):  # an address may have been another tensor's before
            for program in programs:
                at = program.player.ahead
                if at and api.PlayerAhead.from_address(at).table_tensor == tensor:
                    _check_table(found, program, offset // 4, (offset + n_bytes) // 4)
        upload(stream, tensor, data, offset, n_bytes)

    callback = _SET(set_async)
    compile_graph, send = play.GraphPlayer.compile, IdExchange.send
    choose = split_costs.ExpertLayer.choose
    n_experts = 0

    def compiled(player: play.GraphPlayer, *arguments: Any) -> Program:
        program = compile_graph(player, *arguments)
        programs.add(program)
        for layer in program.layers:
            by_tensor.setdefault(layer.slot_ids_tensor, WeakSet()).add(program)
        return program

    def sent(exchange: IdExchange, slot_ids: SlotIds, ids: NDArray[np.int32],
             experts: Sequence[int], slots: Sequence[int]) -> None:  # fmt: skip
        send(exchange, slot_ids, ids, experts, slots)
        found.check("Python", slot_ids.values, max(slots, default=-1) + 1, repeats=False)

    def chosen(layer: split_costs.ExpertLayer, random: np.random.Generator) -> None:
        nonlocal n_experts
        n_experts = layer._n_experts
        choose(layer, random)

    def copied(target: Any, at: int, source: Any, source_at: int, n_bytes: int) -> None:
        ids = _array(source.position + source_at, n_bytes // 4).reshape(-1, target.shape[0])
        found.check("measurement", ids, n_experts, repeats=False)
        copy_now(target, at, source, source_at, n_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(real, "set", C.cast(callback, C.c_void_p).value)
        patch.setattr(play.GraphPlayer, "compile", compiled)
        patch.setattr(IdExchange, "send", sent)
        patch.setattr(split_costs.ExpertLayer, "choose", chosen)
        patch.setattr(split_costs, "copy_now", copied)
        yield found
