"""A walk: a real server under random sequences of what clients and its owner do.

Each step is a rule of a state machine of hypothesis. After each step the server has to be sound,
and every answer is the plain one of `truth`. A walk that fails is shrunk to its shortest form.
"""

from __future__ import annotations

import functools
import inspect
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from hypothesis import HealthCheck, Phase, assume, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from combinations.asking import PATHS, Body, Reply, body_of, shown, streamed_reply, with_turn
from combinations.cases import Case
from combinations.requesting import events_of, is_valid, sentence_of
from combinations.talking import RAW, Conversation, Refusal, Talker, numbers_of
from combinations.truth import Truth, truth_of
from combinations.walked_server import SETTINGS, WalkedServer, wait_for

APIS = st.sampled_from(("native", "completions", "chat", "responses", "messages"))
# Characters of a question. A token has about three. The disk keeps texts of 256 tokens and more.
SIZES = st.sampled_from((40, 200, 1100))
ANSWERS = st.sampled_from((1, 8, 24))  # tokens
WHICH = st.integers(0, 9)  # a known conversation, model or file: modulo their number
# A request loses its engine if the engine is killed. Its words say so.
_LOST = "engine process"
_MOST_OPEN = 40  # files or threads of one process. At a start it has about 18.
_SOURCE = inspect.getsource(json.decoder) + inspect.getsource(inspect)


# Seconds of all steps of this process, by the rule's name.
STEPS_S: dict[str, list[float]] = {}


# What ended each run of a walk that failed, the first one first. Hypothesis shrinks by runs, and
# keeps none of them if a later run of the same steps is different.
FAULTS: list[str] = []


