"""The texts that `policies` writes: prompts to tune on, and other prompts to judge by.

The embedded pair continues Python source. Its held-out prompts stand for code and prose;
`workloads.json` has the log of a coding agent's tool calls, up to each time that it writes a file
again, and functions to be rewritten with one change. The file's texts were written for it and
are in nobody's training data.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from specoffload.bench.workloads import prompts

Kinds = Mapping[str, Sequence[str]]  # prompts by kind

_WORKLOADS = Path(__file__).parent / "data" / "workloads.json"
_N_TUNING = 2  # prompts of each kind
_N_JUDGED = 4


def tuning_prompts() -> Kinds:
    """Prompts that settings are chosen on, and that an adaptive policy may learn from."""
    code, prose = prompts("code"), prompts("prose")
    return _kinds(0, _N_TUNING, code, prose, list(zip(code[2:], prose, strict=False)))


def judged_prompts() -> Kinds:
    """Prompts that no policy has met before it is judged by them."""
    code, prose = prompts("code")[2 * _N_TUNING :], prompts("prose")[_N_TUNING:]
    pairs = list(zip(code[_N_JUDGED:], prose[_N_JUDGED:], strict=False))
    return _kinds(_N_TUNING, _N_JUDGED, code, prose, pairs)


def _kinds(
    first: int,
    n: int,
    code: Sequence[str],
    prose: Sequence[str],
    pairs: Sequence[tuple[str, str]],
) -> Kinds:
    """`n` prompts of each kind; those of workloads.json from the one numbered `first` on."""
    return {
        "code": code[:n],
        "prose": prose[:n],
        "switching": ["\n\n".join(pair[:: -1 if i % 2 else 1]) for i, pair in enumerate(pairs[:n])],
        "agent": _workload("agent")[first : first + n],
        "rewrite": _workload("rewrite")[first : first + n],
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


def _workload(kind: str) -> list[str]:
    rows = json.loads(_WORKLOADS.read_text(encoding="utf-8"))
    return [row["text"] for row in rows if row["kind"] == kind]
