"""The story of a generation: plan, engine, drafter, decoder.

`run`, `serve`, `bench` and `tune` all open a Session; nothing else puts the parts together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from offload.device import MinBatch
from offload.engine import Engine, EngineOptions
from offload.errors import BadRequest, DoesNotFit
from offload.ggml.sampler import SamplerChain
from offload.model import read_facts
from offload.plan.min_batch import choose, measure
from offload.plan.reserve import context_bytes
from offload.store.store import StoreOptions
from offload.streaming.options import StreamingOptions
from offload.trace import Trace
from specdec.decoding.stats import SpecStats
from specdec.types import Round
from specoffload.config.environment import prepare_native_library
from specoffload.config.resolution import Config
from specoffload.session.chat import render
from specoffload.session.generation import (
    FinishReason,
    GenerateOptions,
    GenerationStats,
    ModelCard,
    Piece,
)
from specoffload.session.prompt_cache import PromptCache
from specoffload.session.sampling import sampling_of
from specoffload.session.speculation import TREE_DRAFT_LEAVES, TREE_LEAVES, Speculation
from specoffload.session.stopping import StopScanner
from specoffload.session.vocabulary import check_same_vocabulary

SEQUENCE = 0


class Session:
    """A target, perhaps a draft, and the conversation they hold. Close it, or use `with`."""

    def __init__(self, config: Config, on_progress: Callable[[float], None] | None = None) -> None:
        """Raises OffloadError or SpecDecError when something does not open or fit together."""
        prepare_native_library()
        self.config = config
        self._closing = ExitStack()
        try:
            self.target = self._open(config, on_progress)
            self.draft = self._open_draft(config)
        except BaseException:
            self.close()
            raise
        self._chosen: tuple[str, ...] = ()
        if config.min_batch_auto:
            self._choose_min_batch()
        try:
            self.speculation = Speculation(config.spec, self.target, self.draft, on_progress)
        except BaseException:
            self._closing.close()
            raise
        self._cache = PromptCache(self.target, SEQUENCE, config.ctx_checkpoints)
        self._n_generations = 0

    def _open(self, config: Config, on_progress: Callable[[float], None] | None) -> Engine:
        options = EngineOptions(
            device=config.device,
            min_batch=config.min_batch,
            n_ctx=config.ctx_size,
            n_batch=config.batch_size,
            n_ubatch=config.ubatch_size,
            n_outputs=max(1 + config.spec.longest, 64),
            n_tree_leaves=TREE_LEAVES if config.spec.options.tree else 0,
            n_rs_seq=config.spec.n_rs_seq(config.ubatch_size),
            device_checkpoints=config.spec.device_checkpoints,
            n_threads=config.threads,
            n_threads_batch=config.threads_batch,
            flash_attn=config.flash_attn,
            streaming=self._with_room_for_the_draft(config),
            mla_crossover=config.mla_crossover,
            stream_experts=config.stream_experts,
            store=StoreOptions(keep_page_cache=config.mmap),
            numa=config.numa,
            trial_folder=config.spec.profile_dir,
        )
        return self._closing.enter_context(Engine(config.model, options, on_progress))

    def _with_room_for_the_draft(self, config: Config) -> StreamingOptions:
        if config.draft is None:
            return config.streaming
        facts = read_facts(config.draft)
        context = context_bytes(facts, config.ctx_size or 4096, config.ubatch_size)
        return replace(config.streaming, reserve_bytes=facts.size_bytes + context)

    def _open_draft(self, config: Config) -> Engine | None:
        if config.draft is None:
            return None
        # Resident, and never wrapped: the draft is small and must answer at once (D09).
        options = replace(
            self.target.options,
            device=self.target.choice.name if self.target.choice.on_gpu else "cpu",
            wrapped=False,
            stream_experts=False,
            n_ctx=self.target.n_ctx,
            n_rs_seq=0,  # it decodes token by token, which leaves no snapshots
            # Threads typed for the draft alone are taken as they are, unpinned.
            numa=None
            if config.numa is None or "n_threads" in config.spec.draft_options
            else config.numa.for_draft(),
        )
        if config.spec.options.tree:
            options = replace(options, n_tree_leaves=TREE_DRAFT_LEAVES, n_outputs=256)
        options = replace(options, **config.spec.draft_options)
        draft = self._closing.enter_context(Engine(config.draft, options))
        if config.spec.options.replacements is None:
            check_same_vocabulary(self.target, draft)
        return draft

    def _choose_min_batch(self) -> None:
        engine = self.target
        if engine.plan is None or not engine.plan.streamed:
            self._chosen = ("--min-batch auto has no effect: nothing streams here",)
            return
        tokens = [(997 * i + 11) % engine.n_vocab for i in range(64)]
        n, why = choose(measure(engine, tokens))
        engine.min_batch = MinBatch(n, n)
        self._chosen = (why,)

    def close(self) -> None:
        """Free everything, store the profile, and write the traces that were asked for."""
        speculation = getattr(self, "speculation", None)
        try:
            if speculation is not None:
                speculation.close()
        finally:
            self._closing.close()
        if self.config.trace is not None and isinstance(self.config.streaming.trace, Trace):
            self.config.streaming.trace.write(self.config.trace)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what a client may ask ---------------------------------------------------------------

    @property
    def card(self) -> ModelCard:
        model = self.target.model
        return ModelCard(
            name=self.target.facts.path.stem,
            n_ctx=self.target.n_ctx,
            n_vocab=self.target.n_vocab,
            architecture=self.target.facts.architecture,
            n_params=model.n_params,
            size_bytes=model.size_bytes,
            chat_template=self.target.chat_template,
            notes=self.notes,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """The start-up lines: what is active, what is not, and why."""
        choice, facts = self.target.choice, self.target.facts
        lines = [f"device {choice.name}: {choice.description} ({choice.reason})"]
        lines += self.target.notes
        if self.config.ctx_size and self.target.n_ctx != self.config.ctx_size:
            lines.append(f"--ctx-size {self.config.ctx_size}: the library makes it "
                         f"{self.target.n_ctx} tokens")  # fmt: skip
        plan = self.target.plan
        if plan is not None and plan.streamed:
            n = self.target.min_batch
            lines.append(
                f"streamed: {plan.streamed_bytes / 2**20:.0f} MiB in host memory through "
                f"{plan.slot_bytes / 2**20:.0f} MiB of slots, from {n.experts} tokens on "
                f"(dense {n.dense}; --min-batch), below that computed by the CPU"
            )
            lines += plan.reasons
            if self.target.store is not None and self.target.store.report is not None:
                lines.append(self.target.store.report.sentence())
        elif facts.n_experts:
            lines.append("experts: computed by the CPU in place; streaming needs a wrapped device")
        if self.draft is not None:
            lines.append(
                f"draft: {self.draft.facts.path.name}, {self.draft.model.n_params / 1e6:.1f}M "
                "parameters"
            )
            if self.draft.model.size_bytes > self.target.model.size_bytes:
                lines.append(
                    f"the draft ({self.draft.model.size_bytes} bytes) is larger than the target "
                    f"({self.target.model.size_bytes}): are the two files swapped?"
                )
        else:
            lines.append("draft: none")
        lines += self.speculation.notes
        lines += self._memory_notes()
        declined = self.target.device.declined if self.target.device is not None else {}
        lines += [f"left to the CPU: {why}" for why in declined]
        lines += self.target.device.mla.notes if self.target.device is not None else []
        lines += self.target.numa_notes
        return (*lines, *self._chosen, *self.config.reasons)

    def _memory_notes(self) -> tuple[str, ...]:
        target, spec = self.target, self.config.spec
        given = spec.options.given
        typed = [given[name] for name in ("rs_snapshots", "checkpoints") if name in given]
        if target.can_rewind:
            return tuple(f"{flag} has no effect: this model's memory can be cut" for flag in typed)
        if not self.speculation.is_on:
            return ()
        where = "on the device" if spec.device_checkpoints else "in host memory"
        if target.n_rs_seq:
            return (
                f"recurrent memory: drafts of up to {target.n_rs_seq} tokens are taken back by "
                f"snapshots (--spec-rs-snapshots), longer ones by checkpoints {where}",
            )
        return (
            f"recurrent memory: rejected drafts are taken back by checkpoints {where}; the library "
            f"has no snapshots for {target.facts.architecture}",
        )

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return self.target.tokenize(text, add_special=add_special, parse_special=parse_special)

    def apply_chat_template(self, messages: Sequence[dict[str, str]]) -> str:
        model = self.target.model
        bos = model.token_text(model.bos) if model.bos >= 0 else ""
        eos = model.token_text(model.eos) if model.eos >= 0 else ""
        return render(self.target.chat_template, messages, bos=bos, eos=eos)

    def streamed_bytes(self) -> int:
        return self.target.counters().streamed_bytes

    # -- generating ----------------------------------------------------------------------------

    def generate(self, prompt: str | Sequence[int], options: GenerateOptions) -> Iterator[Piece]:
        """Pieces of text; the last has a finish reason and the statistics.

        Raises BadRequest or DoesNotFit before the first piece. Closing the iterator early leaves
        the sequence as far as it was verified.
        """
        tokens = self._prompt_tokens(prompt)
        room = self.target.n_ctx - len(tokens)
        if room < 1:
            raise DoesNotFit(
                f"the prompt has {len(tokens)} tokens and the context {self.target.n_ctx}, which "
                "must hold at least one more; shorten it or raise --ctx-size"
            )
        n_predict = room if options.n_predict is None else min(options.n_predict, room)
        return self._pieces(tokens, n_predict, options)

    def _prompt_tokens(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise BadRequest("the prompt is empty")
            tokens = self.tokenize(prompt, add_special=True, parse_special=True)
        else:
            tokens = list(prompt)
        if not tokens:
            raise BadRequest("the prompt is empty")
        bad = [t for t in tokens if not 0 <= t < self.target.n_vocab]
        if bad:
            raise BadRequest(f"token {bad[0]} is not in the vocabulary of {self.target.n_vocab}")
        return tokens

    def _pieces(
        self, tokens: list[int], n_predict: int, options: GenerateOptions
    ) -> Iterator[Piece]:
        text = self.target.text_stream()
        stops = StopScanner(options.stop)
        tally = _Tally(self._counts())
        finish: FinishReason = "length"
        with ExitStack() as closing:
            sampler = SamplerChain(self.target.model, sampling_of(options, self.target.n_ctx))
            closing.callback(sampler.close)
            history = list(tokens)
            self._n_generations += 1
            mine = self._n_generations
            n_cached = self._cache.reuse(tokens)
            closing.callback(lambda: self._keep(mine, history))
            for end in self._prefill_ends(n_cached, len(tokens) - 1):
                self.target.extend(SEQUENCE, tokens[self.target.length(SEQUENCE) : end], 0)
                yield Piece("")  # here a client that has gone can end it
                self._check_current(mine)
            self._cache.mark()
            tally.evaluated(len(tokens), n_cached)
            rounds = self._rounds(tokens, n_predict, options, sampler)
            for round_ in rounds:
                history += round_.emitted  # what the target holds, past a stop sequence too
                shown, n_kept = "", 0
                for token in round_.emitted:
                    n_kept += 1
                    if self.target.is_end(token) and not options.ignore_eos:
                        finish = "stop"
                        break
                    shown += stops.feed(text.feed(token))
                    if stops.stopped:
                        finish = "stop"
                        break
                tally.count(round_, n_kept)
                yield Piece(shown, round_.emitted[:n_kept])
                self._check_current(mine)
                if finish == "stop":
                    break
            rest = "" if stops.stopped else stops.feed(text.finish()) + stops.finish()
            yield Piece(rest, (), finish, tally.stats(self._counts()))

    def _rounds(
        self, tokens: list[int], n_predict: int, options: GenerateOptions, sampler: SamplerChain
    ) -> Iterator[Round]:
        return self.speculation.rounds(
            SEQUENCE,
            tokens,
            sampler,
            options,
            n_predict=n_predict,
            is_end=(lambda _: False) if options.ignore_eos else self.target.is_end,
        )

    def _keep(self, generation: int, history: list[int]) -> None:
        if generation == self._n_generations:
            self._cache.keep(history)

    def _check_current(self, generation: int) -> None:
        if generation != self._n_generations:
            raise BadRequest("another generation was started before this one had ended")

    def _prefill_ends(self, start: int, end: int) -> list[int]:
        """Where the pieces of a prompt end; all are whole decodes but the last."""
        n_batch = self.target.options.n_batch
        return [min(at + n_batch, end) for at in range(start, end, n_batch)]

    def _counts(self) -> _Counts:
        rollbacks = self.target.rollbacks
        return _Counts(self.streamed_bytes(), rollbacks.checkpoints, rollbacks.restores)

    def forget(self) -> None:
        """Drop what is cached of the conversation: the next prompt is evaluated whole."""
        self._cache.forget()


@dataclass(frozen=True)
class _Counts:
    """What the engine has counted since it was opened."""

    streamed_bytes: int
    checkpoints: int
    restores: int


class _Tally:
    """Adds rounds up to the statistics of a generation."""

    def __init__(self, before: _Counts) -> None:
        self._before = before
        self._n_prompt = self._n_cached = 0
        self._start_s = self._first_s = time.perf_counter()
        self._spec = SpecStats()
        self._n_tokens = 0

    def evaluated(self, n_prompt_tokens: int, n_cached_tokens: int) -> None:
        """The prompt has been, but for its last token, which the first round decodes."""
        self._n_prompt, self._n_cached = n_prompt_tokens, n_cached_tokens
        self._first_s = time.perf_counter()

    def count(self, round_: Round, n_kept: int) -> None:
        """A round, of whose tokens the answer has the first `n_kept`."""
        self._spec.add(round_)
        self._n_tokens += n_kept

    def stats(self, after: _Counts) -> GenerationStats:
        now, first, before = time.perf_counter(), self._first_s, self._before
        return GenerationStats(
            n_prompt_tokens=self._n_prompt,
            n_cached_tokens=self._n_cached,
            n_tokens=self._n_tokens,
            prefill_s=first - self._start_s,
            decode_s=now - first,
            n_rounds=self._spec.n_rounds,
            n_drafted=self._spec.n_drafted,
            n_accepted=self._spec.n_accepted,
            streamed_bytes=after.streamed_bytes - before.streamed_bytes,
            n_checkpoints=after.checkpoints - before.checkpoints,
            n_restores=after.restores - before.restores,
            n_draft_steps=self._spec.n_draft_steps,
            draft_s=self._spec.draft_s,
            verify_s=self._spec.verify_s,
            rollback_s=self._spec.rollback_s,
            acceptance_per_position=self._spec.acceptance_per_position,
            draft_lengths=tuple(sorted(self._spec.lengths.items())),
            accepted_by_source=tuple(sorted(self._spec.sources.items())),
            decisions=tuple(self._spec.reasons.most_common()),
        )
