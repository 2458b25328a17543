"""Writes checkpoints as GGUFs under llama.cpp's tensor names, with the tokeniser inside."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

from lab.train.shapes import (
    EOS_ID,
    IM_END_ID,
    N_CTX,
    PAD_ID,
    RMS_EPS,
    ROPE_BASE,
    SPECIAL_TOKENS,
    DraftShape,
    TargetShape,
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
Arrays = dict[str, np.ndarray]


def _target_arrays(state: Arrays, shape: TargetShape) -> Arrays:
    arrays = {
        "token_embd.weight": state["embedding"],
        "output_norm.weight": state["norm.weight"],
        "output.weight": state["head"],
    }
    for i in range(shape.n_layer):
        is_dense = i < shape.n_dense
        arrays |= layer_arrays(state, shape, f"layers.{i}.", f"blk.{i}.", is_dense=is_dense)
    return arrays


def layer_arrays(state: Arrays, shape: TargetShape, at: str, to: str, *, is_dense: bool) -> Arrays:
    """GGUF arrays of one target layer. `at` begins its names in `state`, `to` its names in GGUF."""
    arrays = _mla_arrays(state, shape, at + "attn.", to)
    arrays[to + "attn_norm.weight"] = state[at + "attn_norm.weight"]
    arrays[to + "ffn_norm.weight"] = state[at + "ffn_norm.weight"]
    gate, up = np.split(state[at + "dense.gate_up"], 2)
    suffix = "" if is_dense else "_shexp"
    arrays[f"{to}ffn_gate{suffix}.weight"] = gate
    arrays[f"{to}ffn_up{suffix}.weight"] = up
    arrays[f"{to}ffn_down{suffix}.weight"] = state[at + "dense.down"]
    if is_dense:
        return arrays
    gate, up = np.split(state[at + "experts.gate_up"], 2, axis=1)
    arrays[to + "ffn_gate_inp.weight"] = state[at + "experts.router"]
    arrays[to + "exp_probs_b.bias"] = state[at + "experts.bias"]
    arrays[to + "ffn_gate_exps.weight"] = gate
    arrays[to + "ffn_up_exps.weight"] = up
    arrays[to + "ffn_down_exps.weight"] = state[at + "experts.down"]
    return arrays


def _mla_arrays(state: Arrays, shape: TargetShape, at: str, to: str) -> Arrays:
    heads = shape.n_head
    # llama.cpp multiplies queries by k_b, so it stores each head's k_b transposed.
    k_b = state[at + "k_b"].reshape(heads, shape.nope, shape.kv_lora).transpose(0, 2, 1)
    return {
        to + "attn_q_a.weight": state[at + "q_a"],
        to + "attn_q_a_norm.weight": state[at + "q_a_norm.weight"],
        to + "attn_q_b.weight": state[at + "q_b"],
        to + "attn_kv_a_mqa.weight": state[at + "kv_a"],
        to + "attn_kv_a_norm.weight": state[at + "kv_a_norm.weight"],
        to + "attn_k_b.weight": k_b,
        to + "attn_v_b.weight": state[at + "v_b"].reshape(heads, shape.v_dim, shape.kv_lora),
        to + "attn_output.weight": state[at + "out"],
    }


def _draft_arrays(state: Arrays, shape: DraftShape) -> Arrays:
    arrays = {
        "token_embd.weight": state["embedding"],
        "output_norm.weight": state["norm.weight"],
    }
    for i in range(shape.n_layer):
        at, to = f"layers.{i}.", f"blk.{i}."
        gate, up = np.split(state[at + "dense.gate_up"], 2)
        arrays |= {
            to + "attn_norm.weight": state[at + "attn_norm.weight"],
            to + "attn_q.weight": state[at + "q"],
            to + "attn_k.weight": state[at + "k"],
            to + "attn_v.weight": state[at + "v"],
            to + "attn_output.weight": state[at + "out"],
            to + "ffn_norm.weight": state[at + "ffn_norm.weight"],
            to + "ffn_gate.weight": gate,
            to + "ffn_up.weight": up,
            to + "ffn_down.weight": state[at + "dense.down"],
        }
    return arrays


def _add_target_shape(writer: gguf.GGUFWriter, shape: TargetShape) -> None:
    writer.add_feed_forward_length(shape.ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(1)
    writer.add_leading_dense_block_count(shape.n_dense)
    writer.add_q_lora_rank(shape.q_lora)
    writer.add_kv_lora_rank(shape.kv_lora)
    writer.add_key_length(shape.kv_lora + shape.rope)
    writer.add_value_length(shape.kv_lora)
    writer.add_key_length_mla(shape.nope + shape.rope)
    writer.add_value_length_mla(shape.v_dim)
    writer.add_expert_feed_forward_length(shape.ff_exp)
    writer.add_expert_count(shape.n_exp)
    writer.add_expert_used_count(shape.n_used)
    writer.add_expert_shared_count(shape.n_shared)
    writer.add_expert_weights_scale(shape.weights_scale)
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_rope_dimension_count(shape.rope)


def _add_draft_shape(writer: gguf.GGUFWriter, shape: DraftShape) -> None:
    writer.add_feed_forward_length(shape.ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)


@dataclass(frozen=True)
class Vocabulary:
    """Token texts by id in GPT-2's byte alphabet, and merges by rank as "left right"."""

    tokens: tuple[str, ...]
    merges: tuple[str, ...]

    @classmethod
    def from_json(cls, path: Path) -> Vocabulary:
        """Reads a tokenizer.json of `tokenizers`."""
        model = json.loads(path.read_text())["model"]
        by_id = sorted(model["vocab"], key=model["vocab"].__getitem__)
        merges = (m if isinstance(m, str) else " ".join(m) for m in model["merges"])
        return cls(tuple(by_id), tuple(merges))

    @classmethod
    def from_gguf(cls, path: Path) -> Vocabulary:
        fields = gguf.GGUFReader(str(path)).fields
        tokens = fields["tokenizer.ggml.tokens"].contents()
        return cls(tuple(tokens), tuple(fields["tokenizer.ggml.merges"].contents()))


