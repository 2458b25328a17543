"""Trees of a block's candidates against chains of them, on recorded drafts and published curves.

Usage: scripts/lab/run lattice

DFlash2 drafts several candidates for each place of a block, and scores each after every candidate
of the place before. So a tree of them costs no further pass. No such file fits a model that can be
run here. `lab.trees` has recorded trees of the embedded pair, which are replayed as if one pass had
drafted them. A recorded successor depends on the whole path, and a candidate of a lattice on one
token before it only. So there are two bounds: trees with all recorded paths, and trees that end
with each token that is not the likeliest one. The result is a table in docs/speculation.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import typer

from lab.simulation import curves_with_unions
from lab.tables import filled, page_of
from lab.trees import MODES, Trees, curves, load
from specdec.costs.profile import CostProfile
from specdec.options import DrafterName
from specdec.policies.throughput import Throughput
from specdec.types import Decision, Draft, Round, Walk

PAGE = page_of("lattice")
BLOCK = 15  # drafted tokens of a block of 16
N_NODES = 63
PASS = 0.05  # the time of a pass, as a share of T(1)
SOURCE = DrafterName.DFLASH


class Branches(Enum):
    """Which recorded drafts may be verified."""

    NONE = "the likeliest tokens, as a chain"
    SIBLINGS = "also other tokens, but none after them"
    PATHS = "all that were recorded"


@dataclass(frozen=True)
class Replay:
    """Tokens per T(1), and tokens a round."""

    rate: float
    n_tokens: float


def replay(trees: Trees, curve: CostProfile, branches: Branches) -> Replay:
    """Decode all texts with blocks, by the default policy."""
    times = [curve.time(n) / curve.time(1) for n in range(1, 1 + min(curve.n_max, 1 + N_NODES))]
    policy = Throughput(CostProfile(tuple(times), PASS))
    time, n_tokens, n_rounds, rest = 0.0, 0, 0, 0
    for start, stop in pairwise(trees.starts):
        at = start
        while at < stop:
            if rest:
                rest, draft = rest - 1, Draft((), (), SOURCE, Decision(0, ""))
            else:
                draft = _drafted(trees, at, policy, min(BLOCK, stop - at - 1), branches)
                rest = draft.decision.rest
            # A drafted token is 1 if it is right, else 0. The target's own tokens are 1.
            n_right = sum(draft.tokens)
            drafting, verify = draft.n_steps * PASS, times[len(draft.tokens)]
            policy.learn(Round(draft, n_right, (1,) * (n_right + 1), drafting, verify))
            at += n_right + 1
            time += drafting + verify
            n_tokens += n_right + 1
            n_rounds += 1
    return Replay(n_tokens / time, n_tokens / n_rounds)


def _drafted(trees: Trees, at: int, policy: Throughput, limit: int, branches: Branches) -> Draft:
    walk = policy.begin(limit, SOURCE)
    if not walk.wants:
        return Draft((), (), SOURCE, Decision(0, walk.reason, walk.rest))
    if branches is not Branches.NONE and (tree := _tree(trees, at, policy, walk, limit, branches)):
        return tree
    successors, node, fed = trees.successors(at), -1, list[int]()
    goes_on = True
    while goes_on and node in successors:
        node = successors[node][0]
        fed.append(node)
        goes_on = walk.feed(float(trees.p[at, node]))
    tokens = [int(trees.is_right[at, i]) for i in fed]
    probs = [float(trees.p[at, i]) for i in fed]
    n = walk.n_best
    dropped = tuple(zip(tokens[n:], probs[n:], strict=True))
    return Draft(
        tuple(tokens[:n]), tuple(probs[:n]), SOURCE, Decision(n, walk.reason), dropped, n_steps=1
    )


def _tree(
    trees: Trees, at: int, policy: Throughput, walk: Walk, limit: int, branches: Branches
) -> Draft | None:
    growth = policy.growth(walk, SOURCE, N_NODES, limit)
    if growth is None:
        return None
    successors = trees.successors(at)
    recorded, expanded, likeliest = [-1], [-1], -1  # the record's index of each node, root first
    goes_on = True  # down the likeliest path, which the policy judges
    while expanded:
        for i in expanded:
            n_before = len(growth.nodes)
            is_open = branches is Branches.PATHS or i == likeliest
            after = successors.get(recorded[i + 1], []) if is_open else []
            growth.add(i, [(j, float(trees.p[at, j])) for j in after])
            recorded += [node.token for node in growth.nodes[n_before:]]
            if i == likeliest and after:
                likeliest = n_before
                goes_on = goes_on and walk.feed(growth.nodes[n_before].p)
        expanded = growth.ahead()
    policy.grown(walk, growth, 1, 1)
    nodes, _ = growth.chosen()
    return Draft(
        tuple([int(trees.is_right[at, node.token]) for node in nodes]),
        tuple([node.p for node in nodes]),
        SOURCE,
        Decision(len(nodes), "tree"),
        n_steps=1,
        parents=tuple([node.parent for node in nodes]),
    )


def row(name: str, curve: CostProfile, recorded: Mapping[str, Trees]) -> str:
    """The table's row of a curve."""
    cells = [name]
    for mode in MODES:
        chain, *branched = [replay(recorded[mode], curve, branches) for branches in Branches]
        cells += [f"{chain.rate:.2f}", *(f"{tree.rate / chain.rate:.2f}" for tree in branched)]
    return f"| {' | '.join(cells)} |"


def every_curve() -> dict[str, CostProfile]:
    """The published curves, those of mixtures with unions of experts, and modelled ones."""
    return curves() | curves_with_unions()


def table() -> str:
    cells = ["T(n)"]
    for mode in MODES:
        cells += [f"{mode}: chain ÷ plain", "siblings ÷ chain", "paths ÷ chain"]
    recorded = load()
    rows = [row(name, curve, recorded) for name, curve in every_curve().items()]
    return "\n".join([f"| {' | '.join(cells)} |", "|" + "---|" * len(cells), *rows])


def page() -> str:
    """The text of docs/speculation.md with a new table."""
    return filled(PAGE, {"lattice": table()})


def main() -> None:
    """Replay the recorded trees as blocks, and write the table."""
    PAGE.write_text(page(), encoding="utf-8")
    typer.echo(table())


if __name__ == "__main__":
    typer.run(main)
