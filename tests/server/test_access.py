"""Keys, and pages in browsers: over real sockets, and the decision alone."""

from __future__ import annotations

import pytest
from running import Running, StartServer, http

from specoffload.errors import UsageError
from specoffload.server.access.browsers import read_origins, refusal
from specoffload.server.access.gate import Access
from specoffload.server.access.keys import held_key

EVIL = "http://evil.example"


def _refusal(
    host: str | None, origin: str | None = None, *origins: str, loopback: bool = True
) -> str | None:
    return refusal(host, origin, on_loopback=loopback, origins=origins)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:8080", "127.9.9.9:1", "LOCALHOST:80", "[::1]:8080", "a.localhost"],
)
def test_names_of_this_machine_are_served(host: str) -> None:
    assert _refusal(host) is None


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example", "",
     "10.0.0.1", "[::2]:80", "[::1", "127.0.0.1@evil.example", "0x7f.1"],
)  # fmt: skip
def test_other_names_are_not_served_on_loopback_and_are_elsewhere(host: str) -> None:
    assert "--cors-origins" in (_refusal(host) or "")
    assert _refusal(host, loopback=False) is None


def test_the_servers_own_page_and_named_ones_are_served_and_others_not() -> None:
    host = "127.0.0.1:8080"
    assert _refusal(host, "http://127.0.0.1:8080") is None
    for foreign in (EVIL, "null", "http://127.0.0.1:3000", "file://", ""):
        assert _refusal(host, foreign) is not None
        assert _refusal(host, foreign, loopback=False) is not None
    assert _refusal(host, EVIL, EVIL) is None
    assert _refusal(host, "null", "*") is None


def test_a_proxys_public_name_is_served_when_it_is_named() -> None:
    public = "https://chat.example.org"
    assert _refusal("chat.example.org", public, public) is None
    assert _refusal("other.example.org", public, public) is not None


def test_origins_are_read_as_browsers_write_them() -> None:
    assert read_origins(" https://A.example , http://b:3000/,*") == (
        "https://a.example", "http://b:3000", "*"
    )  # fmt: skip
    assert read_origins(None) == ()
    for bad in ("a.example", "ftp://a", "https://a/path", "http://a:x", "https://"):
        with pytest.raises(UsageError, match="looks like"):
            read_origins(bad)


def test_a_key_is_taken_from_either_header() -> None:
    keys = ("sesame", "schlüssel")
    assert held_key((), "Bearer sesame", None) is None
    assert held_key(keys, "Bearer sesame", None) == 0
    assert held_key(keys, "bearer  schlüssel ", None) == 1
    assert held_key(keys, None, "sesame") == 0
    for wrong in ("Bearer", "Bearer ", "sesame", "Basic sesame", "Bearer ſesame"[:7], "", None):
        assert held_key(keys, wrong, None) is None
        assert held_key(keys, wrong, "") is None


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80"])
def test_dns_rebinding_meets_a_403(server: Running, host: str) -> None:
    for path in ("/health", "/v1/models", "/props"):
        answer = http.get(server.url + path, headers={"Host": host})
        assert answer.status_code == 403
        assert answer.json()["error"]["type"] == "permission_error"


def test_a_page_of_another_origin_meets_a_403(server: Running) -> None:
    headers = {"Origin": EVIL, "Content-Type": "application/json"}
    url = server.url + "/v1/completions"
    answer = http.post(url, content=b'{"prompt": "x"}', headers=headers)
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers
    assert http.post(url, json={"prompt": "x"}, headers={"Origin": server.url}).status_code == 200


@pytest.mark.parametrize("media", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_body_must_be_called_json(server: Running, media: str) -> None:
    headers = {"Content-Type": media} if media else {}
    url = server.url + "/v1/completions"
    answer = http.post(url, content=b'{"prompt": "x"}', headers=headers)
    assert answer.status_code == 415
    assert "application/json" in answer.json()["error"]["message"]
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert http.post(url, content=b'{"prompt": "x"}', headers=headers).status_code == 200


def test_a_named_origin_gets_the_headers_that_browsers_ask_for(start_server: StartServer) -> None:
    page = "http://page.example:3000"
    server = start_server(access=Access(keys=("k",), origins=(page,)))
    url = server.url + "/v1/completions"
    ask = {
        "Origin": page,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    asked = http.options(url, headers=ask)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == page
    for key, status in (("k", 200), ("x", 401)):
        headers = {"Origin": page, "Authorization": f"Bearer {key}"}
        answer = http.post(url, json={"prompt": "x"}, headers=headers)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == page
    asked = http.options(url, headers={**ask, "Origin": EVIL})
    assert asked.headers.get("access-control-allow-origin") != EVIL
    assert http.get(server.url + "/v1/models", headers={"Origin": EVIL}).status_code == 403


def test_no_answer_is_a_redirect(server: Running) -> None:
    for path in ("/health/", "/v1/models/", "//evil.example/health", "/v1/completions/"):
        answer = http.get(server.url + path)
        assert answer.status_code in (404, 405), path
        assert "location" not in answer.headers


def test_head_of_health_has_no_body(server: Running) -> None:
    for path in ("/health", "/v1/health"):
        answer = http.head(server.url + path)
        assert (answer.status_code, answer.content) == (200, b"")
