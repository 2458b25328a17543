"""Opens the session of a case by the words that a user would type."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path

from our_worker import working

from combinations.afterwards import LogFaults
from combinations.axes import N_CTX
from combinations.cases import Case
from combinations.small_models import draft_of, model_of
from offload.errors import DoesNotFit
from offload.model_file import read_facts
from offload.plan.placement import PlanRequest, make_plan
from specoffload.cli import served_as
from specoffload.config.command_line import read_command_line
from specoffload.config.environment import Environment
from specoffload.session.session import Session


class Opened:
    """A case's session, its options and what belongs to it. Close it, or use `with`."""

    def __init__(self, case: Case, models: Path, folder: Path, said: LogFaults) -> None:
        """Open it. Kept prompts and saved slots go to `folder`. Raises what a start raises.

        `said` learns the command line, so that it knows which warnings are true.
        """
        self.case, self.folder = case, folder
        self.model = case_model(case, models)
        self._stack = ExitStack()
        try:
            address = self._worker() if case["device"] == "worker" else ""
            self.words = said.words = words_of(case, models, folder, address)
            self.session = open_words(self.words)
            self._stack.callback(lambda: self.session.close())
            if case["machine"] == "wrong clock":
                self.again()
        except BaseException:
            self._stack.close()
            raise

    def again(self) -> None:
        """End the session as a program does, and start it again."""
        self.session.close()
        if self.case["machine"] == "wrong clock":
            from_the_future(self.folder, Path(os.environ["SPECOFFLOAD_PROFILE_DIR"]))
        self.session = open_words(self.words)

    def _worker(self) -> str:
        """Start a worker with the case's model. Returns its address."""
        running = self._stack.enter_context(working(self.model, "--device", "sim:vram=16MiB"))
        self._stack.callback(lambda: _check_log(running.text))
        return str(running.address)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _check_log(text: str) -> None:
    assert "Traceback" not in text, f"a traceback of the worker: {text[-500:]}"


def from_the_future(*folders: Path) -> None:
    """Give all files in these folders a time that is two days ahead of the clock."""
    ahead_s = time.time() + 2 * 86400
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        os.utime(path, (ahead_s, ahead_s))


def open_words(words: Sequence[str], **variables: str) -> Session:
    """Open what `serve` opens for this command line, with no variables but our own and these."""
    own = {k: v for k, v in os.environ.items() if k.startswith("SPECOFFLOAD_")} | variables
    line = read_command_line("serve", words, Environment(variables=own))
    return Session(served_as(line).config)


def context_of(case: Case) -> int:
    """Tokens of the context, which all streams of a case share."""
    return N_CTX * int(case["streams"])


def case_model(case: Case, models: Path) -> Path:
    """The model of a case."""
    return model_of(case["memory"], models, case["weights"])


def words_of(case: Case, models: Path, folder: Path, worker: str = "") -> list[str]:
    """The command line of a case, with paths and sizes in place of braces.

    `worker` is the address of its worker, if it has one.
    """
    model = case_model(case, models)
    words = [str(model), "--ctx-size", str(context_of(case)), *case.words]
    if "--threads" not in words:
        words += ["--threads", "1"]
    filled = {
        "{draft}": str(draft_of(case["drafter"], model, models)),
        "{ram}": f"{model.stat().st_size // 2048}KiB",  # a small number needs a unit
        "{worker}": worker,
    }
    words = [filled.get(word, word) for word in words]
    if "{half}" in words:
        without = tuple(word for word in words if not word.endswith("{folder}"))
        half = str(_half_bytes(tuple(w for w in without if w != "--cache-disk"), model))
        words = [half if word == "{half}" else word for word in words]
    words = [word.replace("{folder}", str(folder)) for word in words]
    return [*words, "--slot-save-path", str(folder)]


@lru_cache
def _half_bytes(words: tuple[str, ...], model: Path) -> int:
    """Memory of each device with which half of its streamed experts have slots.

    It is found by a refusal, which names the least memory.
    """
    slots = make_plan(read_facts(model), PlanRequest()).slot_bytes
    known = 1 << 20
    for _ in range(3):  # each device may refuse
        try:
            tried = [str(known) if word == "{half}" else word for word in words]
            open_words(tried, SPECOFFLOAD_WITHOUT="profile").close()
        except DoesNotFit as e:
            if e.least_bytes is None:
                raise
            if e.least_bytes <= known:
                raise AssertionError(
                    f"{known} bytes are refused, and the remedy is less: {e}"
                ) from e
            known = e.least_bytes
        else:
            break
    else:
        raise AssertionError(f"the remedy of a refusal is refused: --vram {known}")
    return known + slots // 2
