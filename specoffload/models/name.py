"""Names of models that are no paths, as people write them. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

_WORD = r"[A-Za-z0-9][\w.-]*"
_HUB = re.compile(rf"(?:(?:https://)?(?:hf\.co|huggingface\.co)/)?({_WORD}/{_WORD})(?::({_WORD}))?")
_OLLAMA = re.compile(rf"ollama:((?:{_WORD}/)*{_WORD})(?::({_WORD}))?")
OLLAMA_TAG = "latest"


@dataclass(frozen=True)
class HubName:
    """A repository of the Hugging Face hub, and the quantisation or the file that is meant."""

    repo: str  # user/name
    quant: str = ""
    file: str = ""

    def __str__(self) -> str:
        return f"{self.repo}:{self.quant}" if self.quant else self.repo


@dataclass(frozen=True)
class OllamaName:
    """A model that ollama has fetched; `name` may have a namespace and a host in front."""

    name: str
    tag: str = OLLAMA_TAG

    def __str__(self) -> str:
        return f"ollama:{self.name}:{self.tag}"


def read_hub_name(text: str, file: str = "") -> HubName | None:
    """`user/repo[:quant]`, with the hub's address in front or not; None for anything else."""
    found = _HUB.fullmatch(text)
    return HubName(found[1], found[2] or "", file) if found else None


def read_name(text: str) -> HubName | OllamaName | None:
    """The model that a word names, unless it can only be a path or a text."""
    ollama = _OLLAMA.fullmatch(text)
    if ollama:
        return OllamaName(ollama[1], ollama[2] or OLLAMA_TAG)
    return None if text.endswith(".gguf") else read_hub_name(text)
