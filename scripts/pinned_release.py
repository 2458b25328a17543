"""Finds the source of the pinned llama-cpp-python release for scripts/gen-abi, gen-llama-flags."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "llama-cpp-python"


class Refused(Exception):
    """The source is of another release, or contains something that a generator does not support."""


def pinned_version() -> str:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(rf'"{PACKAGE}==([\w.]+)"', text)
    if found is None:
        raise Refused(f"pyproject.toml does not pin {PACKAGE} with ==")
    return found[1]


@contextmanager
def pinned_source(members: str, given: Path | None = None) -> Iterator[Path]:
    """The folder with the release's files whose paths match the pattern `members`.

    `given` is an unpacked release or its archive. With None, pip downloads the archive of 280 MB.
    Raises Refused if it is not the pinned release.
    """
    version = pinned_version()
    with tempfile.TemporaryDirectory() as name:
        source, folder = given, Path(name)
        if source is None:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--no-binary", ":all:", "--dest", name, f"{PACKAGE}=={version}"]
            subprocess.run(command, check=True)
            (source,) = folder.glob("*.tar.gz")
        if source.is_file():
            wanted = re.compile(rf"[^/]+/(llama_cpp/__init__\.py|{members})")
            with tarfile.open(source) as tar:
                chosen = [member for member in tar if wanted.fullmatch(member.name)]
                tar.extractall(folder / "unpacked", chosen, filter="data")
            (source,) = (folder / "unpacked").iterdir()
        about = source / "llama_cpp" / "__init__.py"
        found = re.search(r'__version__ = "([^"]+)"', about.read_text(encoding="utf-8"))
        if found is None or found[1] != version:
            what = found[1] if found else "unknown"
            raise Refused(f"pyproject.toml pins {PACKAGE} {version}, the source is {what}")
        yield source
