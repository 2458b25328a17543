"""Answers to images are those of llama-server and llama-mtmd-cli of the pinned source.

`scripts/build-llama-server` compiles both, in about 12 minutes. Without them the tests are skipped.
"""

from __future__ import annotations

import base64
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from image_parts import KINDS, model_with_projector, png
from program import serving
from running import http

from offload.images.building import image_library
from specoffload.bench.llama_server import running_server

ROOT = Path(__file__).parents[2]
MARKER = "<__media__>"
LIMITS = ("-c", "1024", "-b", "256", "-ub", "128", "-t", "1")
IMAGES = [png(150, 90, 1), png(60, 200, 2), png(30, 30, 3)]
DATA = [base64.b64encode(file).decode() for file in IMAGES]
N_TOKENS = 24
SPECIAL = ("<|im_start|>", "<|im_end|>")

PROMPTS: dict[str, Any] = {
    "one": {"prompt_string": f"Look: {MARKER} so?", "multimodal_data": DATA[:1]},
    "two": {
        "prompt_string": f"Look at {MARKER} and {MARKER} now tell me",
        "multimodal_data": DATA[:2],
    },
    "begins": {"prompt_string": f"{MARKER}{MARKER} and?", "multimodal_data": DATA[1:]},
    "none": {"prompt_string": "Look at this and tell me"},
    "another": {
        "prompt_string": f"Look at {MARKER} and {MARKER} now tell me",
        "multimodal_data": [DATA[0], DATA[2]],
    },
}


class Servers(NamedTuple):
    ours: str
    theirs: str


@pytest.fixture(scope="module")
def llama_server() -> Path:
    built = subprocess.run(
        [ROOT / "scripts" / "build-llama-server", "--built"], capture_output=True, text=True
    )
    if built.returncode:
        pytest.skip(built.stderr.strip())
    return Path(built.stdout.strip())


@pytest.fixture(scope="module", params=KINDS)
def servers(
    request: pytest.FixtureRequest, models: Path, llama_server: Path, tmp_path_factory: Any
) -> Iterator[Servers]:
    image_library()
    model, projector = model_with_projector(request.param, models)
    files = ("-m", str(model), "--mmproj", str(projector))
    log = tmp_path_factory.mktemp("llama-server") / "log.txt"
    with (
        mock.patch.dict(os.environ, LLAMA_MEDIA_MARKER=MARKER),
        serving(*files[1:], *LIMITS, environment={"LLAMA_MEDIA_MARKER": MARKER}) as ours,
        running_server([str(llama_server), *files, *LIMITS, "-np", "1"], log) as (_, port),
    ):
        yield Servers(ours.url, f"http://127.0.0.1:{port}")


def both(servers: Servers, path: str, body: dict[str, Any]) -> list[Any]:
    answers = [http.post(url + path, json=body, timeout=120) for url in servers]
    assert [a.status_code for a in answers] == [200, 200], [a.text for a in answers]
    return [answer.json() for answer in answers]


def test_raw_prompts_are_continued_alike(servers: Servers) -> None:
    """The prompts come twice, so that caches are used, too."""
    for name in (*PROMPTS, *PROMPTS):
        body = {
            "prompt": PROMPTS[name], "n_predict": N_TOKENS, "temperature": 0, "ignore_eos": True,
            "return_tokens": True,
        }  # fmt: skip
        ours, theirs = both(servers, "/completion", body)
        assert len(ours["tokens"]) == N_TOKENS
        assert ours["tokens"] == theirs["tokens"], name
        assert ours["content"] == theirs["content"], name


def chat_content(*parts: str | int) -> list[dict[str, Any]]:
    """Return the parts of a message. Numbers are those of images."""
    urls = {at: f"data:image/png;base64,{data}" for at, data in enumerate(DATA)}
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": urls[part]}}
        for part in parts
    ]


CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": chat_content("Look: ", 0, "what is it?")}],
    "turns": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": chat_content(1, 2, "these?")},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": chat_content("and", 0)},
    ],
}


@pytest.mark.parametrize("name", CHATS)
def test_chats_are_answered_alike(servers: Servers, name: str) -> None:
    asked = {"messages": CHATS[name]}
    ours, theirs = both(servers, "/apply-template", asked)
    assert ours["prompt"] == theirs["prompt"]
    ours, theirs = both(servers, "/v1/chat/completions/input_tokens", asked)
    assert ours == theirs
    body = asked | {"max_tokens": N_TOKENS, "temperature": 0, "ignore_eos": True}
    mine, others = both(servers, "/v1/chat/completions", body)
    assert mine["choices"][0]["message"]["content"] == others["choices"][0]["message"]["content"]
    assert mine["usage"]["prompt_tokens"] == others["usage"]["prompt_tokens"]
    assert mine["usage"]["prompt_tokens"] == ours["input_tokens"]


REFUSED: dict[str, Any] = {
    "too few": {"prompt_string": "Look", "multimodal_data": DATA[:1]},
    "too many": {"prompt_string": f"{MARKER}{MARKER} so?", "multimodal_data": DATA[:1]},
    "no image": {"prompt_string": f"{MARKER} so?", "multimodal_data": ["aGVsbG8="]},
    "no text": {"multimodal_data": DATA[:1]},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_llama_server_refuses_is_refused(servers: Servers, name: str) -> None:
    """Ours are 400, because the request is at fault. Some of llama-server's are 500."""
    body = {"prompt": REFUSED[name], "n_predict": 1}
    ours, theirs = (http.post(url + "/completion", json=body) for url in servers)
    assert ours.status_code == 400
    assert theirs.status_code in (400, 500)
    said = theirs.json()["error"]["message"]
    assert name == "no image" or ours.json()["error"]["message"].startswith(said)


@pytest.mark.parametrize("kind", KINDS)
def test_llama_mtmd_cli_gives_the_answer_of_the_chat(
    kind: str, models: Path, llama_server: Path, tmp_path: Path
) -> None:
    image_library()
    model, projector = model_with_projector(kind, models)
    names = []
    for at, file in enumerate(IMAGES[:2]):
        names += ["--image", str(tmp_path / f"{at}.png")]
        (tmp_path / f"{at}.png").write_bytes(file)
    files = ("-m", str(model), "--mmproj", str(projector))
    done = subprocess.run(
        [
            llama_server.with_name("llama-mtmd-cli"), *files, *names, *LIMITS, "--temp", "0",
            "-n", str(N_TOKENS), "--ignore-eos", "--chat-template", "chatml", "-p",
            f"Look at {MARKER} and {MARKER} now tell me",
        ],
        capture_output=True, check=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    content = chat_content("Look at ", 0, " and ", 1, " now tell me")
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": N_TOKENS,
            "temperature": 0, "ignore_eos": True}  # fmt: skip
    with serving(*files[1:], *LIMITS) as program:
        answer = http.post(program.url + "/v1/chat/completions", json=body, timeout=120).json()
    text = answer["choices"][0]["message"]["content"]
    said = done.stdout.decode(errors="replace")
    for special in SPECIAL:  # the program writes out special tokens, and servers do not
        said = said.replace(special, "")
    assert said.strip() == text.strip()
