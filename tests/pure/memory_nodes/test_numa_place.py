"""Pages are on the node that reads them, for at least 97 % of the bytes of each weight."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numa_models import model_weights, packed
from numa_trees import topology_of

from numa.errors import NoSuchNode, PlacementRefused
from numa.place import (
    HUGE_PAGE_BYTES,
    PAGE_BYTES,
    Candidate,
    NodeRange,
    NodeRead,
    PlacedWeight,
    Placement,
    Strategy,
    fit_memory,
    node_reads,
    place_rows,
    place_whole,
    placement_for,
    with_huge_pages,
)
from numa_vm_check import locality
from offload.threads.numa_plan import make_numa_plan

MODELS = ["DeepSeek-R1", "Kimi-K2", "GLM-4.6"]
GIB = 1 << 30
# Weights whose part per head and thread is smaller than a page. They are 18 MB of a layer.
HEAD_WEIGHTS = {"attn_k_b", "attn_v_b"}


def by_node(n_nodes: int, threads_per_node: int) -> tuple[int, ...]:
    return tuple(n for n in range(n_nodes) for _ in range(threads_per_node))


@pytest.mark.parametrize("n_nodes", [2, 4, 8])
@pytest.mark.parametrize(("quant", "threads_per_node"), [("q4_k", 7), ("iq2_xxs", 8), ("q8_0", 8)])
@pytest.mark.parametrize("model", MODELS)
def test_every_weight_is_read_locally_with_small_pages_and_with_huge_ones_where_they_fit(
    model: str, quant: str, n_nodes: int, threads_per_node: int
) -> None:
    placed, size_bytes = packed(model_weights(model, quant))
    team = by_node(n_nodes, threads_per_node)
    small = place_rows(size_bytes, placed.values(), team)
    huge = with_huge_pages(small)
    for name, weight in placed.items():
        wanted = node_reads([weight], team)
        floor = 0.85 if name in HEAD_WEIGHTS else 0.97
        assert locality(small, wanted) >= floor, name
        assert locality(huge, wanted) >= floor, name
    whole = node_reads(placed.values(), team)
    assert locality(small, whole) >= 0.99
    assert locality(huge, whole) >= 0.99


def huge_share(placement: Placement) -> float:
    return sum(b - a for a, b in placement.huge) / placement.size_bytes


@pytest.mark.parametrize("n_nodes", [2, 4, 8])
@pytest.mark.parametrize("model", MODELS)
def test_the_table_in_the_documentation_is_what_is_computed(model: str, n_nodes: int) -> None:
    """The table in docs/numa.md is for Q4_K, eight threads per node and one token."""
    placed, size_bytes = packed(model_weights(model, "q4_k"))
    team = by_node(n_nodes, 8)
    wanted = node_reads(placed.values(), team)
    small = place_rows(size_bytes, placed.values(), team)
    fitted = with_huge_pages(small)
    below = [
        f"`{name}` {share:.1%}"
        for name, weight in placed.items()
        if (share := locality(small, node_reads([weight], team))) < 0.97
    ]
    shares = [f"{locality(p, wanted):.2%}" for p in (small, fitted)]
    cells = [model, str(n_nodes), *shares, f"{huge_share(fitted):.0%}", ", ".join(below) or "none"]
    document = (Path(__file__).parents[3] / "docs" / "numa.md").read_text()
    assert "| " + " | ".join(cells) + " |" in document


def test_single_is_all_or_nothing_and_interleave_half_for_two_nodes() -> None:
    weight = PlacedWeight(0, 4096, 4096)
    wanted, size = node_reads([weight], by_node(2, 4)), weight.size_bytes
    assert locality(place_whole(Strategy.SINGLE, size, [0]), wanted) == pytest.approx(0.5)
    on_one = place_whole(Strategy.SINGLE, size, [1])
    assert locality(on_one, node_reads([weight], (1,) * 8)) == 1.0
    for n_nodes in (2, 4):
        spread = place_whole(Strategy.INTERLEAVE, size, range(n_nodes))
        assert locality(spread, wanted) == pytest.approx(1 / n_nodes)


def test_heads_go_to_threads_whole_once_they_outnumber_rows() -> None:
    # ggml divides the activations, because nr0 (128 rows) is not above nr1 (1 token x 128 heads).
    found = node_reads([PlacedWeight(0, 128, 544, 128)], range(64))
    assert [(r.start_bytes, r.stop_bytes) for r in found[:2]] == [(0, 139264), (139264, 278528)]


@given(
    st.integers(0, 9999), st.integers(1, 400), st.integers(1, 5), st.integers(1, 70), st.booleans()
)
def test_the_reads_are_disjoint_and_cover_the_weight(
    offset: int, n_rows: int, n_matrices: int, n_threads: int, routed: bool
) -> None:
    weight = PlacedWeight(offset, n_rows, 18, n_matrices, routed)
    found = node_reads([weight], range(n_threads))
    assert found[0].start_bytes == offset
    assert all(a.stop_bytes == b.start_bytes for a, b in zip(found, found[1:], strict=False))
    assert found[-1].stop_bytes == offset + weight.size_bytes


def check(placement: Placement) -> None:
    """Check that ranges cover the memory without gaps, in whole pages."""
    position = 0
    for r in placement.ranges:
        assert r.start_bytes == position
        assert r.start_bytes % placement.page_bytes == 0
        assert r.stop_bytes > r.start_bytes
        position = r.stop_bytes
    assert position >= placement.size_bytes
    assert all(a % HUGE_PAGE_BYTES == 0 == b % HUGE_PAGE_BYTES for a, b in placement.huge)


SHAPES = st.lists(
    st.tuples(st.integers(1, 300), st.integers(1, 900), st.integers(1, 4), st.booleans()),
    min_size=1,
    max_size=4,
)


@settings(max_examples=150)
@given(SHAPES, st.integers(1, 4), st.integers(1, 5))
def test_each_page_lies_with_its_main_reader_as_a_count_page_by_page_finds(
    shapes: list[tuple[int, int, int, bool]], n_nodes: int, threads_per_node: int
) -> None:
    named = [(str(i), PlacedWeight(0, *shape)) for i, shape in enumerate(shapes)]
    placed, size_bytes = packed(named)
    team = by_node(n_nodes, threads_per_node)
    placement = place_rows(size_bytes, placed.values(), team)
    check(placement)
    reads = node_reads(placed.values(), team)
    tally: dict[int, dict[int, int]] = {}
    for r in reads:
        for page in range(r.start_bytes // PAGE_BYTES, (r.stop_bytes - 1) // PAGE_BYTES + 1):
            n = min(r.stop_bytes, (page + 1) * PAGE_BYTES) - max(r.start_bytes, page * PAGE_BYTES)
            counts = tally.setdefault(page, {})
            counts[r.node] = counts.get(r.node, 0) + n
    best = sum(max(counts.values()) for counts in tally.values())
    total = sum(sum(counts.values()) for counts in tally.values())
    assert locality(placement, reads) == pytest.approx(best / total)


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(1, 1500), st.integers(0, 2)), min_size=1, max_size=12))
def test_huge_blocks_have_one_node_and_the_rest_stays_as_it_was(
    runs: list[tuple[int, int]],
) -> None:
    ranges: list[NodeRange] = []
    position = 0
    for n_pages, node in runs:
        stop = position + n_pages * PAGE_BYTES
        ranges.append(NodeRange(position, stop, (node,)))
        position = stop
    huge = with_huge_pages(Placement(Strategy.ROWS, position, tuple(ranges)))
    check(huge)
    for start, stop in huge.huge:
        for block in range(start, stop, HUGE_PAGE_BYTES):
            inside = [NodeRead(block, block + HUGE_PAGE_BYTES, n) for n in range(3)]
            assert max(locality(huge, [r]) for r in inside) == 1.0
    same = [NodeRead(r.start_bytes, r.stop_bytes, r.nodes[0]) for r in ranges]
    assert locality(huge, same) >= 0.98


def test_a_node_out_of_memory_sends_its_rows_to_another_and_says_so() -> None:
    weight = PlacedWeight(0, 4096, 1 << 20)
    placement = place_rows(weight.size_bytes, [weight], by_node(2, 4))
    fitted = fit_memory(placement, {0: 1 * GIB, 1: 8 * GIB})
    check(fitted)
    assert sum(r.stop_bytes - r.start_bytes for r in fitted.ranges if r.nodes == (0,)) == GIB
    assert fitted.notes == ("node 0 is out of memory: 1.00 GiB of its rows were placed on node 1",)
    assert fit_memory(placement, {0: 8 * GIB, 1: 8 * GIB}) == placement


def test_memory_larger_than_all_nodes_is_refused() -> None:
    with pytest.raises(PlacementRefused, match=r"is 2.0 GiB more than all nodes have free"):
        fit_memory(place_whole(Strategy.SINGLE, 4 * GIB, [0]), {0: GIB, 1: GIB})


def test_bytes_that_nothing_reads_follow_their_neighbour() -> None:
    weight = PlacedWeight(4 * PAGE_BYTES, 2, PAGE_BYTES)
    placement = place_rows(10 * PAGE_BYTES, [weight], (0, 1))
    assert placement.ranges == (
        NodeRange(0, 5 * PAGE_BYTES, (0,)),
        NodeRange(5 * PAGE_BYTES, 10 * PAGE_BYTES, (1,)),
    )
    assert place_rows(4096, [], (3,)).ranges == (NodeRange(0, 4096, (3,)),)


# -- a strategy's name becomes a placement and threads that fit each other ----------------------

GLM, GLM_BYTES = packed(model_weights("GLM-4.6", "q4_k"))


@pytest.mark.parametrize("tree", ["two_sockets", "two_sockets_nps4", "node_without_memory"])
@pytest.mark.parametrize("strategy", [Strategy.ROWS, Strategy.DISTRIBUTE])
def test_rows_and_distribute_are_local_with_the_threads_planned_for_them(
    tree: str, strategy: Strategy, tmp_path: Path
) -> None:
    topology, candidate = topology_of(tree, tmp_path), Candidate(strategy, 8)
    nodes = make_numa_plan(topology, candidate).decode.nodes
    placement = placement_for(candidate, topology, nodes, list(GLM.values()), GLM_BYTES)
    assert placement.strategy is strategy
    assert placement.huge
    assert locality(placement, node_reads(GLM.values(), nodes)) >= 0.97


def test_single_keeps_threads_and_pages_on_its_node(tmp_path: Path) -> None:
    topology = topology_of("two_sockets", tmp_path)
    candidate = Candidate(Strategy.SINGLE, 6, node=1, huge_pages=False)
    nodes = make_numa_plan(topology, candidate).decode.nodes
    assert set(nodes) == {1}
    placement = placement_for(candidate, topology, nodes, [], GLM_BYTES)
    assert (placement.ranges[0].nodes, placement.huge) == ((1,), ())
    too_much = placement_for(candidate, topology, nodes, [], 300 * GIB)
    assert too_much.notes[0].startswith("node 1 is out of memory: ")


def test_interleave_takes_every_node_with_memory(tmp_path: Path) -> None:
    topology = topology_of("node_without_memory", tmp_path)
    placement = placement_for(Candidate(Strategy.INTERLEAVE, 8), topology, (0,), [], GLM_BYTES)
    assert placement.ranges[0].nodes == (0, 2)


def test_an_unknown_node_is_named(tmp_path: Path) -> None:
    topology, candidate = topology_of("two_sockets", tmp_path), Candidate(Strategy.SINGLE, 8, 5)
    with pytest.raises(NoSuchNode, match="node 5 does not exist here"):
        placement_for(candidate, topology, (0,), [], GIB)
    with pytest.raises(NoSuchNode, match="node 5 does not exist here"):
        make_numa_plan(topology, candidate)
