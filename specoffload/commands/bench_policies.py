"""`specoffload bench --policies`: what drafting brings for this model, its drafters and machine.

Each kind of text is continued without drafts, with blocks of several lengths, by every policy of
`--spec-policy`, and by the default, in turns in one session. The tables show what was drafted and
accepted, the speeds, and the default beside the best fixed setting in hindsight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.table import Table

from offload.times.context_memory import DEFAULT_UBATCH
from offload.times.steadiness import speed_words
from specdec.options import MOST_DRAFTED, PolicyName
from specoffload import report
from specoffload.bench.batch_sizes import SizeSeen, sizes_seen
from specoffload.bench.llama_bench import RowWriter, row_of
from specoffload.bench.load import warn_of_load
from specoffload.bench.policies import (
    DEFAULT,
    NO_DRAFTS,
    Judged,
    PolicyRow,
    Seen,
    Setting,
    buildable,
    compared_speed,
    crossover,
    doubts,
    judge,
    measure,
    rows_of,
    settings_for,
    warm_up,
)
from specoffload.bench.workloads import MEANINGS, judged_prompts, warm_up_prompts
from specoffload.commands.bench import (
    commit,
    machine,
    on_some_device,
    row_conditions,
    with_bench_context,
)
from specoffload.config.options import BenchOptions, WorkloadName
from specoffload.config.resolution import Config
from specoffload.cpu_load import Watch
from specoffload.errors import UsageError
from specoffload.session.session import Session
from specoffload.session.startup_lines import show_always_shown

_FRAMES_PER_S = 4.0
_HEADS = ("", "drafted", "accepted", "DA/DN", "copied, each", "tokens/s", "x no drafts")


@dataclass
class _PolicyMeasurements:
    """Everything measured so far."""

    drafters: tuple[str, ...] = ()
    sizes: list[SizeSeen] = field(default_factory=list)
    priced_s: tuple[float, ...] = ()  # T(n) that the policies begin with, n = 1, 2, ...
    rows: dict[str, list[PolicyRow]] = field(default_factory=dict)  # by workload
    left_out: dict[str, str] = field(default_factory=dict)  # reasons by setting

    def judged(self) -> dict[str, Judged]:
        """The default's comparison by workload."""
        by_workload = {name: judge(rows) for name, rows in self.rows.items()}
        return {name: judged for name, judged in by_workload.items() if judged is not None}


def bench_policies(config: Config, own: BenchOptions) -> None:
    """Measure and print. Ctrl-C ends it with the results so far.

    Raises UsageError if nothing drafts, or if an option leaves nothing to compare.
    """
    config = _checked(config, own)
    if own.output is not None:
        report.only_data(True)
    warn_of_load()
    config = on_some_device(with_bench_context(config))
    measured, watch, began = _PolicyMeasurements(), Watch(), time.perf_counter()
    interrupted: KeyboardInterrupt | None = None
    rows = _PolicyRowWriter(config, own)
    try:
        with Session(config, keeps_hits=False) as session:
            show_always_shown(session.notes)
            _measure_all(session, own, measured, rows)
    except KeyboardInterrupt as e:
        interrupted = e
    load = watch.others()
    doubtful = [*([load.words] if load.is_busy else []), *doubts(measured.rows)]
    rows.end()
    for doubt in doubtful:
        report.note(f"not reliable: {doubt}")
    _show_judged(measured, is_doubtful=bool(doubtful))
    if own.output is None:
        conditions = {
            "machine": machine(), "commit": commit(), "model": config.model.name,
            "device": config.device, "n_predict": own.n_predict, "repetitions": own.repetitions,
            "took_s": time.perf_counter() - began, "unreliable": doubtful,
            "others_share": load.others, "is_partial": interrupted is not None,
        }  # fmt: skip
        report.data(_as_data(measured) | conditions)
    if interrupted is not None:
        report.note("interrupted: these are the repetitions that were complete")
        raise interrupted


