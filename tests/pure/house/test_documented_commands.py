"""The program and the scripts accept every command line on the documentation's pages."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from specoffload.cli import commands
from specoffload.commands.demo import NEXT
from specoffload.config.command_line import HELP, read_command_line
from specoffload.config.table import TABLE

ROOT = Path(__file__).parents[3]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / "scripts").rglob("README.md"),
]
OF_THE_PROGRAM = {
    "COMMAND",
    "--version",
    "--help-all",
    "--install-completion",
    "--show-completion",
    *HELP,
}
OURS = frozenset(name for flag in TABLE for name in flag.names)
NUMBER = re.compile(r"[A-Z]")  # placeholder as in `--port P`
CODE = re.compile(r"```.*?\n(.*?)```|`([^`\n]+)`", re.S)


def code(page: str) -> Iterator[str]:
    """Yields code of a page: inline code, each line of code blocks, and indented lines."""
    for block, inline in CODE.findall(page):
        yield from block.replace("\\\n", " ").splitlines() if block else [inline]
    yield from (line.strip() for line in page.splitlines() if line.startswith("    "))


def said_of(program: str, page: str) -> set[str]:
    """The words after the program's name on each line that calls it."""
    found = set()
    for line in code(page):
        line = re.split(r"\s#|\s{3,}|…|\.\.\.$", line)[0]
        for part in re.split(r" \| | && ", line):
            at = re.match(rf"(?:\$ )?(?:[A-Z_]+=\S* )*{program}(?=\s)(.*)", part.strip())
            if at:
                found.add(re.split(r"\s[<>]\s", at[1])[0].strip())
    return found


def lines() -> list[tuple[str, str]]:
    found = [(page, words) for page in PAGES for words in said_of("specoffload", page.read_text())]
    shown = {words for line in NEXT for words in said_of("specoffload", f"`{line[8:]}`")}
    return sorted({(page.name, words) for page, words in found} | {("demo", w) for w in shown})


@pytest.mark.parametrize(("page", "words"), lines(), ids=lambda text: text[:60])
def test_a_command_line_on_a_page_is_read(page: str, words: str) -> None:
    names = {name for name, _ in commands()}
    first, *rest = [*shlex.split(re.sub(r"[\[\]]", "", words))]
    if first in OF_THE_PROGRAM:
        return
    if rest and f"{first} {rest[0]}" in names:
        first = f"{first} {rest.pop(0)}"
    if first == "tune":  # `tune` alone means `tune all`
        first = "tune all"
    assert first in names, f"{page}: there is no command {first}"
    read_command_line(first, ["8" if NUMBER.fullmatch(word) else word for word in rest])


def scripts() -> list[tuple[str, str]]:
    """(script, its words) of every call on a page. Commands of the lab are named `lab/run NAME`."""
    files = [p.name for p in (ROOT / "scripts").iterdir() if p.is_file() and not p.suffix]
    lab = re.findall(r"^\| `([\w-]+)", (ROOT / "scripts/lab/README.md").read_text(), re.MULTILINE)
    return sorted(
        {
            (script, words)
            for script in [*files, *(f"lab/run {name}" for name in lab)]
            for page in PAGES
            for words in said_of(f"scripts/{script}", page.read_text(encoding="utf-8"))
        }
    )


@pytest.mark.parametrize(("script", "words"), scripts(), ids=lambda text: text[:60])
def test_a_scripts_flags_on_a_page_are_in_the_script(script: str, words: str) -> None:
    path = ROOT / "scripts" / script
    if words.startswith("lab "):  # test-sanitized runs a command of the lab
        script, path = words.split()[1], ROOT
    if script == "synth" or not path.is_file():  # a command of the lab
        path = ROOT / "scripts/lab" / script.split()[-1].replace("-", "_")
    beside = path.with_name(path.name.replace("-", "_"))
    sources = [*beside.parent.glob(f"{beside.name}*.py"), *beside.glob("*.py")]
    text = "".join(p.read_text(encoding="utf-8") for p in [path, *sources] if p.is_file())
    assert text, f"there is no scripts/{script}"
    passed_on = OURS if "[flags of specoffload" in text else frozenset()
    for flag in re.findall(r"(?<=\s)--[a-z][a-z-]+", f" {words}"):
        of_typer = rf"\b{flag[2:].replace('-', '_')}: Annotated"
        assert flag in text or flag in passed_on or re.search(of_typer, text), (
            f"scripts/{script} knows no {flag}"
        )


def test_lines_were_found() -> None:
    """Fails if the patterns no longer find command lines on the pages."""
    assert len(lines()) > 40
    assert len(scripts()) > 20
    assert {page for page, _ in lines()} > {"README.md", "models.md", "speculation.md", "demo"}
