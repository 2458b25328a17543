"""Changes a client's graph and its data at random, in the ways in which a hostile client would."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import numpy as np

from lab.attack.rpc_messages import TENSOR, Graph, Sent
from offload.ggml.tensor import type_number

_NUMBERS = (0, 1, 2, 3, 7, 31, 32, 33, 255, 4096, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
_N_OPS, _N_TYPES = 101, 43


def _number(random: Random, now: int, bits: int = 32) -> int:
    kinds = (
        lambda: random.choice(_NUMBERS),
        lambda: now + random.choice((-1, 1, 2, -now // 2)),
        lambda: now * random.choice((2, 3, 4, 256)),
        lambda: random.getrandbits(bits),
    )
    return random.choice(kinds)() % (1 << bits)


def _row(graph: Graph, random: Random) -> int:
    return random.randrange(len(graph.tensors))


def _node(graph: Graph, random: Random) -> int:
    """Return the row of a node that computes, if there is one."""
    rows = np.flatnonzero(np.isin(graph.tensors["id"], graph.nodes) & (graph.tensors["op"] > 0))
    return int(random.choice(rows.tolist())) if len(rows) else _row(graph, random)


def _weight(graph: Graph, random: Random) -> int:
    """Return the row of a tensor that has no data: one of the worker's weights."""
    rows = np.flatnonzero((graph.tensors["data"] == 0) & (graph.tensors["op"] == 0))
    return int(random.choice(rows.tolist())) if len(rows) else _row(graph, random)


def _size(graph: Graph, random: Random) -> None:
    field, index = random.choice(("ne", "nb")), random.randrange(4)
    values = graph.tensors[field][_row(graph, random)]
    values[index] = _number(random, int(values[index]))


def _weight_size(graph: Graph, random: Random) -> None:
    values = graph.tensors[random.choice(("ne", "nb"))][_weight(graph, random)]
    index = random.randrange(4)
    values[index] = _number(random, int(values[index]))


def _type(graph: Graph, random: Random) -> None:
    graph.tensors["type"][_row(graph, random)] = random.choice((*range(_N_TYPES), 1 << 31))


def _operation(graph: Graph, random: Random) -> None:
    row = _node(graph, random)
    graph.tensors["op"][row] = random.choice((*range(_N_OPS + 2), 1 << 31))


def _parameter(graph: Graph, random: Random) -> None:
    values = graph.tensors["params"][_node(graph, random)]
    index = random.choice((0, 0, 1, 2, 3, random.randrange(16)))
    number = _number(random, int(values[index]))
    values[index] = number - (1 << 32) if number >> 31 else number


def _source(graph: Graph, random: Random) -> None:
    row = _node(graph, random)
    other = int(graph.tensors["id"][_row(graph, random)])
    index = random.choice((0, 0, 1, 1, 2, random.randrange(10)))
    graph.tensors["src"][row, index] = random.choice((other, other, other, 0, 12345))


def _view(graph: Graph, random: Random) -> None:
    """Make a node a view of any tensor, with or without data of its own."""
    row, other = _node(graph, random), _row(graph, random)
    graph.tensors["view_src"][row] = graph.tensors["id"][other]
    if random.random() < 0.5:
        graph.tensors["data"][row] = graph.tensors["buffer"][row] = 0


def _write_to_weight(graph: Graph, random: Random) -> None:
    """Make a node write its result to a weight, at any offset."""
    row, weight = _node(graph, random), _weight(graph, random)
    tensors = graph.tensors
    tensors["view_src"][row] = tensors["id"][weight]
    tensors["data"][row] = tensors["buffer"][row] = 0
    tensors["view_offs"][row] = random.choice((0, 0, 64, _number(random, 0, 64)))
    if random.random() < 0.3:
        tensors["src"][row, random.randrange(3)] = tensors["id"][weight]


def _offset(graph: Graph, random: Random) -> None:
    views = np.flatnonzero(graph.tensors["view_src"] != 0).tolist()
    row = random.choice(views) if views else _row(graph, random)
    graph.tensors["view_offs"][row] = _number(random, int(graph.tensors["view_offs"][row]), 64)


def _place(graph: Graph, random: Random) -> None:
    """Move a tensor to the data of another, in its buffer or with no data at all."""
    row, other = _row(graph, random), _row(graph, random)
    for field in ("data", "buffer"):
        graph.tensors[field][row] = graph.tensors[field][other]


def _name(graph: Graph, random: Random) -> None:
    """Give a tensor the name of another, or a weight another weight's name."""
    row, other = random.choice((_row, _weight))(graph, random), _weight(graph, random)
    graph.tensors["name"][row] = graph.tensors["name"][other]


