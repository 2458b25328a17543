"""--override-kv reaches the library, the plan, what is kept, and every line that names it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from resolved import config_of

from lab.synth import write_preset
from offload.engine import Engine
from offload.errors import BadModel
from offload.ggml.library.callback import Pending
from offload.ggml.library.untouched import Untouched
from offload.ggml.model import Model, ModelPlacement
from offload.kv_overrides import KvOverride, read_overrides
from offload.model_file import behaviour_hash, model_hash, read_facts
from offload.opening.start import decide_start
from offload.remote.hello import WorkerFacts
from specoffload.bench.llama_server import tune_for
from specoffload.config.resolution import demo_file
from specoffload.kept import KeptFile
from specoffload.opening.choices import StartChoices
from specoffload.opening.header import target_facts
from specoffload.opening.start import session_start
from specoffload.opening.target import target_options
from specoffload.session.session import Session

TARGET = demo_file("target.gguf")
USED = "deepseek2.expert_used_count"
ONE = (KvOverride(USED, 1),)
TEXT = [(7 * i) % 200 + 3 for i in range(24)]
EXACT = {"flash_attn": "off", "type_k": "f16", "type_v": "f16"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model in f32, which computes the same in batches of any size."""
    file = tmp_path_factory.mktemp("overridden") / "moe.gguf"
    return write_preset("deepseek-v3", file, size="tiny", seed=6, quant="f32", vocab="bytes")


def our_logits(path: Path, device: str, overrides: tuple[KvOverride, ...]) -> NDArray[np.float32]:
    config = config_of(model=path, device=device, threads=1, ctx_size=256, ubatch_size=256,
                       kv_overrides=overrides, **EXACT)  # fmt: skip
    options = target_options(config, StartChoices.as_asked(config))
    with Engine(decide_start(target_facts(config), options)) as engine:
        return np.array(engine.sequences.extend(0, TEXT)[-1])


def library_logits(
    path: Path, folder: Path, overrides: tuple[KvOverride, ...]
) -> NDArray[np.float32]:
    """The logits of libllama alone, which gets the overrides by its own structures."""
    asked = {
        "path": str(path), "device": None, "cpu_weights": "", "repack": False, "flash_attn": 0,
        "n_ctx": 256, "n_batch": 256, "n_ubatch": 256, "n_threads": 1, "n_threads_batch": 1,
        "kv_overrides": [*map(str, overrides)],
    }  # fmt: skip
    plain = Untouched(asked)
    file = folder / "rows.npy"
    plain.follow(TEXT, 0, str(file))
    plain.close()
    return np.asarray(np.load(file)[-1])


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_logits_are_those_of_the_library_with_the_override(
    device: str, path: Path, tmp_path: Path
) -> None:
    ours, own = our_logits(path, device, ONE), our_logits(path, device, ())
    assert np.allclose(ours, library_logits(path, tmp_path, ONE), rtol=1e-2, atol=1e-2)
    assert np.abs(ours - own).max() > 0.2, "the override changes nothing"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("deepseek2.expert_usedcount=int:2", "the library reads no deepseek2.expert_usedcount"),
        ("tokenizer.chat_template=str:x", "the library reads no tokenizer.chat_template"),
        ("deepseek2.attention.head_count=int:0", "head_count=int:0: the library refuses it"),
    ],
)
def test_what_only_the_library_knows_is_refused_before_weights_are_read(
    text: str, words: str
) -> None:
    config = config_of(model=TARGET, device="cpu", kv_overrides=read_overrides(text))
    with pytest.raises(BadModel, match=words):
        session_start(config)


def test_the_model_refuses_a_key_that_is_not_read_and_then_loads_others() -> None:
    placement = ModelPlacement(no_alloc=True, load_mode="none")
    wrong = replace(placement, kv_overrides=(KvOverride("deepseek2.nonsense", 1),))
    with pytest.raises(BadModel, match="reads no deepseek2.nonsense"):
        Model(TARGET, wrong, Pending())
    right = KvOverride("tokenizer.ggml.add_eos_token", value=True)  # which the file lacks
    Model(TARGET, replace(placement, kv_overrides=(right,)), Pending()).close()
    # A key of an earlier load does not count as read in a later one.
    with pytest.raises(BadModel, match="reads no deepseek2.nonsense"):
        Model(TARGET, wrong, Pending())


def test_measurements_belong_to_the_override(tmp_path: Path) -> None:
    own, changed = read_facts(TARGET), read_facts(TARGET, ONE)
    assert KeptFile(tmp_path, own).path != KeptFile(tmp_path, changed).path
    assert behaviour_hash(own) == model_hash(own) == model_hash(changed)
    other = read_facts(TARGET, (KvOverride(USED, 2),))
    assert len({behaviour_hash(facts) for facts in (own, changed, other)}) == 3
    # A worker holds the file's weights, whatever is computed with them.
    assert WorkerFacts.of(own) == WorkerFacts.of(changed)


def test_a_start_names_the_override_and_keeps_states_of_other_values_apart() -> None:
    config = config_of(model=TARGET, device="cpu", threads=1, ctx_size=256)
    made_by = {}
    for name, overrides in (("own", ()), ("one", ONE)):
        with Session(replace(config, kv_overrides=overrides), keeps_hits=False) as session:
            words = f"--override-kv: {USED} is 1 (the file: 4): texts may differ"
            assert any(words in note for note in session.notes) == (name == "one")
            assert any(words in note for note in session.card.notes) == (name == "one")
            made_by[name] = session.target.sequences.made_by
    assert made_by["one"] == {**made_by["own"], "--override-kv": f"{USED}=int:1"}


def test_llama_server_is_started_with_the_same_values() -> None:
    tuned = tune_for(read_facts(TARGET, ONE), vram_bytes=None, reserve_bytes=0, n_ubatch=512)
    assert f"--override-kv {USED}=int:1" in tuned.command_line("m.gguf")
    plain = tune_for(read_facts(TARGET), vram_bytes=None, reserve_bytes=0, n_ubatch=512)
    assert "--override-kv" not in plain.command_line("m.gguf")
