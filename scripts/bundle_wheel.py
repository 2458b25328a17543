"""Puts llama-cpp-python into our wheel: bundle_wheel.py OURS.whl LIBLLAMA.whl FOLDER.

The wheel then requires the packages of llama-cpp-python instead of llama-cpp-python itself, of
which pip's default index has only a source archive. Needs the package `wheel`, and patchelf.

llama-cpp-python has each library under three names, because a wheel has no links. Ours has it once.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "llama_cpp"
NEEDS_LIBLLAMA = re.compile(r"Requires-Dist: llama[-_]cpp[-_]python\b.*")
VERSIONED = re.compile(r"\.so\.\d+")  # other names of the same library


def bundle(ours: Path, libllama: Path, folder: Path) -> None:
    """Write the wheel with both into `folder`. Raises SystemExit if a wheel is not as expected."""
    with tempfile.TemporaryDirectory() as work:
        a, b = (_unpacked(file, Path(work, name)) for file, name in ((ours, "a"), (libllama, "b")))
        shutil.copytree(
            b / PACKAGE, a / PACKAGE,
            ignore=lambda _, names: {name for name in names if VERSIONED.search(name)},
        )  # fmt: skip
        (theirs,), (mine,) = b.glob("*.dist-info"), a.glob("*.dist-info")
        _name_once(a / PACKAGE / "lib", [p.name for p in (b / PACKAGE / "lib").iterdir()])
        needed = _requirements((theirs / "METADATA").read_text("utf-8"))
        metadata = mine / "METADATA"
        text, n = NEEDS_LIBLLAMA.subn("\n".join(needed), metadata.read_text("utf-8"))
        if n != 1:
            sys.exit(f"{ours.name} requires llama-cpp-python {n} times, not once")
        metadata.write_text(text, "utf-8")
        (mine / "licenses").mkdir(exist_ok=True)
        for file in (theirs / "licenses").glob("LICENSE*"):
            shutil.copy(file, mine / "licenses" / f"llama-cpp-python-{file.name}")
        folder.mkdir(parents=True, exist_ok=True)
        _wheel("pack", str(a), "-d", str(folder))


def _name_once(folder: Path, names: list[str]) -> None:
    """Let the libraries in `folder` need each other by the names that they have there.

    `names` are those of all copies. Some libraries need the copies that were left out.
    """
    files = sorted(folder.glob("*.so"))
    renamed = {name: VERSIONED.split(name)[0] + ".so" for name in names if VERSIONED.search(name)}
    words = [word for pair in renamed.items() for word in ("--replace-needed", *pair)]
    for file in files:
        subprocess.run(["patchelf", *words, "--set-soname", file.name, str(file)], check=True)


def _requirements(metadata: str) -> list[str]:
    """The lines of required packages, without those of extras."""
    lines = metadata.partition("\n\n")[0].splitlines()
    return [x for x in lines if x.startswith("Requires-Dist:") and "extra ==" not in x]


def _unpacked(file: Path, folder: Path) -> Path:
    _wheel("unpack", str(file), "-d", str(folder))
    (found,) = folder.iterdir()
    return found


def _wheel(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "wheel", *words], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    bundle(*map(Path, sys.argv[1:]))
