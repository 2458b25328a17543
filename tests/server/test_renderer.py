"""If the process that renders chat templates dies, the error says whose fault it is, and another
takes over."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest

from offload.errors import BadRequest, DeviceFailed
from specoffload.chat.conversation import Conversation
from specoffload.chat.format import ChatFormat, ChatPrompt
from specoffload.server.renderer import Renderer

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


def _pid() -> int:
    [pid] = [p.pid for p in multiprocessing.active_children() if p.name == "templates"]
    assert pid is not None
    return pid


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_was_ended_or_stopped_is_replaced_unnoticed(sig: signal.Signals) -> None:
    with closing(Renderer(patience_s=1.0)) as renderer:
        assert _rendered(renderer) == "hi"
        before = _pid()
        os.kill(before, sig)
        assert _rendered(renderer) == "hi"
        assert _pid() != before


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
