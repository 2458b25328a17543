"""A start without --ctx-size takes a context of its own choice, and says which."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import context_of
from resolved import config_of

from lab.plans import on_one_gpu
from lab.synth.published import published_facts
from offload import probe as probing
from offload.errors import DoesNotFit, WorkerUnavailable
from offload.plan.context_choice import RequestSeconds, choose_context
from offload.plan.placement import PlanRequest
from offload.plan.sharing import UBATCHES
from offload.remote.address import Address
from offload.remote.offers import Offer
from offload.store.store import HostRoom
from offload.times.context_memory import ContextOptions, context_memory
from specoffload.config.hardware import PRESETS
from specoffload.config.options import PlanOptions
from specoffload.opening import planner
from specoffload.opening.context_size import (
    ContextSize,
    chosen_context,
    planner_of,
    request_seconds,
)

GIB = 1 << 30


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The header of Qwen3-30B-A3B, 17 GiB, without its weights."""
    return published_facts("Qwen3-30B-A3B", tmp_path_factory.mktemp("published")).path


def test_the_demo_pair_gets_all_of_its_context() -> None:
    found = context_of(config_of(device="cpu"))
    assert found.n_ctx == 2048
    assert found.reason.startswith("context: 2,048 tokens")


@pytest.mark.parametrize("ctx_size", [0, 512])
def test_a_context_that_was_asked_for_is_kept(ctx_size: int) -> None:
    config = config_of(device="cpu", ctx_size=ctx_size)
    assert context_of(config) == ContextSize(ctx_size)


def test_a_context_in_ram_takes_a_part_of_what_the_weights_leave(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(model=qwen, device="cpu")
    sizes = []
    for n_gib in (6, 20, 30, 200):  # with 6 GiB, experts are read from the disk
        room = HostRoom(n_gib * GIB, "a test")
        monkeypatch.setattr(planner, "room_now", lambda room=room: room)
        n_ctx = context_of(config).n_ctx
        sizes.append(n_ctx)
    assert sizes[1:] == sorted(sizes[1:])
    assert sizes[1] < sizes[2] < sizes[3] == 40960
    assert sizes[0] < 40960


def test_a_context_beside_experts_on_the_disk_leaves_room_for_a_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start with 22 GiB once chose a context for DeepSeek-R1 that it then refused."""
    facts = published_facts("DeepSeek-R1", tmp_path)
    room = HostRoom(22 * GIB, "a test")
    monkeypatch.setattr(planner, "room_now", lambda: room)
    n_ctx = context_of(config_of(model=facts.path, device="cpu")).n_ctx
    context_bytes = context_memory(facts, ContextOptions(n_ctx)).total_bytes
    dense_bytes, layer_bytes = facts.size_bytes - facts.expert_bytes, facts.expert_bytes / 58
    assert context_bytes + dense_bytes + layer_bytes < room.available_bytes
    assert n_ctx >= 4096


@pytest.mark.parametrize("device", ["RPC0", "auto"])
def test_a_context_beside_a_worker_depends_on_its_memory(
    device: str, qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, n_asked = HostRoom(64 * GIB, "a test"), 0
    for module in (probing, planner):
        monkeypatch.setattr(module, "room_now", lambda: here)
    sizes = []
    for n_gib in (12, 24):

        def offers(*args: object, n_gib: int = n_gib, **flags: bool) -> list[Offer]:
            nonlocal n_asked
            n_asked += 1
            return [Offer(Address("127.0.0.1", 1), n_gib * GIB, None)]

        monkeypatch.setattr(probing, "offers_of", offers)
        workers = (Address("127.0.0.1", 1),)
        found = context_of(config_of(model=qwen, device=device, workers=workers))
        assert found.reason.startswith(f"context: {found.n_ctx:,} tokens")
        sizes.append(found.n_ctx)
    assert 4096 <= sizes[0] < sizes[1] == 40960
    assert n_asked == 2, "a worker is asked once for all contexts"


def test_a_worker_that_is_not_there_is_said_before_anything_is_opened(qwen: Path) -> None:
    with pytest.raises(WorkerUnavailable, match="the worker at 127.0.0.1:1 cannot be reached"):
        context_of(config_of(model=qwen, workers=(Address("127.0.0.1", 1),)))


@pytest.mark.parametrize("title", ["DeepSeek-R1", "Qwen3-235B-A22B"])
def test_a_plan_takes_the_context_that_its_gpu_has_room_for(title: str, tmp_path: Path) -> None:
    config = config_of(model=published_facts(title, tmp_path).path)
    small, large = (
        chosen_context(config, planner_of(config, PlanOptions(hardware=name)))
        for name in ("rtx-3060-ddr4", "h100")
    )
    assert 4096 <= small.n_ctx < large.n_ctx
    assert f"context: {small.n_ctx:,} tokens of the" in small.reason


# Smaller cards are left out: a little more memory there brings the ring for prompts, or keeps dense
# weights resident. Such a card may get a shorter context for much faster prompts.
CARDS_GIB = (16, 24, 32, 48, 64, 80, 96, 128, 141)


@pytest.mark.parametrize("hardware", ["rtx-4090-ddr5", "h100"])
def test_a_larger_card_never_gets_a_shorter_context(hardware: str, tmp_path: Path) -> None:
    """The H100 once got 16,384 tokens for this model, and slower cards of 48 GiB got 40,960."""
    facts, machine = published_facts("Qwen3-235B-A22B", tmp_path), PRESETS[hardware].machine

    def n_ctx(gib: int) -> int:
        def request_s(n_ctx: int) -> RequestSeconds | None:
            request = PlanRequest(
                (gib - 1) * GIB, context=ContextOptions(n_ctx), most_ubatch=UBATCHES[-1],
                n_cpu_moe="fit", plan_for_splits=True, machine=machine,
            )  # fmt: skip
            try:
                return request_seconds(on_one_gpu(facts, request))
            except DoesNotFit:
                return None

        return choose_context(40960, request_s).n_ctx

    sizes = [n_ctx(gib) for gib in CARDS_GIB]
    assert sizes == sorted(sizes)
    assert sizes[-1] == 40960
