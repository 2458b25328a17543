"""A deterministic generator without a model. Words in its prompt tell it how to behave.

[flood]    never ends, and as fast as it can
[slow]     20 ms a piece          [forever]  never ends by itself
[say]x[/say] answers with x; if there are several, with the last
[parts]    reads the prompt in three parts
[prefill]  first piece after 0.7 s  [options]  answers with its unusual options
[crash]    aborts the process after two pieces; [crash-now] before the first
[crash-tokens] aborts it while the prompt is tokenised
[hang]     hangs after two pieces; [hang-now] before the first
[changed]  as if another program wrote to `model_file`
[fail]     fails as a device does
[raise]    raises after two pieces; [raise-now] before the first; [refuse] as bad input
"""

from __future__ import annotations

import os
import re
import resource
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NoReturn

from offload.errors import (
    BadModel,
    BadRequest,
    DeviceFailed,
    DoesNotFit,
    ModelChanged,
    NotSupported,
    WorkerUnavailable,
)
from offload.ggml.library import log as native_log
from offload.notes import Note, NoteKind, OnProgress
from offload.stream.bell_use import BELLS
from specoffload.generation.generation import (
    FinishReason,
    GenerateOptions,
    ModelCard,
    SlotAction,
    SlotInfo,
    SlotResult,
    TextPiece,
    ignore,
)
from specoffload.generation.statistics import GenerationStats
from specoffload.session.infill import Fill
from specoffload.slots.stopping import StopScanner

# Combining marks, a joined emoji and U+2028. A piece is one code point, so pieces split each of
# them.
TAIL = " — nai\u0308ve 日本語 👩‍👩‍👧 a\u2028b\r\nc é"
BOS = 256
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
SAID = re.compile(r"\[say\](.*?)\[/say\]", re.DOTALL)
N_VOCAB = 257


@dataclass(frozen=True)
class FakeFactory:
    """Makes fake generators, and can be pickled.

    The file `log` gets a line at each event. Loading aborts while the file `abort_if` exists.
    """

    log: Path | None = None
    n_ctx: int = 512
    load_s: float = 0.0
    prepares_until: Path | None = None  # the vocabulary is prepared when this file exists
    bad_model: bool = False
    abort_if: Path | None = None
    bad_if: Path | None = None  # the model is bad while this file exists
    model_file: Path | None = None  # the model is bad unless this file's text is "whole"
    worker_lost_if: Path | None = None  # loading finds no worker while this file exists
    n_parallel: int = 1
    chat_template: str = CHAT_TEMPLATE
    name: str = "fake"
    does_not_fit_if: Path | None = None  # the model needs more memory while this file exists
    hangs_in_trial: bool = False  # opening hangs in the trial of a doorbell, if it makes one
    notes: tuple[Note, ...] = (Note(NoteKind.OTHER, "nothing is computed"),)

    def __call__(self, on_progress: OnProgress = ignore) -> FakeGenerator:
        on_progress("reading weights", 0.25)
        time.sleep(self.load_s)
        if self.bad_model or (self.bad_if is not None and self.bad_if.exists()):
            raise BadModel("fake.gguf is not a GGUF file: it begins with 'text'")
        if self.model_file is not None and self.model_file.read_text() != "whole":
            raise BadModel("fake.gguf ends at byte 4")
        if self.does_not_fit_if is not None and self.does_not_fit_if.exists():
            raise DoesNotFit("the dense weights take 9 GiB, and 4 GiB of device memory are free")
        if self.abort_if is not None and self.abort_if.exists():
            abort()
        if self.hangs_in_trial and not BELLS.why_not:
            BELLS.refuse("the fake waits for the host for ever")
            native_log.end("the fake waits for the host for ever; leave out its doorbell")
        if self.worker_lost_if is not None and self.worker_lost_if.exists():
            if self.log is not None:
                with self.log.open("a", encoding="utf-8") as log:
                    log.write("lost\n")
            raise WorkerUnavailable("the worker at 10.0.0.2:50052 cannot be reached")
        return FakeGenerator(self)


