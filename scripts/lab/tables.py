"""Lists the tables that the lab's commands write into pages, and writes docs/development.md's list.

Part `x` of a page is the text from `<!-- x -->` to `<!-- end -->`.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from lab import ROOT
from lab.synth.published import PUBLISHED
from specoffload.cpu_load import Load


@dataclass(frozen=True)
class Tables:
    """The parts of a page that a command of the lab writes, and how long it takes.

    The times are those of one processor of an idle machine.
    """

    command: str
    page: str  # in the repository
    parts: tuple[str, ...]
    takes: str

    @property
    def path(self) -> Path:
        return ROOT / self.page


TABLES = (
    Tables("plans", "docs/plans.md", ("example", "caches", *PUBLISHED), "over 2 minutes"),
    Tables("plans", "README.md", ("plans",), "over 2 minutes"),
    Tables("cached-routes", "docs/hybrid.md", ("cached misses", "cached speeds"), "2 minutes"),
    Tables("best-plans", "docs/plans.md", ("best",), "7 seconds"),
    Tables(
        "hybrid-model", "docs/hybrid-model.md",
        ("T(n)", "guesses", "machines", "DeepSeek-R1", "gpt-oss-120b", "Qwen3-235B-A22B"),
        "8 seconds",
    ),
    Tables(
        "mtp-model", "docs/hybrid-model.md",
        (
            "experts of a batch", "GLM-4.6, MTP", "DeepSeek-R1, MTP", "Qwen3-Next-80B-A3B, MTP",
            "Qwen3.5-35B-A3B, MTP",
        ),
        "10 seconds",
    ),
    Tables("default-plans", "docs/hybrid-model.md", ("defaults", "default rules"), "80 seconds"),
    Tables("published", "docs/validation.md", ("summary", "misses", "cases"), "2 seconds"),
    Tables("draft-pairs", "docs/validation.md", ("pairs summary", "pairs", "mtp"), "2 seconds"),
    Tables("curve-fits", "docs/background.md", ("curve fits",), "1 second"),
    Tables("first-tokens", "docs/background.md", ("first tokens",), "3 seconds"),
    Tables("lattice", "docs/speculation.md", ("lattice",), "30 seconds"),
    Tables("record", "docs/background.md", ("record",), "1 second"),
    Tables(
        "virtual-gpu", "docs/gpu.md",
        ("virtual steps", "virtual differences", "virtual overlap", "virtual turns"),
        "10 minutes",
    ),
    Tables("split-price", "docs/gpu.md", ("split price",), "2 minutes"),
    Tables("architectures", "docs/models.md", ("mixtures",), "not measured"),
    Tables("agents-day", "docs/results.md", ("agents day",), "5 minutes"),
    Tables("four-slots", "docs/results.md", ("four slots",), "10 minutes"),
    Tables("stream-price", "docs/log.md", ("streams",), "3 seconds"),
    Tables("readme", "README.md", ("measured",), "40 minutes"),
    Tables("readme", "docs/results.md", ("answers", "readme"), "40 minutes"),
    Tables("tables", "docs/development.md", ("tables",), "1 second"),
)  # fmt: skip


def page_of(command: str) -> Path:
    """The first page into which the command writes tables."""
    return next(tables.path for tables in TABLES if tables.command == command)


def filled(page: Path, parts: Mapping[str, str]) -> str:
    """The page's text with new parts. Raises ValueError if the page lacks a part."""
    text = page.read_text(encoding="utf-8")
    for name, part in parts.items():
        place = re.compile(rf"(?<=<!-- {re.escape(name)} -->\n).*?(?=<!-- end -->)", re.DOTALL)
        text, n = place.subn(lambda _, part=part: f"\n{part}\n\n", text)  # type: ignore[misc]
        if n != 1:
            raise ValueError(f"{page} has {n} parts named {name!r}")
    return text


def conditions(model: Path, n_threads: int, n_rounds: int, load: Load) -> str:
    """A sentence for a table of servers that took turns on this CPU, with the day and the load."""
    return (
        f"{model.name} on the CPU ({platform.machine()}), `-t {n_threads}`, "
        f"{datetime.now(UTC).date()}, {n_rounds} rounds; {load.words} meanwhile."
    )


def publish(page: Path, part: str, text: str, *, only_prints: bool) -> None:
    """Print the text, and write it into that part of the page unless it `only_prints`."""
    print(text)
    if not only_prints:
        page.write_text(filled(page, {part: text}), encoding="utf-8")


def listed() -> str:
    """The list as a table, with the names of at most four parts of a page."""
    lines = ["| page | tables | made by | takes |", "|---|---|---|---|"]
    for tables in TABLES:
        names = "; ".join(tables.parts[:4]) + "; …" * (len(tables.parts) > 4)
        made_by = f"`scripts/lab/run {tables.command}`"
        lines.append(f"| `{tables.page}` | {names} | {made_by} | {tables.takes} |")
    return "\n".join(lines)


def page() -> str:
    """The text of docs/development.md with this list."""
    return filled(page_of("tables"), {"tables": listed()})


if __name__ == "__main__":
    page_of("tables").write_text(page(), encoding="utf-8")
