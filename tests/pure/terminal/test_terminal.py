"""A conversation at a terminal without a model: commands, blocks of Markdown, history."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from offload.errors import BadRequest
from specoffload import report
from specoffload.chat.conversation import Content, Conversation, Delta, Reasoning
from specoffload.errors import UsageError
from specoffload.generation.generation import GenerateOptions, TextPiece
from specoffload.generation.statistics import GenerationStats
from specoffload.terminal.chat import ORDERS, Talk, converse, read_order
from specoffload.terminal.screen import show_answer, whole_blocks

STATS = GenerationStats(n_tokens=3, n_prompt_tokens=7, decode_s=0.5)


def saying(*parts: Delta) -> Callable[[Conversation], Iterator[Delta | TextPiece]]:
    def answer(_: Conversation) -> Iterator[Delta | TextPiece]:
        yield from parts
        yield TextPiece("", (), "stop", STATS)

    return answer


# -- orders


@pytest.mark.parametrize(
    ("text", "order"),
    [
        ("hello", None),
        ("//etc is a folder", None),
        ("/help", ("help", "")),
        ("/system be brief ", ("system", "be brief")),
        ("/save a b.json", ("save", "a b.json")),
        ("/quit", ("exit", "")),
    ],
)
def test_a_line_is_an_order_or_a_message(text: str, order: tuple[str, str] | None) -> None:
    assert read_order(text) == order


def test_what_is_no_order_is_said_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="there is no /staats; did you mean /stats?"):
        read_order("/staats")
    with pytest.raises(UsageError, match="there is no /;"):
        read_order("/")
    with pytest.raises(UsageError, match="/load needs a file"):
        read_order("/load ")


# -- blocks


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("one\ntwo", ""),
        ("one\n\n", ""),
        ("one\n\ntwo", ""),  # may still become a list
        ("one\n\ntwo\n", "one\n\n"),
        ("- one\n\n- two\n", ""),
        ("1. one\n\n   more\n\nend\n", "1. one\n\n   more\n\n"),
        ("```\na\n\nb\n", ""),
        ("```\na\n\nb\n```\n\nend\n", "```\na\n\nb\n```\n\n"),
        ("~~~~\n```\n\nx\n", ""),
        ("text\n\n```py\nx\n", "text\n\n"),
    ],
)
def test_a_block_is_whole_when_nothing_can_be_added_to_it(text: str, whole: str) -> None:
    assert whole_blocks(text) == (whole, text[len(whole) :])


@given(st.text(alphabet="a-`~1.# \n", max_size=60), st.data())
def test_blocks_cut_while_they_come_lose_nothing_and_are_the_same(
    text: str, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(text)))
    early, rest = whole_blocks(text[:cut])
    later, rest = whole_blocks(rest + text[cut:])
    assert early + later + rest == text
    assert whole_blocks(text)[0] == early + later


# -- history


def test_a_talk_remembers_what_was_said() -> None:
    seen: list[tuple[str, ...]] = []

    def answer(conversation: Conversation) -> Iterator[Delta | TextPiece]:
        seen.append(tuple(str(m["content"]) for m in conversation.messages))
        yield from saying(Reasoning("hm"), Content("yes"))(conversation)

    talk = Talk(answer, "be brief")
    list(talk.ask("is it?"))
    assert talk.stats == STATS
    assert talk.messages[-1] == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    list(talk.ask("really?"))
    list(talk.retry())
    assert seen == [
        ("be brief", "is it?"),
        ("be brief", "is it?", "yes", "really?"),
        ("be brief", "is it?", "yes", "really?"),
    ]
    talk.set_system("")
    assert talk.messages[0]["role"] == "user"
    talk.set_system("again")
    talk.clear()
    assert talk.messages == [{"role": "system", "content": "again"}]


def test_an_answer_that_is_stopped_stays_as_far_as_it_came() -> None:
    talk = Talk(saying(Content("a"), Content("b"), Content("c")))
    answer = talk.ask("?")
    next(answer)
    answer.close()  # type: ignore[attr-defined]
    assert [m["content"] for m in talk.messages] == ["?", "a"]


def test_a_question_that_fails_is_not_remembered() -> None:
    def fail(_: Conversation) -> Iterator[Delta | TextPiece]:
        raise BadRequest("too long")
        yield

    talk = Talk(fail)
    with pytest.raises(BadRequest):
        list(talk.ask("?"))
    assert talk.messages == []
    with pytest.raises(UsageError, match="nothing was asked"):
        talk.retry()


def test_images_go_with_the_next_question_and_are_saved(tmp_path: Path) -> None:
    seen: list[Conversation] = []

    def answer(conversation: Conversation) -> Iterator[Delta | TextPiece]:
        seen.append(conversation)
        yield from saying(Content("a cat"))(conversation)

    (tmp_path / "cat.png").write_bytes(b"png")
    talk = Talk(answer, reads_images=True)
    assert [talk.attach(tmp_path / "cat.png") for _ in range(2)] == [1, 2]
    list(talk.ask("what is it?"))
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,cG5n"}}
    wanted = [part, part, {"type": "text", "text": "what is it?"}]
    assert seen[-1].messages[-1]["content"] == wanted
    list(talk.retry())
    assert seen[-1].messages[-1]["content"] == wanted
    list(talk.ask("sure?"))
    assert seen[-1].messages[-1]["content"] == "sure?"
    file = tmp_path / "talk.json"
    talk.save(file)
    other = Talk(answer, reads_images=True)
    other.load(file)
    assert other.messages == talk.messages
    bad_parts: tuple[object, ...] = (
        [], [1], [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}],
        [{"type": "text"}], [{"type": "audio"}],
    )  # fmt: skip
    for bad in bad_parts:
        file.write_text(json.dumps([{"role": "user", "content": bad}]))
        with pytest.raises(UsageError, match="is no conversation"):
            other.load(file)
    with pytest.raises(UsageError, match="cannot be read"):
        talk.attach(tmp_path / "missing.png")
    with pytest.raises(UsageError, match="reads no images: start with --mmproj"):
        Talk(answer).attach(tmp_path / "cat.png")


def test_a_talk_is_saved_and_loaded(tmp_path: Path) -> None:
    talk = Talk(saying(Content("äö")))
    list(talk.ask("ü?"))
    file = tmp_path / "talk.json"
    talk.save(file)
    other = Talk(saying(Content("more")))
    other.load(file)
    assert other.messages == talk.messages
    file.write_text(json.dumps(talk.messages))
    other.load(file)
    assert other.messages == talk.messages
    for bad in ("", "{}", '[{"role": "tool", "content": ""}]', '[{"role": "user", "content": 1}]'):
        file.write_text(bad)
        with pytest.raises(UsageError, match=r"talk\.json: "):
            other.load(file)
    assert other.messages == talk.messages
    with pytest.raises(UsageError, match="cannot be read"):
        other.load(tmp_path / "missing")
    with pytest.raises(UsageError, match="cannot be written"):
        other.save(tmp_path / "missing" / "talk.json")


# -- the loop


def conversed(talk: Talk, *lines: str | type[BaseException], terminal: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=80, color_system=None)
    converse(talk, Mock(side_effect=[*lines, EOFError]), console)
    return out.getvalue()


def test_ctrl_c_ends_an_answer_and_not_the_conversation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(_: Conversation) -> Iterator[Delta | TextPiece]:
        yield Content("half")
        raise KeyboardInterrupt

    talk = Talk(interrupted)
    shown = conversed(talk, KeyboardInterrupt, "one", "two", "/exit", "never")
    assert shown == "halfhalf"
    assert [m["content"] for m in talk.messages] == ["one", "half", "two", "half"]
    assert "stopped" in capsys.readouterr().err


def test_every_order_is_obeyed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talk = Talk(saying(Content("yes")))
    file = tmp_path / "talk.json"
    shown = conversed(
        talk, "/stats", "/help", "/system be brief", "ask", "/retry", "/stats", f"/save {file}",
        "/clear", f"/load {file}", "", "/nonsense", "//x",
    )  # fmt: skip
    assert shown.count("yes") == 3
    assert [m["content"] for m in talk.messages] == ["be brief", "ask", "yes", "/x", "yes"]
    out, err = capsys.readouterr()
    assert all(f"/{name}" in out for name in ORDERS)
    assert "6.0 tokens/s" in out
    assert "there is no /nonsense" in err


# -- the screen


def test_a_terminal_shows_markdown_and_a_pipe_the_text() -> None:
    parts: list[Delta | TextPiece] = [
        Reasoning("think "), Reasoning("hard"), Content("# Title\n\nsome **bo"),
        Content("ld** text\n\n```py\nx = 1\n```\n"), TextPiece("", (), "stop", STATS),
    ]  # fmt: skip
    out = io.StringIO()
    show_answer(parts, Console(file=out, width=80, force_terminal=False))
    assert out.getvalue() == "# Title\n\nsome **bold** text\n\n```py\nx = 1\n```\n\n"
    out = io.StringIO()
    console = Console(file=out, width=80, height=24, force_terminal=True, color_system=None)
    show_answer(parts, console)
    assert "think hard" in out.getvalue()
    assert "some bold text" in out.getvalue()
    assert "x = 1" in out.getvalue()


@pytest.mark.parametrize(
    ("n_predict", "words"),
    [
        (3, "stopped after 3 tokens; -n N writes N, -n -1 to the end"),
        (None, "stopped after 3 tokens: the context is full (--ctx-size)"),
    ],
)
def test_an_answer_that_a_limit_stops_says_so_each_time(
    n_predict: int | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = iter(["length", "stop", "length"])

    def answer(_: Conversation) -> Iterator[Delta | TextPiece]:
        yield Content("yes")
        yield TextPiece("", (), next(ends), STATS)

    talk = Talk(answer, options=GenerateOptions(n_predict=n_predict))
    said = []
    for question in ("one", "two", "three"):
        conversed(talk, question)
        said.append(" ".join(capsys.readouterr().err.split()))
    assert said == [words, "", words]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_log_line_stands_after_the_answer_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=is_terminal, width=60)
    monkeypatch.setattr(report, "_out", console)
    root, handler = logging.getLogger(), logging.StreamHandler(screen)
    monkeypatch.setattr(root, "handlers", [handler])

    def parts() -> Iterator[Delta | TextPiece]:
        yield Content("first words, ")
        logging.getLogger("offload.threads").warning("other programs use the processors")
        yield Content("last words")

    show_answer(parts(), console, as_markdown=False)
    ends = screen.getvalue().splitlines()
    if is_terminal:
        assert ends == ["first words, last words", "other programs use the processors"]
    else:
        assert ends[0] == "first words, other programs use the processors"
    assert root.handlers == [handler]


# -- lines of the program


@given(st.text("ab -/\n", max_size=80), st.integers(1, 30))
def test_lines_end_between_words(words: str, width: int) -> None:
    lines = report.broken(words, width).split("\n")
    assert all(len(line) <= width or len(line.split()) == 1 for line in lines)
    assert " ".join(lines).split() == words.split(), "no word is lost or broken"


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_terminal_gets_every_kind_of_line_broken_between_words(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = "this sentence has words that a narrow terminal would break " * 4 + "at its end"
    screen = io.StringIO()
    for name in ("_out", "_err"):
        monkeypatch.setattr(
            report, name, Console(file=screen, width=width, force_terminal=True, no_color=True)
        )
    monkeypatch.setattr(logging, "lastResort", None)
    report.wrap_warnings()
    assert logging.lastResort is not None
    for say in (report.line, report.paragraph, report.note, report.error):
        say(sentence)
    report.table(sentence, ("",), ())
    logging.lastResort.handle(logging.LogRecord("offload", 30, "", 0, sentence, (), None))
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    report.WordsHandler(terminal).handle(
        logging.LogRecord("offload", 30, "", 0, sentence, (), None)
    )
    said = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue() + terminal.getvalue())
    lines = [line for line in said.splitlines() if line and line[0] not in "┏┃┡└"]
    assert max(map(len, lines)) <= width
    assert " ".join(lines).split().count("terminal") == 4 * 7, "each sentence is whole"
    assert {*" ".join(lines).split()} <= {*sentence.split(), "specoffload:"}


def test_sentences_in_a_table_begin_at_their_left_edge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(report, "_out", Console(file=screen, width=50, no_color=True))
    why = "not searched, because the CPU computes this model alone"
    report.table("found", ("", "n", "why"), [("threads", "2", why), ("ubatch", "512", "measured")])
    cells = [line.split("│")[1:-1] for line in screen.getvalue().splitlines() if "│" in line]
    assert [cell[1] for cell in cells if cell[1].strip()] == ["   2 ", " 512 "], "numbers end there"
    assert all(cell[2].startswith(" ") and cell[2][1] != " " for cell in cells)
    assert " ".join(" ".join(cell[2] for cell in cells[:-1]).split()) == why