def abort() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.abort()


class FakeRequest:
    """A running request. `source` yields its pieces."""

    def __init__(self, source: Generator[TextPiece, None, None]) -> None:
        self.source = source
        self.pieces: deque[TextPiece] = deque()
        self.error: Exception | None = None
        self.is_over = False


class FakeGenerator:
    """A generator whose tokens are bytes. It answers with the prompt and TAIL."""

    def __init__(self, factory: FakeFactory) -> None:
        self._factory = factory
        self._requests: list[FakeRequest] = []
        self._note(f"pid {os.getpid()}")

    @property
    def card(self) -> ModelCard:
        why_not = BELLS.why_not
        bells = (Note(NoteKind.DEVICE, f"no doorbell: {why_not}"),) if why_not else ()
        return ModelCard(
            name=self._factory.name,
            path="/models/fake.gguf",
            n_ctx=self._factory.n_ctx,
            n_vocab=N_VOCAB,
            architecture="fake",
            n_params=0,
            size_bytes=0,
            chat_template=self._factory.chat_template,
            notes=(*self._factory.notes, *bells),
            n_parallel=self._factory.n_parallel,
        )

    def use_idle_time(self) -> bool:
        return False

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        if "[crash-tokens]" in text:
            abort()
        return [BOS] * add_special + list(text.encode())

    def detokenize(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token != BOS).decode(errors="replace")

    def piece(self, token: int) -> bytes:
        return b"" if token == BOS else bytes([token])

    def fill_tokens(self, fill: Fill, options: GenerateOptions) -> list[int]:
        if "[no-fim]" in fill.prefix:
            raise NotSupported("the fake cannot fill in this text")
        around = (fill.suffix, fill.prefix) if options.spm_infill else (fill.prefix, fill.suffix)
        text = f"<{'|'.join(around)}>{fill.prompt}"
        return [BOS, *text.encode()]

    most_embedded: int | None = None

    def embed(self, tokens: Sequence[int]) -> NoReturn:
        raise NotSupported("the fake makes no embeddings")

    def counters(self) -> dict[str, float]:
        return {"streamed_bytes": 1000, "hits": 3, "misses": 1}

    def new_request(
        self, tokens: Sequence[int], options: GenerateOptions, beside: object = None
    ) -> FakeRequest:
        text = bytes(token for token in tokens if token != BOS).decode(errors="replace")
        if "[refuse]" in text:
            raise BadRequest("the fake refuses this prompt")
        return FakeRequest(self._pieces(text, len(tokens), options))

    def enqueue(self, request: FakeRequest) -> None:
        self._requests.append(request)

    def step(self) -> list[FakeRequest]:
        """Make one piece of each running request. Several slow requests take no longer than one."""
        news = []
        for request in self._requests[: self._factory.n_parallel]:
            try:
                piece = next(request.source)
                request.pieces.append(piece)
                if piece.finish_reason is not None:
                    request.is_over = next(request.source, None) is None
            except Exception as e:
                request.error, request.is_over = e, True
            if request.is_over:
                self._requests.remove(request)
            news.append(request)
        return news

    def cancel(self, request: FakeRequest) -> None:
        if request in self._requests:
            self._requests.remove(request)
        request.source.close()

    def is_compiled(self, options: GenerateOptions) -> bool:
        return True

    def compile_grammar(self, options: GenerateOptions) -> None:
        pass

    def is_worth_stopping(self, request: FakeRequest) -> bool:
        return False

    def is_worth_stopping_for(self, request: FakeRequest, step_s: float) -> bool:
        return False

    @property
    def is_idle(self) -> bool:
        return not self._requests

    def slots(self) -> tuple[SlotInfo, ...]:
        n = self._factory.n_parallel
        return tuple(SlotInfo(i, i < len(self._requests), 10 * i) for i in range(n))

    def change_slot(self, number: int, action: SlotAction, filename: str) -> SlotResult:
        if number >= self._factory.n_parallel:
            raise BadRequest(f"slot {number} does not exist")
        return SlotResult(10 * number, 1000, 0.5)

    def prepare(self) -> None:
        until = self._factory.prepares_until
        while until is not None and not until.exists():
            time.sleep(0.01)

    def close(self) -> None:
        self._note("close")

    def _pieces(
        self, text: str, n_prompt: int, options: GenerateOptions
    ) -> Generator[TextPiece, None, None]:
        self._note("start")
        end = "abandoned"
        try:
            yield from self._answer(text, n_prompt, options)
            end = "finished"
        finally:
            self._note(end)

    def _answer(self, text: str, n_prompt: int, options: GenerateOptions) -> Iterator[TextPiece]:
        for part in range(1, 4) if "[parts]" in text else ():
            yield TextPiece("", n_prompt_read=part * n_prompt // 4)
        if "[prefill]" in text:
            time.sleep(0.7)
        said = SAID.findall(text)
        answer = _told(options) if "[options]" in text else said[-1] if said else text + TAIL
        room = self._factory.n_ctx - n_prompt
        n_predict = room if options.n_predict is None else min(room, options.n_predict)
        stops = StopScanner(
            options.stop, options.reasoning_span, options.end_texts, options.call_span
        )
        finish: FinishReason = "stop"
        n = 0
        for symbol in self._symbols(answer, _endless(text)):
            _misbehave(text, n)
            if "[changed]" in text and self._factory.model_file is not None:
                raise ModelChanged("the file has changed", self._factory.model_file)
            if n == n_predict and not _endless(text):
                finish = "length"
                break
            if "[slow]" in text or "[forever]" in text:
                time.sleep(0.02)
            n += 1
            shown = stops.feed(symbol)
            if shown:
                so_far = GenerationStats(n_prompt, n) if options.timings_per_token else None
                yield TextPiece(shown, tuple(shown.encode()), so_far=so_far)
            if stops.stopped:
                break
        stats = GenerationStats(
            n_prompt, n, 0.25, 0.5, n_rounds=n, n_drafted=2 * n, n_accepted=n, streamed_bytes=0
        )
        text = "" if stops.stopped else stops.finish()
        fills = finish == "length" and (options.n_predict is None or options.n_predict > room)
        yield TextPiece(text, (), finish, stats, stopping_word=stops.word, fills_context=fills)

    def _symbols(self, answer: str, forever: bool) -> Iterator[str]:
        yield from answer
        while forever:
            yield "."

    def _note(self, line: str) -> None:
        if self._factory.log is not None:
            with self._factory.log.open("a") as file:
                file.write(line + "\n")


def _told(options: GenerateOptions) -> str:
    """Text of the temperature and of other options that differ from their defaults."""
    usual = GenerateOptions()
    return ", ".join(
        f"{field.name}={getattr(options, field.name)!r}"
        for field in fields(options)
        if field.name == "temperature" or getattr(options, field.name) != getattr(usual, field.name)
    )


def _endless(text: str) -> bool:
    return "[forever]" in text or "[flood]" in text


def _misbehave(text: str, n: int) -> None:
    if ("[crash-now]" in text and n == 0) or ("[crash]" in text and n == 2):
        time.sleep(0.05)  # time for the earlier pieces to leave the process
        abort()
    if "[no-doorbell]" in text:
        BELLS.refuse("the fake and the host waited for each other")
    if "[fail]" in text:
        raise DeviceFailed("experts could not be read: [Errno 5] Input/output error")
    if ("[hang-now]" in text and n == 0) or ("[hang]" in text and n == 2):
        time.sleep(3600)  # hang, like native code that nothing interrupts
    if ("[raise-now]" in text and n == 0) or ("[raise]" in text and n == 2):
        raise ValueError("the fake was told to fail")
