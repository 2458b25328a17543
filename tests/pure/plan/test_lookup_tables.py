"""Tables that are looked up leave memory before any expert does."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from offload.model import Header, ModelFacts, TensorEntry, WeightPlace
from offload.plan.decision import decide
from offload.plan.found import Found, FoundDevice, Kind
from offload.plan.layout import Layout
from offload.plan.tables import lookup_tables
from offload.plan.wanted import Wanted
from offload.times.context_memory import ContextOptions

GIB = 1 << 30
N_LAYERS = 8
EXPERTS, TABLE = 4 * GIB, 24 * GIB  # bytes of each layer's experts, and of the table
FREE_FOR_OTHERS = 1 * GIB  # more than a GPU's driver, pinned ring and logits


def facts() -> ModelFacts:
    n_rows = TABLE // 272
    entries = [
        TensorEntry("token_embd.weight", "q8_0", (1024, 4096), 0, 4096 * 1088),
        TensorEntry("output.weight", "q8_0", (1024, 4096), 0, 4096 * 1088),
        TensorEntry("per_layer_token_embd.weight", "q8_0", (256, n_rows), 0, n_rows * 272),
    ]
    for i in range(N_LAYERS):
        entries.append(TensorEntry(f"blk.{i}.attn_k.weight", "q8_0", (1024, 128), 0, 128 * 1088))
        for kind in ("gate", "up"):
            name = f"blk.{i}.ffn_{kind}_exps.weight"
            entries.append(TensorEntry(name, "q8_0", (1024, 2048, 512), 0, EXPERTS // 2))
    path = Path("model.gguf")
    keys = {
        "block_count": N_LAYERS, "embedding_length": 1024, "expert_count": 512,
        "expert_used_count": 8, "attention.head_count": 8, "context_length": 4096,
        "ple.heads_per_ngram": 8, "ple.ngram_size": 3, "ple.eos_token_id": 2,
        "ple.layer_multipliers": (1, 3, 5), "ple.head_vocab_sizes": (n_rows // 16,) * 16,
        "ple.head_offsets": tuple(range(0, n_rows, n_rows // 16))[:16],
    }  # fmt: skip
    header = Header({f"test.{key}": value for key, value in keys.items()}, tuple(entries))
    places = {entry.name: WeightPlace(path, entry) for entry in entries}
    return ModelFacts(path, "test", "test", header, places)


def decided(kind: Kind, ram_bytes: int, asked_bytes: int | None = None) -> Layout:
    found = Found((FoundDevice("device", kind, 8 * GIB),), ram_bytes=ram_bytes)
    context = ContextOptions(n_ctx=4096)
    wanted = Wanted(context, device_bytes=6 * GIB, ram_bytes=asked_bytes)
    return decide(facts(), found, wanted)


@pytest.mark.parametrize("kind", [Kind.GPU, Kind.CPU])
def test_a_table_is_in_memory_if_everything_fits(kind: Kind) -> None:
    layout = decided(kind, N_LAYERS * EXPERTS + TABLE + 2 * FREE_FOR_OTHERS)
    assert layout.tables is not None
    assert not layout.on_disk
    assert not layout.reads_disk
    assert "24.0 GiB of embeddings that are looked up stay in RAM" in layout.tables.words


@pytest.mark.parametrize("kind", [Kind.GPU, Kind.CPU])
def test_a_table_leaves_before_any_expert(kind: Kind) -> None:
    free = N_LAYERS * EXPERTS + TABLE - (8 * GIB if kind is Kind.GPU else 0)
    layout = decided(kind, free)
    assert layout.tables is not None
    assert layout.on_disk == {"per_layer_token_embd.weight"}
    assert not layout.reads_disk
    assert f"and {free / GIB:.1f} GiB are free" in layout.tables.words


def test_experts_leave_too_if_the_table_is_not_enough() -> None:
    layout = decided(Kind.GPU, N_LAYERS * EXPERTS // 2)
    assert layout.on_disk
    assert layout.reads_disk


def test_the_table_counts_as_weights_of_ram() -> None:
    free = 1 << 40
    streamed = N_LAYERS * EXPERTS
    assert not decided(Kind.CPU, free, streamed + TABLE).on_disk
    layout = decided(Kind.CPU, free, streamed + TABLE - 272 * 4096)
    assert layout.on_disk
    assert not layout.reads_disk
    assert layout.tables is not None
    assert "--ram is 56.0 GiB" in layout.tables.words
    layout = decided(Kind.CPU, free, streamed - 1)
    assert layout.on_disk
    assert layout.reads_disk


def test_a_token_reads_whole_pages() -> None:
    (table,) = lookup_tables(facts())
    assert table.rows_per_token == 16
    assert table.row_bytes == 272
    # A row of 272 bytes that begins anywhere lies in one page, or in two of them.
    assert table.bytes_per_token == 16 * (mmap.PAGESIZE + 271)
