"""Replays recorded drafts of the embedded pair with the default policy, drafter by drafter.

Usage: scripts/lab/run drafters [--json]
       scripts/lab/run drafters --record

The embedded target wrote greedy texts after held-out prompts. Before each token every drafter
proposed its longest draft. So a replay knows the drafts of each drafter at each token exactly, and
whichever drafters a chain asks, the result is what the models would have drafted. Only the clock is
simulated: by curves T(n), and by the time of each drafter's step.
"""

from __future__ import annotations

import argparse
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.simulation import published_curves
from specdec.costs.profile import CostProfile
from specdec.decoding.acceptance import Greedy, MatchAcceptance
from specdec.decoding.drafting import ChainDrafting
from specdec.decoding.member import BatchMember
from specdec.drafters.chain import ChainDrafter
from specdec.drafters.memory import BATCHED_TAIL
from specdec.drafters.rows import KEPT_UNDRAFTED, MOST_UNDRAFTED
from specdec.policies.rules import Fixed
from specdec.policies.throughput import Throughput
from specdec.types import Decision, Draft, Drafter, DraftRequest, Round
from specoffload import report

RECORDED = Path(__file__).with_name("pair_drafts.npz")
LONGEST = 12  # tokens of a recorded draft
N_TEXTS, N_TOKENS = {"code": 14, "prose": 10}, 128
PAID = ("mtp", "draft")
NAMES = (*PAID, "ngram-mod", "suffix")


@dataclass(frozen=True)
class Drafts:
    """One drafter's recorded drafts: at each token `p` [n, LONGEST], and how many were right."""

    p: NDArray[np.float64]
    lengths: NDArray[np.int64]
    n_right: NDArray[np.int64]


@dataclass(frozen=True, eq=False)  # recordings are compared by identity, for a cache of replays
class Recording:
    """`starts`: the first token of each text, and the end. `drafts`: by name of the drafter."""

    starts: tuple[int, ...]
    n_prompts: tuple[int, ...]  # tokens of each text's prompt
    drafts: Mapping[str, Drafts]


def load(path: Path = RECORDED) -> Recording:
    """The recorded drafts."""
    with np.load(path) as data:
        drafts = {
            name: Drafts(
                data[f"{name} p"].astype(np.float64),
                data[f"{name} lengths"].astype(np.int64),
                data[f"{name} right"].astype(np.int64),
            )
            for name in NAMES
        }
        return Recording(tuple(data["starts"].tolist()), tuple(data["n_prompts"].tolist()), drafts)


# -- recording -------------------------------------------------------------------------------------


def record(path: Path = RECORDED) -> None:
    """Write the texts with the embedded pair, and what each drafter proposes before each token."""
    from specoffload.cli import config_of
    from specoffload.config.command_line import read_command_line
    from specoffload.config.resolution import demo_prompts
    from specoffload.session.session import Session

    line = read_command_line("run", ["--device", "cpu", "-t", "1", "--spec-type", ",".join(NAMES)])
    found: dict[str, list[Any]] = {f"{n} {k}": [] for n in NAMES for k in ("p", "lengths", "right")}
    starts, n_prompts = [0], []
    with Session(config_of(line), keeps_hits=False) as session:
        assert session.speculation is not None
        drafter = session.speculation.drafter
        assert isinstance(drafter, ChainDrafter)
        by_name = {d.name: d for d in drafter.every}
        texts = [text for kind, n in N_TEXTS.items() for text in demo_prompts(kind)[:n]]
        for text in texts:
            prompt = session.tokenize(text, add_special=True, parse_special=False)
            history, drafted = _written(session.target.sequences, prompt, by_name)
            for name, drafts in drafted.items():
                for at, (tokens, p) in enumerate(drafts, len(prompt)):
                    rest = history[at:]
                    same = [a == b for a, b in zip(tokens, rest, strict=False)]
                    found[f"{name} right"].append([*same, False].index(False))
                    found[f"{name} lengths"].append(len(tokens))
                    found[f"{name} p"].append([*p, *[0.0] * (LONGEST - len(p))])
            starts.append(starts[-1] + N_TOKENS)
            n_prompts.append(len(prompt))
    kinds: dict[str, Any] = {"p": np.float16, "lengths": np.uint8, "right": np.uint8}
    arrays = {key: np.array(v, kinds[key.split()[-1]]) for key, v in found.items()}
    arrays |= {"starts": np.array(starts), "n_prompts": np.array(n_prompts)}
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]


