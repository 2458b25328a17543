"""The proxies that docs/server.md configures, real ones, before a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from proxies import DEFAULT_NGINX, NAME, documented, proxied
from running import Running, eventually, http

pytestmark = pytest.mark.extra

JSON = "application/json"


@pytest.fixture(scope="module", params=["nginx", "caddy"])
def port(
    request: pytest.FixtureRequest, server: Running, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[int]:
    """The port of a proxy with the block of docs/server.md."""
    folder = tmp_path_factory.mktemp("proxy")
    with proxied(request.param, documented(request.param), server.url, folder) as found:
        yield found


@pytest.fixture(scope="module")
def plain_port(server: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of an nginx whose user knew nothing of this server."""
    with proxied("nginx", DEFAULT_NGINX, server.url, tmp_path_factory.mktemp("nginx")) as found:
        yield found


def _headers(port: int, **more: str) -> dict[str, str]:
    """The headers of a page that the proxy serves, as its browser sends them."""
    return {
        "Host": f"{NAME}:{port}",
        "Origin": f"http://{NAME}:{port}",
        "Content-Type": JSON,
        **more,
    }


def _chat(text: str, n_tokens: int = 8, *, stream: bool = False) -> bytes:
    messages = [{"role": "user", "content": text}]
    return json.dumps({"messages": messages, "max_tokens": n_tokens, "stream": stream}).encode()


def test_the_page_its_files_and_its_messages_pass(port: int, server: Running) -> None:
    base = f"http://127.0.0.1:{port}/llm"
    headers = _headers(port)
    moved = http.get(base, headers=headers)
    assert moved.status_code in (301, 302)
    assert moved.headers["location"].endswith("/llm/")
    for path in ("/", "/page/main.js", "/health", "/props"):
        there = http.get(base + path, headers=headers)
        assert there.status_code == 200, (path, there.text)
    assert there.json()["total_slots"] == server.props()["total_slots"]
    answer = http.post(base + "/v1/chat/completions", content=_chat("hello"), headers=headers)
    assert answer.status_code == 200, answer.text
    foreign = {**headers, "Origin": "http://evil.example"}
    refused = http.post(base + "/v1/chat/completions", content=_chat("hello"), headers=foreign)
    assert refused.status_code == 403


def test_tokens_pass_as_they_are_made(port: int) -> None:
    url = f"http://127.0.0.1:{port}/llm/v1/chat/completions"
    content = _chat("[forever] [slow] hi", 400, stream=True)
    with http.stream("POST", url, content=content, headers=_headers(port)) as answer:
        parts = answer.iter_bytes()  # the answer does not end before the client leaves
        seen = b""
        while seen.count(b"data: ") < 5:
            seen += next(parts)
    assert b"[DONE]" not in seen


def test_a_client_cannot_choose_its_own_address(port: int, server: Running) -> None:
    made_up = {"X-Forwarded-For": "10.1.2.3", "Forwarded": "for=10.1.2.4;host=evil.example"}
    n_lines = len(server.lines)
    assert http.get(
        f"http://127.0.0.1:{port}/llm/props", headers=_headers(port, **made_up)
    ).is_success
    eventually(lambda: any("127.0.0.1 GET /props" in line for line in server.lines[n_lines:]))
    assert not any("10.1.2" in line for line in server.lines)


def test_behind_a_default_nginx_the_page_comes_and_its_messages_say_what_is_missing(
    plain_port: int,
) -> None:
    base = f"http://127.0.0.1:{plain_port}/llm"
    headers = _headers(plain_port)
    for path in ("/", "/page/main.js", "/page/vendor/marked.js"):
        assert http.get(base + path, headers=headers).status_code == 200
    url = base + "/v1/chat/completions"
    refused = http.post(url, content=_chat("hello"), headers=headers)
    assert refused.status_code == 403
    assert "X-Forwarded-Host" in refused.json()["error"]["message"]
    secure = {**headers, "Sec-Fetch-Site": "same-origin"}  # over HTTPS, and at localhost
    assert http.post(url, content=_chat("hello"), headers=secure).status_code == 200
