"""Model files with one changed header field: each must run, or be refused in one sentence.

`specoffload run` opens every file in a process that is forked after the imports. So a thousand
files take minutes.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from gguf import GGUFReader

from lab.attack import ATTACK
from lab.attack.outcome import Breach, Outcome
from lab.attack.program import bad_lines
from lab.synth import write_preset

# MLA with experts, grouped queries with experts, a dense model, a recurrent one.
ARCHITECTURES = ("deepseek-v3", "qwen3-30b-a3b", "mistral-large", "qwen3-next-80b-a3b")
_LIMIT_S = 30.0
_ADDRESSES = 8 << 30  # address space of one process, in bytes
WORDS = ("run", "-p", "a b", "-n", "2", "-c", "128", "-m")
_MOST_LETTERS = 1500  # characters of the longest output of a refusal


def headers_part(seed: int, numbers: range, folder: Path) -> Outcome:
    outcome = Outcome("headers", len(numbers))
    wholes = [
        write_preset(name, folder / f"{name}.gguf", size="tiny", seed=1).read_bytes()
        for name in ARCHITECTURES
    ]
    fields = [fields_of(folder / f"{name}.gguf") for name in ARCHITECTURES]
    outcome.figures["fields"] = sum(map(len, fields))
    import_all()
    for name in ARCHITECTURES:  # unchanged files, which must run
        ended, breach = run_forked([*WORDS, str(folder / f"{name}.gguf")], folder)
        if ended != "runs":
            said = (folder / "said.txt").read_text()
            outcome.breaches.append(Breach(f"{name} {ended}: {breach} {said}", "as it is"))
    for number in numbers:
        rng = Random(f"{seed}/{number}")
        which, turn = number % len(wholes), number // len(wholes)
        # Every field is changed once before any is changed twice. 7919 is a prime that divides no
        # number of fields.
        field = fields[which][(turn * 7919) % len(fields[which])]
        path = folder / "mutated.gguf"
        path.write_bytes(mutated(rng, wholes[which], field))
        ended, breach = run_forked([*WORDS, str(path)], folder)
        outcome.tally[ended] += 1
        if breach:
            command = f"{ATTACK} --part headers --seed {seed} --only {number}"
            what = f"{ARCHITECTURES[which]}: {field.name}: {breach}"
            outcome.breaches.append(Breach(what, command))
    return outcome


def import_all() -> None:
    """Import what every process needs, before the first fork."""
    import specoffload.cli
    import specoffload.commands.run
    import specoffload.config.environment
    import specoffload.config.resolution
    import specoffload.opening.target
    import specoffload.session.session
    import specoffload.terminal.command  # noqa: F401


def run_forked(words: Sequence[str], folder: Path) -> tuple[str, str]:
    """Run the program with these words. Returns how it ended, and an error's text or ""."""
    said = folder / "said.txt"
    child = os.fork()
    if child == 0:
        _become_the_program(words, said)
    status = _waited(child)
    text = said.read_text(errors="replace")
    if status is None:
        return "hung", f"it takes over {_LIMIT_S:g} s: {text[-300:]!r}"
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return name, f"killed by {name}: {text[-300:]!r}"
    code = os.WEXITSTATUS(status)
    if bad_lines(text):
        return "traceback", f"exit code {code}: {text[-600:]!r}"
    if code not in (0, 2):
        return f"code {code}", f"exit code {code}: {text[-300:]!r}"
    if code and len(text) > _MOST_LETTERS:
        return "many words", f"{len(text)} letters: {text[:300]!r}"
    return ("runs" if code == 0 else "refused"), ""


def _become_the_program(words: Sequence[str], said: Path) -> None:
    """Run the program in the forked child, with its output in `said`. Never returns."""
    code = 70
    try:
        out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(out, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (_ADDRESSES, _ADDRESSES))
        sys.argv = ["specoffload", *words]
        os.environ["SPECOFFLOAD_WITHOUT"] = "profile"
        from specoffload.cli import main

        main()
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _waited(child: int) -> int | None:
    """The child's wait status. Returns None if it had to be killed after _LIMIT_S seconds."""
    end_s = time.monotonic() + _LIMIT_S
    while time.monotonic() < end_s:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


@dataclass(frozen=True)
class Field:
    """A field in the bytes `at` to `at + size` of a file. It is a number of dtype `kind`, or text
    if that is uint8."""

    name: str  # key or tensor of the field
    at: int
    size: int
    kind: np.dtype[Any]


def fields_of(path: Path) -> list[Field]:
    """Every field of a header. Long arrays count only with type, length, first and last
    elements."""
    reader = GGUFReader(path)
    begin = reader.data.ctypes.data
    found = [Field("magic", 0, 4, np.dtype(np.uint32))]
    for field in (*reader.fields.values(), *(tensor.field for tensor in reader.tensors)):
        parts = field.parts if len(field.parts) < 12 else [*field.parts[:7], *field.parts[-2:]]
        found += [
            Field(field.name, part.ctypes.data - begin, part.nbytes, part.dtype)
            for part in parts
            if part.nbytes
        ]
    return found


def mutated(rng: Random, data: bytes, field: Field) -> bytes:
    """The file's bytes with another value in `field`, or cut inside it."""
    if rng.random() < 0.05:
        return data[: field.at + rng.randrange(field.size + 1)]
    before, after = data[: field.at], data[field.at + field.size :]
    if field.kind == np.uint8 and field.size > 1:
        return before + _text(rng, data[field.at : field.at + field.size]) + after
    return before + _number(rng, data[field.at : field.at + field.size], field.kind) + after


def _text(rng: Random, old: bytes) -> bytes:
    """Another text of the same length."""
    if not old:
        return old
    at = rng.randrange(len(old))
    changed = (
        old[:at] + bytes([rng.choice((0, 0x80, 0xFF, 0x41, rng.randrange(256)))]) + old[at + 1 :]
    )
    words = rng.choice((b"\0", b"\xff", b"x", b"%s", b"gpt2", b"bert", b"{{ 1/0 }}")) * len(old)
    return rng.choice((changed, words[: len(old)]))


def _number(rng: Random, old: bytes, kind: np.dtype[Any]) -> bytes:
    size = len(old)
    if np.issubdtype(kind, np.floating):
        value = rng.choice(
            (0.0, -1.0, 1e30, -1e30, 1e-30, float("nan"), float("inf"), rng.uniform(-9, 9))
        )
        return np.array(value, kind).tobytes()
    was = int.from_bytes(old, "little")
    most = (1 << (8 * size)) - 1
    value = rng.choice(
        (0, 1, 2, 3, 5, was + 1, was - 1, 2 * was, was // 2, most, most // 2, most // 2 + 1, 1000)
        + (rng.randrange(most + 1), was ^ (1 << rng.randrange(8 * size)), was * 1000, 17, 255)
    )
    return (value & most).to_bytes(size, "little")
