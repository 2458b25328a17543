"""Cache types and sliding windows: which context options a model's header allows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from offload.errors import BadRequest
from offload.model import Header, HeaderValue, ModelFacts, TensorEntry, WeightPlace
from offload.times.context_memory import (
    ContextOptions,
    attention_work,
    check_cache_types,
    context_memory,
    forgetting_window,
    host_input_bytes,
)


def facts(
    architecture: str = "llama", **metadata: HeaderValue | tuple[HeaderValue, ...]
) -> ModelFacts:
    """A header of four layers with 4 attention heads, 2 of them for keys and values."""
    values: dict[str, HeaderValue | tuple[HeaderValue, ...]] = {
        "block_count": 4,
        "embedding_length": 256,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "feed_forward_length": 512,
    }
    values.update({key.replace("__", "."): value for key, value in metadata.items()})
    entries = tuple(
        TensorEntry(f"blk.{i}.attn_k.weight", "f16", (256, 128), 0, 65536) for i in range(4)
    )
    header = Header({f"{architecture}.{k}": v for k, v in values.items()}, entries)
    weights = {e.name: WeightPlace(Path("m.gguf"), e) for e in entries}
    return ModelFacts(Path("m.gguf"), architecture, "m", header, weights)


MLA = {
    "attention__key_length": 576,
    "attention__value_length": 512,
    "attention__key_length_mla": 192,
    "attention__value_length_mla": 128,
}


def test_a_cache_grows_with_the_context_and_shrinks_with_its_types() -> None:
    f16 = context_memory(facts(), ContextOptions(4096)).kv_bytes
    assert f16 == 4 * 4096 * 2 * (64 + 64) * 2
    assert context_memory(facts(), ContextOptions(8192)).kv_bytes == 2 * f16
    q8_0 = context_memory(facts(), ContextOptions(4096, type_k="q8_0", type_v="q8_0")).kv_bytes
    assert q8_0 == f16 * 34 // 64
    only_k = context_memory(facts(), ContextOptions(4096, type_k="q8_0")).kv_bytes
    assert only_k == (f16 + q8_0) // 2


def test_layers_that_are_not_loaded_have_no_cache() -> None:
    with_mtp = context_memory(facts(nextn_predict_layers=1), ContextOptions(4096)).kv_bytes
    assert with_mtp == 3 * context_memory(facts(), ContextOptions(4096)).kv_bytes // 4


def test_windows_hold_the_window_and_one_ubatch_unless_all_is_kept() -> None:
    gemma = facts("gemma2", attention__sliding_window=256)
    per_cell = 2 * (64 + 64) * 2
    memory = context_memory(gemma, ContextOptions(8192, 512))
    assert memory.kv_bytes == 2 * (8192 + 768) * per_cell
    full = context_memory(gemma, ContextOptions(8192, 512, swa_full=True))
    assert full.kv_bytes == 4 * 8192 * per_cell
    assert forgetting_window(gemma) == 256
    assert forgetting_window(facts()) == 0


def test_a_pattern_of_the_header_says_which_layers_have_windows() -> None:
    pattern = (True, True, True, False)
    metadata = {"attention__sliding_window": 256, "attention__sliding_window_pattern": pattern}
    some = facts("gemma4", **metadata)  # type: ignore[arg-type]
    assert context_memory(some, ContextOptions(8192, 512)).kv_bytes == (
        (3 * 768 + 8192) * 2 * (64 + 64) * 2
    )


def test_without_flash_attention_the_scores_of_all_heads_are_reserved() -> None:
    spec = ContextOptions(8192, 512)
    scores = 512 * 8192 * 4 * 4
    without = context_memory(facts(), ContextOptions(8192, 512, flash_attn="off")).compute_bytes
    assert without - context_memory(facts(), spec).compute_bytes >= scores


@pytest.mark.parametrize(
    ("kinds", "flash_attn", "becomes"),
    [
        (("f16", "f16"), "off", "off"),
        (("q8_0", "f16"), "auto", "auto"),
        (("q8_0", "q8_0"), "auto", "on"),
        (("f16", "q4_0"), "on", "on"),
        (("q8_0", "f16"), "off", "off"),
    ],
)
def test_a_quantised_v_turns_flash_attention_on(
    kinds: tuple[str, str], flash_attn: str, becomes: str
) -> None:
    assert check_cache_types(facts(), *kinds, flash_attn) == becomes


@pytest.mark.parametrize(
    ("metadata", "kinds", "flash_attn", "says"),
    [
        ({}, ("q9_0", "f16"), "auto", r"-ctk q9_0: must be one of f32, f16"),
        ({}, ("f16", "q4_K"), "auto", r"-ctv q4_K: must be one of"),
        ({}, ("f16", "q8_0"), "off", r"-ctv q8_0: .* needs flash attention"),
        (MLA, ("q8_0", "f16"), "auto", r"both must be the same"),
        ({"attention__key_length": 80}, ("q8_0", "f16"), "auto", r"-ctk q8_0: .* head size of 80"),
        ({"attention__value_length": 48}, ("f16", "q4_0"), "on", r"-ctv q4_0: .* head size of 48"),
    ],
)
def test_types_that_the_library_refuses_are_refused_in_one_sentence(
    metadata: dict[str, int], kinds: tuple[str, str], flash_attn: str, says: str
) -> None:
    with pytest.raises(BadRequest, match=says) as caught:
        check_cache_types(facts(**metadata), *kinds, flash_attn)
    assert "\n" not in str(caught.value)


def test_an_indexer_of_blocks_reads_whole_blocks_and_dense_layers_read_all() -> None:
    """Two of MiniMax-M3's blocks of 128 tokens are chosen in each of its three sparse layers."""
    chosen = {"attention__indexer__top_k": 2, "attention__indexer__block_size": 128}
    sparse = facts(
        "minimax-m3", attention__indexer__key_length=64, leading_dense_block_count=1, **chosen
    )

    def cells(n_ctx: int) -> float:
        """Cells that all four layers read, from the multiplications of 4 heads of 2 x 64."""
        return attention_work(sparse, ContextOptions(n_ctx))[1] / (4 * 2 * 64)

    assert cells(256) == 4 * 256, "a short context is read as a whole"
    assert cells(4096) == 4096 + 3 * 256
    assert cells(8192) - cells(4096) == 4096, "only the dense layer reads more"


