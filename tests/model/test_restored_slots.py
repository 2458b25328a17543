"""A restored slot finds as many tokens again as a live one, whatever the memory is."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from image_parts import model_with_projector, png
from test_block import spec_type
from test_eagle import pair
from test_slots import SPECS, Answer, model, open_slots, together

from lab.synth import write_preset
from lab.synth.block import write_block
from lab.synth.eagle import write_target
from lab.synth.mtp import write_mtp
from offload.errors import BadRequest
from offload.images.building import image_library
from specoffload.config.options import DiskRoom
from specoffload.generation.generation import GenerateOptions
from specoffload.session.session import Session
from specoffload.slots import slot as slots

OPTIONS = GenerateOptions(n_predict=8, ignore_eos=True)
SMALL: dict[str, Any] = {"ubatch_size": 64, "batch_size": 128, "ctx_size": 1024}
TWO: dict[str, Any] = {
    "device": "sim,sim",
    "tensor_split": (1.0, 1.0),
    "min_batch": "1",
    "hybrid": "off",
}
DRAFTS = {"--spec-policy": "fixed", "--spec-draft-n-max": 3}
# Full attention, MLA, an indexer, sliding windows, recurrent states, and combinations of them.
PRESETS = (
    *("mistral-large", "deepseek-v3", "deepseek-v3.2", "glm-5", "gpt-oss-20b", "mamba2"),
    *("qwen3next", "qwen35moe", "kimi-k3", "glm-5.3-flash", "minimax-m3", "deepseek-v4-flash"),
)
MTP = ("qwen3next", "deepseek4", "glm4moe", "mimo2")
"""Architectures with layers that draft: hybrid, compressed, full attention, sliding windows."""

PARTS = ("Look at ", png(150, 90, 1), " and ", png(60, 200, 2), " now tell me " * 40)

Ask = Callable[[Session], Answer]


@pytest.fixture(scope="module", autouse=True)
def _libmtmd() -> None:
    """Compile libmtmd before the first test's time limit, if this machine has never done so."""
    image_library()


def preset(name: str, models: Path) -> Path:
    path = models / f"restored-{name}.gguf"
    if path.exists():
        return path
    if name == "mamba2":
        return model(name, models)
    return write_preset(name, path, size="tiny", seed=6, quant="f32")


def text_of(session: Session, n: int = 401) -> list[int]:
    n_vocab = session.target.n_vocab
    return [(7 * i + i * i % 11) % min(n_vocab, 400) for i in range(n)]


def again(session: Session) -> Answer:
    """Ask the same prompt, whose answer is not kept."""
    return together(session, [text_of(session)], OPTIONS)[0]


def check_all_ways(open_: Callable[..., Session], folder: Path, ask: Ask = again) -> int:
    """Ask a prompt again in its live slot, and after each way back. Returns the tokens found."""
    saved, disk = folder / "saved", folder / "disk"
    saved.mkdir()
    ram = {"cache_ram_bytes": 1 << 30, "cache_disk": DiskRoom(1 << 30, disk)}
    with open_(slot_save_path=saved) as session:
        ask(session)
        n_bytes = session.change_slot(0, "save", "x").n_bytes
        assert n_bytes == (saved / "x").stat().st_size
        live = ask(session)
    found: dict[str, Answer] = {}
    with open_(slot_save_path=saved) as session:
        session.change_slot(0, "restore", "x")
        found["from a file"] = ask(session)
        session.change_slot(0, "save", "y")
        session.change_slot(0, "restore", "y")
        found["from a file of a restored slot"] = ask(session)
    with open_(**ram) as session:
        ask(session)
        together(session, [text_of(session)[::-1]], OPTIONS)
        found["from RAM"] = ask(session)
    with open_(**ram) as session:
        found["from the disk"] = ask(session)
    for way, answer in found.items():
        n_least = live.stats.n_cached_tokens
        assert n_least <= answer.stats.n_cached_tokens <= n_least + 1, way
        assert answer.tokens == live.tokens, way
    return live.stats.n_cached_tokens


