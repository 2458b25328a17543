"""Finds CUDA toolkits, and chooses one that has code for the cards and that the driver runs.

This file imports only the standard library, because scripts/setup runs it before there is a .venv.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from offload.ggml.drivers import Card, CudaDriver, Version, dotted

# The oldest toolkit with code for each compute capability: ggml-cuda/CMakeLists.txt in llama.cpp,
# and https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/index.html.
_OLDEST: dict[Version, Version] = {
    (6, 1): (8, 0),
    (7, 0): (9, 0),
    (7, 5): (10, 0),
    (8, 0): (11, 0),
    (8, 6): (11, 1),
    (8, 7): (11, 4),
    (8, 9): (11, 8),
    (9, 0): (11, 8),
    (10, 0): (12, 8),
    (10, 3): (12, 9),
    (11, 0): (13, 0),
    (12, 0): (12, 8),
    (12, 1): (12, 9),
}
# CUDA 12 left out cards before 5.0, and CUDA 13 those before 7.5 (the same release notes).
_DROPPED: tuple[tuple[Version, Version], ...] = (((13, 0), (7, 5)), ((12, 0), (5, 0)))
_RELEASE = re.compile(r"release (\d+)\.(\d+)")
_TRIAL_S = 20.0


@dataclass(frozen=True)
class Toolkit:
    """A CUDA compiler. `version` is None if it does not tell it."""

    nvcc: str
    version: Version | None
    is_on_path: bool

    def __str__(self) -> str:
        return f"nvcc {dotted(self.version) if self.version else 'of unknown version'}"


def oldest_toolkit(card: Card) -> Version:
    """Return the oldest toolkit with code for a card.

    A card that is not in the table is taken to need what the next older one does.
    """
    known = [compute for compute in _OLDEST if compute <= card.compute]
    return _OLDEST[max(known)] if known else (0, 0)


def reason(toolkit: Toolkit, driver: CudaDriver) -> str:
    """Return why the toolkit cannot make a library for this machine, or ""."""
    version = toolkit.version
    if version is None:
        return ""
    for card in driver.cards:
        if version < (oldest := oldest_toolkit(card)):
            return (
                f"{toolkit} ({toolkit.nvcc}) is too old for {card}, which needs CUDA"
                f" {dotted(oldest)} or newer"
            )
        for since, least in _DROPPED:
            if version >= since and card.compute < least:
                return (
                    f"{toolkit} ({toolkit.nvcc}) has no code for {card}: CUDA {since[0]} needs"
                    f" {dotted(least)} or newer, so install CUDA {since[0] - 1}"
                )
    if driver.cuda is not None and version[0] > driver.cuda[0]:
        return (
            f"{toolkit} ({toolkit.nvcc}) is too new for the driver, which runs CUDA"
            f" {dotted(driver.cuda)}: install a newer driver, or CUDA {driver.cuda[0]}"
        )
    return ""


def chosen(
    toolkits: Sequence[Toolkit], driver: CudaDriver
) -> tuple[Toolkit | None, tuple[str, ...]]:
    """Return the first toolkit that suits the machine, and why each one before it does not."""
    reasons: list[str] = []
    for toolkit in toolkits:
        why = reason(toolkit, driver)
        if not why:
            return toolkit, tuple(reasons)
        reasons.append(why)
    return None, tuple(reasons)


def needed(driver: CudaDriver) -> str:
    """Return words on the toolkit that this machine needs, such as "11.8 or newer for ..."."""
    words = ""
    if driver.cards:
        card = max(driver.cards, key=oldest_toolkit)
        words = f" {dotted(oldest_toolkit(card))} or newer, for {card}"
    if driver.cuda is not None:
        words += f" (the driver runs CUDA up to {driver.cuda[0]}.x)"
    return words


def toolkits(environ: Mapping[str, str], root: Path) -> list[Toolkit]:
    """Return the compilers of this machine, those that the user names or has on PATH first."""
    found: dict[str, Toolkit] = {}
    for nvcc, is_on_path in _candidates(environ, root):
        real = str(Path(nvcc).resolve())
        if real not in found:
            found[real] = Toolkit(nvcc, _version(nvcc, environ), is_on_path)
    return list(found.values())


def _candidates(environ: Mapping[str, str], root: Path) -> Iterator[tuple[str, bool]]:
    path = environ.get("PATH")
    first = shutil.which("nvcc", path=path)
    if named := shutil.which(environ.get("CUDACXX", ""), path=path):
        yield named, False
    folders = [Path(environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    yield from ((nvcc, nvcc == first) for nvcc in _compilers(folders))
    if first:
        yield first, True
    local = root / "usr/local"
    versions = sorted(local.glob("cuda-*"), key=_numbers, reverse=True)
    yield from (
        (nvcc, False) for nvcc in _compilers([local / "cuda", *versions, root / "opt/cuda"])
    )


def _compilers(folders: Iterable[Path]) -> list[str]:
    return [nvcc for folder in folders if (nvcc := shutil.which("nvcc", path=str(folder / "bin")))]


def _numbers(folder: Path) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", folder.name)))


def _version(nvcc: str, environ: Mapping[str, str]) -> Version | None:
    try:
        done = subprocess.run(
            [nvcc, "--version"], env=dict(environ), capture_output=True, text=True,
            errors="replace", check=False, timeout=_TRIAL_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = _RELEASE.search(done.stdout)
    return (int(found[1]), int(found[2])) if found else None