def _written(
    target: Any, prompt: Sequence[int], drafters: Mapping[str, Drafter]
) -> tuple[list[int], dict[str, list[tuple[tuple[int, ...], tuple[float, ...]]]]]:
    """The greedy text, longer than its drafts by LONGEST, and each drafter's drafts in it."""
    target.rewind(0, 0)
    for drafter in drafters.values():
        drafter.forget(0)
    target.extend(0, prompt[:-1], 0)
    history = list(prompt)
    found: dict[str, list[Any]] = {name: [] for name in drafters}
    for i in range(N_TOKENS + LONGEST):
        drafts = {}
        if i < N_TOKENS:
            for name, drafter in drafters.items():
                request = DraftRequest(0, list(history), Fixed(LONGEST), LONGEST)
                drafts[name] = drafter.propose([request])[0]
                found[name].append((drafts[name].tokens, drafts[name].probs))
        token = int(target.extend(0, history[-1:], 1)[0].argmax())
        history.append(token)
        for name, draft in drafts.items():
            drafters[name].learn(0, Round(draft, 0, (token,), 0.0, 0.0))
    return history, found


# -- replaying -------------------------------------------------------------------------------------


class _Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class _Replayed:
    """A drafter that proposes what was recorded. `step_s`: simulated seconds of its step.

    Tokens are 1 if they are right, else 0. A drafter that spends steps first computes the tokens
    that it lacks. More than `BATCHED_TAIL` take a decode of their own, whose time grows with the
    number of tokens as the target's does.
    """

    def __init__(
        self, name: str, drafts: Drafts, step_s: float, curve: CostProfile, clock: _Clock
    ) -> None:
        self.name, self.n_lacking = name, 0
        self._drafts, self._step_s, self._curve, self._clock = drafts, step_s, curve, clock

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> Draft:
        drafts, at = self._drafts, len(request.history) - 1
        length = min(request.limit, int(drafts.lengths[at]))
        walk = request.begin(length, self.name)
        if not walk.wants:
            return Draft((), (), self.name, Decision(0, walk.reason, walk.rest))
        catch_up_s, n_steps = 0.0, 0
        if self.n_lacking > BATCHED_TAIL:
            catch_up_s = self._step_s * self._curve.time(self.n_lacking) / self._curve.time(1)
        self.n_lacking, n, goes_on = 0, 0, True
        while goes_on:
            goes_on = walk.feed(float(drafts.p[at, n])) and n + 1 < length
            n += 1
        n_steps = n if self._step_s else 0
        self._clock.now_s += catch_up_s + n_steps * self._step_s
        tokens = [int(i < drafts.n_right[at]) for i in range(n)]
        probs, best = drafts.p[at, :n].tolist(), walk.n_best
        dropped = tuple(zip(tokens[best:], probs[best:], strict=True))
        return Draft(
            tuple(tokens[:best]), tuple(probs[:best]), self.name, Decision(best, walk.reason),
            dropped, n_steps=n_steps, catch_up_s=catch_up_s,
        )  # fmt: skip

    def learn(self, sequence: int, round_: Round) -> None:
        self.n_lacking += len(round_.emitted)
        if self.name == "mtp" and self.n_lacking > MOST_UNDRAFTED:
            self.n_lacking = KEPT_UNDRAFTED

    def heard(self, sequence: int, text: Sequence[int], n_read: int, salt: int = 0) -> None:
        pass

    def forget(self, sequence: int) -> None:
        pass


class _Room:
    """The limits that drafting reads of a target."""

    n_ctx, n_batch, n_outputs, can_rewind = 1 << 20, 512, 512, True


@dataclass(frozen=True)
class Replay:
    """The result of one choice of drafters: simulated tokens per second, and counts."""

    rate: float
    n_drafted: int
    n_accepted: int
    n_by: Mapping[str, int]  # accepted tokens by drafter

    @property
    def acceptance(self) -> float:
        return self.n_accepted / self.n_drafted if self.n_drafted else 0.0


def replay(
    recording: Recording,
    names: Sequence[str],
    curve: CostProfile,
    steps_s: Mapping[str, float],
    n_passes: int = 1,
) -> Replay:
    """Decode all texts with these drafters and the default policy, which keeps what it learns."""
    if not names:
        return Replay(1.0 / curve.time(1), 0, 0, {})
    clock = _Clock()
    drafters = [_Replayed(n, recording.drafts[n], steps_s.get(n, 0.0), curve, clock) for n in names]
    paid = [d for d in drafters if d.name in steps_s]
    chained = ChainDrafter([d for d in drafters if d not in paid], *paid, clock=clock)
    profile = replace(curve, draft_step_s=fmean([steps_s[d.name] for d in paid] or [0.0]))
    policy = Throughput(
        profile,
        n_max=min(LONGEST, curve.n_max - 1),
        steps_s=dict(steps_s) if len(paid) > 1 else None,
    )
    drafting = ChainDrafting(_Room(), drafters[0] if len(names) == 1 else chained, policy)  # type: ignore[arg-type]
    member = BatchMember(0, [1], MatchAcceptance(Greedy()), 0, lambda _: False)
    n_drafted, rest, accepted = 0, 0, Counter[str]()
    texts = [*zip(recording.n_prompts, pairwise(recording.starts), strict=True)]
    for i, (n_prompt, (start, stop)) in enumerate(n_passes * texts):
        if i == (n_passes - 1) * len(texts):
            clock.now_s, n_drafted = 0.0, 0
            accepted.clear()
        if not start:
            member.history = [1]
        for drafter in paid:
            drafter.n_lacking = 0 if drafter.name == "mtp" else n_prompt  # rows are taken in
        rest = 0
        while (at := len(member.history) - 1) < stop:
            member.n_left = stop - at
            began_s = clock.now_s
            if rest:
                rest -= 1
            else:
                (draft,) = drafting.propose([member])
                rest = draft.decision.rest
            draft_s = clock.now_s - began_s - draft.catch_up_s
            n = len(draft.tokens)
            n_right = next((i for i, t in enumerate(draft.tokens) if not t), n)
            # The target's own token is 1, and equals the drafted one exactly if that is right.
            emitted = (1,) * (n_right + 1)
            verify_s = curve.time(1 + n)
            clock.now_s += verify_s
            n_drafted += n
            accepted[draft.source] += n_right
            member.history += emitted
            round_ = Round(draft, n_right, emitted, draft_s, verify_s)
            drafting.learn([(member, round_)], draft_s, is_priced=True)
    n_tokens = recording.starts[-1]
    return Replay(n_tokens / clock.now_s, n_drafted, accepted.total(), accepted)


