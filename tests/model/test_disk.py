"""Models whose experts do not fit memory give the bits of the model that is wholly in memory.

Pages of experts that are not in memory hold NaN. So a product with an expert that was not read
would change the logits.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from budgets import ON_GPU, budget, limited
from player_calls import Compute, computing, host_graphs
from test_hybrid import BATCHES, PRESETS, Rows

from lab.held import Decodes, compared, decode, slow_layers
from lab.options import Streaming, engine_options
from lab.synth import write_preset
from lab.synth.routing import drawn_text
from offload import probe as probing
from offload.engine import Engine, EngineOptions, open_engine
from offload.errors import DeviceFailed, DoesNotFit, ModelChanged
from offload.ggml.memory import HostRange
from offload.model import ModelFacts
from offload.model_file import read_facts
from offload.plan import decision, host
from offload.plan.found import Found, FoundDevice, Kind, Wanted
from offload.plan.host import (
    DRAFT_MODEL,
    ExpertLimits,
    LaterBytes,
    later_bytes,
    limits_of_experts,
)
from offload.plan.placement import Plan
from offload.routing.next_experts import read_routers
from offload.schedule.division import SplitCosts
from offload.schedule.splitter import ByCosts, Splitter, all_on_device, stay
from offload.store import expert_memory
from offload.store import store as store_module
from offload.store.expert_memory import ExpertMemory
from offload.store.store import HostRoom, StoreOptions
from offload.stream.play import GraphPlayer
from offload.times.context_memory import context_memory
from offload.times.min_batch import NEVER, MinBatch
from offload.units import parse_rate

# With these costs the CPU computes experts from the disk when they arrive, and the link copies
# others.
COSTS = SplitCosts(np.array([0.0, 1e-9, 2e-9]), np.array([0.0, 1e-9, 2e-9]), 1e-9, 0.0, 1e-9)
SPLITS: dict[str, Splitter] = {
    "stay": stay,
    "all-device": all_on_device,
    "by-costs": ByCosts(COSTS),
}


def poison(pages: HostRange) -> None:
    pages.array()[:] = 0xFF


@pytest.fixture(autouse=True, scope="module")
def _moved_pages_are_nan() -> Iterator[None]:
    real = HostRange.move_to

    def move_to(self: HostRange, target: HostRange) -> None:
        real(self, target)
        poison(target)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(HostRange, "move_to", move_to)
        yield


def options(
    device: str, ram_bytes: int | None, streaming: Streaming, n_ubatch: int = 64
) -> EngineOptions:
    return engine_options(
        device=device,
        streaming=streaming,
        ram_bytes=ram_bytes,
        store=StoreOptions(leave=poison),
        min_batch=MinBatch(NEVER, NEVER),
        n_ctx=512,
        n_ubatch=n_ubatch,
        most_ubatch=n_ubatch,
        n_outputs=2 * n_ubatch,
        n_threads=1,
        n_threads_batch=1,
    )


def logits(engine: Engine, batches: Sequence[int] = BATCHES) -> Rows:
    return np.concatenate(
        [
            engine.sequences.extend(0, [(13 * i + 5 * n) % engine.n_vocab for i in range(n)])
            for n in batches
        ]
    )


def experts_of(engine: Engine) -> ExpertMemory:
    assert engine.opened.weights.store is not None
    assert engine.opened.weights.store.experts is not None
    return engine.opened.weights.store.experts


def least_ram(path: Path, device: str, streaming: Streaming) -> int:
    """The least bytes of memory with which the model opens."""
    with pytest.raises(DoesNotFit, match="raise --ram") as refused:
        open_engine(path, options(device, 1, streaming))
    assert refused.value.least_bytes is not None
    return refused.value.least_bytes


@pytest.fixture(scope="module", params=PRESETS)
def model(request: pytest.FixtureRequest, models: Path) -> Path:
    path = models / f"disk-{request.param}.gguf"
    return write_preset(PRESETS[request.param], path, size="tiny", seed=6)


@pytest.fixture(scope="module")
def whole(model: Path) -> Rows:
    """Logits of the model wholly in memory."""
    with open_engine(model, options("sim", None, Streaming())) as engine:
        assert engine.opened.weights.store is not None
        assert engine.opened.weights.store.experts is None
        return logits(engine)


def check(model: Path, whole: Rows, device: str, more: Streaming) -> None:
    """Compare with memory for nearly all, 60 %, 30 % and the least share of the experts."""
    most, least = read_facts(model).expert_bytes, least_ram(model, device, more)
    for ram_bytes in dict.fromkeys(max(least, int(most * s)) for s in (0.99, 0.6, 0.3, 0.0)):
        with open_engine(model, options(device, ram_bytes, more)) as engine:
            assert np.array_equal(logits(engine), whole)
            memory = experts_of(engine)
            assert memory.used_bytes <= memory.capacity_bytes <= ram_bytes
            assert memory.counters.reads.read_bytes > 0


def test_libllamas_own_products(model: Path, whole: Rows) -> None:
    check(model, whole, "cpu", Streaming())


@pytest.mark.parametrize("slots", ["all", "half", "least"])
def test_streamed_layers(model: Path, whole: Rows, slots: str) -> None:
    streaming = Streaming()
    if slots != "all":
        streaming = limited(model, streaming, slots)
    check(model, whole, "sim", streaming)


@pytest.fixture
def n_late(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the CPU waited for experts that it computes when they arrive."""
    times, real = [0], GraphPlayer._wait_late

    def wait_late(self: GraphPlayer, *arguments: Any) -> int:
        times[0] += 1
        return real(self, *arguments)

    monkeypatch.setattr(GraphPlayer, "_wait_late", wait_late)
    return times


