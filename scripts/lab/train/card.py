"""Makes the model card CARD.md from card.json. Rounds figures, and computes none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined


def render_card(card: dict[str, Any]) -> str:
    template = Path(__file__).with_name("card.md").read_text(encoding="utf-8")
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(template).render(card)
