"""Continuous batching: requests wait for slots, share each decode, and leave when they end.

Each step decodes one batch: the last token and the draft of every running request, and pieces of
waiting prompts. The sequences share the cells of one KV cache, unless each has cells of its own
(--no-kv-unified). If a shared cache is full, the prompt of
the least recently used idle slot moves to host memory. If no slot is idle, the request that got its
slot last loses it. That request waits until there is room again and then continues its text.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from time import perf_counter

from offload.engine import Engine
from offload.errors import BadRequest, DecodeStopped, DoesNotFit
from offload.ggml.sampler import SamplerChain
from offload.plan.cell_times import CellTimes
from offload.plan.host import PROMPTS
from offload.sampling.answers import AnswerSampler, LimitedReasoning, LimitedSampler
from offload.sampling.options import checked
from specdec.decoding.acceptance import AcceptanceRule, MatchAcceptance
from specdec.decoding.loop import DecodingLoop, StepReport
from specdec.decoding.member import BatchMember
from specoffload.generation.generation import GenerateOptions, SlotInfo, TextPiece
from specoffload.generation.statistics import EngineCounts
from specoffload.opening.draft_model import DraftModel
from specoffload.slots.choosing import SIMILAR, common
from specoffload.slots.draft_texts import DraftTexts, draft_cells
from specoffload.slots.idle_cells import IdleCounters
from specoffload.slots.moves import ComingPrompt
from specoffload.slots.pool import PromptPlace, PromptSlots
from specoffload.slots.prompt_files import PromptFolder
from specoffload.slots.prompt_share import PromptShare
from specoffload.slots.request import Answer, PromptLogprobs, Request
from specoffload.slots.slot import Slot
from specoffload.slots.stopping import LineLimits, StopScanner
from specoffload.speculation.speculation import Speculation

_SALT_DIGITS = 16  # hexadecimal digits of a salt that drafters get


class Batcher:
    """Runs requests in the slots of a target and its draft."""

    def __init__(
        self,
        target: Engine,
        draft: DraftModel | None,
        speculation: Speculation | None,
        *,
        n_slots: int = 1,
        n_checkpoints: int = 0,
        store_bytes: int | None = 0,
        similar: float = SIMILAR,
        folder: PromptFolder | None = None,
        clears_idle: bool = True,
    ) -> None:
        """`draft` is None without a draft model, `speculation` without speculative decoding.

        `store_bytes` limits the host memory for prompts of reused slots (None: no limit, 0: keep
        none). What it has no room for goes to `folder`. `similar` is passed to `choose`.
        `clears_idle`: idle slots may leave the cells while other requests run.
        """
        self._target, self._speculation = target, speculation
        self._has_draft_model = draft is not None
        self._sequences = target.sequences
        memory = None if speculation is None else speculation.draft_memory
        drafts = None if draft is None else DraftTexts(draft.sequences, memory)
        slots = [Slot(i, self._sequences, drafts, n_checkpoints) for i in range(n_slots)]
        self._pool = PromptSlots(
            slots,
            self._sequences,
            store_bytes,
            similar,
            CellTimes(target.layout, target.opened.threads.n_threads),
            lambda: target.opened.taking(PROMPTS),
            folder,
            clears_idle=clears_idle,
            draft_cells=draft_cells(draft, memory),
        )
        self.slots, self.store, self.make_room = slots, self._pool.store, self._pool.make_room
        self.on_step: list[Callable[[StepReport], None]] = []  # called after each step
        self._loop = DecodingLoop(self._sequences) if speculation is None else speculation.loop()
        self._share = PromptShare(
            target.layout.context.n_ubatch,
            self._sequences.n_batch,
            rides_along=not self._sequences.needs_equal_lengths,
            keeps_ubatches=self._sequences.keeps_ubatches,
        )
        self.n_prompt_tokens = self.n_generated = 0  # totals over all requests
        self._waiting: deque[Request] = deque()
        self._running: dict[BatchMember, Request] = {}  # in the order in which they got their slots
        self._coming: dict[BatchMember, ComingPrompt] = {}  # those whose kept prompts are copied
        self._round_s = 0.0  # seconds of the last step without prompt tokens
        self._n_used = 0
        self._is_full = False  # True from a full KV cache until a request leaves its slot

    @property
    def is_idle(self) -> bool:
        """True while no request waits or runs."""
        return not (self._waiting or self._running)

    # -- requests --------------------------------------------------------------------------------

    def new_request(
        self,
        tokens: Sequence[int],
        n_predict: int,
        options: GenerateOptions,
        beside: Request | None = None,
    ) -> Request:
        """Make a request for at most `n_predict` tokens after `tokens`, without queueing it.

        It changes nothing here, so another thread may call it during a step. If `beside` is given,
        the request waits until `beside` has evaluated the same prompt. Raises BadRequest for
        sampling parameters or an `id_slot` that cannot be used.
        """
        n_slots, wanted = len(self.slots), options.id_slot
        if not -1 <= wanted < n_slots:
            raise BadRequest(f"id_slot {wanted}: there are slots 0 to {n_slots - 1} (--parallel)")
        is_end = _never if options.ignore_eos else self._target.is_end
        sampling = checked(options, self._target.n_ctx)
        text = [token for token in tokens if token >= 0]  # without the numbers of images
        sampler = self._sampler(SamplerChain(self._target.model, sampling, text), options)
        shown = self._target.special_tokens(options.shown)
        stops = StopScanner(
            options.stop, options.reasoning_span, options.end_texts, options.call_span
        )
        limits = LineLimits(options.n_indent, options.t_max_predict_ms)
        answer = Answer(self._target.text_stream(shown=shown), stops, limits, is_end)
        n_top = options.prompt_logprobs
        read = None if n_top is None else PromptLogprobs(tokens, n_top, self._piece)
        return Request(
            tokens, n_predict, options, sampler, answer, is_end, beside, read,
            drafts_after_images=not self._has_draft_model,
        )  # fmt: skip

    def enqueue(self, request: Request) -> None:
        self._waiting.append(request)

    def _sampler(self, chain: SamplerChain, options: GenerateOptions) -> AnswerSampler:
        limit, target = options.reasoning_limit, self._target
        if limit is None:
            return chain
        endings = limit.endings(
            lambda text: target.tokenize(text, add_special=False, parse_special=True)
        )
        limited = LimitedReasoning(limit, *endings)
        return LimitedSampler(chain, limited, self._piece)

    def _piece(self, token: int) -> bytes:
        return self._target.model.piece(token, special=True)

    def generate(
        self, tokens: Sequence[int], n_predict: int, options: GenerateOptions
    ) -> Iterator[TextPiece]:
        """Run a request and yield its pieces; asking for the next piece runs steps.

        Raises the error that ended the request. Closing the iterator early cancels the request.
        """
        request = self.new_request(tokens, n_predict, options)
        self.enqueue(request)
        try:
            while True:
                while request.pieces:
                    yield request.pieces.popleft()
                if request.is_over:
                    break
                self.step()
            if request.error is not None:
                raise request.error
        finally:
            self.cancel(request)

    def cancel(self, request: Request) -> None:
        """Cancel a request and free its slot. Does nothing if the request is over."""
        if request.is_over:
            return
        if request in self._waiting:
            self._waiting.remove(request)
        self._leave(request)
        request.close()

    def keep_prompts(self, place: PromptPlace, on_progress: Callable[[float], None]) -> int:
        """Cancel all requests, and move all prompts to a place that outlasts this process.

        `on_progress` gets the share that is written. Returns the number of written prompts.
        """
        for request in [*self._running.values(), *self._waiting]:
            self.cancel(request)
        return self._pool.keep_all(place, on_progress)

    def step(self) -> list[Request]:
        """Decode one batch. Returns the requests that have a new piece or an error.

        If another thread stops a decode of the step, later steps do what is left of it.
        """
        news: list[Request] = []
        # A text that leaves its slot may need a decode, too: the drafting layers read its end.
        with suppress(DecodeStopped):
            self._admit(news)
            self._load_parts(news)
            if not self._loop.is_idle:
                news += self._decode_batch()
        return news

    def _decode_batch(self) -> list[Request]:
        """Do the part of a step for which requests have slots. Raises DecodeStopped."""
        began = perf_counter()
        n_prompt_tokens: int | None = 0
        prompts: list[BatchMember] = []
        try:
            if reading := self._loop.reading:
                chosen = self._share.choose(
                    self._loop.n_ready,
                    [len(m.history) - 1 - self._sequences.length(m.sequence) for m in reading],
                    self._times(),
                    # One whose text went back to a checkpoint reads again, and must not be held.
                    is_first=any(
                        [
                            request.awaits_first_token
                            and not (member in self._coming or self._loop.is_reading(member))
                            for member, request in self._running.items()
                        ]
                    ),
                )
                n_prompt_tokens = chosen.n_tokens
                prompts = [reading[i] for i in chosen.prompts]
            if self._clears_cells(n_prompt_tokens, prompts):
                return []  # the next step admits the request that has left its slot
            report = self._loop.step(n_prompt_tokens, prompts)
        except DecodeStopped:
            self._share.was_stopped(perf_counter() - began)
            raise
        except DoesNotFit as e:
            return self._free_cells(e)
        except Exception as e:
            return [self._failed(request, e) for request in [*self._running.values()]]
        if report.rounds and not report.read:
            self._round_s = report.ended_s - report.began_s
        for notes in self.on_step:
            notes(report)
        self._share.took(
            report.ended_s - report.began_s,
            has_rounds=bool(report.rounds), has_prompts=bool(report.read),
        )  # fmt: skip
        return self._after(report)

    def _clears_cells(self, n_prompt_tokens: int | None, prompts: Sequence[BatchMember]) -> bool:
        """Let idle slots move whose cells have cost the running requests enough.

        Returns True if a running request has left its slot, to come back to lower cells.
        """
        idle, sequences = self._pool.idle, self._sequences
        if not self._coming:  # a request that waits for its copy goes first
            self._pool.go_on_moving(self._copy_s)
        left = sum([len(m.history) - 1 - sequences.length(m.sequence) for m in prompts])
        n_most = sequences.n_batch if n_prompt_tokens is None else n_prompt_tokens
        n_tokens = max(1, self._loop.n_ready + min(left, n_most))
        high = idle.before_step(n_tokens, self._round_s if self._loop.n_ready else 0.0)
        n_cells = round(idle.n_idle_cells)
        for request in self._running.values():
            request.passes(n_cells)
        above = next((r for r in self._running.values() if r.slot is high), None)
        if high is None or above is None or above.member in self._coming:
            return False
        if not (above.may_come_back and self._pool.has_room(high)):
            return False
        idle.counters.idle_compactions += 1
        self._wait_again(above, high)
        return True

    def is_worth_stopping(self, request: Request) -> bool:
        """True if the step that runs should be stopped when `request` is cancelled.

        It is then reading the request's prompt, which may take long. A recurrent memory that saved
        nothing would lose the texts of all requests in the step, so it must be the only one.
        Another thread may call this during a step.
        """
        if request.member in self._coming:  # the step does nothing for it
            return False
        return request.reads_prompt and (self._sequences.may_stop or len(self._running) == 1)

    def is_worth_stopping_for(self, request: Request, step_s: float) -> bool:
        """True if the step that runs should be stopped for `request`, which waits to be queued.

        `step_s`: seconds since the step began. Another thread may call this during a step.
        """
        is_free = len(self._running) < len(self.slots) and not (self._waiting or self._is_full)
        fits = self._has_room(request)
        if not (is_free and fits and request.may_begin and self._sequences.may_stop):
            return False
        salt = request.options.cache_salt
        held = (slot.tokens if slot.salt == salt else [] for slot in self.slots if not slot.is_busy)
        n_common = max(common(tokens, request.history) for tokens in held)
        return self._share.is_worth_stopping(request.n_prompt - n_common, step_s)

    def slot_infos(self) -> tuple[SlotInfo, ...]:
        """Return the current state of all slots."""
        requests = {r.slot.number: r for r in self._running.values() if r.slot is not None}
        infos = []
        for slot in self.slots:
            request = requests.get(slot.number)
            counts = (0, 0, 0) if request is None else request.progress
            infos.append(SlotInfo(slot.number, slot.is_busy, slot.n_held, *counts))
        return tuple(infos)

    def forget(self) -> None:
        """Drop all kept prompts, except those of running requests."""
        self.store.clear()
        for slot in self.slots:
            if not slot.is_busy:
                slot.clear()
        self._pool.drop_void_copies()

    def _times(self) -> Sequence[float]:
        """Seconds of a decode by number of tokens, starting at 1; empty if unknown."""
        return () if self._speculation is None else self._speculation.policy.times

    def _after(self, report: StepReport) -> list[Request]:
        """Give each request its part of a step's results, and end finished requests.

        Returns the requests that have a new piece or an error.
        """
        news = []
        for member in report.read:
            request = self._running[member]
            request.read()
            news.append(request)
            if request.slot is not None and request.slot.n_held in member.stops:
                request.slot.mark(is_asked=True)
            if not self._loop.is_reading(member):
                self._evaluated(request)
            if member.end or request.is_late:
                self._finished(request)
        for member, round_ in report.rounds:
            request = self._running[member]
            self.n_generated += len(round_.emitted)
            if request.take(round_, self._counts):
                self._finished(request)
            news.append(request)
        return news + [self._failed(self._running[member], e) for member, e in report.failed]

    def _evaluated(self, request: Request) -> None:
        """Record that all of the prompt except its last token has been evaluated."""
        assert request.slot is not None
        request.slot.mark()
        self.n_prompt_tokens += request.n_prompt - request.n_cached
        request.evaluated()

    def _finished(self, request: Request) -> None:
        self._leave(request)
        request.finish(self._counts())

    def _failed(self, request: Request, error: Exception) -> Request:
        self._leave(request)
        request.fail(error)
        return request

    def _counts(self) -> EngineCounts:
        rollbacks = self._sequences.rollbacks
        counters = self._target.counters()
        return EngineCounts(
            counters.streamed_bytes, rollbacks.checkpoints, rollbacks.restores,
            self.idle_counters.idle_cells_s, counters.routed_choices, counters.routed_kept,
            counters.routed_hits, counters.routed_own_hits,
        )  # fmt: skip

    @property
    def idle_counters(self) -> IdleCounters:
        """Counts of cells that no running request needed, and of conversations that moved."""
        return self._pool.idle.counters

    # -- slots -----------------------------------------------------------------------------------

    def _admit(self, news: list[Request]) -> None:
        """Give slots to waiting requests while the context has room for them.

        Requests that have nothing to generate end at once and are added to `news`. Raises
        DecodeStopped. The request that would have got a slot then still waits.
        """
        while self._waiting and not (self._is_full and self._running):
            request = self._next()
            if request is None:
                break
            if self._running and not self._has_room(request):
                break
            prepared = self._slot_for(request)
            if prepared is None:
                break
            self._waiting.remove(request)
            news += self._enter(request, prepared)

    def _has_room(self, request: Request) -> bool:
        """True if the cells hold a request's text beside those of running requests.

        Another thread may call this during a step.
        """
        if self._sequences.has_own_cells:
            return True
        coming = {member: len(c.stored.tokens) for member, c in [*self._coming.items()]}
        taken = [max(len(m.history) + 1, coming.get(m, 0)) for m in [*self._running]]
        return sum(taken) + len(request.history) + 1 <= self._sequences.n_cells

    def _load_parts(self, news: list[Request]) -> None:
        """Copy parts of kept prompts that requests wait for, one prompt after the other.

        Requests that end at once are added to `news`. Raises DecodeStopped.
        """
        for member, coming in [*self._coming.items()]:
            if not self.make_room(coming.slot, len(coming.stored.tokens)):
                self._wait_again(self._running[member], coming.slot)
                self._is_full = True  # answers have grown since it got its slot
                break
            if not self._pool.go_on_loading(coming, self._copy_s):
                break
            del self._coming[member]
            news += self._begin(self._running[member], coming.slot)
            if self._loop.n_ready:
                break

    @property
    def _copy_s(self) -> float:
        """The most seconds for which texts are copied before the next step.

        A running answer waits about as long as for a decode. Nothing waits if none runs.
        """
        return self._round_s if self._loop.n_ready else math.inf

    def _next(self) -> Request | None:
        """Return the waiting request to admit next, or None if no waiting request may begin.

        The request's prompt has the fewest running answers, so a prompt with many answers does not
        block other prompts. Ties go to the first request in the queue.
        """
        n_running = Counter([request.asked_with for request in self._running.values()])
        may_begin = (request for request in self._waiting if self._may_begin(request))
        return min(may_begin, key=lambda r: n_running[r.asked_with], default=None)

    def _enter(self, request: Request, prepared: Slot | ComingPrompt) -> list[Request]:
        """Give a request its slot. Returns it in a list if it ends at once."""
        slot = prepared if isinstance(prepared, Slot) else prepared.slot
        self._n_used += 1
        slot.is_busy, slot.last_used = True, self._n_used
        member = BatchMember(
            slot.number,
            request.history,
            self._acceptance(request, slot),
            request.n_left,
            request.is_end,
            0,
            request.bounds,
            hear_prompt=request.hear_prompt,
            images=request.images,
            stops=request.options.keep_at if slot.goes_back_by_checkpoints else (),
            salt=int(request.options.cache_salt[-_SALT_DIGITS:] or "0", 16),
        )
        request.slot, request.member = slot, member
        self._running[member] = request
        self._sequences.foresee(slot.number, request.history)
        if isinstance(prepared, ComingPrompt):
            self._coming[member] = prepared
            return []
        return self._begin(request, slot)

    def _begin(self, request: Request, slot: Slot) -> list[Request]:
        """Let a request go on from what its slot holds. Returns it in a list if it ends at once."""
        member = request.member
        assert member is not None
        member.n_cached = slot.reuse(request.history, request.options.cache_salt)
        request.begin(
            self._counts(), member.n_cached, slot.number, slot.n_from_disk, slot.copied_back_s
        )
        self._loop.add(member)
        if not self._loop.is_reading(member):
            self._evaluated(request)
        if not member.end:
            return []
        self._finished(request)
        return [request]

    def _acceptance(self, request: Request, slot: Slot) -> AcceptanceRule:
        if self._speculation is None:
            return MatchAcceptance(request.sampler)
        return self._speculation.acceptance(
            slot.number, request.sampler, request.options.temperature, request.rng
        )

    def _leave(self, request: Request) -> None:
        """Free the request's slot. The slot keeps the text that it holds."""
        slot, member = request.slot, request.member
        if slot is None or member is None:
            return
        request.slot = request.member = None
        del self._running[member]
        self._is_full = False
        self._loop.remove(member)
        slot.is_busy = False
        if coming := self._coming.pop(member, None):
            self._pool.left_while_loading(coming)
        else:
            slot.keep(request.history)

    def _may_begin(self, request: Request) -> bool:
        """False while another request evaluates or loads its text, or uses the wanted slot."""
        slot = request.options.id_slot
        if not request.may_begin or (slot >= 0 and self.slots[slot].is_busy):
            return False
        if not (self._coming and request.may_come_back):
            return True
        tokens, salt, texts = request.history, request.options.cache_salt, self._texts()
        return not any(
            [self._pool.will_share(c, tokens, texts, salt) for c in self._coming.values()]
        )

    def _texts(self) -> dict[int, Sequence[int]]:
        """Return the texts of busy slots by number."""
        texts: dict[int, Sequence[int]] = {m.sequence: m.history for m in self._running}
        return texts | {member.sequence: coming.tokens for member, coming in self._coming.items()}

    def _slot_for(self, request: Request) -> Slot | ComingPrompt | None:
        """Return an idle slot prepared for the request, or None if the request has to wait."""
        drafts = self._speculation is not None and request.options.draft_max != 0
        return self._pool.prepared(
            request.history,
            self._texts(),
            request.options.id_slot,
            reuses=request.may_come_back,
            is_alone=not self._running and len(self._waiting) == 1,
            drafts=drafts,
            salt=request.options.cache_salt,
            in_parts=bool(self._loop.n_ready),
        )

    def _free_cells(self, error: DoesNotFit) -> list[Request]:
        """Free cells of the full KV cache. Returns the requests that failed.

        Clears the least recently used idle slot. If no slot is idle, the request that got its slot
        last waits again. If only one request runs, it fails with `error`.
        """
        slot = self._pool.least_used()
        if slot is None:
            request = [*self._running.values()][-1]
            if len(self._running) == 1 or request.slot is None:
                return [self._failed(request, error)]
            self._wait_again(request, request.slot)
            self._is_full = True
            return []
        self._pool.take_out(slot)
        return []

    def _wait_again(self, request: Request, slot: Slot) -> None:
        """Move a running request's text to host memory, and queue the request first."""
        self._leave(request)
        self._waiting.appendleft(request)
        self._pool.take_out(slot)


def _never(_: int) -> bool:
    return False
