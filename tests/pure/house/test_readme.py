"""The README and the page on development are true: file tree, commands, figures and links."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

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


def test_every_test_that_a_page_names_exists() -> None:
    files = list((ROOT / "tests").rglob("test_*.py"))
    known = {path.stem for path in files}
    for path in files:
        text = path.read_text(encoding="utf-8")
        known.update(re.findall(r"^\s*(?:async )?def (test_\w+)", text, re.MULTILINE))
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        named = set(re.findall(r"\btest_[a-z0-9_]+", page.read_text(encoding="utf-8")))
        assert sorted(named - known) == [], page.name


def sentences(page: str) -> list[str]:
    """The sentences of a page's paragraphs and table cells. Lists of links are left out."""
    text = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    text = re.sub(r"^(?:#|<!--|- \*\*).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    parts = (" ".join(part.split()) for part in re.split(r"\n\s*\n|\|", text))
    return [one for part in parts for one in re.split(r"(?<=[.:?!])\s", part) if one]


def test_readme_is_short_and_says_first_what_is_not_proven() -> None:
    lines = re.sub(r"<!--.*?-->\n\n?", "", README, flags=re.DOTALL).splitlines()
    assert len(lines) <= 120
    assert "no GPU has run this yet" in lines[4]
    found = sentences(README)
    assert len(found) > 50, "the pattern finds the sentences"
    assert [one for one in found if len(one.split()) > 25] == []


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
        _, _, ram, context, prompts, answers = (c.strip() for c in row.strip("| ").split("|"))
        assert re.fullmatch(r"\d+k", context)
        assert ram == "none" or ram.endswith(" GiB")
        assert re.fullmatch(r"[\d,.]+", prompts)
        assert re.fullmatch(r"[\d.]+( to [\d.]+)?", answers)


def test_the_measured_figures_are_those_that_were_kept() -> None:
    from lab import readme

    kept = readme.load()
    assert kept.keys() == readme.ROWS.keys()
    assert readme.readme(kept) == README, "run scripts/lab/run readme"
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert readme.results(kept) == page, "run scripts/lab/run readme"
    for name, row in readme.ROWS.items():
        its = kept[name]
        assert its["commands"] == [command.format(folder=".") for command in row.commands]
        assert all(value > 0 for value in its["figures"].values())
        assert re.fullmatch(r"[0-9a-f]{7,12}", its["commit"]), "the commit that was measured"
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", its["date"])
        assert its["cpu"]
        share = its["others_share"]  # None: it was measured before the share was recorded
        assert share is None or 0 <= share <= 1
        (line,) = [line for line in README.splitlines() if line.startswith(f"| {row.question}")]
        assert line.endswith("**?** |") == (share is None or share >= 0.2)


def test_a_row_of_the_table_is_made_from_what_its_command_prints() -> None:
    from lab import readme

    row = readme.ROWS["wrapped"]
    of = row.figures(["wrote it\n", 'a note\n{"wrapped_ratio": 0.8}\n'])
    with pytest.raises(ValueError, match="not steady"):
        row.figures(["wrote it\n", '{"wrapped_ratio": null}\n'])
    assert of == {"decode": 1.25}
    assert row.brief(of) == "a decode takes 25 % longer than with libllama alone (`sim`)"
    assert "takes 1.25 × as long as with libllama alone" in row.answer(of)
    overlap = readme.ROWS["overlap"]
    cases = {"dense stream": 1.5, "prompt of 4 ubatches": 3.0, "4 ubatches, slow link": 2.0}
    cases["verification, 64 experts"] = 4.0
    printed = json.dumps({"overlap": [{"case": c, "ratio": r} for c, r in cases.items()]})
    assert "a decode takes 1.50 × as long" in overlap.answer(overlap.figures([printed]))
    assert "takes 4.00 × if" in overlap.answer(overlap.figures([printed]))
    brief = overlap.brief(overlap.figures([printed]))
    assert "takes 50 % longer than" in brief
    assert "takes 300 % longer if a third" in brief
    words = overlap.answer(overlap.figures([printed]))
    assert "takes 3.00 × if copies and computation take equally long, and 2.00 × if" in words
    stages = readme.ROWS["devices"]
    of = stages.figures(["one 9.00 s, two 9.00 s\none 4.00 s, two 2.00 s: 2.00 x; a step 1.00 x"])
    assert "read 2.0 × as fast as by one" in stages.answer(of)
    assert stages.brief(of) == "a prompt is read in 2.00 s instead of 4.00 s (`sim`)"
    server = readme.ROWS["server"]
    of = server.figures(['{"turns": {"1": {"ratio": 0.5}, "8": {"ratio": 2.0}}}'])
    assert server.answer(of).startswith("0.50 × llama-server's speed with one stream, 2.00 ×")
    words = "50 % slower than llama-server with one stream, 100 % faster with eight"
    assert server.brief(of).startswith(words)
    disk = readme.ROWS["disk"]
    ratios = {"cold decode_tps": 3, "warm decode_tps": 5, "cold prompt_tps": 1.5}
    of = disk.figures([json.dumps({"prompts of 512 tokens": {"ratios": ratios}})])
    assert disk.answer(of).startswith("decoding is 3 to 5 × as fast")
    policies = readme.ROWS["policies"]
    copying = [{"streamed_bytes": 9}]
    each = [
        {
            "workloads": {
                name: {"vs_no_drafts": plain, "vs_best_fixed": best, "rows": copying}
                for name, plain, best in (
                    ("mixed", r, 0.5),
                    ("agent", r / 4, 0.25),
                    ("code", r * 2, 0.125 * r),
                )
            }
        }
        for r in (2, 3, 4)
    ]
    words = policies.answer(policies.figures([json.dumps(one) for one in each]))
    assert "2.00 and 3.00 × the speed of plain" in words
    assert "That is 0.50 and 0.50 × the speed of the best fixed setting" in words
    assert "at 0.50 and 0.75 × plain decoding" in words
    assert "at 0.25 and 0.25 × the best fixed setting" in words
    assert "the default was at 1.00 × plain decoding on the worst" in words
    words = policies.brief(policies.figures([json.dumps(one) for one in each]))
    assert "100 % faster at 1 GB/s and 200 % faster at 400 MB/s" in words
    assert "it is 0 % faster on the worst text" in words
    still = {"vs_no_drafts": 0.1, "vs_best_fixed": 0.1, "rows": [{"streamed_bytes": 0}]}
    each[2]["workloads"]["prose"] = still
    words = policies.answer(policies.figures([json.dumps(one) for one in each]))
    assert "the default was at 1.00 × plain decoding on the worst" in words, "prose copies nothing"
    copying[0]["streamed_bytes"] = 0
    with pytest.raises(ValueError, match="nothing was copied, so the row would compare nothing"):
        policies.figures([json.dumps(one) for one in each])


def test_disturbed_figures_are_marked() -> None:
    from lab import readme

    kept = readme.load()
    quiet = {name: its | {"others_share": 0.05} for name, its in kept.items()}
    assert "**?** |" not in readme.readme(quiet)
    assert "?: other programs" not in readme.readme(quiet)
    for share in (None, 0.2):
        page = readme.readme(quiet | {"server": quiet["server"] | {"others_share": share}})
        (row,) = [line for line in page.splitlines() if "with eight (plain CPU" in line]
        assert row.endswith("a 14 MB model) **?** |")
        assert "?: other programs took 20 % or more" in page


def test_a_row_whose_command_fails_keeps_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    from lab import readme

    failing = replace(readme.ROWS["wrapped"], commands=("python -c 'raise SystemExit(3)'",))
    monkeypatch.setitem(readme.ROWS, "wrapped", failing)
    kept = {"wrapped": "as it was"}
    assert readme.measure(["wrapped"], kept) == ["wrapped"]
    assert kept == {"wrapped": "as it was"}


def test_the_plans_have_as_many_models_and_cards_as_readme_says() -> None:
    from lab import plans
    from lab.synth.published import PUBLISHED

    assert len(re.findall(r"^### ", PLANS, re.MULTILINE)) == len(PUBLISHED)
    assert f"has {len(PUBLISHED)} models on {WORDS[len(plans.VRAM_GIB)]} sizes of card" in README


def test_the_share_of_right_predictions_is_that_of_the_page_on_validation() -> None:
    page = (ROOT / "docs" / "validation.md").read_text(encoding="utf-8")
    (answers,) = re.findall(r"^\| decode \| all \| [\d.]+ \| (\d+)% \|", page, re.MULTILINE)
    (prompts,) = re.findall(r"^\| prompt \| all \| [\d.]+ \| (\d+)% \|", page, re.MULTILINE)
    assert f"{answers} % of answers within 25 %, and {prompts} % of prompts within 40 %" in README


def test_the_comparison_with_llama_cpp_has_the_numbers_of_its_tables() -> None:
    page = (ROOT / "docs" / "hybrid-model.md").read_text(encoding="utf-8")
    (lost,) = re.findall(r"^\| answers or prompts below 0.95 \| (\d+ of \d+) \|$", page, re.M)
    (one_start,) = re.findall(r"below 0.95 of one start \| (\d+ of \d+) \|$", page, re.M)
    assert f"in {lost} cases" in README
    assert f"in {one_start} cases" in README
    for column in ("on / better rival", "on / it"):
        ratios = ratios_of(page, column)
        words = f"{min(ratios):.2f} to {max(ratios):.2f} ×"
        assert f"decode {words} as fast" in page
        assert words in README


def ratios_of(page: str, column: str) -> list[float]:
    """The numbers of all tables' columns with this name."""
    found: list[float] = []
    head: list[str] = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        head = head if line.startswith("|") else []
        if head and column in head and not set(line) <= set("|-: "):
            found.append(float(cells[head.index(column)].strip("*")))
        head = head or (cells if line.startswith("|") else [])
    return found


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
