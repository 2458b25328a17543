"""Too few descriptors, a full disk, little memory: the program must still work, or say in one
sentence why it cannot."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from lab.attack import ATTACK
from lab.attack.client import NoAnswer, completion, send, text_of
from lab.attack.http_part import SERVE
from lab.attack.outcome import Breach, Outcome
from lab.attack.program import LOOPBACK, Limits, bad_lines, environment, serving, with_limits

_RUN = ("run", "-p", "import os", "-n", "4", "-c", "256", "-t", "1")
_MB = 1 << 20
_LIMIT_S = 60.0

Case = Callable[[Path], tuple[str, str]]  # returns how the case ended, and an error's text or ""


def limits_part(seed: int, numbers: range, folder: Path) -> Outcome:
    """Run the cases with these numbers."""
    outcome = Outcome("limits")
    for number, (name, case) in enumerate(CASES):
        if number not in numbers:
            continue
        outcome.n_tries += 1
        ended, breach = case(folder)
        outcome.tally[ended] += 1
        if breach:
            command = f"{ATTACK} --part limits --only {number}"
            outcome.breaches.append(Breach(f"{name}: {breach}", command))
    return outcome


def _run(
    folder: Path,
    words: Sequence[str] = _RUN,
    *,
    limits: Limits | None = None,
    allowed: Sequence[int] = (0, 1, 2),
    stdout: int | IO[bytes] = subprocess.PIPE,
) -> tuple[str, str]:
    """Run the program under these limits. Returns how it ended, and an error's text or ""."""
    # Ignore SIGXFSZ, because a full disk gives an error and no signal.
    code = (
        "import runpy, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "runpy.run_module('specoffload', run_name='__main__')"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            stdout=stdout,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            env={**environment(), "SPECOFFLOAD_PROFILE_DIR": str(folder / "profiles")},
            preexec_fn=with_limits(limits or {}),
            timeout=_LIMIT_S,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "hung", f"it takes over {_LIMIT_S:g} s"
    text = ((done.stdout or b"") + done.stderr).decode(errors="replace")
    ended = f"code {done.returncode}"
    if done.returncode not in allowed or bad_lines(text):
        return ended, f"exit {ended}: {text[-500:]!r}"
    return ended, ""


def _few_descriptors(folder: Path) -> tuple[str, str]:
    """Open more connections than there are descriptors. One more client must still be served."""
    limits = {resource.RLIMIT_NOFILE: (110, 110)}
    with serving(folder / "descriptors.log", SERVE, limits) as server, ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection((LOOPBACK, server.port), timeout=10))
        try:
            text = asyncio.run(text_of(server.port, "import os\n", 4))
        except NoAnswer as e:
            return "not served", str(e)
        lines = bad_lines(server.said())
        return ("served", "; ".join(lines)) if text else ("not served", "no text")


def _server_with_little_memory(folder: Path) -> tuple[str, str]:
    """Serve with little memory. The engine process may die; the API process must then answer with
    an error."""
    addresses = 1500 * _MB
    limits = {resource.RLIMIT_AS: (addresses, addresses)}
    try:
        with serving(folder / "memory.log", SERVE, limits) as server:
            statuses = {
                asyncio.run(send(server.port, completion("x " * n, 4))).status for n in (1, 900)
            }
            lines = bad_lines(server.said())
    except TimeoutError:
        said = (folder / "memory.log").read_text()
        lines, statuses = bad_lines(said), {0}
    except NoAnswer as e:
        return "not served", str(e)
    return "told" if statuses != {200} else "served", "; ".join(lines)


def _full_disk(folder: Path, n_bytes: int = 4096) -> tuple[str, str]:
    target = folder / "written"
    words = [*_RUN, "-n", "200", "--trace", str(target)]
    limits = {resource.RLIMIT_FSIZE: (n_bytes, n_bytes)}
    ended, breach = _run(folder, words, limits=limits, allowed=(1,))
    if not breach and target.exists() and target.stat().st_size == n_bytes:
        breach = "half a file is left"
    return ended, breach


def _limited(which: int, n: int) -> Case:
    return lambda folder: _run(folder, limits={which: (n, n)})


def _nowhere_to_write(folder: Path) -> tuple[str, str]:
    out = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    with out:
        return _run(folder, allowed=(1,), stdout=out)


def _nobody_reads(folder: Path) -> tuple[str, str]:
    """Write to a closed pipe, as `specoffload run | true` does."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as out:
        return _run(folder, allowed=(1,), stdout=out)


CASES: tuple[tuple[str, Case], ...] = (
    ("200 connections over 110 descriptors", _few_descriptors),
    ("a trace on a full disk", _full_disk),
    ("output to a full disk", _nowhere_to_write),
    ("output that nobody reads", _nobody_reads),
    ("40 descriptors", _limited(resource.RLIMIT_NOFILE, 40)),
    ("16 descriptors", _limited(resource.RLIMIT_NOFILE, 16)),
    ("2000 MB of addresses", _limited(resource.RLIMIT_AS, 2000 * _MB)),
    ("1000 MB of addresses", _limited(resource.RLIMIT_AS, 1000 * _MB)),
    ("700 MB of addresses", _limited(resource.RLIMIT_AS, 700 * _MB)),
    ("a server with 1500 MB of addresses", _server_with_little_memory),
)
