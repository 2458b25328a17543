"""A model on several simulated devices gives the same bits as on one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mtp_parts import check_each_draft
from numpy.typing import NDArray
from test_slots import answer_of, open_slots

from lab.options import Streaming, engine_options
from lab.synth import write_preset
from lab.synth.block import write_block
from lab.synth.eagle import write_eagle, write_target
from lab.synth.mtp import write_mtp
from offload.device import choose_devices, devices
from offload.engine import Engine, EngineOptions, open_engine
from offload.errors import DeviceUnavailable, DoesNotFit
from offload.measuring import measure_split, use_split_costs
from offload.model import is_experts, layer_of
from offload.model_file import read_facts
from offload.plan.placement import PlanRequest, make_plan
from offload.plan.ranges import by_shares
from offload.plan.weights import device_bytes
from offload.schedule.splitter import ByCosts, all_on_device, stay
from offload.times.min_batch import NEVER, MinBatch
from offload.trace.trace import COPY, Trace
from specoffload.generation.generation import GenerateOptions

# 70 exceeds the ubatch of 64, so that its second ubatch is short.
BATCHES = (1, 5, 2, 40, 1, 3, 64, 4, 17, 70)
MODELS: dict[str, dict[str, Any]] = {
    "deepseek-v3": {"n_layer": 6},
    "qwen3moe": {"n_layer": 6},
    "glm-4.5": {"n_layer": 6},
    "gpt-oss-20b": {"n_layer": 6},
}
MODES: dict[str, dict[str, Any]] = {
    "resident": {"stream_experts": False},
    "streamed": {"min_batch": MinBatch(1, 1)},
    "dense streamed": {"min_batch": MinBatch(1, 1), "streaming": {"n_gpu_layers": 0}},
    "on the CPU": {"min_batch": MinBatch(NEVER, NEVER)},
    "split": {
        "min_batch": MinBatch(NEVER, NEVER),
        "streaming": {"hybrid": True, "splitter": all_on_device},
    },
    "split, no copies": {
        "min_batch": MinBatch(NEVER, NEVER),
        "streaming": {"hybrid": True, "splitter": stay, "prefetch": False},
    },
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, models: Path) -> Path:
    return written(request.param, models)


def written(preset: str, models: Path) -> Path:
    path = models / f"devices-{preset}.gguf"
    return path if path.exists() else write_preset(preset, path, seed=5, **MODELS[preset])


def options(device: str, mode: str = "streamed", **changes: Any) -> EngineOptions:
    chosen = {**MODES[mode], **changes}
    streaming = Streaming(**{"passes": "on", **chosen.pop("streaming", {})})
    return engine_options(
        device=device, streaming=streaming, n_ctx=256, n_ubatch=64, n_outputs=128, n_threads=1,
        n_threads_batch=1, **chosen,
    )  # fmt: skip


def logits(engine: Engine, batches: Sequence[int] = BATCHES) -> NDArray[np.float32]:
    rows = [
        engine.sequences.extend(0, [(13 * i + 5 * n) % engine.n_vocab for i in range(n)])
        for n in batches
    ]
    return np.concatenate(rows)


def sims(
    path: Path, shares: Sequence[float], rates: Sequence[str], share_of_slots: float = 0.5
) -> str:
    """Return `--device` for simulated devices with slots for a part of their layers' weights."""
    facts, found = read_facts(path), []
    for layers, rate in zip(by_shares(facts.n_layers, shares), rates, strict=True):
        part = facts.part(layers.first, layers.end)
        whole = make_plan(part, PlanRequest(n_gpu_layers=0))
        vram = whole.resident_bytes + max(round(whole.slot_bytes * share_of_slots), 1 << 19)
        found.append(f"sim:vram={vram // 1024}KiB,bw={rate}")
    return ",".join(found)


@pytest.mark.parametrize("mode", MODES)
def test_two_devices_give_the_bits_of_one(model: Path, mode: str) -> None:
    with open_engine(model, options("sim", mode)) as engine:
        expected = logits(engine)
    for shares, rates in (((1, 1), ("4GB/s", "4GB/s")), ((1, 3), ("4GB/s", "1GB/s"))):
        device = sims(model, shares, rates) if mode != "resident" else "sim,sim"
        with open_engine(model, options(device, mode, tensor_split=shares)) as engine:
            assert len(engine.opened.devices) == 2
            assert np.array_equal(logits(engine), expected), (shares, rates)
            assert not any(device.declined for device in engine.opened.devices)
            used = [c.cuts + c.streamed_experts for c in engine.counters_by_device().values()]
            streams = "streamed" in mode or mode == "split"
            assert all(used) if streams else mode != "resident" or not any(used)