def _checked(config: Config, own: BenchOptions) -> Config:
    """`config` with the default policy. Raises UsageError for options that leave nothing to do."""
    spec = config.spec
    if not spec.options.is_on:
        raise UsageError(
            "--policies compares lengths of drafts, and nothing drafts: give --draft DRAFT.gguf or "
            "--spec-type NAME"
        )
    if "policy" in spec.options.given:
        raise UsageError(
            f"--policies compares all policies: leave out {spec.options.name('policy')}, or name "
            "some with --only-policies"
        )
    if own.n_predict < 1:
        raise UsageError("--policies writes texts: -n must be at least 1")
    if max(own.blocks) > MOST_DRAFTED:
        raise UsageError(f"--blocks: {max(own.blocks)} tokens; a draft has at most {MOST_DRAFTED}")
    options = replace(spec.options, policy=PolicyName.THROUGHPUT)
    return replace(config, spec=replace(spec, options=options))


def _measure_all(
    session: Session, own: BenchOptions, measured: _PolicyMeasurements, rows: _PolicyRowWriter
) -> None:
    """Measure the sizes of batches, then each workload, and show each table."""
    speculation = session.speculation
    assert speculation is not None, "_checked refuses configurations without drafts"
    measured.drafters = tuple(map(str, session.choices.spec.options.drafters))
    report.line(f"drafts by {', '.join(measured.drafters)}; {_about_device(session)}")
    asked = settings_for(session.choices.spec.options, own.only_policies, own.blocks)
    settings, measured.left_out = buildable(speculation, asked)
    for name, reason in measured.left_out.items():
        report.note(f"{name} is left out: {reason}")
    with session.target.opened.routing.paused():
        measured.sizes.extend(sizes_seen(session.target))
    measured.priced_s = speculation.costs.step_s
    _show_sizes(measured.sizes, measured.priced_s)
    workloads = own.workloads or tuple(WorkloadName)
    with report.progress("warming up"):
        warm_up(session, settings, warm_up_prompts(workloads), own.n_predict)
    rows.begin(session, settings, workloads)
    clock = _TimeLeft(
        sum([len(judged_prompts(w)) for w in workloads]) * len(settings) * own.repetitions
    )
    for workload in workloads:
        try:
            _measure_one(session, settings, workload, own, measured, clock)
        finally:  # after Ctrl-C, those that are complete
            rows.add(workload, measured.rows.get(workload, ()))


def _about_device(session: Session) -> str:
    threads = session.target.layout.context.n_threads
    return f"{session.target.start.choice.name}, {report.plural(threads or 0, 'thread')}"


def _measure_one(
    session: Session,
    settings: Sequence[Setting],
    workload: WorkloadName,
    own: BenchOptions,
    measured: _PolicyMeasurements,
    clock: _TimeLeft,
) -> None:
    """Measure a workload, and show its table while it fills."""
    seen, texts = Seen(), judged_prompts(workload)
    title = f"{workload}: {MEANINGS[workload]}"
    with _shown(title) as show:

        def turn(name: str, nth: int, seen: Seen) -> None:
            clock.took_turn()
            measured.rows[workload] = rows_of(settings, seen)
            show(measured.rows[workload], clock.words(nth, own.repetitions, name), clock.done)

        try:
            measure(
                session, settings, texts, seen,
                n_predict=own.n_predict, repetitions=own.repetitions, on_turn=turn,
            )  # fmt: skip
        finally:
            measured.rows[workload] = rows_of(settings, seen)
            show(measured.rows[workload], "", clock.done)
    for line in (_by_drafter(measured.rows[workload]), crossover_words(measured.rows[workload])):
        if line:
            report.line(line)


