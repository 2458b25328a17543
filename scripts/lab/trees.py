"""Draft trees against chains, on recorded drafts of the embedded pair and on published curves.

Usage: scripts/lab/run trees [--json]
       scripts/lab/run trees --record

The embedded target wrote texts after held-out prompts: its likeliest tokens, and tokens drawn at a
temperature of 0.8. Before each token the embedded draft grew its likeliest tree, node by node, and
its longest chain. So a replay knows which tokens a tree or a chain of any size drafts there, and
which of them the target takes. Only the clock is simulated.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.simulation import published_curves
from specdec.costs.profile import CostProfile
from specdec.policies.throughput import Throughput
from specdec.policies.tree import N_CHILDREN, N_WIDE
from specdec.types import Decision, Draft, Round, Walk
from specoffload import report

RECORDED = Path(__file__).with_name("pair_trees.npz")
N_TEXTS, N_TOKENS = {"code": 12, "prose": 8}, 48
N_NODES, LONGEST = 96, 32  # likeliest nodes recorded at each token, and tokens of the chain
MODES = ("greedy", "sampled")
_NEPER = 24.0  # a recorded logarithm's unit is 1/24
_ABSENT = 255
SOURCE = "draft"


@dataclass(frozen=True, eq=False)
class Trees:
    """The recorded trees of one mode. Arrays are [tokens of all texts, nodes].

    `parent` is an index of a node, or 255 for the text's last token; `p` is the draft's
    probability after the parent (0: no node); `is_right` marks the path that the target took.
    """

    starts: tuple[int, ...]  # first token of each text, and the end
    parent: NDArray[np.int64]
    rank: NDArray[np.int64]
    p: NDArray[np.float64]
    is_right: NDArray[np.bool_]

    def successors(self, at: int) -> dict[int, list[int]]:
        """The recorded nodes of token `at` by parent (-1: the root), likeliest first."""
        found: dict[int, list[int]] = {}
        for i in np.flatnonzero(self.p[at]).tolist():
            parent = int(self.parent[at, i])
            found.setdefault(-1 if parent == _ABSENT else parent, []).append(i)
        for nodes in found.values():
            nodes.sort(key=lambda i: int(self.rank[at, i]))
        return found


def load(path: Path = RECORDED) -> dict[str, Trees]:
    """The recorded trees by mode."""
    with np.load(path) as data:
        found = {}
        for mode in MODES:
            logs = data[f"{mode} log p"]
            p = np.where(logs == _ABSENT, 0.0, np.exp(-logs.astype(np.float64) / _NEPER))
            found[mode] = Trees(
                tuple(data["starts"].tolist()),
                data[f"{mode} parent"].astype(np.int64),
                data[f"{mode} rank"].astype(np.int64),
                p,
                data[f"{mode} right"].astype(bool),
            )
        return found


# -- recording -------------------------------------------------------------------------------------


def record(path: Path = RECORDED) -> None:
    """Write the texts with the embedded pair, and the draft's likeliest tree before each token."""
    from specoffload.cli import config_of
    from specoffload.config.command_line import read_command_line
    from specoffload.config.resolution import demo_prompts
    from specoffload.session.session import Session

    line = read_command_line(
        "run", ["--device", "cpu", "-t", "1", "--spec-type", "draft", "--draft-max", "32"]
    )
    arrays: dict[str, Any] = {}
    with Session(config_of(line), keeps_hits=False) as session:
        assert session.speculation is not None
        draft = session.speculation.drafter._model  # type: ignore[attr-defined]
        texts = [text for kind, n in N_TEXTS.items() for text in demo_prompts(kind)[:n]]
        for mode in MODES:
            rng = np.random.default_rng(7)
            found: list[tuple[NDArray[np.uint8], ...]] = []
            for text in texts:
                prompt = session.tokenize(text, add_special=True, parse_special=False)
                history = _written(session.target.sequences, prompt, rng, mode)
                _reset(draft, prompt)
                for at in range(len(prompt), len(prompt) + N_TOKENS):
                    found.append(_likeliest_tree(draft, history, at, session.target.n_vocab))
            for i, name in enumerate(("parent", "rank", "log p", "right")):
                arrays[f"{mode} {name}"] = np.stack([row[i] for row in found])
    arrays["starts"] = np.arange(len(texts) + 1) * N_TOKENS
    np.savez_compressed(path, **arrays)


def _reset(model: Any, prompt: Sequence[int]) -> None:
    model.rewind(0, 0)
    model.extend(0, prompt[:-1], 0)


