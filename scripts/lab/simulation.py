"""Simulates a policy on a trace of (draft p, accepted) with a cost profile.

At token i of the text, the drafter proposes a token with probability p[i], which is right if
accepted[i]. After a wrong token, a real drafter would follow another text. The policy then still
sees the trace's next probabilities, but those tokens cannot be accepted. Oracles know the accepted
lengths, and show how far a policy is from the best possible result.

A recorded text has unknown tokens, which nobody drafted. The drafter cannot propose at these
positions, and the simulator counts how often a policy asked for one. So a replay underrates a
policy that drafts longer than the recorded one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from offload.routing.routing import union_of_neighbours
from specdec.costs.profile import CostProfile
from specdec.costs.unions import with_unions
from specdec.errors import SpecDecError
from specdec.types import Decision, Draft, Policy, Round, Walk

_OWN, _OTHER = 1, 0  # tokens of simulated drafts: right and wrong


@dataclass(frozen=True)
class DraftTrace:
    """p[i] and accepted[i] for every position of a text; `segments` are (start, name).

    `unknown` are positions that nobody drafted when the trace was recorded. Their p is 0, and they
    count as not accepted.
    """

    p: tuple[float, ...]
    accepted: tuple[bool, ...]
    segments: tuple[tuple[int, str], ...] = ((0, "text"),)
    unknown: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """Raises SpecDecError if the arrays' lengths differ, or if a p is no probability."""
        if len(self.p) != len(self.accepted) or not self.p:
            raise SpecDecError(
                f"a trace of {len(self.p)} probabilities and {len(self.accepted)} outcomes"
            )
        bad = next((i for i, p in enumerate(self.p) if not 0.0 <= p <= 1.0), None)
        if bad is not None:
            raise SpecDecError(f"entry {bad + 1} of the trace has p {self.p[bad]}")
        wrong = next((i for i in sorted(self.unknown) if self.accepted[i]), None)
        if wrong is not None:
            raise SpecDecError(f"entry {wrong + 1} of the trace is unknown and accepted")

    def p_of(self, at: int, place: int) -> float:
        """The probability that the drafter gives to token `place` of a draft for token `at` on."""
        return self.p[at + place]

    def is_right(self, at: int, place: int) -> bool:
        """True if token `place` of a draft for token `at` on is the text's."""
        return self.accepted[at + place]

    def runs(self) -> NDArray[np.int64]:
        """For each position, the number of consecutive right tokens that begin there."""
        runs = np.zeros(len(self.p) + 1, np.int64)
        for i in range(len(self.p) - 1, -1, -1):
            runs[i] = runs[i + 1] + 1 if self.accepted[i] else 0
        return runs[:-1]

    def room(self) -> list[int]:
        """For each position, the number of tokens that can be drafted from there.

        Unknown tokens cannot be drafted, nor can the last token, which is the target's own.
        """
        room = [0] * len(self.p)
        for i in range(len(self.p) - 2, -1, -1):
            room[i] = 0 if i in self.unknown else room[i + 1] + 1
        return room


@dataclass(frozen=True)
class Simulated:
    """The result of a policy on a trace. Times have the profile's unit."""

    n_tokens: int
    time: float
    n_rounds: int
    n_drafted: int
    n_accepted: int
    n_steps: int
    n_unknown: int = 0  # times that a policy asked for an unknown token

    @property
    def rate(self) -> float:
        """Tokens per unit of time."""
        return self.n_tokens / self.time


def simulate(
    trace: DraftTrace, profile: CostProfile, policy: Policy, source: str = "draft", block: int = 0
) -> Simulated:
    """Decode the trace with `policy`. Each draft step takes `profile.draft_step_s`.

    With `block`, a step drafts that many tokens. Otherwise it drafts one.
    """
    n, at = len(trace.p), 0
    time = 0.0
    rounds = drafted = accepted = steps = unknown = 0
    rest = 0
    while at < n:
        if rest:
            rest -= 1  # keep the decision not to draft, as the decoding loop does
        else:
            limit = min(policy.n_max, n - at - 1, block or n)
            draft, asked_unknown = _draft(trace, at, policy.begin(limit, source), source)
            unknown += asked_unknown
            rest = draft.decision.rest
            if block and draft.n_steps:
                draft = replace(draft, n_steps=1)
        m = len(draft.tokens)
        n_accepted = 0
        while n_accepted < m and trace.is_right(at, n_accepted):
            n_accepted += 1
        emitted = emitted_of_trace(trace, at, n_accepted)
        verify = profile.time(1 + m)
        drafting = draft.n_steps * profile.draft_step_s
        policy.learn(Round(draft, n_accepted, emitted, drafting, verify))
        at += len(emitted)
        time += verify + drafting
        rounds += 1
        drafted += m
        accepted += n_accepted
        steps += draft.n_steps
    return Simulated(at, time, rounds, drafted, accepted, steps, unknown)


