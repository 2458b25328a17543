"""Asks the library whether it would load a model, from the header alone.

The library builds the model as a start does, but allocates nothing and reads no weights, so the
file's data may be a hole. It aborts on some headers, so it is asked in a process of its own, which
answers for one file after another. A start needs no such question, because it loads the model.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from offload.errors import BadModel, OffloadError
from offload.ggml.library.callback import Pending
from offload.ggml.model import Model, ModelPlacement
from offload.ggml.wanted import wanted_tensors
from offload.kv_overrides import read_override
from offload.model import ModelFacts
from offload.model_file import read_facts

_LIMIT_S = 120.0  # a header on a slow network drive may take a while
_WAIT_S = 5.0  # for the helper to end after its last answer
_helper: subprocess.Popen[bytes] | None = None


def check_loads(facts: ModelFacts, *, load_mtp: bool) -> None:
    """Raise BadModel with the library's reason if it would not load the model.

    With `load_mtp`, its layers for multi-token prediction are loaded, too. The answer is kept as
    long as the first part of the model stays the same.
    """
    about = facts.path.stat()
    overrides = tuple(map(str, facts.overrides))
    if reason := _refusal(facts.path, load_mtp, overrides, about.st_size, about.st_mtime_ns):
        raise BadModel(reason)


@lru_cache(256)
def _refusal(
    path: Path, load_mtp: bool, overrides: tuple[str, ...], size_bytes: int, changed_ns: int
) -> str:
    """Return why the library refuses the model, or "". Sizes and times are part of the cache's key.

    The helper is started again after a file that ended it.
    """
    global _helper
    del size_bytes, changed_ns
    if _helper is None or _helper.poll() is not None:
        _helper = _started()
    helper = _helper
    assert helper.stdin is not None
    assert helper.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        helper.stdin.write(json.dumps([os.fspath(path), load_mtp, overrides]).encode() + b"\n")
        helper.stdin.flush()
    if not select.select([helper.stdout], [], [], _LIMIT_S)[0]:
        end_helper()
        return f"{path}: the library takes over {_LIMIT_S:.0f} s for its header"
    answer = helper.stdout.readline()
    if answer:
        return str(json.loads(answer))
    said = _last_words(helper)
    end_helper()
    return f"{path}: the library refuses it ({said})"


def _started() -> subprocess.Popen[bytes]:
    atexit.register(end_helper)
    pipe = subprocess.PIPE
    command = calling(__name__, answer_lines.__name__)
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)


def calling(module: str, function: str) -> list[str]:
    """Return a command that calls a function in a process of its own, with this one's modules.

    No GPU is visible there, because looking for GPUs takes long.
    """
    program = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
        f"from {module} import {function}; {function}()"
    )
    python = [sys.executable, "-P", "-c", program, json.dumps(sys.path)]
    return ["env", "CUDA_VISIBLE_DEVICES=", *python]


def end_helper() -> None:
    """End the process that asks the library, if there is one."""
    global _helper
    helper, _helper = _helper, None
    if helper is None:
        return
    for pipe in (helper.stdin, helper.stdout, helper.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    helper.kill()
    helper.wait()


def _last_words(helper: subprocess.Popen[bytes]) -> str:
    """Return the helper's last line on standard error, or how it ended."""
    assert helper.stderr is not None
    try:
        code = helper.wait(_WAIT_S)
    except subprocess.TimeoutExpired:
        return "it hangs"
    lines = helper.stderr.read().decode(errors="replace").splitlines()
    said = [line for line in lines if line.startswith(_MARK)]
    return said[-1].removeprefix(_MARK) if said else f"it ends the process with status {code}"


_TO_ASKER = 1  # standard output of the helper process
_MARK = "specoffload: "  # before the sentence with which an assertion ends a process
_TOO_MANY = "wrong number of tensors"
_MOST_NAMED = 3  # most weights that are named


def refusal_here(path: Path, load_mtp: bool, overrides: Sequence[str] = ()) -> str:
    """Return why the library refuses the model, or "". An assertion ends this process."""
    read = tuple(map(read_override, overrides))
    placement = ModelPlacement(
        no_alloc=True, load_mode="none", load_mtp=load_mtp, kv_overrides=read
    )
    try:
        Model(path, placement, Pending()).close()
    except OffloadError as e:
        return f"{e}{_unwanted(path) if _TOO_MANY in str(e) else ''}"
    return ""


def _unwanted(path: Path) -> str:
    """Name weights of the file for which the library has no use, as the end of a sentence."""
    try:
        wanted = {tensor.name for tensor in wanted_tensors(path)}
        for part in (
            "gate",
            "up",
        ):  # which the library would fuse where it can, and takes apart, too
            wanted |= {name.replace("ffn_gate_up_", f"ffn_{part}_") for name in wanted}
        extra = [name for name in read_facts(path).weights if name not in wanted]
    except OffloadError:
        return ""
    if not extra:
        return ""
    more = f" and {len(extra) - _MOST_NAMED} more" if len(extra) > _MOST_NAMED else ""
    return f": it has no use for {', '.join(extra[:_MOST_NAMED])}{more}"


def answer_lines() -> None:
    """Answer each line of standard input. It has arguments of `refusal_here`, all as JSON.

    This is the helper process, whose standard output is a pipe to the asking one.
    """
    for line in sys.stdin.buffer:
        path, load_mtp, overrides = json.loads(line)
        answer = refusal_here(Path(path), load_mtp, overrides)
        os.write(_TO_ASKER, json.dumps(answer).encode() + b"\n")
