"""Sessions write the same texts whether or not the whole model fits memory.

The tests have 64 requests at once, drafts, kept prompts, and memory that the kernel counts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from budgets import budget
from lossless_parts import let_batches_be_cheap
from resolved import config_of
from test_slots import FIVE, Answer, open_slots, together

from lab.options import Streaming
from lab.synth import write_preset
from lab.synth.mtp import write_mtp
from offload.ggml.memory import HostRange
from offload.model_file import read_facts
from offload.store.reading import ReadCounters
from specoffload import kept_machine
from specoffload.cpu_load import Load
from specoffload.generation.generation import GenerateOptions
from specoffload.kept import KeptFile
from specoffload.session.session import Session

N_STREAMS = 64
GENERATED = GenerateOptions(n_predict=6, ignore_eos=True)


@pytest.fixture(scope="module")
def mixture(models: Path) -> Path:
    return write_preset(
        "qwen3-30b-a3b", models / "disk-session.gguf", size="tiny", seed=4, n_expert=64,
        n_ff_exp=256, quant="f32", vocab="bytes",
    )  # fmt: skip


@pytest.fixture
def _cheap_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    let_batches_be_cheap(monkeypatch)


def opened(
    path: Path, spec: str, device: str, ram_bytes: int | None, parallel: int, **more: object
) -> Session:
    given: dict[str, object] = {"--spec-type": spec} | ({} if spec == "none" else FIVE)
    if device == "sim":
        # The layers that draft stay on the device.
        drafting = read_facts(path).size_bytes // 4 if spec == "mtp" else 0
        more["vram_bytes"] = budget(path, Streaming(), "least") + drafting
    if spec == "draft":
        more["draft"] = path
    return open_slots(
        path, given, parallel, device=device, ram_bytes=ram_bytes, min_batch="1", **more
    )


def resident_bytes(session: Session) -> int:
    store = session.target.opened.weights.store
    assert store is not None
    assert store.memory is not None
    return HostRange.of_placed(store.memory).resident_bytes()


def texts(n: int) -> list[list[int]]:
    """Return prompts of repeating tokens, from which a drafter can draft."""
    return [[(31 * n_text + 7 * (i % 4)) % 250 for i in range(12 + n_text % 5)]
            for n_text in range(n)]  # fmt: skip


def tokens(answers: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


@pytest.mark.usefixtures("_cheap_batches")
@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("spec", ["none", "suffix", "draft"])
def test_streams_write_the_same_within_the_memory_they_may_take(
    mixture: Path, device: str, spec: str
) -> None:
    """The same prompts are sent twice, so that the second requests find them kept."""
    n = N_STREAMS if spec == "none" else 8
    ram_bytes = read_facts(mixture).expert_bytes // 2
    found = []
    for limit in (None, ram_bytes):
        # All texts fit and none leaves, so how long a move to RAM takes decides nothing.
        more = {"cache_ram_bytes": 64 << 20, "ctx_size": 64 * n, "cache_idle_slots": False}
        with opened(mixture, spec, device, limit, n, **more) as session:
            first = together(session, texts(n), GENERATED)
            again = together(session, texts(n), GENERATED)
            found.append(tokens(first) + tokens(again))
            assert sum(answer.stats.n_cached_tokens for answer in again) > n
            assert session.target.reads_experts == (limit is not None)
            if spec != "none":
                assert sum(answer.stats.n_drafted for answer in first + again) > 0
            if limit is not None:
                assert session.target.disk_counters()["experts_read"] > 0
                assert resident_bytes(session) <= 1.03 * limit
    assert found[0] == found[1]


@pytest.mark.usefixtures("_cheap_batches")
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_own_layers_draft_for_a_model_on_the_disk(models: Path, device: str) -> None:
    path = write_mtp(models, "glm4moe")
    ram_bytes = read_facts(path).expert_bytes * 2 // 3
    found = []
    for limit in (None, ram_bytes):
        with opened(path, "mtp", device, limit, 2) as session:
            assert session.target.opened.row_draft is not None
            answers = together(session, texts(4), GENERATED)
            found.append(tokens(answers))
            assert sum(answer.stats.n_drafted for answer in answers) > 0
            assert session.target.reads_experts == (limit is not None)
    assert found[0] == found[1]


def test_measured_costs_of_batches_hold_the_disks_price(mixture: Path, tmp_path: Path) -> None:
    """The lengths of drafts depend on these costs (tests/pure/plan/test_disk_use.py)."""
    costs = []
    for disk in ("", ":disk=100MB/s"):
        ram_bytes = read_facts(mixture).expert_bytes // 2
        vram_bytes = budget(mixture, Streaming(), "least")
        config = config_of(
            model=mixture, device=f"sim{disk}", threads=1, ctx_size=512, ram_bytes=ram_bytes,
            vram_bytes=vram_bytes, spec_given={"--spec-type": "suffix"},
        )  # fmt: skip
        folder = tmp_path / disk.replace("/", "")
        with Session(replace(config, spec=replace(config.spec, profile_dir=folder))) as session:
            assert session.costs.drafts.profile is not None
            costs.append(session.costs.drafts.profile.step_s)
    fast, slow = costs
    # A median, because other programs may slow one measurement.
    assert median(slow[n] / fast[n] for n in range(16)) > 1.2


def test_a_session_adds_what_it_saw_of_the_disk(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start measures each number of reads once. A session sees one of them."""
    monkeypatch.setattr(Load, "is_busy", False)
    monkeypatch.setattr(kept_machine, "disk_speed", lambda *_: 1e9)
    asked: list[ReadCounters] = []

    def seen_rate(counters: ReadCounters) -> tuple[int, float]:
        asked.append(counters)
        return 4, 2e9

    monkeypatch.setattr(kept_machine, "seen_rate", seen_rate)
    config = config_of(
        model=mixture, device="cpu", threads=1, ctx_size=512,
        ram_bytes=read_facts(mixture).expert_bytes // 2, spec_given={"--spec-type": "none"},
    )  # fmt: skip
    with Session(replace(config, spec=replace(config.spec, profile_dir=tmp_path))) as session:
        together(session, texts(1), GENERATED)
        assert not asked
    (counters,) = asked
    assert counters.read_bytes > 0
    assert counters.under_way_s >= 0.99 * counters.busy_s > 0
    (disk,) = KeptFile(tmp_path).load()[0].disks.values()
    assert {(rate.values, rate.seen) for rate in disk.rates.values()} == {((1e9,), (2e9,))}
