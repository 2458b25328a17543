"""Which block drafts suit a target, what their headers say, and the memory that they take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_eagle_plan import WIDTH, entry, facts, target

from offload.model import ModelFacts, TensorEntry
from offload.plan.block_draft import block_bytes, block_shape, block_ubatch, no_block_reason
from offload.plan.row_draft import target_layers
from offload.times.context_memory import ContextOptions

HEADER: dict[str, Any] = {
    "block_count": 2, "block_size": 8, "target_layers": (1, 3), "embedding_length": WIDTH,
    "attention.head_count": 1, "attention.head_count_kv": 1, "attention.key_length": 128,
    "attention.value_length": 128,
}  # fmt: skip
MASK = "tokenizer.ggml.mask_token_id"
MARKOV = entry("markov_w1.weight", (16, 1000))
SELECTOR = entry("selector_hidden.weight", (WIDTH, 16))
FOR_DEEPSEEK4 = {
    "hyper_connection.count": 4, "attention.sliding_window": 128,
    "attention.output_group_count": 4,
}  # fmt: skip


def block(*more: TensorEntry, mask: int = 7, n_tokens: int = 1000, **metadata: Any) -> ModelFacts:
    keys = [entry(f"blk.{layer}.attn_k.weight") for layer in range(2)]
    weights = {e.name: e for e in (entry("fc.weight", (2 * WIDTH, WIDTH)), *keys, *more)}
    found = facts("dflash", weights, **HEADER | metadata)
    lengths = {"tokenizer.ggml.tokens": n_tokens}
    header = {**found.header.metadata, MASK: mask}
    return replace(found, header=replace(found.header, metadata=header, lengths=lengths))


def without_size(file: ModelFacts) -> ModelFacts:
    kept = {k: v for k, v in file.header.metadata.items() if k != "dflash.block_size"}
    return replace(file, header=replace(file.header, metadata=kept))


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (target(), "is no block draft, but a model of qwen3moe"),
        (block(embedding_length=64), "reads rows of 64 values, and the target's have 128"),
        (block(target_layers=()), "reads layers none, and must read layers from 0 to 5"),
        (block(target_layers=(1, 6)), "reads layers 1, 6, and must read layers from 0 to 5"),
        (block(n_tokens=999), "it has 999 tokens, and the target 1000"),
        (block(mask=-1), "names no mask token"),
        (block(mask=1000), "names no mask token"),
        (block(block_size=1), "has blocks of 1 tokens, which draft none"),
        (block(block_count=0), "has no layers"),
        (block(MARKOV, SELECTOR), "has the heads of DFlash2 and of DSpark"),
        (block(**{"attention.key_length": 64}), "keys of 64 values and values of 128"),
        (block(entry("d2t", (9,))), "a map of tokens (d2t) of type f32"),
        (block(entry("d2t", (9,), "i64")), "lacks output.weight"),
        (block(**{"hyper_connection.count": 4}), "lacks dflash.attention.sliding_window"),
        (
            block(**{"hyper_connection.count": 4, "attention.sliding_window": 128}),
            "lacks dflash.attention.output_group_count",
        ),
        (
            block(entry("d2t", (9,), "i64"), **FOR_DEEPSEEK4),
            "has a map of tokens (d2t), which the library ignores",
        ),
    ],
)
def test_files_that_cannot_draft_for_the_target(file: ModelFacts, words: str) -> None:
    reason = no_block_reason(target(), file)
    assert reason.startswith(f"{file.path.name} ")
    assert words in reason


def test_files_that_can() -> None:
    more = block(target_layers=(0, 1, 2, 3, 4)), block(**FOR_DEEPSEEK4)
    for file in (block(), block(MARKOV), block(SELECTOR), *more):
        assert no_block_reason(target(), file) == ""
    assert "the library gives none of qwen4exp" in no_block_reason(target("qwen4exp"), block())
    # The rows behind the last layer, which some graphs give as hidden rows and one by a name.
    behind = block(target_layers=(1, 6))
    for architecture, layers in (("gpt-oss", (1, -1)), ("deepseek4", (1, 6))):
        assert no_block_reason(target(architecture), behind) == ""
        assert target_layers(target(architecture), behind) == layers


def test_a_dspark_file_must_say_the_size_of_its_blocks() -> None:
    reason = no_block_reason(target(), without_size(block(MARKOV)))
    assert "does not say how many tokens a block has" in reason
    assert block_shape(without_size(block())).n_most == 15  # llama.cpp's default of 16 tokens


@pytest.mark.parametrize(
    ("file", "kind", "n_most", "first_place"),
    [
        (block(), "dflash", 7, 1),
        (block(SELECTOR, selector_top_k=4), "dflash", 7, 1),
        (block(MARKOV), "dspark", 8, 0),
        (block(MARKOV, sample_from_anchor=True), "dspark", 8, 0),
        (block(MARKOV, sample_from_anchor=False), "dspark", 7, 1),
        (block(block_size=100), "dflash", 63, 1),
    ],
)
def test_what_a_header_says_of_blocks(
    file: ModelFacts, kind: str, n_most: int, first_place: int
) -> None:
    shape = block_shape(file)
    assert (shape.kind, shape.n_most, shape.first_place) == (kind, n_most, first_place)
    assert shape.mask_token == 7
    assert shape.n_candidates == file.number("selector_top_k")
    assert not shape.is_causal
    assert block_shape(block(**{"attention.causal": True})).is_causal
    assert not shape.has_confidence
    assert block_shape(block(MARKOV, entry("conf_proj.weight", (144,)))).has_confidence


def test_a_batch_holds_the_blocks_of_all_sequences_up_to_a_limit() -> None:
    shape = block_shape(block(block_size=16))
    sizes = [block_ubatch(shape, ContextOptions(n_sequences=n)) for n in (1, 4, 8, 64)]
    assert sizes == [64, 64, 128, 256]
    assert block_ubatch(shape, ContextOptions(n_ubatch=4)) == 16  # a whole block at least


def test_the_bytes_grow_with_the_context_and_the_heads() -> None:
    short, long = (block_bytes(block(), ContextOptions(n_ctx=n)) for n in (4096, 8192))
    cache = 2 * 2 * 4096 * 128 * 2  # keys and values of two layers in f16
    masks = 64 * 4096 * 2
    assert long - short == cache + masks
    markov = block_bytes(block(MARKOV), ContextOptions(n_ctx=4096))
    assert markov - short == MARKOV.size_bytes + 2 * 64 * 1000 * 4, "two further rows of logits"
    more = entry("more.weight", (WIDTH, 1000))
    assert block_bytes(block(more), ContextOptions(n_ctx=4096)) - short == more.size_bytes
