"""`scripts/gpu-check --pack`: makes the folder of wheels to carry to a machine with a GPU.

The wheels are for that machine's Python, Linux and x86-64. They are what pyproject.toml needs,
directly or not, without the packages that the machine has, and a CUDA build of llama-cpp-python.
They are compressed with LZMA, which saves 15 %. pip reads them with Python's zipfile as any other.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from needed import (
    LLAMA,
    ROOT,
    Package,
    Requirement,
    applies,
    canonicalize_name,
    of_project,
    of_wheel,
)
from needed import parse_wheel_filename as parsed

# Versions of glibc, newest first. pip takes a wheel only if its platform is named exactly.
_GLIBC = range(39, 16, -1)
_PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in _GLIBC),
    "manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64",
)  # fmt: skip


class CannotPack(Exception):
    """The folder cannot be made. The text says why."""


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/gpu-check --pack", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / ".gpu")
    parser.add_argument("--python", default="3.12", help="version of that machine's Python")
    parser.add_argument(
        "--has", type=Path, default=Path(__file__).with_name("has.txt"),
        help="file that names the packages which that machine has, one per line",
    )  # fmt: skip
    parser.add_argument("--llama", type=Path, help="CUDA build of llama-cpp-python (a wheel)")
    parser.add_argument("--limit-mib", type=float, default=64.0, help="of wheels and tree together")
    return parser.parse_args(words)


def read_has(path: Path) -> dict[str, str]:
    """The packages that the machine has, with their version, or "" where it is not known."""
    found = {}
    for line in path.read_text("utf-8").splitlines():
        if words := line.partition("#")[0].strip():
            name, _, version = words.partition("==")
            found[canonicalize_name(name)] = version
    return found


def find_llama(folder: Path, named: Path | None) -> Path:
    """The CUDA build to pack. Raises CannotPack if there is none, or if it is another release."""
    [pinned] = [r for r in map(Requirement, of_project()) if canonicalize_name(r.name) == LLAMA]
    wheel = named or next(iter(sorted(folder.glob("llama_cpp_python-*.whl"))), None)
    if wheel is None:
        raise CannotPack(
            f"no CUDA build of {pinned}: build one on a machine with nvcc (docs/install.md), and "
            f"name the wheel with --llama or put it into {folder}"
        )
    _, version, _, _ = parsed(wheel.name)
    if not pinned.specifier.contains(version.public):
        raise CannotPack(f"{wheel.name}: {pinned} is needed")
    return wheel


def _for_machine(python: str) -> list[str]:
    words = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    return [*words, *(word for name in _PLATFORMS for word in ("--platform", name))]


def _pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise CannotPack("\n".join(lines or [done.stderr.strip() or "pip failed"]))


def resolved(roots: Sequence[str], python: str) -> dict[str, Package]:
    """The packages that `roots` need on that machine, directly or not."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        _pip(
            "install", "--dry-run", "--ignore-installed", "--report", str(report), "--target",
            scratch, "--constraint", str(ROOT / "constraints.txt"), *_for_machine(python), *roots,
        )  # fmt: skip
        found = [p["metadata"] for p in json.loads(report.read_text("utf-8"))["install"]]
    return {
        canonicalize_name(p["name"]): Package(p["version"], tuple(p.get("requires_dist", ())))
        for p in found
    }


def to_pack(
    needed: Mapping[str, Package], has: Mapping[str, str], roots: Iterable[str]
) -> dict[str, str]:
    """The versions of those packages of `needed` that the machine lacks or has too old.

    A package counts as too old if a version is demanded of it, and the machine's is not known.
    """
    packed: dict[str, str] = {}
    waiting = [
        *roots,
        *(line for name in needed if name not in has for line in needed[name].requires),
    ]
    packed |= {name: package.version for name, package in needed.items() if name not in has}
    while waiting:
        need = Requirement(waiting.pop())
        name = canonicalize_name(need.name)
        if name in packed or name not in needed or not applies(need):
            continue
        if need.specifier and not (has[name] and need.specifier.contains(has[name])):
            packed[name] = needed[name].version
            waiting += needed[name].requires
    return packed


def tree_bytes() -> int:
    """The bytes of all files of the tree that git does not ignore."""
    words = ["git", "-C", str(ROOT), "ls-files", "-z", "-co", "--exclude-standard"]
    listed = subprocess.run(words, capture_output=True, check=True).stdout.split(b"\0")
    paths = [ROOT / name.decode() for name in listed if name]
    return sum(path.lstat().st_size for path in paths if path.exists())


def compress(wheel: Path) -> None:
    """Compress a wheel with LZMA, unless that was done or makes it no smaller."""
    new = wheel.with_suffix(".new")
    with zipfile.ZipFile(wheel) as old:
        if any(entry.compress_type == zipfile.ZIP_LZMA for entry in old.infolist()):
            return
        with zipfile.ZipFile(new, "w") as made:
            for entry in old.infolist():
                again = copy.copy(entry)
                again.compress_type = zipfile.ZIP_LZMA
                made.writestr(again, old.read(entry))
    if new.stat().st_size < wheel.stat().st_size:
        new.replace(wheel)
    else:
        new.unlink()


def pack(args: argparse.Namespace) -> list[Path]:
    """Fill the folder. Wheels of an earlier pack are removed. Raises CannotPack."""
    folder = args.folder
    llama = find_llama(folder, args.llama)
    roots = [line for line in of_project(with_tests=True) if Requirement(line).name != LLAMA]
    plain = [line for line in of_wheel(llama).requires if Requirement(line).marker is None]
    needed = resolved([*roots, *plain], args.python)
    wanted = to_pack(needed, read_has(args.has), [*roots, *plain])
    with tempfile.TemporaryDirectory() as scratch:
        if wanted:
            names = [f"{name}=={version}" for name, version in wanted.items()]
            _pip("download", "--no-deps", "--dest", scratch, *_for_machine(args.python), *names)
        if llama.parent.resolve() != folder.resolve():
            shutil.copy(llama, scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.whl"):
            if path.resolve() != llama.resolve():
                path.unlink()
        for path in Path(scratch).glob("*.whl"):
            shutil.copy(path, folder)
    return sorted(folder.glob("*.whl"))


def main() -> int:
    args = arguments()
    try:
        wheels = pack(args)
    except CannotPack as e:
        print(f"gpu-check --pack: {e}", file=sys.stderr)
        return 2
    for path in wheels:
        compress(path)
        print(f"{path.stat().st_size / 2**20:8.2f} MiB  {path.name}")
    packed, tree = sum(path.stat().st_size for path in wheels), tree_bytes()
    total_mib = (packed + tree) / 2**20
    print(f"{packed / 2**20:8.2f} MiB in {args.folder}, {tree / 2**20:.2f} MiB in the tree")
    if total_mib > args.limit_mib:
        print(
            f"gpu-check --pack: {total_mib:.1f} MiB are more than --limit-mib {args.limit_mib:g}",
            file=sys.stderr,
        )
        return 1
    print(f"{total_mib:8.2f} MiB of {args.limit_mib:g} to carry. On that machine, in the tree:")
    print("  scripts/gpu-check --limit-s 540 --out OUT")
    print("  scripts/gpu-check --second --limit-s 540 --out OUT")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
