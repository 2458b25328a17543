"""Opens an EAGLE-3 file beside a target, from whose hidden rows it drafts."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from offload.errors import BadModel
from offload.ggml.context import Context
from offload.ggml.library.callback import Pending
from offload.ggml.library.lib import library
from offload.ggml.model import Model, ModelPlacement
from offload.ggml.row_context import EagleContext
from offload.model import ModelFacts
from offload.model_file import read_facts
from offload.plan.row_draft import eagle_complaint, target_layers
from offload.sequences.text import vocabulary_difference
from offload.times.context import ContextOptions


def open_eagle(
    path: Path,
    target: ModelFacts,
    model: Model,
    context: Context,
    options: ContextOptions,
    placement: ModelPlacement,
    pending: Pending,
    closing: ExitStack,
) -> EagleContext:
    """Open the file where the target's resident weights are, since it may use some of them.

    `model` and `context` are the target's. `closing` frees the file's model after the context.
    Raises BadModel or DoesNotFit if it cannot draft for this target.
    """
    facts = read_facts(path)
    complaint = eagle_complaint(target, facts) or _map_complaint(facts, model.n_vocab)
    if not complaint and not library().has_layer_inputs:
        complaint = "the installed library has no functions for rows of a model's layers"
    if complaint:
        raise BadModel(complaint)
    last = placement.devices[-1:]  # has the target's output
    placed = replace(placement, devices=last, tensor_split=(), overrides=(), load_mtp=False)
    draft = Model(path, placed, pending)
    closing.callback(draft.close)
    if difference := vocabulary_difference(model, draft, path.name):
        raise BadModel(f"{difference}, so it was made for another target")
    return EagleContext(draft, options, pending, context, target_layers(target, facts))


def _map_complaint(facts: ModelFacts, n_vocab: int) -> str:
    """Return what is wrong with the map from the file's tokens to the target's; "" if nothing."""
    place = facts.weights.get("d2t")
    if place is None:
        return ""
    n = place.entry.shape[0]
    tokens = np.fromfile(place.file, np.int64, n, offset=place.entry.offset_bytes)
    if len(tokens) == n and tokens.min(initial=0) >= 0 and tokens.max(initial=0) < n_vocab:
        return ""
    return f"{facts.path.name} has a map of tokens (d2t) to numbers outside 0 to {n_vocab - 1}"
