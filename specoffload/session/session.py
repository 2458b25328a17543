"""An opened model and its generations, as used by every command and by the server.

`run`, `serve`, `bench` and `tune` all open a Session. No other code puts the parts together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from offload.engine import Engine
from offload.errors import BadRequest, DoesNotFit, NotSupported
from offload.ggml.sampler import grammar_for, grammar_tokens, is_compiled
from offload.images.decoding import Bitmap
from offload.images.mtmd import ImagePrompt
from offload.notes import Note, NoteKind, OnProgress, kind_of
from offload.plan.host import DRAFT_MODEL
from offload.plan.workload import TokenMix
from offload.schedule.cached_choice import RouteOptions
from offload.stream.link_speed import seen_link_rates
from specoffload import report
from specoffload.config.resolution import Config
from specoffload.config.speculation import ignored
from specoffload.generation.generation import (
    GenerateOptions,
    ModelCard,
    SlotAction,
    SlotInfo,
    SlotResult,
    TextPiece,
    ignore,
)
from specoffload.kept import KeptFile
from specoffload.kept_engines import DraftSteps
from specoffload.kept_machine import keep_seen_disk, keep_seen_links, measure_disk
from specoffload.opening.draft import open_draft
from specoffload.opening.draft_engine import keep_step
from specoffload.opening.draft_model import DraftModel
from specoffload.opening.drafters import without_asked_rows
from specoffload.opening.header import target_facts
from specoffload.opening.start import open_target, session_start
from specoffload.opening.target import tree_leaves
from specoffload.output_file import check_output
from specoffload.session.infill import Fill, FillMarkers, fill_prompt
from specoffload.session.kept_prompts import KeptPrompts
from specoffload.session.session_trace import SessionTrace
from specoffload.session.startup_lines import cell_lines, startup_lines
from specoffload.session.used_experts import UsedExperts
from specoffload.slots.batcher import Batcher
from specoffload.slots.own_folder import made_folder
from specoffload.slots.prompt_shelf import PromptShelf
from specoffload.slots.request import Request
from specoffload.slots.slot import change_slot
from specoffload.speculation.costs import SessionCosts, Thorough
from specoffload.speculation.speculation import Speculation, drafts_anything

SEQUENCE = 0

log = logging.getLogger("specoffload.session")


def _close_or_warn(what: str, close: Callable[..., None], *given: object) -> None:
    """Call `close`. A failure is logged, so that the command's result is still shown."""
    try:
        close(*given)
    except Exception as e:
        log.warning("%s: %s", what, e)
        log.debug("the failure while closing", exc_info=True)


def _close_asked_file(close: Callable[[], None]) -> None:
    """Call `close`, which writes a file that the user named.

    A failure is logged, and the program ends with exit code 1. `serve` keeps its exit code, because
    its engine, which closes here, is another process.
    """
    try:
        close()
    except Exception as e:
        log.warning("%s", e)
        log.debug("the failure while closing", exc_info=True)
        report.UnwrittenFiles.is_any = True


def _with_useful_route(config: Config) -> tuple[Config, str]:
    """Turn --route-cached off if no choice can change, so that nothing else changes either.

    Returns the configuration, and the reason or "".
    """
    route = config.streaming.route
    reason = route.no_effect_reason(target_facts(config).n_experts_used) if route.is_on else ""
    if reason:
        config = replace(config, streaming=replace(config.streaming, route=RouteOptions()))
    return config, reason