def _written(target: Any, prompt: Sequence[int], rng: np.random.Generator, mode: str) -> list[int]:
    """The prompt and the target's text after it, longer than the replayed one by LONGEST."""
    _reset(target, prompt)
    history = list(prompt)
    for _ in range(N_TOKENS + LONGEST):
        row = target.extend(0, history[-1:], 1)[0]
        if mode == "greedy":
            token = int(row.argmax())
        else:
            p = _softmax(row / 0.8)
            token = int(p.cumsum().searchsorted(rng.random()))
        history.append(min(token, len(row) - 1))
    return history


def _softmax(row: NDArray[np.float32]) -> NDArray[np.float64]:
    e = np.exp(row - row.max(), dtype=np.float64)
    return np.asarray(e / e.sum())


def _likeliest_tree(
    draft: Any, history: Sequence[int], at: int, n_vocab: int
) -> tuple[NDArray[np.uint8], ...]:
    """The N_NODES likeliest nodes after `history[:at]`, and the rest of the greedy chain."""
    held = draft.length(0)
    draft.extend(0, history[held : at - 1], 0) if held < at - 1 else None
    n_held = at - 1
    paths: list[list[int]] = []
    parents: list[int] = []
    ranks: list[int] = []
    probs: list[float] = []

    def expand(path: list[int]) -> list[tuple[int, float]]:
        draft.rewind(0, n_held)
        row = draft.extend(0, [history[at - 1], *path], 1)[0][:n_vocab]
        p = _softmax(row)
        best = np.argsort(-p, kind="stable")[:N_CHILDREN]
        return [(int(t), float(p[t])) for t in best]

    def keep(parent: int, path: list[int], rank: int, p: float) -> int:
        parents.append(_ABSENT if parent < 0 else parent)
        paths.append(path)
        ranks.append(rank)
        probs.append(p)
        return len(paths) - 1

    heap: list[tuple[float, int, int, list[int], int, float]] = []
    n_pushed = 0

    def push(parent: int, path: list[int], reached: float) -> None:
        nonlocal n_pushed
        for rank, (token, p) in enumerate(expand(path)):
            n_pushed += 1
            heapq.heappush(heap, (-reached * p, n_pushed, parent, [*path, token], rank, p))

    push(-1, [], 1.0)
    while len(paths) < N_NODES:
        minus, _, parent, path, rank, p = heapq.heappop(heap)
        node = keep(parent, path, rank, p)
        if len(path) < LONGEST:
            push(node, path, -minus)
    by_path = {tuple(path): i for i, path in enumerate(paths)}
    chain: list[int] = []
    parent = -1
    while len(chain) < LONGEST and len(paths) < N_NODES + LONGEST:
        token, p = expand(chain)[0]
        chain = [*chain, token]
        parent = (
            by_path.get(tuple(chain), -2) if tuple(chain) in by_path else keep(parent, chain, 0, p)
        )
    draft.rewind(0, n_held)
    n = N_NODES + LONGEST
    rest = list(history[at:])
    right = [path == rest[: len(path)] for path in paths]
    logs = np.minimum(np.round(-np.log(np.maximum(probs, 1e-9)) * _NEPER), _ABSENT - 1)

    def padded(values: Any, empty: int) -> NDArray[np.uint8]:
        out = np.full(n, empty, np.uint8)
        out[: len(values)] = values
        return out

    return padded(parents, 0), padded(ranks, 0), padded(logs, _ABSENT), padded(right, 0)


# -- replaying -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replay:
    """Tokens per unit of time, and means over the rounds."""

    rate: float
    n_tokens: float  # emitted in a round
    n_nodes: float  # verified drafted tokens in a round
    n_steps: float  # draft steps in a round
    n_rounds: int


@dataclass(frozen=True)
class Sizes:
    """Most drafted tokens of a round, and how much longer a decode takes after one of another size.

    `change` is in units of the curve. A decode of n tokens takes T(n) after one of the same size,
    else T(n) + `change`. The policy is given T(n) + `change`, which is what a start measures.
    """

    n_nodes: int = 63
    change: float = 0.0


class _Clock:
    """The time of decodes, by the size of the one before."""

    def __init__(self, curve: CostProfile, change: float) -> None:
        self._curve, self._change, self._last = curve, change, 0

    def time(self, n: int) -> float:
        changed, self._last = n != self._last, n
        return self._curve.time(n) + self._change * changed


