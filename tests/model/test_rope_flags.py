"""Rotary settings of the command line reach libllama's context, and lengthen the default one."""

from __future__ import annotations

import ctypes as C
from pathlib import Path

import llama_cpp as llama
import numpy as np
import pytest
from numpy.typing import NDArray
from plans import context_of
from resolved import config_of

from lab.synth import write_preset
from offload.engine import open_engine
from offload.model_file import read_facts
from specoffload.opening.choices import StartChoices
from specoffload.opening.context_size import context_reason
from specoffload.opening.target import target_options

TEXT = [(7 * i) % 200 + 3 for i in range(160)]
LINES: dict[str, dict[str, object]] = {
    "yarn": {"rope_scaling": "yarn", "rope_scale": 4.0, "yarn_orig_ctx": 64},
    "yarn-factors": {
        **{"rope_scaling": "yarn", "rope_freq_scale": 0.5, "yarn_orig_ctx": 32},
        **{"yarn_ext_factor": 0.5, "yarn_attn_factor": 1.2},
        **{"yarn_beta_slow": 2.0, "yarn_beta_fast": 16.0},
    },
    "linear": {"rope_scaling": "linear", "rope_scale": 2.0, "rope_freq_base": 50_000.0},
}


def _library_logits(path: Path, flags: dict[str, object]) -> NDArray[np.float32]:
    """The last token's logits of libllama itself, with llama.cpp's meaning of the flags."""
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 256, 256, 256
    params.n_threads = params.n_threads_batch = 1
    params.flash_attn_type, params.no_perf = 0, True
    params.kv_unified, params.type_k, params.type_v = True, 0, 0  # f32
    for name, value in flags.items():
        if name == "rope_scaling":
            params.rope_scaling_type = ["none", "linear", "yarn"].index(str(value))
        elif name == "rope_scale":
            params.rope_freq_scale = 1.0 / float(str(value))
        else:
            setattr(params, name, value)
    context = llama.llama_init_from_model(model, params)
    tokens = (llama.llama_token * len(TEXT))(*TEXT)
    assert llama.llama_decode(context, llama.llama_batch_get_one(tokens, len(TEXT))) == 0
    n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    row = np.ctypeslib.as_array(C.cast(llama.llama_get_logits(context), C.POINTER(C.c_float)),
                                (n_vocab,)).copy()  # fmt: skip
    llama.llama_free(context)
    llama.llama_model_free(model)
    return row


def _our_logits(path: Path, flags: dict[str, object]) -> NDArray[np.float32]:
    exact = {"flash_attn": "off", "type_k": "f32", "type_v": "f32"}
    config = config_of(model=path, device="cpu", threads=1, ctx_size=256, ubatch_size=256,
                       **exact, **flags)  # fmt: skip
    with open_engine(path, target_options(config, StartChoices.as_asked(config))) as engine:
        return np.array(engine.sequences.extend(0, TEXT)[-1])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rope") / "rope.gguf"
    return write_preset("mistral-large", file, size="tiny", seed=6, quant="f32", vocab="bytes")


@pytest.mark.parametrize("line", LINES)
def test_logits_are_libllamas_with_the_same_settings(path: Path, line: str) -> None:
    ours, plain = _our_logits(path, LINES[line]), _our_logits(path, {})
    assert np.allclose(ours, _library_logits(path, LINES[line]), rtol=1e-3, atol=1e-4)
    assert not np.allclose(ours, plain, rtol=1e-3, atol=1e-4), "the flags change nothing"


def test_the_default_context_is_the_longer_one(path: Path) -> None:
    plain = context_of(config_of(model=path, device="cpu")).n_ctx
    flags = LINES["yarn"] | {"yarn_orig_ctx": 0}
    longer = context_of(config_of(model=path, device="cpu", **flags))
    assert plain is not None
    assert longer.n_ctx == 4 * plain
    assert "that the rope flags stretch it to" in longer.reason


def test_a_context_beyond_a_stretched_one_is_said_with_the_length(path: Path) -> None:
    facts = read_facts(path)
    flags = LINES["linear"] | {"model": path, "device": "cpu"}
    n_ctx = 2 * facts.n_ctx_train
    assert context_reason(config_of(ctx_size=n_ctx, **flags), facts) == ""
    said = context_reason(config_of(ctx_size=n_ctx + 256, **flags), facts)
    assert f"the rope flags stretch the context to {n_ctx:,} tokens" in said
