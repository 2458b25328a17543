"""docs/core.md names the files of a decode in order, and each other file as what it adds.

tests/model/test_core_page.py compares the order with a run.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter

import pytest
from flow_page import CORE, ROOT, defined, items_of

WAYS = ("A decode of one token", "A prompt of 1,000 tokens")
PACKAGES = ("numa", "offload", "specdec", "specoffload")
NAMED = re.compile(r"`((?:numa|offload|specdec|specoffload)/[\w/.]*)`")


def core_files() -> list[str]:
    return [item.file for way in WAYS for item in items_of(CORE, way)]


def sources() -> list[str]:
    listed = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", *PACKAGES]
    files = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()
    code = [f for f in files if f.endswith((".py", ".c", ".cpp"))]
    return [f for f in code if not f.endswith("__init__.py") and (ROOT / f).exists()]


def test_the_core_has_at_most_25_files_each_named_once() -> None:
    files = core_files()
    assert 20 <= len(files) <= 25
    assert len(set(files)) == len(files)


@pytest.mark.parametrize("way", WAYS)
def test_each_file_of_the_core_defines_what_is_said_of_it(way: str) -> None:
    numbers = [int(n) for n in re.findall(r"^(\d+)\. ", CORE.split(f"## {way}\n")[1], re.MULTILINE)]
    assert numbers[: len(items_of(CORE, way))] == [*range(1, len(items_of(CORE, way)) + 1)]
    assert [item[:2] for item in items_of(CORE, way) if item.symbol not in defined(item.file)] == []


def test_every_path_is_there_and_is_named_once() -> None:
    named = Counter(NAMED.findall(CORE))
    assert [path for path, n in named.items() if n > 1] == []
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_other_file_adds_something() -> None:
    """It is named, or a folder above it is."""
    named = set(NAMED.findall(CORE))
    missing = [
        file for file in sources()
        if file not in named
        and not any(path.endswith("/") and file.startswith(path) for path in named)
    ]  # fmt: skip
    assert missing == []