def replay_fixed(
    trees: Trees, curve: CostProfile, step: float, sizes: Sizes, n_block: int, p_min: float = 0.0
) -> float:
    """The rate of decoding all texts with chains of `n_block` tokens, each of at least `p_min`."""
    clock, time_s, n_tokens = _Clock(curve, sizes.change), 0.0, 0
    for start, stop in pairwise(trees.starts):
        at = start
        while at < stop:
            successors, node, n, n_right, n_steps = trees.successors(at), -1, 0, 0, 0
            while n < min(n_block, stop - at - 1) and (found := successors.get(node)):
                n_steps += 1
                if trees.p[at, found[0]] < p_min:
                    break
                node, n = found[0], n + 1
                n_right += n_right == n - 1 and bool(trees.is_right[at, node])
            time_s += n_steps * step + clock.time(1 + n)
            n_tokens += n_right + 1
            at += n_right + 1
    return n_tokens / time_s


def replay_chain(trees: Trees, curve: CostProfile, step: float, sizes: Sizes) -> Replay:
    """Decode all texts with chains, whose lengths the default policy chooses."""
    policy = _policy(curve, step, sizes)

    def propose(at: int, room: int) -> _Drafted:
        walk = policy.begin(min(room, sizes.n_nodes, LONGEST), SOURCE)
        return _chain(trees, at, walk, step)

    return _replayed(trees, _Clock(curve, sizes.change), propose, policy.learn)


def _chain(trees: Trees, at: int, walk: Walk, step: float) -> _Drafted:
    """The first nodes of the chain recorded before token `at`, as many as the policy wants."""
    if not walk.wants:
        draft = Draft((), (), SOURCE, Decision(0, walk.reason, walk.rest))
        return _Drafted(draft, 0.0, 0, 0, walk.rest)
    successors, node, fed = trees.successors(at), -1, []
    goes_on = True
    while goes_on:
        node = successors[node][0]
        fed.append(node)
        goes_on = walk.feed(float(trees.p[at, node]))
    tokens = [int(trees.is_right[at, i]) for i in fed]
    probs = [float(trees.p[at, i]) for i in fed]
    n = walk.n_best
    draft = Draft(
        tuple(tokens[:n]), tuple(probs[:n]), SOURCE, Decision(n, walk.reason),
        tuple(zip(tokens[n:], probs[n:], strict=True)), n_steps=len(fed),
    )  # fmt: skip
    return _Drafted(draft, len(fed) * step, n, sum(tokens[:n]), 0)


@dataclass(frozen=True)
class _Drafted:
    draft: Draft
    draft_s: float
    n_nodes: int
    n_right: int
    rest: int


def _policy(curve: CostProfile, step: float, sizes: Sizes) -> Throughput:
    times = tuple(curve.time(n) for n in range(1, 1 + min(curve.n_max, 1 + sizes.n_nodes)))
    return Throughput(CostProfile(tuple(time + sizes.change for time in times), step))


def replay_trees(trees: Trees, curve: CostProfile, step: float, sizes: Sizes) -> Replay:
    """Decode all texts with the default policy, which chooses between chains and trees."""
    policy = _policy(curve, step, sizes)
    widths = [_step_of(step, n) for n in range(1, 1 + N_WIDE)]

    def propose(at: int, room: int) -> _Drafted:
        limit = min(room, sizes.n_nodes, LONGEST)
        walk = policy.begin(limit, SOURCE)
        growth = policy.growth(walk, SOURCE, sizes.n_nodes, limit) if walk.wants else None
        if growth is None:
            return _chain(trees, at, walk, step)
        successors = trees.successors(at)
        recorded, likeliest = [-1], -1  # the record's index of each node
        expand, n_steps, n_rows, draft_s, goes_on = [-1], 0, 0, 0.0, True
        while expand:
            draft_s += widths[len(expand) - 1]
            n_steps += 1
            n_rows += len(expand)
            for i in expand:
                found = successors.get(recorded[i + 1], [])
                n_before = len(growth.nodes)
                growth.add(i, [(j, float(trees.p[at, j])) for j in found])
                recorded += [node.token for node in growth.nodes[n_before:]]
                if i == likeliest and found:
                    likeliest = n_before
                    goes_on = goes_on and walk.feed(growth.nodes[n_before].p)
            expand = growth.ahead()
        policy.grown(walk, growth, n_steps, n_rows)
        nodes, _ = growth.chosen()
        tokens = tuple([int(trees.is_right[at, node.token]) for node in nodes])
        draft = Draft(
            tokens, tuple([node.p for node in nodes]), SOURCE, Decision(len(nodes), "tree"),
            n_steps=n_steps, n_extra_rows=n_rows - n_steps,
            parents=tuple([node.parent for node in nodes]),
        )  # fmt: skip
        return _Drafted(draft, draft_s, len(nodes), sum(tokens), 0)

    return _replayed(trees, _Clock(curve, sizes.change), propose, policy.learn)


