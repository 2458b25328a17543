"""Plans of model files with changed headers: each has parts that add up, or is refused.

Every shape is tried: tiny models of all published shapes and of all mixtures of experts, and
headers of the full shapes. A change is another value of a field in the file's bytes, another value
of a key, or other tensors. Files are planned in this process, because a start of Python takes
longer than a plan.
"""

from __future__ import annotations

import contextlib
import io
import json
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from gguf import GGUFReader

from lab.attack import ATTACK
from lab.attack.headers import Field, fields_of, mutated
from lab.attack.outcome import Breach, Outcome
from lab.attack.program import bad_lines
from lab.changed_model import REMOVED, changed
from lab.synth.mixtures import ARCHITECTURES, mixture_shape
from lab.synth.shape import PRESETS
from lab.synth.write import Plan, plan_preset, plan_shape, write_header_only
from specoffload.cli import main

_LIMIT_S = 60
_MOST_LETTERS = 1500  # characters of the longest refusal
_BUDGETS = ("1MiB", "4MiB", "16MiB", "64MiB", "1GiB", "24GiB")
_FULL_EVERY = 16  # every 16th try changes a full shape, whose plan takes seconds
# Values that contradict the weights, or that no count can have.
_VALUES: tuple[Any, ...] = (
    *(REMOVED, 0, 1, 2, 3, 7, 64, 999, 5000, 10**6, 2**31 - 1, 2**31, 2**32 - 1, -1, -4, -(2**31)),
    *(1e30, -1.0, 0.5, float("nan"), True, False, "", "many", "\0", [1], [0, 0, 0], [-5] * 4),
    *([300_000_000, 1], ["a", "b"], [2**31 - 1] * 4, list(range(5000))),
)


@dataclass(frozen=True)
class Model:
    """A shape's header as a file, whose data is a hole."""

    name: str
    path: Path

    @cached_property
    def data(self) -> bytes:
        with self.path.open("rb") as file:
            return file.read(self.n_header)

    @cached_property
    def fields(self) -> list[Field]:
        return fields_of(self.path)

    @cached_property
    def reader(self) -> GGUFReader:
        return GGUFReader(self.path)

    @cached_property
    def n_header(self) -> int:
        return int(self.reader.data_offset)

    @cached_property
    def keys(self) -> list[str]:
        """The keys of the architecture, without its name in front."""
        names = self.reader.fields
        architecture = bytes(names["general.architecture"].parts[-1]).decode()
        return [
            name.removeprefix(f"{architecture}.") for name in names if name.startswith(architecture)
        ]


