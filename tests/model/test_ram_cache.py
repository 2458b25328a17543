"""A KV cache in RAM changes no logits, on `sim`.

`sim` computes with the CPU backend, so the same numbers come out wherever attention is computed.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from our_worker import SIM
from our_worker import working as working_ours
from own_layer_steps import steps_of
from remote_engine import logits as remote_logits
from remote_engine import options as remote_options
from resolved import config_of
from test_slots import SPECS, model, open_slots, together
from worker import has_rpc, working

import offload.plan.devices
from lab.options import Streaming, engine_options
from lab.synth import write_preset
from lab.synth.mixtures import write_mixture
from lab.synth.mtp import write_mtp
from offload.engine import Engine, EngineOptions, open_engine
from offload.ggml.graph import Graph
from offload.ggml.pydevice import WrappedStream
from offload.ggml.tensor import Tensor
from offload.model_file import read_facts
from offload.plan.placement import make_plan
from offload.remote.address import RemoteOptions
from offload.stream.device import StreamingDevice
from offload.times.context_memory import context_memory
from offload.times.min_batch import NEVER, MinBatch
from specoffload.config.options import DiskRoom, Toggle
from specoffload.generation.generation import GenerateOptions
from specoffload.session.session import Session

N_SEQUENCES = 3
PRESETS = {
    "plain": "qwen3-30b-a3b",
    "latent": "deepseek-v3",
    "recurrent": "qwen3.5-35b-a3b",
    "windows": "gpt-oss-120b",
}
SIZES = (1, 1, 1, 2, 3, 5, 17, 64, 70, 130)


@pytest.fixture(scope="module", params=PRESETS)
def path(request: pytest.FixtureRequest, models: Path) -> Path:
    path = models / f"ram-cache-{request.param}.gguf"
    if path.exists():
        return path
    return write_preset(PRESETS[request.param], path, seed=3, n_embd=256, n_ff_exp=256)


def options(path: Path, *, kv_offload: bool, device: str = "sim") -> EngineOptions:
    """Options with slots for a third of the experts."""
    plan = make_plan(read_facts(path))
    vram = plan.resident_bytes + plan.slot_bytes // 3
    streaming = Streaming(n_gpu_layers=99, passes="on", vram_bytes=vram)
    return engine_options(
        device=device, streaming=streaming, min_batch=MinBatch(1, 1), n_ctx=2048, n_ubatch=64,
        n_batch=256, n_outputs=64, n_sequences=N_SEQUENCES, n_threads=1, n_threads_batch=1,
        flash_attn="on", kv_offload=kv_offload,
    )  # fmt: skip


def logits(engine: Engine, seed: int = 5, n_batches: int = 24) -> NDArray[np.float32]:
    rng, rows = random.Random(seed), []
    for _ in range(n_batches):
        sequence, n = rng.randrange(N_SEQUENCES), rng.choice(SIZES)
        tokens = [rng.randrange(engine.n_vocab) for _ in range(n)]
        rows.append(engine.sequences.extend(sequence, tokens, 1 if n > 64 else n))
    return np.concatenate(rows)


@pytest.mark.parametrize("crossover", [1, 4, None])
def test_a_cache_in_ram_changes_no_logits(
    path: Path, crossover: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever attention of a batch is computed: on the device, on the CPU, or by its size."""
    monkeypatch.setattr(offload.plan.devices, "attention_crossover", lambda *_: crossover)
    with open_engine(path, options(path, kv_offload=True)) as engine:
        wanted = logits(engine)
    with open_engine(path, options(path, kv_offload=False)) as engine:
        found = logits(engine)
        assert engine.opened.plan is not None
        assert engine.opened.plan.attention_batch == crossover
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("crossover", [1, 4, None])
def test_attention_is_computed_where_the_plan_says(
    path: Path, crossover: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload.plan.devices, "attention_crossover", lambda *_: crossover)
    on_device: set[int] = set()
    compute = StreamingDevice.compute

    def watched(self: StreamingDevice, stream: WrappedStream, graph: Graph) -> int:
        nodes = [Tensor(address) for address in graph.addresses()]
        for node in nodes:
            queries = node.source(0)
            if node.is_op("FLASH_ATTN_EXT") and queries is not None:
                on_device.add(queries.shape[1])
        return compute(self, stream, graph)

    monkeypatch.setattr(StreamingDevice, "compute", watched)
    monkeypatch.setattr(StreamingDevice, "compute_directly", lambda *_, **__: None)
    with open_engine(path, options(path, kv_offload=False)) as engine:
        on_device.clear()
        for n in (1, 2, 3, 4, 5, 64):
            engine.sequences.extend(0, [7] * n)
    assert on_device == {n for n in (1, 2, 3, 4, 5, 64) if n >= (crossover or NEVER)}


