"""The held-out prompts of the embedded pair, which `bench` continues."""

from __future__ import annotations

import json

from specoffload.config.resolution import demo_file


def prompts(kind: str = "code") -> list[str]:
    """The prompts of `kind`, which is "code" or "prose"."""
    rows = json.loads(demo_file("prompts.json").read_text(encoding="utf-8"))
    return [row["text"] for row in rows if row["kind"] == kind]
