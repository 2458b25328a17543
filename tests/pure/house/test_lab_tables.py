"""The list of tables that commands of the lab write into pages (lab.tables)."""

from __future__ import annotations

import re
from collections import Counter

from lab import ROOT, tables

# Parts that no command of the lab writes: a test writes this one.
OTHERS = {("docs/sampling.md", "schema suite")}


def test_every_table_of_a_page_is_listed_once() -> None:
    listed = Counter((t.page, part) for t in tables.TABLES for part in t.parts)
    assert max(listed.values()) == 1
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    there = {
        (str(page.relative_to(ROOT)), name)
        for page in pages
        for name in re.findall(
            r"^<!-- ([^:\n]+) -->\n(?:(?!<!-- ).*\n)*?<!-- end -->$", page.read_text(), re.MULTILINE
        )
    }
    assert there - OTHERS == set(listed)


def test_every_command_of_the_list_exists() -> None:
    known = re.findall(r"^\| `([\w-]+)", (ROOT / "scripts/lab/README.md").read_text(), re.MULTILINE)
    assert {t.command for t in tables.TABLES} <= {*known}
    for t in tables.TABLES:
        assert (ROOT / "scripts/lab" / f"{t.command.replace('-', '_')}.py").exists()
        assert t.takes


def test_the_page_has_the_list() -> None:
    page = tables.page_of("tables").read_text(encoding="utf-8")
    assert page == tables.page(), "run scripts/lab/run tables"
