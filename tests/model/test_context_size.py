"""A start without --ctx-size takes a context of its own choice, and says which."""

from __future__ import annotations

from pathlib import Path

import pytest
from resolved import config_of

from lab.synth.published import published_facts
from offload.remote.address import Address
from offload.store.store import Room
from specoffload import context_size
from specoffload.config.options import PlanOptions
from specoffload.context_size import with_context

GIB = 1 << 30


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The header of Qwen3-30B-A3B, 17 GiB, without its weights."""
    return published_facts("Qwen3-30B-A3B", tmp_path_factory.mktemp("published")).path


def test_the_demo_pair_gets_all_of_its_context() -> None:
    found = with_context(config_of(device="cpu"))
    assert found.ctx_size == 2048
    assert found.reasons[0].startswith("context: 2,048 tokens")


@pytest.mark.parametrize("ctx_size", [0, 512])
def test_a_context_that_was_asked_for_is_kept(ctx_size: int) -> None:
    config = config_of(device="cpu", ctx_size=ctx_size)
    assert with_context(config) is config


def test_a_context_in_ram_takes_a_part_of_what_the_weights_leave(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(model=qwen, device="cpu")
    sizes = []
    for n_gib in (6, 20, 30, 200):  # with 6 GiB, experts are read from the disk
        room = Room(n_gib * GIB, "a test")
        monkeypatch.setattr(context_size, "room_now", lambda room=room: room)
        n_ctx = with_context(config).ctx_size
        assert n_ctx is not None
        sizes.append(n_ctx)
    assert sizes[1:] == sorted(sizes[1:])
    assert sizes[1] < sizes[2] < sizes[3] == 40960
    assert sizes[0] < 40960


def test_a_context_beside_workers_says_why_it_is_small_and_what_to_give(qwen: Path) -> None:
    workers = (Address("127.0.0.1", 1),)
    found = with_context(config_of(model=qwen, workers=workers))
    assert found.ctx_size == 4096
    why = found.reasons[0]
    assert why.startswith("context: 4,096 tokens, because --rpc is used")
    assert "--ctx-size N takes another one, up to the 40,960 that" in why
    small = with_context(config_of(workers=workers))
    assert small.ctx_size == 2048
    assert small.reasons[0] == "context: 2,048 tokens, all that the model was trained for"


def test_a_plan_takes_the_context_that_its_gpu_has_room_for(tmp_path: Path) -> None:
    config = config_of(model=published_facts("Qwen3-235B-A22B", tmp_path).path)
    small, large = (
        with_context(config, PlanOptions(hardware=name)) for name in ("rtx-3060-ddr4", "h100")
    )
    assert small.ctx_size is not None
    assert large.ctx_size is not None
    assert 4096 <= small.ctx_size < large.ctx_size
    assert f"context: {small.ctx_size:,} tokens of the" in small.reasons[0]
