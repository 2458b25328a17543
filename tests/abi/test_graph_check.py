"""A worker computes only graphs that write to the client's memory. Everything else is refused."""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from offload.errors import GraphRefused
from offload.ggml.graph import Graph
from offload.ggml.hostbuffer import CpuBufferType
from offload.ggml.library import abi
from offload.ggml.library.lib import library, op_number
from offload.ggml.node_table import NodeTable, TensorForm
from offload.ggml.tensor import Buffer, Tensor, new_tensor
from offload.worker.graph_check import check_graph
from offload.worker.ids import check_ids

WEIGHT = "blk.0.ffn_up.weight"


def struct_of(tensor: Tensor) -> Any:
    return abi.ggml_tensor.from_address(tensor.address)


@dataclass
class Case:
    """A graph like a client's: y = weight x, then z = y + y, and a view of the weight."""

    buffer: Buffer
    ours: Tensor
    x: Tensor
    weight: Tensor
    part: Tensor
    y: Tensor
    z: Tensor

    def check(self, streamed: Sequence[str] = ()) -> dict[int, str]:
        table = NodeTable(Graph.of([self.part, self.y, self.z]))
        rows, _ = check_graph(table, {WEIGHT: TensorForm.of(self.ours)}, streamed)
        return {int(table.addresses[row]): name for row, name in rows.items()}


@pytest.fixture
def case() -> Iterator[Case]:
    buffer = Buffer(CpuBufferType().address, 1 << 16, "the client")
    ours = new_tensor("q8_0", (64, 32, 1, 1), None, name=WEIGHT)
    weight = new_tensor("q8_0", (64, 32, 1, 1), None, name=WEIGHT)
    x = new_tensor("f32", (64, 4, 1, 1), (buffer, 0), name="x")
    part = new_tensor("q8_0", (64, 16, 1, 1), None, "VIEW", [weight], name="part")
    view = struct_of(part)
    view.view_src, view.view_offs = weight.address, 16 * 68
    y = new_tensor("f32", (32, 4, 1, 1), (buffer, 4096), "MUL_MAT", [weight, x], name="y")
    z = new_tensor("f32", (32, 4, 1, 1), (buffer, 8192), "ADD", [y, y], name="z")
    yield Case(buffer, ours, x, weight, part, y, z)
    buffer.close()


def test_a_graph_like_a_client_s_is_computed(case: Case) -> None:
    assert case.check() == {case.weight.address: WEIGHT}


@pytest.mark.parametrize("name", ["part", WEIGHT, "blk.1.ffn_up.weight"])
def test_a_product_reads_a_streamed_weight_whole(case: Case, name: str) -> None:
    """The device finds slots by the name of the tensor that a product reads."""
    assert case.check(streamed=[WEIGHT])
    struct_of(case.part).name = name.encode()
    struct_of(case.y).src[0] = case.part.address
    for result in map(struct_of, (case.y, case.z)):  # results with 16 rows of the weight
        result.ne[0], result.nb[1], result.nb[2], result.nb[3] = 16, 64, 256, 256
    assert case.check() == {case.weight.address: WEIGHT}
    with pytest.raises(GraphRefused, match=r"y \(MUL_MAT\) multiplies with a part of a weight"):
        case.check(streamed=[WEIGHT])


@pytest.fixture
def biased(case: Case) -> Callable[..., Callable[[], Any]]:
    """Returns a function that adds biases to `case`'s product, and returns the graph's check."""

    def add(biases: Tensor, *known: Tensor, chosen: bool = True) -> Callable[[], Any]:
        ours = new_tensor("q8_0", (64, 32, 8, 1), None, name=WEIGHT)
        weight = new_tensor("q8_0", (64, 32, 8, 1), None, name=WEIGHT)
        scores = new_tensor("f32", (8, 1, 1, 1), (case.buffer, 16384), name="scores")
        op, sources = ("ARGSORT", [scores]) if chosen else ("NONE", [])
        ids = new_tensor("i32", (8, 1, 1, 1), (case.buffer, 20480), op, sources, name="ids")
        few = ids.viewed((4, 1, 1, 1), ids.strides, op="VIEW")
        sorted_ids = new_tensor("i32", (8, 1, 1, 1), (case.buffer, 28672), "ARGSORT", [scores])
        own = sorted_ids.viewed((4, 1, 1, 1), sorted_ids.strides, op="VIEW")
        x = new_tensor("f32", (64, 1, 1, 1), (case.buffer, 0), name="x")
        product = new_tensor("f32", (32, 4, 1, 1), (case.buffer, 4096), "MUL_MAT_ID",
                             [weight, x, own])  # fmt: skip
        total = new_tensor("f32", (32, 4, 1, 1), (case.buffer, 8192), "ADD_ID",
                           [product, biases, few])  # fmt: skip
        nodes = [*([ids] if chosen else []), few, sorted_ids, own, product, total]
        weights = {WEIGHT: TensorForm.of(ours), **{one.name: TensorForm.of(one) for one in known}}
        table = NodeTable(Graph.of(nodes))
        return partial(check_graph, table, weights, [WEIGHT])

    return add


