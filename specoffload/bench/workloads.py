"""The texts that `bench --policies` writes: prompts to tune on, and other prompts to judge by.

The embedded pair continues Python source. Its held-out prompts stand for code and prose;
`workloads.json` has the log of a coding agent's tool calls, up to each time that it writes a file
again, and functions to be rewritten with one change. The file's texts were written for it and
are in nobody's training data.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence

from specoffload.config.resolution import demo_file

Kinds = Mapping[str, Sequence[str]]  # prompts by kind

_N_TUNING = 2  # prompts of each kind
_N_JUDGED = 3


def prompts(kind: str = "code", file: str = "prompts.json") -> list[str]:
    """The prompts of one kind: "code" and "prose", or of workloads.json "agent" and "rewrite"."""
    rows = json.loads(demo_file(file).read_text(encoding="utf-8"))
    return [row["text"] for row in rows if row["kind"] == kind]


def tuning_prompts() -> Kinds:
    """Prompts that settings are chosen on, and that an adaptive policy may learn from."""
    return {kind: texts[:_N_TUNING] for kind, texts in _all().items()}


def judged_prompts() -> Kinds:
    """Prompts that no policy has met before it is judged by them."""
    return {kind: texts[_N_TUNING : _N_TUNING + _N_JUDGED] for kind, texts in _all().items()}


def _all() -> Kinds:
    code, prose = prompts("code"), prompts("prose")
    n = _N_TUNING + _N_JUDGED
    return {
        "code": code[:n],
        "prose": prose[:n],
        "switching": [
            f"{a}\n\n{b}" if i % 2 else f"{b}\n\n{a}"
            for i, (a, b) in enumerate(zip(code[n : 2 * n], prose[n : 2 * n], strict=True))
        ],
        "agent": prompts("agent", "workloads.json"),
        "rewrite": prompts("rewrite", "workloads.json"),
    }


def adversarial_prompts(n_prompts: int = 3, n_bytes: int = 120) -> Kinds:
    """Random bytes: nothing in them can be foreseen."""
    draw = random.Random(7)
    return {
        "adversarial": [draw.randbytes(n_bytes).decode("latin-1") for _ in range(n_prompts)],
    }


def in_turns(kinds: Kinds) -> list[tuple[str, str]]:
    """(kind, prompt) of all kinds in turns: code is followed by prose."""
    longest = max(map(len, kinds.values()))
    return [
        (kind, texts[i]) for i in range(longest) for kind, texts in kinds.items() if i < len(texts)
    ]
