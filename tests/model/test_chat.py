"""`run` and `chat` as a user runs them, with pipes, a terminal and keys."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from in_process import command

from specoffload.config.resolution import DEMO_WORDS

ROOT = Path(__file__).parents[2]


def environment(home: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {
        **os.environ,
        "PYTHONPATH": path,
        "XDG_STATE_HOME": str(home),
        "TERM": "xterm",
        "PROMPT_TOOLKIT_NO_CPR": "1",
        "SPECOFFLOAD_WITHOUT": "profile",
    }


def piped(home: Path, text: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the program with `text` on its standard input."""
    if "-v" not in words:
        return command(*words, stdin=text, env=environment(home))
    return subprocess.run(
        [sys.executable, "-m", "specoffload", *map(str, words)],
        env=environment(home),
        input=text,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_what_is_piped_in_is_answered(tiny_dense: Path, tmp_path: Path) -> None:
    done = piped(tmp_path, "hi\n", "run", tiny_dense, "-n", "5")
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 2, "the model has a template, so nothing is said of one"
    assert re.match(r"\d+ tokens in .* tokens/s · prompt \d+ tokens", lines[-2])
    assert "hi\n" not in done.stdout
    done = piped(tmp_path, "hi\n", "run", tiny_dense, "-n", "5", "--json")
    found = json.loads(done.stdout)
    assert found["finish_reason"] in ("stop", "length")
    assert found["stats"]["n_tokens"] <= 5


def test_a_prompt_is_not_echoed_into_a_pipe(tiny_dense: Path, tmp_path: Path) -> None:
    done = piped(tmp_path, "", "run", tiny_dense, "-p", "a prompt", "-n", "3", "--ignore-eos")
    assert done.returncode == 0, done.stderr
    assert "a prompt" not in done.stdout
    assert len(done.stderr.splitlines()) == 2
    verbose = piped(tmp_path, "", "run", tiny_dense, "-p", "a prompt", "-n", "3", "-v")
    assert "device cpu" in verbose.stderr
    as_json = piped(tmp_path, "", "run", tiny_dense, "-p", "a", "-n", "3", "--json")
    assert json.loads(as_json.stdout)["stats"]["n_prompt_tokens"] >= 1


def n_prompt_tokens(home: Path, text: str, *words: str | Path) -> int:
    done = piped(home, text, "run", *words, "--json", "-n", "2")
    assert done.returncode == 0, done.stderr
    n_tokens: int = json.loads(done.stdout)["stats"]["n_prompt_tokens"]
    return n_tokens


def test_a_prompt_is_answered_by_the_template_unless_it_is_to_be_continued(
    tiny_dense: Path, tmp_path: Path
) -> None:
    raw = n_prompt_tokens(tmp_path, "", tiny_dense, "-p", "hi there", "-no-cnv")
    asked = n_prompt_tokens(tmp_path, "", tiny_dense, "-p", "hi there")
    assert asked > raw + 5, "the template's words stand around it"
    assert n_prompt_tokens(tmp_path, "hi there", tiny_dense) == asked
    assert n_prompt_tokens(tmp_path, "hi there", tiny_dense, "--no-conversation") == raw


def test_the_embedded_pair_continues_text(tmp_path: Path) -> None:
    raw = n_prompt_tokens(tmp_path, "", "-p", "import os")
    assert n_prompt_tokens(tmp_path, "", "-p", "import os", "-cnv") == raw
    wrapped = ("-cnv", "--chat-template", "chatml")
    assert n_prompt_tokens(tmp_path, "", "-p", "import os", *wrapped) > raw


@pytest.mark.parametrize("command", ["chat", "run"])
def test_the_demo_pair_says_what_it_is_and_continues_a_chat(tmp_path: Path, command: str) -> None:
    done = piped(tmp_path, "def main():", command, "-c", "512", "-t", "1", "--temp", "0")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0] == DEMO_WORDS
    assert "trained on Python source" in DEMO_WORDS
    assert done.stdout.startswith("\n    "), "a function's body follows its head"
    assert "128 tokens in" in done.stderr


def without_template(model: Path, folder: Path) -> Path:
    """A copy of the file in `folder`, in which the chat template has another key."""
    copied = folder / "without-template.gguf"
    named = model.read_bytes()
    copied.write_bytes(named.replace(b"tokenizer.chat_template", b"tokenizer.none_template"))
    return copied


def test_text_for_a_model_without_a_template_is_continued_to_a_limit(
    tiny_dense: Path, tmp_path: Path
) -> None:
    plain = without_template(tiny_dense, tmp_path)
    # One thread: with several, the thread governor might print a line on a busy machine.
    words = ("run", plain, "--ignore-eos", "-c", "512", "-t", "1")
    limit = "stopped after 128 tokens; -n N writes N, -n -1 to the end"
    for done in (
        piped(tmp_path, "hi\n", *words, "--json"),
        piped(tmp_path, "", *words, "-p", "hi", "--json"),
    ):
        assert json.loads(done.stdout)["stats"]["n_tokens"] == 128
        assert done.stderr.splitlines()[0] == limit
        assert "template" not in done.stderr
    done = piped(tmp_path, "hi\n", *words, "-n", "3", "-v")
    assert limit not in done.stderr
    assert "the model file has no chat template: the text is continued" in done.stderr


