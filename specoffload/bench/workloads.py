"""The texts that `bench --policies` continues: prompts to warm up on, and others to judge by.

The held-out prompts of the embedded pair stand for code and prose. `workloads.json` has a coding
agent's log, up to each time that the agent writes a file again, and functions to be rewritten with
one change. It was written for this purpose, so it is in no model's training data.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence

from specoffload.config.options import WorkloadName
from specoffload.config.resolution import demo_file, demo_prompts

_N_WARM, _N_JUDGED = 2, 4  # prompts of each kind
_N_BYTES, _SEED = 120, 7  # of a prompt of random bytes


MEANINGS: Mapping[WorkloadName, str] = {
    WorkloadName.CODE: "Python code",
    WorkloadName.PROSE: "English prose",
    WorkloadName.AGENT: "a coding agent's log",
    WorkloadName.REWRITE: "code that is written again with one change",
    WorkloadName.RANDOM: "random bytes",
    WorkloadName.MIXED: "all of them in one session",
}


def judged_prompts(workload: WorkloadName) -> list[str]:
    """The prompts of a workload. The prompts of `mixed` are those of all others, kinds in turn."""
    return _prompts(workload, _N_WARM, _N_JUDGED)


def warm_up_prompts(workloads: Sequence[WorkloadName]) -> list[str]:
    """Prompts of the same kinds that are in no judged workload, each once."""
    every = [text for workload in workloads for text in _prompts(workload, 0, _N_WARM)]
    return list(dict.fromkeys(every))


def _prompts(workload: WorkloadName, first: int, n: int) -> list[str]:
    if workload is WorkloadName.MIXED:
        kinds = [_prompts(kind, first, n) for kind in _READ]
        return [text for texts in zip(*kinds, strict=True) for text in texts]
    return list(_READ[workload]()[first : first + n])


def _recorded(kind: str) -> list[str]:
    rows = json.loads(demo_file("workloads.json").read_text(encoding="utf-8"))
    return [row["text"] for row in rows if row["kind"] == kind]


def _random_bytes() -> list[str]:
    draw = random.Random(_SEED)
    return [draw.randbytes(_N_BYTES).decode("latin-1") for _ in range(_N_WARM + _N_JUDGED)]


_READ: Mapping[WorkloadName, Callable[[], Sequence[str]]] = {
    WorkloadName.CODE: lambda: demo_prompts("code"),
    WorkloadName.PROSE: lambda: demo_prompts("prose"),
    WorkloadName.AGENT: lambda: _recorded("agent"),
    WorkloadName.REWRITE: lambda: _recorded("rewrite"),
    WorkloadName.RANDOM: _random_bytes,
}
