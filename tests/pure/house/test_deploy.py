"""Container images and systemd units name only things that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from specoffload.cli import commands
from specoffload.config.environment import read_environment
from specoffload.config.table import TABLE

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "scripts" / "deploy"
IMAGES = sorted(DEPLOY.glob("*.Dockerfile"))
UNITS = sorted(DEPLOY.glob("*.service"))


def copied(image: Path) -> list[str]:
    lines = re.findall(r"^COPY (?!--from)(.+) \S+$", image.read_text(encoding="utf-8"), re.M)
    return [word for line in lines for word in line.split()]


@pytest.mark.parametrize("image", IMAGES, ids=lambda p: p.name)
def test_an_image_copies_what_the_wheel_is_made_of_and_its_context_has_it(image: Path) -> None:
    context = Path(f"{image}.dockerignore").read_text(encoding="utf-8").splitlines()
    kept = {line[1:] for line in context if line.startswith("!")}
    assert set(copied(image)) == kept
    assert all((ROOT / name).exists() for name in kept)
    packages = re.search(r"include = \[(.+)\]", (ROOT / "pyproject.toml").read_text("utf-8"))
    assert packages is not None
    assert {name.strip('"* ') for name in packages[1].split(",")} <= kept

    said = re.search(r"^CMD \[(.+)\]$", image.read_text(encoding="utf-8"), re.M)
    assert said is not None
    command, *words = [word.strip(' "') for word in said[1].split(",")]
    assert command in dict(commands())
    names = {name for flag in TABLE for name in flag.names}
    assert {word for word in words if word.startswith("-")} <= names


@pytest.mark.parametrize("image", IMAGES, ids=lambda p: p.name)
def test_the_shell_and_python_read_what_an_image_runs(image: Path) -> None:
    text = image.read_text(encoding="utf-8").replace("\\\n", " ")
    runs = re.findall(r"^RUN (.+)$", text, re.M)
    assert len(runs) >= 3
    for line in runs:
        subprocess.run(["sh", "-n", "-c", line], check=True)
        assert line.count("apt-get update") == line.count("rm -rf /var/lib/apt/lists")
    (check,) = re.findall(r"^HEALTHCHECK .*CMD (\[.+\])$", text, re.M)
    python, option, program = json.loads(check)
    assert python.startswith("python")
    assert option == "-c"
    compile(program, image.name, "exec")


@pytest.mark.parametrize("image", IMAGES, ids=lambda p: p.name)
def test_what_an_image_names_was_said_before(image: Path) -> None:
    """Variables have values, and files come from existing stages. The last stage runs no step as
    root."""
    text = image.read_text(encoding="utf-8")
    said = set(re.findall(r"^(?:ARG|ENV) (\w+)=", text, re.M))
    assert set(re.findall(r"\$\{(\w+)\}", text)) <= said
    stages = set(re.findall(r"^FROM \S+ AS (\w+)$", text, re.M))
    assert set(re.findall(r"^COPY --from=(\w+)", text, re.M)) <= stages
    last = text.rpartition("\nFROM ")[2]
    assert re.search(r"^USER (?!root)\w+$", last, re.M)
    assert "RUN" not in last.partition("\nUSER ")[2]


@pytest.mark.parametrize("unit", UNITS, ids=lambda p: p.name)
def test_systemd_understands_a_unit(unit: Path, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze here")
    program = tmp_path / "specoffload"
    program.write_text("#!/bin/sh\n", encoding="ascii")
    program.chmod(0o755)
    text = unit.read_text(encoding="utf-8")
    copy = tmp_path / unit.name
    copy.write_text(text.replace("/opt/specoffload/bin/specoffload", str(program)), "utf-8")
    done = subprocess.run(
        [analyze, "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_service_has_a_folder_for_all_that_it_keeps() -> None:
    """A dynamic user has no home. Its only writable folders are those that systemd makes."""
    text = (DEPLOY / "specoffload.service").read_text(encoding="utf-8")
    caches = Path("/var/cache") / re.findall(r"^CacheDirectory=(.+)$", text, re.M)[0]
    named = dict(re.findall(r"^Environment=(\w+)=(.+)$", text, re.M))
    kept = read_environment(named)
    folders = (kept.profile_folder, kept.prompt_folder, kept.chat_history, kept.llama_cache)
    assert all(folder.is_relative_to(caches) for folder in folders)
    assert all(
        Path(named[name]).is_relative_to(caches) for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME")
    )
    assert "\nRestartPreventExitStatus=2 203 216\n" in text
    assert "\nSupplementaryGroups=render video\n" in text