def _draft(trace: DraftTrace, at: int, walk: Walk, source: str) -> tuple[Draft, bool]:
    """Returns the draft, and True if an unknown token cut it short."""
    fed: list[float] = []
    wants = walk.wants
    while wants and at + len(fed) not in trace.unknown:
        fed.append(trace.p_of(at, len(fed)))
        wants = walk.feed(fed[-1])
    m = walk.n_best
    tokens, probs = (_OWN,) * m, tuple(fed[:m])
    dropped = tuple([(_OWN, p) for p in fed[m:]])
    return Draft(tokens, probs, source, Decision(m, "", walk.rest), dropped, (), len(fed)), wants


def emitted_of_trace(trace: DraftTrace, at: int, n_accepted: int) -> tuple[int, ...]:
    """The accepted tokens, then the target's own, which equals the draft's if that is right."""
    right = at + n_accepted < len(trace.p) and trace.is_right(at, n_accepted)
    return (_OWN,) * n_accepted + ((_OWN,) if right else (_OTHER,))


# -- oracles ------------------------------------------------------------------------------------


def constant_rate(trace: DraftTrace, profile: CostProfile, m: int, start: int, stop: int) -> float:
    """Tokens per unit of time if m tokens are drafted in every round from `start` to `stop`."""
    cost = _round_costs(profile, m)
    at, _, _, time = _play_constant(trace.runs().tolist(), trace.room(), cost, m, start, stop)
    return (at - start) / time


def _round_costs(profile: CostProfile, n_max: int) -> list[float]:
    """The time of drafting and verifying 0, 1, ... n_max tokens."""
    return [profile.time(1 + m) + m * profile.draft_step_s for m in range(n_max + 1)]


def _play_constant(
    runs: Sequence[int], room: Sequence[int], cost: Sequence[float], m: int, at: int, stop: int
) -> tuple[int, int, int, float]:
    """Decode from `at` to `stop` with m draft tokens a round; returns (end, rounds, drafted
    tokens, time)."""
    n_rounds, n_drafted, time = 0, 0, 0.0
    while at < stop:
        drafted = min(m, room[at])
        at += min(drafted, runs[at]) + 1
        time += cost[drafted]
        n_drafted += drafted
        n_rounds += 1
    return at, n_rounds, n_drafted, time


def fixed_oracle(trace: DraftTrace, profile: CostProfile, n_max: int) -> Simulated:
    """The best constant draft length of each segment, chosen in hindsight."""
    runs, room, cost = trace.runs().tolist(), trace.room(), _round_costs(profile, n_max)
    bounds = [s for s, _ in trace.segments] + [len(trace.p)]
    at, time, rounds, drafted = 0, 0.0, 0, 0
    for stop in bounds[1:]:
        if at >= stop:
            continue  # the last draft of the previous segment covered all of this one
        options = []
        for m in range(n_max + 1):
            end, n_rounds, n_drafted, took = _play_constant(runs, room, cost, m, at, stop)
            options.append(((end - at) / took, m, end, n_rounds, n_drafted, took))
        _, _, at, n_rounds, n_drafted, took = max(options)
        time += took
        rounds += n_rounds
        drafted += n_drafted
    n_tokens = min(at, len(trace.p))
    return Simulated(n_tokens, time, rounds, drafted, n_tokens - rounds, drafted)


# -- published curves ------------------------------------------------------------------------------


def published_values(name: str) -> tuple[float, ...]:
    """The numbers of a published curve as printed: normalised costs, or tokens per second."""
    return tuple(_published()[name]["values"])


def _published() -> dict[str, dict[str, Any]]:
    text = Path(__file__).with_name("cost_curves.json").read_text("utf-8")
    curves: dict[str, dict[str, Any]] = json.loads(text)["curves"]
    return curves


