"""The part of `specoffload tune` that finds the fastest ubatch by prompts and decodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from offload.device import choose_device
from offload.engine import Engine
from offload.errors import DoesNotFit
from offload.measuring import LEAD_TOKENS, TextWalk, decode_s
from offload.plan.placement import workload_of
from offload.plan.sharing import UBATCHES
from offload.plan.ubatch_search import (
    SIZES,
    UbatchTrial,
    fastest_ubatch,
    next_ubatch,
    trial_of,
)
from offload.plan.workload import PlannedWork
from specoffload import report
from specoffload.commands.profile import measuring_config
from specoffload.config.resolution import Config
from specoffload.cpu_load import Watch
from specoffload.kept import KeptFile, KeptUbatch, today
from specoffload.kept_doubts import comparable
from specoffload.opening.draft_model import real_text
from specoffload.opening.header import target_facts
from specoffload.opening.kept_plan import kept_for_plan, ubatch_settings
from specoffload.session.session import SEQUENCE, Session

UbatchRow = tuple[str, str, str]  # what was searched, what was chosen, and why

_NAME = "--ubatch-size"
_N_UBATCHES = 2  # full ubatches of a timed prompt, because the first one also fills slots
_N_PROMPTS = 3
_N_DECODES = 7  # timed decodes of one token
_ROOM = 8  # tokens of the context that stay free


def tuned_ubatch(config: Config, *, time_limit_s: float) -> tuple[Config, UbatchRow]:
    """Return the configuration with the fastest ubatch, found now or kept today, and the reason.

    Each trial is kept at once, so that an interrupted search goes on. Raises OffloadError.
    """
    if config.ubatch_size is not None:
        return config, (_NAME, str(config.ubatch_size), "not searched: it was given")
    if config.spec.kept_folder is None:
        reason = "not searched: nothing is kept (SPECOFFLOAD_WITHOUT=profile)"
        return config, (_NAME, "planned", reason)
    if not choose_device(config.device).wrapped and not config.remote.is_used:
        return config, (_NAME, "planned", "not searched: the CPU computes alone")
    work = _workload(config)
    if not work.n_prompt:
        return config, (_NAME, "planned", "not searched: --plan-for decode has no prompts")
    search = _UbatchSearch(config, work, time.monotonic() + time_limit_s)
    with report.steps(config.alias or config.model.name) as on_progress:
        reason = search.run(
            lambda n: on_progress(f"prompts, {n or 'as planned, many'} tokens at once", 0.0)
        )
    chosen = search.kept.n_ubatch
    if reason:
        return config, (_NAME, "planned", reason)
    config = replace(config, tuned_ubatch=chosen)
    return config, (_NAME, str(chosen), search.words)


def _workload(config: Config) -> PlannedWork:
    mix = config.mix or kept_for_plan(config).mix
    n_ctx = config.ctx_size or target_facts(config).n_ctx_train
    return workload_of(n_ctx, mix)


class _UbatchSearch:
    """Tries one ubatch after the other, and keeps what it measures."""

    def __init__(self, config: Config, work: PlannedWork, ends_s: float) -> None:
        assert config.spec.kept_folder is not None
        self._config, self._work, self._ends_s = config, work, ends_s
        self._file = KeptFile(config.spec.kept_folder, target_facts(config))
        settings = ubatch_settings(config)
        last = self._file.load()[0].ubatch(settings)
        if last is None or last.date != today():
            last = KeptUbatch(settings, 0, today())
        self.kept = last
        self.kept.work = work
        self._planned = 0
        self._longest_s = 0.0

    @property
    def words(self) -> str:
        """Each ubatch's prompts and decodes, the fastest first."""
        trials = self.kept.trials
        each = sorted(trials, key=lambda n: trials[n].seconds(self._work))
        return "; ".join(
            f"{n}: prompts {1 / trials[n].prompt_token_s:.3g} tokens/s, "
            f"T(1) {trials[n].decode_s * 1e3:.3g} ms"
            for n in each
        )

    def run(self, on_trial: Callable[[int], None]) -> str:
        """Search until no trial gains, or the time is over. Returns why nothing is kept, or ""."""
        if self.kept.n_ubatch:
            return ""
        n, refused = 0, set[int]()  # 0: the plan's own
        while True:
            watch, began_s = Watch(), time.monotonic()
            on_trial(n)
            try:
                used = self._try(n)
            except DoesNotFit:
                if not n:
                    raise
                used = 0
            if used is None:
                return "not searched: nothing is streamed, so a larger one saves no copies"
            if (load := watch.others()).is_busy:
                return f"not kept: {load.words} during a trial"
            self._planned = self._planned or used
            refused |= {n} if used != n else set()
            n = next_ubatch(self.kept.trials, self._planned, self._sizes(refused), self._work)
            now_s = time.monotonic()
            self._longest_s = max(self._longest_s, now_s - began_s)
            if not n or now_s + self._longest_s > self._ends_s:
                break
            self._file.update(lambda kept: kept.put_ubatch(self.kept))
        self.kept.n_ubatch = fastest_ubatch(self.kept.trials, self._planned, self._work)
        return self._file.update(lambda kept: kept.put_ubatch(self.kept))

    def _sizes(self, refused: Collection[int]) -> list[int]:
        """The ubatches that a plan may use, in ascending order."""
        most = min(self._config.most_ubatch, 2 * max(UBATCHES[0], self._work.n_prompt) - 1)
        free = {n for n in SIZES if n <= most and n not in refused}
        return sorted({self._planned, *self.kept.trials, *free})

    def _try(self, n: int) -> int | None:
        """Measure a ubatch of `n` tokens, or the plan's if it is 0. Returns the size that was used.

        Returns None if no weights stream. Raises DoesNotFit.
        """
        config = replace(measuring_config(self._config), tuned_ubatch=n or None)
        with Session(config, keeps_hits=False, prices=True) as session:
            target = session.target
            if (
                target.opened.plan is None
                or not target.opened.plan.streamed
                or target.reads_experts
            ):
                return None
            used = target.layout.context.n_ubatch
            self.kept.run = comparable(session.costs.run)
            if used not in self.kept.trials:
                self.kept.trials[used] = self._measured(session)
            return used

    def _measured(self, session: Session) -> UbatchTrial:
        """Time prompts, then decodes of the text after them, as `measure` times T(1) for the table.

        Decodes of the prompt's own tokens would find all of their experts in the slots.
        """
        target = session.target
        n_ubatch = target.layout.context.n_ubatch
        usual = min(n_ubatch, UBATCHES[-1])  # the planned prompt fills no larger one
        most = min(target.n_ctx - _ROOM, max(self._work.n_prompt, usual))
        n = max(1, min(most, _N_UBATCHES * n_ubatch))
        prompt = _tokens(target, n)
        times = []
        for _ in range(_N_PROMPTS):
            target.sequences.rewind(SEQUENCE, 0)
            times.append(decode_s(target.sequences, SEQUENCE, prompt, n_logits=1))
        walk = TextWalk(target.sequences, SEQUENCE, _text_after(target, n), 0, target.n_ctx - 1)
        walk.lead(1, LEAD_TOKENS, n_logits=1)
        decodes = [walk.time_s(1, n_logits=1) for _ in range(_N_DECODES)]
        target.sequences.rewind(SEQUENCE, 0)
        sharing, table = session.costs.run.sharing, session.costs.run.table
        slots = sharing.n_cached, sharing.n_resident
        return trial_of(times, n, table.best(1)[1], decodes, slots)


def _tokens(target: Engine, n: int) -> Sequence[int]:
    """`n` tokens of real text, repeated as often as necessary."""
    text = real_text(target)
    return [text[i % len(text)] for i in range(n)]


def _text_after(target: Engine, n: int) -> Sequence[int]:
    """The real text from the token after the first `n`, and then from its start."""
    text = real_text(target)
    return [*text[n % len(text) :], *text[: n % len(text)]]
