"""Drafts trees: with a draft model, whose steps expand nodes, or from the candidates of a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
from numpy.typing import NDArray

from specdec.drafters.growing import Growing
from specdec.drafters.memory import TokenMemory
from specdec.policies.tree import N_CHILDREN, N_WIDE, TreeGrowth
from specdec.types import Decision, Draft, Target, TreeTarget


def drafted_tree(
    model: Target,
    memory: TokenMemory,
    name: str,
    growing: Growing,
    growth: TreeGrowth,
    n_vocab: int,
) -> Draft:
    """Grow a tree after the text of `growing`, whose walk gets the tree's value.

    Returns a chain if the nodes worth verifying do not branch. The model keeps the likeliest path
    of its tree, which the target often accepts.
    """
    trees, sequence, walk = cast(TreeTarget, model), growing.sequence, growing.walk
    # The model holds a cell for each expanded node, and may have a leaf sequence for each.
    room = min(trees.n_tree_leaves, model.n_ctx - len(growing.asked.history))
    logits = model.extend(sequence, growing.feed, 1)[-1]
    memory.fed(sequence, growing.feed)
    memory.mark(sequence)
    growth.add(-1, _successors(logits[:n_vocab]))
    likeliest = [0]  # nodes of the likeliest path
    goes_on = walk.feed(growth.nodes[0].p)
    place = {-1: -1}  # index of a node among the expanded ones
    n_steps = 1
    try:
        while expanded := growth.ahead(min(N_WIDE, model.n_outputs, room - len(place) + 1)):
            nodes = growth.nodes
            tokens = [nodes[i].token for i in expanded]
            rows = trees.extend_tree(sequence, tokens, [place[nodes[i].parent] for i in expanded])
            n_steps += 1
            for i, row in zip(expanded, rows, strict=True):
                place[i] = len(place) - 1
                n_before = len(nodes)
                growth.add(i, _successors(row[:n_vocab]))
                if i == likeliest[-1]:
                    likeliest.append(n_before)
                    goes_on = goes_on and walk.feed(nodes[n_before].p)
    except BaseException:
        if len(place) > 1:
            trees.keep_path(sequence, ())
        raise
    if len(place) > 1:
        kept = [i for i in likeliest if i in place]
        trees.keep_path(sequence, [place[i] for i in kept])
        if kept:
            memory.fed(sequence, [growth.nodes[i].token for i in kept])
    n_rows = len(place)  # the root included
    assert growing.asked.trees is not None
    growing.asked.trees.grown(walk, growth, n_steps, n_rows)
    return _draft(growth, likeliest, name, growing, n_steps, n_rows)


def tree_of_block(
    successors: Callable[[int, int | None], list[tuple[int, float]]],
    name: str,
    growing: Growing,
    growth: TreeGrowth,
) -> Draft:
    """Grow a tree from the candidates of a block, whose only pass is over.

    `successors(place, before)` are (token, p) of a place's candidates after the token `before` of
    the place before, likeliest first. `before` is None for the first place. The walk of `growing`
    gets the tree's value. Returns a chain if the nodes worth verifying do not branch.
    """
    walk = growing.walk
    growth.add(-1, successors(0, None))
    likeliest = [0]  # nodes of the likeliest path
    goes_on = walk.feed(growth.nodes[0].p)
    while expanded := growth.ahead():
        for i in expanded:
            node, n_before = growth.nodes[i], len(growth.nodes)
            growth.add(i, successors(node.depth, node.token))
            if i == likeliest[-1]:
                likeliest.append(n_before)
                goes_on = goes_on and walk.feed(growth.nodes[n_before].p)
    assert growing.asked.trees is not None
    growing.asked.trees.grown(walk, growth, 1, 1)
    return _draft(growth, likeliest, name, growing, 1, 1)


def _draft(
    growth: TreeGrowth,
    likeliest: list[int],
    name: str,
    growing: Growing,
    n_steps: int,
    n_rows: int,
) -> Draft:
    chosen, value = growth.chosen()
    n = len(chosen)
    parents = tuple([node.parent for node in chosen])
    is_chain = parents == tuple(range(-1, n - 1))
    # A chain is of likeliest tokens, since a likelier token is worth more than its siblings.
    rest = [growth.nodes[i] for i in likeliest[n:]] if is_chain else ()
    dropped = tuple([(node.token, node.p) for node in rest])
    kind = "chain" if is_chain else f"tree {max(node.depth for node in chosen)} deep"
    reason = f"{kind}: {n} of {len(growth.nodes)} drafted gain {value:.2f} tokens"
    return Draft(
        tuple([node.token for node in chosen]),
        tuple([node.p for node in chosen]),
        name,
        Decision(n, reason),
        dropped,
        n_steps=n_steps,
        catch_up_s=growing.catch_up_s,
        parents=() if is_chain else parents,
        n_extra_rows=n_rows - n_steps,
    )


def _successors(logits: NDArray[np.float32]) -> list[tuple[int, float]]:
    """(token, p) of the likeliest tokens, likeliest first. `p` is the share among all tokens."""
    n = min(N_CHILDREN, len(logits))
    best = np.argpartition(logits, -n)[-n:]
    best = best[np.lexsort((best, -logits[best]))]
    e = np.exp(logits - logits[best[0]], dtype=np.float64)
    p = e[best] / e.sum()
    return list(zip(best.tolist(), p.tolist(), strict=True))
