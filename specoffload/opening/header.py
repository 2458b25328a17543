"""The header of a configuration's target, with the values that replace the file's own."""

from __future__ import annotations

from offload.kv_overrides import FLAG
from offload.model import ModelFacts
from offload.model_file import read_facts
from specoffload.config.resolution import Config


def target_facts(config: Config) -> ModelFacts:
    """Read the target's header, with the values of --override-kv. Raises BadModel."""
    return read_facts(config.model, config.kv_overrides)


def override_reason(facts: ModelFacts) -> str:
    """Name the values that replace the file's own, or return ""."""
    if not facts.overrides:
        return ""
    of_file = read_facts(facts.path).header.metadata
    each = [
        f"{override.key} is {override.shown_value} ({_file_words(of_file.get(override.key))})"
        for override in facts.overrides
    ]
    return f"{FLAG}: {', '.join(each)}: texts may differ from the model's own"


def _file_words(value: object) -> str:
    if value is None:
        return "the file has no value"
    shown = str(value).lower() if isinstance(value, bool) else f"{value!s:.60}"
    return f"the file: {shown}"
