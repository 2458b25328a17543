"""A draft whose vocabulary differs from the target's (llama.cpp #12635), with two real files.

The second vocabulary is the embedded draft's with its ids in another order and other names for its
special tokens. In the harder case it lacks half of the merges, so that it cuts text differently.
The text must be the target's own, and some drafts must be accepted.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from lossless_parts import (
    FIXED,
    GREEDY,
    Judge,
    assert_kept_and_rejected,
    generate,
    judged,
    open_session,
)

from offload.sequences.text import share_of_tokens
from specdec.errors import VocabularyMismatch
from specoffload.config.resolution import demo_file, demo_prompts

RENAMED = {"<|endoftext|>": "<eos>", "<|im_start|>": "<turn>", "<|im_end|>": "</turn>"}
REPLACE = ",".join(f"{ours}={theirs}" for ours, theirs in RENAMED.items())
_TOKENS, _TYPES, _MERGES = (f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "merges"))


def rewrite(path: Path, *, merges: float) -> Path:
    """Write the embedded draft with a reordered vocabulary, and with the share `merges` of its
    merges."""
    reader = GGUFReader(demo_file("draft.gguf"))
    values = {name: field.contents() for name, field in reader.fields.items()}
    n = len(values[_TOKENS])
    order = np.random.default_rng(1).permutation(n)  # new id -> old id
    new_id = np.argsort(order)
    values[_TOKENS] = [RENAMED.get(t, t) for t in (values[_TOKENS][i] for i in order)]
    values[_TYPES] = [values[_TYPES][i] for i in order]
    values[_MERGES] = values[_MERGES][: int(merges * len(values[_MERGES]))]
    for name in values:
        if name.endswith("_token_id"):
            values[name] = int(new_id[values[name]])
    writer = GGUFWriter(path, values["general.architecture"])
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        inner = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
        writer.add_key_value(name, values[name], field.types[0], inner)
    for tensor in reader.tensors:
        data = tensor.data
        if tensor.name in ("token_embd.weight", "output.weight"):
            data = np.ascontiguousarray(data[order])
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def drafts(models: Path) -> dict[str, Path]:
    return {
        "same": demo_file("draft.gguf"),
        "permuted": rewrite(models / "draft-permuted.gguf", merges=1.0),
        "coarser": rewrite(models / "draft-fewer-merges.gguf", merges=0.5),
    }


def texts() -> list[str]:
    """Prompts. One has special tokens, which only the replacement pairs translate."""
    plain = [demo_prompts("code")[0], demo_prompts("prose")[0] + "\n# Größe, naïve, 日本語"]
    return [f"<|im_start|>user\n{plain[0]}<|im_end|>\n<|im_start|>assistant\n", *plain]


TRANSLATED = {**FIXED, "--spec-replace": REPLACE}


@pytest.mark.parametrize(
    ("name", "spec", "place"),
    [
        ("permuted", {}, "resident"),
        ("permuted", {"--spec-accept": "reject"}, "resident"),
        ("permuted", {"--spec-type": "suffix,draft"}, "streamed"),
        ("coarser", {}, "resident"),
    ],
)
def test_another_vocabulary_is_translated_without_loss(
    exact: Path, judge: Judge, drafts: dict[str, Path],
    name: str, spec: dict[str, object], place: str,
) -> None:  # fmt: skip
    rejects = "--spec-accept" in spec
    with open_session(exact, TRANSLATED | spec, place, draft=drafts[name]) as opened:
        runs = judged(opened, judge, texts(), rejects=rejects)
    assert_kept_and_rejected(runs)
    by_source = [pair for run in runs for pair in run.stats.accepted_by_source]
    assert sum(n for source, n in by_source if source == "draft") > 0


def test_another_order_of_ids_costs_no_drafts(exact: Path, drafts: dict[str, Path]) -> None:
    accepted = []
    for name, spec in (("same", FIXED), ("permuted", TRANSLATED)):
        with open_session(exact, spec, draft=drafts[name]) as opened:
            accepted.append(sum(generate(opened, t, GREEDY).stats.n_accepted for t in texts()))
    assert accepted[1] >= 0.9 * accepted[0] > 0


def test_without_replacement_another_vocabulary_is_refused(
    exact: Path, drafts: dict[str, Path]
) -> None:
    remedy = r'bos token .*: choose a draft of the same family, or .* with --spec-replace "" '
    with pytest.raises(VocabularyMismatch, match=rf"{remedy}\(100 % of its tokens are"):
        open_session(exact, FIXED, draft=drafts["permuted"])
    with open_session(exact, FIXED | {"--spec-replace": ""}, draft=drafts["permuted"]) as opened:
        assert generate(opened, texts()[1], GREEDY).stats.n_accepted > 0, "the remedy works"


def test_a_refusal_counts_the_tokens_that_survive(exact: Path, drafts: dict[str, Path]) -> None:
    with open_session(exact, TRANSLATED, draft=drafts["coarser"]) as opened:
        draft = opened.draft
        assert draft is not None
        known = {opened.target.model.token_text(t) for t in range(opened.target.n_vocab)}
        kept = [draft.model.token_text(t) in known for t in range(draft.n_vocab)]
        assert share_of_tokens(opened.target.model, draft.model) == sum(kept) / len(kept)
        assert 0.1 < sum(kept) / len(kept) <= 1.0


def test_special_tokens_reach_the_draft_as_its_own(
    exact: Path, drafts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_session(exact, TRANSLATED, draft=drafts["permuted"]) as opened:
        draft = opened.draft
        assert draft is not None
        extend, read = draft.sequences.extend, list[int]()

        def watched(sequence: int, tokens: list[int], n_logits: int | None = None) -> object:
            read.extend(tokens)
            return extend(sequence, tokens, n_logits)

        monkeypatch.setattr(draft.sequences, "extend", watched)
        run = generate(opened, texts()[0], GREEDY)
        ours = [opened.target.token_text(token) for token in run.prompt]
        theirs = [draft.token_text(token) for token in read[: len(run.prompt)]]
    assert set(RENAMED) & set(ours) == {"<|im_start|>", "<|im_end|>"}
    assert theirs == [RENAMED.get(text, text) for text in ours]
