"""Flags that are named in messages, docstrings and pages exist in the table of flags."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from specoffload.config.command_line import HELP
from specoffload.config.foreign import FOREIGN
from specoffload.config.table import TABLE
from specoffload.config.typer_commands import HELP_ALL

ROOT = Path(__file__).parents[3]
_NAME = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w*-])")
OURS = {name for flag in TABLE for name in (*flag.names, *flag.off)}
OTHERS = {
    "--short",  # flag of git
    "--gpu",  # flag of scripts/setup
    "--cpunodebind",  # flag of numactl
    "--name",  # example
    "--off-name",
    *("--profile", "--record"),  # flags of scripts/lab/run simulate
    "--ulimit",  # flag of docker
    *("--fit-target", "--moe-cache-mib", "--moe-cache-cpu-share"),  # flags of llama.cpp
    "--moe-stream-cache",  # flag of Crow
    *("--force-reinstall", "--no-cache-dir", "--quiet", "--no-deps", "--no-binary"),  # of pip
    "--disable-pip-version-check",
    "--no-undefined",  # flag of the linker
    *("--policy", "--cache-threshold", "--worker-urls"),  # flags of SGLang's router
    *("--worker-startup-check-interval", "--health-check-interval-secs"),
    *("--prometheus-host", "--prometheus-port"),
    *("--version", "--show-completion", "--install-completion"),
    HELP_ALL,
    *HELP,
}
THEIRS = (
    "foreign",
    "tuned",
    "llama_server",
    "llama_bench_words",
)  # modules with other programs' flags


def test_a_flag_that_a_text_names_is_one_of_ours() -> None:
    unknown = []
    for package in ("numa", "specdec", "offload", "specoffload"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.stem in THEIRS:
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    named = set(_NAME.findall(node.value)) - OURS - OTHERS
                    unknown += [f"{path}:{node.lineno}: {name}" for name in sorted(named)]
    assert unknown == []


# Pages that name flags of scripts and of other programs, and pages that are generated or history.
_OTHER_PAGES = {"clients", "defence", "development", "flags", "gpu", "install", "log", "results",
                "synth"}  # fmt: skip
_PAGES = sorted({path.stem for path in (ROOT / "docs").glob("*.md")} - _OTHER_PAGES)


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{name}.md" for name in _PAGES)])
def test_a_flag_that_a_page_names_is_one_of_ours_or_of_llama_cpp(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    theirs = {name for flag in FOREIGN for name in (*flag.names, *flag.off)}
    assert set(_NAME.findall(text)) - OURS - OTHERS - theirs == set()
