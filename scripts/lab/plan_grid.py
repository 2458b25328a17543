"""Plans 720 combinations of published models, cards and flags, to compare two versions of the code.

Without an argument it prints a line of JSON for each combination. With a file of such lines it
prints which values have changed, and ends with code 1 if some have. Names of models after the file
choose some of them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from lab.synth.published import published_facts
from specoffload.cli import app

MODELS = (
    "Qwen3-30B-A3B", "Qwen3.6-35B-A3B", "gpt-oss-120b", "Qwen3.8-Flash-Next", "Qwen3-235B-A22B",
    "DeepSeek-V4-Flash", "GLM-5.3-Flash", "GLM-4.6", "DeepSeek-R1", "Kimi-K3", "Gemma-3n-E4B",
    "Mistral-Large-2411",
)  # fmt: skip
MACHINES = (
    ("--vram", "8GiB", "--ram", "64GiB"),
    ("--vram", "12GiB", "--ram", "256GiB"),
    ("--vram", "24GiB", "--ram", "512GiB"),
    ("--vram", "24GiB,16GiB", "--ram", "512GiB"),
    ("--device", "sim", "--vram", "6GiB", "--ram", "512GiB"),
)
FLAGS = (
    (),
    ("--ctx-size", "4096"),
    ("--ctx-size", "65536"),
    ("--ctx-size", "65536", "-nkvo"),
    ("--ctx-size", "16384", "--ubatch-size", "512"),
    ("--ctx-size", "16384", "--n-cpu-moe", "20"),
    ("--ctx-size", "16384", "--n-gpu-layers", "10"),
    ("--ctx-size", "16384", "--plan-for", "decode"),
    ("--ctx-size", "16384", "--spec-type", "draft-mtp"),
    ("--ctx-size", "16384", "--hybrid", "off"),
    ("--ctx-size", "16384", "--link", "50GB/s"),
    ("--ctx-size", "16384", "-ctk", "q8_0", "-ctv", "q8_0"),
)


def plans(titles: Sequence[str] = MODELS) -> Iterator[tuple[str, Any]]:
    """Each combination's name, and its plan as data or the error's sentence."""
    with tempfile.TemporaryDirectory() as name:
        for title in titles:
            path = published_facts(title, Path(name)).path
            for words in product(MACHINES, FLAGS):
                args = [word for part in words for word in part]
                result = CliRunner().invoke(app, ["plan", str(path), "--json", *args])
                is_plan = result.exit_code == 0
                printed = result.stdout if is_plan else str(result.exception)
                printed = printed.replace(str(path), path.name).strip()
                yield " ".join((title, *args)), json.loads(printed) if is_plan else printed


def changes(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """The places where two values differ, with both values. Keys that are new are left out."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old:
            yield from changes(old[key], new.get(key), f"{where}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, pair in enumerate(zip(old, new, strict=True)):
            yield from changes(*pair, f"{where}[{i}]")
    elif old != new:
        yield f"{where}: {old!r} -> {new!r}"


def main(arguments: list[str]) -> int:
    before = {}
    for line in Path(arguments[0]).read_text(encoding="utf-8").splitlines() if arguments else ():
        name, plan = json.loads(line)
        before[name] = plan
    n_plans = n_changed = 0
    for name, plan in plans(arguments[1:] or MODELS):
        if not arguments:
            sys.stdout.write(json.dumps([name, plan], sort_keys=True) + "\n")
            continue
        found, n_plans = list(changes(before.get(name), plan)), n_plans + 1
        n_changed += bool(found)
        sys.stdout.writelines(f"{name}{line}\n" for line in found)
    if arguments:
        sys.stdout.write(f"{n_changed} of {n_plans} plans have changed\n")
    return int(n_changed > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
