"""Measures draft-length policies against each other in one session, by turns.

All policies are judged alike: by prompts that none has met, by medians of several repetitions, each
of which begins with a new policy and with drafters that remember no text. After each prompt the
next policy comes first, so that a busy machine disturbs all alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from statistics import median

from offload.times.steadiness import if_steady, is_steady, relative_range, speed_words
from specdec.decoding.loop import NO_DRAFT
from specdec.errors import BadProfile
from specdec.options import PolicyName, SpecOptions
from specdec.policies.rules import Fixed
from specdec.types import Draft, DraftRequest, Round
from specoffload.bench.comparison import LEAST_REPETITIONS, MOST_SPREAD
from specoffload.bench.paths import total
from specoffload.generation.generation import GenerateOptions
from specoffload.generation.statistics import GenerationStats
from specoffload.session.session import Session
from specoffload.speculation.speculation import DraftingParts, Speculation

NO_DRAFTS = "no drafts"
DEFAULT = str(PolicyName.THROUGHPUT)
_P_MINS = (0.5, 0.9)  # besides the default of --draft-p-min


@dataclass(frozen=True)
class Setting:
    """A policy with its settings. `options` is None if nothing is drafted.

    `is_fixed` says that a person can choose it once and for all: a block length, or p-min.
    """

    name: str
    options: SpecOptions | None
    is_fixed: bool = False
    n_block: int | None = None  # length of the blocks; 0: no drafts


def settings_for(
    base: SpecOptions, policies: Sequence[PolicyName], blocks: Sequence[int]
) -> list[Setting]:
    """The settings to compare: no drafts, then those of `policies`, the default last. Pure.

    `base` are the options of the session. `policies` are named policies; none means all of them.
    """
    names = policies or tuple(PolicyName)
    settings = [Setting(NO_DRAFTS, None, is_fixed=True, n_block=0)]
    for name in PolicyName:
        if name not in names or name is PolicyName.THROUGHPUT:
            continue
        options = replace(base, policy=name)
        if name is PolicyName.FIXED:
            settings += [
                Setting(f"{name} {n}", replace(options, n_max=n), is_fixed=True, n_block=n)
                for n in blocks
                if n
            ]
        elif name is PolicyName.P_MIN:
            settings += [
                Setting(f"{name} {p:g}", replace(options, p_min=p), is_fixed=True)
                for p in sorted({*_P_MINS, base.p_min})
            ]
        else:
            settings.append(Setting(str(name), options))
    return [*settings, Setting(DEFAULT, replace(base, policy=PolicyName.THROUGHPUT))]


class _NoDrafter:
    """Drafts nothing, as in a session without drafters."""

    name = NO_DRAFT.source

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [NO_DRAFT] * len(requests)

    def learn(self, sequence: int, round_: Round) -> None:
        return

    def heard(self, sequence: int, text: Sequence[int], n_read: int, salt: int = 0) -> None:
        return

    def forget(self, sequence: int) -> None:
        return


@dataclass
class Seen:
    """Repetitions of each setting, by its name. Only complete repetitions are in it."""

    runs: dict[str, list[GenerationStats]] = field(default_factory=dict)

    def tps(self, name: str) -> float:
        """Median tokens/s."""
        return median([run.tokens_per_s for run in self.runs[name]])

    def middle(self, name: str) -> GenerationStats:
        """The repetition of median speed; the faster one of the middle two."""
        by_speed = sorted(self.runs[name], key=lambda run: run.tokens_per_s)
        return by_speed[len(by_speed) // 2]


def buildable(
    speculation: Speculation, settings: Sequence[Setting]
) -> tuple[list[Setting], dict[str, str]]:
    """The settings that fit the measured T(n), and the reason for each of the others by name."""
    fitting, left_out = [], {}
    for setting in settings:
        try:
            _begun(speculation, setting)
        except BadProfile as e:
            left_out[setting.name] = str(e)
        else:
            fitting.append(setting)
    return fitting, left_out


def _begun(speculation: Speculation, setting: Setting) -> DraftingParts:
    if setting.options is None:
        return DraftingParts(_NoDrafter(), Fixed(0))
    return speculation.begun(setting.options)


OnTurn = Callable[[str, int, Seen], None]
"""Gets the name of a setting that has written, the number of the repetition from 1 on, and what is
complete so far."""


def measure(
    session: Session,
    settings: Sequence[Setting],
    texts: Sequence[str],
    seen: Seen,
    *,
    n_predict: int,
    repetitions: int,
    on_turn: OnTurn = lambda *_: None,
) -> None:
    """Continue all texts with each setting, `repetitions` times, and add the results to `seen`.

    If it is interrupted, `seen` has the repetitions that were complete.
    """
    speculation = session.speculation
    assert speculation is not None, "the session was opened with drafters"
    prompts = [_cut(session, text, n_predict) for text in texts]
    n_turns = 0
    with _restored(speculation):
        for nth in range(1, repetitions + 1):
            parts = {setting.name: _begun(speculation, setting) for setting in settings}
            written: dict[str, list[GenerationStats]] = {s.name: [] for s in settings}
            for prompt in prompts:
                for i in range(len(settings)):
                    setting = settings[(n_turns + i) % len(settings)]
                    speculation.use(parts[setting.name])
                    written[setting.name].append(_write(session, setting, prompt, n_predict))
                    if len(written[setting.name]) == len(prompts):
                        seen.runs.setdefault(setting.name, []).append(total(written[setting.name]))
                    on_turn(setting.name, nth, seen)
                n_turns += 1


_N_WARM = 16  # tokens that each setting writes before the timed repetitions


def warm_up(
    session: Session, settings: Sequence[Setting], texts: Sequence[str], n_predict: int
) -> None:
    """Continue `texts` with the session's own policy, whose calibration the default begins with.

    Then each setting writes a few tokens, so that no timed repetition is its first work.
    """
    own = Setting(DEFAULT, SpecOptions())
    for text in texts:
        _write(session, own, _cut(session, text, n_predict), n_predict)
    n = min(_N_WARM, n_predict)
    measure(session, settings, texts[:1], Seen(), n_predict=n, repetitions=1)


def _cut(session: Session, text: str, n_predict: int) -> list[int]:
    """The last tokens of `text` that leave room for the answer and its drafts."""
    tokens = session.tokenize(text, add_special=True, parse_special=False)
    room = max(1, session.target.n_ctx - n_predict - session.target.layout.context.n_outputs)
    return tokens[-room:]


def _write(
    session: Session, setting: Setting, prompt: Sequence[int], n_predict: int
) -> GenerationStats:
    """Continue a prompt greedily. Nothing of earlier texts is kept.

    Decodes of the default and of no drafts correct T(n) and repeat timings of split layers, as both
    do in a session of their own. Those of other settings do not, because what a decode takes
    depends on the decodes before it, since they filled the slots.
    """
    session.forget()
    learns = setting.name == DEFAULT or setting.options is None
    rows = session.target.opened.row_draft if setting.options is None else None
    n_max = 0 if setting.options is None else None
    options = GenerateOptions(n_predict=n_predict, ignore_eos=True, draft_max=n_max)
    with (
        nullcontext() if rows is None else rows.paused(),
        nullcontext() if learns else session.costs.paused(),
    ):
        *_, last = session.generate(prompt, options)
    assert last.stats is not None, "a generation ends with its statistics"
    return last.stats


@contextmanager
def _restored(speculation: Speculation) -> Iterator[None]:
    """Put the session's own drafter and policy back at the end."""
    before = speculation.parts
    try:
        yield
    finally:
        speculation.use(before)


