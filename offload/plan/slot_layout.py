"""Divides device memory into slots, each of which holds a whole expert. Pure.

A token always uses gate, up and down of an expert together. So they are one *piece*, and a slot
has room for all of them:

    pool "experts"      slot 0        slot 1        slot 2
      kind "gate"     | expert 7    | expert 0    | ...        memory of its own, one stride
      kind "up"       | expert 7    | expert 0    | ...
      kind "down"     | expert 7    | expert 0    | ...

Layers whose weights differ in type may share the slots of a pool. The stride of a kind, the bytes
from one slot to the next, then has room for the kind's largest matrix. The stride is a whole number
of blocks of every type, because the device's kernels count strides in blocks. A dense weight is a
piece by itself, in a pool of one kind.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from offload.alignment import ALIGNMENT_BYTES, aligned
from offload.model import TensorEntry, layer_of

# Most blocks of a kind in all slots together, because kernels count them in C's int.
MOST_BLOCKS = 2**31 - 1
_READ_AT_ONCE = 256  # elements of a row that kernels read at once
_LITTLE = 1 / 64  # ratio of padding to matrix up to which padding costs almost nothing
_EXPERTS = re.compile(r"^blk\.(\d+)\.ffn_(up|down|gate|gate_up)_exps\.weight$")
_BIASES = re.compile(r"^blk\.(\d+)\.ffn_(up|down|gate|gate_up)_exps\.bias$")
_DENSE = "weight"


@dataclass(frozen=True)
class SlotKind:
    """One matrix or bias of a slot. Slot s is at byte `s * stride_bytes` of the kind's memory."""

    name: str  # gate, up, down, gate_up, or bias_of one of these; "weight" of dense weights
    stride_bytes: int
    block_bytes: int  # block size of the type with the smallest blocks
    unit_bytes: int = 1  # least common multiple of all types' block sizes
    is_overrun: bool = False  # True if kernels read past the end of a matrix

    @property
    def most_slots(self) -> int:
        """The largest number of slots whose blocks kernels can count."""
        return max(1, MOST_BLOCKS // -(-self.stride_bytes // self.block_bytes))


@dataclass(frozen=True)
class SlotPool:
    """`n_slots` numbered slots with room for one matrix of each kind."""

    name: str
    kinds: tuple[SlotKind, ...]
    n_slots: int
    n_groups: int  # weight groups that stream through the pool
    n_experts: int  # pieces of a group that are experts; 0 for dense weights
    n_used: int  # experts that one token uses
    # Bytes from slot to slot if the kinds of a slot lie one after another in one memory. 0: each
    # kind has memory of its own.
    joined_bytes: int = 0

    @property
    def slot_bytes(self) -> int:
        """Device memory that one slot takes, all kinds together."""
        return self.joined_bytes or sum(kind.stride_bytes for kind in self.kinds)

    @property
    def size_bytes(self) -> int:
        return self.n_slots * self.slot_bytes

    def holds(self, n_tokens: int) -> bool:
        """True if all experts of a layer that `n_tokens` tokens may use fit the slots at once."""
        return self.n_slots >= min(self.n_experts, n_tokens * self.n_used)

    @property
    def n_pieces(self) -> int:
        """Number of all pieces that stream through the pool."""
        return self.n_groups * max(1, self.n_experts)

    @property
    def most_slots(self) -> int:
        """Number of useful slots: one for each piece, but no more than kernels can count."""
        return min(self.n_pieces, self.most_counted)

    @property
    def most_counted(self) -> int:
        """The largest number of slots whose blocks kernels can count."""
        if not self.joined_bytes:
            return min(kind.most_slots for kind in self.kinds)
        return min(
            max(1, MOST_BLOCKS // -(-self.joined_bytes // kind.block_bytes)) for kind in self.kinds
        )

    def offsets(self) -> dict[str, int]:
        """Return the first byte of each kind in a slot whose kinds lie one after another."""
        offsets, at = {}, 0
        for kind in self.kinds:
            offsets[kind.name] = at
            at += aligned(kind.stride_bytes)
        return offsets

    def joined(self) -> SlotPool:
        """Return the pool with the kinds of each slot one after another, if kernels allow that.

        Otherwise return the pool itself. Slots then have one stride for all kinds. It is a whole
        number of blocks of every type, and takes little more memory than separate kinds.
        """
        alone = sum(kind.stride_bytes for kind in self.kinds)
        if not self.n_experts or any(kind.is_overrun for kind in self.kinds):
            return self
        last = self.kinds[-1]
        needed = self.offsets()[last.name] + last.stride_bytes
        blocks = math.lcm(*(kind.unit_bytes for kind in self.kinds))
        for unit, most in ((math.lcm(blocks, ALIGNMENT_BYTES), _LITTLE), (blocks, 4 * _LITTLE)):
            stride = -(-needed // unit) * unit
            if stride - alone <= most * alone:
                return replace(self, joined_bytes=stride)
        return self


@dataclass(frozen=True)
class WeightGroup:
    """Weights that are copied and cached together: a layer's experts, or one dense weight."""

    pool: int
    layer: int
    names: Mapping[str, str]  # kind -> tensor name
    matrix_bytes: Mapping[str, int]  # kind -> bytes that are copied for one piece


def bias_of(kind: str) -> str:
    """Return the name of the kind that holds the biases of matrices of `kind`."""
    return f"{kind}_bias"


@dataclass(frozen=True)
class SlotLayout:
    """Pools of slots, and the weight groups that stream through them, in the model's order."""

    pools: tuple[SlotPool, ...] = ()
    groups: tuple[WeightGroup, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(pool.size_bytes for pool in self.pools)

    def with_slots(self, n_slots: Sequence[int]) -> SlotLayout:
        pools = [replace(pool, n_slots=n) for pool, n in zip(self.pools, n_slots, strict=True)]
        return replace(self, pools=tuple(pools))

    def homes(self) -> dict[int, dict[int, int]]:
        """Return the first slot of each group of experts, by pool and group.

        Only pools that have a slot for each expert of all their groups are returned.
        """
        homes: dict[int, dict[int, int]] = {}
        for number, pool in enumerate(self.pools):
            groups = [i for i, group in enumerate(self.groups) if group.pool == number]
            if pool.n_experts and pool.n_slots >= len(groups) * pool.n_experts:
                homes[number] = {group: i * pool.n_experts for i, group in enumerate(groups)}
        return homes

    def places(self) -> dict[str, tuple[int, str]]:
        """Return (index into `groups`, kind) of each streamed tensor, by the tensor's name."""
        return {
            name: (index, kind)
            for index, group in enumerate(self.groups)
            for kind, name in group.names.items()
        }


def slot_layout(
    weights: Iterable[TensorEntry],
    n_experts: int,
    n_used: int,
    most_padding: float = 0.25,
    *,
    only: Collection[str] | None = None,
) -> SlotLayout:
    """Return the layout for these weights. Each pool has a slot for each piece, if possible.

    Layers with different types share a pool while on average at most `most_padding` (a share) of a
    slot's bytes stay empty. With `only`, just the weights with these names get slots. Their pools
    are chosen as if all weights streamed, so that a part never needs more memory than the whole.

    Experts' biases among `weights` get room in the slots of their layer. They do not stream: they
    stay on the device, and slots hold copies of them, so that slot numbers choose biases as well.
    """
    by_layer: dict[int, dict[str, TensorEntry]] = {}
    biases: dict[int, dict[str, int]] = {}  # bytes of one expert's biases by layer and kind
    dense: dict[tuple[int, ...], list[Mapping[str, TensorEntry]]] = {}
    for weight in weights:
        match = _EXPERTS.match(weight.name)
        if match:
            by_layer.setdefault(int(match[1]), {})[match[2]] = weight
        elif match := _BIASES.match(weight.name):
            of_layer = biases.setdefault(int(match[1]), {})
            of_layer[bias_of(match[2])] = weight.size_bytes // max(1, n_experts)
        else:
            dense.setdefault(weight.shape, []).append({_DENSE: weight})
    pools: list[SlotPool] = []
    groups: list[WeightGroup] = []
    sharers: list[tuple[str, int, Sequence[Mapping[str, TensorEntry]]]] = []
    if by_layer:
        sharers.append(("experts", n_experts, list(by_layer.values())))
    sharers += [("x".join(map(str, shape)), 0, alike) for shape, alike in dense.items()]
    for name, experts, members in sharers:
        for i, together in enumerate(_sharing(members, max(1, experts), most_padding)):
            alike = [m for m in together if only is None or all(w.name in only for w in m.values())]
            if not alike:
                continue
            parts = [_matrices(member, max(1, experts)) for member in alike]
            kinds = _kinds([_matrices(member, max(1, experts)) for member in together])
            assert kinds is not None, "only layers that have a common stride share a pool"
            layers = [layer_of(next(iter(member.values())).name) for member in alike]
            of_pool = [biases.get(layer, {}) for layer in layers] if experts else []
            kinds = (*_narrowed(kinds, parts), *_bias_kinds(of_pool))
            title = f"{name} {i + 1}" if i else name
            used = n_used if experts else 0
            pool = SlotPool(title, kinds, 1, len(alike), experts, used)
            pools.append(replace(pool, n_slots=pool.most_slots))
            for member, matrices in zip(alike, parts, strict=True):
                names = {kind: weight.name for kind, weight in member.items()}
                sizes = {m.kind: m.size_bytes for m in matrices}
                layer = layer_of(next(iter(names.values())))
                groups.append(WeightGroup(len(pools) - 1, layer, names, sizes))
    return SlotLayout(tuple(pools), tuple(sorted(groups, key=lambda group: group.layer)))


@dataclass(frozen=True, order=True)
class _Matrix:
    """One matrix of a piece, with the properties that decide whether it fits a slot."""

    kind: str
    block_bytes: int
    size_bytes: int
    is_overrun: bool  # True if kernels read past its end, where no other type's bytes may be


def _matrices(member: Mapping[str, TensorEntry], n_pieces: int) -> tuple[_Matrix, ...]:
    return tuple(
        _Matrix(
            kind,
            _block_bytes(weight),
            weight.size_bytes // n_pieces,
            weight.shape[0] % _READ_AT_ONCE != 0,
        )
        for kind, weight in member.items()
    )


def _sharing(
    members: Sequence[Mapping[str, TensorEntry]], n_pieces: int, most_padding: float
) -> list[list[Mapping[str, TensorEntry]]]:
    """Return the members of each pool. Each mixture of types joins the first pool that it fits."""
    mixtures: dict[tuple[_Matrix, ...], list[Mapping[str, TensorEntry]]] = {}
    for member in members:
        mixtures.setdefault(tuple(sorted(_matrices(member, n_pieces))), []).append(member)
    pools: list[list[tuple[_Matrix, ...]]] = []
    for mixture in sorted(mixtures, key=lambda m: -len(mixtures[m])):
        for pool in pools:
            together = [part for part in (*pool, mixture) for _ in mixtures[part]]
            if _padding(together) <= most_padding:
                pool.append(mixture)
                break
        else:
            pools.append([mixture])
    chosen = [{id(m) for mixture in pool for m in mixtures[mixture]} for pool in pools]
    return [[m for m in members if id(m) in ids] for ids in chosen]


def _padding(parts: Sequence[tuple[_Matrix, ...]]) -> float:
    """Return the mean share of a slot that stays empty; inf if there is no common stride."""
    kinds = _kinds(parts)
    if kinds is None:
        return math.inf
    used = sum(matrix.size_bytes for part in parts for matrix in part)
    return 1.0 - used / (len(parts) * sum(kind.stride_bytes for kind in kinds))


def _kinds(parts: Sequence[tuple[_Matrix, ...]]) -> tuple[SlotKind, ...] | None:
    """Return the kinds of a pool that all parts fit, or None if a kind has no common stride."""
    by_kind: dict[str, set[_Matrix]] = {}
    for matrix in (matrix for part in parts for matrix in part):
        by_kind.setdefault(matrix.kind, set()).add(matrix)
    kinds = []
    for kind, matrices in by_kind.items():
        stride = _stride(matrices)
        if stride is None:
            return None
        kinds.append(_kind(kind, stride, matrices))
    return tuple(kinds)


def _kind(name: str, stride: int, matrices: Collection[_Matrix]) -> SlotKind:
    blocks = [matrix.block_bytes for matrix in matrices]
    is_overrun = any(matrix.is_overrun for matrix in matrices)
    return SlotKind(name, stride, min(blocks), math.lcm(*blocks), is_overrun)


def _narrowed(
    kinds: Sequence[SlotKind], parts: Sequence[tuple[_Matrix, ...]]
) -> tuple[SlotKind, ...]:
    """Return the kinds of a pool reduced to these parts. No stride is wider than before."""
    alone = {kind.name: kind for kind in _kinds(parts) or ()}
    left = {matrix.kind for part in parts for matrix in part}
    both = [(kind, alone.get(kind.name, kind)) for kind in kinds if kind.name in left]
    return tuple(min(pair, key=lambda kind: kind.stride_bytes) for pair in both)


def _bias_kinds(biases: Sequence[Mapping[str, int]]) -> tuple[SlotKind, ...]:
    """Return the kinds of a pool's biases. `biases`: for each layer, bytes by kind."""
    names = dict.fromkeys(name for of_layer in biases for name in of_layer)
    return tuple(SlotKind(name, max(b.get(name, 0) for b in biases), 4, 4) for name in names)


def _stride(matrices: Collection[_Matrix]) -> int | None:
    """Return the stride in bytes that holds any of `matrices`, or None if there is none.

    The stride is a whole number of blocks of every type.
    """
    largest = max(matrix.size_bytes for matrix in matrices)
    blocks = math.lcm(*(matrix.block_bytes for matrix in matrices))
    if len(matrices) > 1 and any(matrix.is_overrun for matrix in matrices):
        return None
    if largest % blocks == 0:
        return largest  # no padding, so that one copy can take several neighbouring experts
    for unit, most in ((math.lcm(blocks, ALIGNMENT_BYTES), _LITTLE), (blocks, 4 * _LITTLE)):
        stride = -(-largest // unit) * unit
        if stride - largest <= most * largest:
            return stride
    return None


def _block_bytes(weight: TensorEntry) -> int:
    """Return the bytes of one block of the weight's type, or of one row if gguf lacks the type."""
    try:
        return int(GGML_QUANT_SIZES[GGMLQuantizationType[weight.type.upper()]][1])
    except KeyError:
        return weight.size_bytes // math.prod(weight.shape[1:])