def bias_like(name: str, *, type_name: str = "f32", n: int = 32, n_experts: int = 8) -> Tensor:
    return new_tensor(type_name, (n, n_experts, 1, 1), None, name=name)


BIAS = WEIGHT.removesuffix("weight") + "bias"


@pytest.mark.parametrize(
    ("name", "is_taken"), [("bias", True), ("x", False), ("blk.1.ffn_up.bias", False)]
)
def test_slots_get_the_biases_of_their_own_weight(
    name: str, is_taken: bool, case: Case, biased: Callable[..., Callable[[], Any]]
) -> None:
    """Slots keep the first graph's biases for all later clients."""
    biases = bias_like(BIAS if name == "bias" else name)
    if name == "x":
        biases = new_tensor("f32", (32, 8, 1, 1), (case.buffer, 12288), name=BIAS)
    check = biased(biases, bias_like(BIAS), bias_like("blk.1.ffn_up.bias"))
    if is_taken:
        assert BIAS in check()[0].values()
        return
    with pytest.raises(GraphRefused, match="adds other biases than those of the weight"):
        check()


@pytest.mark.parametrize("n_experts", [4, 16])
def test_biases_have_one_row_for_each_expert(
    n_experts: int, biased: Callable[..., Callable[[], Any]]
) -> None:
    """Slots have room for one row. A worker's own file may have others."""
    own = bias_like(BIAS, n_experts=n_experts)
    with pytest.raises(GraphRefused, match="one row of floats for each expert|out of range"):
        biased(own, bias_like(BIAS, n_experts=n_experts))()


def test_a_client_s_biases_have_the_worker_s_rows(
    biased: Callable[..., Callable[[], Any]],
) -> None:
    with pytest.raises(GraphRefused, match="another type or shape than this worker's weight"):
        biased(bias_like(BIAS, n_experts=16), bias_like(BIAS))()


def test_numbers_of_biases_are_in_range(
    biased: Callable[..., Callable[[], Any]],
) -> None:
    """GPUs do not check them."""
    assert biased(bias_like(BIAS), bias_like(BIAS))()
    with pytest.raises(GraphRefused, match=r"\(ADD_ID\) reads numbers of experts or rows"):
        biased(bias_like(BIAS), bias_like(BIAS), chosen=False)()


def no_memory(case: Case) -> None:
    struct_of(case.y).data = struct_of(case.y).buffer = None


def write_to_weight(case: Case) -> None:
    no_memory(case)
    node = struct_of(case.y)
    node.op, node.view_src = op_number("CPY"), case.weight.address
    node.src[0], node.src[1] = case.x.address, case.weight.address


def in_place(case: Case) -> None:
    node = struct_of(case.z)
    node.data = node.buffer = None
    node.view_src = case.weight.address


def set_field(of: str, field: str, value: Any) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        setattr(struct_of(getattr(case, of)), field, value)

    return change


def set_dim(of: str, field: str, index: int, value: int) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        getattr(struct_of(getattr(case, of)), field)[index] = value

    return change


def view_of_view(case: Case) -> None:
    view = struct_of(case.z)
    view.op, view.view_src, view.data, view.buffer = (
        op_number("VIEW"),
        case.part.address,
        None,
        None,
    )


def call_a_function(case: Case) -> None:
    struct_of(case.z).op = op_number("MAP_CUSTOM1")


def unknown_weight(case: Case) -> None:
    struct_of(case.weight).name = b"blk.9.\x1b[2J"
    struct_of(case.part).src[0] = struct_of(case.part).view_src = None


