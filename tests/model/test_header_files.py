"""Files that a start refuses are refused by `plan` and `models`, too, and the cause is named."""

from __future__ import annotations

import os
from pathlib import Path

import in_process
import numpy as np
import pytest
from gguf import GGUFWriter
from resolved import config_of

from lab.attack.plans_part import broken_sum
from lab.changed_model import changed, split
from lab.options import engine_options
from lab.synth.eagle import write_eagle, write_target
from lab.synth.mtp import write_mtp
from offload.engine import open_engine
from offload.errors import BadModel
from offload.model import layer_of
from offload.model_file import read_facts
from specoffload.opening.drafters import usable_drafters
from specoffload.opening.header import target_facts


def plan_says(path: Path) -> str:
    """The plan's refusal, or "" if there is a plan."""
    done = in_process.command("plan", path, "-c", "256", "--vram", "1GiB")
    assert "Traceback" not in done.stderr
    return done.stderr if done.returncode else ""


def start_says(path: Path) -> str:
    try:
        open_engine(path, engine_options(device="cpu", n_ctx=64)).close()
    except BadModel as e:
        return str(e)
    return ""


@pytest.mark.parametrize(
    ("values", "dropped", "more", "words"),
    [
        ({}, "", {}, ""),
        ({"context_length": None}, "", {}, "lacks deepseek2.context_length"),
        ({"expert_used_count": None}, "", {}, "lacks deepseek2.expert_used_count"),
        ({"attention.head_count": 3}, "", {}, "has wrong shape"),
        ({}, "blk.1.attn_output.weight", {}, "blk.1.attn_output.weight' not found"),
        ({}, "", {"blk.0.extra.weight": (32, 2)}, "it has no use for blk.0.extra.weight"),
        ({}, "", {"v.blk.0.attn_q.weight": (32, 2)}, "vision or audio part in the same file"),
        ({}, "", {"blk.1.ffn_up.3.weight": (32, 2)}, "every expert in a tensor of its own"),
    ],
)
def test_a_plan_refuses_what_a_start_refuses(
    values: dict[str, object], dropped: str, more: dict[str, tuple[int, ...]], words: str,
    tiny_moe: Path, tmp_path: Path,
) -> None:  # fmt: skip
    path = changed(tiny_moe, tmp_path / "m.gguf", values, lambda name: name != dropped, more)
    planned, started = plan_says(path), start_says(path)
    assert words in planned
    assert bool(planned) == bool(started) == bool(words)
    listed = in_process.command("models", tmp_path).stdout
    assert words in listed


@pytest.mark.parametrize("is_bare", [True, False])
@pytest.mark.parametrize("architecture", ["glm4moe", "qwen35"])  # with experts, and without
def test_a_file_of_layers_that_draft_alone_is_told_what_it_is(
    architecture: str, is_bare: bool, models: Path, tmp_path: Path
) -> None:
    """A bare one lacks the embedding, with which the library would open the file."""
    target = write_mtp(models, architecture)
    first = read_facts(target).n_layers

    def is_of_head(name: str) -> bool:
        return layer_of(name) >= first or not (is_bare or name.startswith("blk."))

    head = changed(target, tmp_path / "head.gguf", keep=is_of_head)
    words = f"{head}: is only a draft head, layers for multi-token prediction (blk."
    for line in (
        ("plan", head, "--vram", "1GiB"),
        ("plan", target, "--draft", head, "--vram", "1GiB"),
        ("run", target, "-md", head, "-p", "hello", "-n", "1", "--device", "cpu"),
    ):
        done = in_process.command(*line)
        assert done.returncode
        assert words in done.stderr
        assert "Traceback" not in done.stderr
    assert "is only a draft head" in in_process.command("models", tmp_path).stdout


@pytest.mark.parametrize("architecture", ["eagle3", "dflash", "gemma4-assistant"])
def test_other_draft_heads_are_told_before_a_target_is_loaded(
    architecture: str, tiny_moe: Path, models: Path, tmp_path: Path
) -> None:
    if architecture == "eagle3":
        head = write_eagle(models, write_target(models, "qwen3moe"))
    else:
        head = tmp_path / "head.gguf"
        writer = GGUFWriter(head, architecture)
        for key in ("block_count", "context_length", "embedding_length"):
            writer.add_uint32(f"{architecture}.{key}", 1)
        writer.add_tensor("blk.0.attn_q.weight", np.zeros((1, 1), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    assert f"{architecture} is a draft" in plan_says(head)
    assert f"{architecture} is a draft" in start_says(head)
    if architecture == "gemma4-assistant":  # the others are drafts that are supported
        opened = in_process.command("plan", tiny_moe, "--draft", head, "--vram", "1GiB")
        assert f"{architecture} is a draft" in opened.stderr
        config = config_of(model=tiny_moe, draft=head)
        with pytest.raises(BadModel, match=f"{architecture} is a draft"):
            usable_drafters(target_facts(config), config.spec)


def test_parts_are_checked_by_their_own_numbers(tiny_moe: Path, tmp_path: Path) -> None:
    first, second, third = split(tiny_moe, tmp_path, 3)
    whole = read_facts(tiny_moe)
    assert read_facts(third).weights.keys() == whole.weights.keys()
    kept = second.read_bytes()
    second.write_bytes(third.read_bytes())
    exchanged = "says that it is part 3 of 3, and its name that it is part"
    with pytest.raises(BadModel, match=exchanged):
        read_facts(first)
    listed = in_process.command("models", tmp_path).stdout
    assert all(exchanged in said for said in (plan_says(first), start_says(first), listed))
    second.write_bytes(tiny_moe.read_bytes())
    with pytest.raises(BadModel, match="says that it is no part of a split model"):
        read_facts(first)
    second.write_bytes(kept)
    joined = tmp_path / "joined.gguf"
    joined.write_bytes(b"".join(part.read_bytes() for part in (first, second, third)))
    with pytest.raises(BadModel, match="3 parts were joined as bytes .cat.*llama-gguf-split"):
        read_facts(joined)


def test_a_merged_model_with_a_parts_name_is_one_file(tiny_moe: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / f"m-{number:05d}-of-00003.gguf"
        path.write_bytes(tiny_moe.read_bytes())
        assert read_facts(path).path == path
        listed = in_process.command("models", folder).stdout
        assert path.name in listed
        assert "lacks" not in listed


def test_a_path_that_is_not_utf_8(tiny_moe: Path, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"a\xffb.gguf")
    path.write_bytes(tiny_moe.read_bytes())
    assert read_facts(path).weights
    assert plan_says(path) == ""
    assert start_says(path) == ""
    assert "a\ufffdb.gguf" in in_process.command("models", tmp_path).stdout


def test_sums_that_are_broken_are_found() -> None:
    """The attack's check can fail."""
    part = {
        "vram_bytes": 10, "resident_bytes": 4, "reserve_bytes": 3, "slot_bytes": 3,
        "streamed_bytes": 0, "reserve": {"kv_bytes": 3},
    }  # fmt: skip
    plan = part | {"devices": [part], "expected": {"prefill_tps": 1.0, "decode_tps": 1.0}}
    assert broken_sum(plan) == ""
    assert "exceed" in broken_sum(plan | {"slot_bytes": 4})
    assert "below 0" in broken_sum(plan | {"reserve": {"kv_bytes": -3}})
    assert "in sum" in broken_sum(plan | {"reserve": {"kv_bytes": 2}})