# -- comparing -------------------------------------------------------------------------------------

SHARES = ((0.02, 0.3), (0.05, 0.03), (0.1, 0.15), (0.25, 0.08))  # steps of mtp and draft, in T(1)
CHAINS = (("mtp", "draft"), ("mtp", "draft", "ngram-mod"), ("mtp", "draft", "suffix"))


@dataclass(frozen=True)
class Row:
    """Rates of drafters alone, and of a chain of them, in units of plain decoding's rate."""

    curve: str
    steps: tuple[float, float]
    alone: Mapping[str, float]
    chain: float

    @property
    def ratio(self) -> float:
        """The chain's rate over the best that one of its drafters reaches alone, or none."""
        return self.chain / max(1.0, *self.alone.values())


def curves() -> dict[str, CostProfile]:
    """Measured curves: resident, streamed then on the CPU, experts on the CPU, and two cores."""
    published = published_curves()
    streamed_ms = {1: 12.0, 2: 23.0, 3: 25.0, 4: 7.4, 8: 8.2, 16: 12.8, 33: 23.0, 64: 24.0}
    ms = np.interp(range(1, 65), list(streamed_ms), list(streamed_ms.values()))
    two_cores = (1.0, 1.6, 2.2, *(2.8 + 0.62 * k for k in range(20)))
    return {
        "resident": published["rtx5000ada-qwen2.5-coder-0.5b-draft"],
        "streamed": CostProfile(tuple((ms / 1e3).tolist())),
        "experts on the CPU": published["deepseek-r1-0528-numa"],
        "over RPC": published["glm-4.6-rpc"],
        "two cores": CostProfile(two_cores),
    }


@functools.cache
def _rate(
    recording: Recording,
    names: tuple[str, ...],
    curve: CostProfile,
    steps_s: tuple[tuple[str, float], ...],
    n_passes: int,
) -> float:
    """Return the replay's rate in units of plain decoding's. Several chains use the same ones."""
    return replay(recording, names, curve, dict(steps_s), n_passes).rate * curve.time(1)


def compare(
    recording: Recording,
    names: Sequence[str],
    n_passes: int = 2,
    pairs: Sequence[tuple[float, float]] = SHARES,
) -> list[Row]:
    """Replay these drafters alone and together, on all curves with `pairs` of times of a step."""
    rows = []
    for title, curve in curves().items():
        for shares in pairs:
            plain_s = curve.time(1)
            steps = {n: share * plain_s for n, share in zip(PAID, shares, strict=True)}

            def rate(*used: str, curve: CostProfile = curve, steps: Any = steps) -> float:
                own = tuple((name, s) for name, s in steps.items() if name in used)
                return _rate(recording, used, curve, own, n_passes)

            rows.append(Row(title, shares, {n: rate(n) for n in names}, rate(*names)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/lab/run drafters", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--record", action="store_true", help="record the drafts anew")
    parser.add_argument("--json", action="store_true", help="print one line of JSON alone")
    args = parser.parse_args()
    if args.record:
        record()
    report.only_data(args.json)
    recording, found = load(), {}
    for names in CHAINS:
        rows = compare(recording, names)
        found["+".join(names)] = [asdict(row) | {"ratio": row.ratio} for row in rows]
        report.table(
            f"tokens/s x plain, {', '.join(names)} together and alone",
            ("T(n)", "steps", *names, "together", "x best"),
            [
                (
                    row.curve,
                    "/".join(map(str, row.steps)),
                    *(f"{v:.2f}" for v in row.alone.values()),
                    f"{row.chain:.2f}",
                    f"{row.ratio:.3f}",
                )
                for row in rows
            ],
        )
    report.data({"drafters": found})


if __name__ == "__main__":
    main()