def published_curves() -> dict[str, CostProfile]:
    """Cost curves by name that others measured and published (llama.cpp #10466, #17034)."""
    curves = {}
    for name, curve in _published().items():
        values = curve["values"]
        if curve["kind"] == "tokens_per_s":
            curves[name] = CostProfile(tuple(n / speed for n, speed in enumerate(values, 1)))
        elif name != "fit_y_data":  # the tail of a curve
            curves[name] = CostProfile.from_normalised(values)
    return curves


# Published curves of mixtures whose rows had the same experts: experts of a layer and of a token.
MIXTURES = {
    "deepseek-r1-0528-q4_x": (256, 8),
    "deepseek-r1-0528-numa": (256, 8),
    "glm-4.6-rpc": (160, 8),
}


def unions_of(name: str) -> list[float]:
    """The experts that 1, 2, ... neighbouring tokens use, as multiples of those of one token."""
    n_experts, n_used = MIXTURES[name]
    sizes = range(1, published_curves()[name].n_max + 1)
    return [float(union_of_neighbours(n, n_used, n_experts)) / n_used for n in sizes]


def curves_with_unions() -> dict[str, CostProfile]:
    """The published curves of mixtures, with the reads of experts that they leave out."""
    curves = published_curves()
    return {f"{name}, with unions": with_unions(curves[name], unions_of(name)) for name in MIXTURES}


# -- traces -------------------------------------------------------------------------------------


def synthetic_trace(
    n: int,
    *,
    seed: int,
    kinds: Sequence[str] = ("code",),
    segment: int = 200,
    confidence: float = 1.0,
) -> DraftTrace:
    """A trace that alternates `kinds` ("code", "prose", "noise") every `segment` tokens.

    The drafter's log-odds are those of the true probability times `confidence`: 1 is calibrated,
    more is over-confident, less is under-confident.
    """
    rng = np.random.default_rng(seed)
    true = np.empty(n)
    segments = []
    for k, start in enumerate(range(0, n, segment)):
        kind = kinds[k % len(kinds)]
        stop = min(n, start + segment)
        true[start:stop] = _draw(rng, kind, stop - start)
        segments.append((start, kind))
    if len(kinds) == 1:
        segments = segments[:1]
    accepted = rng.random(n) < true
    odds = (true / (1 - true)) ** confidence
    said = odds / (1 + odds)
    return DraftTrace(tuple(said.tolist()), tuple(accepted.tolist()), tuple(segments))


_KINDS = {  # share of easy tokens, Beta parameters of easy tokens, Beta parameters of the others
    "code": (0.75, (14.0, 0.7), (1.6, 1.3)),
    "prose": (0.30, (9.0, 1.0), (1.3, 1.9)),
    "noise": (0.02, (5.0, 1.5), (0.6, 9.0)),
}


def _draw(rng: np.random.Generator, kind: str, n: int) -> NDArray[np.float64]:
    """True acceptance probabilities of n tokens of one kind of text."""
    share, easy, other = _KINDS[kind]
    is_easy = rng.random(n) < share
    drawn = np.where(is_easy, rng.beta(*easy, n), rng.beta(*other, n))
    return np.clip(drawn, 1e-4, 1 - 1e-4)


class _Record(BaseModel):
    """One token of a trace's file; p and accepted are null where nobody drafted the token."""

    model_config = ConfigDict(strict=True)
    # A sum of probabilities may exceed 1 by rounding.
    p: Annotated[float, Field(ge=0, le=1.000001)] | None
    accepted: bool | None
    segment: str = "text"


def parse_trace(text: str) -> DraftTrace:
    """JSONL, one {"p": .., "accepted": ..} per token, optionally with "segment".

    Raises SpecDecError naming the line.
    """
    records: list[_Record] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                record = _Record.model_validate_json(line)
            except ValidationError as e:
                why = e.errors()[0]["msg"]
                raise SpecDecError(f"line {number} of the trace is no record of one: {why}") from e
            if (record.p is None) != (record.accepted is None):
                raise SpecDecError(f"line {number} of the trace: p and accepted are null together")
            records.append(record)
    names = [record.segment for record in records]
    starts = [i for i, name in enumerate(names) if not i or names[i - 1] != name]
    return DraftTrace(
        tuple(min(1.0, record.p or 0.0) for record in records),
        tuple(record.accepted is True for record in records),
        tuple((i, names[i]) for i in starts) or ((0, "text"),),
        frozenset(i for i, record in enumerate(records) if record.p is None),
    )