class _TimeLeft:
    """Estimates the time that is left, by the turns taken so far."""

    def __init__(self, n_turns: int) -> None:
        self._n_turns, self._n_taken, self._began_s = n_turns, 0, time.perf_counter()

    def took_turn(self) -> None:
        self._n_taken += 1

    @property
    def done(self) -> float:
        """The fraction of turns that are taken."""
        return self._n_taken / self._n_turns

    def words(self, nth: int, n_repetitions: int, name: str) -> str:
        """A line on what is being measured."""
        passed_s = time.perf_counter() - self._began_s
        left_s = passed_s * (self._n_turns - self._n_taken) / max(1, self._n_taken)
        return (
            f"repetition {nth} of {n_repetitions}, {name}; about {_duration(left_s)} left "
            "(less with --workloads, --only-policies, --blocks, -n, -r)"
        )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


# -- showing ---------------------------------------------------------------------------------------

# Takes rows, a caption, and the fraction done.
_ShowRows = Callable[[Sequence[PolicyRow], str, float], None]


@contextmanager
def _shown(title: str) -> Iterator[_ShowRows]:
    """Show a table that fills while it is measured: on a terminal at once, elsewhere at the end.

    If standard output is no terminal, a bar on standard error shows the progress.
    """
    if report.console().is_terminal and not report.console().quiet:
        with report.live(_FRAMES_PER_S) as draw:
            yield lambda rows, caption, done: draw(lambda _: _table(title, rows, caption))
        return
    last: list[Sequence[PolicyRow]] = []
    try:
        with report.steps(title) as tell:

            def show(rows: Sequence[PolicyRow], caption: str, done: float) -> None:
                last[:] = [rows]
                tell(caption.partition(";")[0], done)

            yield show
    finally:
        for rows in last:
            report.table(title, _HEADS, _cells(rows))


def _table(title: str, rows: Sequence[PolicyRow], caption: str) -> Table:
    made = Table(title=title, caption=caption or None, title_justify="left")
    for i, head in enumerate(_HEADS):
        made.add_column(head, justify="right" if i else "left")
    for cells in _cells(rows):
        made.add_row(*cells)
    return made


def _cells(rows: Sequence[PolicyRow]) -> list[tuple[str, ...]]:
    plain = next((row for row in rows if row.name == NO_DRAFTS), None)
    return [
        (
            f"{row.name} (default)" if row.name == DEFAULT else row.name,
            str(row.n_drafted),
            str(row.n_accepted),
            "" if row.accepted_share is None else f"{row.accepted_share:.2f}",
            report.bytes_text(row.bytes_per_token) if row.streamed_bytes else "",
            speed_words(row.samples_tps, row.tps),
            "" if plain is None else _ratio_words(compared_speed(row, plain), 2),
        )
        for row in rows
    ]


def _ratio_words(ratio: float | None, digits: int, mark: str = "") -> str:
    return "-" if ratio is None else f"{ratio:.{digits}f}{mark}"


def _by_drafter(rows: Sequence[PolicyRow]) -> str:
    """A line on whose drafts the default accepted, or ""."""
    default = next((row for row in rows if row.name == DEFAULT), None)
    if default is None or not default.accepted_by_drafter:
        return ""
    shares = ", ".join(f"{name} {n}" for name, n in default.accepted_by_drafter.items())
    return f"accepted tokens of the default, by drafter: {shares}"


def crossover_words(rows: Sequence[PolicyRow]) -> str:
    """A line on the longest block that still pays, or "" if no block was measured."""
    n = crossover(rows)
    if n is None:
        return ""
    if not n:
        return "every measured block is slower than no drafts"
    longest = max(row.n_block or 0 for row in rows)
    reason = ", the longest that was measured" if n == longest else ""
    tokens = report.plural(n, "token")
    return f"largest block that is at least as fast as no drafts: {tokens}{reason}"


