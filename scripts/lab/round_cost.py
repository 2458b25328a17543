"""Measures Python's time per round of speculation, on a target that takes no time.

Rounds that draft nothing are compared with decoding without speculation. Prints one JSON object.

Usage: scripts/lab/run round-cost [REPETITIONS]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from time import thread_time

import numpy as np
from numpy.typing import NDArray

from specdec.build import build_drafter
from specdec.costs.profile import CostProfile
from specdec.decoding.acceptance import Greedy, MatchAcceptance
from specdec.decoding.drafting import ChainDrafting
from specdec.decoding.loop import DecodingLoop
from specdec.decoding.member import BatchMember
from specdec.drafters.model import ModelDrafter
from specdec.options import DrafterName, SpecOptions
from specdec.policies.throughput import Throughput
from specdec.types import Drafter, Round
from specoffload.generation.statistics import Tally

N_VOCAB = 512
N_ROUNDS = 4000
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
    target = Instant()
    drafting = None if drafter is None else ChainDrafting(target, drafter, Throughput(DEAR))  # type: ignore[arg-type]
    loop = DecodingLoop(target, drafting)  # type: ignore[arg-type]
    accept = MatchAcceptance(AnyToken())
    loop.add(BatchMember(0, [1, 2, 3], accept, N_ROUNDS, lambda _: False))
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


def main() -> None:
    n_repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    found = {name: min(round_us(make()) for _ in range(n_repeats)) for name, make in ROUNDS.items()}
    answer = {
        "round_us": {name: round(us, 2) for name, us in found.items()},
        "over_plain_us": {
            name: round(us - found["plain"], 2) for name, us in found.items() if name != "plain"
        },
    }
    print(json.dumps(answer, indent=1))


if __name__ == "__main__":
    main()
