"""The shipped pair loads, tokenises, predicts and agrees as its model card says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.train.corpus import is_held_out, load_split, read_prompts, stdlib_root
from lab.train.evaluate import LlamaModel, agreement, likelihood
from lab.train.shapes import EOS_ID, N_VOCAB, SPECIAL_TOKENS

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO = REPOSITORY / "specoffload" / "demo"


MAX_PAIR_BYTES = 30_000_000
# Another CPU rounds differently: a few greedy ties may fall the other way.
AGREEMENT_TOLERANCE = 0.05
BITS_TOLERANCE = 0.02
N_LINES = 300
N_LOGIT_TOKENS = 96


@pytest.fixture(scope="module")
def card() -> dict[str, Any]:
    contents: dict[str, Any] = json.loads((DEMO / "card.json").read_text())
    return contents


@pytest.fixture(scope="module")
def target() -> Iterator[LlamaModel]:
    model = LlamaModel(DEMO / "target.gguf", n_threads=1)
    yield model
    model.close()


@pytest.fixture(scope="module")
def draft() -> Iterator[LlamaModel]:
    model = LlamaModel(DEMO / "draft.gguf", n_threads=1)
    yield model
    model.close()


@pytest.fixture(scope="module")
def held_out_lines() -> list[str]:
    """Lines of this interpreter's own held-out files, whatever its version."""
    sources = load_split(stdlib_root()).held_out
    lines = [line for source in sources for line in source.text.splitlines() if line.strip()]
    if len(lines) < N_LINES:
        pytest.skip(f"only {len(lines)} held-out lines in {stdlib_root().name}")
    return lines[:: len(lines) // N_LINES]


def test_both_files_ship_and_stay_within_thirty_megabytes(card: dict[str, Any]) -> None:
    sizes = {name: (DEMO / f"{name}.gguf").stat().st_size for name in ("target", "draft")}
    assert sizes == card["file_bytes"]
    assert sum(sizes.values()) <= MAX_PAIR_BYTES


def test_both_models_load_with_one_vocabulary(target: LlamaModel, draft: LlamaModel) -> None:
    assert target.llama.n_vocab() == draft.llama.n_vocab() == N_VOCAB
    for model in (target, draft):
        assert model.llama.token_eos() == EOS_ID
        ids = [
            model.llama.tokenize(t.encode(), add_bos=False, special=True) for t in SPECIAL_TOKENS
        ]
        assert ids == [[i] for i in range(len(SPECIAL_TOKENS))]
    theirs = draft.llama.metadata["tokenizer.chat_template"]
    assert target.llama.metadata["tokenizer.chat_template"] == theirs
    assert "<|im_start|>" in theirs


def test_tokens_of_held_out_lines_give_the_lines_back(
    target: LlamaModel, draft: LlamaModel, held_out_lines: list[str]
) -> None:
    for line in held_out_lines:
        ids = target.tokenize(line)
        assert draft.tokenize(line) == ids
        assert target.detokenize(ids) == line


@pytest.mark.extra("tokenizers")
def test_llama_cpp_cuts_held_out_lines_as_tokenizers_does(
    target: LlamaModel, held_out_lines: list[str]
) -> None:
    import gguf
    import tokenizers

    fields = gguf.GGUFReader(str(DEMO / "target.gguf")).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"].contents()]
    bpe = tokenizers.models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    reference = tokenizers.Tokenizer(bpe)
    reference.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    different = [x for x in held_out_lines if reference.encode(x).ids != target.tokenize(x)]
    assert different == []


def test_bits_per_byte_are_those_on_the_card(
    target: LlamaModel, draft: LlamaModel, card: dict[str, Any]
) -> None:
    n_measured = 0
    for entry in card["check_files"][:2]:
        path = stdlib_root() / entry["path"]
        if not path.exists():
            continue
        text = path.read_text(encoding="utf-8")
        if hashlib.sha256(text.encode()).hexdigest() != entry["sha256"]:
            continue
        n_measured += 1
        assert is_held_out(entry["path"])
        for name, model in (("target", target), ("draft", draft)):
            bits = likelihood(model, text, entry["n_tokens"]).bits_per_byte
            assert abs(bits - entry[f"{name}_bits_per_byte"]) < BITS_TOLERANCE
    if n_measured == 0:
        pytest.skip(f"no file of this Python's library equals that of Python {card['python']}")


def test_the_draft_agrees_with_the_target_as_often_as_the_card_says(
    target: LlamaModel, draft: LlamaModel, card: dict[str, Any]
) -> None:
    prompts = read_prompts(DEMO / "prompts.json")[: card["agreement"]["check_prompts"]]
    share = np.mean([agreement(target, draft, prompt.text) for prompt in prompts])
    assert share >= card["agreement"]["check"] - AGREEMENT_TOLERANCE


@pytest.mark.extra("torch")
@pytest.mark.parametrize("name", ["target", "draft"])
def test_llama_cpp_computes_the_logits_torch_computes(
    name: str, models: Path, card: dict[str, Any]
) -> None:
    import torch
    from gguf import GGMLQuantizationType

    from lab.train.export import Vocabulary, arrays_of, write_gguf
    from lab.train.model import LanguageModel
    from lab.train.shapes import DraftShape, TargetShape

    torch.manual_seed(1)
    model = LanguageModel(TargetShape() if name == "target" else DraftShape()).eval()
    for parameter in model.parameters():  # some begin as zeros
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.05)
    path = models / f"{name}-random-f32.gguf"
    vocabulary = Vocabulary.from_gguf(DEMO / f"{name}.gguf")
    arrays = arrays_of(model.state_dict(), model.shape)
    write_gguf(path, model.shape, arrays, vocabulary, GGMLQuantizationType.F32)
    opened = LlamaModel(path, n_threads=1, exact_cache=True)
    ids = [EOS_ID, *opened.tokenize(read_prompts(DEMO / "prompts.json")[0].text)][:N_LOGIT_TOKENS]
    theirs = opened.logits(ids)
    opened.close()
    with torch.no_grad():
        ours = model.logits(torch.tensor([ids]))[0].numpy()
    assert ours.std() > 0.1
    assert np.abs(theirs - ours).max() < 1e-2
    assert card["logit_difference"][name] < 1e-2


def test_the_card_and_its_json_say_the_same(card: dict[str, Any]) -> None:
    from lab.train.card import render_card

    assert (DEMO / "CARD.md").read_text() == render_card(card)
