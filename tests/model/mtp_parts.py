"""Tiny f32 models with layers for multi-token prediction: sessions, and references for drafts.

Every expert is used, so that no router has to choose between scores that nearly tie.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from budgets import ON_GPU, budget
from gguf import GGMLQuantizationType as Type
from lossless_parts import NEAR_TIE
from test_slots import open_slots

from lab.synth import Shape, plan_shape, write
from lab.synth.mixtures import mixture_shape
from lab.synth.shape import find_preset, resolve
from lab.synth.tensors import Fill, Tensor
from lab.synth.write import Plan
from offload.engine import Engine
from offload.model_file import read_facts
from offload.plan.context import ContextOptions
from offload.plan.row_draft import plan_mtp
from offload.streaming.options import StreamingOptions
from specdec.decoding.drafting import ChainDrafting
from specdec.decoding.loop import DecodingLoop
from specdec.decoding.member import BatchMember
from specdec.drafters.rows import RowDrafter
from specdec.drafters.synthetic import SyntheticAcceptance
from specdec.policies.rules import Fixed
from specoffload.session.generation import GenerateOptions
from specoffload.session.session import Session

PRESETS = {
    "deepseek2": "deepseek-v3",
    "glm4moe": "glm-4.6",
    "qwen35moe": "qwen3.5-35b-a3b",
    "qwen3next": "qwen3-next-80b-a3b",
}
SEVERAL = "step35"  # three layers, one for each drafted token
# Mixtures without a preset that has such layers, made from their tiny shapes.
MIXTURES = (
    *("bailingmoe3", "cohere2moe", "deepseek32", "deepseek4", "glm-dsa", "hy_v3", "mimo2"),
    "nemotron_h_moe",
)
DENSE = "qwen35"  # which has no experts
OTHERS = (*MIXTURES, DENSE)
ARCHITECTURES = (*PRESETS, SEVERAL, *OTHERS)
LONGEST = 6
WAYS: dict[str, dict[str, Any]] = {
    "resident": {"device": "cpu"},
    "streamed": {"device": "sim", "min_batch": "1"},
    "split": {"device": "sim", "hybrid": "on"},
}
_STEP35: dict[str, Any] = {
    "block_count": 7,
    "embedding_length": 128,
    "feed_forward_length": 256,
    "context_length": 4096,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "rope.dimension_count": 32,
    "rope.freq_base": 1e4,
    "rope.freq_base_swa": 1e4,
    "leading_dense_block_count": 1,
    "expert_count": 8,
    "expert_used_count": 8,
    "expert_feed_forward_length": 64,
    "expert_shared_feed_forward_length": 64,
    "attention.sliding_window": 512,
    "attention.sliding_window_pattern": (0, 1, 1, 0, 1, 1, 1),
    "nextn_predict_layers": 3,
    "expert_gating_func": 2,
}
_STEP35_WITHOUT = (
    r"^blk\.0\..*exp",
    r"^blk\.0\.ffn_gate_inp",
    r"^blk\.[1-6]\.ffn_(gate|up|down)\.weight",
    r"\.nextn\.(embed_tokens|shared_head_head)\.weight$",
)


def write_mtp(
    folder: Path,
    architecture: str,
    *,
    seed: int = 5,
    without: str = "",
    name: str = "",
    own: Mapping[str, int] = {},
) -> Path:
    """Write a tiny model with one MTP layer, or with three for step35. Returns its path.

    `architecture` is one of `ARCHITECTURES`.

    `without` is a pattern of tensors to leave out, of those with a preset. `own` is metadata of the
    others. Such a file needs its own `name`.
    """
    path = folder / f"mtp-{architecture}-{seed}{name}.gguf"
    if path.exists():
        return path
    if architecture == SEVERAL:
        shape = Shape(
            SEVERAL, SEVERAL, _STEP35, 512, without=_STEP35_WITHOUT, quant="f32", unchecked=True
        )
        return write(plan_shape(shape, "bytes"), path, seed)
    if architecture in OTHERS:
        return write(_other(architecture, own), path, seed)
    preset = find_preset(PRESETS[architecture])
    counted = int("nextn_predict_layers" in preset.metadata)
    metadata: dict[str, Any] = {"nextn_predict_layers": 1}
    if "expert_group_count" in preset.metadata:
        metadata |= {"expert_group_count": 0, "expert_group_used_count": 0}
    shape = resolve(
        preset.name,
        "tiny",
        quant="f32",
        n_layer=int(preset.tiny["block_count"]) + 1 - counted,
        n_expert_used=int(preset.tiny["expert_count"]),
        metadata=metadata,
    )
    if without:
        shape = replace(shape, without=(*shape.without, without))
    return write(plan_shape(shape, "bytes"), path, seed)


def _other(architecture: str, own: Mapping[str, int]) -> Plan:
    """Return the plan of a file of one of `OTHERS`, with some metadata replaced by `own`."""
    if architecture == DENSE:
        preset = find_preset(PRESETS["qwen35moe"])
        values = {**preset.metadata, **preset.tiny}
        metadata = {key: value for key, value in values.items() if "expert" not in key}
        without: tuple[str, ...] = preset.without
    else:
        shape = mixture_shape(architecture)
        metadata, without = dict(shape.metadata), shape.without
        metadata["expert_used_count"] = metadata["expert_count"]
        if architecture == "deepseek4":  # unlike the heads of keys, as in published files
            metadata["attention.indexer.key_length"] = 128
    n = int(metadata["block_count"])  # type: ignore[arg-type]
    # A value for each layer goes on with that of the first, which attends in all of these.
    metadata |= {
        key: (*value, value[0])
        for key, value in metadata.items()
        if isinstance(value, tuple) and len(value) == n and not key.endswith("sections")
    }
    metadata |= {"block_count": n + 1, "nextn_predict_layers": 1, **own}
    without += (r"\.nextn\.(embed_tokens|shared_head_head)\.weight$",)
    shape = Shape(
        architecture, architecture, metadata, 512, without=without, quant="f32", unchecked=True
    )
    return _completed(plan_shape(shape, "bytes"), n)


def _completed(plan: Plan, layer: int) -> Plan:
    """Return the plan with tensors of the MTP layer that the library does not list.

    It lists tensors without a file. For deepseek4 it asks the file whether it has such a layer, and
    for mimo2 it prefers separate matrices to the joint one that the layer's graph needs.
    """
    architecture, tensors = plan.shape.architecture, list(plan.tensors)
    n_embd = plan.shape.number("embedding_length")
    name, normal = f"blk.{layer}.", Fill("normal", 0.05)
    if architecture == "deepseek4":
        shapes = {"eh_proj": (2 * n_embd, n_embd), "enorm": (n_embd,), "hnorm": (n_embd,)}
        tensors += [
            Tensor(
                f"{name}nextn.{kind}.weight", its, Type.F32,
                normal if len(its) > 1 else Fill("constant"),
            )
            for kind, its in shapes.items()
        ]  # fmt: skip
    elif architecture == "mimo2":
        parts = [t for t in tensors if re.fullmatch(rf"blk\.{layer}\.attn_[qkv]\.weight", t.name)]
        joint = (n_embd, sum(t.shape[1] for t in parts))
        dropped = re.compile(rf"blk\.{layer}\.(attn_[qkv]\.|ffn_.*_exps|ffn_gate_inp|exp_probs_b)")
        tensors = [t for t in tensors if not dropped.match(t.name)]
        tensors.append(Tensor(f"{name}attn_qkv.weight", joint, Type.F32, normal))
    return replace(plan, tensors=tuple(tensors))


def fresh_draft(engine: Engine, history: Sequence[int], n: int) -> tuple[list[int], list[float]]:
    """The `n` tokens that the layers draft after `history` from an empty memory.

    Returns the tokens, and how far the logit of each is above the second likeliest token's.
    """
    layers = engine.row_draft
    assert layers is not None
    engine.sequences.rewind(0, 0)
    engine.sequences.extend(0, history[:-1], 0)
    tokens: list[int] = []
    gaps: list[float] = []
    feed = layers.tail(0, history)
    while len(tokens) < n:
        row = layers.extend(0, feed)[-1]
        second, best = np.partition(row, -2)[-2:]
        tokens.append(int(row.argmax()))
        gaps.append(float(best - second))
        feed = tokens[-1:]
    return tokens, gaps


def check_each_draft(engine: Engine, fresh: Engine) -> None:
    """Check that all drafts of a run are those of a fresh evaluation, except at near ties.

    Drafts are accepted at random, so that rows of every length are kept and dropped. Each sequence
    of `engine` has a text. If there are several, every third draft is compared.
    """
    n_sequences = engine.options.n_sequences
    rng = np.random.default_rng(n_sequences)
    accept = SyntheticAcceptance([0.8, 0.6, 0.4], rng)
    assert engine.row_draft is not None
    drafting = ChainDrafting(engine.sequences, RowDrafter(engine.row_draft), Fixed(3))
    loop = DecodingLoop(engine.sequences, drafting)
    members = [
        BatchMember(s, rng.integers(4, 500, 80 + 30 * s).tolist(), accept, 24 + 5 * s,
                    lambda _: False)
        for s in range(n_sequences)
    ]  # fmt: skip
    for member in members:
        loop.add(member)
    n_drafts = n_accepted = 0
    while not loop.is_idle:
        before = {m.sequence: list(m.history) for m in members}
        for member, round_ in loop.step().rounds:
            drafted = round_.draft.tokens
            if not drafted:
                continue
            n_drafts += 1
            if n_sequences == 1 or n_drafts % 3 == 0:
                tokens, gaps = fresh_draft(fresh, before[member.sequence], len(drafted))
                same = next((i for i, t in enumerate(drafted) if t != tokens[i]), len(drafted))
                assert same == len(drafted) or gaps[same] < NEAR_TIE
            n_accepted += round_.n_accepted
    assert engine.row_draft.n_unknown_rows == 0
    assert n_drafts > 5 * n_sequences
    assert 0 < n_accepted < 3 * n_drafts


def prompts(n: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, 500, int(rng.integers(5, 60))).tolist() for _ in range(n)]


def half_of(path: Path) -> int:
    """Device memory for half of the experts that stream, and for the layers that draft."""
    layers = plan_mtp(read_facts(path), ContextOptions(), None)
    return budget(path, StreamingOptions(), "half") + layers.weight_bytes


def open_mtp(path: Path, way: str, parallel: int = 1, **more: Any) -> Session:
    spec = {"--spec-type": "draft-mtp", "--spec-policy": "fixed", "--spec-draft-n-max": LONGEST}
    if more.pop("plain", False):
        spec = {"--spec-type": "none"}
    if way == "split":
        more |= {"vram_bytes": half_of(path), "n_gpu_layers": ON_GPU}
    return open_slots(path, spec, parallel, **WAYS[way], **more)


def written(session: Session, prompt: Sequence[int], n: int = 12, **more: Any) -> list[int]:
    options = GenerateOptions(n_predict=n, ignore_eos=True, **more)
    return [t for piece in session.generate(prompt, options) for t in piece.tokens]
