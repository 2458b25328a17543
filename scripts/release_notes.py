"""Writes the notes of a release, and compares wheels.

release_notes.py notes FOLDER, or same ARCHIVE WHEEL, or equal WHEEL WHEEL.

Notes come from git and docs/log.md: what has changed since the last release (a tag such as v0.1.0),
and which experiments were written down since then.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_LOG = "docs/log.md"
_ENTRY = re.compile(r"^\+- \*\*(.+?)\*\* \((\d{4}-\d{2}-\d{2})")
_FEW = 30  # changes that the notes of a first release show
# Files that only one of two wheels has: what scripts/wheel adds, and names of the build.
_ADDED = re.compile(r"^(llama_cpp/|specoffload\.libs/|[^/]+\.dist-info/|offload/ggml/libplayer-)")


@dataclass(frozen=True)
class Made:
    """The parts of a release, and the checks that they passed."""

    version: str
    commit: str
    date: str
    files: Sequence[tuple[str, int]]  # names and bytes
    ran: Sequence[str]  # CPU backends that decoded on the machine of the release
    other: Sequence[str]  # those for other processors, which were not run
    gpu: Sequence[str] = ()  # what wheels for GPUs were compiled for, and where they ran


def notes(made: Made, since: str, subjects: Sequence[str], entries: Sequence[str]) -> str:
    """Return the notes. `since` is the tag of the last release, "" if there is none.

    `subjects` are those of the commits since then, the newest first. `entries` are titles of
    docs/log.md.
    """
    lines = [f"# specoffload {made.version}", "", f"Commit {made.commit}, {made.date}.", ""]
    lines += ["| file | MB |", "|---|---|"]
    lines += [f"| {name} | {n_bytes / 1e6:.1f} |" for name, n_bytes in made.files]
    lines += ["", "`sha256sum -c SHA256SUMS` checks the files. `pip install` of the wheel compiles"]
    lines += [
        "nothing. It takes other packages from PyPI. docs/install.md has all ways to install."
    ]
    lines += ["", "## Checked", "", "The wheel was installed into an empty environment without a"]
    lines += ["compiler, where `doctor` passed and the embedded pair decoded."]
    if made.ran:
        lines += ["", f"These CPU backends decoded: {', '.join(made.ran)}."]
    if made.other:
        lines += ["", f"Nobody has run these for this release: {', '.join(made.other)}."]
    if made.gpu:
        lines += ["", "Wheels for GPUs. No GPU has run them for this release:", ""]
        lines += [f"- {line}" for line in made.gpu]
    shown = subjects if since else subjects[:_FEW]
    title = f"## Changes since {since}" if since else f"## The last {len(shown)} changes"
    lines += ["", title, "", *(f"- {subject}" for subject in shown)]
    if entries:
        lines += ["", "## Experiments since then (docs/log.md)", ""]
        lines += [f"- {entry}" for entry in entries]
    return "\n".join(lines) + "\n"


def new_entries(diff: str) -> list[str]:
    """Return titles and dates of the entries that a diff of docs/log.md adds."""
    found = (_ENTRY.match(line) for line in diff.splitlines())
    return [f"{match[1]} ({match[2]})" for match in found if match is not None]


def lacking(of_archive: Sequence[str], of_wheel: Sequence[str]) -> list[str]:
    """Return the names of the program's files that the wheel has and the source archive lacks."""
    missing = set(of_wheel) - set(of_archive)
    return sorted(n for n in missing if not (n.endswith("/") or _ADDED.match(n)))


def differing(a: Mapping[str, int], b: Mapping[str, int]) -> list[str]:
    """Return the names of the program's files whose checksums differ between two wheels."""
    names = {name for name in a.keys() | b.keys() if not (name.endswith("/") or _ADDED.match(name))}
    return sorted(name for name in names if a.get(name) != b.get(name))


def _checksums(wheel: Path) -> dict[str, int]:
    with zipfile.ZipFile(wheel) as opened:
        return {entry.filename: entry.CRC for entry in opened.infolist()}


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *words], check=False, capture_output=True, text=True
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def _version() -> str:
    found = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text("utf-8"), re.M)
    if found is None:
        sys.exit("pyproject.toml has no version")
    return found[1]


def _write(folder: Path, ran: str, other: str, gpu: Sequence[str]) -> None:
    files = sorted((path.name, path.stat().st_size) for path in folder.iterdir())
    commit, date = _git("log", "-1", "--format=%h %cs").split()
    made = Made(_version(), commit, date, files, ran.split(), other.split(), gpu)
    since = _git("describe", "--tags", "--abbrev=0", "--match", "v*", "HEAD^")
    changes = f"{since}..HEAD" if since else "HEAD"
    subjects = _git("log", "--no-merges", "--format=%s", changes).splitlines()
    entries = new_entries(_git("diff", since, "HEAD", "--", _LOG)) if since else []
    print(notes(made, since, subjects, entries), end="")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    written = commands.add_parser("notes")
    written.add_argument("folder", type=Path)
    written.add_argument("--ran", default="")
    written.add_argument("--other", default="")
    written.add_argument("--gpu", type=Path)
    same = commands.add_parser("same")
    same.add_argument("of_archive", type=Path)
    same.add_argument("wheel", type=Path)
    equal = commands.add_parser("equal")
    equal.add_argument("wheels", type=Path, nargs=2)
    asked = parser.parse_args(arguments)
    if asked.command == "notes":
        gpu = asked.gpu.read_text("utf-8").splitlines() if asked.gpu else []
        _write(asked.folder, asked.ran, asked.other, gpu)
    elif asked.command == "equal":
        if found := differing(*map(_checksums, asked.wheels)):
            sys.exit(f"not equal: {', '.join(found)}")
    elif missing := lacking(
        *(zipfile.ZipFile(f).namelist() for f in (asked.of_archive, asked.wheel))
    ):
        sys.exit(f"not in the source archive: {', '.join(missing)}")


if __name__ == "__main__":
    main()
