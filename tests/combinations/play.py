"""Plays a case: opens its session, lets its event happen, and judges every answer."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from combinations.afterwards import Held, LogFaults, file_faults, profiles
from combinations.axes import N_CTX, N_PREDICT
from combinations.cases import Case
from combinations.judge import Answer, Judge, answer_of
from combinations.opening import Opened, context_of
from offload.errors import DoesNotFit
from specoffload.errors import KNOWN
from specoffload.generation.generation import GenerateOptions
from specoffload.slots.prompt_files import LEAST_TOKENS
from specoffload.slots.prompt_index import BLOCK
from specoffload.slots.request import Request

_MOST_SLOWER = 20.0  # processor time of answers, in that of the plain way. Steps are short here
N_PROMPT = 70  # tokens of a first prompt, more than one window of the small models
_GRAMMAR = 'root ::= ("a" | "b" | "cd")+ "."'
_SCHEMA = '{"type": "object", "properties": {"n": {"enum": [1, 22, 333]}}, "required": ["n"]}'
_PLAIN = GenerateOptions(n_predict=N_PREDICT, ignore_eos=True)
SAMPLING: dict[str, GenerateOptions] = {
    "greedy": _PLAIN,
    "seeded": replace(_PLAIN, temperature=0.8, top_k=20, seed=11),
    "penalties": replace(_PLAIN, repeat_penalty=1.3, frequency_penalty=0.2),
    "bias": replace(_PLAIN, logit_bias=((65, float("-inf")), (66, 1.0))),
    "grammar": replace(_PLAIN, ignore_eos=False, grammar=_GRAMMAR),
    "schema": replace(_PLAIN, ignore_eos=False, json_schema=_SCHEMA),
}


class Player:
    """A case's session and the texts of its conversations."""

    def __init__(self, case: Case, opened: Opened, judge: Judge, seed: int) -> None:
        self.case, self._opened, self._judge = case, opened, judge
        self._rng = np.random.default_rng(seed)
        self.n_streams = int(case["streams"])
        self._took_s = 0.0  # processor time of answers

    @property
    def slowness(self) -> str:
        """That answers took far more processor time than the plain way's. Empty if they did not.

        Threads that wait compute too, so several threads have no bound. Neither has Vulkan, whose
        driver in software computes and compiles its kernels on the processors.
        """
        most_s = _MOST_SLOWER * self._judge.took_s
        is_unbound = "--threads" in self.case.words or self.case["device"] == "vulkan"
        if is_unbound or self._took_s <= most_s:
            return ""
        return f"answers took {self._took_s:.2g} s of processor time, {most_s:.2g} s are allowed"

    def prompt(self, n_tokens: int = N_PROMPT) -> list[int]:
        """Tokens that partly repeat, so that earlier text can draft."""
        part = self._rng.integers(40, 120, max(n_tokens // 3, 1)).tolist()
        return [int(t) for t in (part * 4)[:n_tokens]]

    def ask(self, prompts: Sequence[Sequence[int]], what: str, **more: object) -> list[Answer]:
        """Answer all prompts at once, and judge the answers."""
        options = replace(SAMPLING[self.case["sampling"]], **more)  # type: ignore[arg-type]
        session = self._opened.session
        began_s = time.process_time()
        requests = [session.start(list(prompt), options) for prompt in prompts]
        finish(session.step, lambda: session.is_idle)
        self._took_s += time.process_time() - began_s
        answers = [
            answered(prompt, options, r) for prompt, r in zip(prompts, requests, strict=True)
        ]
        for answer in answers:
            self._judge.check(answer, what)
        return answers

    def play(self) -> None:
        """Let the case's event happen."""
        getattr(self, f"_{self.case['event']}")()

    def _fresh(self) -> None:
        self.ask(self._prompts(), "a fresh prompt")

    def _continued(self) -> None:
        first = self.ask(self._prompts(), "the first turn")
        second = self.ask([self._next_turn(a) for a in first], "the second turn")
        self._expect_cached(second, [len(a.prompt) for a in first], "the second turn")
        self.ask([self._next_turn(a) for a in second], "the third turn")

    def _edited(self) -> None:
        first = self.ask(self._prompts(), "the first turn")
        changed = [[*a.prompt[: len(a.prompt) // 2], 39, *self.prompt(30)] for a in first]
        answers = self.ask(changed, "an edited prompt")
        for before, answer in zip(first, answers, strict=True):
            if answer.stats.n_cached_tokens > len(before.prompt) // 2:
                self._fault("an edited prompt", f"{answer.stats.n_cached_tokens} tokens are cached")

    def _branched(self) -> None:
        first = self.ask(self._prompts(), "the first answer")
        self.ask([a.prompt for a in first], "the same prompt again")
        self.ask([[*a.prompt, *a.tokens[:3], 50] for a in first], "another branch")

    def _moved(self) -> None:
        first = self.ask(self._prompts(), "the first turn")
        for _ in range(2):
            self.ask(self._prompts(), "other conversations")
        back = self.ask([self._next_turn(a) for a in first], "a conversation that comes back")
        # RAM that cannot hold all experts keeps few prompts, and the start says how many.
        if self.case["experts"] != "disk" and self.case["kept"] != "nowhere":
            least = [len(a.prompt) for a in first]
            self._expect_cached(back, least, "a conversation that comes back")

    def _restored(self) -> None:
        prompt = self.prompt()
        self.ask([prompt], "the first answer")
        (live,) = self.ask([prompt], "the same prompt in a live slot")
        session = self._opened.session
        number = max(session.slots(), key=lambda s: s.n_tokens).id
        saved = session.change_slot(number, "save", "slot.bin")
        session.forget()
        self.ask([self.prompt()], "another prompt")
        restored = session.change_slot(number, "restore", "slot.bin")
        if saved.n_tokens != restored.n_tokens:
            words = f"{saved.n_tokens} tokens were saved and {restored.n_tokens} restored"
            self._fault("a restored slot", words)
        (again,) = self.ask([prompt], "the same prompt in a restored slot", id_slot=number)
        # A file has no hidden row of the prompt's last token but one, from which own layers draft.
        n_again = int(session.target.opened.row_draft is not None)
        if again.stats.n_cached_tokens < live.stats.n_cached_tokens - n_again:
            self._fault(
                "a restored slot",
                f"{again.stats.n_cached_tokens} tokens are found again, "
                f"{live.stats.n_cached_tokens} in the live slot",
            )

    def _reopened(self) -> None:
        # Shorter prompts are not kept in files, and text is found again in whole blocks.
        prompts = [self.prompt(LEAST_TOKENS + BLOCK + 7 * i) for i in range(self.n_streams)]
        first = self.ask(prompts, "the first turn")
        self._opened.again()
        second = self.ask([self._next_turn(a) for a in first], "the second turn after a restart")
        n = LEAST_TOKENS if self.case["kept"] == "disk" else 0
        self._expect_cached(second, [n] * len(first), "the second turn after a restart")

    def _cancelled(self) -> None:
        options = SAMPLING[self.case["sampling"]]
        session = self._opened.session
        leaves = session.start(self.prompt(), options)
        prompts = self._prompts()
        requests = [session.start(prompt, options) for prompt in prompts]
        for _ in range(3):
            session.step()
        session.cancel(leaves)
        finish(session.step, lambda: session.is_idle)
        for prompt, request in zip(prompts, requests, strict=True):
            self._judge.check(answered(prompt, options, request), "beside one that leaves")
        self.ask([self.prompt()], "after one that left")

    def _full(self) -> None:
        self._exceed()
        room = [4 + i for i in range(self.n_streams)]
        long = [self.prompt(N_CTX - n) for n in room]
        self.ask(long, "to the context's end", n_predict=40)
        self.ask([self.prompt()], "after a full context")

    def _exceed(self) -> None:
        """Ask more than the context holds. The refusal says by how much to shorten the prompt."""
        session, n_ctx = self._opened.session, context_of(self.case)
        prompt = self.prompt(n_ctx + 30)
        try:
            session.start(prompt, SAMPLING[self.case["sampling"]])
        except DoesNotFit as e:
            numbers = [int(n) for n in re.findall(r"\d+", str(e))]
            if {len(prompt), n_ctx} - {*numbers} or "--ctx-size" not in str(e):
                self._fault("a prompt over the context", f"its refusal lacks a number: {e}")
            if n_ctx <= 2 * N_CTX:  # longer ones take minutes on a busy machine
                self.ask([prompt[: n_ctx - 1]], "a prompt as short as the refusal says")
        else:
            self._fault("a prompt over the context", "it is not refused")

    def _prompts(self) -> list[list[int]]:
        return [self.prompt(N_PROMPT + 7 * i) for i in range(self.n_streams)]

    def _next_turn(self, answer: Answer) -> list[int]:
        return [*answer.prompt, *answer.tokens, *self.prompt(15)]

    def _expect_cached(self, answers: Sequence[Answer], least: Sequence[int], what: str) -> None:
        for answer, n in zip(answers, least, strict=True):
            if answer.stats.n_cached_tokens < n:
                self._fault(what, f"{answer.stats.n_cached_tokens} of {n} tokens are found again")

    def _fault(self, what: str, words: str) -> None:
        self._judge.faults.append(f"{what}: {words}")


def finish(step: object, is_idle: object, most: int = 5000) -> None:
    """Step until nothing runs. Raises AssertionError after `most` steps."""
    assert callable(step)
    assert callable(is_idle)
    for _ in range(most):
        if is_idle():
            return
        step()
    raise AssertionError(f"requests still run after {most} steps")


def answered(prompt: Sequence[int], options: GenerateOptions, request: Request) -> Answer:
    """The answer of a request that is over. Raises its error, if it has one."""
    assert request.is_over
    if request.error is not None:
        raise request.error
    return answer_of(tuple(prompt), options, request.pieces)


def _spin(parent: int) -> None:
    """Compute until the parent process has ended."""
    while os.getppid() == parent:
        pass


@contextlib.contextmanager
def busy(is_wanted: bool) -> Iterator[None]:
    """While it is open, another program computes on each processor."""
    context = multiprocessing.get_context("spawn")
    n = len(os.sched_getaffinity(0)) if is_wanted else 0
    spinning = [context.Process(target=_spin, args=(os.getpid(),), daemon=True) for _ in range(n)]
    for process in spinning:
        process.start()
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.join()


@contextlib.contextmanager
def machine(name: str) -> Iterator[None]:
    """While it is open, the machine is as the value of the axis says."""
    allowed = os.sched_getaffinity(0)
    if name == "one processor":
        os.sched_setaffinity(0, {min(allowed)})
    try:
        with busy(name == "busy"):
            yield
    finally:
        os.sched_setaffinity(0, allowed)


def is_exact(case: Case) -> bool:
    """True if texts equal the plain way's. Vulkan's kernels add in another order."""
    return case["cache"] == "exact" and case["weights"] == "f32" and case["device"] != "vulkan"


def faults_of(case: Case, models: Path, seed: int = 0) -> list[str]:
    """Play a case. Returns a sentence for each property that did not hold.

    A start that refuses is a fault too, unless the table has the pair. What grows, or takes long,
    is a fault if it does so again.
    """
    before = Held.now()
    first = _played(case, models, seed)
    between = Held.now()
    if first.faults or not (between.grown(before) or first.slowness):
        return first.faults
    second = _played(case, models, seed)
    faults = [*second.faults, *Held.now().grown(between)]
    return [*faults, second.slowness] if first.slowness and second.slowness else faults


@dataclass(frozen=True)
class _Played:
    """The result of a case. `slowness` is empty, or the sentence that the case was slow."""

    faults: list[str]
    slowness: str = ""


def _played(case: Case, models: Path, seed: int) -> _Played:
    said = LogFaults(case)
    root = logging.getLogger()
    root.addHandler(said)
    judge: Judge | None = None
    try:
        with tempfile.TemporaryDirectory() as folder, machine(case["machine"]):
            try:
                with Opened(case, models, Path(folder), said) as opened:
                    words = plain_words(case.value("cache").words)
                    judge = Judge(
                        opened.model, words, context_of(case), is_exact(case),
                        has_blocks=case["weights"] not in ("f32", "f16"),
                    )  # fmt: skip
                    player = Player(case, opened, judge, seed)
                    player.play()
                files = [*file_faults(Path(folder)), *file_faults(profiles())]
            except KNOWN as e:
                return _Played([f"refused: {type(e).__name__}: {e}", *said.faults])
            except Exception as e:
                return _Played([f"raised: {type(e).__name__}: {e}", *said.faults])
        return _Played([*judge.faults, *said.faults, *files], player.slowness)
    finally:
        root.removeHandler(said)
        if judge is not None:
            judge.close()


def plain_words(cache: Sequence[str]) -> tuple[str, ...]:
    """The flags of the cache that change numbers. Where the cache lies changes none."""
    return tuple(word for word in cache if word != "--no-kv-offload")