def test_a_graph_that_masks_attends_to_all_tokens_and_pools_its_keys_anew() -> None:
    """Others measured 0.25 ms for 1,000 tokens of Flash-Next's context on an RTX 3090."""
    choosing = {
        "attention__indexer__top_k": 16,
        "attention__indexer__key_length": 128,
        "full_attention_interval": 1,
    }
    masking, gathering = (facts(name, **choosing) for name in ("qwen4exp", "glm-dsa"))
    options = ContextOptions(65536)
    read_bytes = attention_work(masking, options)[0]
    key_bytes, pooled_bytes = 2 * 128, 7 * 4 * 128
    of_keys = 4 * 65536 * (key_bytes + pooled_bytes)
    assert read_bytes == attention_work(facts(), options)[0] + of_keys
    few = attention_work(gathering, options)
    assert few == attention_work(gathering, ContextOptions(4096)), "16 tokens, however many"
    assert attention_work(masking, options)[1] == 4096 * few[1]


@pytest.mark.parametrize("architecture", ["minimax-m3", "glm5-next"])
def test_buffers_of_these_indexers_grow_with_the_context_for_each_token(architecture: str) -> None:
    """Without the scores a prompt of 4,096 tokens at 131,072 of context took 19 GB too few."""
    some = facts(architecture, attention__indexer__top_k=16)
    short, long = (
        context_memory(some, ContextOptions(n_ctx, 512)).compute_bytes for n_ctx in (65536, 131072)
    )
    rows = {"minimax-m3": 9, "glm5-next": 1}[architecture]
    assert long - short == 512 * 65536 * (4 * rows + 2)


def test_each_of_many_sequences_has_its_pools_scored() -> None:
    """Measured: 10 bytes for each pool of four keys, sequence and token, at 4 and 8 sequences."""
    pooled = facts("glm5-next", attention__indexer__top_k=16, attention__indexer__kpool=4)
    four, eight = (
        context_memory(pooled, ContextOptions(65536, 512, n_sequences=n)).compute_bytes
        for n in (4, 8)
    )
    assert eight - four == 512 * 4 * 10 * 65536 // 4


def test_a_ubatchs_inputs_are_its_mask_four_rows_and_sixteen_numbers_a_token() -> None:
    assert host_input_bytes(facts(), ContextOptions(4096, 512)) == 512 * 4 * (4096 + 4 * 256 + 16)
    short = host_input_bytes(facts(), ContextOptions(256, 512))
    assert short == 256 * 4 * (256 + 4 * 256 + 16), "no ubatch is longer than the context"


def test_sequences_with_cells_of_their_own_have_an_equal_part_each() -> None:
    """Each part is rounded up to 256 cells, and a token attends to one of them."""
    shared = ContextOptions(n_ctx=3000, n_sequences=4, flash_attn="off")
    own = replace(shared, kv_unified=False)
    assert (own.n_streams, own.n_ctx_each, own.of_one.n_ctx) == (4, 750, 750)
    assert (shared.n_streams, shared.n_ctx_each, shared.of_one) == (1, 3000, shared)
    assert own.of_one.of_one == own.of_one
    cell_bytes = 4 * 2 * 2 * 64 * 2  # layers, keys and values, heads, values of a head, f16
    assert context_memory(facts(), shared).kv_bytes == 3072 * cell_bytes
    assert context_memory(facts(), own).kv_bytes == 4 * 768 * cell_bytes
    few, many = (context_memory(facts(), o).compute_bytes for o in (own, shared))
    assert few < many
    assert attention_work(facts(), own.of_one)[0] == pytest.approx(
        attention_work(facts(), shared)[0] / 4, rel=0.01
    )


def test_windows_of_separate_sequences_are_each_rounded_up() -> None:
    windowed = facts("gpt-oss", attention__sliding_window=100)
    shared = ContextOptions(n_ctx=8192, n_sequences=4, n_ubatch=64)
    own = replace(shared, kv_unified=False)
    cell_bytes = 2 * 2 * 64 * 2  # bytes of a cell in one layer. Two of four layers have windows
    assert context_memory(windowed, shared).kv_bytes == 2 * (8192 + 512) * cell_bytes
    assert context_memory(windowed, own).kv_bytes == 2 * (8192 + 4 * 256) * cell_bytes