def test_three_devices_give_the_bits_of_one(models: Path) -> None:
    path = written("deepseek-v3", models)
    with open_engine(path, options("sim")) as engine:
        expected = logits(engine)
    with open_engine(path, options("sim,sim,sim", tensor_split=(3, 2, 2))) as engine:
        assert np.array_equal(logits(engine), expected)
        assert all(c.cuts for c in engine.counters_by_device().values())


@pytest.mark.parametrize("shares", [(1, 1), (1, 3), (3, 1)])
def test_each_device_computes_and_copies_its_own_layers(
    model: Path, shares: tuple[int, ...]
) -> None:
    """ggml gives a product to the first device that accepts its weight's type of memory."""
    facts, trace = read_facts(model), Trace()
    asked = options("sim,sim", tensor_split=shares, streaming={"trace": trace})
    with open_engine(model, asked) as engine:
        engine.sequences.extend(0, list(range(64)))
        counters = engine.counters_by_device()
        assert [layers for _, layers in engine.start.choices] == [
            *by_shares(facts.n_layers, shares)
        ]
        for choice, layers in engine.start.choices:
            its = [e for e in facts.loaded if is_experts(e) and layer_of(e.name) in layers]
            assert counters[choice.name].cuts == len(its)
            copies = [e for e in trace.events() if e.lane == COPY]
            copied = [e for e in copies if e.args["device"] == choice.name]
            assert {e.args["layer"] for e in copied} == {layer_of(e.name) for e in its}
            expected = sum(e.size_bytes for e in its)
            assert sum(int(e.args["bytes"]) for e in copied) == expected
            assert counters[choice.name].streamed_bytes == expected
        assert engine.counters().streamed_bytes == sum(c.streamed_bytes for c in counters.values())


def test_a_device_without_layers_is_left_out(models: Path) -> None:
    path = written("qwen3moe", models)
    with open_engine(path, options("sim,sim,sim", tensor_split=(0, 1, 0))) as engine:
        assert [choice.name for choice, _ in engine.start.choices] == ["sim1"]
        assert engine.counters_by_device().keys() == {"sim1"}


def test_two_devices_hold_what_one_cannot(models: Path) -> None:
    path = written("qwen3moe", models)
    whole = make_plan(read_facts(path), PlanRequest(stream_experts=False)).resident_bytes
    small = f"sim:vram={round(whole * 0.7) // 1024}KiB"
    fits = Streaming(n_cpu_moe="fit", n_gpu_layers=99)
    with open_engine(path, engine_options(options(small), streaming=fits)) as engine:
        assert engine.opened.plan is not None
        assert engine.opened.plan.streamed
    with open_engine(path, engine_options(options(f"{small},{small}"), streaming=fits)) as engine:
        assert engine.opened.plan is not None
        assert not engine.opened.plan.streamed


