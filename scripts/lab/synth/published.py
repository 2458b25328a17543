"""Makes headers, without data, of the published models for which plans are made and tested."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lab.synth.shape import resolve
from lab.synth.write import plan_shape, write_header_only
from offload.model import ModelFacts
from offload.model_file import read_facts

# Preset and mixture of types by title. None is the preset's own: Q4_K_M or the published types.
PUBLISHED: dict[str, tuple[str, str | None]] = {
    "DeepSeek-R1": ("deepseek-r1", None),
    "DeepSeek-R1 UD-Q2_K_XL": ("deepseek-r1", "UD-Q2_K_XL"),
    "DeepSeek-R1 UD-Q4_K_XL": ("deepseek-r1", "UD-Q4_K_XL"),
    "DeepSeek-V3.2": ("deepseek-v3.2", None),
    "Kimi-K2": ("kimi-k2", None),
    "Kimi-K3": ("kimi-k3", None),
    "GLM-4.6": ("glm-4.6", None),
    "GLM-5": ("glm-5", None),
    "GLM-5.3-Flash": ("glm-5.3-flash", None),
    "MiniMax-M2": ("minimax-m2", None),
    "MiniMax-M3": ("minimax-m3", None),
    "Qwen3-235B-A22B": ("qwen3-235b-a22b", None),
    "Qwen3-30B-A3B": ("qwen3-30b-a3b", None),
    "Qwen3-Next-80B-A3B": ("qwen3-next-80b-a3b", None),
    "Qwen3.5-122B-A10B": ("qwen3.5-122b-a10b", None),
    "Qwen3.6-35B-A3B": ("qwen3.6-35b-a3b", None),
    "Qwen3.8-Flash-Next": ("qwen3.8-flash-next", None),
    "DeepSeek-V4-Flash": ("deepseek-v4-flash", None),
    "gpt-oss-120b": ("gpt-oss-120b", None),
    "Llama-4-Maverick": ("llama-4-maverick", None),
    "Llama-4-Scout": ("llama-4-scout", None),
    "Gemma-3n-E4B": ("gemma-3n-e4b", None),
    "Mistral-Large-2411": ("mistral-large-2411", None),
    "Qwen2.5-32B": ("qwen2.5-32b", None),
}


# Published files hold these weights of a layer for multi-token prediction only if they differ from
# the model's own.
_SHARED = r"\.nextn\.(embed_tokens|shared_head_head)\.weight$"


class PublishedFacts(dict[str, ModelFacts]):
    """Facts of published models by title. Each header is made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, title: str) -> ModelFacts:
        self[title] = published_facts(title, self._folder)
        return self[title]


def published_facts(title: str, folder: Path, *, mtp: bool = False) -> ModelFacts:
    """Facts of the full model. Its header is written to `folder` and read like any other file.

    A title that is not in `PUBLISHED` is the name of a preset. `mtp` adds the published layer for
    multi-token prediction if the preset lacks it.
    """
    preset, quant = PUBLISHED.get(title, (title.lower(), None))
    shape = resolve(preset, "full", quant=quant)
    if mtp and "nextn_predict_layers" not in shape.metadata:
        more = {"block_count": shape.number("block_count") + 1, "nextn_predict_layers": 1}
        metadata = {**shape.metadata, **more}
        shape = replace(shape, metadata=metadata, without=(*shape.without, _SHARED))
    planned = plan_shape(shape, "none")
    return read_facts(write_header_only(planned, folder / f"{title.replace(' ', '-')}.gguf"))