def _show_sizes(sizes: Sequence[SizeSeen], priced_s: Sequence[float]) -> None:
    if not sizes:
        return
    first_s = sizes[0].decode_s
    report.table(
        "what a batch of each size did, by the counters of its decodes",
        ("tokens", "ms", "T(n)/T(1)", "priced at, ms", "computed by", ""),
        [
            (
                str(s.n),
                f"{s.decode_s * 1e3:.2f}",
                f"{s.decode_s / first_s:.2f}",
                f"{priced_s[s.n - 1] * 1e3:.2f}" if s.n <= len(priced_s) else "",
                s.way,
                s.words,
            )
            for s in sizes
        ],
    )


def _show_judged(measured: _PolicyMeasurements, *, is_doubtful: bool) -> None:
    mark = " ?" if is_doubtful else ""
    rows = [
        (
            workload,
            judged.best_fixed,
            _ratio_words(judged.vs_best_fixed, 3, mark),
            _ratio_words(judged.vs_no_drafts, 3, mark),
        )
        for workload, judged in measured.judged().items()
    ]
    if rows:
        report.table(
            "the default beside the best fixed setting in hindsight, and beside no drafts",
            ("text", "best fixed setting", "default / best fixed", "default / no drafts"),
            rows,
        )


def _as_data(measured: _PolicyMeasurements) -> dict[str, Any]:
    judged = measured.judged()
    return {
        "drafters": measured.drafters,
        "sizes": [size.as_data() for size in measured.sizes],
        "priced_s": measured.priced_s,
        "left_out": measured.left_out,
        "workloads": {
            name: {
                "rows": [asdict(row) | {"accepted_share": row.accepted_share} for row in rows],
                "largest_paying_block": crossover(rows),
                **(asdict(judged[name]) if name in judged else {}),
            }
            for name, rows in measured.rows.items()
        },
    }


class _PolicyRowWriter:
    """Writes rows with llama-bench's keys, those of a workload as soon as it is measured."""

    _MORE: Mapping[str, str] = {
        "text": "workload", "policy": "policy", "drafted": "n_drafted", "accepted": "n_accepted",
        "DA/DN": "accepted_share", "median t/s": "median_ts",
    }  # fmt: skip

    def __init__(self, config: Config, own: BenchOptions) -> None:
        self._config, self._own = config, own
        self._conditions: dict[str, Any] = {}
        self._writer: RowWriter | None = None

    def begin(
        self, session: Session, settings: Sequence[Setting], workloads: Sequence[WorkloadName]
    ) -> None:
        """Write what comes before the first row."""
        if self._own.output is None:
            return
        config, context = self._config, session.target.layout.context
        self._conditions = row_conditions(config) | {
            "n_batch": config.batch_size,
            "n_ubatch": context.n_ubatch or DEFAULT_UBATCH,
            "n_threads": context.n_threads or config.threads,
        }
        test = {"n_prompt": 0, "n_gen": self._own.n_predict, "n_depth": 0, "path": "spec"}
        widest = {"n_drafted": 99999, "n_accepted": 99999, "accepted_share": 0.0, "median_ts": 0.0}
        planned = [
            self._conditions | test | widest | {"workload": str(workload), "policy": setting.name}
            for workload in workloads
            for setting in settings
        ]
        self._writer = RowWriter(planned, self._own.output, self._MORE)
        report.raw(self._writer.head)

    def add(self, workload: WorkloadName, rows: Sequence[PolicyRow]) -> None:
        """Write the rows of a workload."""
        if self._writer is None:
            return
        n_gen = self._own.n_predict
        for row in rows:
            samples_s = [n_gen / tps for tps in row.samples_tps]
            data = row_of(self._conditions, "spec", samples_s, n_gen=n_gen)
            data |= {
                "workload": str(workload), "policy": row.name, "n_drafted": row.n_drafted,
                "n_accepted": row.n_accepted, "accepted_share": row.accepted_share,
                "median_ts": row.tps,
            }  # fmt: skip
            report.raw(self._writer.row(data))

    def end(self) -> None:
        """Write what comes after the last row."""
        if self._writer is not None:
            report.raw(self._writer.foot)