class Session:
    """An opened target, perhaps a draft model, and their requests. Close it, or use `with`."""

    def __init__(
        self,
        config: Config,
        on_progress: OnProgress = ignore,
        *,
        keeps_hits: bool = True,
        prices: bool = False,
        thorough: Thorough | None = None,
        on_news: Callable[[str], None] = log.warning,
        shelf: PromptShelf | None = None,
    ) -> None:
        """Open the model, which may include some seconds of measuring.

        `on_progress` is called with the current step and its finished fraction. With
        `keeps_hits`, expert hits are counted and kept; set it if the texts are a user's. With
        `prices`, T(n) is measured even if nothing is drafted. `thorough` says how thoroughly to
        measure. `on_news` is called with a sentence when the session begins to compute batches in
        another way, which may happen during an answer. `shelf` has prompts of the last session of
        this model, and gets those of this one after `shelve_prompts`.

        Raises OffloadError or SpecDecError if a part cannot be opened or parts do not fit together.
        Any exception, Ctrl-C included, frees the parts that were opened.
        """
        if config.cache_disk is not None and config.cache_disk.folder is not None:
            made_folder(config.cache_disk.folder)  # before a large model is read
        if config.slot_save_path is not None:
            made_folder(config.slot_save_path, "--slot-save-path: no slots can be saved")
        if config.trace is not None:
            check_output("--trace", config.trace)
        measures = prices or thorough is not None  # these measure T(n)
        config, self._idle_route_reason = _with_useful_route(config)
        start = session_start(config, imports_costs=not measures)
        self.config, self.choices = config, start.choices
        options = start.choices.spec.options
        if options.lookup_dynamic is not None:
            check_output(options.name("lookup_dynamic"), options.lookup_dynamic)
        self.speculation: Speculation | None = None  # None: every token is decoded alone
        self._used: UsedExperts | None = None  # None: they are not counted
        trace = SessionTrace(config.streaming.trace, config.trace)
        with ExitStack() as opened:
            # Runs last, after the target is closed.
            opened.callback(_close_asked_file, trace.write)
            self.target: Engine = opened.enter_context(open_target(start, on_progress))
            if reason := self.target.opened.no_rows_reason:
                spec = without_asked_rows(start.choices.spec, reason)
                self.choices = replace(start.choices, spec=spec)
            spec = self.choices.spec
            opened.callback(_close_or_warn, "the trace is incomplete", trace.end, self.target)
            with self.target.opened.taking(DRAFT_MODEL):
                drafting = open_draft(config, spec, self.target)
            self.draft: DraftModel | None = None if drafting is None else drafting.model
            if self.draft is not None:
                opened.callback(self.draft.close)
            self.engine_choice = None if drafting is None else drafting.choice
            engine_lines = () if drafting is None else drafting.notes
            has_draft = self.draft is not None
            drafts = drafts_anything(spec.options, has_draft=has_draft)
            self.costs = SessionCosts(
                self.choices, self.target, self.draft, on_progress, on_news,
                drafts=drafts or prices, thorough=thorough,
            )  # fmt: skip
            if not config.streaming.route.is_on:
                # Times of other routing are not those of the model.
                opened.callback(_close_or_warn, "learnt times are not kept", self.costs.close)
            opened.callback(_close_or_warn, "speeds of links are not kept", self._keep_links)
            disk_lines: list[str] = []
            if (
                self.target.reads_experts
                and self.target.start.options.store.disk_bytes_per_s is None
            ):
                disk_lines = measure_disk(spec.kept_folder, self.target.facts.path)
                opened.callback(_close_or_warn, "the disk's speed is not kept", self._keep_disk)
            prompt_bytes = self.target.memory_for_prompts(config.cache_ram_bytes)
            if prompt_bytes is not None and prompt_bytes != config.cache_ram_bytes:
                disk_lines.append(
                    f"prompts of earlier requests may take {prompt_bytes >> 20} MiB, a "
                    "sixteenth of the experts' memory, because not all experts fit (--cache-ram)"
                )
            self._prompts = prompts = KeptPrompts(config, self.target, shelf)
            disk_lines += prompts.notes
            if self.draft is not None and self.target.opened.projector is not None:
                disk_lines.append(
                    "drafts: none in answers to prompts with images, because a draft model cannot "
                    "read them"
                )
            may_branch = bool(tree_leaves(replace(config, kv_unified=True), spec))
            self._chosen = (
                *engine_lines, *start.kept.reasons, *self.costs.notes, *disk_lines, *start.notes,
                *cell_lines(self.target, may_branch=may_branch),
            )  # fmt: skip
            if drafts:
                self.speculation = Speculation(spec, self.target, self.draft, self.costs)
                opened.callback(_close_asked_file, self.speculation.close)
            self.batcher = Batcher(
                self.target,
                self.draft,
                self.speculation,
                n_slots=config.parallel,
                n_checkpoints=config.ctx_checkpoints,
                store_bytes=prompt_bytes,
                similar=config.slot_similarity,
                folder=prompts.folder,
                clears_idle=config.cache_idle_slots,
            )
            keep = partial(prompts.keep, self.batcher, on_progress)
            opened.callback(_close_or_warn, "prompts are not kept", keep)
            prompts.take_back(self.batcher)
            if self.speculation is not None and self.speculation.logs_rounds:
                self.batcher.on_step.append(self.speculation.log_step)
            if self.costs.learns:
                self.batcher.on_step.append(self.costs.on_step)
            self._time_draft(opened)
            if keeps_hits and not config.streaming.route.is_on:
                self._count_experts(opened)
            self._chosen += self._prefer_cached()
            trace.begin(self.target, self.batcher, self.piece)
            self._closing = opened.pop_all()

    def _time_draft(self, opened: ExitStack) -> None:
        """Take the time of draft steps from now on, if the engine was chosen by measurements."""
        folder, choice = self.choices.spec.kept_folder, self.engine_choice
        if folder is None or choice is None or not choice.kept_key:
            return
        file, steps = KeptFile(folder, self.target.facts), DraftSteps()
        self.batcher.on_step.append(steps.on_step)

        def keep() -> None:
            if failed := keep_step(file, choice, steps.step_s):
                log.warning("%s", failed)

        opened.callback(_close_or_warn, "a draft's step is not kept", keep)

    def _count_experts(self, opened: ExitStack) -> None:
        """Record the experts that routers choose from now on, and keep the counts."""
        folder = self.choices.spec.kept_folder
        if folder is None or not self.target.facts.n_experts:
            return
        file, batcher = KeptFile(folder, self.target.facts), self.batcher
        self._used = UsedExperts(
            self.target, file, lambda: TokenMix(batcher.n_prompt_tokens, batcher.n_generated)
        )
        opened.callback(_close_or_warn, "counts of experts are not kept", self._used.keep)
        batcher.on_step.append(self._used.on_step)

    def _prefer_cached(self) -> tuple[str, ...]:
        """Turn --route-cached on, now that everything is measured. Returns a line on it."""
        if reason := self._idle_route_reason:
            return (ignored("--route-cached", reason),)
        route = self.config.streaming.route
        if not route.is_on:
            return ()
        if not self.target.prefer_cached():
            return (ignored("--route-cached", "no experts are copied to a GPU"),)
        words = (
            f"routing prefers cached experts (strength {route.strength:g}): texts differ from the "
            "model's own, and depend on what was asked before"
        )
        return (Note(NoteKind.FLAGS, words),)

    def use_idle_time(self) -> bool:
        """Copy one of the experts that earlier runs used most into a slot, or read some from disk.

        Returns True if it did, so there may be more. Does nothing after the first request has come.
        """
        return self._used is not None and self._used.fill_one()

    def _end_filling(self) -> None:
        """Stop filling slots, since a request comes next."""
        if self._used is not None:
            self._used.end_filling()

    def shelve_prompts(self) -> None:
        """Have `close` put all prompts on the shelf, because the model will be opened again.

        Does nothing without a shelf. With --cache-disk the prompts go to the disk instead.
        """
        self._prompts.shelves = True

    def prepare(self) -> None:
        """Prepare the vocabulary for grammars, which takes 1.3 s for 150,000 tokens.

        Call it before there are requests. Otherwise the first grammar would block all requests for
        that time. A thread would not help, since llguidance holds Python's lock meanwhile.
        """
        with suppress(BadRequest):  # a request with a grammar gets the error
            grammar_tokens(self.target.model)

    def close(self) -> None:
        """Free everything, store the profile, and write the traces that were asked for.

        What cannot be stored or written is logged. It raises nothing.
        """
        self._closing.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what a client may ask ---------------------------------------------------------------

    @property
    def card(self) -> ModelCard:
        model = self.target.model
        return ModelCard(
            name=report.plain(self.config.alias or self.target.facts.path.stem),
            path=report.plain(str(self.target.facts.path)),
            n_ctx=self.target.n_ctx,
            n_vocab=self.target.n_vocab,
            architecture=self.target.facts.architecture,
            n_params=model.n_params,
            size_bytes=model.size_bytes,
            chat_template=None if self.config.is_demo else self.target.chat_template,
            only_continues=self.config.is_demo,
            tool_use_template=model.chat_template("tool_use"),
            longest_token_bytes=self.target.longest_token_bytes,
            bos=model.token_text(model.bos) if model.bos >= 0 else "",
            eos=model.token_text(model.eos) if model.eos >= 0 else "",
            adds_bos=model.has_tokenizer
            and self.tokenize("", add_special=True, parse_special=False)[:1] == [model.bos],
            notes=tuple(Note(kind_of(note), report.plain(note)) for note in self.notes),
            n_parallel=self.config.parallel,
            keeps_prompts=self._prompts.folder is not None,
            shelves_prompts=self._prompts.can_shelve,
            image_decoder=self.target.image_decoder,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """The start-up lines for the present state."""
        return startup_lines(self.choices, self.target, self.draft, self.speculation, self._chosen)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return self.target.tokenize(text, add_special=add_special, parse_special=parse_special)

    def image_prompt(
        self, parts: Sequence[str | bytes | Bitmap], *, add_special: bool
    ) -> ImagePrompt:
        """Return the tokens of texts and images, or their files, in turn.

        Raises BadRequest for a file that is no image or if an image comes last, and NotSupported
        without a projector. Another thread may call this during a step.
        """
        tokens = self.target.image_prompt(parts, add_special=add_special)
        if tokens and tokens[-1] < 0:
            raise BadRequest("the prompt ends with an image: text has to follow it")
        return tokens

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, with special tokens written out."""
        return self.target.detokenize(tokens, special=True)

    def piece(self, token: int) -> bytes:
        """The bytes of one token's text."""
        return self.target.model.piece(token, special=True)

    def fill_tokens(self, fill: Fill, options: GenerateOptions) -> list[int]:
        """The prompt's tokens for filling in the middle, with room left for an answer.

        Raises NotSupported for a model that was not trained for it.
        """
        n_answer = self.target.n_ctx // 4 if options.n_predict is None else options.n_predict
        n_room = max(self.target.n_ctx - n_answer, self.target.n_ctx // 2)
        return fill_prompt(
            fill,
            FillMarkers(*self.target.model.fim_tokens()),
            lambda text: self.tokenize(text, add_special=False, parse_special=False),
            beginning=self.tokenize("", add_special=True, parse_special=False),
            n_room=n_room,
            suffix_first=options.spm_infill,
        )

    @property
    def most_embedded(self) -> int | None:
        """Most tokens of a text that is embedded, or None for a model without embeddings."""
        embedder = self.target.opened.embedder
        return None if embedder is None else embedder.n_most

    def embed(self, tokens: Sequence[int]) -> tuple[NDArray[np.float32], bool]:
        """Embeddings [1, width] and True if pooled; [n_tokens, width] and False without pooling.

        Raises NotSupported for a model without embeddings, and DoesNotFit.
        """
        embedder = self.target.opened.embedder
        if embedder is None:
            raise NotSupported(
                "the model file names no pooling, so the model was not trained to make embeddings; "
                "to get embeddings all the same, start the server with --pooling mean or last"
            )
        self._end_filling()
        return embedder.embed(tokens), embedder.pooling != "none"

    def _keep_links(self) -> None:
        """Add what the session saw of several devices' links to their kept speeds."""
        folder, choices = self.choices.spec.kept_folder, [*self.target.start.choices]
        if folder is not None and len(choices) > 1:
            sizes = self.target.facts.layer_expert_bytes.values()
            rates = seen_link_rates(self.costs.copies_s, sizes)
            keep_seen_links(folder, [choice for choice, _ in choices], rates)

    def _keep_disk(self) -> None:
        """Add what the session saw of the disk to its kept speed."""
        folder, memory = self.choices.spec.kept_folder, self.target.opened.experts
        if folder is not None and memory is not None:
            keep_seen_disk(folder, self.target.facts.path, memory.counters.reads)

    def counters(self) -> Mapping[str, float]:
        """Return counts of copies, joint drafts and trials of ways to compute, since opening.

        If there are several devices, each also has its own counts, such as "copies of CUDA1".
        """
        drafting: dict[str, float] = {}
        if self.speculation is not None:
            drafting = asdict(self.speculation.counters)
        copying = asdict(self.target.counters()) | self.target.disk_counters()
        counted = copying | drafting | self.costs.counters() | asdict(self.batcher.idle_counters)
        counted["checkpoint_bytes"] = sum(slot.checkpoint_bytes for slot in self.batcher.slots)
        counted["stored_prompt_bytes"] = self.batcher.store.size_bytes
        by_device = self.target.counters_by_device()
        if len(by_device) > 1:
            for device, counters in by_device.items():
                counted |= {f"{name} of {device}": n for name, n in asdict(counters).items()}
        return counted

    # -- generating ----------------------------------------------------------------------------

    def generate(
        self, prompt: str | Sequence[int], options: GenerateOptions
    ) -> Iterator[TextPiece]:
        """Generate pieces of text. The last has a finish reason and the statistics.

        Raises BadRequest or DoesNotFit before the first piece. If the iterator is closed early, the
        sequence keeps the verified tokens.
        """
        self._end_filling()
        tokens = self._prompt_tokens(prompt)
        return self.batcher.generate(tokens, self._n_predict(tokens, options), options)

    def start(
        self, tokens: Sequence[int], options: GenerateOptions, beside: Request | None = None
    ) -> Request:
        """Make a request and queue it, as `new_request` and `enqueue` do."""
        request = self.new_request(tokens, options, beside)
        self.enqueue(request)
        return request

    def new_request(
        self, tokens: Sequence[int], options: GenerateOptions, beside: Request | None = None
    ) -> Request:
        """Make a request without queueing it. Another thread may do so during a step.

        If `beside` is given, the request waits until `beside` has evaluated the same prompt. Raises
        BadRequest or DoesNotFit for a request that cannot be answered.
        """
        tokens = self._prompt_tokens(tokens)
        return self.batcher.new_request(tokens, self._n_predict(tokens, options), options, beside)

    def is_compiled(self, options: GenerateOptions) -> bool:
        """True if a request with these options has no grammar to compile."""
        return is_compiled(self.target.model, options)

    def compile_grammar(self, options: GenerateOptions) -> None:
        """Compile the grammar of these options, so that the next request with it need not.

        Another thread may do so at any time.
        """
        with suppress(BadRequest):  # the request gets the error
            grammar_for(self.target.model, options)

    def enqueue(self, request: Request) -> None:
        """Queue a request. `step` works on it until it is over or cancelled."""
        self._end_filling()
        self.batcher.enqueue(request)

    def step(self) -> list[Request]:
        """Decode one batch for all requests. Returns those with a new piece or an error."""
        return self.batcher.step()

    def cancel(self, request: Request) -> None:
        """Cancel a request whose client has left, which frees its slot."""
        self.batcher.cancel(request)

    def is_worth_stopping(self, request: Request) -> bool:
        """True if the step that runs should be stopped when `request` is cancelled.

        Another thread may call this during a step.
        """
        return self.batcher.is_worth_stopping(request)

    def is_worth_stopping_for(self, request: Request, step_s: float) -> bool:
        """True if the step, which runs since `step_s` seconds, should be stopped for `request`.

        The request is not queued yet. Another thread may call this during a step.
        """
        return self.batcher.is_worth_stopping_for(request, step_s)

    @property
    def is_idle(self) -> bool:
        """True while no request waits or runs."""
        return self.batcher.is_idle

    def slots(self) -> tuple[SlotInfo, ...]:
        """The slots as they are now."""
        return self.batcher.slot_infos()

    def change_slot(self, number: int, action: SlotAction, filename: str) -> SlotResult:
        """Save an idle slot to a file under --slot-save-path, restore or erase it.

        Raises BadRequest for a slot or a file that cannot be used.
        """
        folder, batcher = self.config.slot_save_path, self.batcher
        return change_slot(batcher.slots, folder, number, action, filename, batcher.make_room)

    def forget(self) -> None:
        """Drop all cached prompts. The next prompt is then evaluated whole."""
        self.batcher.forget()

    def _prompt_tokens(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise BadRequest("the prompt is empty")
            tokens = self.tokenize(prompt, add_special=True, parse_special=True)
        else:
            tokens = list(prompt)
        if not tokens:
            raise BadRequest("the prompt is empty")
        if isinstance(prompt, ImagePrompt):
            return prompt
        bad = [t for t in tokens if not 0 <= t < self.target.n_vocab]
        if bad:
            raise BadRequest(f"token {bad[0]} is not in the vocabulary of {self.target.n_vocab}")
        return tokens

    def _n_predict(self, tokens: Sequence[int], options: GenerateOptions) -> int:
        """The most tokens that the answer may have. Raises DoesNotFit if there is no room."""
        room = self.target.n_ctx - len(tokens)
        if room < 1:
            raise DoesNotFit(
                f"the prompt has {len(tokens)} tokens and the context {self.target.n_ctx}, which "
                "must hold at least one more; shorten it or raise --ctx-size"
            )
        return room if options.n_predict is None else min(options.n_predict, room)
