"""Names every package that scripts/gpu-check needs and that is missing, within a second.

    python needed.py [FOLDER]    FOLDER has wheels that will be installed

Only names and versions are compared, so nothing is installed or imported. It needs nothing but
Python and pip. Exits 0 if nothing is missing, else 2.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

try:
    from packaging.requirements import Requirement
    from packaging.tags import Tag, sys_tags
    from packaging.utils import canonicalize_name, parse_wheel_filename
except ImportError:  # pip has its own copy
    try:
        from pip._vendor.packaging.requirements import Requirement
        from pip._vendor.packaging.tags import Tag, sys_tags
        from pip._vendor.packaging.utils import canonicalize_name, parse_wheel_filename
    except ImportError:
        sys.exit(f"gpu-check: pip is missing: {sys.executable} -m ensurepip")

ROOT = Path(__file__).parents[2]
LLAMA = "llama-cpp-python"
OF_TESTS = ("pytest", "pytest-timeout", "hypothesis")  # without these, tests/gpu is left out


@dataclass(frozen=True)
class Package:
    """A package that is installed or lies in the folder as a wheel."""

    version: str
    requires: tuple[str, ...]


def of_project(*, with_tests: bool = False) -> list[str]:
    """The requirements of pyproject.toml, and with `with_tests` those of tests/gpu too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    found = list(project["dependencies"])
    if with_tests:
        dev = project["optional-dependencies"]["dev"]
        found += [line for line in dev if canonicalize_name(Requirement(line).name) in OF_TESTS]
    return found


def of_wheel(path: Path) -> Package:
    """The version and the requirements in a wheel's metadata."""
    with zipfile.ZipFile(path) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode("utf-8", "replace"))
    return Package(metadata["Version"], tuple(metadata.get_all("Requires-Dist", ())))


def wheels_in(folder: Path, tags: Iterable[Tag]) -> tuple[dict[str, Package], list[str]]:
    """The wheels by package, and a sentence for each wheel that this Python cannot install.

    `tags`: the kinds of wheels that can be installed.
    """
    taken, found, reasons = frozenset(tags), dict[str, Package](), []
    for path in sorted(folder.glob("*.whl")):
        name, _, _, kinds = parse_wheel_filename(path.name)
        if kinds & taken:
            found[name] = of_wheel(path)
        else:
            reasons.append(f"{path.name} is for another Python or another machine")
    return found, reasons


def installed(name: str) -> Package | None:
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return Package(found.version, tuple(found.requires or ()))


def missing(roots: Iterable[str], wheels: dict[str, Package]) -> list[str]:
    """A sentence for each package that `roots` need, directly or not, and that is nowhere.

    A wheel is preferred to an installed package, since it will come first on Python's path.
    """
    needed_by, seen = dict[str, list[str]](), set[tuple[str, str]]()
    waiting = [(Requirement(line), "the project") for line in roots]
    while waiting:
        need, of = waiting.pop()
        name = canonicalize_name(need.name)
        text = str(need)
        if (name, text) in seen or not applies(need):
            continue
        seen.add((name, text))
        found = wheels.get(name) or installed(name)
        if found is None:
            needed_by.setdefault(f"{name} is missing", []).append(of)
            continue
        if not need.specifier.contains(found.version, prereleases=True):
            needed_by.setdefault(f"{name} {found.version} is not {need.specifier}", []).append(of)
        waiting += [(Requirement(line), name) for line in found.requires]
    return [f"{what} (needed by {', '.join(sorted({*by}))})" for what, by in needed_by.items()]


def applies(need: Requirement) -> bool:
    """True if the requirement is for this Python and machine. Extras are not asked for."""
    return need.marker is None or bool(need.marker.evaluate({"extra": ""}))


def no_compiler() -> list[str]:
    """A sentence if the player has to be compiled and there is no C compiler."""
    named = shlex.split(os.environ.get("CC", ""))
    if any(map(shutil.which, named[:1] or ["cc", "gcc", "clang"])):
        return []
    if list((ROOT / "offload/ggml").glob("libplayer-*")):
        return []
    return ["a C compiler is missing (cc, gcc or clang): the player is compiled at its first use"]


def main() -> int:
    wheels, reasons = wheels_in(Path(sys.argv[1]), sys_tags()) if len(sys.argv) > 1 else ({}, [])
    if len(sys.argv) > 1 and importlib.util.find_spec("_lzma") is None:
        reasons.append("lzma is missing in this Python: the wheels are compressed with it")
    reasons += sorted(missing(of_project(), wheels)) + no_compiler()
    for line in reasons:
        print(f"gpu-check: {line}")
    if reasons:
        print(
            f"gpu-check: Python {sys.version.split()[0]} lacks the above. scripts/gpu-check --pack "
            "makes the folder to carry. Packages that scripts/gpu_check/has.txt names are not put "
            "into it."
        )
    return 2 if reasons else 0


if __name__ == "__main__":
    raise SystemExit(main())
