"""A session's costs: loaded or measured at the start, corrected while serving, and kept at the end.

One table serves --min-batch auto, --hybrid auto, and T(n), which is the price of drafts.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from offload.decode import SMALL_BATCH
from offload.engine import Engine
from offload.errors import DeviceFailed, OffloadError
from offload.measuring import (
    last_splits,
    measure,
    measure_split,
    n_most_at_once,
    n_repeats_of,
    streamed_kinds,
    too_short,
    use_split_costs,
    ways_of,
)
from offload.notes import Note, NoteKind, OnProgress
from offload.plan.expected_costs import expected_costs
from offload.routing.routing import counted_unions
from offload.schedule.division import MeasuredCosts
from offload.times.hits import Sharing
from offload.times.learner import Learner
from offload.times.min_batch import MinBatch, by_rule
from offload.times.search import TimingRequest, left_out, noise
from offload.times.table import CostTable, Way, ranges
from offload.units import milliseconds, plural
from specdec.decoding.loop import StepReport
from specdec.errors import BadProfile
from specoffload.config.options import Toggle
from specoffload.cpu_load import Watch
from specoffload.generation.generation import ignore
from specoffload.kept import Kept, KeptFile, KeptRun, settings_of, today
from specoffload.kept_bounds import is_old
from specoffload.opening.choices import StartChoices
from specoffload.opening.draft_model import DraftModel, real_text
from specoffload.speculation.draft_prices import DraftPrices
from specoffload.speculation.split_retiming import SplitRetiming

_STEP = "measuring this machine"
_LEAST_DECODES = 16  # decodes below which a session keeps nothing at its end

log = logging.getLogger("specoffload.session")


def _left_to_cpu(target: Engine) -> list[str]:
    """Return a sentence for each device that does not stream all batches that were asked for."""
    lines = []
    for device in target.opened.devices:
        first, *more = device.declined or [""]
        others = f", and {plural(len(more), 'other reason')} (-v)" if more else ""
        if first:
            lines.append(f"--min-batch: the CPU computes some of these batches: {first}{others}")
    return lines


@dataclass(frozen=True)
class Thorough:
    """How `tune` measures: for at most `most_s` seconds, each size at least `n_least` times."""

    most_s: float
    n_least: int
    disturbed: Callable[[], str] = lambda: ""  # a clause if something disturbed the measurement


class SessionCosts:
    """Loads or measures costs when opened. `on_step` learns from decodes; `close` saves them."""

    def __init__(
        self,
        choices: StartChoices,
        target: Engine,
        draft: DraftModel | None,
        on_progress: OnProgress = ignore,
        say: Callable[[str], None] = log.warning,
        *,
        drafts: bool = False,
        thorough: Thorough | None = None,
    ) -> None:
        """Load the kept costs, or measure for some seconds.

        With `drafts`, T(n) is loaded or measured to price drafts. `say` is called with a sentence
        when the session begins to compute batches in another way. Raises BadProfile if the context
        is too short to measure in, and DeviceFailed if --hybrid on is given and layers cannot be
        split.
        """
        self._choices, self._target, self._say = choices, target, say
        self._on_progress, self._thorough = on_progress, thorough
        spec = choices.spec
        self._file = None if spec.kept_folder is None else KeptFile(spec.kept_folder, target.facts)
        self._prices = drafts and (spec.needs_profile or not spec.options.is_on)
        # Experts that are read from the disk are read for the device alone.
        self._fixed = target.layout.min_batch if target.reads_experts else choices.min_batch
        self._kinds = streamed_kinds(target)
        self._toggle = choices.hybrid.toggle
        self.notes: list[str] = []
        self.learner: Learner | None = None
        self._retiming: SplitRetiming | None = None  # None: no layer is split
        self.reason = ""
        if self._kinds and self._fixed is None and self._file is None:
            self._fixed = by_rule(target.facts.n_experts, target.facts.n_experts_used)
            words = self._fixed.words(self._kinds)
            words = f"--min-batch: nothing is measured, by rule {words}"
            self.notes.append(Note(NoteKind.MIN_BATCH, words))
            target.set_min_batch(self._fixed)
        splits = target.opened.weights.hybrid is not None and self._toggle is not Toggle.OFF
        if splits and not choices.hybrid.asked and self._file is None:
            self.notes.append("--hybrid: nothing is measured, so no layer is split")
            splits = False
        target.opened.weights.ways.change(may_split=False)
        if self._kinds and self._file is None:
            target.build_anew()  # replaces the warm-up's graph, with its thresholds and splits
        self._splits = splits
        facts = target.facts
        n_used = facts.n_experts_used if facts.n_experts else 0
        self._nothing = CostTable(facts.n_experts, min(n_used, facts.n_experts))
        sharing = Sharing() if target.opened.plan is None else target.opened.plan.sharing
        self.refused = ""  # why a thorough measurement is not kept; "": it is, or there was none
        self.run = KeptRun(settings_of(target, self._fixed), sharing, self._nothing)
        self.drafts = DraftPrices(spec, target, draft)
        self._n_decodes = self._n_again = 0
        self._is_paused = False
        with nullcontext() if target.opened.row_draft is None else target.opened.row_draft.paused():
            self._open()
        if drafts:
            learner = self.learner if self._prices else None
            usual = None if learner is None else self._ways_at(1)[0]
            self.notes += self.drafts.price(self.run, learner, usual)
        if choices.min_batch is not None:
            for words in _left_to_cpu(target):
                log.warning("%s", words)

    # -- opening -----------------------------------------------------------------------------------

    @property
    def _needs_table(self) -> bool:
        """True if the table is needed to choose a way or to price drafts."""
        ways = self._ways()
        chooses = len(ways) > (1 if self._toggle is not Toggle.ON or not self._splits else 2)
        return self._prices or chooses or self._thorough is not None

    def _ways(self) -> tuple[Way, ...]:
        return ways_of(self._target, fixed=self._fixed is not None, splits=self._splits)

    def _open(self) -> None:
        """Load the kept costs, measure those that are missing, and apply them."""
        target, began = self._target, perf_counter()
        if not (self._needs_table or self._splits):
            self._say_not_split()
            return
        reason = "nothing is kept"
        if self._file is not None:
            kept, self.reason = self._file.load()
            run, reason = kept.run(self.run.settings, self.run.sharing)
            reason = self.reason or reason
            if run is not None:
                self.run = run
                if self._splits and self._doubts_split:
                    reason = "kept times of split layers contradict each other"
                elif self._splits and not self._split_costs:
                    reason = "no times of split layers are kept"
        before = copy.deepcopy(self.run) if self.run.table.is_measured else None
        is_new = self._measure_if_needed()
        if self.refused:
            self._put_back(before)
        if is_new:
            self.run.date = today()
        if is_new or self._n_again:
            self._keep()
        if is_new:
            took_s = perf_counter() - began
            not_kept = f"not kept{self.refused and ', because '}{self.refused}"
            how = f"measured in {took_s:.1f} s, {f'since {reason}' if self._file else not_kept}"
        else:
            again = f"; {self._n_again} that contradicted others timed again" * bool(self._n_again)
            how = f"{reason}{again}, kept in {self._file.path}" if self._file else reason
        target.set_min_batch(self._choose(), is_measured=self._fixed is None)
        if not self._learns():
            target.build_anew()
        if self._splits and self._split_costs and not target.reads_experts:
            self._retiming = SplitRetiming(
                self._split_costs,
                lambda: last_splits(target),
                lambda costs: use_split_costs(target, costs),
                self._reconsider_splits,
                is_confirmed=not is_old(self.run.split_date, today()),
            )
        self._say_chosen(how)

    def _measure_if_needed(self) -> bool:
        """Measure the missing costs. Returns True if something was measured anew."""
        target, run = self._target, self.run
        is_new = False
        is_thorough = self._thorough is not None
        if self._splits and (is_thorough or self._doubts_split or not self._split_costs):
            self._on_progress(_STEP, 0.0)
            try:
                watch = Watch()
                by_device = measure_split(target, is_busy=lambda: watch.others().is_busy)
                self._put_split(by_device)
                run.split_date = ""
            except DeviceFailed as e:
                self._cannot_split(e)
            is_new = bool(self._split_costs)
        if self._splits:
            use_split_costs(target, self._split_costs)
            self._splits = not target.opened.weights.ways.now.declined
        if not self._needs_table:
            return is_new
        ways = self._ways()
        text = real_text(target)
        if too_short(target, text):
            raise BadProfile(f"a context of {target.n_ctx} tokens is too short to measure in")
        if self._thorough or any(not run.table.measured(w) for w in ways) or self._is_short():
            self._pass(ways, text)
            is_new = True
        elif self._doubted(ways):
            self._time_again(ways, text)
        if self._prices:
            is_new |= self.drafts.measure(self.run)
        return is_new

    @property
    def _split_costs(self) -> dict[str, MeasuredCosts]:
        """The run's times of a split layer, by the name of the device."""
        run = self.run
        return run.splits if run.split is None else {self._target.start.choice.name: run.split}

    @property
    def _doubts_split(self) -> bool:
        """True if a disturbed measurement of a split layer was kept, so that it is timed again."""
        return any(costs.is_doubtful for costs in self._split_costs.values())

    def _put_split(self, costs: Mapping[str, MeasuredCosts]) -> None:
        """Write times of a split layer, by the name of the device, into the run."""
        if len(self._target.start.choices) > 1:
            self.run.splits = dict(costs)
        else:
            self.run.split = next(iter(costs.values()), None)

    def _cannot_split(self, error: DeviceFailed) -> None:
        if self._toggle is Toggle.ON:
            raise error
        target = self._target
        self._splits = False  # --hybrid auto: the session starts without split layers
        target.sequences.rewind(0, 0)
        target.build_anew()
        flag = f"--hybrid {self._toggle}"
        self.notes.append(f"{flag}: no layer is split: measuring it failed: {error}")

    @property
    def _n_verify(self) -> int:
        """Tokens of the largest verification batch that this session can decode."""
        return min(SMALL_BATCH, self._target.n_ctx - 1, self._target.layout.context.n_outputs)

    def _is_short(self) -> bool:
        """True if the kept T(n) lacks batch sizes that this session may draft and can measure."""
        wanted = min(1 + self._choices.spec.longest, self._n_verify)
        return self._prices and self.run.n_verify < wanted

    def _pass(self, ways: Sequence[Way], text: Sequence[int]) -> None:
        target, thorough = self._target, self._thorough
        table = self.run.table
        if thorough is None:
            self.run.table = table = self._expected(ways)
        edges = () if self._fixed is None else (self._fixed.experts, self._fixed.dense)
        request = TimingRequest(
            tuple(ways),
            n_least=1 if thorough is None else thorough.n_least,
            since=today(),
            edges=tuple(n for edge in edges for n in (edge - 1, edge) if 0 < n <= SMALL_BATCH),
        )
        try:
            measure(
                target, text, table, request, today(),
                most_s=self._choices.spec.measure_s if thorough is None else thorough.most_s,
                on_progress=lambda share: self._on_progress(_STEP, share),
                # A thorough measurement saves each entry at once, so it can be interrupted.
                on_entry=(lambda: None) if thorough is None else self._keep_repeated,
            )  # fmt: skip
        except DeviceFailed as e:
            if Way.SPLIT not in ways:
                raise
            self._cannot_split(e)
            self._pass([way for way in ways if way is not Way.SPLIT], text)
        counted = counted_unions(target.opened.routing.recorded(), table.n_experts)
        unions = counted or table.unions
        self.run.table = replace(self.run.table.without_modelled(), unions=unions)
        self.run.n_verify = self._n_verify
        if thorough is not None:
            self.run.n_least = thorough.n_least
            request = replace(request, n_repeats=n_repeats_of(thorough.n_least))
            self.refused = thorough.disturbed() or noise(self.run.table, request)
            self._drop_single_timings(ways)

    def _drop_single_timings(self, ways: Sequence[Way]) -> None:
        """Leave sizes that were timed once out of the table, and say which. They may be noise."""
        table, single = self.run.table, left_out(self.run.table, ways)
        if self.refused or not single:
            return
        for way, n in single:
            del table.ways[way][n]
        sizes = ranges(sorted({n for _, n in single}))
        self.notes.append(
            f"batches of {sizes} tokens were timed only once, which is not kept (--minutes)"
        )

    def _put_back(self, before: KeptRun | None) -> None:
        """Keep what was kept before the measurement, and nothing from now on."""
        if self._file is not None:
            run = self.run
            self._file.update(lambda kept: kept.drop(run) if before is None else kept.put(before))
        self._file = None

    def _keep_repeated(self) -> None:
        """Write the entries that were timed more than once, so that an interrupted run goes on."""
        whole = self.run.table
        kept = {
            way: {n: e for n, e in entries.items() if e.n_timed != 1}
            for way, entries in whole.ways.items()
        }
        self.run.table = replace(whole, ways=kept)
        try:
            self._keep()
        finally:
            self.run.table = whole

    def _expected(self, ways: Sequence[Way]) -> CostTable:
        """The costs that the machine model expects. A first start times the least certain sizes."""
        target = self._target
        if target.opened.plan is None or self._fixed is not None:
            return replace(self._nothing, ways={})
        table = expected_costs(target.layout, target.opened.plan, n_most_at_once(target))
        return replace(table, ways={way: e for way, e in table.ways.items() if way in ways})

    def _doubted(self, ways: Sequence[Way]) -> list[tuple[Way, int]]:
        table, most = self.run.table, min(SMALL_BATCH, self._target.n_ctx - 1)
        return [(way, n) for way in ways for n in table.doubted(way, most)]

    def _time_again(self, ways: Sequence[Way], text: Sequence[int]) -> None:
        """Time those batch sizes again whose times contradict the times of other sizes."""
        doubted, table = self._doubted(ways), self.run.table
        again = replace(self._nothing, ways={})
        request = TimingRequest(tuple(ways), again=frozenset(doubted))
        measure(self._target, text, again, request, today())
        for way, entries in again.ways.items():
            for n, entry in entries.items():
                table.retried(way, n, entry)
        self._n_again = len(doubted)

    # -- choosing by the table ---------------------------------------------------------------------

    def _choose(self) -> MinBatch:
        """The user's thresholds if given, else those that the table implies."""
        if self._fixed is not None or not self._kinds:
            return self._target.min_batch
        return self.run.table.min_batch(n_most_at_once(self._target))

    def _most_split(self) -> int:
        return min(SMALL_BATCH, n_most_at_once(self._target)) if self._splits else 0

    def _ways_at(self, n: int) -> tuple[Way, ...]:
        """The ways to compute a batch of `n` tokens, the usual one first."""
        ways = tuple(way for way in self._ways() if way is not Way.DENSE)
        if n > self._most_split():
            return tuple(way for way in ways if way is not Way.SPLIT)
        return (Way.SPLIT,) if self._toggle is Toggle.ON else ways

    def _learns(self) -> bool:
        """Start the learner if the table has a way to compute every batch. Returns True if so.

        Otherwise makes the engine split all layers or none, and returns False.
        """
        target = self._target
        known = [way for way in self._ways() if self.run.table.has(way)]
        if (
            known
            and self._needs_table
            and all(any(way in known for way in self._ways_at(n)) for n in (1, SMALL_BATCH))
        ):
            self.learner = Learner(
                self.run.table, SMALL_BATCH, self._ways_at,
                draft_step_s=self.drafts.step_s(self.run), on_ways=self._go, trying=self._trying,
                say=self._say,
            )  # fmt: skip
            measured = [way for way in known if self.run.table.measured(way)]
            if measured:
                # The control of threads uses these times until the engine has measured its own.
                usual = dict(enumerate(self.run.table.curve(SMALL_BATCH, measured), 1))
                target.opened.threads.expected_s = usual.get
            self._go()
            return True
        unsplit = frozenset(range(1 + self._most_split(), SMALL_BATCH + 1))
        target.opened.weights.ways.change(may_split=self._splits, unsplit=unsplit)
        return False

    def _reconsider_splits(self) -> None:
        """Let the learner soon try split decodes, because their costs changed much."""
        if self.learner is not None:
            self.learner.reconsider(Way.SPLIT)

    def _go(self, *, after_logits: bool = False) -> None:
        """Make the engine compute each batch size the way that the learner chose."""
        learner, target = self.learner, self._target
        if learner is None:
            return
        chosen = {n: learner.way(n) for n in range(1, SMALL_BATCH + 1)}
        unsplit = frozenset(n for n, way in chosen.items() if way is not Way.SPLIT)
        ways = replace(target.opened.weights.ways.now, may_split=self._splits, unsplit=unsplit)
        if self._fixed is None and self._kinds:
            base = replace(ways.min_batch, swapped=frozenset())
            swapped = {
                n
                for n, way in chosen.items()
                if way in (Way.IN_PLACE, Way.STREAMED)
                and (way is Way.STREAMED) != base.streams(n, experts=True)
            }
            wanted = replace(base, swapped=frozenset(swapped))
            each = target.min_batches_of(wanted)
            ways = replace(ways, min_batch=wanted, min_batches=each)
        target.opened.weights.ways.use(ways)
        with suppress(OffloadError):  # the old graph stays in use if a new one has no room
            target.build_anew(after_logits=after_logits)

    @contextmanager
    def _trying(self) -> Iterator[None]:
        """Compute a batch size in the way that the learner tries, inside the context.

        The end asks the learner for all ways again, because trials of other sizes may be under way,
        and because the way that was tried may have won.
        """
        self._go(after_logits=True)
        yield  # without `finally`: if the session is closed meanwhile, the engine is closed, too
        self._go(after_logits=True)

    @property
    def priced(self) -> Learner | None:
        """The learner whose costs the policy reads while serving; None if it reads none."""
        return self.drafts.given or (self.learner if self._prices else None)

    # -- lines -------------------------------------------------------------------------------------

    def _say_not_split(self) -> None:
        """Add a line if no layer is split although the user asked, or because of another flag."""
        chosen, streams = self._choices.hybrid, "experts" in self._kinds
        flag = f"--hybrid {chosen.toggle}"
        if self._target.opened.weights.hybrid is not None:
            return
        if chosen.toggle is Toggle.OFF:
            if chosen.reason and streams:
                self.notes.append(f"--hybrid: {chosen.reason}")
        elif chosen.asked:
            self.notes.append(f"{flag}: no layer is split, because no experts stream")

    def _say_chosen(self, how: str) -> None:
        target = self._target
        self._say_not_split()
        if self.learner is not None:
            self.notes.append(f"speeds: {how}")
        if used := {n: round(u, 1) for n in (1, 2, 4, 8) if (u := self.run.table.experts(n))}:
            each = ", ".join(f"{u:g} for {n}" for n, u in used.items())
            self.notes.append(
                f"experts: a layer used {each} tokens of the measured text, of "
                f"{self.run.table.n_experts}"
            )
        if self._fixed is None and self._kinds:
            words = f"--min-batch auto: {target.min_batch_words(self._kinds)}"
            self.notes.append(Note(NoteKind.MIN_BATCH, words))
        if target.opened.weights.hybrid is None or self._toggle is Toggle.OFF:
            return
        ways, flag = target.opened.weights.ways.now, f"--hybrid {self._toggle}"
        if ways.declined:
            self.notes.append(f"{flag}: {ways.declined}")
            return
        if not self._splits:
            return
        sizes = ways.split_sizes
        if self._toggle is Toggle.ON:
            self.notes.append(f"{flag}: layers are split in batches of up to {len(sizes)} tokens")
        elif sizes:
            self.notes.append(
                f"{flag}: layers are split in batches of {ranges(sizes)} tokens{self._both(sizes)}"
            )
        else:
            self.notes.append(
                f"{flag}: no layer is split, because that is not faster{self._both()}"
            )
        if self._choices.hybrid.asked and not self._target.start.options.streaming.prefetch:
            self.notes.append(f"{flag}: without prefetch no expert is copied for later")
        known, several = self._split_costs, len(self._target.start.choices) > 1
        for name, measured in known.items():
            where = f" on {name}" if several else ""
            self.notes.append(f"split layers{where}: {measured.words}")
        if not known:
            words = "no layer could be timed: hits are the device's, others the CPU's"
            self.notes.append(f"split layers: {words}")

    def _both(self, sizes: Sequence[int] = (1,)) -> str:
        """Times of the first of `sizes`, split and otherwise, in brackets; "" if one is unknown."""
        table, n = self.run.table, sizes[0]
        others = [way for way in self._ways_at(n) if way is not Way.SPLIT and table.has(way)]
        if not others or not table.has(Way.SPLIT):
            return ""
        split_s, other_s = table.seconds(Way.SPLIT, n), table.best(n, others)[1]
        size = "1 token" if n == 1 else f"{n} tokens"
        return f" ({size}: {milliseconds(split_s)} split, {milliseconds(other_s)} otherwise)"

    # -- while serving -----------------------------------------------------------------------------

    def on_step(self, report: StepReport) -> None:
        """Learn from a step's decodes."""
        if self._is_paused:
            return
        for n_tokens, seconds in report.decodes:
            self._n_decodes += 1
            if self.learner is not None:
                self.learner.took(n_tokens, seconds)
            if self.drafts.given is not None:
                self.drafts.given.took(n_tokens, seconds)
        if self._retiming is not None:
            self._retiming.on_step(report)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Learn nothing inside the context, because the session does not draft as it usually does.

        What a decode takes depends on the decodes before it, since they filled the slots. Trials of
        ways end, because nothing would judge their decodes.
        """
        if self.learner is not None:
            self.learner.end_trials()
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    @property
    def kept_in(self) -> Path | None:
        """The kept file; None if nothing is kept."""
        return None if self._file is None else self._file.path

    @property
    def learns(self) -> bool:
        """True if `on_step` does anything."""
        parts = self.learner, self.drafts.given, self._retiming
        return any(part is not None for part in parts)

    def counters(self) -> dict[str, float]:
        """Numbers of trials and changes of ways, and of decodes that retried a doubtful size."""
        learner, retiming, counts = self.learner, self._retiming, {}
        if learner is not None:
            counts = {
                "split_trials": learner.n_trials,
                "split_changes": learner.n_changes,
                "size_retries": learner.n_retries,
            }
        if retiming is not None:
            counts["split_timings"] = retiming.n_timings
        return dict(counts)

    @property
    def copies_s(self) -> dict[str, float]:
        """The seconds of an expert's copy alone, as serving timed it, by the name of the device."""
        return {} if self._retiming is None else self._retiming.copies_s

    def close(self) -> None:
        """Write the learnt costs to the kept file, unless there were too few decodes."""
        learner, retiming = self.learner, self._retiming
        if self._file is None or self._n_decodes < _LEAST_DECODES:
            return
        if learner is not None:
            self.run.table = learner.table(today())
            self.drafts.keep(self.run, learner if self._prices else None)
        if retiming is not None and retiming.n_timings:
            self._put_split(retiming.costs)
            if not retiming.is_first:
                self.run.split_date = today()
        elif learner is None:
            return
        if failed := self._keep():
            log.warning(failed)

    def _keep(self) -> str:
        """Write the run, unless a more thorough one is kept. Returns a reason, or ""."""
        run = self.run
        if self._file is None or not (run.table.is_measured or self._split_costs):
            return ""

        def change(kept: Kept) -> None:
            there = kept.run(run.settings, run.sharing)[0]
            if there is None or there.n_least <= run.n_least:
                kept.put(run)

        failed = self._file.update(change)
        if failed and failed not in self.notes:
            self.notes.append(Note(NoteKind.LOST, failed))
        return failed