@pytest.mark.parametrize("how", SPLITS)
def test_split_layers(model: Path, whole: Rows, how: str, n_late: list[int]) -> None:
    streaming = Streaming(hybrid=True, splitter=SPLITS[how])
    check(model, whole, "sim", limited(model, streaming, "half"))
    assert (n_late[0] > 0) == (how != "all-device")


@pytest.mark.parametrize("how", ["passes", *SPLITS])
def test_prompts_in_passes(model: Path, how: str) -> None:
    """Passes wait for experts from the disk. The CPU takes no part, whatever the splitter."""
    batches, n_ubatch = (100, 3, 1, 200), 128
    with open_engine(model, options("sim", None, Streaming(), n_ubatch)) as engine:
        whole = logits(engine, batches)
    streaming = limited(model, Streaming(passes="on", n_gpu_layers=ON_GPU), "least")
    if how in SPLITS:
        streaming = streaming | Streaming(hybrid=True, splitter=SPLITS[how])
    least = least_ram(model, "sim", streaming)
    for ram_bytes in (least, max(least, half_of(model))):
        with open_engine(model, options("sim", ram_bytes, streaming, n_ubatch)) as engine:
            assert np.array_equal(logits(engine, batches), whole)
            assert experts_of(engine).counters.reads.read_bytes > 0
            assert engine.counters().passes > 0


# -- one model -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one(models: Path) -> Path:
    path = models / "disk-one.gguf"
    return write_preset("qwen3-30b-a3b", path, size="tiny", seed=4, n_expert=64, n_ff_exp=256)


@pytest.fixture(scope="module")
def skewed(models: Path) -> Path:
    """A deep model whose routers follow the text, as those of trained models do."""
    path = models / "disk-skewed.gguf"
    return write_preset(
        "qwen3-30b-a3b", path, size="tiny", seed=4, n_layer=12, n_expert=64, n_expert_used=4,
        n_embd=256, n_vocab=1024, n_ff_exp=256, routing="skewed",
    )  # fmt: skip