# -- summing up ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PolicyRow:
    """A setting on a workload. The counts are of the repetition of median speed."""

    name: str
    is_fixed: bool
    n_block: int | None
    n_repetitions: int
    n_tokens: int
    n_drafted: int
    n_accepted: int
    streamed_bytes: int
    tps: float
    samples_tps: tuple[float, ...]
    accepted_by_drafter: Mapping[str, int]

    @property
    def bytes_per_token(self) -> float:
        """Bytes of weights that were copied to the device for a token of the text."""
        return self.streamed_bytes / self.n_tokens if self.n_tokens else 0.0

    @property
    def accepted_share(self) -> float | None:
        """Accepted ÷ drafted tokens (DA/DN); None if nothing was drafted."""
        return self.n_accepted / self.n_drafted if self.n_drafted else None


def rows_of(settings: Sequence[Setting], seen: Seen) -> list[PolicyRow]:
    """A row for each setting with a complete repetition, in the order of `settings`. Pure."""
    rows = []
    for setting in settings:
        if setting.name not in seen.runs:
            continue
        middle = seen.middle(setting.name)
        rows.append(
            PolicyRow(
                setting.name,
                setting.is_fixed,
                setting.n_block,
                len(seen.runs[setting.name]),
                middle.n_tokens,
                middle.n_drafted,
                middle.n_accepted,
                middle.streamed_bytes,
                seen.tps(setting.name),
                tuple([run.tokens_per_s for run in seen.runs[setting.name]]),
                {name: n for name, n in middle.accepted_by_source if n},
            )
        )
    return rows


