"""Measures several paths in turns. Each continues the same texts.

A path is a session, or llama.cpp in its own process.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Self

from offload.errors import DeviceFailed, OffloadError
from specoffload.bench.card_power import CardUse, CardWatch
from specoffload.bench.child import ending_with_us
from specoffload.generation.generation import GenerateOptions
from specoffload.generation.statistics import GenerationStats
from specoffload.session.session import SEQUENCE, Session

_CHILD = "offload.ggml.library.untouched"
_CLOSE_PATIENCE_S = 30.0


class Llama:
    """libllama with an open model, in its own process. Close it, or use `with`."""

    def __init__(
        self,
        options: dict[str, Any],
        environment: Mapping[str, str] | None = None,
        cpus: Sequence[int] = (),
    ) -> None:
        """Start the process and open the model. Raises DeviceFailed.

        offload/ggml/library/untouched.py lists the names in `options`. If `environment` is None,
        the process gets ours. Its threads run on the processors `cpus`, if there are any.
        """
        self._process = subprocess.Popen(
            ending_with_us([sys.executable, "-m", _CHILD]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        try:
            if cpus:
                os.sched_setaffinity(self._process.pid, cpus)
            self.n_vocab = int(self._ask({"do": "open", **options})["n_vocab"])
        except BaseException:
            self.close()
            raise

    def tokenize(self, text: str) -> list[int]:
        return list(self._ask({"do": "tokenize", "text": text})["tokens"])

    def prefill(self, tokens: Sequence[int], start: int = 0) -> tuple[float, int]:
        """Evaluate tokens from position `start` on. Returns (seconds, likeliest next token)."""
        answer = self._ask({"do": "prefill", "tokens": list(tokens), "start": start})
        return float(answer["s"]), int(answer["next"])

    def decode(self, token: int, n_tokens: int, start: int) -> tuple[list[int], float]:
        """Decode `n_tokens` greedy tokens after `token`, which goes to position `start`.

        Returns the tokens, and the seconds for all of them.
        """
        answer = self._ask({"do": "decode", "token": token, "n_tokens": n_tokens, "start": start})
        return list(answer["tokens"]), float(answer["s"])

    def write(self, prompt: Sequence[int], n_predict: int) -> GenerationStats:
        """Evaluate a prompt in an empty context, then decode `n_predict` tokens greedily."""
        prefill_s, token = self.prefill(prompt)
        _, decode_s = self.decode(token, n_predict, start=len(prompt))
        return GenerationStats(
            n_prompt_tokens=len(prompt),
            n_tokens=n_predict,
            prefill_s=prefill_s,
            decode_s=decode_s,
            n_rounds=n_predict,
        )

    def read_s(self, prompt: Sequence[int]) -> float:
        """Seconds of evaluating a prompt in an empty context."""
        return self.prefill(prompt)[0]

    def n_threads_lost(self) -> int:
        """No threads are lost, because llama.cpp always computes with the same number."""
        return 0

    def follow(
        self, tokens: Sequence[int], start: int, logits: str = ""
    ) -> tuple[list[float], list[int]]:
        """Decode `tokens` one by one from position `start` on.

        Returns, for each of them, the seconds that it took and the likeliest next token. If
        `logits` names a file, the logits after each are written to it, as numpy's
        [n_tokens, n_vocab].
        """
        answer = self._ask(
            {"do": "follow", "tokens": list(tokens), "start": start, "logits": logits}
        )
        return list(answer["s"]), list(answer["next"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            status = self._process.wait(_CLOSE_PATIENCE_S)
            raise DeviceFailed(f"llama.cpp by itself ended with status {status}: left out")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise DeviceFailed(f"llama.cpp by itself: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the process. A second call does nothing more."""
        process = self._process
        if process.stdin is not None and not process.stdin.closed:
            with contextlib.suppress(OSError):
                process.stdin.close()
        try:
            process.wait(_CLOSE_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SessionPath:
    """A `Session` with the methods of `Llama` that a workload uses."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def tokenize(self, text: str) -> list[int]:
        return self._session.tokenize(text, add_special=True, parse_special=False)

    def write(self, prompt: Sequence[int], n_predict: int) -> GenerationStats:
        """Evaluate a prompt in an empty context, then decode `n_predict` tokens greedily."""
        self._session.forget()
        options = GenerateOptions(n_predict=n_predict, ignore_eos=True)
        *_, last = self._session.generate(prompt, options)
        assert last.stats is not None, "a generation ends with its statistics"
        return last.stats

    def read_s(self, prompt: Sequence[int]) -> float:
        """Seconds of evaluating a prompt in an empty context."""
        self._session.forget()
        sequences = self._session.target.sequences
        sequences.rewind(SEQUENCE, 0)
        began = time.perf_counter()
        sequences.extend(SEQUENCE, prompt, 1)
        took = time.perf_counter() - began
        sequences.rewind(SEQUENCE, 0)
        return took

    def n_threads_lost(self) -> int:
        """The most threads that were given up to other programs since the last call."""
        return self._session.target.opened.threads.n_threads_lost()


Path = Llama | SessionPath


@dataclass(frozen=True)
class Measured:
    """Repetitions of one path, in the order in which they ran."""

    written: tuple[GenerationStats, ...]
    prefills_s: tuple[float, ...]
    n_threads_lost: tuple[int, ...] = ()  # given up to other programs, by repetition
    card: CardUse | None = None  # what the card took while the texts were continued

    @property
    def decodes_s(self) -> list[float]:
        """Seconds of decoding, by repetition."""
        return [stats.decode_s for stats in self.written]

    @property
    def median(self) -> GenerationStats:
        """The repetition of median decode time."""
        by_time = sorted(self.written, key=lambda stats: stats.decode_s)
        return by_time[len(by_time) // 2]

    @property
    def prefill_s(self) -> float:
        """Median seconds of reading the long prompt."""
        return sorted(self.prefills_s)[len(self.prefills_s) // 2]


OnMeasured = Callable[[str, int, GenerationStats, float], None]
"""Gets a path's name, the number of the repetition from 1 on, its statistics, and the seconds of
reading the long prompt."""
Opens = Callable[[], AbstractContextManager[Path]]


@dataclass(frozen=True)
class Workload:
    """The work of a path in one repetition: continue each text, and evaluate a long prompt."""

    texts: tuple[str, ...]
    long_text: str
    n_predict: int
    n_long: int  # tokens of the long prompt, made of repeated `long_text` if that is shorter


def measure_in_turns(
    paths: Mapping[str, Opens],
    work: Workload,
    *,
    repetitions: int,
    together: bool,
    on_left_out: Callable[[str, OffloadError], None],
    on_measured: OnMeasured = lambda *_: None,
    card: CardWatch | None = None,
) -> dict[str, Measured]:
    """Measure every path `repetitions` times, after a warm-up that is dropped.

    If `together`, all paths are open at once and take turns, so a busy machine disturbs all of them
    alike. `on_left_out` is called for a path that cannot be opened, and `on_measured` after each
    repetition of a path but the warm-up. `card` is read while texts are continued.
    """
    card = card or CardWatch(None)
    by_way: dict[str, Measured] = {}
    for group in [list(paths)] if together else [[name] for name in paths]:
        with ExitStack() as stack:
            opened: dict[str, Path] = {}
            for name in group:
                try:
                    opened[name] = stack.enter_context(paths[name]())
                except OffloadError as e:
                    on_left_out(name, e)
            if opened:
                by_way |= _repeat(opened, work, repetitions, on_measured, card)
    return by_way


def _repeat(
    opened: Mapping[str, Path],
    work: Workload,
    repetitions: int,
    on_measured: OnMeasured,
    card: CardWatch,
) -> dict[str, Measured]:
    any_path = next(iter(opened.values()))
    prompts = [any_path.tokenize(text) for text in work.texts]
    long = any_path.tokenize(work.long_text)
    long_prompt = (long * -(-work.n_long // len(long)))[: work.n_long]
    written: dict[str, list[GenerationStats]] = {name: [] for name in opened}
    prefills: dict[str, list[float]] = {name: [] for name in opened}
    lost: dict[str, list[int]] = {name: [] for name in opened}
    sums = {name: card.sums() for name in opened}
    for nth in range(repetitions + 1):
        for name, path in opened.items():
            with card.watching(sums[name] if nth else card.sums()):
                written[name].append(total([path.write(p, work.n_predict) for p in prompts]))
            prefills[name].append(path.read_s(long_prompt))
            lost[name].append(path.n_threads_lost())
            if nth:
                on_measured(name, nth, written[name][-1], prefills[name][-1])
    return {
        name: Measured(
            tuple(written[name][1:]),
            tuple(prefills[name][1:]),
            tuple(lost[name][1:]),
            sums[name].use,
        )  # fmt: skip
        for name in opened
    }


def total(parts: Sequence[GenerationStats]) -> GenerationStats:
    """The sums of several generations' counters and times."""
    names = ("n_prompt_tokens", "n_tokens", "prefill_s", "decode_s", "n_rounds",
             "n_drafted", "n_accepted", "streamed_bytes")  # fmt: skip
    lengths: Counter[int] = Counter()
    reasons: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    for part in parts:
        sources.update(dict(part.accepted_by_source))
        lengths.update(dict(part.draft_lengths))
        reasons.update(dict(part.decisions))
    return GenerationStats(
        **{name: sum(getattr(part, name) for part in parts) for name in names},
        draft_lengths=tuple(sorted(lengths.items())),
        accepted_by_source=tuple(sorted(sources.items())),
        decisions=tuple(reasons.most_common()),
    )