def plans_part(seed: int, numbers: range, folder: Path) -> Outcome:
    outcome = Outcome("plans", len(numbers))
    tiny = [
        _written(folder, f"tiny {name}", plan_preset(name, size="tiny", vocab="none"))
        for name in PRESETS
    ]
    shapes = [replace(mixture_shape(name), unchecked=False) for name in ARCHITECTURES]
    tiny += [_written(folder, shape.name, plan_shape(shape, "none")) for shape in shapes]
    full = [
        _written(folder, f"full {name}", plan_preset(name, size="full", vocab="none"))
        for name in PRESETS
    ]
    outcome.figures["shapes"] = len(tiny) + len(full)
    for model in (*tiny, *full[::8]):  # unchanged files, which must have a plan
        ended, breach = planned(model.path, "24GiB")
        if ended != "planned":
            outcome.breaches.append(Breach(f"{model.name} {ended}: {breach}", "as it is"))
    for number in numbers:
        rng = Random(f"{seed}/{number}")
        models = full if number % _FULL_EVERY == 0 else tiny
        model = models[number // (_FULL_EVERY if models is full else 1) % len(models)]
        path = folder / "changed.gguf"
        what = change(rng, model, path)
        ended, breach = planned(path, rng.choice(_BUDGETS))
        outcome.tally[ended] += 1
        if breach:
            command = f"{ATTACK} --part plans --seed {seed} --only {number}"
            outcome.breaches.append(Breach(f"{model.name}: {what}: {breach}", command))
    return outcome


def _written(folder: Path, name: str, plan: Plan) -> Model:
    return Model(name, write_header_only(plan, folder / f"{name.replace(' ', '-')}.gguf"))


def change(rng: Random, model: Model, path: Path) -> str:
    """Write a changed copy of the model, and return what was changed."""
    how = rng.random()
    is_full = model.name.startswith("full")
    if how < 0.4 or is_full:
        size_bytes = model.path.stat().st_size
        field = rng.choice(model.fields)
        path.write_bytes(mutated(rng, model.data, field))
        with path.open("r+b") as file:
            file.truncate(size_bytes)
        return field.name
    if how < 0.9:
        values = {rng.choice(model.keys): rng.choice(_VALUES) for _ in range(rng.choice((1, 1, 2)))}
        changed(model.reader, path, values)
        return str(values)[:200]
    names = [tensor.name for tensor in model.reader.tensors]
    gone = set(rng.sample(names, rng.choice((0, 1, 3))))
    more = {
        f"blk.{rng.choice((0, 1, 9, 10**6))}.{rng.choice(('x', 'ffn_up_exps'))}.weight": (32, 2)
    }
    changed(model.reader, path, keep=lambda name: name not in gone, more=rng.choice(({}, more)))
    return f"without {sorted(gone)}"


def planned(path: Path, budget: str) -> tuple[str, str]:
    """Plan the file for a card with this much memory. Returns how it ended, and what is wrong."""
    words = ("plan", str(path), "-c", "512", "-ub", "32", "--vram", budget, "--json")
    code, said, errors = _run(words)
    if code is None:
        return "hung", f"it takes over {_LIMIT_S} s"
    if "Traceback" in errors or bad_lines(errors):
        return "traceback", errors[-900:]
    if code == 2:
        lines = [line for line in errors.splitlines() if line.startswith("specoffload: ")]
        if len(lines) != 1 or len(errors) > _MOST_LETTERS:
            return "many words", errors[:900]
        return "refused", ""
    if code:
        return f"code {code}", errors[-900:]
    what = broken_sum(json.loads(said))
    return ("planned", "") if not what else ("broken sum", what)


def broken_sum(plan: Mapping[str, Any]) -> str:
    """Return which numbers of a plan are negative or do not add up; "" if all do."""
    for part in (plan, *plan["devices"]):
        uses = {key: part[f"{key}_bytes"] for key in ("resident", "reserve", "slot")}
        named = {**uses, **part["reserve"], "streamed": part["streamed_bytes"]}
        if negative := {key: n for key, n in named.items() if n < 0}:
            return f"below 0: {negative}"
        if sum(uses.values()) > part["vram_bytes"]:
            return f"{uses} exceed {part['vram_bytes']}"
        if sum(part["reserve"].values()) != part["reserve_bytes"]:
            return f"{part['reserve']} is not {part['reserve_bytes']} in sum"
    speeds = [plan["expected"][key] for key in ("prefill_tps", "decode_tps")]
    return "" if all(0 < speed < float("inf") for speed in speeds) else f"speeds {speeds}"


def _run(words: tuple[str, ...]) -> tuple[int | None, str, str]:
    """Run the program in this process. Returns its exit code (None: it hangs), output, errors."""
    out, errors, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["specoffload", *words]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        try:
            with _time_limit():
                main()
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else 1
        except _Hung:
            return None, "", ""
        except BaseException:
            traceback.print_exc(file=errors)
            code = 1
    return code, out.getvalue(), errors.getvalue()


class _Hung(BaseException):
    """The program takes too long."""


@contextmanager
def _time_limit() -> Iterator[None]:
    def end(*_: object) -> None:
        raise _Hung

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(_LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
