"""Describes layers whose experts are computed in passes, and the graph of a pass.

The nodes of a layer's experts (offload/stream/forms.py) are taken out of the graph. In their place,
each *launch* of a pass computes some pairs (offload/schedule/passes.py):

    GET_ROWS            gathers the rows of the pairs' tokens
    the form's nodes    compute each pair as a token that uses one expert, which is in a slot
    SET_ROWS            writes the results to the pairs' places in the output of down

ggml's allocator lets other nodes overwrite the tokens' rows once the first products are computed.
Passes read the rows until the last one. So rows that are overwritten are copied first, to memory of
one of the form's nodes, which nobody computes now. If that is overwritten too, they are copied to
memory of our own.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.alignment import aligned
from offload.errors import NotSupported
from offload.ggml.backend import Device, RouterIds
from offload.ggml.graph import Graph, Product
from offload.ggml.rewriting import VIEWS, SharedDim, host_copy, is_any
from offload.ggml.tensor import Buffer, Dims, Tensor, new_tensor
from offload.plan.slot_layout import SlotLayout, SlotPool
from offload.schedule.batch import most_in_range
from offload.schedule.passes import (
    Launch,
    group_size,
    is_in_passes,
    most_passes,
    ring_slots,
)
from offload.stream.forms import ExpertForm, NoForm, PairNodes, find_form, single_form
from offload.stream.slot_memory import SlotMemory, SlotViews

_SHARED_GROUPS = 8  # groups that the slots have room for, at least, if the CPU computes a part


class PassGraph:
    """Computes up to `most` pairs of one layer on the device."""

    def __init__(
        self, form: ExpertForm, inputs: Tensor, most: int, scratch: tuple[Buffer, int]
    ) -> None:
        """`inputs`: the tokens' rows, contiguous. `scratch`: memory for the rows of a launch."""
        self._form, self._inputs = form, inputs
        buffer, offset = scratch
        n_in, self._rows_per_token, _, _ = form.inputs.shape
        self._source = inputs.viewed(*_matrix(n_in, int(np.prod(inputs.shape[1:]))))
        n_out, row = form.down.node.shape[0], 4 * n_in
        tables = [new_tensor("i32", (most, 1, 1, 1), (buffer, 0)) for _ in range(2)]
        self._tokens, self._places = tables
        ids = [new_tensor("i32", (1, most, 1, 1), (buffer, 0)) for _ in range(2)]
        self._experts, self._slots = ids
        self._scales = [new_tensor("f32", (1, 1, most, 1), (buffer, 0)) for _ in form.scales]
        self.count = count = SharedDim()
        for tensors, dim in ((tables, 0), (ids, 1), (self._scales, 2)):
            for tensor in tensors:
                count.follows(tensor, dim)
        gathered = new_tensor(
            "f32", (n_in, most, 1, 1), (buffer, offset), "GET_ROWS", [self._source, self._tokens]
        )
        rows = gathered.viewed((n_in, 1, most, 1), (4, row, row, row * most), "RESHAPE")
        made = {form.inputs: count.follows(rows, 2), form.ids: self._slots}
        made |= {factor: s for (factor, _), s in zip(form.scales, self._scales, strict=True)}
        at = buffer, offset + aligned(row * most)
        twins = PairNodes(form, most, count, made, at, bias_ids=self._experts)
        n_all = int(np.prod(form.down.node.shape[1:]))
        results = twins.down.viewed(*_matrix(n_out, most), "RESHAPE")
        self._into = form.down.node.alike(*_matrix(n_out, n_all))
        self._set = self._into.computing("SET_ROWS", [results, self._places, self._into])
        count.follows(gathered, 1)
        count.follows(results, 1)
        self.sources = twins.sources[: len(form.products)]
        self.graph = Graph.of([gathered, rows, *twins.nodes, results, self._set])
        # For pairs that the CPU computes: place their results, which were copied to the device.
        self.results = twins.down
        self.placing = Graph.of([results, self._set])
        # The same if the kernel reads results and places from pinned host memory.
        self._n_read = n_read = SharedDim()
        self._read_places = new_tensor("i32", (most, 1, 1, 1), (buffer, 0))
        self._read_rows = new_tensor("f32", (n_out, most, 1, 1), (buffer, 0))
        self._set_read = self._into.computing(
            "SET_ROWS", [self._read_rows, self._read_places, self._into]
        )
        n_read.follows(self._read_places, 0)
        n_read.follows(self._read_rows, 1)
        self.placing_read = Graph.of([self._set_read])
        # For the CPU: gather tokens' rows into pinned host memory.
        self._n_wanted = n_wanted = SharedDim()
        self._wanted = new_tensor("i32", (most, 1, 1, 1), (buffer, 0))
        self._gathered = new_tensor(
            "f32", (n_in, most, 1, 1), (buffer, 0), "GET_ROWS", [self._source, self._wanted]
        )
        n_wanted.follows(self._wanted, 0)
        n_wanted.follows(self._gathered, 1)
        self.gathering = Graph.of([self._gathered])

    def tables(
        self, launch: Launch, n_used: int, first_slot: int, scales: Sequence[NDArray[np.float32]]
    ) -> NDArray[np.uint8]:
        """Return the launch's tables, each aligned. `first_slot`: the first that the nodes see.

        `scales`: factors by expert, for each of the form's scales.
        """
        n = len(launch.pairs)
        tokens = launch.pairs // n_used if self._rows_per_token == 1 else launch.pairs
        columns: list[NDArray[Any]] = [
            tokens.astype(np.int32), launch.pairs, launch.experts, launch.slots - first_slot,
            *(scale[launch.experts] for scale in scales),
        ]  # fmt: skip
        size = aligned(4 * n)
        tables = np.zeros((len(columns), size), np.uint8)
        for row, values in zip(tables, columns, strict=True):
            row[: 4 * n] = values.view(np.uint8)
        return tables.ravel()

    @property
    def rows(self) -> Tensor:
        """The tokens' rows, where they lie now."""
        self._source.lie_with(self._inputs)
        return self._source

    def point(self, n: int, tables: Buffer, offset: int) -> None:
        """Let the graph compute `n` pairs, whose tables are at an offset of a buffer."""
        for tensor in (self._tokens, self._places, self._experts, self._slots, *self._scales):
            tensor.lie_from(tables, offset)
            offset += aligned(4 * n)
        self.count.set(n)
        # The layer's own rows and results may have moved (Relocation).
        self._source.lie_with(self._inputs)
        self._find_output()

    def read_from(self, pinned: Buffer, places_at: int, rows_at: int, n: int) -> None:
        """Let `placing_read` place `n` rows, which lie in pinned memory at these offsets.

        The device must be able to read this memory by its host address.
        """
        self._read_places.lie_from(pinned, places_at)
        self._read_rows.lie_from(pinned, rows_at)
        self._n_read.set(n)
        self._find_output()

    def gather_to(self, pinned: Buffer, wanted_at: int, rows_at: int, n: int) -> None:
        """Let `gathering` write `n` tokens' rows to pinned memory.

        The rows' numbers are read from that memory, too. The device must be able to use it by its
        host address.
        """
        self._source.lie_with(self._inputs)
        self._wanted.lie_from(pinned, wanted_at)
        self._gathered.lie_from(pinned, rows_at)
        self._n_wanted.set(n)

    def _find_output(self) -> None:
        for tensor in (self._into, self._set, self._set_read):
            tensor.lie_with(self._form.down.node)