@dataclass(frozen=True)
class Judged:
    """The default on a workload, compared with the best fixed setting and with no drafts.

    `by_repetition` has both ratios of each repetition: to the setting that is best by medians, and
    to no drafts. A ratio that means nothing is None.
    """

    best_fixed: str
    vs_best_fixed: float | None
    vs_no_drafts: float | None
    by_repetition: tuple[tuple[float, float], ...]


def compared_speed(row: PolicyRow, other: PolicyRow) -> float | None:
    """The speed of `row` over that of `other`, or None if the ratio means nothing. Pure."""
    spreads = {of.name: relative_range(of.samples_tps) for of in (row, other)}
    return if_steady(row.tps / other.tps, *spreads.values())


def judge(rows: Sequence[PolicyRow]) -> Judged | None:
    """Compare the default with the best fixed setting in hindsight. None if a row lacks. Pure.

    No drafts are a fixed setting too. The default is no fixed setting.
    """
    by_name = {row.name: row for row in rows}
    default, plain = by_name.get(DEFAULT), by_name.get(NO_DRAFTS)
    if default is None or plain is None:
        return None
    best = max([row for row in rows if row.is_fixed], key=lambda row: row.tps)
    samples = zip(default.samples_tps, best.samples_tps, plain.samples_tps, strict=False)
    return Judged(
        best.name,
        compared_speed(default, best),
        compared_speed(default, plain),
        tuple([(d / b, d / p) for d, b, p in samples]),
    )


def crossover(rows: Sequence[PolicyRow]) -> int | None:
    """Length of the longest measured block that is at least as fast as no drafts. Pure.

    Returns 0 if every block is slower. Returns None if no drafts or no block were measured, or if
    their speeds mean nothing.
    """
    plain = next((row for row in rows if row.name == NO_DRAFTS), None)
    ratios = {row.n_block: compared_speed(row, plain) for row in rows if row.n_block and plain}
    if not ratios or None in ratios.values():
        return None
    return max([n for n, ratio in ratios.items() if ratio and ratio >= 1], default=0)


def doubts(rows: Mapping[str, Sequence[PolicyRow]]) -> list[str]:
    """A sentence for each reason in the rows, by workload, why ratios may be far off. Pure."""
    every = [row for of in rows.values() for row in of]
    n = min([row.n_repetitions for row in every], default=0)
    words = []
    if n < LEAST_REPETITIONS:
        words.append(f"with {n} measured repetitions the spread is unknown (-r N)")
    for workload, of in rows.items():
        for name in (DEFAULT, NO_DRAFTS):
            for row in (row for row in of if row.name == name):
                spread = relative_range(row.samples_tps)
                if not is_steady(spread):
                    speeds = speed_words(row.samples_tps, row.tps)
                    words.append(
                        f"{workload}: {name} wrote {speeds} tokens/s, so no ratio of it means "
                        "anything"
                    )
                elif spread > MOST_SPREAD:
                    words.append(f"{workload}: {name} varied by {spread:.0%}")
    return words
