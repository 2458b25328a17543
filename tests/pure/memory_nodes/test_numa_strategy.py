"""A strategy's name becomes a placement and threads that fit each other."""

from pathlib import Path

import pytest
from numa_models import model_weights, packed
from numa_trees import topology_of

from numa.errors import NoSuchNode
from numa.memory import PlacedMemory
from numa.pinning import ThreadRequest
from numa.place import Strategy, locality, node_reads
from numa.rows import Build
from numa.strategy import placement_for, stealing_sentence, threads_for, touchers
from numa.tune import Candidate

GIB = 1 << 30
PLACED, SIZE = packed(model_weights("GLM-4.6", "q4_k"))


@pytest.mark.parametrize("tree", ["two_sockets", "two_sockets_nps4", "node_without_memory"])
def test_rows_and_distribute_are_local_with_the_threads_planned_for_them(
    tree: str, tmp_path: Path
) -> None:
    topology = topology_of(tree, tmp_path)
    for strategy in (Strategy.ROWS, Strategy.DISTRIBUTE):
        team = threads_for(topology, Candidate(strategy, 8)).decode
        placement = placement_for(strategy, topology, team, PLACED, SIZE)
        assert placement.strategy is strategy
        assert locality(placement, node_reads(PLACED, team.nodes)) >= 0.97
        used = {n for r in placement.ranges for n in r.nodes}
        assert used <= set(touchers(topology, team))


def test_single_keeps_threads_and_pages_on_its_node(tmp_path: Path) -> None:
    topology = topology_of("two_sockets", tmp_path)
    candidate = Candidate(Strategy.SINGLE, 6, node=1)
    team = threads_for(topology, candidate).decode
    assert set(team.nodes) == {1}
    placement = placement_for(Strategy.SINGLE, topology, team, PLACED, SIZE, node=1)
    assert locality(placement, node_reads(PLACED, team.nodes)) == 1.0
    # The other node's pages would be touched from here.
    assert touchers(topology, team) == {1: list(team.cpus), 0: list(team.cpus)}


def test_interleave_takes_every_node_with_memory(tmp_path: Path) -> None:
    topology = topology_of("node_without_memory", tmp_path)
    team = threads_for(topology, Candidate(Strategy.INTERLEAVE, 8)).decode
    placement = placement_for(Strategy.INTERLEAVE, topology, team, PLACED, SIZE)
    assert placement.ranges[0].nodes == (0, 2)


def test_small_pages_can_be_asked_for(tmp_path: Path) -> None:
    topology = topology_of("two_sockets", tmp_path)
    team = threads_for(topology, Candidate(Strategy.ROWS, 8)).decode
    assert placement_for(Strategy.ROWS, topology, team, PLACED, SIZE).huge
    plain = placement_for(Strategy.ROWS, topology, team, PLACED, SIZE, huge_pages=False)
    assert plain.huge == ()


def test_one_node_is_a_no_op_with_one_line_for_every_strategy(tmp_path: Path) -> None:
    topology = topology_of("one_node", tmp_path)
    for strategy in (Strategy.ROWS, Strategy.INTERLEAVE, Strategy.SINGLE, Strategy.DISTRIBUTE):
        team = threads_for(topology, Candidate(strategy, 2)).decode
        placement = placement_for(strategy, topology, team, [], 4 << 20)
        with PlacedMemory(4 << 20) as memory:
            report = memory.apply(placement, touchers(topology, team))
            assert memory.collapse() == ()
        assert report.how == "nothing"
        assert report.notes == (
            "one memory node: page placement changes nothing here and is left alone",
        )


def test_an_unknown_node_is_named(tmp_path: Path) -> None:
    topology = topology_of("two_sockets", tmp_path)
    team = threads_for(topology, Candidate(Strategy.ROWS, 8)).decode
    with pytest.raises(NoSuchNode, match="node 5 does not exist here"):
        placement_for(Strategy.SINGLE, topology, team, [], GIB, node=5)
    with pytest.raises(NoSuchNode, match="node 5 does not exist here"):
        threads_for(topology, Candidate(Strategy.SINGLE, 8, node=5))


def test_a_full_node_spills_with_a_note(tmp_path: Path) -> None:
    topology = topology_of("two_sockets", tmp_path)
    team = threads_for(topology, Candidate(Strategy.ROWS, 8), ThreadRequest(node=0)).decode
    placement = placement_for(Strategy.SINGLE, topology, team, [], 300 * GIB, node=0)
    assert placement.notes[0].startswith("node 0 is out of memory: ")


def test_the_plan_says_which_share_of_a_batch_no_placement_helps() -> None:
    weights = model_weights("GLM-4.6", "q4_k")
    assert stealing_sentence(weights, 1) is None
    assert stealing_sentence(weights, 8, Build(tiled=False, llamafile=False)) is None
    sentence = stealing_sentence(weights, 8)
    assert sentence is not None
    assert sentence.startswith("batches of 8 tokens: ggml's threads steal rows")