def _replayed(trees: Trees, clock: _Clock, propose: Any, learn: Any) -> Replay:
    time_s, n_tokens, n_nodes, n_steps, n_rounds = 0.0, 0, 0, 0, 0
    for start, stop in pairwise(trees.starts):
        at, rest = start, None
        while at < stop:
            if rest is not None and rest.rest:
                rest = drafted = _Drafted(rest.draft, 0.0, 0, 0, rest.rest - 1)
            else:
                drafted = propose(at, max(0, stop - at - 1))
                rest = drafted if drafted.rest else None
            n = drafted.n_nodes
            verify_s = clock.time(1 + n)
            # 1 stands for each right drafted token, and for each of the target's tokens.
            emitted = (1,) * (drafted.n_right + 1)
            learn(Round(drafted.draft, drafted.n_right, emitted, drafted.draft_s, verify_s))
            at += len(emitted)
            time_s += drafted.draft_s + verify_s
            n_tokens += len(emitted)
            n_nodes += n
            n_steps += drafted.draft.n_steps
            n_rounds += 1
    return Replay(
        n_tokens / time_s, n_tokens / n_rounds, n_nodes / n_rounds, n_steps / n_rounds, n_rounds
    )


def _step_of(step: float, n_rows: int) -> float:
    """The time of a draft step that expands `n_rows` nodes, by the curve of a 0.5B draft."""
    curve = published_curves()["rtx5000ada-qwen2.5-coder-0.5b-draft"]
    return step * max(1.0, curve.time(n_rows) / curve.time(1))


def measured_curve(points: Mapping[int, float]) -> CostProfile:
    """T(1) to T(64) through measured points, linear between and after them, in units of T(1)."""
    sizes = sorted(points)
    slope = (points[sizes[-1]] - points[sizes[-2]]) / (sizes[-1] - sizes[-2])
    points = {**points, 64: points[sizes[-1]] + slope * (64 - sizes[-1])}
    times = np.interp(np.arange(1, 65), sorted(points), [points[n] for n in sorted(points)])
    return CostProfile(tuple((times / times[0]).tolist()))


def curves() -> dict[str, CostProfile]:
    """Published curves, and two models of dense weights that stream."""
    flat = CostProfile(tuple(1.0 + 0.001 * n for n in range(64)))
    # The CPU decodes one token in a third of the time of streaming. Weights stream from 4 on.
    turns = CostProfile((1.0, 1.7, 2.4, *(3.0 + 0.003 * n for n in range(61))))
    return {"streams (modelled)": flat, "CPU, then streams (modelled)": turns, **published_curves()}


STEPS = (0.005, 0.02, 0.05)  # draft steps in units of T(1)


@dataclass(frozen=True)
class Row:
    """One case: chains and trees as ratios of plain decoding, and the trees' means per round."""

    curve: str
    mode: str
    step: float
    chain: float
    tree: float
    ratio: float
    n_chain: float
    n_tree: float
    n_nodes: float


def compare(
    recorded: Mapping[str, Trees],
    over: Mapping[str, CostProfile],
    sizes: Sizes,
    steps: Sequence[float] = STEPS,
) -> list[Row]:
    rows = []
    for name, curve in over.items():
        for mode, trees in recorded.items():
            for share in steps:
                step = share * curve.time(1)
                chain = replay_chain(trees, curve, step, sizes)
                tree = replay_trees(trees, curve, step, sizes)
                rows.append(
                    Row(
                        name,
                        mode,
                        share,
                        chain.rate * curve.time(1),
                        tree.rate * curve.time(1),
                        tree.rate / chain.rate,
                        chain.n_tokens,
                        tree.n_tokens,
                        tree.n_nodes,
                    )
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/lab/run trees", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--record", action="store_true", help="record the trees anew")
    parser.add_argument("--json", action="store_true", help="print one line of JSON alone")
    args = parser.parse_args()
    if args.record:
        record()
    report.only_data(args.json)
    rows = compare(load(), curves(), Sizes())
    report.table(
        "trees of up to 64 nodes against chains, x plain",
        ("T(n)", "text", "step", "chain", "tree", "tree / chain", "tokens a round", "nodes"),
        [
            (
                r.curve,
                r.mode,
                str(r.step),
                f"{r.chain:.2f}",
                f"{r.tree:.2f}",
                f"{r.ratio:.3f}",
                f"{r.n_chain:.2f}, {r.n_tree:.2f}",
                f"{r.n_nodes:.1f}",
            )
            for r in rows
        ],
    )
    report.data({"trees": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
