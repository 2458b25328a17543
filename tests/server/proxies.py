"""Runs the proxies that docs/server.md configures, for tests: Debian's nginx and Caddy."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from running import eventually

NAME = "llm.example.org"  # as docs/server.md calls the public name
_PAGE = Path(__file__).parents[2] / "docs" / "server.md"
# What a user writes who knows nothing of this server.
DEFAULT_NGINX = f"""
server {{
    listen 80;
    server_name {NAME};
    location /llm/ {{ proxy_pass http://127.0.0.1:8080/; }}
}}
"""
_AROUND = """
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    {paths}
    {block}
}}
"""
_PATHS = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


def documented(language: str) -> str:
    """Return the only block of this language in docs/server.md."""
    (block,) = re.findall(
        rf"^```{language}\n(.*?)^```", _PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    return str(block)


@contextmanager
def proxied(language: str, block: str, upstream: str, folder: Path) -> Iterator[int]:
    """Run nginx or Caddy with this block in front of the server at `upstream`; yields its port.

    Skips the test if the program is not installed.
    """
    program = shutil.which(language, path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
    if program is None:
        pytest.skip(f"{language} is not installed: scripts/test-extras installs Debian's")
    port = _free_port()
    address = urlsplit(upstream).netloc
    assert "127.0.0.1:8080" in block
    block = block.replace("127.0.0.1:8080", address)
    file = folder / "proxy.conf"
    if language == "nginx":
        assert "listen 80;" in block
        block = block.replace("listen 80;", f"listen 127.0.0.1:{port};")
        paths = " ".join(f"{name}_temp_path {folder}/{name};" for name in _PATHS)
        file.write_text(_AROUND.format(folder=folder, paths=paths, block=block))
        command = [program, "-p", str(folder), "-c", str(file)]
    else:
        assert block.startswith(NAME)
        site = f"http://{NAME}:{port}, http://127.0.0.1:{port}"
        options = "{\n    admin off\n}\n"
        file.write_text(options + site + block.removeprefix(NAME))
        command = [program, "run", "--adapter", "caddyfile", "--config", str(file)]
    log = folder / "proxy.log"
    environment = {
        "HOME": str(folder),
        "XDG_DATA_HOME": str(folder),
        "XDG_CONFIG_HOME": str(folder),
    }
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        eventually(lambda: process.poll() is not None or _answers(port), 30)
        assert process.poll() is None, log.read_text()
        yield port
    finally:
        process.terminate()
        process.wait(30)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port: int = held.getsockname()[1]
        return port


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1):
            return True
    except OSError:
        return False
