"""Block drafts (DFlash, DFlash2, DSpark) equal those of a fresh evaluation, and change no text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from budgets import ON_GPU, budget
from mtp_parts import WAYS, check_each_draft, prompts, written
from plans import planned_for
from resolved import config_of
from row_draft_parts import (
    check_distribution,
    check_greedy_texts,
    notes_without,
    options_of_way,
)
from test_mtp_matrix import N_CTX, SIZES
from test_slots import open_slots

from lab.options import Streaming
from lab.synth import write_preset
from lab.synth.block import BLOCK, write_block
from lab.synth.eagle import TARGETS, write_target
from lab.synth.mixtures import write_mixture
from offload.engine import EngineOptions, open_engine
from offload.kv_overrides import KvOverride
from offload.model_file import read_facts
from offload.plan.block_draft import block_bytes
from offload.sequences.block_draft import BlockDraft
from offload.times.context_memory import ContextOptions
from specdec.options import OF_TEXT
from specoffload.config.options import PlanOptions
from specoffload.errors import UsageError
from specoffload.session.session import Session

# Each variant has a target of another kind, and each way is used with all of them.
OF_TARGET = dict(zip(TARGETS, ("dflash", "dflash2", "dspark-conf", "dspark-bonus"), strict=True))
WAY_NAMES = {name: tuple(WAYS) for name in TARGETS} | {"llama": ("resident", "streamed")}
GROUPS = [(name, way) for name, ways in WAY_NAMES.items() for way in ways]


def pair(folder: Path, architecture: str) -> tuple[Path, Path]:
    """A target and its block draft. One draws some tokens only, and one has tables of its own."""
    target, variant = write_target(folder, architecture), OF_TARGET[architecture]
    mapped, own_tables = variant == "dspark-conf", variant == "dspark-bonus"
    return target, write_block(folder, target, variant, mapped=mapped, own_tables=own_tables)


def spec_type(draft: Path) -> str:
    return f"draft-{'dspark' if draft.name.startswith('dspark') else 'dflash'}"


def device_bytes(target: Path, draft: Path) -> int:
    """Device memory for half of the experts that stream, and for the draft."""
    return budget(target, Streaming(), "half") + block_bytes(
        read_facts(draft), ContextOptions(n_ctx=N_CTX)
    )


def options_of(way: str, target: Path, draft: Path, n_sequences: int = 1) -> EngineOptions:
    split_bytes = partial(device_bytes, target, draft)
    return options_of_way(way, split_bytes, n_sequences, row_file=draft)


def open_block(target: Path, draft: Path, way: str, parallel: int = 1, **more: Any) -> Session:
    spec = {"--spec-type": spec_type(draft), "--spec-policy": "fixed", "--spec-draft-n-max": BLOCK}
    if way == "split":
        more |= {"vram_bytes": device_bytes(target, draft), "n_gpu_layers": ON_GPU}
    return open_slots(target, spec, parallel, draft=draft, **WAYS[way], **more)


@pytest.mark.parametrize(("architecture", "way"), GROUPS)
@pytest.mark.parametrize("n_sequences", SIZES)
def test_each_draft_is_that_of_a_fresh_evaluation(
    models: Path, architecture: str, n_sequences: int, way: str
) -> None:
    target, draft = pair(models, architecture)
    with (
        open_engine(target, options_of(way, target, draft, n_sequences)) as engine,
        open_engine(target, options_of("resident", target, draft)) as fresh,
    ):
        assert engine.opened.no_rows_reason == ""
        check_each_draft(engine, fresh)


@pytest.mark.parametrize("architecture", TARGETS)
def test_greedy_texts_are_those_of_plain_decoding(models: Path, architecture: str) -> None:
    target, draft = pair(models, architecture)
    opened = partial(open_block, target, draft)
    check_greedy_texts(target, WAY_NAMES[architecture], BLOCK - 1, opened)


# A preset of each architecture, and whether the library gives the rows of its layers.
ARCHITECTURES = {
    "deepseek-v3": False, "kimi-k3": False, "deepseek-v3.2": False, "glm-4.5": False,
    "glm-5": False, "glm-5.3-flash": False, "qwen3-30b-a3b": True, "qwen3-next-80b-a3b": True,
    "qwen3.5-35b-a3b": True, "qwen3.8-flash-next": False, "deepseek-v4-flash": True,
    "qwen2.5-0.5b": False, "qwen3-0.6b": True, "mistral-7b": True, "llama-4-scout": False,
    "command-r7b": False, "gemma-2-2b": False, "gemma-3n-e4b": False, "minimax-m2": True,
    "minimax-m3": False, "gpt-oss-20b": True,
}  # fmt: skip


@contextmanager
def writing_plain_texts(target: Path, draft: Path) -> Iterator[Session]:
    """A session with a block draft, which has written two texts of the target alone."""
    spec = {"--spec-type": "dflash", "--spec-policy": "fixed", "--spec-draft-n-max": BLOCK}
    with (
        open_slots(target, {"--spec-type": "none"}, 1) as plain,
        open_slots(target, spec, 1, draft=draft) as session,
    ):
        for text in ([7], [5, 6, 7, 8] * 5):
            assert written(session, text, 20) == written(plain, text, 20)
        yield session


@pytest.mark.parametrize("preset", ARCHITECTURES)
def test_a_block_draft_opens_beside_each_architecture(models: Path, preset: str) -> None:
    """It drafts beside those whose graphs name their layers, and a line says why beside others."""
    target = write_preset(preset, models / f"block-{preset}.gguf", size="tiny", quant="f32")
    draft = write_block(models, target, name="-each", target_layers=(0, 1))
    with writing_plain_texts(target, draft) as session:
        row_draft = session.target.opened.row_draft
        assert (row_draft is not None and row_draft.n_taken > 40) == ARCHITECTURES[preset]
        told = any("the library gives none of" in note for note in session.notes)
        assert told != ARCHITECTURES[preset]


@pytest.mark.parametrize("is_causal", [False, True])
def test_tokens_of_a_block_see_those_after_them_unless_the_file_is_causal(
    models: Path, is_causal: bool
) -> None:
    target = write_target(models, "qwen3moe")
    draft = write_block(models, target, name=f"-{is_causal}", **{"attention.causal": is_causal})
    text = prompts(1)[0]
    with open_engine(target, options_of("resident", target, draft)) as engine:
        layers = engine.opened.row_draft
        assert isinstance(layers, BlockDraft)
        engine.sequences.extend(0, text[:-1], 0)
        feed = layers.tail(0, text)
        short, long = (
            layers.draft_blocks([(0, feed)], n)[0].place(0, None)[0] for n in (1, BLOCK - 1)
        )
    assert np.allclose(short, long, atol=1e-4) == is_causal


# Architectures of `lab.synth.mixtures` whose rows the library gives, and that no preset above has.
MIXTURES = ("bailingmoe3", "gemma4", "lfm2moe", "mimo2", "minimax-01", "nemotron_h_moe")


@pytest.mark.parametrize("architecture", MIXTURES)
def test_a_block_draft_opens_beside_each_mixture(models: Path, architecture: str) -> None:
    target = write_mixture(architecture, models / f"block-{architecture}.gguf", "f32")
    draft = write_block(models, target, name="-each", target_layers=(0, 2))
    with writing_plain_texts(target, draft) as session:
        row_draft = session.target.opened.row_draft
        assert row_draft is not None
        assert row_draft.n_taken > 40


@pytest.mark.parametrize("variant", ["dflash", "dspark-conf"])
@pytest.mark.parametrize("way", ["resident", "streamed"])
def test_a_draft_with_hyper_connections_drafts_for_deepseek4(
    models: Path, variant: str, way: str
) -> None:
    target = write_preset(
        "deepseek-v4-flash", models / "block-streams.gguf", size="tiny", quant="f32"
    )
    layers = tuple(range(read_facts(target).n_layers + 1))
    draft = write_block(models, target, variant, streams=True, target_layers=layers)
    with (
        open_slots(target, {"--spec-type": "none"}, 1) as plain,
        open_block(target, draft, way) as session,
    ):
        for text in ([7], *prompts(3)):
            assert written(session, text, 24) == written(plain, text, 24)
        row_draft = session.target.opened.row_draft
        assert row_draft is not None
        assert row_draft.n_taken > 60
        assert not row_draft.n_unknown_rows


def test_a_draft_with_hyper_connections_that_lacks_weights_is_left_out(models: Path) -> None:
    target = write_preset(
        "deepseek-v4-flash", models / "block-streams.gguf", size="tiny", quant="f32"
    )
    draft = write_block(
        models, target, streams=True, name="-lacks", target_layers=(0, 1), without=r"attn_sinks"
    )
    (told,) = [n for n in notes_without(target, draft, "dflash") if "so nothing drafts" in n]
    assert "attn_sinks" in told


def test_a_prompt_of_one_token_and_other_drafters(models: Path) -> None:
    target, draft = pair(models, "qwen3moe")
    spec = {"--spec-type": "suffix,dflash", "--spec-policy": "fixed", "--spec-draft-n-max": 3}
    with (
        open_slots(target, {"--spec-type": "none"}, 1) as plain,
        open_slots(target, spec, 1, draft=draft) as session,
    ):
        for text in ([7], [7, 8], prompts(1)[0] * 3):
            assert written(session, text, 40) == written(plain, text, 40)
        assert session.target.opened.row_draft is not None
        assert session.target.opened.row_draft.n_taken


def test_a_block_draft_keeps_its_own_values_beside_an_overridden_target(models: Path) -> None:
    """The library reads no key of the target from the draft's file, which would be refused."""
    target, draft = pair(models, "qwen3moe")
    changed = (KvOverride("qwen3moe.expert_used_count", 1),)
    with open_block(target, draft, "resident", kv_overrides=changed) as session:
        assert session.target.opened.no_rows_reason == ""
        assert session.target.opened.row_draft is not None


