"""Reads a demo GGUF back into a torch model: the check that the export says what torch computes."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch

from lab.train.draft import Draft
from lab.train.export import Arrays, Vocabulary
from lab.train.shapes import DraftShape, TargetShape
from lab.train.target import Target


class DemoGGUF:
    """Metadata, vocabulary and dequantised tensors of a target.gguf or draft.gguf."""

    def __init__(self, path: Path) -> None:
        self.reader = gguf.GGUFReader(str(path))
        self.architecture = str(self.reader.fields["general.architecture"].contents())
        self.arrays: Arrays = {
            t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32)
            for t in self.reader.tensors
        }

    def number(self, key: str) -> int:
        return int(self.reader.fields[f"{self.architecture}.{key}"].contents())

    def vocabulary(self) -> Vocabulary:
        fields = self.reader.fields
        tokens = fields["tokenizer.ggml.tokens"].contents()
        return Vocabulary(tuple(tokens), tuple(fields["tokenizer.ggml.merges"].contents()))

    def shape(self) -> TargetShape | DraftShape:
        common = {
            "n_vocab": self.number("vocab_size"),
            "n_layer": self.number("block_count"),
            "embd": self.number("embedding_length"),
            "n_head": self.number("attention.head_count"),
            "ff": self.number("feed_forward_length"),
        }
        if self.architecture == "llama":
            return DraftShape(head_dim=self.number("attention.key_length"), **common)
        rope = self.number("rope.dimension_count")
        scale = self.reader.fields["deepseek2.expert_weights_scale"].contents()
        return TargetShape(
            n_dense=self.number("leading_dense_block_count"),
            q_lora=self.number("attention.q_lora_rank"),
            kv_lora=self.number("attention.kv_lora_rank"),
            nope=self.number("attention.key_length_mla") - rope,
            rope=rope,
            v_dim=self.number("attention.value_length_mla"),
            ff_exp=self.number("expert_feed_forward_length"),
            n_exp=self.number("expert_count"),
            n_used=self.number("expert_used_count"),
            n_shared=self.number("expert_shared_count"),
            weights_scale=float(scale),
            **common,
        )


def torch_model(read: DemoGGUF) -> Target | Draft:
    """The torch model with the file's dequantised weights; every tensor must be used."""
    shape, left = read.shape(), dict(read.arrays)
    state = {
        "embedding": left.pop("token_embd.weight"),
        "norm.weight": left.pop("output_norm.weight"),
    }
    if isinstance(shape, TargetShape):
        state["head"] = left.pop("output.weight")
    for i in range(shape.n_layer):
        prefix = f"blk.{i}."
        block = {k.removeprefix(prefix): left.pop(k) for k in list(left) if k.startswith(prefix)}
        named = _target_layer(block, shape) if isinstance(shape, TargetShape) else _llama(block)
        state |= {f"layers.{i}.{name}": array for name, array in named.items()}
    if left:
        raise ValueError(f"tensors the torch model does not know: {sorted(left)}")
    model = Target(shape) if isinstance(shape, TargetShape) else Draft(shape)
    model.load_state_dict({k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in state.items()})
    return model.eval()


def _llama(block: Arrays) -> Arrays:
    return {
        "attn_norm.weight": block["attn_norm.weight"],
        "q": block["attn_q.weight"],
        "k": block["attn_k.weight"],
        "v": block["attn_v.weight"],
        "out": block["attn_output.weight"],
        "ffn_norm.weight": block["ffn_norm.weight"],
        "dense.gate_up": np.concatenate((block["ffn_gate.weight"], block["ffn_up.weight"])),
        "dense.down": block["ffn_down.weight"],
    }


def _target_layer(block: Arrays, shape: TargetShape) -> Arrays:
    routed = "ffn_gate_inp.weight" in block
    dense = "_shexp.weight" if routed else ".weight"
    named = {
        "attn_norm.weight": block["attn_norm.weight"],
        "ffn_norm.weight": block["ffn_norm.weight"],
        "attn.q_a": block["attn_q_a.weight"],
        "attn.q_a_norm.weight": block["attn_q_a_norm.weight"],
        "attn.q_b": block["attn_q_b.weight"],
        "attn.kv_a": block["attn_kv_a_mqa.weight"],
        "attn.kv_a_norm.weight": block["attn_kv_a_norm.weight"],
        "attn.k_b": block["attn_k_b.weight"].transpose(0, 2, 1).reshape(-1, shape.kv_lora),
        "attn.v_b": block["attn_v_b.weight"].reshape(-1, shape.kv_lora),
        "attn.out": block["attn_output.weight"],
        "dense.gate_up": np.concatenate((block["ffn_gate" + dense], block["ffn_up" + dense])),
        "dense.down": block["ffn_down" + dense],
    }
    if routed:
        gate_up = (block["ffn_gate_exps.weight"], block["ffn_up_exps.weight"])
        named["experts.router"] = block["ffn_gate_inp.weight"]
        named["experts.bias"] = block["exp_probs_b.bias"]
        named["experts.gate_up"] = np.concatenate(gate_up, axis=1)
        named["experts.down"] = block["ffn_down_exps.weight"]
    return named