def test_caches_are_in_ram_and_states_on_the_device(path: Path) -> None:
    opened = options(path, kv_offload=False)
    facts = read_facts(path)
    with open_engine(path, opened) as engine:
        memory = context_memory(facts, engine.layout.context)
        cache = engine.opened.ram_cache
        assert cache is not None
        assert memory.kv_bytes == 0
        assert cache.cache_bytes == pytest.approx(memory.host_kv_bytes, abs=1 << 14)
        assert (cache.state_bytes > 0) is (memory.recurrent_bytes > 0)
        assert cache.state_bytes <= memory.recurrent_bytes
    with open_engine(path, engine_options(opened, kv_offload=True)) as engine:
        assert engine.opened.ram_cache is None


def test_a_sequence_is_saved_in_one_place_and_loaded_in_the_other(path: Path) -> None:
    text, more = [3, 1, 4, 1, 5] * 20, [9, 2, 6]
    states, rows = {}, {}
    for place in (True, False):
        with open_engine(path, options(path, kv_offload=place)) as engine:
            engine.sequences.extend(1, text, n_logits=0)
            states[place] = engine.sequences.save(1)
            rows[place] = engine.sequences.extend(1, more)
    assert states[True] == states[False]
    with open_engine(path, options(path, kv_offload=False)) as engine:
        engine.sequences.load(2, states[True], text)
        assert np.array_equal(engine.sequences.extend(2, more), rows[True])
        checkpoint = engine.sequences.checkpoint(2, lasting=True)
        before = engine.sequences.extend(2, [5, 3])
        engine.sequences.restore(2, checkpoint)
        assert np.array_equal(engine.sequences.extend(2, [5, 3]), before)


def test_two_devices_share_a_model_whose_cache_is_in_ram(path: Path) -> None:
    found = {}
    for place in (True, False):
        opened = engine_options(
            options(path, kv_offload=place, device="sim,sim"), tensor_split=(1, 1)
        )
        with open_engine(path, opened) as engine:
            assert len(engine.opened.devices) == 2
            found[place] = logits(engine)
    assert np.array_equal(found[True], found[False])


@pytest.mark.parametrize("crossover", [1, None])
def test_speculation_writes_the_same(
    crossover: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload.plan.devices, "attention_crossover", lambda *_: crossover)
    answers = []
    for place in (True, False):
        config = config_of(
            device="sim", threads=1, ctx_size=512, kv_offload=place, flash_attn=Toggle.ON,
            min_batch="1", spec_given={"--spec-policy": "fixed", "--spec-draft-n-max": 4},
        )  # fmt: skip
        with Session(config) as session:
            pieces = [*session.generate("def fibonacci(n):\n", GenerateOptions(n_predict=40))]
            stats = pieces[-1].stats
            assert stats is not None
            answers.append(("".join(piece.text for piece in pieces), stats.n_drafted))
            assert any("KV cache" in note for note in session.notes) is not place
    assert answers[0] == answers[1]
    assert answers[0][1] > 0


@pytest.mark.parametrize("kind", ["mistral-large", "deepseek-v3", "qwen3next"])
def test_conversations_go_on_after_a_restart(kind: str, models: Path, tmp_path: Path) -> None:
    """From kept prompts on the disk, whose caches then are in RAM again, with several slots."""
    path, request = model(kind, models), GenerateOptions(n_predict=6, ignore_eos=True)
    given: dict[str, Any] = {
        "device": "sim", "min_batch": "1", "ctx_size": 2048, "kv_offload": False,
        "flash_attn": Toggle.ON, "type_k": "f16", "type_v": "f16",
    }  # fmt: skip
    kept = {"cache_disk": DiskRoom(1 << 30, tmp_path), "cache_ram_bytes": 1 << 30}
    texts = [[(7 * i + k) % 200 + 20 for i in range(300 + 40 * k)] for k in range(3)]
    with open_slots(path, SPECS["alone"], 2, **given, **kept) as session:
        for text, answer in zip(texts, together(session, texts, request), strict=True):
            text += answer.tokens
    longer = [[*text, 33, 35, 37] for text in texts]
    with open_slots(path, SPECS["alone"], 2, **given, **kept) as session:
        again = together(session, longer, request)
    with open_slots(path, SPECS["alone"], 2, **given) as session:
        fresh = together(session, longer, request)
    assert [answer.tokens for answer in again] == [answer.tokens for answer in fresh]
    assert all(answer.stats.n_from_disk >= 299 for answer in again)


