"""The README and the page on development are true: file tree, commands, figures and links."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DEVELOPMENT = (ROOT / "docs" / "development.md").read_text(encoding="utf-8")
PLANS = (ROOT / "docs" / "plans.md").read_text(encoding="utf-8")
WORDS = {6: "six", 7: "seven", 8: "eight"}


def block_after(page: str, heading: str) -> str:
    text = page.split(f"## {heading}\n", 1)[1]
    return text.split("```", 2)[1].split("\n", 1)[1]


def tree() -> list[tuple[str, str]]:
    """(path, description) of each line of the layout block. Indented lines are inside the folder
    above."""
    rows, folder = [], ""
    for line in block_after(DEVELOPMENT, "Layout").splitlines():
        name, _, words = line.strip().partition(" ")
        if not line.startswith(" "):
            folder = name
            rows.append((name, words.strip()))
        else:
            rows.append((folder + name, words.strip()))
    return rows


def test_the_layout_is_what_is_on_the_disk() -> None:
    for path, words in tree():
        assert (ROOT / path).exists(), path
        assert (ROOT / path).is_dir() == path.endswith("/")
        assert words, path
    tracked = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    folders = {line.split("/")[0] + "/" for line in tracked if "/" in line}
    hidden = {folder for folder in folders if folder.startswith(".")}
    assert folders - hidden == {
        path for path, _ in tree() if path.endswith("/") and path.count("/") == 1
    }


def test_every_script_is_named_in_the_layout_or_its_readme() -> None:
    described = (ROOT / "scripts" / "README.md").read_text(encoding="utf-8")
    scripts = [p.name for p in (ROOT / "scripts").iterdir() if p.is_file() and p.suffix == ""]
    missing = [name for name in scripts if f"`{name}`" not in described]
    assert missing == []


def test_every_link_leads_somewhere() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_two_commands_exist_and_are_executable() -> None:
    lines = block_after(README, "Two commands").splitlines()
    assert [line.split()[0] for line in lines] == ["scripts/run", "scripts/test"]
    for line in lines:
        script = ROOT / line.split()[0]
        assert script.is_file()
        assert script.stat().st_mode & 0o111


def test_the_table_of_models_is_what_the_plans_say() -> None:
    from lab import plans

    assert plans.readme(PLANS) == README, "run scripts/lab/run plans"
    rows = re.findall(r"^\| .* \| \d+ GiB \| .* \|$", README, re.MULTILINE)
    assert len(rows) == len(plans.README_TITLES)
    for title in ("Qwen3.8-Flash-Next", "DeepSeek-V4-Flash", "Kimi-K3", "Qwen3.6-35B-A3B",
                  "GLM-5.3-Flash", "MiniMax-M3"):  # fmt: skip
        row = next(row for row in rows if row.startswith(f"| {title}"))
        cells = [cell.strip().split(", ") for cell in row.strip("| ").split("|")]
        assert [len(cell) for cell in cells[2:]] == [3, 3], "cards of 12, 24 and 32 GiB"


def test_the_plans_have_as_many_models_and_cards_as_readme_says() -> None:
    from lab import plans
    from lab.synth.published import PUBLISHED

    assert len(re.findall(r"^### ", PLANS, re.MULTILINE)) == len(PUBLISHED)
    assert f"has {len(PUBLISHED)} models on {WORDS[len(plans.VRAM_GIB)]} sizes of card" in README


def test_the_page_of_flags_is_made_from_the_table() -> None:
    from lab.flag_pages import flags_page

    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    assert page == flags_page(), "run scripts/gen-flags"


def test_the_manual_page_is_what_the_table_says_and_roff_reads_it() -> None:
    from lab.flag_pages import man_page
    from specoffload.cli import commands

    page = man_page(commands())
    path = ROOT / "docs" / "specoffload.1"
    assert path.read_text(encoding="utf-8") == page, "run scripts/gen-flags"
    for name, _ in commands():
        assert f".B {name}" in page
    if groff := shutil.which("groff"):
        done = subprocess.run(
            [groff, "-man", "-ww", "-z", "-Tutf8", str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
