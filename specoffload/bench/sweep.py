"""The combinations that `bench` measures for lists of values, as llama-bench does. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from specoffload.config.options import Options, SweepOptions

# llama-bench's defaults, in tokens.
N_PROMPT, N_GEN = 512, 128
# Options that are set when a model is opened, in the order of llama-bench's loops.
_SETTINGS = (
    "batch_size", "ubatch_size", "type_k", "type_v", "threads", "n_gpu_layers", "n_cpu_moe",
    "flash_attn",
)  # fmt: skip


@dataclass(frozen=True)
class TimedTest:
    """What is timed: reading `n_prompt` tokens and then writing `n_gen`, after `n_depth` tokens."""

    n_prompt: int
    n_gen: int
    n_depth: int = 0

    @property
    def n_total(self) -> int:
        """Tokens of context that the test needs."""
        return self.n_prompt + self.n_gen + self.n_depth


def timed_tests(sweep: SweepOptions) -> list[TimedTest]:
    """The tests of one setting, in llama-bench's order. A test of 0 tokens is left out."""
    timed = [
        *((n, 0) for n in sweep.n_prompt or (N_PROMPT,)),
        *((0, n) for n in sweep.n_predict or (N_GEN,)),
        *sweep.n_pg,
    ]
    depths = sweep.n_depth or (0,)
    return [TimedTest(pp, tg, depth) for depth in depths for pp, tg in timed if pp + tg]


def settings_of(sweep: SweepOptions, options: Options) -> Iterator[Options]:
    """`options` with each combination of the values with which a model is opened."""
    given = {name: values for name in _SETTINGS if (values := getattr(sweep, name))}
    for values in itertools.product(*given.values()):
        yield replace(options, **dict(zip(given, values, strict=True)))
