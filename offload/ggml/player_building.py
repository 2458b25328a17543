"""Compiles our C files to one shared library that needs neither Python nor ggml.

They are the player (player.c), and what answers ggml's questions (offload/ggml/graphs.c).

setup.py calls this module before any dependency is installed, so neither it nor what it imports
needs more than the standard library. The library's file name has a digest of the source and the
compiler's flags. A library of other sources is therefore never loaded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
from pathlib import Path

from offload.decode import SMALL_BATCH
from offload.errors import LibraryMismatch
from offload.ggml.compiling import failure_of, find_compiler

SOURCE = Path(__file__).with_name("player.c")
GRAPHS = SOURCE.with_name("graphs.c")
# Without contraction, sums have the bits that numpy's have.
_FLAGS = (
    *("-std=c11", "-D_GNU_SOURCE", "-ffp-contract=off", "-fPIC", "-shared"),
    f"-DSMALL_BATCH={SMALL_BATCH}",
)
_CHECKED = ("-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all")
_REMEDY = (
    "install a C compiler (gcc or clang; CC names another) and install specoffload again, or "
    "install a wheel that scripts/wheel made on another machine"
)


def _flags() -> tuple[str, ...]:
    sanitizers = os.environ.get("PLAYER_SANITIZERS", "")
    if not sanitizers:
        return (*_FLAGS, "-O2")
    return (*_FLAGS, *_CHECKED, f"-fsanitize={sanitizers}")


def library_name() -> str:
    """Return the file name of the library that is compiled from the present source.

    It does not end with .so, as Python would take the file for a module.
    """
    digest = hashlib.sha256(SOURCE.read_bytes() + GRAPHS.read_bytes())
    digest.update(" ".join((platform.machine(), *_flags())).encode())
    return f"libplayer-{digest.hexdigest()[:12]}.so.1"


def compile_player(folder: Path) -> Path:
    """Compile the player into `folder`, unless it is there, and return the library's path.

    Raises LibraryMismatch if there is no compiler, if it fails, or if it cannot write.
    """
    path = folder / library_name()
    if path.exists():
        return path
    compiler = find_compiler("CC", ("cc", "gcc", "clang"))
    if not compiler:
        raise LibraryMismatch(f"{path} is not compiled, and there is no compiler; {_REMEDY}")
    try:
        with tempfile.TemporaryDirectory(prefix="libplayer-", dir=folder) as work:
            made = Path(work) / path.name
            reason = failure_of(
                [*compiler, *_flags(), "-o", str(made), str(SOURCE), str(GRAPHS), "-lm"]
            )
            if not reason:
                made.replace(path)  # at once, as other processes may compile too
                return path
    except OSError as e:
        reason = str(e)
    raise LibraryMismatch(f"{path} could not be compiled ({reason}); {_REMEDY}")