def _copy(graph: Graph, random: Random) -> None:
    """Turn a node into a copy of one tensor to another."""
    row, tensors = _node(graph, random), graph.tensors
    target = random.choice((_weight, _row))(graph, random)
    tensors["op"][row] = random.choice((1, 34, 35, 42))  # DUP, CPY, CONT, SET_ROWS
    tensors["src"][row, 1] = tensors["view_src"][row] = tensors["id"][target]
    for field in ("ne", "nb", "type", "data", "buffer"):
        tensors[field][row] = tensors[field][target]


def _count(graph: Graph, random: Random) -> None:
    graph.tensors["use_count"][_row(graph, random)] = random.choice((-1, 0, 1, 2, 1 << 30))


def _flags(graph: Graph, random: Random) -> None:
    graph.tensors["flags"][_row(graph, random)] = random.getrandbits(31)


def _order(graph: Graph, random: Random) -> None:
    """Leave a node out, compute it twice, swap two, or name none or an unknown one."""
    nodes, at = graph.nodes, random.randrange(len(graph.nodes))
    other = random.randrange(len(nodes))
    kind = random.randrange(5)
    if kind == 0:
        graph.nodes = np.delete(nodes, at)
    elif kind == 1:
        graph.nodes = np.insert(nodes, at, nodes[other])
    elif kind == 2:
        nodes[[at, other]] = nodes[[other, at]]
    else:
        nodes[at] = 0 if kind == 3 else 999


# How often each change is made. The server itself ends at many wrong places of tensors.
_CHANGES: dict[Callable[[Graph, Random], None], int] = {
    _write_to_weight: 6, _weight_size: 5, _offset: 5, _source: 5, _view: 5, _copy: 5,
    _operation: 5, _parameter: 5, _name: 4, _order: 3, _place: 3, _size: 4, _type: 3,
    _count: 1, _flags: 1,
}  # fmt: skip


def change(graph: Graph, random: Random) -> list[str]:
    """Make one to three changes. Returns their names."""
    made = random.choices(list(_CHANGES), list(_CHANGES.values()), k=random.choice((1, 1, 2, 3)))
    for one in made:
        if len(graph.nodes) and len(graph.tensors):
            one(graph, random)
    return [one.__name__.lstrip("_") for one in made]


# -- numbers that kernels turn into addresses, and floats from which graphs compute such numbers

_FLOATS = (0.0, -1.0, 1e9, -1e9, 3e38, -3e38, float("inf"), -float("inf"), float("nan"))
_KINDS = {"i32": "<i4", "i64": "<i8", "f32": "<f4"}


def _wrong_integer(random: Random, now: int, bits: int) -> int:
    """Return a number near the present one, beyond any limit, or negative."""
    kinds = (
        lambda: -random.choice((1, 2, 300, 1 << 16, 1 << 30)),
        lambda: random.choice((*_NUMBERS, 10**8)),
        lambda: now + random.choice((-1, 1, 2, 64)),
        lambda: random.getrandbits(bits - 1),
    )
    most = (1 << (bits - 1)) - 1
    return max(-most - 1, min(most, random.choice(kinds)()))


def _changed(random: Random, kind: str, data: bytes) -> bytes:
    values = np.frombuffer(data, _KINDS[kind]).copy()
    n = random.choice((1, 1, 2, len(values)))
    for at in random.sample(range(len(values)), min(n, len(values))):
        if kind == "f32":
            values[at] = random.choice(_FLOATS)
        else:
            values[at] = _wrong_integer(random, int(values[at]), 8 * values.itemsize)
    return values.tobytes()


def change_data(inputs: Sequence[Sent], random: Random, *kinds: str) -> tuple[Sent, ...]:
    """Return the messages with other values in one input of these types, if there is one."""
    types = {type_number(kind): kind for kind in kinds}
    header = TENSOR.itemsize + struct.calcsize("<BQ")  # flag of the cache, offset
    own = [
        (at, types[number])
        for at, message in enumerate(inputs)
        if (number := int(np.frombuffer(message.body, TENSOR, 1)["type"][0])) in types
        and len(message.body) > header
    ]
    if not own:
        return tuple(inputs)
    chosen, kind = random.choice(own)
    body = inputs[chosen].body
    changed = replace(inputs[chosen], body=body[:header] + _changed(random, kind, body[header:]))
    return (*inputs[:chosen], changed, *inputs[chosen + 1 :])
