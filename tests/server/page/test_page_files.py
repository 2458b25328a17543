"""The server sends the page's files with the right headers, and can be started without the page."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest
from running import Running, StartServer, http

import specoffload.server.page
from specoffload.server.access import AccessRules

STATIC = Path(specoffload.server.page.__file__).parent / "static"
NAMES = sorted(p.relative_to(STATIC).as_posix() for p in STATIC.rglob("*") if p.is_file())


def test_the_page_is_served_without_a_key_and_the_api_is_not(start_server: StartServer) -> None:
    server = start_server(access=AccessRules(keys=("secret",)))
    assert http.get(server.url + "/").status_code == 200
    assert http.get(server.url + "/page/main.js").status_code == 200
    assert http.get(server.url + "/props").status_code == 401


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_served_as_it_is_and_again_only_when_it_has_changed(
    server: Running, name: str
) -> None:
    first = http.get(f"{server.url}/page/{name}")
    assert first.content == (STATIC / name).read_bytes()
    is_packed = name.endswith(".woff2")  # fonts are compressed already
    assert first.headers.get("content-encoding") == (None if is_packed else "gzip")
    plain = http.get(f"{server.url}/page/{name}", headers={"Accept-Encoding": "identity"})
    assert plain.content == first.content
    assert "content-encoding" not in plain.headers
    headers = {"If-None-Match": first.headers["etag"]}
    again = http.get(f"{server.url}/page/{name}", headers=headers)
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers.get("content-length", "0") == "0", "more than follows"
    assert "content-encoding" not in again.headers


def test_the_policy_lets_nothing_in_from_elsewhere(server: Running) -> None:
    answer = http.get(server.url + "/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    for link in re.findall(r'(?:src|href)="([^"]+)"', answer.text):
        assert re.match(r"page/|#", link), link
        if link.startswith("page/"):
            assert link.removeprefix("page/") in NAMES


@pytest.mark.parametrize(
    "path", ["/page/../files.py", "/page/%2e%2e/files.py", "/page//etc/passwd", "/page/none.js"]
)
def test_nothing_but_the_pages_files_is_served(server: Running, path: str) -> None:
    answer = http.get(server.url + path)
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"


def test_every_library_has_its_licence_beside_it() -> None:
    vendor = STATIC / "vendor"
    assert {p.stem for p in vendor.glob("*.js")} == {p.stem for p in vendor.glob("*.LICENSE")}
    assert len(list(vendor.glob("*.js"))) == 4


def test_styles_name_only_fonts_that_are_here_and_no_font_is_useless() -> None:
    style = (STATIC / "vendor" / "katex.css").read_text()
    named = {f"vendor/{url}" for url in re.findall(r"url\(([^)]*)\)", style)}
    assert named == {name for name in NAMES if "/fonts/" in name}
    assert len(named) == 20


def test_the_page_stays_small() -> None:
    """The page is a part of every wheel."""
    sizes_bytes = {name: (STATIC / name).stat().st_size for name in NAMES}
    own = sum(size for name, size in sizes_bytes.items() if not name.startswith("vendor/"))
    assert own < 120_000
    assert sum(sizes_bytes.values()) < 1_000_000
    packed = sum(len(gzip.compress((STATIC / name).read_bytes())) for name in NAMES)
    assert packed < 600_000


def test_without_a_page_there_is_none(start_server: StartServer) -> None:
    server = start_server(has_page=False)
    assert http.get(server.url + "/").status_code == 404
    assert http.get(server.url + "/page/main.js").status_code == 404
    assert http.get(server.url + "/health").status_code == 200
