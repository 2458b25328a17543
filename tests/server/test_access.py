"""API keys and requests from web pages, over real sockets and as pure decisions."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from running import Running, StartServer, http

from specoffload.errors import UsageError
from specoffload.server.access import AccessRules, held_key, origin_pattern, read_origins, refusal
from specoffload.server.forwarded import Forwarded, read_forwarded

EVIL = "http://evil.example"


def _refusal(
    host: str | None,
    origin: str | None = None,
    *origins: str,
    loopback: bool = True,
    scheme: str = "http",
) -> str | None:
    return refusal(
        [] if host is None else [host],
        [] if origin is None else [origin],
        scheme=scheme,
        on_loopback=loopback,
        origins=read_origins(",".join(origins)),
    )


HERE = [
    "127.0.0.1", "127.0.0.1:8080", "127.9.9.9:1", "127.0.0.1:", "LOCALHOST:80", "localhost.",
    "a.localhost", "a_b.localhost.:9", "[::1]", "[::1]:8080", "[0:0:0:0:0:0:0:1]",
    "[::ffff:127.0.0.1]", "[::FFFF:7f00:1]:8080",
]  # fmt: skip
ELSEWHERE = [
    "evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example",
    "xlocalhost", "10.0.0.1", "[::2]:80", "[::ffff:10.0.0.1]", "[64:ff9b::127.0.0.1]",
]  # fmt: skip
NO_HOST = [
    "", ":80", ".", "[::1", "::1", "[::1]x", "[::1%25lo]", "[::1%lo]", "[127.0.0.1]", "[localhost]",
    "127.0.0.1:80:80", "127.0.0.1:x", "127.0.0.1:-1", "127.0.0.1:65536", "127.0.0.1:\u0661",
    "evil@127.0.0.1", "evil:x@127.0.0.1", "127.0.0.1@evil.example", "127.0.0.1#evil",
    "127.0.0.1/evil", "127.0.0.1?evil", "127.0.0.1\\evil", "127.0.0.1 evil", "127.0.0.1,evil",
    " 127.0.0.1", "127.0.0.1\t", "0x7f.1", "0x7f.0.0.1", "127.1", "2130706433", "127.0.0.01",
    "127.0.0.1.", "local host", "localhost..", ".localhost", "a..localhost", "localh\xf6st",
    "localhost%2eevil.example", "http://127.0.0.1",
]  # fmt: skip


@pytest.mark.parametrize("host", HERE)
def test_names_of_this_machine_are_served(host: str) -> None:
    assert _refusal(host) is None
    assert _refusal(host, f"http://{host}") is None
    assert _refusal(host, f"https://{host}") is not None, "the server is asked over plain HTTP"
    assert _refusal(host, f"https://{host}", scheme="https") is None


@pytest.mark.parametrize("host", ELSEWHERE)
def test_other_names_are_not_served_on_loopback_and_are_elsewhere(host: str) -> None:
    assert "--cors-origins" in (_refusal(host) or "")
    assert _refusal(host, loopback=False) is None
    assert _refusal(host, f"http://{host}", loopback=False) is None


@pytest.mark.parametrize("host", NO_HOST)
def test_what_is_no_host_is_nobodys_name(host: str) -> None:
    assert "--cors-origins" in (_refusal(host) or "")
    for loopback in (True, False):
        assert _refusal(host, f"http://{host}", loopback=loopback) is not None
        assert _refusal("127.0.0.1", f"http://{host}", loopback=loopback) is not None
    if host == host.strip() and "," not in host:  # blanks and commas may separate origins
        with pytest.raises(UsageError, match="looks like"):
            read_origins(f"http://{host}")


@given(st.text(max_size=30) | st.from_regex(r"[0-9a-z.:\[\]@/#_-]{1,30}", fullmatch=True))
def test_whatever_is_served_on_loopback_is_loopback(text: str) -> None:
    """urllib accepts more spellings than we do. Hosts that it reads as another machine are
    refused."""
    if _refusal(text) is not None:
        return
    parts = urlsplit(f"http://{text}/")
    name = (parts.hostname or "").removesuffix(".")
    assert (parts.username, parts.path, parts.query, parts.fragment) == (None, "/", "", "")
    if name != "localhost" and not name.endswith(".localhost"):
        address = ipaddress.ip_address(name)
        assert (getattr(address, "ipv4_mapped", None) or address).is_loopback


def test_the_servers_own_page_and_named_ones_are_served_and_others_not() -> None:
    host = "127.0.0.1:8080"
    assert _refusal(host, "http://127.0.0.1:8080") is None
    assert _refusal("localhost", "http://localhost:80") is None, "the usual port may be left out"
    for foreign in (EVIL, "null", "http://127.0.0.1:3000", "http://127.0.0.1", "file://", "",
                    "http://127.0.0.1:8080/x", "http://x@127.0.0.1:8080", "http:127.0.0.1:8080",
                    "127.0.0.1:8080", "http://127.0.0.1:8080, http://evil.example"):  # fmt: skip
        assert _refusal(host, foreign) is not None
        assert _refusal(host, foreign, loopback=False) is not None
    assert _refusal(host, EVIL, EVIL) is None
    assert _refusal(host, "null", "*") is None


def test_two_hosts_or_origins_are_refused() -> None:
    own = "http://127.0.0.1"
    for hosts, page in ((["127.0.0.1"], [own, own]), (["127.0.0.1"] * 2, []),
                        (["127.0.0.1"], [own, EVIL])):  # fmt: skip
        said = refusal(hosts, page, on_loopback=True, origins=())
        assert said == "a request has one Host header, and one Origin header at most"


def test_a_proxys_public_name_is_served_when_it_is_named() -> None:
    public = "https://chat.example.org"
    assert _refusal("chat.example.org", public, public) is None
    assert _refusal("chat.example.org:443", public, public) is None
    for other in ("other.example.org", "chat.example.org:80", "evil@chat.example.org"):
        assert _refusal(other, public, public) is not None


PROGRAMS = [
    "app://obsidian.md", "chrome-extension://jfgfiigpkhlkbnfnbobbkinehhfdhndo", "tauri://localhost",
    "moz-extension://6f2b1c2e-0000-4000-8000-1234567890ab", "vscode-webview://1a2b", "file://",
    "safari-web-extension://E1F2A3B4-0000-4000-8000-1234567890AB", "capacitor://localhost", "null",
]  # fmt: skip


@pytest.mark.parametrize("origin", PROGRAMS)
def test_pages_of_programs_and_extensions_are_served_once_they_are_named(origin: str) -> None:
    assert _refusal("127.0.0.1", origin) is not None
    assert read_origins(f"{origin}/" if "://" in origin else origin) == (origin,)
    assert _refusal("127.0.0.1", origin, "https://other.example", origin) is None
    assert _refusal("127.0.0.1", origin + "x", origin) is not None
    assert _refusal("127.0.0.1", EVIL, origin) is not None


def test_all_pages_of_a_scheme_are_served_if_it_is_named_with_a_star() -> None:
    named = "moz-extension://*", "app://obsidian.md"
    assert _refusal("127.0.0.1", "moz-extension://6f2b1c2e", *named) is None
    for other in ("moz-extension://", "moz-extension://a/b", "app://other", "null", EVIL):
        assert _refusal("127.0.0.1", other, *named) is not None, other
    pattern = re.compile(origin_pattern(read_origins(",".join(named))) or "")
    assert pattern.fullmatch("moz-extension://6f2b1c2e")
    assert not pattern.fullmatch("app://obsidian.md")
    assert origin_pattern(read_origins("app://obsidian.md")) is None


@pytest.mark.parametrize(
    "wrong", ["http://*", "app://", "app://a/b", "app://a_%", "Null x", "://a"]
)
def test_what_no_page_sends_is_no_origin(wrong: str) -> None:
    with pytest.raises(UsageError, match="looks like"):
        read_origins(wrong)


def test_a_preflight_of_an_extension_is_answered(start_server: StartServer) -> None:
    origins = read_origins("app://obsidian.md,moz-extension://*")
    server = start_server(access=AccessRules(origins=origins))
    wish = {"Access-Control-Request-Method": "POST"}
    for origin, allowed in (
        ("app://obsidian.md", True), ("moz-extension://12-ab", True), ("app://evil", False)
    ):  # fmt: skip
        answer = http.options(server.url + "/v1/models", headers={"Origin": origin, **wish})
        told = answer.headers.get("access-control-allow-origin")
        assert told == (origin if allowed else None)


def test_origins_are_read_as_browsers_write_them() -> None:
    assert read_origins(" https://A.example , http://b:3000/,https://c:443,http://[0::1],*") == (
        "https://a.example", "http://b:3000", "https://c", "http://[::1]", "*"
    )  # fmt: skip
    assert read_origins(None) == ()
    for bad in ("a.example", "ftp://a", "https://a/path", "http://a:x", "https://", "http://a:0"):
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


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "evil@127.0.0.1"])
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
    two = [("Origin", server.url), ("Origin", EVIL)]
    assert http.post(url, json={"prompt": "x"}, headers=two).status_code == 403
    secure = server.url.replace("http:", "https:")
    assert http.post(url, json={"prompt": "x"}, headers={"Origin": secure}).status_code == 403
    proxied = {"Origin": secure, "X-Forwarded-Proto": "https"}
    assert http.post(url, json={"prompt": "x"}, headers=proxied).status_code == 200


def test_a_proxy_says_under_which_host_the_page_was_asked_for(server: Running) -> None:
    page = "https://chat.example:8443"
    told = [
        {"X-Forwarded-Host": "chat.example:8443, inner.example", "X-Forwarded-Proto": "https"},
        {"Forwarded": 'for="[2001:db8::1]";host="chat.example:8443";proto=https'},
        {"Sec-Fetch-Site": "same-origin"},
    ]
    not_told: list[dict[str, str]] = [
        {},
        {"X-Forwarded-Host": "chat.example", "X-Forwarded-Proto": "https"},
        {"X-Forwarded-Host": "chat.example:8443"},
        {"Forwarded": 'host="chat.example:8443;proto=https'},
        {"Forwarded": "host=chat.example:8443;proto=https"},  # a colon is allowed only in quotes
        {"Forwarded": 'host="chat.example:8443";proto=https', "X-Forwarded-For": "10.0.0.1"},
        {"Sec-Fetch-Site": "same-site"},
    ]
    for headers in (*told, *not_told):
        answer = http.post(
            server.url + "/v1/completions",
            json={"prompt": "x"},
            headers={"Origin": page, **headers},
        )
        assert answer.status_code == (200 if headers in told else 403), headers
    assert "X-Forwarded-Host" in answer.json()["error"]["message"]
    assert any(line.startswith("2001:db8::1 POST") for line in server.lines)


def test_a_proxy_is_believed_only_if_it_is_trusted(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "10.0.0.1")
    url = start_server().url + "/v1/completions"
    headers = {"Origin": "http://chat.example", "X-Forwarded-Host": "chat.example"}
    assert http.post(url, json={"prompt": "x"}, headers=headers).status_code == 403


def test_forwarded_vouches_for_no_other_name_of_a_loopback_server(server: Running) -> None:
    """A page whose name was pointed at 127.0.0.1 can send any header to its own origin."""
    headers = {"Host": "evil.example", "X-Forwarded-Host": urlsplit(server.url).netloc}
    for more in ({}, {"Sec-Fetch-Site": "same-origin"}):
        assert http.get(server.url + "/v1/models", headers={**headers, **more}).status_code == 403


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], None),
        (["for=1.2.3.4"], Forwarded(("1.2.3.4",))),
        (['For="[::1]:9"; Proto=HTTPS', "for=_hidden"], Forwarded(("[::1]:9", "_hidden"), "https")),
        ([r'host="a\"b,c;d"'], Forwarded((), "", 'a"b,c;d')),
        (["for=1.2.3.4;;proto"], None),
        (['for="1.2.3.4'], None),
        (["for=a b"], None),
        (['"' + r"\"" * 5000], None),
    ],
)
def test_forwarded_is_read_as_rfc_7239_writes_it(
    values: list[str], expected: Forwarded | None
) -> None:
    assert read_forwarded(values) == expected


def test_any_origin_may_get_the_pages_files_and_nothing_else(server: Running) -> None:
    headers = {"Origin": EVIL, "Host": "evil.example"}
    for path in ("/", "/page/main.js"):
        assert http.get(server.url + path, headers=headers).status_code == 200
        assert http.post(server.url + path, headers=headers).status_code == 403
    for path in ("/props", "/health", "/page", "/pages/main.js"):
        assert http.get(server.url + path, headers=headers).status_code == 403


MEDIA = ["text/plain", "application/x-www-form-urlencoded", ""]


@pytest.mark.parametrize("media", MEDIA)
@pytest.mark.parametrize(
    "of_browser",
    [
        {"Sec-Fetch-Site": "cross-site"}, {"Referer": EVIL}, {"Cookie": "a=b"},
        {"User-Agent": "Mozilla/5.0 (X11; Linux x86_64)"},
    ],
)  # fmt: skip
def test_a_browsers_body_must_be_called_json(
    server: Running, media: str, of_browser: dict[str, str]
) -> None:
    headers = {**of_browser, **({"Content-Type": media} if media else {})}
    url = server.url + "/v1/completions"
    answer = http.post(url, content=b'{"prompt": "x"}', headers=headers)
    assert answer.status_code == 415
    assert "application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize("media", MEDIA)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_programs_body_is_json_whatever_it_is_called(
    server: Running, media: str, path: str
) -> None:
    """curl -d names its body a form."""
    headers = {"Content-Type": media} if media else {}
    asked = b'{"prompt": "x", "content": "x", "messages": [{"role": "user", "content": "x"}]}'
    answer = http.post(server.url + path, content=asked, headers=headers)
    assert answer.status_code == 200, answer.text
    wrong = http.post(server.url + path, content=b"prompt=x", headers=headers)
    assert wrong.status_code == 400, wrong.text


def test_any_spelling_of_json_is_json(server: Running) -> None:
    url = server.url + "/v1/completions"
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert http.post(url, content=b'{"prompt": "x"}', headers=headers).status_code == 200


def test_a_named_origin_gets_the_headers_that_browsers_ask_for(start_server: StartServer) -> None:
    page = "http://page.example:3000"
    server = start_server(access=AccessRules(keys=("k",), origins=(page,)))
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
