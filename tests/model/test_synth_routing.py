"""Random models whose routers follow the text choose experts as published models do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cache_play import Lru, simulated_hits
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray

from lab.options import Streaming, engine_options
from lab.synth import plan_preset, write_preset
from lab.synth.routing import N_TOPICS, drawn_text
from lab.synth.shape import ImpossibleShape
from offload.engine import open_engine
from offload.errors import BadRequest
from offload.times.min_batch import MinBatch

N_TOKENS, N_EXPERTS = 300, 64
SMALL = {"n_layer": 4, "n_expert": N_EXPERTS, "n_expert_used": 4, "n_ff_exp": 32, "n_vocab": 4096}


def chosen(path: Path) -> list[NDArray[np.int16]]:
    """The experts that each token of a drawn text uses [n_tokens, n_used], layer by layer."""
    streaming = Streaming(record_routing=True)
    options = engine_options(device="sim", min_batch=MinBatch(1, 1), n_ctx=512, streaming=streaming)
    with open_engine(path, options) as engine:
        engine.opened.routing.is_on = True
        for token in drawn_text(engine.n_vocab, N_TOKENS):
            engine.sequences.extend(0, [token], n_logits=1)
        return [experts[-N_TOKENS:] for experts in engine.opened.routing.recorded().values()]


def recency(tokens: NDArray[np.int32], n_slots: int) -> float:
    """The share of uses after the first quarter that hit an LRU cache of `n_slots` experts."""
    cuts = [(i >= len(tokens) // 4, [(0, int(e)) for e in ids]) for i, ids in enumerate(tokens)]
    return simulated_hits(Lru(), n_slots, cuts, holds_used=False)


def popularity(tokens: NDArray[np.int32], n_most: int) -> float:
    """The share of uses in the second half by the `n_most` experts most used in the first."""
    half = len(tokens) // 2
    counts = np.bincount(tokens[:half].ravel(), minlength=N_EXPERTS)
    return float(np.isin(tokens[half:], np.argsort(-counts)[:n_most]).mean())


@pytest.mark.parametrize("preset", ["qwen3moe", "gpt-oss"])
def test_experts_are_used_again_as_published(preset: str, tmp_path: Path) -> None:
    """The most recently used quarter of the experts has 81 % of the uses (llama.cpp #27861).

    A fixed tenth of the experts can have most of the uses (llama.cpp #24524).
    """
    hits, lasting = {}, {}
    for routing in ("even", "drifting", "skewed"):
        path = write_preset(preset, tmp_path / f"{routing}.gguf", routing=routing, seed=3, **SMALL)
        layers = chosen(path)
        hits[routing] = np.mean([recency(layer, N_EXPERTS // 4) for layer in layers])
        lasting[routing] = np.mean([popularity(layer, N_EXPERTS // 10) for layer in layers])
        path.unlink()
    assert hits["even"] < hits["drifting"] - 0.15
    assert 0.7 < hits["drifting"] < 0.9
    assert hits["drifting"] < hits["skewed"]
    assert lasting["drifting"] < 0.35
    assert lasting["skewed"] > 0.5


def test_tokens_of_a_topic_share_the_first_values_of_their_embedding(tmp_path: Path) -> None:
    """This holds for matrices that are drawn whole and for larger ones."""
    for n_vocab in (1024, 9000):
        path = write_preset(
            "qwen3moe", tmp_path / "m.gguf", n_vocab=n_vocab, quant="q8_0", routing="drifting"
        )
        tensors = {t.name: t for t in GGUFReader(path).tensors}
        embedding = tensors["token_embd.weight"]
        values = dequantize(embedding.data, embedding.tensor_type)
        assert values.shape == (n_vocab, 128)
        rows = values[5:n_vocab:N_TOPICS, :16]
        assert np.abs(rows - rows[0]).max() < 0.1, "but for rounding"
        assert np.abs(values[6, :16] - rows[0]).max() > 1
        assert np.abs(values[:, 16] - 4).max() < 0.1
        assert len(np.unique(values[:, 17:].round(3), axis=0)) == n_vocab, "all rows differ"
        assert values[:, 17:].std() == pytest.approx(1, rel=0.05)


def test_what_has_no_such_routing_is_refused() -> None:
    with pytest.raises(BadRequest, match="unknown routing 'odd'; one of even, drifting, skewed"):
        plan_preset("qwen3moe", routing="odd")
    with pytest.raises(ImpossibleShape, match="mistral-large is a dense model"):
        plan_preset("mistral-large", routing="skewed")


@pytest.mark.parametrize("n_vocab", [1, 64, 4096])
def test_a_drawn_text_stays_with_a_topic(n_vocab: int) -> None:
    text = drawn_text(n_vocab, 3000, seed=1)
    assert text == drawn_text(n_vocab, 3000, seed=1)
    assert 0 <= min(text) <= max(text) < n_vocab
    topics = np.array(text) % min(N_TOPICS, n_vocab)
    n_changes = int((topics[1:] != topics[:-1]).sum())
    assert n_changes == 0 if n_vocab == 1 else 20 < n_changes < 100