def outside(case: Case) -> None:
    struct_of(case.z).data = case.buffer.base + case.buffer.size_bytes - 8


def overlapping(case: Case) -> None:
    struct_of(case.z).nb[1] = 0


def wrapping(case: Case) -> None:
    node = struct_of(case.z)
    node.ne[1], node.nb[1] = 1 << 32, 1 << 32


def elsewhere(case: Case) -> None:
    """A view that claims to lie in x, and lies elsewhere in the client's buffer."""
    struct_of(case.z).view_src = case.x.address


def empty_without_source(case: Case) -> None:
    """ggml plans its threads by the sources' types, which must be there for empty results, too."""
    struct_of(case.z).ne[1], struct_of(case.z).src[1] = 0, None


def empty_with(of: str, op: str | int) -> Callable[[Case], None]:
    """A result without elements, of another operation."""

    def change(case: Case) -> None:
        node = struct_of(getattr(case, of))
        node.ne[1], node.op = 0, op if isinstance(op, int) else op_number(op)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (write_to_weight, f"y (CPY) would write to the weight {WEIGHT}"),
        (in_place, f"z (ADD) would write to the weight {WEIGHT}"),
        (set_field("part", "view_offs", 17 * 68), "part (VIEW) is a view that reaches beyond"),
        (set_field("part", "view_offs", (1 << 64) - 68), "part (VIEW) is a view that reaches"),
        (set_dim("part", "nb", 1, 680), "part (VIEW) is a view that reaches beyond"),
        (view_of_view, "z (VIEW) is a view of a view"),
        (elsewhere, "z (ADD) does not lie in what it views"),
        (set_field("weight", "type", 0), "has another type or shape than this worker's weight"),
        (set_dim("weight", "ne", 1, 64), "has another type or shape than this worker's weight"),
        (set_dim("weight", "nb", 1, 4), "has another type or shape than this worker's weight"),
        (set_field("z", "type", 77), "z (ADD) has an unknown type"),
        (no_memory, "y (MUL_MAT) has no memory for its result"),
        (unknown_weight, "it reads blk.9.?[2J, which is not among this worker's layers"),
        (outside, "z (ADD) lies outside its buffer"),
        (overlapping, "z (ADD) has strides with which its elements overlap"),
        (wrapping, "z (ADD) is larger than any memory"),
        (call_a_function, "z (MAP_CUSTOM1) is no operation of clients' graphs"),
        (set_field("z", "op", 1 << 20), "z (operation 1048576) is no operation of ggml"),
        (set_field("z", "op", -1), "z (operation -1) is no operation of ggml"),
        (set_field("x", "op", 1 << 20), "x (operation 1048576) is no operation of ggml"),
        (empty_with("z", "MAP_CUSTOM1"), "z (MAP_CUSTOM1) is no operation of clients' graphs"),
        (empty_with("z", 1 << 20), "z (operation 1048576) is no operation of ggml"),
        (set_dim("y", "ne", 0, 31), "(ADD) does not fit"),
        (set_dim("x", "ne", 0, 63), "y (MUL_MAT) does not fit"),
        (set_field("y", "type", 1), "(ADD) does not fit"),
        (set_dim("z", "ne", 1, 5), "z (ADD) does not fit"),
        (set_dim("y", "src", 1, None), "y (MUL_MAT) lacks a source"),
        (empty_without_source, "z (ADD) lacks a source"),
    ],
)
def test_a_graph_that_reaches_elsewhere_is_refused(
    change: Callable[[Case], None], said: str, case: Case
) -> None:
    change(case)
    with pytest.raises(GraphRefused) as refused:
        case.check()
    assert said in str(refused.value)


def test_a_name_is_shown_without_blanks_at_its_ends(case: Case) -> None:
    """Views of tensors without a name begin with one: " (reshaped)"."""
    struct_of(case.z).name = b" (reshaped)"
    struct_of(case.z).type = 1
    with pytest.raises(GraphRefused, match=r"^\(reshaped\) \(ADD\) "):
        case.check()


def test_an_empty_place_among_the_nodes_is_refused(case: Case) -> None:
    graph = Graph.of([case.y, case.z])
    address = abi.ggml_cgraph.from_address(graph.address).nodes
    C.c_void_p.from_address(address).value = None
    with pytest.raises(GraphRefused, match="empty place"):
        NodeTable(graph)


