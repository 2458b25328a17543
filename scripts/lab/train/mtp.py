"""Trains a layer for multi-token prediction (MTP) for the target, whose own weights do not change.

The layer takes a token and the target's normalised hidden row at the position before it. It learns
the target's distribution after that token. At first it learns with the target's rows alone. In the
last part of the run it also learns with its own rows, which it gets for a draft's second token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lab.train.export import Arrays, Vocabulary, layer_arrays, write_gguf
from lab.train.model import LanguageModel, RMSNorm, TargetLayer, matrix, rope_table
from lab.train.shapes import TargetShape
from lab.train.train import Loss, TextFeed

SECOND = 0.5  # weight of the loss for rows that the layer made itself
OWN_FROM = 0.7  # share of the run from which on the layer's own rows take part
_BATCH_TOKENS = 2048


class MtpLayer(nn.Module):
    """The MTP layer. It computes the same as llama.cpp for the last layer of a deepseek2 file."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.shape = shape
        self.enorm, self.hnorm = RMSNorm(shape.embd), RMSNorm(shape.embd)
        self.eh_proj = matrix(shape.embd, 2 * shape.embd)
        self.layer = TargetLayer(shape, shape.n_dense)
        self.norm = RMSNorm(shape.embd)

    def begin_like(self, target: LanguageModel) -> None:
        """Begin as a copy of the target's last layer, to which the next token is added."""
        self.layer.load_state_dict(target.layers[-1].state_dict())
        self.norm.load_state_dict(target.norm.state_dict())
        with torch.no_grad():
            eye = torch.eye(self.shape.embd)
            self.eh_proj.copy_(torch.cat((eye, eye), 1) * 0.5 + self.eh_proj * 0.1)

    def forward(self, embedded: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Normalised float32 rows [batch, time, embd]. `embedded` are embeddings of tokens,
        and `rows` the hidden rows at the positions before them."""
        cos, sin = rope_table(rows.shape[1], self.shape.rope, rows.device)
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            both = torch.cat((self.enorm(embedded), self.hnorm(rows)), -1)
            x = self.layer(F.linear(both, self.eh_proj).float(), cos, sin, dtype)
        normed: Tensor = self.norm(x)
        return normed

    def balance(self, step: float) -> None:
        assert self.layer.experts is not None
        self.layer.experts.balance(step)


def before(rows: Tensor) -> Tensor:
    """`rows` moved by one position in time. The first is zeros, as in llama.cpp."""
    return F.pad(rows, (0, 0, 1, 0))[:, :-1]


class Pool:
    """Texts [n, length], and the target's rows for them as float16 [n, length, embd]."""

    def __init__(self, target: LanguageModel, texts: np.ndarray, dtype: torch.dtype) -> None:
        self.texts = torch.from_numpy(texts.astype(np.int64))
        with torch.no_grad():
            self.rows = torch.cat(
                [target.hidden(part, dtype).half() for part in self.texts.split(8)]
            )


@dataclass
class PoolFeed(TextFeed):
    """Batches from each pool in turn: rows [n, 2] of a text's number and its pool's number."""

    with_own: Loss
    pools: tuple[Pool, ...]
    rng: np.random.Generator

    def next(self, share: float, step: int) -> tuple[np.ndarray, Loss]:
        number = step % len(self.pools)
        texts = self.pools[number].texts
        chosen = self.rng.integers(len(texts), size=_BATCH_TOKENS // texts.shape[1])
        loss = self.loss if share < OWN_FROM else self.with_own
        return np.stack((chosen, np.full_like(chosen, number)), 1), loss


def mtp_loss(
    target: LanguageModel, pools: Sequence[Pool], dtype: torch.dtype, *, with_own: bool
) -> Loss:
    """Cross entropy with the target's distribution after each token, in nats.

    `with_own` adds the cross entropy with the layer's own rows as input.
    """
    head = target.output.detach().to(dtype)

    def entropy(rows: Tensor, wanted: Tensor) -> Tensor:
        rows, wanted = rows.flatten(0, 1).to(dtype), wanted.flatten(0, 1).to(dtype)
        goal = torch.softmax((wanted @ head.T).float(), -1)
        return F.cross_entropy((rows @ head.T).float(), goal)

    def loss(model: Any, numbers: Tensor, pool_numbers: Tensor) -> Tensor:
        pool = pools[int(pool_numbers[0, 0])]
        chosen = numbers[:, 0]
        wanted = pool.rows[chosen].float()
        embedded = F.embedding(pool.texts[chosen], target.embedding.detach())
        first = model(embedded, before(wanted), dtype)
        total = entropy(first, wanted)
        if with_own:
            total = total + SECOND * entropy(model(embedded, before(first), dtype), wanted)
        return total

    return loss


# -- from and to the target's file -----------------------------------------------------------------


def read_target(path: Path) -> tuple[LanguageModel, Arrays]:
    """Returns the model in torch, and its arrays without a layer for multi-token prediction."""
    shape = TargetShape()
    found = {
        t.name: gguf.quants.dequantize(t.data, t.tensor_type).reshape(tuple(t.shape[::-1]))
        for t in gguf.GGUFReader(str(path)).tensors
    }
    arrays = {n: a for n, a in found.items() if not n.startswith(f"blk.{shape.n_layer}.")}
    model = LanguageModel(shape)
    state = {
        "embedding": arrays["token_embd.weight"],
        "head": arrays["output.weight"],
        "norm.weight": arrays["output_norm.weight"],
    }
    for i in range(shape.n_layer):
        state |= _layer_state(
            arrays, shape, f"blk.{i}.", f"layers.{i}.", is_dense=i < shape.n_dense
        )
    model.load_state_dict({k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in state.items()})
    return model, arrays


def _layer_state(arrays: Arrays, shape: TargetShape, at: str, to: str, *, is_dense: bool) -> Arrays:
    def of(name: str) -> np.ndarray:
        return arrays[at + name]

    suffix = "" if is_dense else "_shexp"
    state = {
        "attn.q_a": of("attn_q_a.weight"),
        "attn.q_a_norm.weight": of("attn_q_a_norm.weight"),
        "attn.q_b": of("attn_q_b.weight"),
        "attn.kv_a": of("attn_kv_a_mqa.weight"),
        "attn.kv_a_norm.weight": of("attn_kv_a_norm.weight"),
        "attn.k_b": of("attn_k_b.weight").transpose(0, 2, 1).reshape(-1, shape.kv_lora),
        "attn.v_b": of("attn_v_b.weight").reshape(-1, shape.kv_lora),
        "attn.out": of("attn_output.weight"),
        "attn_norm.weight": of("attn_norm.weight"),
        "ffn_norm.weight": of("ffn_norm.weight"),
        "dense.gate_up": np.concatenate(
            (of(f"ffn_gate{suffix}.weight"), of(f"ffn_up{suffix}.weight"))
        ),
        "dense.down": of(f"ffn_down{suffix}.weight"),
    }
    if not is_dense:
        gate_up = np.concatenate((of("ffn_gate_exps.weight"), of("ffn_up_exps.weight")), axis=1)
        state |= {
            "experts.router": of("ffn_gate_inp.weight"),
            "experts.bias": of("exp_probs_b.bias"),
            "experts.gate_up": gate_up,
            "experts.down": of("ffn_down_exps.weight"),
        }
    return {to + name: array for name, array in state.items()}


def write_with_layer(path: Path, arrays: Arrays, checkpoint_path: Path) -> None:
    """Write the target with its trained layer for multi-token prediction to `path`."""
    saved = torch.load(checkpoint_path, map_location="cpu", weights_only=True)["model"]
    state = {name: value.float().numpy() for name, value in saved.items()}
    shape = TargetShape()
    to = f"blk.{shape.n_layer}."
    arrays = arrays | layer_arrays(state, shape, "layer.", to, is_dense=False)
    arrays |= {
        to + "nextn.eh_proj.weight": state["eh_proj"],
        to + "nextn.enorm.weight": state["enorm.weight"],
        to + "nextn.hnorm.weight": state["hnorm.weight"],
        to + "nextn.shared_head_norm.weight": state["norm.weight"],
    }
    kind = gguf.GGMLQuantizationType.Q8_0
    write_gguf(path, shape, arrays, Vocabulary.from_gguf(path), kind, n_mtp_layers=1)
