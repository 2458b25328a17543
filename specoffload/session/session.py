"""An opened model and the generations it runs: what every command and the server work with.

`run`, `serve`, `bench` and `tune` all open a Session; nothing else puts the parts together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from offload.engine import Engine
from offload.errors import BadRequest, DoesNotFit
from offload.ggml.sampler import SamplerChain
from offload.trace import Trace
from specdec.decoding.decode import decode_alone
from specdec.types import Round
from specoffload.config.resolution import Config
from specoffload.session.answer import Answer
from specoffload.session.chat import render
from specoffload.session.description import describe
from specoffload.session.draft_opening import open_draft
from specoffload.session.generation import GenerateOptions, ModelCard, Piece
from specoffload.session.opening import open_target, set_min_batch
from specoffload.session.prompt_cache import PromptCache
from specoffload.session.sampling import sampling_of
from specoffload.session.startup_lines import startup_lines
from specoffload.session.statistics import EngineCounts, Tally
from specoffload.speculation.draft_model import DraftModel
from specoffload.speculation.speculation import Speculation, drafts_anything

SEQUENCE = 0


class Session:
    """A target, perhaps a draft, and the conversation they hold. Close it, or use `with`."""

    def __init__(self, config: Config, on_progress: Callable[[float], None] | None = None) -> None:
        """May measure for some seconds. Raises OffloadError or SpecDecError when something does
        not open or fit together; whatever ends the opening, Ctrl-C too, frees what was opened."""
        self.config = config
        self.speculation: Speculation | None = None  # None: every token is decoded alone
        with ExitStack() as opened:
            opened.callback(self._write_trace)  # the last thing done
            self.target: Engine = opened.enter_context(open_target(config, on_progress))
            drafting = open_draft(config, self.target)
            self.draft: DraftModel | None = None if drafting is None else drafting.model
            if self.draft is not None:
                opened.callback(self.draft.close)
            engine_lines = () if drafting is None else drafting.notes
            self._chosen = (*engine_lines, *set_min_batch(config, self.target, on_progress))
            if drafts_anything(config.spec.options, has_draft=self.draft is not None):
                self.speculation = Speculation(config.spec, self.target, self.draft, on_progress)
                opened.callback(self.speculation.close)
            self._cache = PromptCache(self.target, SEQUENCE, config.ctx_checkpoints)
            self._n_generations = 0
            self._closing = opened.pop_all()

    def close(self) -> None:
        """Free everything, store the profile, and write the traces that were asked for."""
        self._closing.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_trace(self) -> None:
        trace = self.config.streaming.trace
        if self.config.trace is not None and isinstance(trace, Trace):
            trace.write(self.config.trace)

    # -- what a client may ask ---------------------------------------------------------------

    @property
    def card(self) -> ModelCard:
        model = self.target.model
        return ModelCard(
            name=self.config.alias or self.target.facts.path.stem,
            n_ctx=self.target.n_ctx,
            n_vocab=self.target.n_vocab,
            architecture=self.target.facts.architecture,
            n_params=model.n_params,
            size_bytes=model.size_bytes,
            chat_template=self.target.chat_template,
            longest_token_bytes=self.target.longest_token_bytes,
            notes=self.notes,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """The start-up lines, as things are now."""
        start = describe(self.config, self.target, self.draft, self.speculation, self._chosen)
        return startup_lines(start)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return self.target.tokenize(text, add_special=add_special, parse_special=parse_special)

    def apply_chat_template(self, messages: Sequence[dict[str, str]]) -> str:
        model = self.target.model
        bos = model.token_text(model.bos) if model.bos >= 0 else ""
        eos = model.token_text(model.eos) if model.eos >= 0 else ""
        return render(self.target.chat_template, messages, bos=bos, eos=eos)

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

    def forget(self) -> None:
        """Drop what is cached of the conversation: the next prompt is evaluated whole."""
        self._cache.forget()

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
        is_end = (lambda _: False) if options.ignore_eos else self.target.is_end
        answer = Answer(self.target.text_stream(), options.stop, is_end)
        tally = Tally(self._counts(), time.perf_counter())
        with ExitStack() as closing:
            sampler = SamplerChain(self.target.model, sampling_of(options, self.target.n_ctx))
            closing.callback(sampler.close)
            history = list(tokens)
            self._n_generations += 1
            mine = self._n_generations
            n_cached = self._cache.reuse(tokens)
            closing.callback(lambda: self._keep(mine, history))
            for _ in self.target.sequences.prefill(SEQUENCE, tokens[n_cached:-1]):
                yield Piece("")  # here a client that has gone can end it
                self._check_current(mine)
            self._cache.mark()
            tally.evaluated(len(tokens), n_cached, time.perf_counter())
            for round_ in self._rounds(tokens, n_predict, options, sampler, is_end):
                history += round_.emitted  # what the target holds, past a stop sequence too
                piece = answer.take(round_.emitted)
                tally.count(round_, len(piece.tokens))
                yield piece
                self._check_current(mine)
                if answer.finish == "stop":
                    break
            stats = tally.stats(self._counts(), time.perf_counter())
            yield Piece(answer.rest(), (), answer.finish, stats)

    def _rounds(
        self,
        tokens: list[int],
        n_predict: int,
        options: GenerateOptions,
        sampler: SamplerChain,
        is_end: Callable[[int], bool],
    ) -> Iterator[Round]:
        if self.speculation is not None:
            return self.speculation.rounds(
                SEQUENCE, tokens, sampler, options, n_predict=n_predict, is_end=is_end
            )
        return decode_alone(
            self.target.sequences,
            SEQUENCE,
            tokens,
            chooser=sampler,
            n_predict=n_predict,
            is_end=is_end,
            n_cached=self.target.sequences.length(SEQUENCE),
        )

    def _keep(self, generation: int, history: list[int]) -> None:
        if generation == self._n_generations:
            self._cache.keep(history)

    def _check_current(self, generation: int) -> None:
        if generation != self._n_generations:
            raise BadRequest("another generation was started before this one had ended")

    def _counts(self) -> EngineCounts:
        rollbacks = self.target.sequences.rollbacks
        return EngineCounts(
            self.target.counters().streamed_bytes, rollbacks.checkpoints, rollbacks.restores
        )
