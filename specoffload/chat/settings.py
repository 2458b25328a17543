"""The part of a chat that whoever starts the program settles, for all conversations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specoffload.chat.conversation import ReasoningFormat, ReasoningOptions


@dataclass(frozen=True)
class ChatSettings:
    """A conversation that does not say otherwise gets these."""

    template: str | None = None  # instead of the model file's
    template_name: str = "of the model file"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning: ReasoningOptions = ReasoningOptions()
    continues: bool = True  # an answer that a conversation ends with is continued

    def reasoning_with(
        self,
        kwargs: Mapping[str, Any],
        *,
        form: ReasoningFormat | None = None,
        effort: str | None = None,
    ) -> ReasoningOptions:
        """The reasoning of a conversation with these template variables. The effort "none" turns
        it off."""
        effort = effort or self.reasoning.effort
        enabled = kwargs.get("enable_thinking", self.reasoning.enabled)
        if effort == "none":
            enabled, effort = False, None
        return ReasoningOptions(
            form or self.reasoning.format, enabled if isinstance(enabled, bool) else None, effort
        )
