"""A draft whose vocabulary differs from the target's (llama.cpp #12635), with two real files.

The second vocabulary is the embedded draft's with its ids in another order and other names for its
special tokens. In the harder case it lacks half of the merges, so that it cuts text differently.
The text must be the target's own, and some drafts must be accepted.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from in_process import command
from lossless_parts import (
    FIXED,
    GREEDY,
    Judge,
    assert_kept_and_rejected,
    generate,
    judged,
    open_session,
)

from specdec.costs.profile import CostProfile
from specoffload.bench import draft_quality
from specoffload.commands.profile import quality_of
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


@pytest.mark.parametrize("replace", [None, ""])
def test_without_pairs_another_vocabulary_is_translated_too(
    exact: Path, drafts: dict[str, Path], replace: str | None
) -> None:
    """The draft with half of the merges cuts some words into more tokens."""
    spec = FIXED if replace is None else FIXED | {"--spec-replace": replace}
    shares = {}
    for name in ("permuted", "coarser"):
        with open_session(exact, spec, draft=drafts[name]) as opened:
            (said,) = [n for n in opened.notes if "are translated through text" in n]
            assert generate(opened, texts()[1], GREEDY).stats.n_accepted > 0
        assert "100 % of the target's tokens survive" in said
        ((share, n_draft),) = re.findall(r"(\d+) % are one token .* takes ([\d.]+) of the", said)
        shares[name] = int(share), float(n_draft)
    assert shares["permuted"] == (100, 1.0)
    assert shares["coarser"][0] < 97
    assert shares["coarser"][1] > 1.02


def test_an_equal_vocabulary_is_not_translated(exact: Path, drafts: dict[str, Path]) -> None:
    with open_session(exact, FIXED, draft=drafts["same"]) as opened:
        assert opened.choices.spec.options.replacements is None
        assert not any("translated" in note for note in opened.notes)


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


def test_a_translated_draft_is_judged_as_the_draft_itself(
    exact: Path, drafts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same draft with other ids: translation loses nothing, so as much is accepted."""
    monkeypatch.setattr(draft_quality, "_N_TEXTS", (3, 3))
    costs = CostProfile(tuple(1.0 + 0.01 * n for n in range(64)), 0.02)
    found = {}
    for name in ("same", "permuted"):
        with open_session(exact, FIXED, draft=drafts[name]) as opened:
            found[name] = quality_of(opened, costs)
            assert opened.draft is not None
            assert opened.target.sequences.length(0) == opened.draft.sequences.length(0) == 0
    same, permuted = found["same"], found["permuted"]
    assert same is not None
    assert permuted is not None
    assert permuted.n_tokens == same.n_tokens
    assert permuted.positions[0].agreement == pytest.approx(same.positions[0].agreement, abs=0.15)
    for its in ("lengths", "positions"):
        assert len(getattr(permuted, its)) == len(getattr(same, its))
    assert permuted.lengths[-1].tokens_per_round == pytest.approx(
        same.blocks.tokens_per_round, rel=0.15
    )
    assert same.translated_token_s is None
    assert (permuted.translated_token_s or 0.0) > 0.0
    assert same.sampled_tokens_per_round is not None
    assert permuted.sampled_tokens_per_round is None


@pytest.mark.parametrize("words", [("draft", "judge"), ("profile",)])
def test_the_commands_judge_a_translated_draft(
    words: tuple[str, ...], drafts: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(draft_quality, "_N_TEXTS", (2, 2))
    pair = (demo_file("target.gguf"), "-md", drafts["coarser"])
    done = command(*words, *pair, "--device", "cpu", "-t", "1", "-c", "512")
    assert done.returncode == 0, done.stderr
    assert "how well the translated draft guesses the target" in done.stdout
    assert "a drafted token of the target's takes " in done.stdout
    assert "--spec-accept reject" not in done.stdout
    assert "pay" in done.stdout.splitlines()[-1]
