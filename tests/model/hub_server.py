"""A small server that speaks the Hugging Face hub's API, as far as fetching models needs it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(frozen=True)
class Refusal:
    """An answer to every request. `only_files`: to requests for files, not for lists of them."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    only_with_token: bool = False
    only_files: bool = False
    stalls: bool = False  # no answer at all


@dataclass
class Hub:
    """`repos`: repository -> file name -> bytes. `claimed`: false sizes that the listing states."""

    repos: dict[str, dict[str, bytes]]
    gated: set[str] = field(default_factory=set)
    breaks: int = 0  # number of downloads that will still break off
    stalls_after: int | None = None  # bytes after which a download stalls
    claimed: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)  # whole sizes of files stored in part
    refused_ranges: int = 0  # number of requests with a Range header that still get a 503
    ranges: list[str] = field(default_factory=list)  # Range headers of requests
    n_downloads: int = 0
    revisions: list[str] = field(default_factory=list)  # of the listings that were asked for
    commit: str = COMMIT
    down: bool = False  # every request gets a 503
    refusals: dict[str, Refusal] = field(default_factory=dict)
    refusal: Refusal | None = None  # one of `refusals`, which GET /set/NAME chooses
    is_stalled: threading.Event = field(default_factory=threading.Event)
    goes_on: threading.Event = field(default_factory=threading.Event)
    url: str = ""


def _listed(file: tuple[str, bytes], hub: Hub) -> dict[str, Any]:
    """A row of a repository's listing."""
    name, content = file
    size = hub.claimed.get(name, len(content))
    lfs = {"sha256": hashlib.sha256(content).hexdigest(), "size": size, "pointerSize": 130}
    return {"rfilename": name, "size": size, "lfs": lfs}


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            parts = path.strip("/").split("/")
            if parts[0] == "set":
                hub.refusal = hub.refusals[parts[1]] if len(parts) > 1 else None
                self._json({})
            elif hub.refusal is not None and self._is_refused(hub.refusal, parts):
                self._answer(hub.refusal)
            elif hub.down:
                self._refuse(503, "")
            elif parts[:2] == ["api", "models"] and len(parts) == 2:
                wanted = query.partition("search=")[2].partition("&")[0].lower()
                self._json([{"id": repo} for repo in hub.repos if wanted in repo.lower()])
            elif parts[:2] == ["api", "models"]:
                hub.revisions.append("/".join(parts[5:]) if parts[4:5] == ["revision"] else "")
                self._repo("/".join(parts[2:4]))
            elif len(parts) >= 5 and parts[2] == "resolve":
                self._file("/".join(parts[:2]), "/".join(parts[4:]))
            else:
                self._refuse(404, "EntryNotFound")

        def _is_refused(self, refusal: Refusal, parts: list[str]) -> bool:
            has_token = bool(self.headers.get("Authorization"))
            is_file = "resolve" in parts
            return (has_token or not refusal.only_with_token) and (
                is_file or not refusal.only_files
            )

        def _answer(self, refusal: Refusal) -> None:
            if refusal.stalls:
                hub.goes_on.wait(60)
                self.close_connection = True
                return
            self.send_response(refusal.status)
            for name, value in refusal.headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(refusal.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(refusal.body)

        def _repo(self, repo: str) -> None:
            if repo in hub.gated:
                self._refuse(403, "GatedRepo")
            elif repo not in hub.repos:
                self._refuse(401, "RepoNotFound")
            else:
                files = [_listed(file, hub) for file in hub.repos[repo].items()]
                self._json({"id": repo, "sha": hub.commit, "siblings": files})

        def _file(self, repo: str, name: str) -> None:
            content = hub.repos[repo][name]
            start, n_all = 0, hub.sizes.get(name, len(content))
            asked = self.headers.get("Range")
            if asked and hub.refused_ranges:
                hub.refused_ranges -= 1
                self._refuse(503, "")
                return
            if asked:
                first, _, last = asked.removeprefix("bytes=").partition("-")
                start, content = int(first), content[: int(last) + 1] if last else content
                hub.ranges.append(asked)
            self.send_response(206 if asked else 200)
            if asked:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{n_all}")
            n_sent = n_all if self.command == "HEAD" else len(content) - start
            self.send_header("Content-Length", str(n_sent))
            whole = hub.repos[repo][name]
            self.send_header("ETag", f'"{hashlib.sha256(whole).hexdigest()}"')
            self.send_header("X-Repo-Commit", hub.commit)
            self.end_headers()
            if self.command == "HEAD":
                return
            hub.n_downloads += 1
            if hub.breaks:
                hub.breaks -= 1
                self.wfile.write(content[start : start + len(content) // 2])
                self.wfile.flush()
                self.close_connection = True
                self.connection.shutdown(2)
                return
            if hub.stalls_after is not None:
                self.wfile.write(content[start : start + hub.stalls_after])
                self.wfile.flush()
                hub.is_stalled.set()
                hub.goes_on.wait(60)
                self.close_connection = True
                return
            self.wfile.write(content[start:])

        def _json(self, value: Any) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", "Access to this repository is restricted.")
            self.send_header("Content-Length", "0")
            self.end_headers()

    return Handler


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """The hub on a port of this machine, its address in `url`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        hub.goes_on.set()
        server.shutdown()
        server.server_close()
        thread.join()