def test_nodes_are_computed_once_and_after_their_sources(case: Case) -> None:
    """The engine changes sources by a node's place. A changed graph left a copy without one."""
    nodes = [case.part, case.y, case.z]
    for wrong, said in (
        ([*nodes, case.y], "y (MUL_MAT) is computed twice"),
        ([case.part, case.z, case.y], "z (ADD) is computed before its source"),
    ):
        with pytest.raises(GraphRefused) as refused:
            check_graph(NodeTable(Graph.of(wrong)), {WEIGHT: TensorForm.of(case.ours)})
        assert said in str(refused.value)


@pytest.mark.parametrize(("at", "is_refused"), [(0, False), (64, True), (1024, False), (-64, True)])
def test_a_copy_lies_where_its_source_lies_or_elsewhere(
    at: int, is_refused: bool, case: Case
) -> None:
    """ggml copies with memcpy, whose ranges must not overlap."""
    copy = new_tensor("f32", (64, 4, 1, 1), (case.buffer, 20480 + at), "CONT", name="copy")
    source = new_tensor("f32", (64, 4, 1, 1), (case.buffer, 20480), name="source")
    struct_of(copy).src[0] = source.address
    table = NodeTable(Graph.of([copy]))
    if not is_refused:
        check_graph(table, {})
        return
    with pytest.raises(GraphRefused, match=r"copy \(CONT\) overlaps what it copies"):
        check_graph(table, {})


@pytest.mark.parametrize("op", ["CPY", "CONT"])
def test_only_a_cast_has_itself_as_its_destination(op: str, case: Case) -> None:
    """ggml_cast makes such a node. MiniMax-M3 and DFlash2 turn integers into floats by it."""
    numbers = new_tensor("i32", (64, 4, 1, 1), (case.buffer, 0), name="numbers")
    cast = new_tensor("f32", (64, 4, 1, 1), (case.buffer, 4096), op, [numbers], name="cast")
    struct_of(cast).src[1] = cast.address
    table = NodeTable(Graph.of([cast]))
    if op == "CPY":
        check_graph(table, {})
        struct_of(cast).src[0] = cast.address
        table = NodeTable(Graph.of([cast]))
    with pytest.raises(GraphRefused, match=r"cast \(\w+\) is computed before its source"):
        check_graph(table, {})


def test_a_cycle_of_sources_ends(case: Case) -> None:
    struct_of(case.y).src[1] = case.z.address
    with pytest.raises(GraphRefused, match="does not fit"):
        case.check()
    struct_of(case.x).src[0] = case.x.address
    assert len(NodeTable(Graph.of([case.z]))) > 0


def test_results_in_a_row_of_a_table_are_found_by_address(case: Case) -> None:
    table = NodeTable(Graph.of([case.z, case.y]))
    row = int(np.flatnonzero(table.addresses == case.y.address)[0])
    assert table.name(row) == "y"
    assert table.addresses[table.sources[row, 0]] == case.weight.address
    assert table.sources[row, 2] == -1


@pytest.mark.parametrize(
    ("change", "is_refused"),
    [("", False), ("input", True), ("overwritten", True), ("more numbers", True)],
)
def test_numbers_of_experts_are_in_range(change: str, is_refused: bool, case: Case) -> None:
    """ggml-cpu counts rows by these numbers in a list, and does not check them."""
    at = case.buffer
    experts = new_tensor("f32", (4, 2, 8, 1), (at, 16384), name="experts")
    n_scores = 9 if change == "more numbers" else 8
    scores = new_tensor("f32", (n_scores, 3, 1, 1), (at, 20480), name="scores")
    rows = new_tensor("f32", (4, 1, 3, 1), (at, 24576), name="rows")
    op, sources = ("NONE", []) if change == "input" else ("ARGSORT", [scores])
    chosen = new_tensor("i32", (n_scores, 3, 1, 1), (at, 28672), op, sources, name="chosen")
    few = chosen.viewed((2, 3, 1, 1), chosen.strides, op="VIEW")
    other = new_tensor("f32", (8, 3, 1, 1), (at, 28672 + 64), "SQR", [scores], name="other")
    struct_of(scores).ne[0] = n_scores
    product = new_tensor("f32", (2, 2, 3, 1), (at, 32768), "MUL_MAT_ID", [experts, rows, few])
    between = [other] if change == "overwritten" else []
    table = NodeTable(Graph.of([chosen, few, *between, product]))
    if not is_refused:
        check_graph(table, {})
        return
    with pytest.raises(GraphRefused, match="numbers of experts or rows that may be out"):
        check_graph(table, {})


