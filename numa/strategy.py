"""From a strategy's name to a placement and the threads for it. Pure; what the engine calls.

`threads_for` gives the thread plan a candidate needs, `placement_for` the pages, `touchers` the
processors that `PlacedMemory.apply` faults them in from.
"""

from collections.abc import Sequence
from dataclasses import replace

from numa.pinning import Team, ThreadPlan, ThreadRequest, plan_threads
from numa.place import (
    PlacedWeight,
    Placement,
    Strategy,
    fit_memory,
    place_interleaved,
    place_rows,
    place_single,
    with_huge_pages,
)
from numa.rows import Build, Weight, stolen_bytes
from numa.topology import ONE_NODE, Topology
from numa.tune import Candidate


def threads_for(
    topology: Topology, candidate: Candidate, request: ThreadRequest | None = None
) -> ThreadPlan:
    """The plan a candidate runs with: its threads, on its node, in its order.

    Raises NoSuchNode for a node that does not exist or has no processor.
    """
    request = request or ThreadRequest()
    return plan_threads(
        topology,
        replace(
            request,
            n_decode=candidate.n_threads,
            node=request.node if candidate.node is None else candidate.node,
            order="alternate" if candidate.strategy is Strategy.DISTRIBUTE else "by_node",
        ),
    )


def placement_for(
    strategy: Strategy,
    topology: Topology,
    team: Team,
    weights: Sequence[PlacedWeight],
    size_bytes: int,
    *,
    node: int | None = None,
    huge_pages: bool = True,
) -> Placement:
    """The placement of memory of `size_bytes` that holds `weights`, read by `team`.

    `node` is for `single`; without it the team's first node is taken. On one memory node it is
    `single` whatever was asked, with one note. A node without room spills, with a note. Raises
    NoSuchNode for an unknown node, PlacementRefused for want of memory.
    """
    free = {n.id: n.free_bytes for n in topology.nodes if n.id in set(topology.memory_nodes)}
    if not topology.is_numa:
        plain = place_single(size_bytes, topology.memory_node_near(team.nodes[0]))
        return replace(plain, notes=(ONE_NODE,))
    if strategy is Strategy.SINGLE:
        wanted = team.nodes[0] if node is None else topology.node(node).id
        placement = place_single(size_bytes, topology.memory_node_near(wanted))
    elif strategy is Strategy.INTERLEAVE:
        placement = place_interleaved(size_bytes, topology.memory_nodes)
    else:
        placement = place_rows(size_bytes, weights, team.nodes, strategy=strategy)
    placement = fit_memory(placement, free)
    return with_huge_pages(placement) if huge_pages else placement


def touchers(topology: Topology, team: Team) -> dict[int, list[int]]:
    """node -> processors of the team that touch its pages; empty nodes get the nearest threads."""
    found: dict[int, list[int]] = {}
    for cpu, node in zip(team.cpus, team.nodes, strict=True):
        found.setdefault(node, []).append(cpu)
    owners = dict(found)
    for node in topology.memory_nodes:
        if node not in found:
            near = min(owners, key=lambda n: (topology.distance(node, n), n))
            found[node] = list(owners[near])
    return found


def stealing_sentence(
    weights: Sequence[Weight], n_tokens: int, build: Build | None = None
) -> str | None:
    """The plan's words on batches of `n_tokens`: the share no placement helps, None if 0."""
    stolen, total = stolen_bytes(weights, n_tokens, build)
    if not stolen:
        return None
    return (
        f"batches of {n_tokens} tokens: ggml's threads steal rows from each other in dense products"
        f" ({stolen / total:.0%} of the bytes), so those reads are local by chance only"
    )
