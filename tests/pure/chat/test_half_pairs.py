"""Halves of surrogate pairs in the JSON of a request."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specoffload.server.api.body import read_json
from specoffload.server.api.half_pairs import without_half_pairs
from specoffload.server.engine.messages import RequestFailed

_UNITS = st.sampled_from(["\ud83d", "\ude00", "\\", "u", "d800", '"', "a", "ä", "\U0001f600", "\n"])


@given(st.lists(_UNITS).map("".join))
def test_a_body_is_read_with_a_sign_in_place_of_each_half(text: str) -> None:
    pairs = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    found = read_json(bytearray(json.dumps({"x": text}).encode()))
    wanted = json.dumps({"x": text}).encode()
    assert json.loads(without_half_pairs(wanted) or wanted)["x"] == found["x"]
    assert found["x"].count("\U0001f600") >= text.count("\U0001f600")
    assert len(found["x"]) == len(pairs)
    found["x"].encode()


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (rb"\ud83d", "\ufffd"),
        (rb"\ude00x", "\ufffdx"),
        (rb"\ud83d\ude00", "\U0001f600"),
        (rb"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (rb"\\ud83d", "\\ud83d"),
        (rb"\\\ud83d", "\\\ufffd"),
    ],
)
def test_each_half_becomes_a_sign(sent: bytes, read: str) -> None:
    for end in (b"", rb" \uDFFF"):
        body = bytearray(b'{"x": "' + sent + end + b'"}')
        assert read_json(body)["x"] == read + (" \ufffd" if end else "")


def test_other_faults_stay_faults() -> None:
    for body in (b'{"x": "\\u12"}', b'{"x": "\\ud8', b'{"x": "\\ud83d"', b"", b"\\"):
        with pytest.raises(RequestFailed, match="not JSON"):
            read_json(bytearray(body))
    assert without_half_pairs(b"\\ud83d" * 10_001) is None
    assert without_half_pairs(b'{"x": "a"}') is None


def test_a_byte_order_mark_is_skipped() -> None:
    assert read_json(bytearray(b'\xef\xbb\xbf{"x": 1}')) == {"x": 1}


@pytest.mark.parametrize("unit", [rb"\n", b"a", rb"\ud83d", rb"\ud83d\ude00", rb"\\", rb"\u12"])
def test_a_body_of_twice_the_size_takes_about_twice_the_time(unit: bytes) -> None:
    times_s = []
    for n in (2**15, 2**16):
        best_s = 1e9
        for _ in range(3):
            start = time.thread_time()
            without_half_pairs(b'{"x": "' + unit * n + b"\\ud8")
            best_s = min(best_s, time.thread_time() - start)
        times_s.append(best_s)
    assert times_s[1] < 3 * times_s[0] + 0.005