@pytest.mark.parametrize("kind", PRESETS)
def test_every_memory(kind: str, models: Path, tmp_path: Path) -> None:
    path = preset(kind, models)

    def opened(**more: Any) -> Session:
        return open_slots(path, SPECS["alone"], 1, **SMALL, **more)

    assert check_all_ways(opened, tmp_path) == 400


@pytest.mark.parametrize("kind", ["gpt-oss-20b", "mimo2"])
def test_windows_whose_checkpoints_are_large(
    kind: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have none in a live slot, which can be cut. A loaded state cannot."""
    monkeypatch.setattr(slots, "_SMALL_BYTES", 0)
    own_layers = {"--spec-type": "draft-mtp", **DRAFTS}
    path = write_mtp(models, kind) if kind == "mimo2" else preset(kind, models)
    spec = own_layers if kind == "mimo2" else SPECS["alone"]

    def opened(**more: Any) -> Session:
        return open_slots(path, spec, 1, **SMALL, **more)

    assert check_all_ways(opened, tmp_path) >= 399
    with opened(slot_save_path=tmp_path / "saved") as session:
        again(session)
        assert not session.batcher.slots[0].checkpoints
        session.change_slot(0, "save", "z")
        assert [c.length for c in session.batcher.slots[0].checkpoints] == [400]
        longer = [*text_of(session), *again(session).tokens, 7, 8]
        (answer,) = together(session, [longer], OPTIONS)
        assert answer.stats.n_cached_tokens >= 408, "the slot keeps what it holds"


def test_another_last_message_finds_the_end_of_the_prompt_before(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large windows, whose conversation moves to host memory for a request that runs alone."""
    monkeypatch.setattr(slots, "_SMALL_BYTES", 0)
    path = preset("gpt-oss-20b", models)
    with open_slots(path, SPECS["alone"], 2, cache_ram_bytes=1 << 26, **SMALL) as session:
        first = again(session)
        told = [*text_of(session), *first.tokens]
        together(session, [[*told, 7, 8, 9]], OPTIONS)
        together(session, [[5] * 50], OPTIONS)
        assert [slot.n_held for slot in session.batcher.slots].count(0) == 1, "it has moved"
        (other,) = together(session, [[*told, 11, 12, 13]], OPTIONS)
        assert other.stats.n_cached_tokens == len(text_of(session)) - 1


@pytest.mark.parametrize("kind", MTP)
def test_layers_that_draft(kind: str, models: Path, tmp_path: Path) -> None:
    path = write_mtp(models, kind)

    def opened(**more: Any) -> Session:
        return open_slots(path, {"--spec-type": "draft-mtp", **DRAFTS}, 1, **SMALL, **more)

    assert check_all_ways(opened, tmp_path) >= 399


def test_an_eagle_file(models: Path, tmp_path: Path) -> None:
    target, eagle = pair(models, "qwen3moe")

    def opened(**more: Any) -> Session:
        spec = {"--spec-type": "draft-eagle3", **DRAFTS}
        return open_slots(target, spec, 1, draft=eagle, **SMALL, **more)

    assert check_all_ways(opened, tmp_path) >= 399


@pytest.mark.parametrize("variant", ["dflash", "dspark-conf"])
def test_a_block_draft(variant: str, models: Path, tmp_path: Path) -> None:
    target = write_target(models, "qwen3moe")
    draft = write_block(models, target, variant)

    def opened(**more: Any) -> Session:
        spec = {"--spec-type": spec_type(draft), **DRAFTS}
        return open_slots(target, spec, 1, draft=draft, **SMALL, **more)

    assert check_all_ways(opened, tmp_path) >= 399


@pytest.mark.parametrize("kind", ["gemma3", "qwen3.5-35b-a3b"])
def test_prompts_with_images(kind: str, models: Path, tmp_path: Path) -> None:
    path, projector = model_with_projector(kind, models)

    def opened(**more: Any) -> Session:
        size = {"ctx_size": 1024, "ubatch_size": 512}
        return open_slots(path, SPECS["alone"], 1, mmproj=projector, **size, **more)

    def ask(session: Session) -> Answer:
        prompt = session.image_prompt(PARTS, add_special=True)
        return together(session, [prompt], OPTIONS)[0]

    assert check_all_ways(opened, tmp_path, ask) > 200


@pytest.mark.parametrize("kind", ["qwen35moe", "gpt-oss-20b"])
def test_several_devices(kind: str, models: Path, tmp_path: Path) -> None:
    path = preset(kind, models)

    def opened(**more: Any) -> Session:
        return open_slots(path, SPECS["alone"], 1, **{**SMALL, **TWO}, **more)

    assert check_all_ways(opened, tmp_path) == 400


def test_checkpoints_in_the_middle_come_back_with_what_asked_for_them(
    models: Path, tmp_path: Path
) -> None:
    """Those that requests asked for are still dropped last."""
    path = preset("qwen35moe", models)
    asked = GenerateOptions(n_predict=2, ignore_eos=True, keep_at=(150,))

    def opened(n: int = 3) -> Session:
        return open_slots(
            path, SPECS["alone"], 1, slot_save_path=tmp_path, ctx_checkpoints=n, **SMALL
        )

    def lengths(session: Session) -> list[int]:
        return [c.length for c in session.batcher.slots[0].checkpoints]

    with opened() as session:
        together(session, [text_of(session)], asked)
        together(session, [text_of(session, 600)], OPTIONS)
        assert lengths(session) == [150, 400, 599]
        session.change_slot(0, "save", "x")
    with opened() as session:
        session.change_slot(0, "restore", "x")
        together(session, [[*text_of(session, 600), *text_of(session, 60)]], OPTIONS)
        assert lengths(session)[0] == 150
        assert lengths(session)[-1] == 659
    with opened(1) as session:
        restored = session.change_slot(0, "restore", "x")
        assert restored.n_tokens > 600
        assert lengths(session) == [restored.n_tokens], "fewer are kept than the file has"


def test_a_file_of_an_earlier_version_is_read_without_checkpoints(
    models: Path, tmp_path: Path
) -> None:
    path = preset("qwen35moe", models)
    with open_slots(path, SPECS["alone"], 1, slot_save_path=tmp_path, **SMALL) as session:
        first = again(session)
        sequences = session.target.sequences
        n_tokens = session.change_slot(0, "save", "new").n_tokens
        raw = (tmp_path / "new").read_bytes()
        named = json.loads(raw[-16 - int.from_bytes(raw[-16:-12], "little") : -16])
        start = 12 + 4 * n_tokens
        state = raw[start : start + len(sequences.save(0)) - 8]
        text = json.dumps(named["made_by"]).encode()
        old = raw[:start] + state + text + struct.pack("<I8s", len(text), b"specoff2")
        (tmp_path / "old").write_bytes(old + crc32(old).to_bytes(4, "little"))
        assert session.change_slot(0, "restore", "old").n_tokens == n_tokens
        longer = [*text_of(session), *first.tokens, 5]
        assert together(session, [longer], OPTIONS)[0].stats.n_cached_tokens == n_tokens
        for key, value in (("length", n_tokens + 1), ("state_bytes", len(raw)), ("length", 0)):
            changed = json.loads(json.dumps(named))
            changed["checkpoints"][0][key] = value
            text = json.dumps(changed).encode()
            body = raw[: -16 - len(json.dumps(named, separators=(",", ":")).encode())]
            new = body + text + struct.pack("<I8s", len(text), b"specoff3")
            (tmp_path / "changed").write_bytes(new + crc32(new).to_bytes(4, "little"))
            with pytest.raises(BadRequest, match="its checkpoints do not fit its tokens"):
                session.change_slot(0, "restore", "changed")
        assert session.slots()[0].n_tokens > n_tokens, "what cannot be read changes nothing"


def test_a_checkpoint_that_the_library_does_not_take_is_evaluated_again(
    models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = preset("qwen35moe", models)
    with open_slots(path, SPECS["alone"], 1, **SMALL) as session:
        wanted = again(session)
        (slot,) = session.batcher.slots
        slot._checkpoints = [replace(c, state=c.state[:-50]) for c in slot.checkpoints]
        got = again(session)
        assert (got.tokens, got.stats.n_cached_tokens) == (wanted.tokens, 0)
        assert "a checkpoint at 400 tokens is dropped, and evaluated again" in caplog.text
        assert again(session).stats.n_cached_tokens == 400
