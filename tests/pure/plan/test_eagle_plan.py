"""Which EAGLE-3 files can draft for a target, and the memory that they take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offload.model import Header, ModelFacts, TensorEntry, WeightPlace
from offload.plan.row_draft import eagle_bytes, no_eagle_reason, target_layers
from offload.times.context_memory import ContextOptions

WIDTH, N_TOKENS = 128, 1000
NEEDED = ("fc", "output_norm", "output", "blk.0.attn_norm", "blk.0.attn_norm_2", "blk.0.attn_q",
          "blk.0.attn_k", "blk.0.attn_v", "blk.0.attn_output", "blk.0.ffn_norm", "blk.0.ffn_gate",
          "blk.0.ffn_down", "blk.0.ffn_up")  # fmt: skip


def facts(architecture: str, weights: dict[str, TensorEntry], **metadata: Any) -> ModelFacts:
    keys = {f"{architecture}.{key}": value for key, value in metadata.items()}
    header = Header(keys, tuple(weights.values()), {"tokenizer.ggml.tokens": N_TOKENS})
    places = {name: WeightPlace(Path("f"), entry) for name, entry in weights.items()}
    return ModelFacts(Path("eagle.gguf"), architecture, "f", header, places)


def entry(name: str, shape: tuple[int, ...] = (WIDTH, WIDTH), kind: str = "f32") -> TensorEntry:
    return TensorEntry(name, kind, shape, 0, 4 * shape[0] * shape[-1])


def eagle(
    without: str = "", more: tuple[TensorEntry, ...] = (), n_tokens: int = N_TOKENS, **metadata: Any
) -> ModelFacts:
    names = [f"{name}.weight" for name in NEEDED]
    weights = {name: entry(name) for name in names if name != without} | {e.name: e for e in more}
    header = {"block_count": 1, "embedding_length": WIDTH, "target_layers": (1, 2, 4)}
    found = facts("eagle3", weights, **header | {"target_hidden_size": WIDTH} | metadata)
    lengths = {"tokenizer.ggml.tokens": n_tokens}
    return replace(found, header=replace(found.header, lengths=lengths))


def target(architecture: str = "qwen3moe") -> ModelFacts:
    return facts(architecture, {}, block_count=6, embedding_length=WIDTH)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (target(), "is no EAGLE-3 file, but a model of qwen3moe"),
        (eagle(target_hidden_size=64), "reads rows of 64 values, and the target's have 128"),
        (eagle(target_layers=(1, 2)), "reads layers 1, 2, and must read 3 from 0 to 5"),
        (eagle(target_layers=(1, 2, 6)), "reads layers 1, 2, 6, and must read 3 from 0 to 5"),
        (eagle(n_tokens=999), "it has 999 tokens, and the target 1000"),
        (eagle(block_count=2), "has 2 layers, and an EAGLE-3 file has one"),
        (eagle(**{"attention.key_length": 64}), "keys of 64 values and values of 128"),
        (eagle("blk.0.attn_norm_2.weight"), "lacks blk.0.attn_norm_2.weight"),
        (eagle(embedding_length=64), "lacks token_embd.weight, and the target's has rows"),
        (eagle(more=(entry("token_embd.weight", (WIDTH, 9)),)), "1000 tokens, and embeddings of 9"),
        (eagle(more=(entry("d2t", (9,)),)), "a map of tokens (d2t) of type f32"),
        (eagle("output.weight", (entry("d2t", (9,), "i64"),)), "lacks output.weight"),
    ],
)
def test_a_file_that_cannot_draft_is_told(file: ModelFacts, words: str) -> None:
    reason = no_eagle_reason(target(), file)
    assert reason.startswith("eagle.gguf ")
    assert words in reason


def test_targets_differ_in_the_layers_that_they_give() -> None:
    assert no_eagle_reason(target(), eagle()) == ""
    assert no_eagle_reason(target(), eagle("output.weight")) == ""
    assert "the library gives none of deepseek2" in no_eagle_reason(target("deepseek2"), eagle())
    behind = eagle(target_layers=(0, 2, 6))
    assert no_eagle_reason(target("gpt-oss"), behind) == ""
    assert target_layers(target("gpt-oss"), behind) == (0, 2, -1)


def test_memory_grows_with_the_context_and_with_a_map() -> None:
    """A context has its cache, and buffers for the logits of 64 tokens at most."""
    heads = {"attention.head_count": 4, "attention.head_count_kv": 2}
    short, long = (eagle_bytes(eagle(**heads), ContextOptions(n_ctx=n)) for n in (4096, 8192))
    cache = 4096 * 2 * 2 * (WIDTH // 4) * 2  # keys and values of two heads in f16
    masks = 64 * 4096 * 2
    assert long - short == cache + masks
    mapped = eagle(more=(entry("d2t", (WIDTH,), "i64"),), **heads)
    more = eagle_bytes(mapped, ContextOptions(n_ctx=4096)) - short
    assert more == 64 * WIDTH * 4 + mapped.weights["d2t"].entry.size_bytes
