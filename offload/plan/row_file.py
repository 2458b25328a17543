"""Rules for any file that drafts from its target's rows: an EAGLE-3 file or a block draft."""

from __future__ import annotations

from offload.model import ModelFacts
from offload.plan.block_draft import (
    BLOCK_ARCHITECTURE,
    block_bytes,
    block_shape,
    block_ubatch,
    no_block_reason,
)
from offload.plan.row_draft import ARCHITECTURE, eagle_bytes, eagle_ubatch, no_eagle_reason
from offload.times.context_memory import ContextOptions

# Architectures of files that draft inside their target's context, and are no models alone.
ROW_FILES = frozenset({ARCHITECTURE, BLOCK_ARCHITECTURE})


def is_block_draft(facts: ModelFacts) -> bool:
    """True if the file drafts blocks of tokens, each in one pass."""
    return facts.architecture == BLOCK_ARCHITECTURE


def has_lattice(facts: ModelFacts) -> bool:
    """True if the file drafts several candidates for each place of a block, of which trees grow."""
    return is_block_draft(facts) and block_shape(facts).n_candidates > 0


def no_file_reason(target: ModelFacts, facts: ModelFacts) -> str:
    """Return why the file cannot draft for the target, as a sentence; "" if it can."""
    kind = facts.architecture
    if kind not in ROW_FILES:
        return f"{facts.path.name} is no EAGLE-3, DFlash or DSpark file, but a model of {kind}"
    reason_of = no_block_reason if is_block_draft(facts) else no_eagle_reason
    return reason_of(target, facts)


def row_file_ubatch(facts: ModelFacts, target: ContextOptions) -> int:
    """Return the most tokens at once of the file's context beside the target's."""
    return (
        block_ubatch(block_shape(facts), target) if is_block_draft(facts) else eagle_ubatch(target)
    )


def row_file_bytes(facts: ModelFacts, context: ContextOptions) -> int:
    """Return the device memory of the file's weights, and of its context beside the target's."""
    bytes_of = block_bytes if is_block_draft(facts) else eagle_bytes
    return bytes_of(facts, context)
