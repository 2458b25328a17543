"""A generator without a model: deterministic, and told by words in its prompt how to misbehave.

[flood]    never ends, and as fast as it can
[slow]     20 ms a piece          [forever]  never ends by itself
[prefill]  0.7 s before the first   [options]  answers with its options
[crash]    aborts the process after two pieces; [crash-now] before the first
[raise]    raises after two pieces; [raise-now] before the first; [refuse] as bad input
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from offload.errors import BadModel, BadRequest
from specoffload.session.generation import (
    FinishReason,
    GenerateOptions,
    GenerationStats,
    ModelCard,
    Piece,
)
from specoffload.session.stopping import StopScanner

# Combining marks, a joined emoji and U+2028: a piece is one code point, so pieces split them all.
TAIL = " — nai\u0308ve 日本語 👩‍👩‍👧 a\u2028b\r\nc é"
BOS = 256
N_VOCAB = 257


@dataclass(frozen=True)
class FakeFactory:
    """Picklable. `log` gets a line at each event; while `abort_if` exists, loading aborts."""

    log: Path | None = None
    n_ctx: int = 512
    load_s: float = 0.0
    bad_model: bool = False
    abort_if: Path | None = None

    def __call__(self) -> FakeGenerator:
        time.sleep(self.load_s)
        if self.bad_model:
            raise BadModel("fake.gguf is not a GGUF file: it begins with b'text'")
        if self.abort_if is not None and self.abort_if.exists():
            abort()
        return FakeGenerator(self)


def abort() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.abort()


class FakeGenerator:
    """Tokens are bytes; the answer is the prompt and TAIL."""

    def __init__(self, factory: FakeFactory) -> None:
        self._factory = factory
        self._note(f"pid {os.getpid()}")

    @property
    def card(self) -> ModelCard:
        return ModelCard(
            name="fake",
            n_ctx=self._factory.n_ctx,
            n_vocab=N_VOCAB,
            architecture="fake",
            n_params=0,
            size_bytes=0,
            chat_template="{{ messages }}",
            notes=("nothing is computed",),
        )

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return [BOS] * add_special + list(text.encode())

    def apply_chat_template(self, messages: Sequence[dict[str, str]]) -> str:
        if messages[-1]["role"] == "assistant":
            raise BadRequest("the chat template refuses the messages: the last is the assistant's")
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages)

    def generate(self, prompt: str | Sequence[int], options: GenerateOptions) -> Iterator[Piece]:
        assert not isinstance(prompt, str)
        text = bytes(token for token in prompt if token != BOS).decode(errors="replace")
        if "[refuse]" in text:
            raise BadRequest("the fake refuses this prompt")
        return self._pieces(text, len(prompt), options)

    def close(self) -> None:
        self._note("close")

    def _pieces(self, text: str, n_prompt: int, options: GenerateOptions) -> Iterator[Piece]:
        self._note("start")
        end = "abandoned"
        try:
            yield from self._answer(text, n_prompt, options)
            end = "finished"
        finally:
            self._note(end)

    def _answer(self, text: str, n_prompt: int, options: GenerateOptions) -> Iterator[Piece]:
        if "[prefill]" in text:
            time.sleep(0.7)
        answer = repr(options) if "[options]" in text else text + TAIL
        room = self._factory.n_ctx - n_prompt
        n_predict = min(room, options.n_predict or room)
        stops = StopScanner(options.stop)
        finish: FinishReason = "stop"
        n = 0
        for symbol in self._symbols(answer, _endless(text)):
            _misbehave(text, n)
            if n == n_predict and not _endless(text):
                finish = "length"
                break
            if "[slow]" in text or "[forever]" in text:
                time.sleep(0.02)
            n += 1
            shown = stops.feed(symbol)
            if shown:
                yield Piece(shown, tuple(shown.encode()))
            if stops.stopped:
                break
        stats = GenerationStats(
            n_prompt, n, 0.25, 0.5, n_rounds=n, n_drafted=2 * n, n_accepted=n, streamed_bytes=0
        )
        yield Piece("" if stops.stopped else stops.finish(), (), finish, stats)

    def _symbols(self, answer: str, forever: bool) -> Iterator[str]:
        yield from answer
        while forever:
            yield "."

    def _note(self, line: str) -> None:
        if self._factory.log is not None:
            with self._factory.log.open("a") as file:
                file.write(line + "\n")


def _endless(text: str) -> bool:
    return "[forever]" in text or "[flood]" in text


def _misbehave(text: str, n: int) -> None:
    if ("[crash-now]" in text and n == 0) or ("[crash]" in text and n == 2):
        time.sleep(0.05)  # the pieces before are on their way
        abort()
    if ("[raise-now]" in text and n == 0) or ("[raise]" in text and n == 2):
        raise ValueError("the fake was told to fail")
