"""Drafts by an EAGLE-3 file equal those of a fresh evaluation, and change no text."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from budgets import ON_GPU, budget
from gguf import GGMLQuantizationType as Type
from library_memory import allocated
from mtp_parts import LONGEST, WAYS, check_each_draft, prompts, written
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

from lab.options import Streaming, engine_options
from lab.synth import plan_shape, write_header_only
from lab.synth.eagle import TARGETS, eagle_shape, write_eagle, write_target
from lab.synth.tensors import Fill, Tensor
from offload.engine import EngineOptions, open_engine
from offload.ggml.library.lib import library
from offload.model_file import read_facts
from offload.plan import weights
from offload.plan.row_draft import eagle_bytes, no_eagle_reason
from offload.times.context_memory import ContextOptions
from specdec.options import OF_TEXT
from specoffload.config.options import PlanOptions
from specoffload.errors import UsageError
from specoffload.session.session import Session

WAY_NAMES = {name: tuple(WAYS) for name in TARGETS} | {"llama": ("resident", "streamed")}
GROUPS = [(name, way) for name, ways in WAY_NAMES.items() for way in ways]


def pair(folder: Path, architecture: str) -> tuple[Path, Path]:
    """A target and its EAGLE-3 file. Each architecture's file is of another kind."""
    target = write_target(folder, architecture)
    mapped, own_embeddings = architecture != "gpt-oss", architecture == "llama"
    return target, write_eagle(folder, target, mapped=mapped, own_embeddings=own_embeddings)


def device_bytes(target: Path, eagle: Path) -> int:
    """Device memory for half of the experts that stream, and for the EAGLE-3 file."""
    return budget(target, Streaming(), "half") + eagle_bytes(
        read_facts(eagle), ContextOptions(n_ctx=N_CTX)
    )


def options_of(way: str, target: Path, eagle: Path, n_sequences: int = 1) -> EngineOptions:
    split_bytes = partial(device_bytes, target, eagle)
    return options_of_way(way, split_bytes, n_sequences, row_file=eagle)


def open_eagle(target: Path, eagle: Path, way: str, parallel: int = 1, **more: Any) -> Session:
    spec = {"--spec-type": "draft-eagle3", "--spec-policy": "fixed", "--spec-draft-n-max": LONGEST}
    if way == "split":
        more |= {"vram_bytes": device_bytes(target, eagle), "n_gpu_layers": ON_GPU}
    return open_slots(target, spec, parallel, draft=eagle, **WAYS[way], **more)


@pytest.mark.parametrize(("architecture", "way"), GROUPS)
@pytest.mark.parametrize("n_sequences", SIZES)
def test_each_draft_is_that_of_a_fresh_evaluation(
    models: Path, architecture: str, n_sequences: int, way: str
) -> None:
    target, eagle = pair(models, architecture)
    with (
        open_engine(target, options_of(way, target, eagle, n_sequences)) as engine,
        open_engine(target, options_of("resident", target, eagle)) as fresh,
    ):
        assert engine.opened.no_rows_reason == ""
        check_each_draft(engine, fresh)


@pytest.mark.parametrize("architecture", TARGETS)
def test_greedy_texts_are_those_of_plain_decoding(models: Path, architecture: str) -> None:
    target, eagle = pair(models, architecture)
    opened = partial(open_eagle, target, eagle)
    check_greedy_texts(target, WAY_NAMES[architecture], LONGEST, opened)


def test_more_texts_than_a_ubatch_has_tokens(models: Path) -> None:
    target, eagle = pair(models, "qwen3moe")
    many = engine_options(options_of("resident", target, eagle, 5), n_ubatch=4, n_batch=4)
    with (
        open_engine(target, many) as engine,
        open_engine(target, options_of("resident", target, eagle)) as fresh,
    ):
        check_each_draft(engine, fresh)


def test_rows_of_the_first_and_the_last_layer_are_read(models: Path) -> None:
    target = write_target(models, "gpt-oss")
    eagle = write_eagle(models, target, name="-ends", target_layers=(0, 2, 5))
    options = options_of("streamed", target, eagle)
    with (
        open_engine(target, options) as engine,
        open_engine(target, engine_options(options, device="cpu")) as cpu,
    ):
        check_each_draft(engine, cpu)


@pytest.mark.parametrize("parallel", SIZES)
def test_a_prompt_of_one_token_and_other_drafters(models: Path, parallel: int) -> None:
    """A text's first token has no row before it, so that other drafters begin."""
    target, eagle = pair(models, "qwen3moe")
    spec = {"--spec-type": "suffix,eagle3", "--spec-policy": "fixed", "--spec-draft-n-max": 3}
    with (
        open_slots(target, {"--spec-type": "none"}, 1) as plain,
        open_slots(target, spec, parallel, draft=eagle) as session,
    ):
        for text in ([7], [7, 8], prompts(1)[0] * 3):
            assert written(session, text, 40) == written(plain, text, 40)
        assert session.target.opened.row_draft is not None
        assert session.target.opened.row_draft.n_taken


def test_sampled_texts_have_the_targets_distribution(models: Path) -> None:
    target = write_target(models, "qwen3moe")
    eagle = write_eagle(models, target)
    spec = {"--spec-type": "eagle3", "--spec-policy": "fixed", "--spec-draft-n-max": 2}
    check_distribution(target, eagle, spec, n_seeds=5, n_drawn=700)


# -- memory ----------------------------------------------------------------------------------------


