"""Too few descriptors, no room on the disk, little memory: one sentence, or served all the same."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

from lab.attack import ATTACK
from lab.attack.exchange import LOOPBACK, NoAnswer, send
from lab.attack.http_part import SERVE
from lab.attack.outcome import Breach, Outcome
from lab.attack.overload import completion, text_of
from lab.attack.program import Limits, bad_lines, environment, serving, with_limits

_RUN = ("run", "-p", "import os", "-n", "4", "-c", "256", "-t", "1")
_MB = 1 << 20
_LIMIT_S = 60.0


def limits_part(seed: int, numbers: range, folder: Path) -> Outcome:
    """`numbers` choose among the cases."""
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


def program(
    words: list[str], limits: Limits, folder: Path, out: str | None = None
) -> tuple[int, str]:
    """Exit code, and all that was said."""
    with (folder / "said.txt").open("w+") as said:
        stdout = said if out is None else open(out, "w")  # noqa: SIM115
        try:
            done = subprocess.run(
                [sys.executable, "-m", "specoffload", *words],
                stdout=stdout,
                stderr=said,
                stdin=subprocess.DEVNULL,
                env={**environment(), "SPECOFFLOAD_PROFILE_DIR": str(folder / "profiles")},
                preexec_fn=with_limits(limits),
                timeout=_LIMIT_S,
                start_new_session=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return -signal.SIGALRM, f"it takes over {_LIMIT_S:g} s"
        finally:
            if stdout is not said:
                with suppress(OSError):  # what it holds has nowhere to go
                    stdout.close()
        said.seek(0)
        return done.returncode, said.read()


def _judged(code: int, text: str, allowed: tuple[int, ...]) -> tuple[str, str]:
    if code not in allowed or bad_lines(text):
        return f"code {code}", f"exit code {code}: {text[-500:]!r}"
    return f"code {code}", ""


def _few_descriptors(folder: Path) -> tuple[str, str]:
    """More connections than there are descriptors, and one client that is served."""
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
    """The engine process may die of it: the API process tells who asks."""
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


def _full_disk(words: list[str], allowed: tuple[int, ...], n_bytes: int = 4096):  # type: ignore[no-untyped-def]
    def case(folder: Path) -> tuple[str, str]:
        target = str(folder / "written")
        limits = {resource.RLIMIT_FSIZE: (n_bytes, n_bytes)}
        words_ = [word.replace("TARGET", target) for word in words]
        # What is said goes through a pipe, which has no size.
        done = subprocess.run(
            [sys.executable, "-c", _IGNORE_SIGXFSZ, *words_],
            capture_output=True,
            text=True,
            env={**environment(), "SPECOFFLOAD_PROFILE_DIR": str(folder / "profiles")},
            preexec_fn=with_limits(limits),
            timeout=_LIMIT_S,
            start_new_session=True,
            check=False,
        )
        ended, breach = _judged(done.returncode, done.stdout + done.stderr, allowed)
        left = Path(target)
        if not breach and left.exists() and left.stat().st_size == n_bytes:
            breach = "half a file is left"
        return ended, breach

    return case


# A disk that is full gives an error and no signal.
_IGNORE_SIGXFSZ = (
    "import runpy, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
    "runpy.run_module('specoffload', run_name='__main__')"
)


def _memory(n_mb: int):  # type: ignore[no-untyped-def]
    def case(folder: Path) -> tuple[str, str]:
        limits = {resource.RLIMIT_AS: (n_mb * _MB, n_mb * _MB)}
        return _judged(*program([*_RUN], limits, folder), (0, 1, 2))

    return case


def _descriptors(n: int):  # type: ignore[no-untyped-def]
    def case(folder: Path) -> tuple[str, str]:
        limits = {resource.RLIMIT_NOFILE: (n, n)}
        return _judged(*program([*_RUN], limits, folder), (0, 1, 2))

    return case


def _nowhere_to_write(folder: Path) -> tuple[str, str]:
    return _judged(*program([*_RUN], {}, folder, out="/dev/full"), (1,))


def _nobody_reads(folder: Path) -> tuple[str, str]:
    """As `specoffload run | true`."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as out:
        done = subprocess.run(
            [sys.executable, "-m", "specoffload", *_RUN],
            stdout=out,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            env=environment(),
            timeout=_LIMIT_S,
            text=True,
            check=False,
        )
    return _judged(done.returncode, done.stderr, (1,))


CASES = (
    ("200 connections over 110 descriptors", _few_descriptors),
    ("a trace on a full disk", _full_disk([*_RUN, "-n", "200", "--trace", "TARGET"], (1,))),
    ("output to a full disk", _nowhere_to_write),
    ("output that nobody reads", _nobody_reads),
    ("40 descriptors", _descriptors(40)),
    ("16 descriptors", _descriptors(16)),
    ("2000 MB of addresses", _memory(2000)),
    ("1000 MB of addresses", _memory(1000)),
    ("700 MB of addresses", _memory(700)),
    ("a server with 1500 MB of addresses", _server_with_little_memory),
)