def scan(case: Case, *, n_states: int = 2, ids: list[int]) -> Any:
    """A scan of two sequences that read the states `ids`, which are the client's data."""
    at, shapes = case.buffer, [
        (8, 4, 2, n_states), (4, 2, 3, 2), (2, 3, 2, 1), (1, 2, 1, 1), (8, 1, 3, 2), (8, 1, 3, 2),
    ]  # fmt: skip
    sources = [
        new_tensor("f32", shape, (at, 4096 * i), name=f"s{i}") for i, shape in enumerate(shapes)
    ]
    numbers = new_tensor("i32", (2, 1, 1, 1), (at, 32768), name="ids")
    values = ctypes_of(ids)
    C.memmove(numbers.position, values, 8)
    end = 4 * 2 * 3 * 2 + 8 * 4 * 2 * 2
    node = new_tensor("f32", (end, 1, 1, 1), (at, 36864), "SSM_SCAN", [*sources, numbers])
    struct_of(node).op_params[0] = 1
    return node, check_graph(NodeTable(Graph.of([node])), {})[1]


def ctypes_of(ids: list[int]) -> Any:
    return (C.c_int32 * len(ids))(*ids)


@pytest.mark.parametrize("ids", [[0, -300], [10**8, 0], [0, 2]])
def test_states_that_do_not_exist_are_refused_before_the_graph_computes(
    case: Case, ids: list[int]
) -> None:
    node, ranges = scan(case, ids=[1, 0])
    check_ids(ranges)
    node, ranges = scan(case, ids=ids)
    assert node.is_op("SSM_SCAN"), "a tensor lives as long as its graph"
    with pytest.raises(GraphRefused, match=r"'ids' has the number -?\d+, and numbers from 0 to 1"):
        check_ids(ranges)


def test_rows_of_a_client_s_data_are_in_range(case: Case) -> None:
    """GPUs do not check them, so the data is copied back before each computation."""
    source = new_tensor("f32", (4, 5, 1, 1), (case.buffer, 0), name="rows")
    numbers = new_tensor("i32", (2, 1, 1, 1), (case.buffer, 4096), name="numbers")
    node = new_tensor("f32", (4, 2, 1, 1), (case.buffer, 8192), "GET_ROWS", [source, numbers])
    ranges = check_graph(NodeTable(Graph.of([node])), {})[1]
    assert [one.limit for one in ranges] == [5]
    for value, is_there in ((0, True), (4, True), (5, False), (-1, False)):
        C.memmove(numbers.position, ctypes_of([0, value]), 8)
        if is_there:
            check_ids(ranges)
            continue
        with pytest.raises(GraphRefused, match="numbers from 0 to 4 exist"):
            check_ids(ranges)


def test_no_node_overwrites_checked_numbers(case: Case) -> None:
    source = new_tensor("f32", (4, 5, 1, 1), (case.buffer, 0), name="rows")
    numbers = new_tensor("i32", (2, 1, 1, 1), (case.buffer, 4096), name="numbers")
    writer = new_tensor("f32", (4, 5, 1, 1), (case.buffer, 4096), "SQR", [source], name="writer")
    own = new_tensor("f32", (4, 2, 1, 1), (case.buffer, 4096), "GET_ROWS", [source, numbers])
    late = new_tensor("f32", (4, 2, 1, 1), (case.buffer, 8192), "GET_ROWS", [source, numbers])
    check_graph(NodeTable(Graph.of([late, writer])), {})
    for nodes in ([writer, late], [own]):
        with pytest.raises(GraphRefused, match="that may be out of range"):
            check_graph(NodeTable(Graph.of(nodes)), {})


