"""If the process that renders chat templates dies, the error says whose fault it is, and another
takes over."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest
from running import eventually

from offload.errors import BadRequest, DeviceFailed
from specoffload.chat.conversation import Conversation, Tool
from specoffload.chat.format import ChatFormat, ChatPrompt
from specoffload.server.renderer import Renderer, Structure, _RenderProcess
from specoffload.server.rendering_turns import MOST_PROCESSES, MOST_QUICK, Turns

HI = Conversation(({"role": "user", "content": "hi"},))
ECHO = ChatFormat.of("{{ messages[0].content }}")


@dataclass(frozen=True)
class _Deadly(ChatFormat):
    """Kills the process that renders it, after appending a letter to the file `name`."""

    def prepare(
        self, conversation: Conversation, now: Callable[[], datetime] = datetime.now
    ) -> ChatPrompt:
        with Path(self.name).open("a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGSEGV)
        raise AssertionError


def _rendered(renderer: Renderer, form: ChatFormat = ECHO) -> str:
    return asyncio.run(renderer.prepare(form, HI)).text


def _processes() -> set[int]:
    return {
        child.pid or 0 for child in multiprocessing.active_children() if child.name == "templates"
    }


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_was_ended_or_stopped_is_replaced_unnoticed(sig: signal.Signals) -> None:
    with closing(Renderer(patience_s=1.0)) as renderer:
        assert _rendered(renderer) == "hi"
        [before] = _processes()
        os.kill(before, sig)
        assert _rendered(renderer) == "hi"
        assert before not in _processes()


def test_a_process_that_ends_every_time_is_a_failure_of_ours(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with closing(Renderer()) as renderer:
        with pytest.raises(DeviceFailed, match="was killed by SIGSEGV, 2 times in a row"):
            _rendered(renderer, _Deadly({"default": ""}, name=str(log)))
        assert log.read_text() == "xx"
        assert _rendered(renderer) == "hi"


def test_a_template_that_does_not_end_is_the_requests_fault() -> None:
    slow = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with closing(Renderer(time_limit_s=1.0)) as renderer:
        with pytest.raises(BadRequest, match="takes over 1 s of processor time"):
            _rendered(renderer, ChatFormat.of(slow))
        assert _rendered(renderer) == "hi"


_SLOW = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def test_a_conversation_behind_six_slow_ones_is_rendered_before_them() -> None:
    async def asked(renderer: Renderer) -> tuple[str, int]:
        slow = [
            asyncio.ensure_future(renderer.prepare(ChatFormat.of(_SLOW), HI, "a", 140_000))
            for _ in range(6)
        ]
        await asyncio.sleep(0.1)
        text = (await renderer.prepare(ECHO, HI, "a", 40)).text
        n_done = sum(one.done() for one in slow)
        for one in slow:
            with pytest.raises(BadRequest, match="takes over 2 s"):
                await one
        return text, n_done

    with closing(Renderer(time_limit_s=2.0)) as renderer:
        assert asyncio.run(asked(renderer)) == ("hi", 0)
        assert _rendered(renderer) == "hi"


def test_a_grammar_that_takes_long_to_compile_is_refused_and_others_go_on() -> None:
    patterns = [{"pattern": f"a{{{i}}}|[a-z]*{i}[a-z]*"} for i in range(24)]
    slow = Structure(json_schema=json.dumps({"allOf": patterns}))
    quick = Structure(json_schema=json.dumps({"type": "array", "uniqueItems": True}))
    with closing(Renderer()) as renderer:
        with pytest.raises(BadRequest, match="the grammar takes over 1 s of processor time"):
            asyncio.run(renderer.check(slow))
        assert asyncio.run(renderer.check(quick)) == ("#/uniqueItems",)
        assert asyncio.run(renderer.check(Structure('root ::= "a"'))) == ()
        with pytest.raises(BadRequest, match="does not parse"):
            asyncio.run(renderer.check(Structure("root ::= (")))
        asked = Conversation((HI.messages[0],), schema=slow.json_schema, tools=(Tool("f"),))
        with pytest.raises(BadRequest, match="the grammar takes over 1 s"):
            asyncio.run(renderer.prepare(ChatFormat.of(None), asked))


def test_a_grammar_that_takes_all_memory_is_refused() -> None:
    """llguidance ends its process by SIGABRT if it gets no memory."""
    patterns = [{"pattern": f"a{{{i}}}|[a-z]*{i}[a-z]*"} for i in range(24)]
    slow = Structure(json_schema=json.dumps({"allOf": patterns}))
    worker = _RenderProcess(time_limit_s=5.0, patience_s=5.0)

    def abort() -> None:
        assert worker._process is not None
        assert worker._process.pid is not None
        os.kill(worker._process.pid, signal.SIGABRT)

    with closing(worker):
        reply = worker.ask(None, slow, abort)
    assert isinstance(reply, str)
    assert reply.startswith("the grammar takes over 1024 MiB of memory to compile")


def test_a_process_that_was_ended_is_started_again_before_it_is_asked() -> None:
    patterns = [{"pattern": f"a{{{i}}}|[a-z]*{i}[a-z]*"} for i in range(24)]
    slow = Structure(json_schema=json.dumps({"allOf": patterns}))
    others = _processes()

    async def refused(renderer: Renderer) -> tuple[set[int], set[int]]:
        """Return the processes after a refusal, and those that rendered afterwards."""
        with pytest.raises(BadRequest, match="the grammar takes over 1 s"):
            await renderer.check(slow)
        await asyncio.to_thread(eventually, lambda: len(_processes() - others) == 2, 60)
        before = _processes() - others
        assert (await renderer.prepare(ECHO, HI)).text == "hi"
        return before, _processes() - others

    with closing(Renderer()) as renderer:
        before, after = asyncio.run(refused(renderer))
        assert before == after, "one that became slow was ended, and two wait"


def test_one_process_is_kept_beyond_those_that_work_side_by_side() -> None:
    assert not Turns(n_quick=MOST_QUICK + 1).is_one_too_many
    assert Turns(n_quick=MOST_QUICK + 2).is_one_too_many


def test_clients_take_turns_and_small_conversations_come_first() -> None:
    turns: Turns[str] = Turns()
    for client, n_bytes, item in (
        ("a", 9000, "large"), ("a", 9001, "large too"), ("a", 10, "small"), ("b", 9999, "other")
    ):  # fmt: skip
        turns.enter(client, n_bytes, item, 0.0)
    assert turns.next(0.1) == ("a", "small")
    assert turns.next(0.1) == ("b", "other"), "its client has none that runs"
    turns.ended("a")
    turns.enter("a", 5, "later", 3.0)
    left = [turns.next(3.0) for _ in range(3)]
    assert left == [("a", "large"), ("a", "large too"), ("a", "later")]
    assert turns.next(3.0) is None


def test_slow_processes_make_room_up_to_a_limit() -> None:
    turns: Turns[str] = Turns(n_quick=MOST_QUICK)
    assert not turns.may_start
    turns.n_quick, turns.n_slow = MOST_QUICK - 1, 1
    assert turns.may_start
    turns.n_slow = MOST_PROCESSES
    assert not turns.may_start
