"""Lists our files in the order in which a command line enters them, until its engine is open.

A reader who follows each call once, from one of our files to another, opens these files. The number
beside a file says how often the reader comes back to it. `scripts/lab/run entered run MODEL
--device sim -p x` shows the way of `specoffload run MODEL --device sim -p x`. With `--decode`
before `run` it shows the way of the command's twelfth decode, when all caches are filled.
"""

from __future__ import annotations

import ast
import os
import sys
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGES = ("numa", "offload", "specdec", "specoffload")
STEADY = 12  # the decode that `--decode` follows
_DECIDES = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)


class Call(NamedTuple):
    """A call from a function of one of our files to a function of another one."""

    caller: str
    calling: str
    file: str
    function: str


class Way(NamedTuple):
    """The files in the order in which they are first entered, with how often each is again."""

    again: dict[str, int]

    @property
    def n_again(self) -> int:
        return sum(self.again.values())


def way_of(calls: Iterable[Call]) -> Way:
    """Return the way through `calls`, each of which counts once however often it is made."""
    again: Counter[str] = Counter()
    last = ""
    for call in dict.fromkeys(calls):
        if call.file not in again:
            again[call.file] = 0
        elif call.file != last:
            again[call.file] += 1
        last = call.file
    return Way(dict(again))


def only_declares(source: str) -> bool:
    """True if a file declares types, errors and words: no function has a branch, loop or block."""
    functions = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef))
    return not any(isinstance(n, _DECIDES) for function in functions for n in ast.walk(function))


def working_way(calls: Collection[Call]) -> Way:
    """Return the way through `calls` without the files that only declare."""
    files = {call.file for call in calls}
    declaring = {file for file in files if only_declares((ROOT / file).read_text("utf-8"))}
    return way_of(call for call in calls if call.file not in declaring)


class Tracer:
    """Notes the calls of the main thread between our files."""

    def __init__(self) -> None:
        self.calls: dict[Call, None] = {}
        self._names: dict[str, str] = {}

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """A function for `sys.setprofile`."""
        code = frame.f_code
        if event != "call" or code.co_name.startswith("<") or not (file := self._ours(code)):
            return
        caller = frame.f_back
        while caller is not None and not self._ours(caller.f_code):
            caller = caller.f_back
        if caller is None or caller.f_code.co_name == "<module>":
            return
        calling = self._ours(caller.f_code)
        if calling != file:
            self.calls[Call(calling, caller.f_code.co_name, file, code.co_name)] = None

    def _ours(self, code: Any) -> str:
        name = self._names.get(code.co_filename)
        if name is None:
            path = Path(code.co_filename)
            inside = path.relative_to(ROOT) if path.is_relative_to(ROOT) else Path()
            name = inside.as_posix() if inside.parts[:1] and inside.parts[0] in PACKAGES else ""
            self._names[code.co_filename] = name
        return name


def tell(tracer: Tracer) -> None:
    """Print the way that was traced, and end the process."""
    sys.setprofile(None)
    way = way_of(tracer.calls)
    for file, n in way.again.items():
        print(f"{n:4} {file}")
    print(f"{len(way.again)} files, entered again {way.n_again} times")
    works = working_way(tracer.calls)
    print(f"{len(works.again)} files that do not only declare types, errors and words, "
          f"entered again {works.n_again} times")  # fmt: skip
    sys.stdout.flush()
    os._exit(0)


def run() -> None:
    """Run the command line, and end the process when its way has ended."""
    from offload.engine import Engine
    from specoffload.__main__ import main
    from specoffload.slots.batcher import Batcher

    tracer, opens, steps = Tracer(), Engine.__init__, Batcher.step

    def opened(self: Any, *args: Any, **named: Any) -> None:
        opens(self, *args, **named)
        tell(tracer)

    n_steps = 0

    def step(self: Any) -> Any:
        nonlocal n_steps
        n_steps += 1
        if n_steps < STEADY:
            return steps(self)
        sys.setprofile(tracer.note)
        steps(self)
        return tell(tracer)

    if sys.argv[1:2] == ["--decode"]:
        del sys.argv[1]
        Batcher.step = step  # type: ignore[method-assign]
    else:
        Engine.__init__ = opened  # type: ignore[method-assign]
        sys.setprofile(tracer.note)
    sys.argv[0] = "specoffload"
    main()


if __name__ == "__main__":
    run()