@pytest.mark.parametrize("variant", ["dflash", "dflash2", "dspark-conf"])
def test_sampled_texts_have_the_targets_distribution(models: Path, variant: str) -> None:
    target = write_target(models, "qwen3moe")
    draft = write_block(models, target, variant)
    spec = {
        "--spec-type": spec_type(draft), "--spec-policy": "fixed", "--spec-draft-n-max": 2,
    }  # fmt: skip
    check_distribution(target, draft, spec, n_seeds=3, n_drawn=500)


def test_the_plan_counts_the_file(models: Path) -> None:
    """The file's weights, its context and what its heads compute are reserved."""
    target = write_target(models, "qwen3moe")
    options = {"model": target, "ctx_size": N_CTX, "vram_bytes": 64 << 20}
    context = ContextOptions(n_ctx=N_CTX, type_k="f16", type_v="f16")
    plain = planned_for(config_of(**options), PlanOptions()).plan.reserve_bytes
    for variant in ("dflash", "dflash2", "dspark-conf"):
        draft = write_block(models, target, variant)
        with_draft = planned_for(config_of(draft=draft, **options), PlanOptions()).plan
        assert with_draft.reserve_bytes - plain == block_bytes(read_facts(draft), context)


# -- which file drafts -----------------------------------------------------------------------------


