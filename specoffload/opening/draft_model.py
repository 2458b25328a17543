"""A session's draft model, in either engine, and the measured time of its token.

This module does not import torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, TypeAlias

from offload.engine import Engine
from offload.measuring import Clock
from offload.model_file import model_hash
from offload.sequences.block_draft import BlockDraft
from offload.sequences.row_draft import RowDraft
from specdec.types import BlockModel, Target
from specdec.whole_file import read_text
from specoffload.config.resolution import demo_prompts
from specoffload.errors import UsageError

if TYPE_CHECKING:
    from offload.torch_draft.draft import TorchEngine

DraftModel: TypeAlias = "Engine | TorchEngine"

SEQUENCE = 0
DRAFT_DEPTHS = (16, 512)  # context lengths in tokens at which a draft's token is timed
_N_STEPS = 16  # number of timed tokens, after as many for warm-up
_DRAFT = 4  # tokens of a timed draft by the model's own layers
_BLOCK, _N_BLOCKS = 8, 3  # tokens of a timed block, and number of timed blocks


def missing_torch(extra: str) -> str:
    """Return a clause if torch is not installed, with the `extra` of ours that has it; else ""."""
    if importlib.util.find_spec("torch") is not None:
        return ""
    return f"torch is not installed (pip install 'specoffload[{extra}]')"


def real_text(engine: DraftModel) -> list[int]:
    """Tokens of the embedded pair's prompts, code and prose.

    Measurements need real text, since the experts that a batch uses depend on it.
    """
    text = "\n".join(demo_prompts())
    return engine.tokenize(text, add_special=False, parse_special=False)


def step_by_depth_s(
    draft: Target | RowDraft, text: Sequence[int], n_max: int | None = None
) -> dict[int, float]:
    """Seconds of one step of a draft model or of own layers, by number of context tokens.

    These are DRAFT_DEPTHS, lowered to the room in the context and the text. `n_max`: most tokens of
    a block, as the user chose it.
    """
    room = min(len(text), draft.n_ctx) - 2 * _N_STEPS
    depths = sorted({max(0, min(depth, room)) for depth in DRAFT_DEPTHS})
    if isinstance(draft, RowDraft):
        return {depth: measure_layers(draft, text, depth=depth, n_max=n_max) for depth in depths}
    return {depth: measure_step(draft, text, depth) for depth in depths}


def measure_step(
    draft: Target, text: Sequence[int], depth: int = 0, clock: Clock = perf_counter
) -> float:
    """Median seconds of one token of the draft after `depth` tokens of context.

    A median, because another program may interrupt single steps.
    """
    n = max(1, min(_N_STEPS, draft.n_ctx // 2, len(text) // 2))
    draft.rewind(SEQUENCE, 0)
    if depth:
        draft.extend(SEQUENCE, text[:depth], 0)
    if isinstance(draft, BlockModel):
        step_s = _block_step_s(draft, text, min(n, _BLOCK, draft.n_steps_max), clock)
    else:
        tokens = [text[(depth + i) % len(text)] for i in range(2 * n)]
        steps_s = []
        for token in tokens:
            began = clock()
            draft.extend(SEQUENCE, [token])
            steps_s.append(clock() - began)
        step_s = median(steps_s[n:])
    draft.rewind(SEQUENCE, 0)
    return step_s


def block_length(layers: BlockDraft, n_max: int | None) -> int:
    """Drafted tokens of a block: as many as it was trained for, or fewer if the user says so."""
    return layers.shape.n_most if n_max is None else min(layers.shape.n_most, n_max)


def measure_layers(
    layers: RowDraft,
    text: Sequence[int],
    clock: Clock = perf_counter,
    depth: int = 0,
    n_max: int | None = None,
) -> float:
    """Seconds of one draft step after `depth` tokens, in drafts of usual length.

    A step drafts one token, or a block of at most `n_max` tokens. The first step of each draft also
    takes in the target's rows, as if half of the draft before had been accepted. The result is the
    median of the drafts' means.
    """
    n_steps = n_usual = min(_DRAFT, layers.most_drafted or _DRAFT)
    if isinstance(layers, BlockDraft):
        n_steps, n_usual = 1, min(_DRAFT, block_length(layers, n_max))
    layers.begin(SEQUENCE, text[:depth])
    length = depth
    drafts_s = []
    for _ in range(2 * _N_BLOCKS):
        length += 1 + n_usual // 2
        layers.follow(SEQUENCE, text[:length])
        history = list(text[: length + 1])
        took_s = 0.0
        for step in range(n_steps):
            began = clock()
            tokens = [text[(depth + step) % len(text)]] if step else layers.tail(SEQUENCE, history)
            if isinstance(layers, BlockDraft):
                layers.draft_blocks([(SEQUENCE, tokens)], block_length(layers, n_max))
            else:
                layers.extend(SEQUENCE, tokens)
            took_s += clock() - began
        drafts_s.append(took_s / n_steps)
    layers.emptied(SEQUENCE)
    return median(drafts_s[_N_BLOCKS:])


def _block_step_s(draft: BlockModel, text: Sequence[int], n_steps: int, clock: Clock) -> float:
    """Median seconds of a block, including its copy to the host, for each of its tokens."""
    blocks_s, depth = [], draft.length(SEQUENCE)
    for i in range(2 * _N_BLOCKS):
        began = clock()
        draft.draft([(SEQUENCE, [text[(depth + i) % len(text)]])], n_steps)
        blocks_s.append(clock() - began)
        draft.rewind(SEQUENCE, depth)
    return median(blocks_s[_N_BLOCKS:]) / n_steps


def draft_key(draft: DraftModel) -> str:
    """The settings that the time of a draft model's step depends on, as text."""
    if isinstance(draft, Engine):
        place, n_threads = draft.place, draft.layout.context.n_threads
    else:
        place, n_threads = f"torch {draft.options.device}", draft.options.n_threads
    words = [model_hash(draft.facts), place, f"threads {n_threads}"]
    if not isinstance(draft, Engine):
        t = draft.options
        words += [t.dtype, f"graphs {t.graphs}", f"kept {len(t.kept)}"]
    return " ".join(words)


def read_kept(path: Path) -> tuple[int, ...]:
    """The token ids of a pruned vocabulary: one per line, text after a # is ignored.

    Raises UsageError for a bad line.
    """
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"--draft-vocab {path}: cannot be read as UTF-8 text ({e})") from e
    kept: list[int] = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        if not text.isdecimal():
            raise UsageError(f"--draft-vocab {path}: line {number} is {text!r:.40}, no token id")
        kept.append(int(text))
    if not kept:
        raise UsageError(
            f"--draft-vocab {path}: holds no token id; specoffload draft prune writes a file"
        )
    return tuple(sorted(set(kept)))
