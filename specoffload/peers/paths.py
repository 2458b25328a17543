"""Ways to write the same texts, measured in turns: llama.cpp by itself, and our sessions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Protocol

from offload.errors import OffloadError
from specoffload.peers.process import Llama
from specoffload.session.generation import GenerateOptions
from specoffload.session.session import SEQUENCE, Session
from specoffload.session.statistics import GenerationStats


class Path(Protocol):
    """Something that writes texts. Prompts are tokens, so that all paths read the same."""

    def read(self, text: str) -> list[int]:
        """Its tokens."""
        ...

    def write(self, prompt: Sequence[int], n_predict: int) -> GenerationStats:
        """Evaluate a prompt from nothing, then decode `n_predict` tokens greedily."""
        ...

    def prefill_s(self, prompt: Sequence[int]) -> float:
        """Evaluate a prompt from nothing and write nothing; seconds."""
        ...


class LlamaPath:
    """llama.cpp in its own process."""

    def __init__(self, llama: Llama) -> None:
        self._llama = llama

    def read(self, text: str) -> list[int]:
        return self._llama.tokenize(text)

    def write(self, prompt: Sequence[int], n_predict: int) -> GenerationStats:
        prefill_s, token = self._llama.prefill(prompt)
        decoded = self._llama.decode(token, n_predict, start=len(prompt))
        return GenerationStats(
            n_prompt_tokens=len(prompt),
            n_tokens=n_predict,
            prefill_s=prefill_s,
            decode_s=decoded.s,
            n_rounds=n_predict,
        )

    def prefill_s(self, prompt: Sequence[int]) -> float:
        return self._llama.prefill(prompt)[0]


class SessionPath:
    """A session of ours."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def read(self, text: str) -> list[int]:
        return self._session.tokenize(text, add_special=True, parse_special=False)

    def write(self, prompt: Sequence[int], n_predict: int) -> GenerationStats:
        self._session.forget()
        options = GenerateOptions(n_predict=n_predict, ignore_eos=True)
        stats = None
        for piece in self._session.generate(prompt, options):
            stats = piece.stats
        assert stats is not None, "a generation ends with its statistics"
        return stats

    def prefill_s(self, prompt: Sequence[int]) -> float:
        self._session.forget()
        sequences = self._session.target.sequences
        sequences.rewind(SEQUENCE, 0)
        began = time.perf_counter()
        sequences.extend(SEQUENCE, prompt, 1)
        took = time.perf_counter() - began
        sequences.rewind(SEQUENCE, 0)
        return took


@dataclass(frozen=True)
class Measured:
    """Repetitions of one path, in the order in which they ran."""

    written: tuple[GenerationStats, ...]
    prefills_s: tuple[float, ...]

    @property
    def median(self) -> GenerationStats:
        """The repetition of median decode time."""
        by_time = sorted(self.written, key=lambda stats: stats.decode_s)
        return by_time[len(by_time) // 2]

    @property
    def prefill_s(self) -> float:
        """The median."""
        return sorted(self.prefills_s)[len(self.prefills_s) // 2]


Opens = Callable[[], AbstractContextManager[Path]]


@dataclass(frozen=True)
class Workload:
    """The work of every path, once per repetition: write after each text, and read a long one."""

    texts: tuple[str, ...]
    long_text: str
    n_predict: int
    n_long: int  # tokens of the long text that are read; it is repeated where it is shorter

    def tokens(self, path: Path) -> tuple[list[list[int]], list[int]]:
        """Prompts, and the long prompt."""
        long = path.read(self.long_text)
        return [path.read(t) for t in self.texts], (long * -(-self.n_long // len(long)))[
            : self.n_long
        ]


def measure_in_turns(
    paths: Mapping[str, Opens],
    work: Workload,
    *,
    repetitions: int,
    together: bool,
    on_left_out: Callable[[str, OffloadError], None],
) -> dict[str, Measured]:
    """The work once per repetition on every path; the first repetition is dropped.

    `together`: all paths are open at once and take turns, and so share what a busy machine does to
    them; else one path after the other. A path that cannot be opened is told to `on_left_out`.
    """
    found: dict[str, Measured] = {}
    for group in [list(paths)] if together else [[name] for name in paths]:
        with ExitStack() as stack:
            opened: dict[str, Path] = {}
            for name in group:
                try:
                    opened[name] = stack.enter_context(paths[name]())
                except OffloadError as e:
                    on_left_out(name, e)
            found |= _repeat(opened, work, repetitions) if opened else {}
    return found


def _repeat(opened: Mapping[str, Path], work: Workload, repetitions: int) -> dict[str, Measured]:
    prompts, long_prompt = work.tokens(next(iter(opened.values())))
    written: dict[str, list[GenerationStats]] = {name: [] for name in opened}
    prefills: dict[str, list[float]] = {name: [] for name in opened}
    for _ in range(repetitions + 1):
        for name, path in opened.items():
            written[name].append(_total([path.write(p, work.n_predict) for p in prompts]))
            prefills[name].append(path.prefill_s(long_prompt))
    return {name: Measured(tuple(written[name][1:]), tuple(prefills[name][1:])) for name in opened}


def _total(parts: Sequence[GenerationStats]) -> GenerationStats:
    names = ("n_prompt_tokens", "n_tokens", "prefill_s", "decode_s", "n_rounds",
             "n_drafted", "n_accepted", "streamed_bytes")  # fmt: skip
    total = replace(GenerationStats(), **{n: sum(getattr(p, n) for p in parts) for n in names})
    lengths: Counter[int] = Counter()
    reasons: Counter[str] = Counter()
    for part in parts:
        lengths.update(dict(part.draft_lengths))
        reasons.update(dict(part.decisions))
    return replace(
        total,
        draft_lengths=tuple(sorted(lengths.items())),
        decisions=tuple(reasons.most_common()),
    )
