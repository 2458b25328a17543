"""Streamed text has only whole characters and never a part of a stop sequence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.sampling.answer_start import AnswerStart, CallSpan, ReasoningSpan
from offload.sequences.text import TextStream
from specoffload.slots.stopping import LineLimits, StopScanner


@given(st.text(), st.lists(st.integers(1, 4), min_size=1))
def test_any_text_survives_being_cut_into_any_bytes(text: str, sizes: list[int]) -> None:
    raw = text.encode("utf-8", "surrogatepass")
    if raw.decode("utf-8", "replace") != text:
        return  # lone surrogates are not text
    pieces, at = [], 0
    while at < len(raw):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(raw[at : at + size])
        at += size
    stream = TextStream(lambda token: pieces[token])
    shown = [stream.feed(i) for i in range(len(pieces))]
    assert "".join(shown) + stream.finish() == text


def test_a_truncated_character_becomes_the_replacement_character() -> None:
    stream = TextStream(lambda _: "é".encode()[:1])
    assert stream.feed(0) == ""
    assert stream.finish() == "\ufffd"


@given(
    st.text(alphabet="abc", max_size=40),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
    st.integers(1, 5),
)
def test_what_is_shown_ends_before_the_first_stop_however_the_text_is_cut(
    text: str, stops: list[str], size: int
) -> None:
    scanner = StopScanner(stops)
    shown = "".join(scanner.feed(text[i : i + size]) for i in range(0, len(text), size))
    shown += scanner.finish()
    found = [text.find(stop) for stop in stops if stop in text]
    if not found:
        assert shown == text
        assert not scanner.stopped
        return
    assert scanner.stopped
    # Whole chunks are scanned at once, so of several stops the one met in the earliest chunk wins.
    assert shown in {text[: text.find(stop)] for stop in stops if stop in text}
    assert all(stop not in shown for stop in stops)


def test_nothing_is_held_back_that_cannot_become_a_stop() -> None:
    scanner = StopScanner(("\n\n",))
    assert scanner.feed("a\n") == "a"
    assert scanner.feed("b") == "\nb"
    assert scanner.feed("\n\nc") == ""
    assert scanner.stopped


@pytest.mark.parametrize("stops", [(), ("",)])
def test_without_stops_everything_is_shown_at_once(stops: tuple[str, ...]) -> None:
    scanner = StopScanner(stops)
    assert scanner.feed("abc") == "abc"
    assert scanner.finish() == ""


@given(
    st.text(alphabet="<t>/ab ", max_size=30),
    st.lists(st.sampled_from(["a", "ab", "<t>", "</t>", "b "]), max_size=3),
    st.sampled_from(["open", "may open", "none"]),
    st.integers(1, 5),
)
def test_stops_count_in_the_answer_alone(text: str, stops: list[str], form: str, size: int) -> None:
    span = None if form == "none" else ReasoningSpan("<t>", ("</t>",), form == "open")
    n_reasoning = 0
    if span is not None and (span.is_open or text.lstrip().startswith("<t>")):
        opened = 0 if span.is_open else text.find("<t>") + len("<t>")
        end = text.find("</t>", opened)
        n_reasoning = len(text) if end < 0 else end + len("</t>")
    places = [at for stop in stops if (at := text.find(stop, n_reasoning)) >= 0]
    scanner = StopScanner(stops, span)
    shown = "".join(scanner.feed(text[i : i + size]) for i in range(0, len(text), size))
    shown += "" if scanner.stopped else scanner.finish()
    if not places:
        assert (shown, scanner.word) == (text, None)
    else:
        assert scanner.word in stops
        assert shown in {text[:at] for at in places}
    start = AnswerStart(span)
    for i in range(0, len(text), size):
        start.feed(text[i : i + size])
    start.finish()
    is_cut = n_reasoning == len(text) and not text.endswith("</t>") and n_reasoning > 0
    if not is_cut:
        assert start.at == n_reasoning or start.is_reasoning


def test_texts_of_the_chat_format_end_an_answer_anywhere() -> None:
    span = ReasoningSpan("<think>", ("</think>",), is_open=True)
    scanner = StopScanner(("x",), span, ("<|im_end|>",))
    assert scanner.feed("Take x. <|im_e") == "Take x. "
    assert scanner.feed("nd|> more") == ""
    assert scanner.word == "<|im_end|>"
    scanner = StopScanner(("x",), span, ("<|im_end|>",))
    assert scanner.feed("Take x.</think>It is x") == "Take x.</think>It is "
    assert scanner.word == "x"


CALLS = CallSpan(("<call>", "<f>"), "</call>")


@pytest.mark.parametrize("size", [1, 2, 3, 50])
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a <call>x</call> b\nc", "a <call>x</call> b"),
        ("a <call>\nx\n</call>\nc", "a <call>\nx\n</call>"),
        ("a <f>\nx", "a <f>\nx"),  # the call has no end
        ("a <ca\nb", "a <ca"),
        ("a <c", "a "),  # "<c" is a stop sequence, and no call follows
        ("a < b <call>x", "a < b <call>x"),
    ],
)
def test_stops_do_not_count_within_calls(text: str, shown: str, size: int) -> None:
    stops = ("\n",) if "<ca" in text or "<f" in text else ("<c",)
    scanner = StopScanner(stops, calls=CALLS)
    found = "".join(scanner.feed(text[i : i + size]) for i in range(0, len(text), size))
    assert found + scanner.finish() == shown
    assert scanner.stopped == (shown != text)


def test_an_answer_of_calls_alone_has_no_stops() -> None:
    scanner = StopScanner(("{",), calls=CallSpan((), is_open=True))
    assert scanner.feed('{"name": {') == '{"name": {'
    behind = StopScanner(("{",), ReasoningSpan("<t>", ("</t>",)), calls=CallSpan((), is_open=True))
    assert behind.feed("<t>{</t>{{") + behind.finish() == "<t>{</t>{{"


@pytest.mark.parametrize("size", [1, 2, 3, 50])
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("x = 1\n    y\n  z\n", "x = 1\n    y\n  "),
        ("    a\n\tb", "    a\n\t"),
        ("a\n\n    b", "a\n"),  # llama-server ends at an empty line, too
        ("a\n     b\n \t \tc\n", "a\n     b\n \t \tc\n"),
        ("a\n  ", "a\n  "),  # the line may go on
        ("a", "a"),
    ],
)
def test_a_line_with_too_little_indentation_ends_the_answer(
    text: str, shown: str, size: int
) -> None:
    limits = LineLimits(4, -1)
    assert "".join(limits.feed(text[i : i + size]) for i in range(0, len(text), size)) == shown
    assert limits.stopped == (shown != text)
    unlimited = LineLimits(0, -1)
    assert unlimited.feed(text) == text
    assert not unlimited.stopped


def test_after_a_time_the_answer_ends_with_its_line() -> None:
    now_s = 5.0
    limits = LineLimits(0, 250, lambda: now_s)
    assert limits.feed("a\n") == "a\n"
    now_s = 9.0
    limits.begin()  # the prompt's time does not count
    now_s = 9.25
    limits.feed("b\n")
    assert not limits.stopped
    now_s = 9.26
    limits.begin()
    assert limits.feed("c") == "c"
    assert not limits.stopped, "the line is not over"
    assert limits.feed("d\ne") == "d\ne"
    assert limits.stopped
    assert limits.feed("f") == ""
