"""Compressed bodies of requests, over real sockets and as pure decoders."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from running import Running, StartServer, eventually, http

from specoffload.server.api import body as bodies
from specoffload.server.decoding import decoded, decoders_of
from specoffload.server.engine.messages import RequestFailed

BODY = json.dumps({"content": "def f(x):"}).encode()
GIB = 2**30


def _raw(data: bytes) -> bytes:
    return zlib.compress(data, wbits=-15)


ENCODED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("X-GZip", gzip.compress),
    "zlib": ("deflate", zlib.compress),
    "raw deflate": ("deflate", _raw),
    "two": ("deflate, gzip", lambda data: gzip.compress(zlib.compress(data))),
    "none": ("identity", bytes),
    "identity too": ("identity, gzip", gzip.compress),
    "members": ("gzip", lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:])),
}


def _parts(data: bytes) -> Iterator[bytes]:
    for at in range(0, len(data), 7):
        yield data[at : at + 7]


@pytest.mark.parametrize(("name", "encode"), ENCODED.values(), ids=ENCODED)
@pytest.mark.parametrize("is_chunked", [False, True], ids=["whole", "chunked"])
def test_a_compressed_body_is_read_as_if_it_were_not(
    server: Running, name: str, encode: Callable[[bytes], bytes], is_chunked: bool
) -> None:
    data = encode(BODY)
    answer = http.post(
        server.url + "/tokenize",
        content=_parts(data) if is_chunked else data,
        headers={"Content-Encoding": name},
    )
    assert answer.status_code == 200, answer.text
    assert answer.json() == http.post(server.url + "/tokenize", content=BODY).json()


@pytest.mark.parametrize("name", ["br", "zstd", "compress", "gzip, zstd", "gzip, gzip, gzip", "*"])
def test_other_encodings_get_a_415_that_names_those_that_are_read(
    server: Running, name: str
) -> None:
    headers = {"Content-Encoding": name}
    answer = http.post(server.url + "/tokenize", content=b"(\xb5/\xfd", headers=headers)
    assert answer.status_code == 415
    assert answer.headers["accept-encoding"] == "gzip, deflate"
    assert "gzip, deflate" in answer.json()["error"]["message"]
    assert "Content-Encoding" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("gzip", BODY, "not gzip"),
        ("deflate", BODY, "not deflate"),
        ("gzip", gzip.compress(BODY)[:-9], "breaks off"),
        ("gzip", gzip.compress(BODY) + b"more", "not gzip"),
        ("deflate", zlib.compress(BODY) + b"more", "behind its end"),
        ("gzip", gzip.compress(b"no JSON"), "not JSON"),
    ],
    # pytest-xdist wants the same names in each worker, and gzip's bytes hold the time.
    ids=["no gzip", "no deflate", "cut off", "more gzip", "more deflate", "no JSON"],
)
def test_a_damaged_body_gets_a_400_that_says_so(
    server: Running, name: str, data: bytes, words: str
) -> None:
    answer = http.post(server.url + "/tokenize", content=data, headers={"Content-Encoding": name})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def _bomb(n_bytes: int) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    part = b" " * 2**20
    return b"".join(packer.compress(part) for _ in range(n_bytes // len(part))) + packer.flush()


def test_a_bomb_is_decoded_no_further_than_a_body_may_go(server: Running) -> None:
    for name, data in (("gzip", _bomb(GIB)), ("gzip, gzip", gzip.compress(_bomb(GIB)))):
        headers = {"Content-Encoding": name}
        answer = http.post(server.url + "/tokenize", content=data, headers=headers)
        assert answer.status_code == 413, answer.text
    assert http.get(server.url + "/health").status_code == 200


def _decode(names: list[str], data: bytes, part: int = 1000) -> bytes:
    decoders = decoders_of(names)
    found = b"".join(
        out for at in range(0, len(data), part) for out in decoded(decoders, data[at : at + part])
    )
    for decoder in decoders:
        decoder.end()
    return found


@given(st.binary(max_size=5000), st.integers(1, 600))
def test_any_bytes_in_any_parts_are_decoded(data: bytes, part: int) -> None:
    for name, encode in (("gzip", gzip.compress), ("deflate", zlib.compress)):
        assert _decode([name], encode(data), part) == data
    assert _decode(["deflate", "gzip"], gzip.compress(zlib.compress(data)), part) == data


@given(st.binary(max_size=300), st.sampled_from([["gzip"], ["deflate"], ["gzip", "deflate"]]))
def test_noise_is_refused_in_a_sentence_or_decoded(data: bytes, names: list[str]) -> None:
    status = 400
    try:
        _decode(names, data)
    except RequestFailed as e:
        status = e.problem.http_status
    assert status in (400, 413)


def test_bombs_of_empty_members_and_of_inner_bytes_end() -> None:
    with pytest.raises(RequestFailed, match="members"):
        _decode(["gzip"], gzip.compress(b"") * 5000)
    inner = gzip.compress(b"") * 900  # decodes to nothing, again and again
    assert _decode(["gzip", "gzip"], gzip.compress(inner)) == b""
    with pytest.raises(RequestFailed, match="once it is decoded"):
        _decode(["gzip", "gzip"], gzip.compress(_bomb(GIB)), 2**20)


def test_a_body_counts_until_its_request_is_answered(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server()
    kib = 1024
    monkeypatch.setattr(bodies, "MOST_BYTES_AT_ONCE", 600 * kib)
    large = {"prompt": "[forever]", "stream": True, "user": "x" * 400 * kib}
    text = {"content": "x", "user": "x" * 400 * kib}
    with http.stream("POST", server.url + "/v1/completions", json=large) as stream:
        assert stream.status_code == 200
        refused = http.post(server.url + "/tokenize", json=text)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert "not answered yet" in refused.json()["error"]["message"]
        small = http.post(server.url + "/tokenize", json={"content": "x"})
        assert small.status_code == 200, "a small body finds room"
    eventually(lambda: http.post(server.url + "/tokenize", json=text).status_code == 200)