@pytest.mark.parametrize(
    ("device", "shares", "words"),
    [
        ("sim,CUDA9", (), "this machine has auto, cpu, sim"),
        ("sim,cpu", (), "cpu cannot be one of several devices"),
        ("auto,sim", (), "auto"),
        ("sim,sim", (0, 0), "--tensor-split 0,0: .* one of them has to be above 0"),
        ("sim,sim", (0, 0, 1), "--tensor-split 0,0: .* one of them has to be above 0"),
        ("sim,sim", (-1, 2), "--tensor-split -1,2: shares are numbers from 0 up"),
        ("sim,sim", (float("nan"), 2), "--tensor-split nan,2: shares are numbers from 0 up"),
        ("sim,sim", (1e300, 1e-300), "one of them has to be above 0 .in single precision, up to"),
        ("sim,sim:vram=x", (), "sim:vram=x"),
        ("sim:vram=4MiB,vram=5MiB", (), "vram is given twice"),
        ("", (), "device '': this machine has auto, cpu, sim"),
    ],
)
def test_bad_devices_and_shares_are_named_in_one_sentence(
    models: Path, device: str, shares: tuple[float, ...], words: str
) -> None:
    with pytest.raises(DeviceUnavailable, match=words) as e:
        open_engine(written("qwen3moe", models), options(device, tensor_split=shares))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("device", "shares", "used", "words"),
    [
        ("sim,sim", (1, 1, 5), ["sim0", "sim1"], "the first 2 of 3 shares count, for 2 devices"),
        ("sim", (1, 1), ["sim"], "the first 1 of 2 shares count, for one device"),
        ("sim,sim,sim", (1, 1), ["sim0", "sim1"], "--tensor-split 1,1: sim2 without a share: no"),
        ("sim,sim", (0, 1), ["sim1"], ""),
    ],
)
def test_more_or_fewer_shares_than_devices_mean_what_they_mean_to_llama_cpp(
    models: Path, device: str, shares: tuple[float, ...], used: list[str], words: str
) -> None:
    with open_engine(written("qwen3moe", models), options(device, tensor_split=shares)) as engine:
        assert [choice.name for choice, _ in engine.start.choices] == used
        said = [note for note in engine.opened.notes if "--tensor-split" in note]
        assert len(said) == bool(words)
        assert all(words in note for note in said)


def test_gpus_are_chosen_as_llama_cpp_chooses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    (cpu,) = devices()
    gpus = [replace(cpu, name=f"CUDA{i}", wrapped=True, on_gpu=True) for i in range(2)]
    monkeypatch.setattr("offload.device.devices", lambda: [cpu, *gpus])

    def names(wanted: str, *, all_gpus: bool = False) -> list[str]:
        return [choice.name for choice in choose_devices(wanted, all_gpus=all_gpus)]

    assert names("auto", all_gpus=True) == ["CUDA0", "CUDA1"]
    assert names("auto") == ["CUDA0"]
    assert names("auto:1") == ["CUDA1"]  # -sm none -mg 1
    assert names("auto:0", all_gpus=True) == ["CUDA0"]  # -sm none
    assert names("cuda1,CUDA0") == ["CUDA1", "CUDA0"]
    for wanted, words in (
        ("CUDA0,cuda0", "--device CUDA0,cuda0: CUDA0 is named 2 times; name each GPU once"),
        ("CUDA0,CUDA2", "device CUDA2: this machine has auto, cpu, sim, CUDA0, CUDA1; did you"),
        ("auto:2", "--main-gpu 2: this machine has 2 GPUs, and the first has number 0"),
    ):
        with pytest.raises(DeviceUnavailable, match=words):
            names(wanted)
    gpus.clear()
    monkeypatch.setattr("offload.device.devices", lambda: [cpu])
    assert names("auto:0", all_gpus=True) == names("auto") == ["cpu"]


def test_a_device_that_is_too_small_is_named(models: Path) -> None:
    with pytest.raises(DoesNotFit, match=r"sim1, layers 4-5: .*--tensor-split"):
        open_engine(written("qwen3moe", models), options("sim,sim:vram=1KiB", tensor_split=(1, 1)))


