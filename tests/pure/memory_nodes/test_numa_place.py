"""Pages lie where they are read: at least 97 % of the bytes of every weight of three models."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numa_models import model_weights, packed

from numa.errors import NoSuchNode, PlacementRefused
from numa.place import (
    HUGE_PAGE_BYTES,
    PAGE_BYTES,
    NodeRange,
    NodeRead,
    PlacedWeight,
    Placement,
    Strategy,
    fit_memory,
    locality,
    node_reads,
    place_interleaved,
    place_rows,
    place_single,
    sampled_locality,
    with_huge_pages,
)
from numa.rows import Weight, reads

MODELS = ["DeepSeek-R1", "Kimi-K2", "GLM-4.6"]
GIB = 1 << 30


def by_node(n_nodes: int, threads_per_node: int) -> tuple[int, ...]:
    return tuple(n for n in range(n_nodes) for _ in range(threads_per_node))


# Per head, a thread's slab of these is smaller than a page; together they are 18 MB of a layer.
HEAD_WEIGHTS = {"attn_k_b", "attn_v_b"}


@pytest.mark.parametrize("threads_per_node", [8, 7])
@pytest.mark.parametrize("n_nodes", [2, 4, 8])
@pytest.mark.parametrize("quant", ["q4_k", "iq2_xxs", "q8_0"])
@pytest.mark.parametrize("model", MODELS)
def test_every_weight_is_read_locally_with_small_pages_and_with_huge_ones_where_they_fit(
    model: str, quant: str, n_nodes: int, threads_per_node: int
) -> None:
    placed, size_bytes = packed(model_weights(model, quant))
    team = by_node(n_nodes, threads_per_node)
    small = place_rows(size_bytes, placed, team)
    huge = with_huge_pages(small)
    for p in placed:
        wanted = node_reads([p], team)
        floor = 0.85 if p.weight.name in HEAD_WEIGHTS else 0.97
        assert locality(small, wanted) >= floor, p.weight.name
        assert locality(huge, wanted) >= floor, p.weight.name
    whole = node_reads(placed, team)
    assert locality(small, whole) >= 0.99
    assert locality(huge, whole) >= 0.99
    heads = sum(p.weight.size_bytes for p in placed if p.weight.name in HEAD_WEIGHTS)
    assert heads < 0.01 * size_bytes


def table_row(model: str, n_nodes: int) -> str:
    """A row of the table in docs/numa.md: Q4_K, eight threads per node, one token."""
    placed, size_bytes = packed(model_weights(model, "q4_k"))
    team = by_node(n_nodes, 8)
    wanted = node_reads(placed, team)
    small = place_rows(size_bytes, placed, team)
    fitted = with_huge_pages(small)
    blind = place_rows(size_bytes, placed, team, HUGE_PAGE_BYTES)
    below = [
        f"`{p.weight.name}` {share:.1%}"
        for p in placed
        if (share := locality(small, node_reads([p], team))) < 0.97
    ]
    shares = [f"{locality(p, wanted):.2%}" for p in (small, blind, fitted)]
    cells = [model, str(n_nodes), *shares, f"{fitted.huge_share:.0%}", ", ".join(below) or "none"]
    return "| " + " | ".join(cells) + " |"


@pytest.mark.parametrize("n_nodes", [2, 4, 8])
@pytest.mark.parametrize("model", MODELS)
def test_the_table_in_the_documentation_is_what_is_computed(model: str, n_nodes: int) -> None:
    document = (Path(__file__).parents[3] / "docs" / "numa.md").read_text()
    assert table_row(model, n_nodes) in document


def test_huge_pages_alone_would_not_be_local_so_blocks_that_two_nodes_read_stay_small() -> None:
    placed, size_bytes = packed(model_weights("DeepSeek-R1", "q4_k"))
    team = by_node(8, 8)
    wanted = node_reads(placed, team)
    blind = place_rows(size_bytes, placed, team, HUGE_PAGE_BYTES)
    assert locality(blind, wanted) < 0.97
    # An expert's slab is 1 MiB per node on eight nodes: no block of 2 MiB has one reader.
    assert with_huge_pages(place_rows(size_bytes, placed, team)).huge_share < 0.2
    assert with_huge_pages(place_rows(size_bytes, placed, by_node(2, 8))).huge_share > 0.5


def test_distribute_reads_as_locally_with_small_pages_but_in_many_more_pieces() -> None:
    placed, size_bytes = packed(model_weights("GLM-4.6", "q4_k"))
    alternate = (0, 1) * 16
    placement = place_rows(size_bytes, placed, alternate, strategy=Strategy.DISTRIBUTE)
    assert placement.strategy is Strategy.DISTRIBUTE
    assert locality(placement, node_reads(placed, alternate)) >= 0.97
    in_order = place_rows(size_bytes, placed, by_node(2, 16))
    assert len(placement.ranges) > 10 * len(in_order.ranges)


def test_single_is_all_or_nothing_and_interleave_half_for_two_nodes() -> None:
    weight = PlacedWeight(Weight("w", 4096, 4096), 0)
    team = by_node(2, 4)
    wanted = node_reads([weight], team)
    size = weight.weight.size_bytes
    assert locality(place_single(size, 0), wanted) == pytest.approx(0.5)
    assert locality(place_single(size, 1), node_reads([weight], (1,) * 8)) == 1.0
    assert locality(place_interleaved(size, [0, 1]), wanted) == pytest.approx(0.5)
    assert locality(place_interleaved(size, range(4)), wanted) == pytest.approx(0.25)


def test_batches_read_experts_in_other_slabs_and_stay_mostly_local() -> None:
    placed, size_bytes = packed([w for w in model_weights("DeepSeek-R1", "q4_k") if w.routed])
    team = by_node(2, 28)
    placement = place_rows(size_bytes, placed, team)
    assert locality(placement, node_reads(placed, team, n_tokens=64)) >= 0.95


def check(placement: Placement) -> None:
    """Ranges cover the memory without gaps, page by page."""
    position = 0
    for r in placement.ranges:
        assert r.start_bytes == position
        assert r.start_bytes % placement.page_bytes == 0
        assert r.n_bytes > 0
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
    weights = [Weight(f"w{i}", r, b, m, x) for i, (r, b, m, x) in enumerate(shapes)]
    placed, size_bytes = packed(weights)
    team = by_node(n_nodes, threads_per_node)
    placement = place_rows(size_bytes, placed, team)
    check(placement)
    tally: dict[int, dict[int, int]] = {}
    for p in placed:
        for read in reads(p.weight, len(team)):
            start, stop = p.offset_bytes + read.start_bytes, p.offset_bytes + read.stop_bytes
            for page in range(start // PAGE_BYTES, (stop - 1) // PAGE_BYTES + 1):
                n = min(stop, (page + 1) * PAGE_BYTES) - max(start, page * PAGE_BYTES)
                counts = tally.setdefault(page, {})
                node = team[read.thread]
                counts[node] = counts.get(node, 0) + n
    best = sum(max(counts.values()) for counts in tally.values())
    total = sum(sum(counts.values()) for counts in tally.values())
    assert locality(placement, node_reads(placed, team)) == pytest.approx(best / total)


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(1, 1500), st.integers(0, 2)), min_size=1, max_size=12),
)
def test_huge_blocks_have_one_node_and_the_rest_stays_as_it_was(
    runs: list[tuple[int, int]],
) -> None:
    ranges: list[NodeRange] = []
    position = 0
    for n_pages, node in runs:
        stop = position + n_pages * PAGE_BYTES
        ranges.append(NodeRange(position, stop, (node,)))
        position = stop
    small = Placement(Strategy.ROWS, position, PAGE_BYTES, tuple(ranges))
    huge = with_huge_pages(small)
    check(huge)
    for start, stop in huge.huge:
        for block in range(start, stop, HUGE_PAGE_BYTES):
            inside = [NodeRead(block, block + HUGE_PAGE_BYTES, n) for n in range(3)]
            assert max(locality(huge, [r]) for r in inside) == 1.0
    same = [NodeRead(r.start_bytes, r.stop_bytes, r.nodes[0]) for r in ranges]
    assert locality(huge, same) >= 0.98


def test_interleaved_huge_pages_take_all_whole_blocks() -> None:
    placement = with_huge_pages(place_interleaved(5 * HUGE_PAGE_BYTES + 4096, [0, 1]))
    assert placement.huge == ((0, 5 * HUGE_PAGE_BYTES),)
    assert placement.page_bytes == HUGE_PAGE_BYTES


def test_a_node_out_of_memory_sends_its_rows_to_another_and_says_so() -> None:
    placed, size_bytes = packed([Weight("w", 4096, 1 << 20)])
    placement = place_rows(size_bytes, placed, by_node(2, 4))
    fitted = fit_memory(placement, {0: 1 * GIB, 1: 8 * GIB})
    check(fitted)
    assert fitted.bytes_per_node() == {0: 1 * GIB, 1: 3 * GIB}
    assert fitted.notes == ("node 0 is out of memory: 1.00 GiB of its rows were placed on node 1",)
    assert fit_memory(placement, {0: 8 * GIB, 1: 8 * GIB}) == placement


def test_an_arena_larger_than_all_nodes_is_refused() -> None:
    with pytest.raises(PlacementRefused, match=r"is 2.0 GiB more than all nodes have free"):
        fit_memory(place_single(4 * GIB, 0), {0: GIB, 1: GIB})


def test_a_team_without_threads_is_refused() -> None:
    with pytest.raises(NoSuchNode, match="without threads"):
        place_rows(4096, [], ())


def test_bytes_that_nothing_reads_follow_their_neighbour() -> None:
    weight = PlacedWeight(Weight("w", 2, PAGE_BYTES), 4 * PAGE_BYTES)
    placement = place_rows(10 * PAGE_BYTES, [weight], (0, 1))
    assert placement.ranges == (
        NodeRange(0, 5 * PAGE_BYTES, (0,)),
        NodeRange(5 * PAGE_BYTES, 10 * PAGE_BYTES, (1,)),
    )
    assert place_rows(4096, [], (3,)).ranges == (NodeRange(0, 4096, (3,)),)


def test_a_sample_of_pages_is_weighed_by_the_bytes_read_from_each() -> None:
    wanted = [NodeRead(0, 5000, 0), NodeRead(5000, 12288, 1), NodeRead(20000, 20100, 1)]
    # Page 0 is read by node 0 only, page 1 by both, page 3 by nobody, page 4 in part; 2 is absent.
    offsets = [0, 4096, 8192, 12288, 16384]
    assert sampled_locality(offsets, [0, 1, -2, 0, 0], wanted) == pytest.approx(
        (4096 + 8192 - 5000) / (8192 + 100)
    )
    assert sampled_locality([12288], [0], wanted) is None
