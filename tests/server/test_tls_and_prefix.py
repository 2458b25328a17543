"""`serve` with HTTPS of its own, and below a path."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from running import Running, StartServer, eventually, http

from specoffload.config.options import ServeOptions
from specoffload.errors import UsageError
from specoffload.server.access import AccessRules
from specoffload.server.prefix import read_prefix
from specoffload.server.run import TlsFiles, read_tls

FILES = Path(__file__).parents[1] / "fixtures" / "tls"
KEY, CERTIFICATE = FILES / "key.pem", FILES / "cert.pem"


@pytest.fixture(scope="module")
def secure() -> Iterator[Running]:
    running = Running(tls=TlsFiles(KEY, CERTIFICATE), prefix="/llm")
    running.wait_until_healthy()
    yield running
    running.stop()


def test_answers_and_streams_come_over_https_below_the_prefix(secure: Running) -> None:
    assert secure.url.startswith("https://")
    assert secure.lines[0] == f"listening on {secure.url}"
    assert secure.url.endswith("/llm")
    with secure.client(http_client=httpx.Client(verify=False)) as client:
        answer = client.completions.create(model="fake", prompt="over TLS", max_tokens=8)
        assert answer.choices[0].text == "over TLS"
        parts = client.completions.create(model="fake", prompt="ab", max_tokens=2, stream=True)
        assert "".join(part.choices[0].text for part in parts if part.choices) == "ab"
    for path in ("/", "/page/main.js", "/v1/models", "/health"):
        assert http.get(secure.url + path).status_code == 200, path
    eventually(lambda: any(" POST /llm/v1/completions 200 " in line for line in secure.lines))
    assert not any("/health" in line for line in secure.lines)


@pytest.mark.parametrize("path", ["//v1/models", "/v1//models", "//v1///models", "//health"])
def test_several_slashes_are_read_as_one(secure: Running, path: str) -> None:
    """open-webui #12117: a base address that ends with a slash."""
    answer = http.get(secure.url + path)
    assert answer.status_code == 200
    assert answer.json() == http.get(secure.url + path.replace("//", "/").replace("//", "/")).json()


@pytest.mark.parametrize("path", ["//props", "/v1//chat/completions", "//slots"])
def test_several_slashes_lead_round_no_key(start_server: StartServer, path: str) -> None:
    server = start_server(access=AccessRules(keys=("secret",)))
    assert http.get(server.url + path).status_code == 401


def test_paths_without_the_prefix_are_404_with_a_sentence(secure: Running) -> None:
    root = secure.url.removesuffix("/llm")
    for path in ("/health", "/llm", "/llmx/health", "/"):
        answer = http.get(root + path)
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == (
            "paths of this server begin with /llm/ (--api-prefix)"
        )


def test_a_body_that_is_too_long_gets_its_answer_over_https(start_server: StartServer) -> None:
    server = start_server(tls=TlsFiles(KEY, CERTIFICATE))
    answer = http.post(server.url + "/v1/completions", json={"prompt": "x" * 3_000_000})
    assert answer.status_code == 413


def test_a_client_that_leaves_over_https_frees_its_place(start_server: StartServer) -> None:
    server = start_server(tls=TlsFiles(KEY, CERTIFICATE))
    body = {"prompt": "[forever]", "stream": True}
    with http.stream("POST", server.url + "/v1/completions", json=body) as response:
        next(response.iter_lines())
    eventually(lambda: server.props()["requests_processing"] == 0)


def test_plain_http_to_an_https_port_ends_the_connection(secure: Running) -> None:
    port = int(secure.url.removesuffix("/llm").rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"HTTP/1.1 200" not in connection.recv(4096)
    assert http.get(secure.url + "/health").status_code == 200


@pytest.mark.parametrize(
    ("key", "certificate", "message"),
    [
        (KEY, None, "--ssl-key-file needs --ssl-cert-file: HTTPS takes both"),
        (None, CERTIFICATE, "--ssl-cert-file needs --ssl-key-file: HTTPS takes both"),
        (FILES / "none.pem", CERTIFICATE, "--ssl-key-file .*none.pem: no such file"),
        (CERTIFICATE, CERTIFICATE, "not an unencrypted key in PEM and its certificate"),
        (FILES / "encrypted.pem", CERTIFICATE, "not an unencrypted key in PEM"),
    ],
)
def test_files_that_make_no_https_are_one_sentence(
    key: Path | None, certificate: Path | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        read_tls(ServeOptions(ssl_key_file=key, ssl_cert_file=certificate))


@pytest.mark.parametrize(
    ("text", "prefix"), [("", ""), ("/", ""), ("/llm", "/llm"), ("a/b-1/", "/a/b-1")]
)
def test_a_prefix_is_a_path_without_a_slash_at_its_end(text: str, prefix: str) -> None:
    assert read_prefix(text) == prefix


@pytest.mark.parametrize("text", ["/a b", "/a?b", "//", "/ä", "/a//b", "/%41"])
def test_a_prefix_that_is_no_path_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--api-prefix .*: a path looks like /llm"):
        read_prefix(text)