def test_a_device_copies_while_the_one_before_it_computes(models: Path) -> None:
    """The second device's copies for a prompt begin before the first device has computed."""
    path, trace = written("qwen3moe", models), Trace()
    streaming = {"trace": trace, "cache": False}
    device = sims(path, (1, 1), ("10MB/s", "100MB/s"), 1.0)
    with open_engine(path, options(device, tensor_split=(1, 1), streaming=streaming)) as engine:
        logits(engine, (64,))
        trace.restart()
        engine.sequences.extend(0, list(range(128)))  # two ubatches of 64 tokens
        engine.settle()
        counters = engine.counters_by_device()
        assert (counters["sim0"].n_early, counters["sim1"].n_early) == (1, 2)
        copies = [e for e in trace.events() if e.lane == COPY]
        first, second = ([e for e in copies if e.args["device"] == f"sim{i}"] for i in (0, 1))
        assert sum(int(e.args["bytes"]) for e in copies) == 2 * engine.facts.expert_bytes
        # The first device is still copying for its first ubatch.
        of_first_ubatch = sorted(e.end_s for e in first)[: len(first) // 2]
        assert min(e.start_s for e in second) < of_first_ubatch[-1]


def test_a_graph_that_was_expected_and_did_not_come_changes_nothing(models: Path) -> None:
    path = written("qwen3moe", models)
    with open_engine(path, options("sim")) as engine:
        expected = logits(engine)
    with open_engine(path, options(sims(path, (1, 1), ("1GB/s", "1GB/s")))) as engine:
        second = engine.opened.devices[1]
        rows = []
        for i, n in enumerate(BATCHES):
            tokens = [(13 * k + 5 * n) % engine.n_vocab for k in range(n)]
            if i:  # copies begin for a batch of another size, which is then not computed
                (executor,) = second.executors.values()
                executor.start_early(BATCHES[i - 1])
            rows.append(engine.sequences.extend(0, tokens))
        assert np.array_equal(np.concatenate(rows), expected)
        assert second.counters().n_early >= len(BATCHES) - 1


@pytest.mark.parametrize(
    ("architecture", "way"), [("deepseek2", "streamed"), ("qwen3next", "split")]
)
def test_own_layers_draft_on_the_last_device(models: Path, architecture: str, way: str) -> None:
    path = write_mtp(models, architecture)
    least = NEVER if way == "split" else 1
    chosen = engine_options(
        device="sim,sim", tensor_split=(1, 1), min_batch=MinBatch(least, least), n_ctx=2048,
        n_sequences=4, flash_attn="off", type_k="f32", type_v="f32", mtp=True,
        stream_experts=way != "resident", streaming=Streaming(hybrid=way == "split"),
    )  # fmt: skip
    fresh = engine_options(chosen, device="cpu", tensor_split=(), n_ctx=512, n_sequences=1)
    with open_engine(path, chosen) as engine, open_engine(path, fresh) as one:
        assert len(engine.opened.devices) == 2
        check_each_draft(engine, one)


# The name of each drafter for --spec-type, and what writes its file for a target.
_DRAFTERS: dict[str, tuple[str, Callable[[Path, Path], Path] | None]] = {
    "EAGLE-3": ("draft-eagle3", write_eagle),
    "DFlash": ("draft-dflash", write_block),
    "DSpark": ("draft-dspark", partial(write_block, variant="dspark-conf")),
    "draft model": ("draft", lambda _, target: target),
    "none": ("none", None),
}


@pytest.mark.parametrize("draft", ["EAGLE-3", "DFlash", "DSpark", "draft model", "none"])
def test_a_session_over_two_devices_writes_what_one_does(models: Path, draft: str) -> None:
    target = write_target(models, "qwen35moe")
    more: dict[str, Any] = {"min_batch": MinBatch(1, 1)}
    kind, write = _DRAFTERS[draft]
    if write is not None:
        more["draft"] = write(models, target)
    spec = {"--spec-type": kind, "--spec-policy": "fixed", "--spec-draft-n-max": 3}
    if draft == "none":
        del spec["--spec-policy"], spec["--spec-draft-n-max"]
    texts = []
    for device in ("sim", "sim,sim"):
        with open_slots(target, spec, 2, device=device, **more) as session:
            assert len(session.target.opened.devices) == 1 + device.count(",")
            options = GenerateOptions(n_predict=12, temperature=0.0)
            requests = [session.start(list(range(5 + i, 40)), options) for i in range(2)]
            while any(not request.is_over for request in requests):
                session.step()
            answers = [answer_of(request) for request in requests]
            assert (answers[0].stats.n_drafted > 0) == (draft != "none")
            texts.append([answer.tokens for answer in answers])
    assert texts[0] == texts[1]


def test_the_plan_divides_by_room_and_says_so(models: Path) -> None:
    path = written("qwen3moe", models)
    facts = read_facts(path)
    layer = facts.expert_bytes // facts.n_layers
    dense = device_bytes(facts) - facts.expert_bytes
    roomy, tight = 3 * layer + dense, layer + dense
    rates = {"sim0": 50e6, "sim1": 5e9}
    chosen = options(f"sim:vram={roomy}b,sim:vram={tight}b", streaming={"n_cpu_moe": "fit"})
    chosen = engine_options(chosen, measure_links=lambda c: [rates[choice.name] for choice in c])
    with open_engine(path, chosen) as engine:
        (first, second) = engine.opened.weights.parts
        assert [layers.first for _, layers in engine.start.choices] == [0, 4]
        assert (first.plan.n_resident, second.plan.n_resident) == (3, 1), "passes need little room"
        assert any("sim0 layers 0-3, sim1 layers 4-5" in note for note in engine.opened.notes)
        assert second.plan.resident_bytes + second.plan.slot_bytes <= tight
        divided = logits(engine)
    with open_engine(path, options("sim")) as engine:
        assert np.array_equal(divided, logits(engine))


def test_a_start_makes_each_plan_once(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The division's plans are those that the engine opens. No other ubatch is tried."""
    n_plans = 0

    def counted(*args: Any) -> Any:
        nonlocal n_plans
        n_plans += 1
        return make_plan(*args)

    monkeypatch.setattr("offload.plan.devices.make_plan", counted)
    # The context counts on GPUs alone, and there is one ubatch to choose from where it does not.
    monkeypatch.setattr("offload.plan.found.FoundDevice.is_counted", lambda *_: True)
    sizes = {"n_cpu_moe": 2, "device_bytes": 8 << 20}
    asked = engine_options(options("sim,sim", streaming=sizes), most_ubatch=512)
    with open_engine(written("qwen3moe", models), asked) as engine:
        assert len(engine.opened.weights.parts) == 2
        assert any(part.plan.streamed for part in engine.opened.weights.parts)
    assert n_plans == 2


def test_vram_is_given_for_each_device_or_for_all(models: Path) -> None:
    path = written("qwen3moe", models)
    facts = read_facts(path)
    sizes = [device_bytes(facts) // 2, device_bytes(facts)]
    streaming = {"each_device_bytes": tuple(sizes)}
    with open_engine(path, options("sim,sim", streaming=streaming)) as engine:
        for part, size in zip(engine.opened.weights.parts, sizes, strict=True):
            assert part.plan.resident_bytes + part.plan.slot_bytes <= size
    for device, n in (("sim", 1), ("sim,sim,sim", 3)):
        with pytest.raises(DeviceUnavailable, match=f"--vram has 2 sizes, but --device has {n}"):
            open_engine(path, options(device, streaming=streaming))


def test_each_device_splits_layers_by_costs_of_its_own(models: Path) -> None:
    path = written("qwen3moe", models)
    device = sims(path, (1, 1), ("400MB/s", "20MB/s"))
    with open_engine(path, options(device, "split", tensor_split=(1, 1))) as engine:
        costs = measure_split(engine)
        assert list(costs) == ["sim0", "sim1"]
        fast, slow = (costs[name].costs().copy_s for name in costs)
        assert slow > 3 * fast
        use_split_costs(engine, costs)
        own = [engine.opened.weights.ways.now.splitter_of(i) for i in (0, 1)]
        assert [s.costs.copy_s for s in own if isinstance(s, ByCosts)] == [fast, slow]
        found = logits(engine)
        assert all(c.split_layers > 0 for c in engine.counters_by_device().values())
    with open_engine(path, options("sim")) as engine:
        assert np.array_equal(found, logits(engine))


def test_between_both_thresholds_only_the_device_with_the_faster_link_streams(
    models: Path,
) -> None:
    path = written("qwen3moe", models)
    device = "sim:vram=1MiB,bw=4GB/s,sim:vram=1MiB,bw=1GB/s"
    options = engine_options(device=device, n_ctx=256, min_batch=MinBatch(NEVER, NEVER))
    with open_engine(path, options) as engine:
        fast, slow = (part.choice.name for part in engine.opened.weights.parts)
        for part, n in zip(engine.opened.weights.parts, (100, 300), strict=True):
            # The model expects streaming to pay at once for weights as small as these.
            part.use(replace(part.plan, min_batch=n))
        engine.set_min_batch(MinBatch(20, NEVER), is_measured=True)
        its = engine.min_batches
        assert its[fast].experts < 20 < its[slow].experts
        assert engine.min_batch == MinBatch(20, NEVER)
        assert f"{fast} computes experts" in engine.min_batch_words(("experts",))
        before = engine.counters_by_device()
        engine.sequences.extend(0, [7 * i % 200 for i in range(20)], 1)
        engine.settle()
        now = engine.counters_by_device()
        assert now[fast].streamed_bytes > before[fast].streamed_bytes
        assert now[slow].streamed_bytes == before[slow].streamed_bytes
        engine.set_min_batch(MinBatch(20, NEVER))
        assert len(set(engine.min_batches.values())) == 1, "a user's threshold is for all devices"