def _add_tokenizer(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    special = set(SPECIAL_TOKENS)
    kinds = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types([kinds[token in special] for token in vocabulary.tokens])
    writer.add_token_merges(list(vocabulary.merges))
    writer.add_bos_token_id(EOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_eot_token_id(IM_END_ID)
    writer.add_pad_token_id(PAD_ID)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def write_gguf(
    path: Path,
    shape: TargetShape | DraftShape,
    arrays: Arrays,
    vocabulary: Vocabulary,
    kind: Kind,
    *,
    n_mtp_layers: int = 0,
) -> None:
    """Write a model file, matrices as `kind`. Gains, biases and the router stay float32, as
    llama.cpp reads them."""
    partial = path.with_suffix(".partial")
    is_target = isinstance(shape, TargetShape)
    writer = gguf.GGUFWriter(str(partial), "deepseek2" if is_target else "llama")
    writer.add_name(f"specoffload demo {'target' if is_target else 'draft'}")
    writer.add_license("PSF-2.0")
    writer.add_context_length(N_CTX)
    writer.add_embedding_length(shape.embd)
    writer.add_block_count(shape.n_layer + n_mtp_layers)
    if n_mtp_layers:
        writer.add_nextn_predict_layers(n_mtp_layers)
    writer.add_layer_norm_rms_eps(RMS_EPS)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_file_type({Kind.F32: 0, Kind.F16: 1, Kind.Q8_0: 7}[kind])
    if isinstance(shape, TargetShape):
        _add_target_shape(writer, shape)
    else:
        _add_draft_shape(writer, shape)
    _add_tokenizer(writer, vocabulary)
    for name, array in arrays.items():
        plain = array.ndim == 1 or name.endswith("ffn_gate_inp.weight") or kind == Kind.F32
        data = np.ascontiguousarray(array, dtype=np.float32)
        stored = Kind.F32 if plain else kind
        writer.add_tensor(name, gguf.quants.quantize(data, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(partial, path)


def shape_of(saved: dict[str, Any]) -> TargetShape | DraftShape:
    """The shape that a checkpoint holds."""
    shape = saved["shape"]
    return TargetShape(**shape) if "n_exp" in shape else DraftShape(**shape)


def arrays_of(state: dict[str, Any], shape: TargetShape | DraftShape) -> Arrays:
    """float32 arrays in numpy order, by GGUF tensor name."""
    state = {name: value.float().numpy() for name, value in state.items()}
    if isinstance(shape, TargetShape):
        return _target_arrays(state, shape)
    return _draft_arrays(state, shape)


def export_one(work: Path, name: str, path: Path, kind: Kind) -> None:
    """Writes work/NAME.pt to `path`; NAME is target or draft."""
    saved = torch.load(work / f"{name}.pt", map_location="cpu", weights_only=True)
    shape = shape_of(saved)
    path.parent.mkdir(parents=True, exist_ok=True)
    vocabulary = Vocabulary.from_json(work / "tokenizer.json")
    write_gguf(path, shape, arrays_of(saved["model"], shape), vocabulary, kind)


def export_pair(work: Path, out: Path) -> list[Path]:
    """Write both models as Q8_0, if they have a checkpoint. Returns the paths of the files."""
    paths = []
    for name in ("target", "draft"):
        if (work / f"{name}.pt").exists():
            export_one(work, name, out / f"{name}.gguf", Kind.Q8_0)
            paths.append(out / f"{name}.gguf")
    return paths
