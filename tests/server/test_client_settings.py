"""docs/clients.md: with the settings of the page, each client's requests are answered."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_generator import FakeFactory
from running import Running, http

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/clients.md"
REQUESTS = ROOT / "tests/fixtures/requests"
DEFAULT = "http://127.0.0.1:8080"  # where `serve` listens unless told otherwise
SAY = "[say]hello there[/say]"  # what the generator answers
CLIENT_S = 120  # longest run of a real client on a loaded machine
# What each client adds to its address, with requests that it or its library has sent.
CLIENTS = {
    "Claude Code": {"/v1/messages?beta=true": ("claude_code", "claude_code_tools")},
    "Codex": {"/responses": ("codex", "codex_tools")},
    "opencode": {"/chat/completions": ("ai_sdk", "ai_sdk_tools")},
    "Cline": {"/chat/completions": ("cline",)},
    "Continue": {
        "/chat/completions": ("continue_chat",),
        "/completions": ("continue_autocomplete",),
    },
    "Zed": {"/chat/completions": ("openai_tools",)},
    "aider": {"/chat/completions": ("litellm_tools", "litellm_stream")},
    "Open WebUI": {"/chat/completions": ("open_webui", "open_webui_title")},
    "LiteLLM": {"/chat/completions": ("litellm_tools",), "/completions": ("litellm_text",)},
}


def block(client: str) -> tuple[str, str]:
    """The language and the text of the settings in a client's section."""
    section = PAGE.read_text("utf-8").split(f"\n## {client}\n")[1].partition("\n## ")[0]
    ((language, text),) = re.findall(r"^```(\w+)\n(.*?)^```$", section, re.M | re.S)
    return language, text


def settings(client: str) -> dict[str, Any]:
    language, text = block(client)
    if language == "sh":
        return dict(re.findall(r"^export (\w+)=(\S+)$", text, re.M))
    readers = {"toml": tomllib.loads, "json": json.loads, "yaml": yaml.safe_load}
    return dict(readers[language](text))


def address(of: Any) -> str:
    """The one address of a server in a client's settings."""
    text = json.dumps(of)
    (found,) = set(re.findall(r'"(http://127[^"]*)"', text))
    return str(found)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    running = Running(FakeFactory(n_ctx=1 << 20))  # each byte is a token
    running.wait_until_healthy()
    yield running
    running.stop()


def test_every_section_is_a_client_of_the_table() -> None:
    titles = re.findall(r"^## (.+)$", PAGE.read_text("utf-8"), re.M)
    assert titles == [*CLIENTS, "What was tested"]


@pytest.mark.parametrize("client", CLIENTS)
def test_recorded_requests_are_answered_at_the_address_of_the_page(
    client: str, server: Running
) -> None:
    base = address(settings(client))
    assert base.startswith(DEFAULT)
    for added, names in CLIENTS[client].items():
        for name in names:
            request = json.loads((REQUESTS / f"{name}.json").read_text("utf-8"))
            assert base + added == DEFAULT + request["path"]
            answer = http.post(
                server.url + request["path"],
                json={**request["body"], "model": "local"},
                headers={"Authorization": "Bearer none"},
            )
            assert answer.status_code == 200, answer.text


@pytest.mark.extra("litellm")
@pytest.mark.filterwarnings("ignore:Item 'summary':UserWarning")  # pydantic's, of its own types
def test_litellm_runs_with_its_lines(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no download
    import litellm

    (model,) = settings("LiteLLM")["model_list"]
    given = model["litellm_params"]
    given["api_base"] = given["api_base"].replace(DEFAULT, server.url)
    answer = litellm.completion(messages=[{"role": "user", "content": "hi"}], **given)
    assert answer.choices[0].message.content


def ran(words: list[str], home: Path, environ: dict[str, str]) -> str:
    """Run a client in a home of its own. Skips if it is not installed."""
    program = shutil.which(words[0])
    if program is None:
        pytest.skip(f"{words[0]} is not on PATH")
    (home / "work").mkdir(parents=True)
    done = subprocess.run(
        [program, *words[1:]], cwd=home / "work", stdin=subprocess.DEVNULL, capture_output=True,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **environ}, text=True,
        timeout=CLIENT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.extra
def test_claude_code_runs_with_its_lines(server: Running, tmp_path: Path) -> None:
    given = {k: v.replace(DEFAULT, server.url) for k, v in settings("Claude Code").items()}
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    assert "hello there" in ran(["claude", "-p", SAY], tmp_path / "home", {**given, **quiet})


@pytest.mark.extra
def test_codex_runs_with_its_lines(server: Running, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".codex").mkdir(parents=True)
    text = block("Codex")[1].replace(DEFAULT, server.url)
    (home / ".codex/config.toml").write_text(text, "utf-8")
    words = ["codex", "exec", "--skip-git-repo-check", SAY]
    assert "hello there" in ran(words, home, {})
