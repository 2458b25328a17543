"""Opens an EAGLE-3 file or block draft beside a target, from whose hidden rows it drafts."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from offload.errors import BadModel
from offload.ggml.block_context import BlockContext
from offload.ggml.context import Context
from offload.ggml.library.callback import Pending
from offload.ggml.library.lib import library
from offload.ggml.model import Model, ModelPlacement
from offload.ggml.row_context import EagleContext, RowContext
from offload.model import ModelFacts
from offload.model_file import read_facts
from offload.plan.block_draft import block_shape
from offload.plan.row_draft import target_layers
from offload.plan.row_file import is_block_draft, no_file_reason, row_file_ubatch
from offload.sequences.vocabulary_file import vocabulary_difference
from offload.times.context_memory import ContextOptions


def open_row_file(
    path: Path,
    target: ModelFacts,
    model: Model,
    context: Context,
    options: ContextOptions,
    placement: ModelPlacement,
    pending: Pending,
    closing: ExitStack,
) -> RowContext:
    """Open the file where the target's resident weights are, since it may use some of them.

    `model` and `context` are the target's. `options` are its context's, without snapshots.
    `closing` frees the file's model after the context. Raises BadModel or DoesNotFit if it cannot
    draft for this target.
    """
    facts = read_facts(path)
    reason = no_file_reason(target, facts) or _no_map_reason(facts, model.n_vocab)
    if not reason and not library().has_layer_inputs:
        reason = "the installed library has no functions for rows of a model's layers"
    if reason:
        raise BadModel(reason)
    if difference := vocabulary_difference(model.path, path):
        raise BadModel(f"--draft {path}: {difference}, so this file was made for another target")
    last = placement.devices[-1:]  # has the target's output
    placed = replace(
        placement, devices=last, tensor_split=(), overrides=(), load_mtp=False, kv_overrides=()
    )
    draft = Model(path, placed, pending)
    closing.callback(draft.close)
    n_ubatch = row_file_ubatch(facts, options)
    options = replace(options, n_batch=n_ubatch, n_ubatch=n_ubatch, n_outputs=n_ubatch)
    layers = target_layers(target, facts)
    if is_block_draft(facts):
        return BlockContext(draft, options, pending, context, layers, block_shape(facts))
    return EagleContext(draft, options, pending, context, layers)


def _no_map_reason(facts: ModelFacts, n_vocab: int) -> str:
    """Return what is wrong with the map from the file's tokens to the target's; "" if nothing."""
    place = facts.weights.get("d2t")
    if place is None:
        return ""
    n = place.entry.shape[0]
    tokens = np.fromfile(place.file, np.int64, n, offset=place.entry.offset_bytes)
    if len(tokens) == n and tokens.min(initial=0) >= 0 and tokens.max(initial=0) < n_vocab:
        return ""
    return f"{facts.path.name} has a map of tokens (d2t) to numbers outside 0 to {n_vocab - 1}"