@pytest.mark.parametrize("types", [("q8_0", "q8_0"), ("q8_0", "f16"), ("bf16", "bf16")])
def test_caches_of_all_types_may_be_in_ram(
    types: tuple[str, str], models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload.plan.devices, "attention_crossover", lambda *_: 4)
    path = models / "ram-cache-types.gguf"
    write_preset("qwen3-30b-a3b", path, seed=3, n_embd=256, n_ff_exp=256)
    found = {}
    for place in (True, False):
        opened = options(path, kv_offload=place)
        with open_engine(path, engine_options(opened, type_k=types[0], type_v=types[1])) as engine:
            found[place] = logits(engine, n_batches=12)
    assert np.array_equal(found[True], found[False])


@pytest.mark.parametrize("architecture", ["glm4moe", "qwen35moe", "deepseek2"])
def test_own_layers_draft_the_same(
    architecture: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload.plan.devices, "attention_crossover", lambda *_: 3)
    path = write_mtp(models, architecture)
    found = {}
    for place in (True, False):
        opened = engine_options(
            device="sim", min_batch=MinBatch(1, 1), n_ctx=1024, n_sequences=2, mtp=True,
            flash_attn="on", n_threads=1, n_threads_batch=1, kv_offload=place,
        )  # fmt: skip
        with open_engine(path, opened) as engine:
            found[place] = [*steps_of(engine)]
    assert found[True] == found[False]
    assert len(found[True]) > 10


# What only the CPU attends to in RAM: models with an indexer, and options.
ONLY_CPU: dict[str, tuple[str, dict[str, str], str]] = {
    **{
        name: (name, {}, f"{name} chooses keys by an indexer")
        for name in ("deepseek32", "deepseek4", "glm5-next", "minimax-m3", "qwen4exp")
    },
    **{name: (name, {}, "by an indexer") for name in ("dots3note", "glm-dsa", "hy_v4")},
    "grok": ("grok", {"flash_attn": "auto"}, "flash attention is off"),
    **{
        f"{name} without flash attention": (name, {"flash_attn": "off"}, "flash attention is off")
        for name in ("qwen3moe", "deepseek2", "gpt-oss")
    },
    **{
        f"{name} in f32": (name, {"type_k": "f32", "type_v": "f32"}, "the whole f32 cache")
        for name in ("qwen3moe", "deepseek2")
    },
}


@pytest.mark.parametrize("case", ONLY_CPU)
def test_the_cpu_attends_where_a_device_cannot(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that reads the cache is computed on the device, and no logit changes."""
    name, asked, words = ONLY_CPU[case]
    path = write_mixture(name, tmp_path / "tiny.gguf")
    n_seen, compute = 0, StreamingDevice.compute

    def watched(self: StreamingDevice, stream: WrappedStream, graph: Graph) -> int:
        nonlocal n_seen
        for node in map(Tensor, graph.addresses()):
            n_seen += 1
            assert not node.is_op("FLASH_ATTN_EXT")
            if not any(map(node.is_op, ("VIEW", "PERMUTE", "RESHAPE", "TRANSPOSE"))):
                cached = re.compile(r"cache_[kv]_|dsv4_")
                assert not any(cached.match(source.name) for source in node.sources), node.name
        return compute(self, stream, graph)

    found = {}
    for place in (True, False):
        if not place:
            monkeypatch.setattr(StreamingDevice, "compute", watched)
            monkeypatch.setattr(StreamingDevice, "compute_directly", lambda *_, **__: None)
        with open_engine(path, engine_options(options(path, kv_offload=place), **asked)) as engine:
            found[place] = logits(engine, n_batches=10)
            assert (words in engine.layout.cache_words) is not place
    assert n_seen
    assert np.array_equal(found[True], found[False])


@pytest.mark.skipif(not has_rpc(), reason="the library is compiled without ggml's RPC")
@pytest.mark.parametrize(("device", "flash_attn"), [("sim", "on"), ("cpu", "off")])
def test_workers_get_the_caches_of_their_layers(
    device: str, flash_attn: str, tiny_moe: Path
) -> None:
    its, ours = [], working_ours(tiny_moe, "--device", SIM)
    with working() as stock, ours as own:
        for address in (stock.address, own.address):
            opened = engine_options(
                remote_options(device, RemoteOptions((address,))), flash_attn=flash_attn
            )
            for place in (True, False):
                with open_engine(tiny_moe, engine_options(opened, kv_offload=place)) as engine:
                    its.append(remote_logits(engine))
                    assert engine.opened.remote is not None
                    words = engine.layout.cache_words
                sent = "sends the caches of their layers to RPC0"
                of_cpu = "the CPU computes attention, because flash attention is off"
                assert place is not ((sent if flash_attn == "on" else of_cpu) in words)
    for logit in its[1:]:
        assert np.array_equal(logit, its[0])
