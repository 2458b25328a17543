"""Measures Python's time per round of speculation, and generations with and without speculation.

The first target takes no time, so that all measured time is Python's. With it, rounds that draft
nothing are compared with decoding without speculation. The second target is the embedded pair on
the CPU, with which drafting does not pay. With it, generations with and without speculation take
turns, so that other load affects both alike. Decodes with and without a copy of their hidden rows,
which the model's own layers (MTP) need, take turns in the same way. Prints one JSON object.

Usage: scripts/lab/run round-cost [REPETITIONS]
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from time import perf_counter, thread_time

import numpy as np
from numpy.typing import NDArray

from offload.engine import Engine, EngineOptions
from specdec.build import build_drafter
from specdec.costs.profile import CostProfile
from specdec.decoding.acceptance import Greedy, MatchAcceptance
from specdec.decoding.drafting import ChainDrafting
from specdec.decoding.loop import BatchMember, DecodingLoop
from specdec.drafters.model import ModelDrafter
from specdec.options import DrafterName, SpecOptions
from specdec.policies.throughput import Throughput
from specdec.types import Drafter, Round
from specoffload.config.environment import read_host
from specoffload.config.options import Options
from specoffload.config.resolution import demo_file, demo_prompts, resolve
from specoffload.config.speculation import NO_DRAFTS
from specoffload.session.generation import GenerateOptions
from specoffload.session.session import Session
from specoffload.session.statistics import Tally

N_VOCAB = 512
N_ROUNDS = 4000
N_PREDICT = 192
MOST_HELD = 64  # tokens of a text whose decodes are timed; the layers compute none of them
DEAR = CostProfile(
    tuple(1.0 + 0.9 * n for n in range(8)), draft_step_s=0.3
)  # costs at which no draft pays


class Instant:
    """A target that takes no time and stores only the length of its sequence."""

    n_vocab, n_ctx, can_rewind, n_rs_seq = N_VOCAB, 1 << 20, True, 0
    n_batch, n_outputs = 2048, 64

    def __init__(self) -> None:
        self._length = 0
        self._rows = np.zeros((64, N_VOCAB), np.float32)

    def length(self, sequence: int) -> int:
        return self._length

    def extend(
        self, sequence: int, tokens: Sequence[int], n_logits: int | None = None
    ) -> NDArray[np.float32]:
        self._length += len(tokens)
        return self._rows[: len(tokens) if n_logits is None else n_logits]

    def extend_batch(
        self, parts: Sequence[tuple[int, Sequence[int], int]]
    ) -> list[NDArray[np.float32]]:
        return [self.extend(*part) for part in parts]

    def rewind(self, sequence: int, length: int) -> None:
        self._length = length


class AnyToken(Greedy):
    """Chooses pseudo-random tokens, so that n-grams find little."""

    def __init__(self) -> None:
        self._state = 1

    def choose(self, logits: NDArray[np.float32], history: Sequence[int]) -> int:
        self._state = (self._state * 1103515245 + 12345) & 0x7FFFFFFF
        return self._state >> 8 & (N_VOCAB - 1)


def generated(drafter: Drafter | None = None) -> Iterable[Round]:
    """The rounds of one generation, without or with a drafter that does not pay."""
    target, chooser = Instant(), AnyToken()
    drafting = None if drafter is None else ChainDrafting(target, drafter, Throughput(DEAR))  # type: ignore[arg-type]
    loop = DecodingLoop(target, drafting)  # type: ignore[arg-type]
    accept = MatchAcceptance(chooser)
    loop.add(BatchMember(0, [1, 2, 3], chooser, accept, N_ROUNDS, lambda _: False))
    while not loop.is_idle:
        for _, round_ in loop.step().rounds:
            yield round_


def ngrams() -> Drafter:
    names = (DrafterName.NGRAM_MOD, DrafterName.SUFFIX)
    return build_drafter(SpecOptions(drafters=names))


ROUNDS: dict[str, Callable[[], Iterable[Round]]] = {
    "plain": generated,
    "draft model, idle": lambda: generated(ModelDrafter(Instant())),  # type: ignore[arg-type]
    "ngram-mod,suffix": lambda: generated(ngrams()),
}


def round_us(rounds: Iterable[Round]) -> float:
    """Processor time of a round in microseconds, including statistics."""
    tally = Tally()
    began = thread_time()
    for round_ in rounds:
        tally.count(round_, len(round_.emitted))
    took_s = thread_time() - began
    return took_s / tally.stats().n_rounds * 1e6


def sessions(n_repeats: int) -> dict[str, float]:
    """Time generations of the embedded pair with and without its draft, in turns."""
    host = read_host()
    both = [
        resolve(Options(device="cpu", threads=1, ctx_size=1024, spec=spec), host)
        for spec in (NO_DRAFTS, SpecOptions())
    ]
    wanted = GenerateOptions(n_predict=N_PREDICT, ignore_eos=True)
    prompt = demo_prompts()[0]
    token_s: tuple[list[float], list[float]] = ([], [])
    n_drafted = 0
    with Session(both[0]) as off, Session(both[1]) as on:
        for i in range(n_repeats + 1):
            # The order alternates, because the second run finds warmer processor caches.
            for side in ((0, 1), (1, 0))[i % 2]:
                session = (off, on)[side]
                session.forget()
                *_, last = session.generate(prompt, wanted)
                assert last.stats is not None
                n_drafted += last.stats.n_drafted
                if i:
                    token_s[side].append(last.stats.decode_s / last.stats.n_tokens)
    ratios = [a / b for a, b in zip(*token_s, strict=True)]
    return {
        "plain_ms": round(statistics.median(token_s[0]) * 1e3, 4),
        "idle_ms": round(statistics.median(token_s[1]) * 1e3, 4),
        "speed_to_plain": round(statistics.median(ratios), 4),
        "drafted_per_token": round(n_drafted / (n_repeats + 1) / N_PREDICT, 4),
    }


def row_copies(n_repeats: int) -> dict[str, dict[str, float]]:
    """Time decodes of the embedded target with and without its hidden rows, by number of tokens."""
    options = EngineOptions(device="cpu", n_ctx=1024, n_threads=1, n_threads_batch=1)
    found = {}
    path = demo_file("target.gguf")
    with Engine(path, options) as off, Engine(path, replace(options, mtp=True)) as on:
        for n_tokens in (1, 2, 4, 8):
            times_s: tuple[list[float], list[float]] = ([], [])
            for i in range(100 * n_repeats):
                for side in ((0, 1), (1, 0))[i % 2]:
                    sequences = (off, on)[side].sequences
                    if sequences.length(0) > MOST_HELD:
                        sequences.rewind(0, 0)
                    began = perf_counter()
                    sequences.extend(0, [5] * n_tokens)
                    times_s[side].append(perf_counter() - began)
            plain, rows = (statistics.median(side) for side in times_s)
            found[str(n_tokens)] = {
                "plain_us": round(plain * 1e6, 1),
                "with_rows_us": round(rows * 1e6, 1),
                "more": round(rows / plain - 1, 4),
            }
    return found


def main() -> None:
    n_repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    found = {name: min(round_us(make()) for _ in range(n_repeats)) for name, make in ROUNDS.items()}
    answer = {
        "round_us": {name: round(us, 2) for name, us in found.items()},
        "over_plain_us": {
            name: round(us - found["plain"], 2) for name, us in found.items() if name != "plain"
        },
        "embedded_pair": sessions(n_repeats),
        "row_copies": row_copies(n_repeats),
    }
    print(json.dumps(answer, indent=1))


if __name__ == "__main__":
    main()