@pytest.mark.parametrize(("variant", "kind"), [("dflash2", "DFlash"), ("dspark", "DSpark")])
def test_a_block_draft_drafts_as_such_without_being_named(
    models: Path, variant: str, kind: str
) -> None:
    target = write_target(models, "qwen3moe")
    draft = write_block(models, target, variant)
    config = config_of(model=target, draft=draft)
    assert config.spec.options.drafters == (*OF_TEXT, kind.lower())
    said = f"draft names a {kind} file, which drafts as --spec-type {kind.lower()}"
    assert said in config.reasons
    # A file of another kind than the one that was named drafts as what it is.
    named = config_of(model=target, draft=draft, spec_given={"--spec-type": "suffix,eagle3"})
    assert named.spec.options.drafters == ("suffix", kind.lower())
    assert said in named.reasons
    other = config_of(model=target, draft=draft, spec_given={"--spec-type": "suffix"})
    assert other.spec.draft is None


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("dspark", "--spec-type dspark needs a DSpark file: add --draft FILE.gguf"),
        ("dflash,draft", "draft and dflash exclude each other, as there is one file for both"),
        ("mtp,dflash", "one of them can follow the target's rows"),
        ("dflash,eagle3", "exclude each other, as there is one file for both"),
    ],
)
def test_drafters_that_exclude_each_other(models: Path, named: str, words: str) -> None:
    target, draft = pair(models, "qwen3moe")
    file = None if named == "dspark" else draft
    with pytest.raises(UsageError, match=words):
        config_of(model=target, draft=file, spec_given={"--spec-type": named})


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"embedding_length": 64}, "it reads rows of 64 values, and the target's have 128"),
    "layers": ({"target_layers": (1, 9)}, "it reads layers 1, 9, and must read layers from 0 to 4"),
    "mask": ({"mask": None}, "names no mask token"),
    "short": ({"block_size": 1}, "has blocks of 1 tokens, which draft none"),
    "keys": ({"attention.value_length": 16}, "has keys of 32 values and values of 16"),
    "lacks": ({"without": r"blk\.0\.attn_q\.weight"}, "blk.0.attn_q.weight"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_file_of_another_target_is_left_out(
    models: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    more, words = BAD[kind]
    target = write_target(models, "qwen3moe")
    draft = write_block(models, target, name=f"-{kind}", **more)
    with caplog.at_level("WARNING", "specoffload.session"):
        notes = notes_without(target, draft, "dflash")
    (told,) = [note for note in notes if "so nothing drafts" in note]
    assert words in told
    assert told in caplog.messages