def half_of(path: Path) -> int:
    return read_facts(path).expert_bytes // 2


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_several_sequences(one: Path, device: str) -> None:
    def rows(ram_bytes: int | None) -> Rows:
        chosen = engine_options(options(device, ram_bytes, Streaming()), n_sequences=3)
        found = []
        with open_engine(one, chosen) as engine:
            assert (ram_bytes is None) == (
                engine.opened.weights.store is None or engine.opened.weights.store.experts is None
            )
            for step in range(4):
                found += [
                    engine.sequences.extend(s, [(7 * s + 3 * step + i) % 50 for i in range(1 + s)])
                    for s in range(3)
                ]
            engine.sequences.extend(2, [1, 2, 3], n_logits=0)  # the last layer has no rows
            engine.sequences.rewind(1, 3)
            found.append(engine.sequences.extend(1, [5, 6]))
        return np.concatenate(found)

    assert np.array_equal(rows(half_of(one)), rows(None))


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_model_larger_than_free_memory_opens_without_a_flag(
    one: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_bytes, needed_bytes = [1 << 40], [0]

    def limits(
        facts: ModelFacts, plan: Plan, found: Found, wanted: Wanted, later: LaterBytes
    ) -> ExpertLimits | None:
        is_sim = found.devices[0].kind is Kind.SIM
        needed_bytes[0] = plan.streamed_bytes + plan.resident_bytes + plan.slot_bytes * is_sim
        needed_bytes[0] += sum(later(512).values())
        return limits_of_experts(facts, plan, found, wanted, later)

    monkeypatch.setattr(decision, "limits_of_experts", limits)
    for module in (store_module, probing):
        monkeypatch.setattr(module, "room_now", lambda: HostRoom(free_bytes[0], "free memory"))
    # The margin of real machines is larger than this model.
    monkeypatch.setattr(host, "_LEAST_MARGIN_BYTES", 0)
    monkeypatch.setattr(host, "_MARGIN_PART", 1 << 20)
    streaming = Streaming(vram_bytes=budget(one, Streaming(), "least"))
    chosen = options(device, None, streaming if device == "sim" else Streaming())
    chosen = engine_options(chosen, n_ctx=256, n_outputs=64)
    with open_engine(one, chosen) as engine:
        assert engine.opened.weights.store is None or engine.opened.weights.store.experts is None
        whole = engine.sequences.extend(0, [1, 2, 3])
    free_bytes[0] = needed_bytes[0] - half_of(one) // 2
    with open_engine(one, chosen) as engine:
        memory = experts_of(engine)
        assert memory.capacity_bytes < memory.all_bytes
        assert np.array_equal(engine.sequences.extend(0, [1, 2, 3]), whole)
        assert memory.counters.reads.read_bytes > 0


def test_memory_is_left_for_a_draft_model_and_for_large_batches(one: Path) -> None:
    later = []
    for reserve_bytes in (0, 8 << 20):
        streaming = Streaming(reserve_bytes=reserve_bytes)
        chosen = engine_options(
            options("cpu", half_of(one), streaming), most_ubatch=2048, n_ctx=2048
        )
        with open_engine(one, chosen) as engine:
            limits = engine.start.store.expert_limits
            assert limits is not None
            assert engine.layout.context.n_ubatch == 2048
            later.append([sum(limits.later_bytes(n).values()) for n in (512, 2048)])
    assert later[1] == [n_bytes + (8 << 20) for n_bytes in later[0]]
    compute_bytes = context_memory(read_facts(one), chosen.wanted.context).compute_bytes
    assert later[0][1] - later[0][0] > compute_bytes


def test_memory_is_left_for_routers_that_guess(one: Path) -> None:
    later_bytes = []
    for prefetch in (False, True):
        streaming = Streaming(prefetch=prefetch)
        with open_engine(one, options("cpu", half_of(one), streaming)) as engine:
            limits = engine.start.store.expert_limits
            assert limits is not None
            later_bytes.append(sum(limits.later_bytes(512).values()))
    routers = read_routers(read_facts(one)).values()
    assert later_bytes[1] - later_bytes[0] == sum(r.weights.nbytes for r in routers) > 0


@pytest.mark.parametrize(
    ("on_gpu", "draft_device", "in_ram"),
    [(True, None, False), (True, "cpu", True), (False, None, True), (False, "cpu", True)],
)
def test_a_draft_model_is_in_the_memory_of_its_own_device(
    one: Path, on_gpu: bool, draft_device: str | None, in_ram: bool
) -> None:
    streaming = Streaming(reserve_bytes=100, draft_device=draft_device)
    wanted = engine_options(streaming=streaming).wanted
    device = FoundDevice("one", Kind.GPU if on_gpu else Kind.CPU)
    found = Found((device,), draft_in_ram=draft_device == "cpu")
    later = later_bytes(read_facts(one), found, wanted, wanted.context, loads_mtp=False)
    assert later(512)[DRAFT_MODEL] == 100 * in_ram


@pytest.mark.parametrize("kind", [Kind.GPU, Kind.SIM])
def test_pinned_memory_for_inputs_is_left_where_a_gpu_computes(one: Path, kind: Kind) -> None:
    wanted = engine_options().wanted
    found, taken = Found((FoundDevice("one", kind),)), []
    for n_ctx, n_ubatch in ((8192, 512), (8192, 1024), (16384, 1024)):
        context = replace(wanted.context, n_ctx=n_ctx, n_ubatch=n_ubatch)
        later = later_bytes(read_facts(one), found, wanted, context, loads_mtp=False)
        taken.append(later(512).get(host.INPUTS, 0))
        mask_bytes = 4 * n_ctx * n_ubatch
        assert (taken[-1] >= mask_bytes) == (kind is Kind.GPU)
    if kind is Kind.GPU:
        assert taken[1] == 2 * taken[0]
        assert taken[2] - taken[1] == 4 * 8192 * 1024, "a mask of twice the width"


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_memory_stays_within_the_limit(one: Path, device: str) -> None:
    """Through long prompts and many sequences. The pages are counted by the kernel."""
    chosen = options(device, half_of(one), Streaming())
    store = replace(chosen.store, leave=HostRange.give_back)
    with open_engine(one, engine_options(chosen, store=store, n_sequences=8, n_ctx=2048)) as engine:
        assert engine.opened.weights.store is not None
        assert engine.opened.weights.store.memory is not None
        pages = HostRange.of_placed(engine.opened.weights.store.memory)
        for step in range(3):
            for s in range(8):
                engine.sequences.extend(s, [(step + s * 31 + 7 * i) % 250 for i in range(64)])
                assert pages.resident_bytes() <= 1.03 * half_of(one)
        assert experts_of(engine).counters.reads.read_bytes > 2 * half_of(one)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_experts_that_were_used_most_are_read_before_the_first_decode(
    one: Path, device: str
) -> None:
    tokens, uses = [(11 * i) % 50 for i in range(9)], {0: [5] * 64, 1: [3] * 20 + [0] * 44}
    with open_engine(one, options(device, half_of(one), Streaming())) as engine:
        expected = engine.sequences.extend(0, tokens)
    with open_engine(one, options(device, half_of(one), Streaming())) as engine:
        for _ in engine.fill_slots(uses):
            pass
        filled = engine.disk_counters()
        assert filled["experts_filled"] == 84 or device == "sim"
        assert engine.counters().n_filled == (0 if device == "cpu" else 84)
        assert filled["experts_filled"] + engine.counters().n_filled >= 84
        assert np.array_equal(engine.sequences.extend(0, tokens), expected)


@pytest.mark.parametrize("hybrid", [None, False, True])
@pytest.mark.parametrize("guesses", [True, False])
def test_experts_that_a_token_chose_before_are_read_ahead(
    one: Path, guesses: bool, hybrid: bool | None
) -> None:
    """On the CPU alone (None), and on a device with and without split layers."""
    streaming = Streaming(prefetch=guesses, record_routing=True)
    tokens = [(17 * i) % 40 for i in range(40)]
    device = "cpu" if hybrid is None else "sim"
    if hybrid is not None:
        vram_bytes = budget(one, streaming, "least")
        streaming = streaming | Streaming(hybrid=hybrid, vram_bytes=vram_bytes)
    with open_engine(one, options(device, half_of(one), streaming)) as engine:
        engine.opened.routing.is_on = True
        for _ in range(2):
            for token in tokens:
                engine.sequences.extend(0, [token])
        counters = engine.disk_counters()
        assert (counters["experts_read_ahead"] > 0) == guesses
        assert counters["experts_read"] > 0
        assert engine.opened.routing.n_tokens == 2 * len(tokens)


@pytest.mark.parametrize("hybrid", [None, False, True])
def test_experts_of_new_tokens_are_read_ahead_by_the_next_routers(
    skewed: Path, hybrid: bool | None
) -> None:
    """Most of them are used. The logits are those of the model wholly in memory."""
    streaming = Streaming(hybrid=bool(hybrid))
    tokens = list(dict.fromkeys(drawn_text(600, 60)))
    device = "cpu" if hybrid is None else "sim"
    with open_engine(skewed, options(device, None, Streaming())) as engine:
        whole = [engine.sequences.extend(0, [token]) for token in tokens]
    if hybrid is not None:
        streaming = streaming | Streaming(vram_bytes=budget(skewed, streaming, "least"))
    with open_engine(skewed, options(device, half_of(skewed) // 2, streaming)) as engine:
        held = [engine.sequences.extend(0, [token]) for token in tokens]
        counters = engine.disk_counters()
    assert np.array_equal(held, whole)
    assert counters["experts_read_ahead"] > 0.6 * counters["experts_read"]
    assert counters["experts_unused"] < 0.5 * counters["experts_read_ahead"]


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_model_that_fits_is_not_read_while_it_runs(one: Path, device: str) -> None:
    with open_engine(one, options(device, 1 << 40, Streaming())) as engine:
        assert engine.opened.weights.store is None or engine.opened.weights.store.experts is None
        assert engine.opened.weights.host is None or engine.opened.weights.host.experts is None


@pytest.fixture
def copied(one: Path, tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "copy.gguf"
    path.write_bytes(one.read_bytes())
    return path


def decode_others(engine: Engine) -> None:
    """Decode tokens that need experts that are not in memory."""
    for step in range(40):
        engine.sequences.extend(0, [(step * 29 + 7 * i) % 250 for i in range(5)])


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_read_error_ends_the_request_and_the_next_one_is_right(
    one: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [(11 * i) % 50 for i in range(9)]
    real, is_broken = os.preadv, [False]

    def preadv(descriptor: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if is_broken[0]:
            raise OSError(5, "Input/output error")
        return real(descriptor, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", preadv)
    with open_engine(one, options(device, half_of(one), Streaming())) as engine:
        expected = engine.sequences.extend(0, tokens)
        engine.sequences.rewind(0, 0)
        for step in range(12):  # other experts take the place of those
            engine.sequences.extend(0, [(step * 17 + i) % 200 for i in range(5)])
        engine.sequences.rewind(0, 0)
        is_broken[0] = True
        with pytest.raises(DeviceFailed, match="Input/output error"):
            decode_others(engine)
        is_broken[0] = False
        engine.sequences.rewind(0, 0)
        assert np.array_equal(engine.sequences.extend(0, tokens), expected)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_file_cut_short_while_the_model_runs_is_an_error(copied: Path, device: str) -> None:
    with open_engine(copied, options(device, half_of(copied), Streaming())) as engine:
        engine.sequences.extend(0, [1, 2, 3])
        facts = read_facts(copied)
        end = max(p.entry.offset_bytes for p in facts.weights.values() if "_exps" in p.entry.name)
        if device == "cpu":  # libllama has mapped other weights, which have to stay
            os.utime(copied, ns=(1, 1))
        else:
            os.truncate(copied, end)
        with pytest.raises(ModelChanged, match="another program wrote to the file") as caught:
            decode_others(engine)
        assert caught.value.path == copied


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_no_decode_succeeds_after_another_program_wrote_to_the_file(
    copied: Path, device: str
) -> None:
    """Even if its experts are in memory, because the kernel maps other weights from the file."""
    ram_bytes = int(0.99 * read_facts(copied).expert_bytes)
    with open_engine(copied, options(device, ram_bytes, Streaming())) as engine:
        for _ in range(2):
            engine.sequences.extend(0, [1])
        os.utime(copied, ns=(1, 1))
        n_reads = experts_of(engine).counters.reads.reads
        with pytest.raises(ModelChanged, match="another program wrote to the file"):
            engine.sequences.extend(0, [1])
        assert experts_of(engine).counters.reads.reads == n_reads


DEVICES = ["cpu", "sim", "split"]


def faulty(device: str, path: Path) -> EngineOptions:
    """Options with memory for half of the experts. `split`: sim with split layers."""
    streaming = Streaming()
    if device != "cpu":
        streaming = streaming | Streaming(hybrid=device == "split")
        streaming = streaming | Streaming(vram_bytes=budget(path, streaming, "least"))
    return options("cpu" if device == "cpu" else "sim", half_of(path), streaming)


@pytest.mark.parametrize("device", DEVICES)
def test_a_text_to_embed_evicts_no_more_than_a_prompt(one: Path, device: str) -> None:
    chosen = engine_options(faulty(device, one), pooling="mean")
    with open_engine(one, chosen) as engine:
        memory = experts_of(engine)
        for _ in range(3):
            engine.sequences.extend(0, [1])
        assert engine.opened.embedder is not None
        assert memory._n_prompt_tokens == 0
        for n_tokens in (60, 8):
            engine.opened.embedder.embed([(13 * i) % 250 for i in range(n_tokens)])
            assert memory._n_prompt_tokens == n_tokens
        before = memory.counters.n_read
        assert before + memory.counters.n_read_ahead > 64
        engine.sequences.extend(0, [1])
        # Slots hide the token's uses from the memory.
        assert memory.counters.n_read == before or device != "cpu", "its experts have stayed"


@pytest.mark.parametrize("device", DEVICES)
def test_a_disk_that_stalls_is_waited_for_and_then_fails_the_request(
    one: Path, device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = [(11 * i) % 50 for i in range(9)]
    real, goes_on = os.preadv, threading.Event()
    goes_on.set()

    def preadv(*arguments: Any) -> int:
        goes_on.wait(60)
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(expert_memory, "_SILENT_S", 0.1)
    with open_engine(one, faulty(device, one)) as engine:
        expected = engine.sequences.extend(0, tokens)
        decode_others(engine)
        engine.sequences.rewind(0, 0)
        goes_on.clear()
        threading.Timer(1.5, goes_on.set).start()
        assert np.array_equal(engine.sequences.extend(0, tokens), expected)
        assert "the disk has returned nothing for" in caplog.text
        monkeypatch.setattr(expert_memory, "_MOST_STALL_S", 0.2)
        goes_on.clear()
        with pytest.raises(DeviceFailed, match="the disk has returned nothing for"):
            decode_others(engine)
        goes_on.set()
        engine.sequences.rewind(0, 0)
        assert np.array_equal(engine.sequences.extend(0, tokens), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_file_that_is_replaced_is_read_as_it_was(copied: Path, device: str) -> None:
    tokens = [(11 * i) % 50 for i in range(9)]
    with open_engine(copied, faulty(device, copied)) as engine:
        expected = engine.sequences.extend(0, tokens)
        other = copied.with_name("other")
        other.write_bytes(bytes(copied.stat().st_size))
        other.replace(copied)
        decode_others(engine)
        engine.sequences.rewind(0, 0)
        assert np.array_equal(engine.sequences.extend(0, tokens), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_memory_may_be_taken_away_at_any_time(
    one: Path, device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another thread takes memory and gives it back, while tokens are decoded."""
    monkeypatch.setattr(expert_memory, "_WATCH_S", 0.002)
    free = [1 << 30]
    with open_engine(one, options("sim", None, Streaming())) as engine:
        whole = logits(engine)
    for module in (store_module, probing):
        monkeypatch.setattr(module, "room_now", lambda: HostRoom(free[0], "free memory"))
    with open_engine(one, faulty(device, one)) as engine:
        memory, n = experts_of(engine), [0]
        real, least = memory.begin, memory.least_bytes  # far less than the margin

        def begin(layer: int, experts: Iterable[int], **more: Any) -> list[list[int]]:
            n[0] += 1
            free[0] = least if n[0] % 8 < 4 else 1 << 30
            return real(layer, experts, **more)

        monkeypatch.setattr(memory, "begin", begin)
        assert np.array_equal(logits(engine), whole)
        free[0] = least
        memory.adapt()
        assert memory.capacity_bytes == memory.least_bytes
        assert "other programs need memory" in caplog.text
        engine.sequences.rewind(0, 0)
        assert np.array_equal(logits(engine), whole)


# -- a disk held to a rate -------------------------------------------------------------------------

RATE = 10e6  # bytes/s; an expert of `one` takes 20 to 40 ms


def latest(engine: Engine, bw: str) -> dict[str, float]:
    """Seconds in which disk, link and CPU were busy since the model was opened."""
    copied = engine.counters()
    return {
        "disk": engine.disk_counters()["disk_bytes"] / RATE,
        "link": copied.streamed_bytes / parse_rate(bw),
        "CPU": copied.host_s,
    }


# The link's rate, the seconds of an expert on the CPU, and whether layers are split.
HELD = [("1GB/s", 0.0, False), ("20MB/s", 0.0, False), ("20MB/s", 0.004, True)]


@pytest.mark.parametrize(("bw", "host_s", "hybrid"), HELD)
def test_a_decode_takes_as_long_as_the_latest_of_disk_link_and_cpu(
    one: Path, bw: str, host_s: float, hybrid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rates are so low that sleeping takes nearly all the time. So does the CPU in each of its
    graphs, which has one expert or more."""
    hosts = set[int]()

    def made(inner: Compute) -> Compute:
        def compute(stream: int, graph: int) -> int:
            time.sleep(host_s if graph in hosts else 0.0)
            return inner(stream, graph)

        return compute

    computing(monkeypatch, made)
    plain = Streaming(prefetch=False, hybrid=hybrid)
    copy_s = read_facts(one).expert_bytes / (4 * 64) / parse_rate(bw)
    costs = SplitCosts(host_s * np.arange(3), 1e-6 * np.arange(3), 0.0, 0.0, copy_s)
    streaming = limited(one, plain, "half") | Streaming(splitter=ByCosts(costs))
    device = f"sim:disk={RATE:.0f}B/s,bw={bw}"
    ratios: list[float] = []
    while len(ratios) < 3 and min(ratios, default=9.9) > 1.1:  # other programs only delay
        with open_engine(one, options(device, half_of(one), streaming)) as engine:
            engine.sequences.extend(0, [1])
            hosts |= host_graphs(engine)[0]
            before = latest(engine, bw)
            start_s = time.perf_counter()
            for step in range(2):
                engine.sequences.extend(0, [(step * 29 + 7 * i) % 250 for i in range(6)])
            took_s = time.perf_counter() - start_s
            busy = {name: s - before[name] for name, s in latest(engine, bw).items()}
        assert busy["disk"] > 0.2
        assert (busy["CPU"] > 0) == hybrid
        ratios.append(took_s / max(busy.values()))
    assert min(ratios) <= 1.1


LAYER_S, SLOW = 0.01, 14e6  # seconds of a layer's computation, bytes/s of the disk


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_reads_ahead_take_their_time_while_layers_are_computed(skewed: Path, device: str) -> None:
    """Layers sleep, so that other programs change the figures little.

    Tokens that were decoded before in the same text take as long as the latest of disk, link and
    computation. New tokens take longer, since some of their experts are not guessed. At least half
    of the time that a disk without guesses would add is hidden.
    """
    tokens = [(37 * i) % 600 for i in range(10)]

    def decodes(share: float, rate: float | None) -> dict[str, Decodes]:
        """Decode new tokens, and then the same text again, with memory for a share of experts."""
        streaming = Streaming()
        if device == "sim":
            streaming = streaming | Streaming(vram_bytes=budget(skewed, streaming, "least"))
        chosen = options(device, int(share * read_facts(skewed).expert_bytes), streaming)
        store = replace(chosen.store, disk_bytes_per_s=rate)
        with (
            open_engine(skewed, engine_options(chosen, store=store)) as engine,
            slow_layers(LAYER_S),
        ):
            found = {"new": decode(engine, tokens)}
            engine.sequences.rewind(0, 0)
            return found | {"known": decode(engine, tokens)}

    ratios: dict[str, list[float]] = {"new": [], "known": []}
    while len(ratios["new"]) < 4:  # other programs only delay
        computation, held = decodes(0.999, None)["known"], decodes(0.25, SLOW)
        for name, past in ratios.items():
            found = compared(computation, held[name], SLOW)
            assert found["disk"] > 0.5 * found["computation"]
            most = 1.1 if name == "known" else 0.5 + 0.5 * found["unguessed"]
            past.append(found["ratio"] / most)
        if all(min(past) <= 1.0 for past in ratios.values()):
            return
    pytest.fail(f"decodes took longer than allowed by these factors: {ratios}")