def test_the_plan_counts_the_file(models: Path) -> None:
    """The file's weights and context are reserved, and are about what the library takes."""
    target, eagle = pair(models, "qwen3moe")
    options = {"model": target, "ctx_size": N_CTX, "vram_bytes": 64 << 20}
    plans = [
        planned_for(config_of(draft=draft, **options), PlanOptions()).plan
        for draft in (None, eagle)
    ]
    context = ContextOptions(n_ctx=N_CTX, type_k="f16", type_v="f16")
    assert plans[1].reserve_bytes - plans[0].reserve_bytes == eagle_bytes(
        read_facts(eagle), context
    )


@pytest.mark.parametrize("n_ctx", [4096, 65536])
def test_planned_memory_is_the_librarys(tmp_path: Path, n_ctx: int) -> None:
    """A file of the published size for Qwen3-30B-A3B, without a map of tokens."""
    n_tokens, width = 151936, 2048
    heads = {"head_count": 32, "head_count_kv": 4, "key_length": 128, "value_length": 128}
    shape = eagle_shape(
        width,
        n_tokens,
        **{f"attention.{key}": value for key, value in heads.items()},
        **{"feed_forward_length": 12288, "rope.dimension_count": 128},
    )
    plan = plan_shape(replace(shape, quant="f16"))
    own = Tensor("token_embd.weight", (width, n_tokens), Type.F16, Fill("normal"))
    plan = replace(plan, tensors=(*plan.tensors, own), size_bytes=4 << 30)
    path = write_header_only(plan, tmp_path / "eagle.gguf")
    facts = read_facts(path)
    spec = ContextOptions(n_ctx, n_ubatch=64, n_outputs=64, device_checkpoints=False)
    theirs = allocated(path, spec)
    planned = eagle_bytes(facts, spec) - weights.device_bytes(facts)
    taken = theirs.kv_bytes + theirs.compute_bytes
    print(f"{n_ctx}: planned {planned / 2**20:.0f} MiB, taken {taken / 2**20:.0f} MiB")
    assert taken <= planned < 1.3 * taken


# -- which file drafts -----------------------------------------------------------------------------


def test_an_eagle_file_drafts_as_such_without_being_named(models: Path) -> None:
    target, eagle = pair(models, "qwen3moe")
    config = config_of(model=target, draft=eagle)
    assert config.spec.options.drafters == (*OF_TEXT, "eagle3")
    assert "draft names an EAGLE-3 file, which drafts as --spec-type eagle3" in config.reasons
    both = config_of(model=target, draft=eagle, spec_given={"--spec-type": "suffix,draft"})
    assert both.spec.options.drafters == ("suffix", "eagle3")
    assert config_of(model=target, draft=target).spec.options.drafters == (*OF_TEXT, "draft")
    other = config_of(model=target, draft=eagle, spec_given={"--spec-type": "suffix"})
    assert other.spec.draft is None


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("eagle3", "--spec-type eagle3 needs an EAGLE-3 file: add --draft FILE.gguf"),
        ("eagle3,draft", "draft and eagle3 exclude each other, as there is one file for both"),
        ("mtp,eagle3", "one of them can follow the target's rows"),
    ],
)
def test_drafters_that_exclude_each_other(models: Path, named: str, words: str) -> None:
    target, eagle = pair(models, "qwen3moe")
    draft = None if named == "eagle3" else eagle
    with pytest.raises(UsageError, match=words):
        config_of(model=target, draft=draft, spec_given={"--spec-type": named})


def notes_of(target: Path, eagle: Path) -> list[str]:
    return notes_without(target, eagle, "eagle3")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"target_hidden_size": 64}, "it reads rows of 64 values, and the target's have 128"),
    "layers": ({"target_layers": (1, 2, 9)}, "reads layers 1, 2, 9, and must read 3 from 0 to 4"),
    "lacks": ({"without": r"attn_norm_2"}, "lacks blk.0.attn_norm_2.weight"),
    "head": ({"without": r"^output\.weight", "embedding_length": 64}, "lacks token_embd.weight"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_file_of_another_target_is_left_out(
    models: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    more, words = BAD[kind]
    target = write_target(models, "qwen3moe")
    eagle = write_eagle(models, target, name=f"-{kind}", **more)
    with caplog.at_level("WARNING", "specoffload.session"):
        notes = notes_of(target, eagle)
    (told,) = [note for note in notes if "so nothing drafts" in note]
    assert words in told
    assert told in caplog.messages


def test_other_bad_files_are_left_out(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, eagle = pair(models, "qwen3moe")
    words = "is no EAGLE-3, DFlash or DSpark file, but a model of"
    assert any(words in note for note in notes_of(target, target))
    whole = bytearray(eagle.read_bytes())
    entry = read_facts(eagle).weights["d2t"].entry
    whole[entry.offset_bytes : entry.offset_bytes + 8] = (512).to_bytes(8, "little")
    (tmp_path / "map.gguf").write_bytes(whole)
    notes = notes_of(target, tmp_path / "map.gguf")
    assert any("map of tokens (d2t) to numbers outside 0 to 511" in note for note in notes)
    (tmp_path / "text.gguf").write_bytes(eagle.read_bytes().replace(b"w100", b"x100"))
    notes = notes_of(target, tmp_path / "text.gguf")
    assert any("in the target, so this file was made for another target" in note for note in notes)
    monkeypatch.setattr(library(), "has_layer_inputs", False)
    assert any("library has no functions for rows" in note for note in notes_of(target, eagle))


def test_a_target_whose_graph_names_no_layers_runs_without(models: Path, tmp_path: Path) -> None:
    target, eagle = pair(models, "llama")
    renamed = tmp_path / "other.gguf"
    renamed.write_bytes(target.read_bytes())
    config = config_of(model=renamed, draft=eagle)
    facts = replace(read_facts(renamed), architecture="deepseek2")
    assert config.spec.options.drafters == (*OF_TEXT, "eagle3")
    assert "the library gives none of deepseek2" in no_eagle_reason(facts, read_facts(eagle))