class PinnedLaunch:
    """Pinned host memory for tables of launches. A kernel brings them to the device.

    A copy would come behind all experts that the device's one engine copies ahead of the router.
    The tables' numbers are moved as if they were f32, which changes no bit.
    """

    MORE_BYTES = 64  # room for the number of the only row

    def __init__(self, tables: Buffer, pinned: Buffer) -> None:
        """`tables`: the device's memory for tables. `pinned`: as much, and `MORE_BYTES`."""
        self._tables, self._pinned = tables, pinned
        self._bytes, end = pinned.host_range.array(), tables.size_bytes
        self._bytes[end : end + 4] = 0
        self._rows = new_tensor("f32", (1, 1, 1, 1), (pinned, 0))
        first = new_tensor("i32", (1, 1, 1, 1), (pinned, end))  # the number of the only row
        self._into = new_tensor("f32", (1, 1, 1, 1), (tables, 0))
        self._set = self._into.computing("SET_ROWS", [self._rows, first, self._into])
        self._n = SharedDim()
        for tensor in (self._rows, self._into, self._set):
            self._n.follows(tensor, 0)
        self.graph = Graph.of([self._set])

    def fill(self, tables: NDArray[np.uint8], offset: int) -> None:
        """Let `graph` bring these tables to an offset of the device's memory.

        The kernel of the last layer's graph must have read its tables.
        """
        self._bytes[offset : offset + tables.nbytes] = tables
        self._n.set(tables.nbytes // 4)
        self._rows.lie_from(self._pinned, offset)
        for tensor in (self._into, self._set):
            tensor.lie_from(self._tables, offset)

    def close(self) -> None:
        self._pinned.close()


@dataclass(slots=True)
class PassStep:
    """A layer that is computed in passes. Each pass is a cut; they are numbered from `cut` on."""

    cut: int
    n_cuts: int  # most passes
    at: int  # position in the graph without the form's nodes, before which the passes run
    group: int
    pool: int
    layer: int
    form: ExpertForm
    positions: tuple[int, ...]  # positions of the form's nodes
    copied: bool  # True if the tokens' rows are copied before other nodes overwrite them
    copied_to: Tensor | None  # the node whose memory they are copied to; None: our own
    views: Mapping[str, SlotViews]  # views by kind of weight, in the order of the products
    ids: RouterIds
    n_group: int  # experts of a pass
    ring: int  # slots that experts pass through
    is_whole: bool  # True if the form has all products of the layer
    most_slots: int = field(init=False)  # most slots that kernels can be shown at once
    # Kept, because copies for the next graph begin by this step when the library has freed its
    # nodes. It does so if an adapter or a sampler is set.
    n_tokens: int = field(init=False)
    n_used: int = field(init=False)
    scales: tuple[NDArray[np.float32], ...] = ()
    graph: PassGraph | None = None
    slots_seen: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.n_used, self.n_tokens = self.form.ids.shape[:2]
        self.most_slots = _most_slots(self.form, self.most_pairs)

    def begin_at(self, cut: int) -> None:
        """Set the number of the first cut."""
        self.cut = cut

    @property
    def most_pairs(self) -> int:
        """Most pairs of a launch."""
        return self.form.pairs.most_pairs(self.n_tokens)

    @property
    def n_experts(self) -> int:
        return self.ids.n_experts

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of weight in the order of their use."""
        return tuple(self.views)

    @property
    def copied_bytes(self) -> int:
        """Bytes of our own memory that the tokens' rows are copied to."""
        inputs = self.form.inputs
        return aligned(4 * int(np.prod(inputs.shape))) if self._copies_to_own else 0

    @property
    def _copies_to_own(self) -> bool:
        return self.copied and self.copied_to is None

    def scratch_bytes(self, n_tokens: int) -> int:
        """Return the bytes of device memory for rows, in batches of up to `n_tokens`."""
        pairs = self.form.pairs
        return pairs.launch_bytes(n_tokens, copied=self._copies_to_own or pairs.may_copy)

    def tables_bytes(self, n_tokens: int) -> int:
        """Return the bytes of device memory for the tables of all launches, likewise."""
        return self.form.pairs.tables_bytes(n_tokens, self.n_cuts)

    def build(self, scratch: Buffer, device: Device) -> Tensor | None:
        """Make the pass's graph. Returns the node that copies the tokens' rows, or None.

        Raises NotSupported if the device cannot compute it.
        """
        inputs = self.form.inputs
        copy = None
        if self.copied:
            a, b, c, d = inputs.shape
            strides = 4, 4 * a, 4 * a * b, 4 * a * b * c
            copy = inputs.computing("CONT", [inputs], shape=(a, b, c, d), strides=strides)
            copy = copy.alike(at=(scratch, 0), sources=[inputs])
            if self.copied_to is not None:
                copy.lie_with(self.copied_to)
        at = scratch, self.copied_bytes
        self.graph = PassGraph(self.form, copy or inputs, self.most_pairs, at)
        for node in self.graph.graph.nodes():
            if not device.supports(node):
                raise NotSupported(
                    f"{device.name} cannot compute {node.name or 'a node'} of layer {self.layer}'s "
                    "experts in passes over groups of them; raise --vram so that all of a layer's "
                    "experts fit, or raise --min-batch so that the CPU computes them"
                )
        self.scales = tuple(host_copy(weight) for _, weight in self.form.scales)
        return copy


def _matrix(n: int, n_rows: int) -> tuple[Dims, Dims]:
    """Return the shape and the strides of `n_rows` rows of `n` numbers, without gaps."""
    row = 4 * n
    return (n, n_rows, 1, 1), (4, row, row * n_rows, row * n_rows)


def find_passes(
    graph: Graph,
    products: Sequence[Product],
    layout: SlotLayout,
    memories: Sequence[SlotMemory],
    shares: Callable[[SlotPool, int], bool],
) -> list[PassStep]:
    """Return steps for the layers that are computed in passes.

    `shares(pool, n_tokens)`: True if the CPU should compute a part of layers with such slots. The
    steps' cuts are not numbered yet.
    """
    places = layout.places()
    members: dict[tuple[int, Tensor], list[Product]] = {}
    for product in products:
        number, _ = places[product.weight.name]
        pool = layout.pools[layout.groups[number].pool]
        if product.ids is not None and _is_in_passes(pool, product.n_tokens, shares):
            members.setdefault((number, product.ids), []).append(product)
    steps: list[PassStep] = []
    for (number, ids), of_layer in members.items():
        group = layout.groups[number]
        pool, memory = layout.pools[group.pool], memories[group.pool]
        n_group = int(group_size(pool.n_experts, pool.n_slots, pool.slot_bytes))
        if shares(pool, of_layer[0].n_tokens):
            # Smaller groups leave slots beside the ring. The experts there need no copy, and the
            # CPU none of their pairs.
            n_group = max(1, min(n_group, pool.n_slots // _SHARED_GROUPS))
        for form in forms_of(graph, of_layer):
            positions = _positions(graph, form)
            copied = _is_overwritten(graph, form, positions)
            kinds = [(places[product.weight.name][1], product.weight) for product in form.products]
            step = PassStep(
                cut=0,
                n_cuts=most_passes(pool.n_experts, n_group),
                at=positions[-1],
                group=number,
                pool=group.pool,
                layer=group.layer,
                form=form,
                positions=positions,
                copied=copied,
                copied_to=_free_node(graph, form, positions) if copied else None,
                views={kind: memory.views(kind, weight) for kind, weight in kinds},
                ids=RouterIds(ids, pool.n_experts),
                n_group=n_group,
                ring=int(ring_slots(pool.n_experts, pool.n_slots, n_group)),
                is_whole=len(form.products) == len(group.names),
            )
            steps.append(step)
    return steps


def _is_in_passes(pool: SlotPool, n_tokens: int, shares: Callable[[SlotPool, int], bool]) -> bool:
    if pool.n_slots >= pool.most_slots:
        return False  # each expert has its own slot, or kernels cannot count more slots
    in_passes = bool(is_in_passes(n_tokens, pool.n_used, pool.n_experts, pool.n_slots))
    return in_passes or shares(pool, n_tokens)


def without_forms(
    graph: Graph, steps: Sequence[PassStep], scratch: Buffer, device: Device
) -> Graph:
    """Return the graph without the forms' nodes, but with those that copy tokens' rows.

    Builds the steps' graphs in `scratch`, and sets the steps' positions in the new graph.
    """
    gone = sorted(position for step in steps for position in step.positions)
    copies: dict[int, Tensor] = {}
    for step in steps:
        copy = step.build(scratch, device)
        if copy is not None:
            copies[step.positions[0]] = copy
    kept = [position for position in gone if position in copies]
    for step in steps:
        end = step.positions[-1]
        step.at = end - bisect.bisect_left(gone, end) + bisect.bisect_left(kept, end)
    return graph.replacing(copies, gone)


def forms_of(graph: Graph, products: Sequence[Product]) -> list[ExpertForm]:
    """Return the forms of one layer's products: a single one if the nodes between allow it.

    Otherwise each product has a form of its own, and experts are copied again for each form. Raises
    NoForm if not even that is possible.
    """
    try:
        return [find_form(graph, products)]
    except NoForm:
        return [single_form(product) for product in products]


def _positions(graph: Graph, form: ExpertForm) -> tuple[int, ...]:
    """Return the positions of the form's nodes in the graph, ascending."""
    position_of = graph.positions()
    positions = [position_of(node) for node in form.nodes]
    return tuple(sorted(position for position in positions if position is not None))


def _is_overwritten(graph: Graph, form: ExpertForm, positions: Sequence[int]) -> bool:
    """True if the tokens' rows have to be copied, because they are overwritten or not contiguous.

    Nodes between the form's first node and its last one are computed before the passes.
    """
    inputs = form.inputs
    if not inputs.is_contiguous:
        return True
    written = _written(graph, form, positions)
    return any(node != inputs and node.overlaps(inputs) for node in written)


def _free_node(graph: Graph, form: ExpertForm, positions: Sequence[int]) -> Tensor | None:
    """Return a node of the form whose memory can hold the tokens' rows until the last pass.

    ggml may have given a node memory that others need until it is computed: the rows are copied at
    the form's first node, which may be earlier. Returns None if there is no such node.
    """
    size_bytes = 4 * int(np.prod(form.inputs.shape))
    others = [*_written(graph, form, positions), *_read(graph, form, positions), form.inputs]
    for node in form.nodes[:-1]:
        is_large = node.size_bytes >= size_bytes and not is_any(node, VIEWS)
        if is_large and not any(node.overlaps(other) for other in others):
            return node
    return None


def _written(graph: Graph, form: ExpertForm, positions: Sequence[int]) -> list[Tensor]:
    """Return the nodes that write while a layer's rows are needed: down, and those between."""
    own, nodes = set(positions), graph.nodes()
    between = range(positions[0], positions[-1])
    written = [nodes[i] for i in between if i not in own and not is_any(nodes[i], VIEWS)]
    return [*written, form.down.node]


def _read(graph: Graph, form: ExpertForm, positions: Sequence[int]) -> list[Tensor]:
    """Return what nodes read while a layer's rows are needed, except results of the form's own."""
    own, nodes = set(form.nodes), graph.nodes()
    between = nodes[positions[0] : positions[-1] + 1]
    return [source for node in between for source in node.sources if source not in own]


def _most_slots(form: ExpertForm, n_pairs: int) -> int:
    limits = []
    for product in form.products:
        n_rows, (block_bytes, row_bytes, _, _) = product.weight.shape[1], product.weight.strides
        limits.append(most_in_range(n_rows, row_bytes // block_bytes, n_pairs))
    return min(limits)