def step(**strategies: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A rule whose time is kept in STEPS_S."""

    def wrap(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def timed(*args: Any, **named: Any) -> None:
            began = time.perf_counter()
            function(*args, **named)
            STEPS_S.setdefault(function.__name__, []).append(time.perf_counter() - began)

        return rule(**strategies)(timed)

    return wrap


class _AllRules:
    """Hypothesis's choice of rules for an example: all of them."""

    def is_enabled(self, name: str) -> bool:
        return True


class Walk(RuleBasedStateMachine):
    """The server, its conversations, and what its files must have."""

    setting = ""  # one of SETTINGS, if not any

    def __init__(self) -> None:
        super().__init__()
        # Hypothesis turns most rules off in each example, but a server starts too seldom for that.
        self._rules_strategy.enabled_rules_strategy = st.just(_AllRules())
        self._folder = tempfile.TemporaryDirectory()
        self._server: WalkedServer | None = None
        self._talks: list[Conversation] = []
        self._saved: list[tuple[str, Conversation, int]] = []  # file, text, tokens
        self._looks: dict[str, Reply] = {}  # first answers to requests with an image
        self._n_asked = 0
        self._neighbours: list[subprocess.Popen[bytes]] = []

    @initialize(
        setting=st.sampled_from([*SETTINGS]), n_streams=st.sampled_from((2, 4)),
        place=st.integers(0, 40_000),
    )  # fmt: skip
    def begin(self, setting: str, n_streams: int, place: int) -> None:
        assume(place)  # the first example that hypothesis tries has the least of everything
        self._place = place
        self._server = WalkedServer(self.setting or setting, n_streams, Path(self._folder.name))
        self._talker = Talker(self._server.url)

    @property
    def server(self) -> WalkedServer:
        assert self._server is not None
        return self._server

    def _truth(self, talk: Conversation) -> Truth:
        return truth_of(self.server.model_file(talk.model), self.server.n_ctx)

    def _text(self, n: int) -> str:
        """A text that no earlier question had."""
        self._n_asked += 1
        start = (self._place + 997 * self._n_asked) % (len(_SOURCE) - n)
        return _SOURCE[start : start + n]

    def _talk(self, which: int) -> Conversation:
        return self._talks[which % len(self._talks)]

    def _new(self, api: str, which: int, size: int) -> Conversation:
        return Conversation(self._name(which), api, self._text(size))

    def _name(self, which: int) -> str:
        """A model. One is asked more often than the other, because opening a model takes long."""
        return self.server.names[0 if which < 7 else -1]

    def _ask(self, talk: Conversation, n: int, streamed: bool, **more: Any) -> Conversation | None:
        """Ask, and judge the answer. Returns the conversation with it, unless it is too long."""
        truth = self._truth(talk)
        prompt = truth.tokens(self._talker.prompt_of(talk))
        body = talk.body(n) | more
        if len(prompt) >= self.server.n_ctx:
            self._expect_too_long(talk.api, body, len(prompt))
            return None
        reply = self._talker.ask(talk.api, body, streamed=streamed)
        fault = truth.fault_of(prompt, n, reply)
        assert not fault, f"{talk.api}, {'streamed' if streamed else 'whole'}: {fault}"
        return talk.answered(reply.text, self._text(60))

    def _keep(self, talk: Conversation | None) -> None:
        if talk is not None:
            self._talks = [*self._talks[-9:], talk]

    def _expect_too_long(self, api: str, body: Body, n_tokens: int) -> None:
        """The refusal has both numbers, and a prompt that follows it is answered."""
        found = self._talker.tried(api, body)
        assert isinstance(found, Refusal), (
            f"{api}: {n_tokens} tokens in a context of {self.server.n_ctx}"
        )
        assert found.status == 400, f"{api}: {found}"
        numbers = numbers_of(found.sentence)
        assert n_tokens in numbers, f"{api}: {n_tokens} is not in {found}"
        assert self.server.n_ctx in numbers, f"{api}: {self.server.n_ctx} is not in {found}"

    @step(api=APIS, which=WHICH, size=SIZES, n=ANSWERS, streamed=st.booleans())
    def ask(self, api: str, which: int, size: int, n: int, streamed: bool) -> None:
        self._keep(self._ask(self._new(api, which, size), n, streamed))

    @precondition(lambda self: self._talks)
    @step(which=WHICH, n=ANSWERS, streamed=st.booleans())
    def go_on(self, which: int, n: int, streamed: bool) -> None:
        self._keep(self._ask(self._talk(which), n, streamed))

    @precondition(lambda self: self._talks)
    @step(which=WHICH, n=ANSWERS, streamed=st.booleans())
    def edit(self, which: int, n: int, streamed: bool) -> None:
        """Change the last turn. Twice from the same one makes two branches."""
        self._keep(self._ask(self._talk(which).edited(self._text(90)), n, streamed))

    @step(api=APIS, which=WHICH, size=SIZES, sent=st.integers(1, 9999), read=st.integers(0, 4000))
    def leave(self, api: str, which: int, size: int, sent: int, read: int) -> None:
        """A client leaves within its request, or at any byte of its answer."""
        body = self._new(api, which, size).body(60)
        self._talker.leave(api, body, sent if sent < 400 else 1 << 20, read)

    @step(asked=st.lists(st.tuples(APIS, WHICH, SIZES, ANSWERS, st.booleans()), min_size=2,
                         max_size=5), n_left=st.integers(0, 2), kills=st.booleans())  # fmt: skip
    def together(
        self, asked: list[tuple[str, int, int, int, bool]], n_left: int, kills: bool
    ) -> None:
        """Several clients at once. Some may leave, and the engine may be killed meanwhile."""
        talks = [self._new(api, which, size) for api, which, size, _, _ in asked]
        left = [self._new("chat", i, 200).body(60) for i in range(n_left)]
        for talk, (_, _, _, n, _) in zip(talks, asked, strict=True):  # the judge has one thread
            prompt = self._truth(talk).tokens(self._talker.prompt_of(talk))
            self._truth(talk).plain(prompt, n)
        with ThreadPoolExecutor(8) as pool:
            leaving = [
                pool.submit(self._talker.leave, "chat", b, 1 << 20, 300 * i)
                for i, b in enumerate(left)
            ]
            answers = [
                pool.submit(self._reply, talk, n, streamed, kills)
                for talk, (_, _, _, n, streamed) in zip(talks, asked, strict=True)
            ]
            if kills:
                time.sleep(0.2)
                self.server.kill_engine()
            for future in leaving:
                with suppress(ConnectionError):
                    future.result()
            replies = [future.result() for future in answers]
        if kills:  # also if all answers were written before
            self.server.wait_healthy()
        for talk, (_, _, _, n, _), reply in zip(talks, asked, replies, strict=True):
            if reply is not None:
                truth = self._truth(talk)
                fault = truth.fault_of(truth.tokens(self._talker.prompt_of(talk)), n, reply)
                assert not fault, f"{talk.api}, together with others: {fault}"
            if not kills:  # which answers a killed engine loses is a matter of time
                assert reply is not None
                self._keep(talk.answered(reply.text, self._text(60)))

    def _reply(self, talk: Conversation, n: int, streamed: bool, may_be_lost: bool) -> Reply | None:
        found = self._talker.tried(talk.api, talk.body(n), streamed=streamed)
        if isinstance(found, Refusal):
            assert may_be_lost, f"{talk.api}: {found}"
            assert found.status == 500, f"{talk.api}: {found}"
            assert _LOST in found.sentence, f"{talk.api}: {found}"
            return None
        return found

    @step(api=APIS, which=WHICH)
    def exceed(self, api: str, which: int) -> None:
        """A prompt that is too long is refused, and works if it is as long as the refusal says."""
        talk = self._new(api, which, 6000)
        truth = self._truth(talk)
        prompt = truth.tokens(self._talker.prompt_of(talk))
        self._expect_too_long(api, talk.body(4), len(prompt))
        if api in RAW:
            body = talk.body(8) | {"prompt": prompt[: self.server.n_ctx - 4]}
            reply = self._talker.ask(api, body)
            assert reply.n_prompt == self.server.n_ctx - 4
            assert reply.n_answer <= 4, f"{reply.n_answer} tokens where 4 have room"

    @step(api=st.sampled_from(("chat", "responses", "messages")), which=WHICH)
    def call_a_tool(self, api: str, which: int) -> None:
        name = self._name(which)
        case = Case.of("request", api=api, constraint="required")
        body = body_of(case, "Paint it red.") | {"model": name}
        reply = self._talker.ask(api, body)
        if reply.reason != "length":
            ((tool, arguments),) = reply.calls
            assert tool == "paint"
            assert is_valid(arguments), arguments

    @step(api=st.sampled_from(("chat", "responses", "messages")), which=WHICH,
          in_result=st.booleans(), streamed=st.booleans())  # fmt: skip
    def show_an_image(self, api: str, which: int, in_result: bool, streamed: bool) -> None:
        """In a question or in a tool's result.

        Without eyes a model reads "[image omitted]" in a result, and refuses it in a question.
        """
        body = shown(api, "What is it?", in_result=in_result) | {"model": self._name(which)}
        if self.server.has_eyes:
            self._look_twice(api, body, streamed)
            return
        if in_result:
            told = [self._talker.ask(api, body, streamed=way).n_prompt for way in (streamed, True)]
            assert told[0] == told[1] > 0
            return
        found = self._talker.tried(api, body)
        assert isinstance(found, Refusal), found
        assert found.status == 400, found
        assert "image input is not supported" in found.sentence
        talk = self._new("chat", which, 40)
        self._keep(self._ask(talk, 4, streamed=False))

    def _look_twice(self, api: str, body: Body, streamed: bool) -> None:
        """The same request has the same answer at any time, also after a next turn."""
        first = self._talker.ask(api, body, streamed=streamed)
        next_turn = self._talker.ask(api, with_turn(api, body, first.text, self._text(40)))
        assert next_turn.n_prompt > first.n_prompt + 20, "the next turn forgets some of the first"
        again = self._talker.ask(api, body)
        known = self._looks.setdefault(json.dumps(body), first)
        for reply in (first, again):
            told = (reply.text, reply.reason, reply.n_prompt, reply.n_answer)
            assert told == (known.text, known.reason, known.n_prompt, known.n_answer), (
                f"{api}: {told} instead of {known}"
            )

    @step(which=WHICH, size=SIZES)
    def save(self, which: int, size: int) -> None:
        """Save slot 0 after an answer."""
        talk = self._new("native", which, size)
        assert self._ask(talk, 4, streamed=False, id_slot=0) is not None
        name = f"{len(self._saved)}.bin"
        told = self._slot("save", talk.model, name)
        self._saved.append((name, talk, told["n_saved"]))

    @precondition(lambda self: self._saved)
    @step(which=WHICH)
    def restore(self, which: int) -> None:
        """Restore it. Its prompt is found again, and its answer is the same."""
        name, talk, n_saved = self._saved[which % len(self._saved)]
        told = self._slot("restore", talk.model, name)
        assert told["n_restored"] == n_saved, f"{told} of {n_saved} tokens"
        body = talk.body(4) | {"id_slot": 0}
        reply = self._talker.ask("native", body)
        n_read = reply.raw["timings"]["prompt_n"]
        assert n_read <= 2, f"{n_read} of {reply.n_prompt} tokens are read again after a restore"
        fault = self._truth(talk).fault_of(self._truth(talk).tokens(talk.text), 4, reply)
        assert not fault, f"a restored slot: {fault}"

    def _slot(self, action: str, model: str, name: str) -> dict[str, Any]:
        body = {"filename": name, "model": model}
        answer = self._talker.post(f"/slots/0?action={action}", body)
        assert answer.status_code == 200, f"{action}: {answer.text}"
        told: dict[str, Any] = answer.json()
        return told

    @precondition(lambda self: len(self.server.names) > 1)
    @step(beside=st.booleans(), api=APIS)
    def reload(self, beside: bool, api: str) -> None:
        """Presets change, perhaps while the model answers. No request is lost or waits for ever."""
        talk = Conversation("small", api, self._text(200))
        self.server.write_presets()
        with ThreadPoolExecutor(2) as pool:
            truth = self._truth(talk)
            prompt = truth.tokens(self._talker.prompt_of(talk))
            truth.plain(prompt, 24)
            running = pool.submit(self._talker.ask, api, talk.body(24), streamed=True)
            if not beside:
                running.result()
            reloading = pool.submit(self._talker.get, "/models?reload=1")
            if beside:  # a request that arrives while the changed model closes
                time.sleep(0.2)
                late = truth.fault_of(prompt, 4, self._talker.ask(api, talk.body(4)))
                assert not late, f"during a reload: {late}"
            reloading.result()
            fault = truth.fault_of(prompt, 24, running.result())
        assert not fault, f"beside a reload: {fault}"
        self._keep(self._ask(talk, 8, streamed=False))
        self._no_unknown_engine()

    @precondition(lambda self: len(self.server.names) > 1)
    @step(which=WHICH)
    def unload(self, which: int) -> None:
        name = self._name(which)
        self._talker.post("/models/unload", {"model": name})

    @precondition(lambda self: self.server.setting == "models that sleep")
    @step()
    def sleep(self) -> None:
        """No model is open after a while, and the next request opens one."""
        wait_for("all models sleep", lambda: not {"loaded", "loading"} & {*self._states()}, 120)

    def _no_unknown_engine(self) -> None:
        """Each engine belongs to a model of the list. One that a reload forgot would stay."""
        wait_for("each engine is of a model that is listed as open", lambda: (
            self.server.n_engines() <= len([s for s in self._states() if s != "unloaded"])
        ), 60)  # fmt: skip

    def _states(self) -> list[str]:
        return [model["status"]["value"] for model in self._talker.get("/models")["data"]]

    @step(beside=st.booleans(), api=APIS)
    def start_again(self, beside: bool, api: str) -> None:
        """SIGTERM, perhaps while an answer is written. It is written to its end."""
        with ThreadPoolExecutor(1) as pool:
            running = None
            if beside:
                talk = self._new(api, 0, 200)
                truth = self._truth(talk)
                prompt = truth.tokens(self._talker.prompt_of(talk))
                truth.plain(prompt, 60)
                body = talk.body(60) | {"stream": True}
                running = pool.submit(self._answered_or_refused, api, body)
                time.sleep(0.2)
            self.server.terminate()
            if running is not None and (reply := running.result()) is not None:
                fault = truth.fault_of(prompt, 60, reply)
                assert not fault, f"beside SIGTERM: {fault}"
        self.server.wait_ended()
        self._talker.close()
        self.server.start()
        self._talker = Talker(self.server.url)

    def _answered_or_refused(self, api: str, body: Body) -> Reply | None:
        """An answer, or None if the server ends before it takes the request."""
        if api in ("chat", "completions"):
            body = body | {"stream_options": {"include_usage": True}}
        try:
            answer = self._talker.http.post(PATHS[api], json=body)
        except httpx.ConnectError:
            return None
        if answer.status_code == 200:
            return streamed_reply(api, [*events_of(answer.text)])
        assert answer.status_code in (503, 529), answer.text
        sentence_of(answer.json())
        return None

    @step()
    def kill_an_engine(self) -> None:
        """The next requests wait for its successor."""
        if self.server.kill_engine():
            self.server.wait_healthy()

    @step(seconds=st.sampled_from((1, 3)))
    def neighbour(self, seconds: int) -> None:
        """Another program computes for some seconds."""
        spin = f"import time\nend = time.time() + {seconds}\nwhile time.time() < end: pass"
        for _ in range(2):
            self._neighbours.append(subprocess.Popen([sys.executable, "-c", spin]))

    @step()
    def look(self) -> None:
        """Pages that a monitor reads."""
        for path in ("/health", "/v1/models"):
            self._talker.get(path)
        for name in filter(None, self.server.names):  # those of a closed model may refuse
            for path in ("/health", "/metrics"):
                answer = self._talker.http.get(f"{path}?model={name}")
                if answer.status_code != 200:
                    assert answer.status_code in (400, 503), answer.text
                    sentence_of(answer.json())

    @invariant()
    def is_sound(self) -> None:
        if self._server is None:
            return
        assert self._server.is_running, self._server.log[-3000:]
        self._server.check_log()

    def teardown(self) -> None:
        try:
            if self._server is not None:
                if (error := sys.exc_info()[1]) is None:
                    self._end()
                else:
                    FAULTS.append(f"{type(error).__name__}: {error}")
                self._talker.close()
        finally:
            for neighbour in self._neighbours:
                neighbour.wait()
            if self._server is not None:
                self._server.kill()
            self._folder.cleanup()

    def _end(self) -> None:
        """Memory and files have come back. Each model takes a prompt as long as its context."""
        for i, name in enumerate(self.server.names):
            talk = Conversation(name, "native", self._text(6000))
            prompt = self._truth(talk).tokens(talk.text)[: self.server.n_ctx - 8]
            reply = self._talker.ask("native", talk.body(4) | {"prompt": prompt})
            fault = self._truth(talk).fault_of(prompt, 4, reply)
            assert not fault, f"at the end: {fault}"
            if i == len(self.server.names) - 1 and self.server.setting != "models that sleep":
                wait_for("all slots are idle", lambda query=f"?model={name}": not any(
                    slot["is_processing"] for slot in self._talker.get("/slots" + query)
                ), 30)  # fmt: skip
        if len(self.server.names) > 1:
            self._no_unknown_engine()
        most = self.server.most_open()
        assert most <= _MOST_OPEN, f"a process has {most} open files or threads at the end"
        self.server.terminate()
        self.server.wait_ended()
        self.server.check_log()


def walk_once(number: int, n_steps: int, setting: str = "", *, shrinks: bool = True) -> str:
    """Walk. Returns the fault with the steps that lead to it, or an empty text."""
    machine = seed(number)(type("Walk", (Walk,), {"setting": setting}))
    FAULTS.clear()
    phases = (Phase.generate, Phase.shrink) if shrinks else (Phase.generate,)
    try:
        run_state_machine_as_test(machine, settings=settings(
            max_examples=1, stateful_step_count=n_steps, phases=phases, deadline=None,
            database=None, suppress_health_check=[*HealthCheck], derandomize=False,
        ))  # fmt: skip
    except Exception as e:
        first = [f"the first run: {told}" for told in FAULTS[:1]]
        return "\n".join([f"{type(e).__name__}: {e}", *getattr(e, "__notes__", ()), *first])
    return ""