def test_equal_addresses_in_two_buffers_are_two_places(case: Case) -> None:
    """All buffers of ggml's Vulkan backend begin at the same address."""
    lib = library()
    other = lib.ggml_backend_cpu_buffer_from_ptr(case.buffer.base, case.buffer.size_bytes)
    source = new_tensor("f32", (4, 5, 1, 1), (case.buffer, 0), name="rows")
    numbers = new_tensor("i32", (2, 1, 1, 1), (case.buffer, 4096), name="numbers")
    writer = new_tensor("f32", (4, 5, 1, 1), (case.buffer, 4096), "SQR", [source], name="writer")
    late = new_tensor("f32", (4, 2, 1, 1), (case.buffer, 8192), "GET_ROWS", [source, numbers])
    struct_of(writer).buffer = other
    check_graph(NodeTable(Graph.of([writer, late])), {})
    lib.ggml_backend_buffer_free(other)


def test_a_product_with_a_hadamard_matrix_has_a_square_one(case: Case) -> None:
    """ggml-cpu writes rows as long as its input's, whatever the matrix's size."""
    for n_rows, is_taken in ((64, True), (32, False)):
        matrix = new_tensor("f32", (64, n_rows, 1, 1), (case.buffer, 0), name="matrix")
        rows = new_tensor("f32", (64, 4, 1, 1), (case.buffer, 20480), name="rows")
        node = new_tensor("f32", (n_rows, 4, 1, 1), (case.buffer, 24576), "MUL_MAT", [matrix, rows])
        check_graph(NodeTable(Graph.of([node])), {})
        struct_of(node).op_params[1] = 1
        if is_taken:
            check_graph(NodeTable(Graph.of([node])), {})
            continue
        with pytest.raises(GraphRefused, match="does not fit the types, shapes and parameters"):
            check_graph(NodeTable(Graph.of([node])), {})


# -- block drafts ----------------------------------------------------------------------------------


def place_of_largest(
    case: Case, *, n_values: int = 32, op: str = "GET_ROWS", type_name: str = "f32"
) -> Callable[[], Any]:
    """The check of a graph that uses the place of each row's largest value as a number of a row."""
    x = new_tensor("f32", (n_values, 4, 1, 1), (case.buffer, 0), name="x")
    place = new_tensor("i32", (4, 1, 1, 1), (case.buffer, 4096), "ARGMAX", [x], name="place")
    table = new_tensor(type_name, (16, 32, 1, 1), (case.buffer, 8192), name="table")
    if op == "GET_ROWS":
        where, sources = (case.buffer, 16384), [table, place]
        result = new_tensor(type_name, (16, 4, 1, 1), where, op, sources, name="result")
    else:
        rows = new_tensor("f32", (16, 4, 1, 1), (case.buffer, 16384), name="rows")
        result = table.viewed(table.shape, table.strides, op=op)
        struct_of(result).src[0], struct_of(result).src[1] = rows.address, place.address
    return partial(check_graph, NodeTable(Graph.of([place, result])), {})


def test_the_place_of_the_largest_value_is_a_row_that_may_be_read(case: Case) -> None:
    """CUDA gives -1 for NaNs and -inf: no place to write to, nor a row's number, is read there."""
    place_of_largest(case)()
    for wrong in (
        place_of_largest(case, n_values=33),
        place_of_largest(case, op="SET_ROWS"),
        place_of_largest(case, type_name="i32"),
    ):
        with pytest.raises(GraphRefused, match="reads numbers of experts or rows"):
            wrong()


@pytest.mark.parametrize(
    ("params", "shape", "is_taken"),
    [
        ({2: 2}, (8, 6, 1, 1), True),  # two zeros before the second dimension
        ({0: 1, 1: 3, 3: 1}, (12, 5, 1, 1), True),
        ({2: 2}, (8, 5, 1, 1), False),
        ({2: 2}, (8, 7, 1, 1), False),
        ({2: -1, 3: 3}, (8, 6, 1, 1), False),
        ({2: 2, 8: 1}, (8, 6, 1, 1), False),  # circular
    ],
)
def test_zeros_around_a_tensor_are_as_many_as_the_result_has(
    params: dict[int, int], shape: tuple[int, int, int, int], is_taken: bool, case: Case
) -> None:
    x = new_tensor("f32", (8, 4, 1, 1), (case.buffer, 0), name="x")
    padded = new_tensor("f32", shape, (case.buffer, 4096), "PAD", [x], name="padded")
    for index, value in params.items():
        struct_of(padded).op_params[index] = value
    table = NodeTable(Graph.of([padded]))
    if is_taken:
        check_graph(table, {})
        return
    with pytest.raises(GraphRefused, match=r"padded \(PAD\) does not fit"):
        check_graph(table, {})
