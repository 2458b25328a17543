"""A refusal names the library's reason, and the model opens once its advice is followed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab.options import engine_options
from lab.synth.mixtures import write_mixture
from offload.engine import open_engine
from offload.errors import BadRequest, DoesNotFit, OffloadError
from offload.ggml.context import Context, _no_context
from offload.ggml.library.callback import Pending
from offload.ggml.model import Model, ModelPlacement

OPTIONS = engine_options(device="cpu", n_ctx=64)


def refusal(path: Path, **changed: Any) -> str:
    """The refusal of a start with these options, or "" if it opens and decodes."""
    try:
        with open_engine(path, engine_options(OPTIONS, **changed)) as engine:
            assert len(engine.sequences.extend(0, [1, 2, 3])) == 3
    except BadRequest as e:
        return str(e)
    return ""


@pytest.mark.parametrize(
    ("architecture", "asked", "says", "remedied"),
    [
        ("grok", {"type_k": "q8_0"}, "", {}),
        (
            "grok",
            {"type_k": "q8_0", "type_v": "q8_0"},
            "-ctv q8_0: the library computes grok without flash attention, and a quantised V cache "
            "needs it; use -ctv f16",
            {"type_v": "f16"},
        ),
        (
            "grok",
            {"flash_attn": "on"},
            "-fa on: the library computes grok without flash attention; use -fa auto",
            {"flash_attn": "auto"},
        ),
        (
            "qwen3moe",
            {"type_v": "q8_0", "flash_attn": "off"},
            "-ctv q8_0: a quantised V cache needs flash attention (-fa on)",
            {"flash_attn": "on"},
        ),
    ],
)
def test_a_mixture_opens_or_says_what_to_change_so_that_it_opens(
    architecture: str, asked: dict[str, str], says: str, remedied: dict[str, str], tmp_path: Path
) -> None:
    path = write_mixture(architecture, tmp_path / "m.gguf")
    assert refusal(path, **asked) == says
    assert refusal(path, **(asked | remedied)) == ""


def test_the_librarys_own_reason_against_options_names_no_context_size(tmp_path: Path) -> None:
    """The engine refuses such options itself. This asks the library for its words."""
    path = write_mixture("qwen3moe", tmp_path / "qwen.gguf")
    pending = Pending()
    model = Model(path, ModelPlacement(), pending)
    try:
        wanted = engine_options(OPTIONS, type_v="q8_0", flash_attn="off").wanted.context
        with pytest.raises(BadRequest, match="no context with these options .*V cache") as caught:
            Context(model, wanted, pending)
    finally:
        model.close()
    assert "--ctx-size" not in str(caught.value)


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("failed to allocate buffer for kv cache", DoesNotFit),
        ("failed to initialize the context: failed to allocate compute pp buffers", DoesNotFit),
        ("ggml_backend_cuda_buffer_type_alloc_buffer: out of memory", DoesNotFit),
        ("quantized V cache was requested, but this requires Flash Attention", BadRequest),
        ("failed to initialize the context: eagle3 requires ctx_other to be set", BadRequest),
        ("n_ubatch must be positive", BadRequest),
        ("no reason given", BadRequest),
    ],
)
def test_a_smaller_context_is_advised_only_where_memory_lacks(
    reason: str, kind: type[OffloadError]
) -> None:
    error = _no_context(4096, reason)
    assert type(error) is kind
    assert reason in str(error)
    assert ("lower --ctx-size" in str(error)) == (kind is DoesNotFit)