def test_a_chat_without_a_template_says_that_it_uses_chatml(
    tiny_dense: Path, tmp_path: Path
) -> None:
    plain = without_template(tiny_dense, tmp_path)
    done = piped(tmp_path, "hi\n", "chat", plain, "-n", "3", "--ignore-eos", "-c", "512", "-t", "1")
    assert done.returncode == 0, done.stderr
    said, *lines = done.stderr.splitlines()
    assert said == (
        "the model file has no chat template: chats use ChatML, which the model may not know "
        "(--chat-template)"
    )
    assert lines[0] == "stopped after 3 tokens; -n N writes N, -n -1 to the end"
    assert lines[1].startswith("3 tokens in")


@pytest.mark.parametrize("words", [("-no-cnv",), ()])
def test_a_prompt_is_kept_in_a_file_for_the_next_run(
    tiny_dense: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    file, text = tmp_path / "kept", "a prompt of some length, "
    run = ("run", tiny_dense, *words, "--prompt-cache", file, "-n", "3", "--ignore-eos")

    def cached(*more: str) -> tuple[int, int]:
        done = piped(tmp_path, "", *run, "--json", *more)
        assert done.returncode == 0, done.stderr
        stats = json.loads(done.stdout)["stats"]
        return stats["n_cached_tokens"], stats["n_prompt_tokens"]

    assert cached("-p", text, "--prompt-cache-ro")[0] == 0
    assert not file.exists()
    n_cached, n_prompt = cached("-p", text)
    assert n_cached == 0
    size = file.stat().st_size
    assert cached("-p", text, "--prompt-cache-all") == (n_prompt - 1, n_prompt)
    assert file.stat().st_size > size, "what was written is kept too"
    n_cached, n_prompt = cached("-p", text + "and more")
    assert len(text) // 2 < n_cached < n_prompt - 1
    file.write_text("no sequence at all")
    done = piped(tmp_path, "", *run, "-p", text)
    assert done.returncode == 2
    assert "kept is no saved sequence" in done.stderr


def test_nothing_to_answer_is_said(tiny_dense: Path, tmp_path: Path) -> None:
    done = piped(tmp_path, "", "chat", tiny_dense)
    assert done.returncode == 2
    assert "nothing to answer" in done.stderr
    done = piped(tmp_path, "x", "chat", tiny_dense, "--chat-template", "nothing")
    assert done.returncode == 2
    assert "--chat-template nothing: neither a readable file (No such file" in done.stderr


@dataclass
class Terminal:
    """A program on a terminal of its own."""

    process: subprocess.Popen[bytes]
    fd: int
    seen: str = ""

    def press(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def wait_for(self, found: str | Callable[[str], bool], limit_s: float = 60) -> str:
        """Wait until `found` is shown. Returns the output since the last call.

        Fails after `limit_s` seconds, or if the program ends.
        """
        end_s = time.monotonic() + limit_s
        is_there = found if callable(found) else (lambda text: found in text)
        while not is_there(self.seen):
            assert time.monotonic() < end_s, self.seen[-2000:]
            if select.select([self.fd], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self.fd, 65536).decode(errors="replace")
                except OSError:
                    pytest.fail(f"it ended: {self.seen[-2000:]}")
        shown, self.seen = self.seen, ""
        return shown


@contextmanager
def terminal(home: Path, *words: str | Path, columns: int = 100) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "specoffload", *map(str, words)],
        env={**environment(home), "COLUMNS": str(columns), "LINES": "30"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C is then a signal
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_chat_at_a_terminal(tiny_dense: Path, tmp_path: Path, command: str) -> None:
    with terminal(tmp_path, command, tiny_dense, "--ignore-eos", "-c", "32768") as screen:
        screen.wait_for("/help")
        screen.press("first\\\rsecond line\r")
        # The prompt's bar is erased when the answer begins. The answer has thousands of tokens.
        screen.wait_for("tokens")
        screen.wait_for(lambda text: len(text.rpartition("\x1b[2K")[2]) > 200)
        screen.press("\x03")
        screen.wait_for("stopped")
        screen.press("/stats\r")
        screen.wait_for("nothing was answered yet")
        screen.press(f"/save {tmp_path / 'talk.json'}\r")
        # Wait until the next line is being read. The terminal may show that together with earlier
        # output.
        screen.wait_for(lambda text: "\x1b[?2004h" in text.partition("2 messages in")[2])
        screen.press("\x04")
        assert screen.process.wait(30) == 0
    saved = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert saved[0] == {"role": "user", "content": "first\nsecond line"}
    assert saved[1]["role"] == "assistant"
    history = (tmp_path / "specoffload" / "chat-history").read_text()
    assert "+first\n+second line" in history


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 80, 200])
def test_no_notice_of_a_chat_is_broken_inside_a_word(
    tiny_dense: Path, tmp_path: Path, columns: int
) -> None:
    system = "Answer in one sentence whose words are long enough to be broken at a narrow margin."
    asked = {
        "/help": "stops an answer",
        f"/system {system}": f"system: {system}",
        "/load nothing.json": "No such file or directory",
        "/image photo.png": "start with --mmproj FILE",
    }
    with terminal(tmp_path, "chat", tiny_dense, "-c", "512", columns=columns) as screen:
        screen.wait_for("/help")
        for order, end in asked.items():
            screen.press(f"{order}\r")
            shown = screen.wait_for(lambda text, end=end: end in " ".join(said(text)))
            # The line editor draws what was typed, and the terminal breaks it.
            lines = [line for line in said(shown.rpartition("\x1b[?2004l")[2]) if line != order]
            assert max(map(len, lines)) <= columns
            assert end in " ".join(lines), "no word of it was broken"


def said(output: str) -> list[str]:
    """The lines of a terminal's output without its control sequences."""
    return [line.strip() for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output).splitlines()]
