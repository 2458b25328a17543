"""With several keys, no client learns from the cache what another one's prompts are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from program import Program, serving
from running import Running, http

from specoffload.server.access import AccessRules, Gate
from specoffload.server.cache_salt import salt_of

PROMPT = "def area(width: float, height: float) -> float:\n" * 6


@pytest.fixture(scope="module")
def two_keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    folder = tmp_path_factory.mktemp("salts")
    (folder / "keys").write_text("alpha-key\nbeta-key\n")
    (folder / "keys").chmod(0o600)
    flags = ("--api-key-file", folder / "keys", "--slot-save-path", folder, "--parallel", "2")
    with serving("--device", "cpu", "--ctx-size", "2048", *map(str, flags)) as running:
        yield running


def ask(url: str, key: str = "", prompt: str = PROMPT, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **more}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = http.post(url + "/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def cached(answer: dict[str, Any]) -> int:
    n: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return n


def test_another_keys_prompt_is_not_found(two_keys: Program) -> None:
    url = two_keys.url
    first = ask(url, "alpha-key")
    n_prompt = first["usage"]["prompt_tokens"]
    assert cached(first) == 0
    theirs = ask(url, "beta-key")
    assert cached(theirs) == 0, "an exact guess shows nothing"
    assert theirs["choices"][0]["text"] == first["choices"][0]["text"]
    assert cached(ask(url, "alpha-key")) >= n_prompt - 2
    assert cached(ask(url, "beta-key")) >= n_prompt - 2, "each finds its own"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_the_field_counts_in_every_api(two_keys: Program, path: str) -> None:
    def n_cached(salt: str | None) -> int:
        body: dict[str, Any] = {"model": "m", "temperature": 0}
        talk = [{"role": "user", "content": path + PROMPT}]
        body |= {"input": talk} if "responses" in path else {"messages": talk}
        body |= {"max_output_tokens" if "responses" in path else "max_tokens": 2}
        body |= {} if salt is None else {"cache_salt": salt}
        headers = {"X-Api-Key": "alpha-key"}
        answer = http.post(two_keys.url + path, json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        assert "cache_salt" not in answer.headers.get("x-ignored-parameters", "")
        usage = answer.json()["usage"]
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        n: int = usage.get("cache_read_input_tokens", details.get("cached_tokens"))
        return n

    assert n_cached(None) < 30, "the beginning of the format at most"
    n_own = n_cached(None)
    assert n_own > 60
    assert n_cached("one") == 0
    assert n_cached("one") == n_own
    assert n_cached("two") == 0


def test_a_restored_slot_is_its_owners(two_keys: Program) -> None:
    url = two_keys.url
    prompt = "class Shelf:\n    books: list[str]\n" * 8
    n_prompt = ask(url, "alpha-key", prompt, id_slot=0)["usage"]["prompt_tokens"]
    headers, named = {"Authorization": "Bearer beta-key"}, {"filename": "shelf"}
    for action in ("save", "erase", "restore"):
        answer = http.post(f"{url}/slots/0?action={action}", json=named, headers=headers)
        assert answer.status_code == 200
    assert cached(ask(url, "beta-key", prompt, id_slot=1)) == 0
    assert cached(ask(url, "alpha-key", prompt, id_slot=0)) >= n_prompt - 2


def test_without_keys_there_is_no_salt_but_the_field(pair: Program) -> None:
    prompt = "import os\nimport sys\n" * 20
    ask(pair.url, prompt=prompt)
    assert cached(ask(pair.url, "any", prompt)) > 40
    assert cached(ask(pair.url, prompt=prompt, cache_salt="user 7")) == 0
    assert cached(ask(pair.url, prompt=prompt, cache_salt="user 7")) > 40


@pytest.mark.parametrize("salt", ["", "x" * 1025, 7])
def test_a_salt_that_is_none_is_refused(server: Running, salt: object) -> None:
    answer = http.post(server.url + "/v1/completions", json={"prompt": "x", "cache_salt": salt})
    assert answer.status_code == 400
    assert "cache_salt" in answer.json()["error"]["message"]


def test_a_key_does_not_depend_on_its_place() -> None:
    """Prompts on the disk are found after keys were added before the client's own."""

    def salt(*keys: str) -> str:
        scope: dict[str, Any] = {
            "type": "http", "path": "/v1/completions", "method": "POST", "scheme": "http",
            "headers": [(b"host", b"localhost"), (b"authorization", b"Bearer mine")],
        }  # fmt: skip
        assert Gate(_app, AccessRules(keys))._problem(scope) is None
        return salt_of(scope, None)

    assert salt("mine") == ""
    assert salt("mine", "other") == salt("new", "other", "mine") != ""


async def _app(*_: object) -> None:
    raise AssertionError("not called")
