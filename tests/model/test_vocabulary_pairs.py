"""Drafts of a model with another tokenizer, for pairs of tokenizers of every kind.

No flag asks for translation. Greedy texts must be those of plain decoding, and translated drafts
must be accepted.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from lossless_parts import FIXED, GREEDY, SAMPLED, Run, generate, open_session
from resolved import config_of
from vocabularies import CYCLE, TOKENIZERS, write

from offload.notes import NoteKind, kind_of
from specoffload.opening.translation import with_translation

# Pairs (target, draft) whose tokenizers keep all characters.
WHOLE = [
    ("gpt-2", "llama-bpe"),
    ("llama-bpe", "qwen2"),
    ("qwen2", "deepseek-coder"),
    ("deepseek-coder", "tekken"),
    ("tekken", "gpt-2"),
    ("gpt-2", "spm"),
    ("spm", "gpt-2"),
    ("qwen2", "spm"),
    ("spm", "llama-bpe"),
    ("spm", "spm-plain"),
    ("spm-plain", "spm"),
    ("spm-plain", "tekken"),
    ("llama-bpe", "spm-plain"),
    ("rwkv", "spm"),
    ("spm", "rwkv"),
    ("rwkv", "qwen2"),
    ("deepseek-coder", "rwkv"),
]
# One side loses characters: line ends (ugm), or capitals, blanks and line ends (wpm).
LOSSY = [
    ("qwen2", "ugm"),
    ("ugm", "spm"),
    ("ugm", "gpt-2"),
    ("spm", "ugm"),
    ("gpt-2", "wpm"),
    ("spm", "wpm"),
    ("wpm", "llama-bpe"),
    ("wpm", "ugm"),
]
PROMPTS = (CYCLE, CYCLE + " quickfj", "<s>" + CYCLE * 12 + " quick")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("vocabularies")
    return {name: write(folder / f"{name}.gguf", name) for name in TOKENIZERS if name != "none"}


@pytest.fixture(scope="module")
def plain(files: dict[str, Path]) -> dict[str, list[Run]]:
    """The runs of each target alone."""
    found = {}
    for name, path in files.items():
        with open_session(path, {"--spec-type": "none"}) as opened:
            found[name] = [generate(opened, text, GREEDY) for text in PROMPTS]
    return found


@pytest.mark.parametrize(("target", "draft"), [*WHOLE, *LOSSY])
def test_another_tokenizer_drafts_without_loss(
    files: dict[str, Path], plain: dict[str, list[Run]], target: str, draft: str
) -> None:
    with open_session(files[target], FIXED, draft=files[draft]) as opened:
        (said,) = [n for n in opened.notes if "translated through text" in n]
        runs = [generate(opened, text, GREEDY) for text in PROMPTS]
    assert kind_of(said) is NoteKind.FLAGS, "every command shows it"
    assert "--spec-replace TARGET=DRAFT" in said
    assert [run.tokens for run in runs] == [run.tokens for run in plain[target]]
    accepted = [run.stats.n_accepted for run in runs]
    drafted = [run.stats.n_drafted for run in runs]
    if (target, draft) in WHOLE:
        assert all(a >= 0.7 * d > 0 for a, d in zip(accepted, drafted, strict=True))
    else:
        assert sum(accepted) > 0


@pytest.mark.parametrize("pair", [("qwen2", "spm"), ("spm", "tekken")])
def test_requests_of_all_slots_are_translated_together(
    files: dict[str, Path], pair: tuple[str, str]
) -> None:
    """A grammar, a limit, a seed and a stop, each in a request of its own."""
    wishes = [
        GREEDY,
        replace(GREEDY, n_predict=5),
        replace(GREEDY, ignore_eos=False, grammar='root ::= "quick" [fjord]+ "-w" [altz]+'),
        replace(SAMPLED, repeat_penalty=1.0, frequency_penalty=0.0, stop=("nymph",)),
    ]
    target, draft = pair
    spoken = []
    for spec in (FIXED, {"--spec-type": "none"}):
        with_draft = {"draft": files[draft]} if spec is FIXED else {}
        with open_session(files[target], spec, parallel=4, ctx_size=2048, **with_draft) as opened:
            prompt = opened.tokenize(CYCLE * 3 + " ", add_special=True, parse_special=False)
            requests = [opened.start(prompt, wish) for wish in wishes]
            while not opened.is_idle:
                opened.step()
            assert [request.error for request in requests] == [None] * len(wishes)
            spoken.append(["".join(p.text for p in request.pieces) for request in requests])
            if spec is FIXED:
                assert opened.counters()["draft_batches"] > 0, "for several in one decode"
                stats = [request.pieces[-1].stats for request in requests]
                assert all(s is not None and s.n_accepted > 0 for s in stats)
    assert spoken[0] == spoken[1]
    assert len(spoken[0][1]) < len(spoken[0][0])
    assert spoken[0][2].startswith("quick")
    assert "nymph" not in spoken[0][3]


def test_a_draft_file_that_is_exchanged_is_compared_again(
    files: dict[str, Path], tmp_path: Path
) -> None:
    """`bench --drafters` and the like decide for one configuration several times."""
    config = config_of(model=files["qwen2"], draft=files["spm"], spec_given=FIXED, device="cpu")
    once = with_translation(config.model, config.spec)
    assert once.options.replacements == ()
    assert with_translation(config.model, once).reasons == once.reasons, "said once"
    same_file = write(tmp_path / "same.gguf", "qwen2")
    same = with_translation(config.model, replace(once, draft=same_file))
    assert same.options.replacements is None
