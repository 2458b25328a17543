"""Several models behind one server: real sockets, real engine processes, fake models."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_generator import FakeFactory
from prometheus_client.parser import text_string_to_metric_families
from running import RunningModels, eventually, http

from offload.errors import BadModel
from specoffload.server.access import AccessRules
from specoffload.server.api import body
from specoffload.server.router.model import Entry

Start = Callable[..., RunningModels]


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as ends:

        def start_one(
            factories: dict[str, FakeFactory] | None = None, **more: Any
        ) -> RunningModels:
            made = factories or {name: FakeFactory(name=name) for name in ("one", "two")}
            running = RunningModels(made, **more)
            ends.callback(lambda: running.is_alive and running.stop())
            return running

        yield start_one


def say(server: RunningModels, model: str, words: str = "hello", **more: Any) -> httpx.Response:
    body = {"model": model, "prompt": f"[say]{words}[/say]", "max_tokens": 64, **more}
    return http.post(server.url + "/v1/completions", json=body)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def error_of(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["message"], error["type"]


def test_a_compressed_body_finds_its_model(start: Start) -> None:
    server = start()
    body = {"model": "two", "prompt": "[say]hello[/say]", "max_tokens": 64}
    data = gzip.compress(json.dumps(body).encode())
    url = server.url + "/v1/completions"
    answer = http.post(url, content=data, headers={"Content-Encoding": "gzip"})
    assert text_of(answer) == "hello"
    damaged = http.post(url, content=data[:-9], headers={"Content-Encoding": "gzip"})
    assert error_of(damaged)[0] == 400
    assert http.post(url, content=data, headers={"Content-Encoding": "br"}).status_code == 415


def test_a_request_opens_its_model_and_closes_the_other(start: Start) -> None:
    server = start()
    assert server.statuses() == {"one": "unloaded", "two": "unloaded"}
    for name in ("one", "two", "one"):
        answer = say(server, name)
        assert text_of(answer).startswith("hello")
        assert answer.json()["model"] == name
        other = "two" if name == "one" else "one"
        assert server.statuses() == {name: "loaded", other: "unloaded"}


def test_ollamas_list_has_all_models(start: Start) -> None:
    listed = http.get(start(access=AccessRules(keys=("x",))).url + "/api/tags").json()["models"]
    found = [(model["name"], model["details"]["format"]) for model in listed]
    assert found == [("one", "gguf"), ("two", "gguf")]


def test_openai_client_lists_and_uses_models(start: Start) -> None:
    server = start(most=2)
    client = server.client()
    assert [model.id for model in client.models.list()] == ["one", "two"]
    for name in ("one", "two"):
        stream = client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": "[say]yes[/say]"}], stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert text.startswith("yes")
    assert set(server.statuses().values()) == {"loaded"}
    with pytest.raises(openai.BadRequestError, match="model 'three' not found"):
        client.completions.create(model="three", prompt="x")


def test_errors_are_those_of_llama_server(start: Start) -> None:
    server = start(autoload=False)
    url, kind = server.url, "invalid_request_error"
    missing = http.post(url + "/v1/completions", json={"prompt": "x"})
    assert error_of(missing) == (400, "model name is missing from the request", kind)
    assert error_of(http.get(url + "/slots"))[1] == "model name is missing from the request"
    status, words, its_kind = error_of(say(server, "no"))
    assert (status, its_kind) == (400, kind)
    assert words.startswith("model 'no' not found; GET /v1/models lists")
    assert error_of(say(server, "one")) == (400, "model is not loaded", kind)
    for path, status, its_kind in (
        ("load", 404, "not_found_error"),
        ("unload", 400, kind),
    ):
        answer = http.post(f"{url}/models/{path}", json={"model": "no"})
        assert error_of(answer) == (status, "model is not found", its_kind)
    answer = http.post(url + "/models/unload", json={"model": "one"})
    assert error_of(answer) == (400, "model is not running", kind)
    assert http.post(url + "/models/load", json={"model": "one"}).json() == {"success": True}
    answer = http.post(url + "/models/load", json={"model": "one"})
    assert answer.json() == {"success": True} or error_of(answer)[1] == "model is already running"
    eventually(lambda: server.statuses()["one"] == "loaded")
    answer = http.post(url + "/models/load", json={"model": "one"})
    assert error_of(answer) == (400, "model is already running", kind)
    assert text_of(say(server, "one")).startswith("hello")
    assert http.post(url + "/models/unload", json={"model": "one"}).json() == {"success": True}
    eventually(lambda: server.statuses()["one"] == "unloaded")
    autoloaded = http.post(
        url + "/v1/completions?autoload=true", json={"model": "two", "prompt": "x"}
    )
    assert autoloaded.status_code == 200
    message = {"model": "no", "max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}
    answer = http.post(url + "/v1/messages", json=message)
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["message"].startswith("model: model 'no' not found")


def test_requests_end_before_their_model_is_closed(start: Start) -> None:
    server = start()
    answers: dict[str, httpx.Response] = {}

    def ask(name: str, words: str) -> None:
        answers[name] = say(server, name, words)

    text_of(say(server, "one"))
    slow = threading.Thread(target=ask, args=("one", "[slow]" + "long " * 8))
    slow.start()
    eventually(lambda: server.pool.models["one"].is_busy)
    ask("two", "short")
    slow.join(20)
    assert text_of(answers["one"]).startswith("[slow]long long")
    assert text_of(answers["two"]).startswith("short")


def test_a_busy_model_gives_way_to_one_that_waits(start: Start) -> None:
    """One client asks for `one` without a pause, and `two` is served all the same."""
    server = start()
    ends = threading.Event()
    failed: list[str] = []

    def ask_again_and_again() -> None:
        while not ends.is_set():
            answer = say(server, "one", "[slow]a")
            if answer.status_code != 200:
                failed.append(answer.text)

    clients = [threading.Thread(target=ask_again_and_again) for _ in range(3)]
    for client in clients:
        client.start()
    try:
        eventually(lambda: server.pool.models["one"].is_busy)
        for _ in range(2):
            assert text_of(say(server, "two")).startswith("hello")
    finally:
        ends.set()
        for client in clients:
            client.join(20)
    assert not failed


def test_a_client_that_leaves_while_it_waits_is_forgotten(start: Start) -> None:
    factories = {"one": FakeFactory(name="one"), "two": FakeFactory(name="two", load_s=1.0)}
    server = start(factories)
    text_of(say(server, "one"))
    body = {"model": "two", "prompt": "[forever]"}
    with pytest.raises(httpx.ReadTimeout):
        http.post(server.url + "/v1/completions", json=body, timeout=0.3)
    eventually(lambda: not server.pool.models["two"].wishes)
    eventually(lambda: server.statuses()["two"] == "loaded")
    assert not server.pool.models["two"].is_busy
    assert text_of(say(server, "one")).startswith("hello")


def test_a_client_that_leaves_before_its_turn_closes_nothing(start: Start) -> None:
    """`one` is busy, so `two` has to wait. When its client leaves, `one` stays open."""
    server = start()
    text_of(say(server, "one"))
    eventually(lambda: not server.pool.models["one"].is_busy)  # with the first request
    slow = threading.Thread(target=say, args=(server, "one", "[slow]" + "long " * 60))
    slow.start()
    eventually(lambda: server.pool.models["one"].is_busy)
    body = {"model": "two", "prompt": "x"}
    with pytest.raises(httpx.ReadTimeout):
        http.post(server.url + "/v1/completions", json=body, timeout=0.2)
    slow.join(20)
    assert server.statuses() == {"one": "loaded", "two": "unloaded"}


def test_a_stream_hears_of_loading_while_it_waits(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specoffload.server.router.waiting._HEADER_PATIENCE_S", 0.1)
    monkeypatch.setattr("specoffload.server.router.waiting._NEWS_S", 0.1)
    server = start({"one": FakeFactory(name="one", load_s=2.0)})
    body = {"model": "one", "prompt": "[say]yes[/say]", "stream": True}
    with http.stream("POST", server.url + "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        eventually(lambda: "step" in http.get(server.url + "/health").json()["loading"]["one"])
        health = http.get(server.url + "/health").json()
        lines = [line for line in answer.iter_lines() if line]
    assert health["status"] == "ok"
    assert health["loading"]["one"] == {"step": "reading weights", "value": 0.25}
    comments = [line for line in lines if line.startswith(":")]
    assert ": loading one: reading weights 25%" in comments
    assert lines[-1] == "data: [DONE]"
    text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines if "{" in line)
    assert text.startswith("yes")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/responses"])
def test_a_refusal_after_the_header_is_an_event(
    start: Start, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr("specoffload.server.router.waiting._HEADER_PATIENCE_S", 0.1)
    server = start({"one": FakeFactory(name="one", load_s=0.8, bad_model=True)})
    message = [{"role": "user", "content": "x"}]
    body = {"model": "one", "stream": True, "max_tokens": 9, "messages": message}
    body |= {"prompt": "x"} if path == "/v1/completions" else {}
    body |= {"input": "x"} if path == "/v1/responses" else {}
    with http.stream("POST", server.url + path, json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    told = json.loads(lines[-1].removeprefix("data: "))
    said = told.get("response", told)["error"]["message"]
    assert said.startswith("model name=one failed to load: fake.gguf is not a GGUF file")
    events = {"/v1/messages": "event: error", "/v1/responses": "event: response.failed"}
    assert [line for line in lines if line.startswith("event")][-1:] == [
        *filter(None, [events.get(path)])
    ]


def test_a_kept_stream_goes_on_if_its_client_left_while_it_waited(start: Start) -> None:
    """As a page does that is loaded again while its model is."""
    server = start({"one": FakeFactory(name="one", load_s=1.0)})
    name = "a" * 32
    body = {"model": "one", "prompt": "[say]kept[/say]", "stream": True}
    with pytest.raises(httpx.ReadTimeout):
        http.post(
            server.url + "/v1/completions", json=body, headers={"X-Stream-Id": name}, timeout=0.3
        )
    told = http.get(f"{server.url}/v1/streams/{name}").text
    assert told.endswith("data: [DONE]\n\n")
    chunks = [json.loads(line[6:]) for line in told.splitlines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks).startswith("kept")
    eventually(lambda: not server.pool.models["one"].is_busy)
    answer = http.post(server.url + "/v1/completions", json=body, headers={"X-Stream-Id": "short"})
    assert answer.status_code == 400
    assert not server.pool.models["one"].is_busy


def test_a_kept_stream_that_is_ended_while_it_waits_is_forgotten(start: Start) -> None:
    server = start({"one": FakeFactory(name="one", load_s=1.5)})
    name = "b" * 32
    body = {"model": "one", "prompt": "[forever]", "stream": True}
    with pytest.raises(httpx.ReadTimeout):
        http.post(
            server.url + "/v1/completions", json=body, headers={"X-Stream-Id": name}, timeout=0.3
        )
    assert http.delete(f"{server.url}/v1/streams/{name}").status_code == 204
    eventually(lambda: not server.pool.models["one"].wishes)
    eventually(lambda: server.statuses()["one"] == "loaded")
    assert not server.pool.models["one"].is_busy


def test_a_model_that_does_not_load_harms_no_other(start: Start, tmp_path: Path) -> None:
    bad_if = tmp_path / "bad"
    bad_if.touch()
    factories = {"one": FakeFactory(name="one"), "two": FakeFactory(name="two", bad_if=bad_if)}
    server = start(factories)
    text_of(say(server, "one"))
    status, message, _ = error_of(say(server, "two"))
    assert status == 500
    assert message.startswith("model name=two failed to load: fake.gguf is not a GGUF file")
    listed = {m["id"]: m["status"] for m in http.get(server.url + "/models").json()["data"]}
    assert listed["two"]["failed"]
    assert listed["two"]["exit_code"] == 2
    assert text_of(say(server, "one")).startswith("hello")
    bad_if.unlink()
    assert text_of(say(server, "two")).startswith("hello")


def test_kill_9_of_one_engine_in_a_loop_touches_no_other(start: Start) -> None:
    server = start(most=2)
    text_of(say(server, "one"))
    text_of(say(server, "two"))
    ends = threading.Event()
    answers: list[str] = []

    def ask_two() -> None:
        while not ends.is_set():
            answers.append(text_of(say(server, "two", "steady")))

    client = threading.Thread(target=ask_two)
    client.start()
    try:
        for _ in range(30):
            assert text_of(say(server, "one", "back")).startswith("back")
            server.kill("one")
            time.sleep(0.05)
    finally:
        ends.set()
        client.join(20)
    assert len(answers) > 30
    assert all(text.startswith("steady") for text in answers)
    assert server.pool.models["two"].served.engine.metrics.n_restarts == 0  # type: ignore[union-attr]


def test_a_model_that_nobody_uses_is_closed(start: Start) -> None:
    server = start(idle_s=0.5)
    text_of(say(server, "one"))
    assert server.statuses()["one"] == "loaded"
    eventually(lambda: server.statuses()["one"] == "sleeping")
    assert text_of(say(server, "one")).startswith("hello")


@pytest.mark.parametrize("path", ["/props", "/slots", "/metrics", "/health"])
def test_a_model_that_is_only_watched_is_closed(start: Start, path: str) -> None:
    server = start(idle_s=0.5)
    text_of(say(server, "one"))

    def is_closed() -> bool:
        assert http.get(f"{server.url}{path}?model=one").status_code in (200, 503)
        return any("closing one, which nobody has used" in line for line in server.lines)

    eventually(is_closed)


def test_a_failure_is_told_until_the_model_is_asked_for_again(start: Start, tmp_path: Path) -> None:
    bad_if = tmp_path / "bad"
    bad_if.touch()
    checks: list[str] = []
    may_end = threading.Event()

    def check(entry: Entry) -> None:
        checks.append(entry.name)
        if not may_end.wait(20) or bad_if.exists():
            raise BadModel(f"{entry.name}.gguf is not a GGUF file")

    server = start(check=check)

    def state(name: str) -> dict[str, Any]:
        listed = http.get(server.url + "/models").json()["data"]
        return {k: v for m in listed if m["id"] == name for k, v in m["status"].items()}

    def load() -> None:
        assert http.post(server.url + "/models/load", json={"model": "two"}).status_code == 200

    text_of(say(server, "one"))
    events: list[str] = []
    with http.stream("GET", server.url + "/models/sse") as answer:
        load()
        eventually(lambda: state("two")["value"] == "loading")  # while its file is read
        assert "failed" not in state("two")
        may_end.set()
        for line in answer.iter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line[6:])["data"]["status"])
            if len(events) == 2:
                break
    assert events == ["loading", "unloaded"]
    assert state("two")["failed"]
    assert "is not a GGUF file" in state("two")["message"]
    assert server.statuses()["one"] == "loaded"
    may_end.clear()
    load()
    assert "failed" not in state("two")
    bad_if.unlink()
    may_end.set()
    eventually(lambda: server.statuses() == {"one": "unloaded", "two": "loaded"})


def test_models_that_do_not_fit_together_take_turns(start: Start, tmp_path: Path) -> None:
    lacks = tmp_path / "lacks"
    factories = {
        "one": FakeFactory(name="one"),
        "two": FakeFactory(name="two", does_not_fit_if=lacks),
    }
    server = start(factories, most=2)
    text_of(say(server, "one"))
    lacks.touch()
    answers: list[httpx.Response] = []
    client = threading.Thread(target=lambda: answers.append(say(server, "two")))
    client.start()
    eventually(lambda: any("two does not fit beside one" in line for line in server.lines))
    lacks.unlink()  # as if the memory of `one` were free now
    client.join(20)
    assert text_of(answers[0]).startswith("hello")
    eventually(lambda: server.statuses() == {"one": "unloaded", "two": "loaded"})


def test_metrics_and_props_belong_to_a_model(start: Start) -> None:
    server = start()
    for name in ("one", "two", "one"):
        text_of(say(server, name))
    metrics = http.get(server.url + "/metrics?model=one")
    counted = [line for line in metrics.text.splitlines() if "latency_seconds_count" in line]
    assert counted == ['vllm:e2e_request_latency_seconds_count{model_name="one"} 2.0']
    metrics = http.get(server.url + "/metrics?model=two")
    assert 'latency_seconds_count{model_name="two"} 1.0' in metrics.text
    whole = http.get(server.url + "/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(whole)}
    assert len(families) == whole.count("# TYPE")  # each family is described once
    latency = families["vllm:e2e_request_latency_seconds"].samples
    counts = {s.labels["model"]: s.value for s in latency if s.name.endswith("_count")}
    assert counts == {"one": 2.0, "two": 1.0}
    is_open = {s.labels["model"]: s.value for s in families["specoffload:model_open"].samples}
    assert is_open == {"one": 1.0, "two": 0.0}
    (closed,) = families.pop("specoffload:connections_closed").samples  # the server's, no model's
    assert (closed.labels, closed.value) == ({}, 0.0)
    assert all("model" in s.labels for family in families.values() for s in family.samples)
    assert http.get(server.url + "/props").json()["role"] == "router"
    assert http.get(server.url + "/props?model=one").json()["model_alias"] == "one"
    assert server.statuses() == {"one": "loaded", "two": "unloaded"}


def test_keys_protect_models_too(start: Start) -> None:
    server = start(access=AccessRules(keys=("secret",)))
    assert http.get(server.url + "/models").status_code == 200
    assert say(server, "one").status_code == 401
    for path in ("load", "unload"):
        assert http.post(f"{server.url}/models/{path}", json={"model": "one"}).status_code == 401
    assert http.get(server.url + "/models/sse").status_code == 401
    client = server.client(api_key="secret")
    assert client.completions.create(model="one", prompt="[say]x[/say]").choices[0].text


def test_strangers_see_names_and_states_and_change_nothing(start: Start) -> None:
    """Neither without the key nor from an image on a page of another site."""
    entry = Entry("one", ("-c", "1"), preset="[one]\nc = 1\n", tags=("fast",), aliases=("eins",))
    entries = [entry]
    factories = {name: FakeFactory(name=name) for name in ("one", "two")}
    server = start(factories, access=AccessRules(keys=("secret",)), entries=lambda: list(entries))
    url, key = server.url, {"Authorization": "Bearer secret"}
    (told,) = http.get(url + "/models").json()["data"]
    names = {"id", "aliases", "object", "owned_by", "created", "status"}
    assert (set(told), told["status"]) == (names, {"value": "unloaded"})
    (known,) = http.get(url + "/models", headers=key).json()["data"]
    assert known["status"] == {"value": "unloaded", "args": ["-c", "1"], "preset": entry.preset}
    assert known["tags"] == ["fast"]
    entries.append(Entry("two", ()))
    image = {"Sec-Fetch-Site": "cross-site", "User-Agent": "Mozilla/5.0"}
    for headers, status in (({}, 401), (image, 401), ({**image, **key}, 403)):
        answer = http.get(url + "/models?reload=1", headers=headers)
        assert answer.status_code == status, headers
        assert list(server.statuses()) == ["one"]
    assert len(http.get(url + "/models?reload=1", headers=key).json()["data"]) == 2


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),  # another port of this machine
        ({"User-Agent": "Mozilla/5.0"}, 403),  # plain HTTP from another machine: no site is named
        ({"Sec-Fetch-Site": "same-origin", "User-Agent": "Mozilla/5.0"}, 200),
        ({"Sec-Fetch-Site": "none", "User-Agent": "Mozilla/5.0"}, 200),  # the address was typed
        ({}, 200),
    ],
)
def test_a_get_changes_nothing_for_a_page_of_another_site(
    start: Start, headers: dict[str, str], status: int
) -> None:
    server = start()
    assert http.get(server.url + "/models?reload=1", headers=headers).status_code == status
    opened = http.get(server.url + "/slots?model=one", headers=headers)
    assert opened.status_code == (200 if status == 200 else 400)
    assert server.statuses()["one"] == ("loaded" if status == 200 else "unloaded")


def test_the_list_is_read_again(start: Start) -> None:
    entries = [Entry("one", ("-c", "1")), Entry("two", (), aliases=("zwei",))]
    server = start(entries=lambda: list(entries))
    text_of(say(server, "one"))
    text_of(say(server, "zwei"))
    text_of(say(server, "one"))
    assert http.get(server.url + "/models?reload=1").status_code == 200
    assert server.statuses() == {"one": "loaded", "two": "unloaded"}
    entries[0] = Entry("one", ("-c", "2"))
    del entries[1]
    http.get(server.url + "/models?reload=1")
    assert server.statuses() == {"one": "unloaded"}
    assert text_of(say(server, "one")).startswith("hello")


def test_changes_are_told_as_events(start: Start) -> None:
    server = start()
    found: list[dict[str, Any]] = []
    with http.stream("GET", server.url + "/models/sse") as answer:
        asking = threading.Thread(target=say, args=(server, "one"))
        asking.start()
        for line in answer.iter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
            if len(found) == 2:
                break
        asking.join(20)
    assert [event["data"]["status"] for event in found] == ["loading", "loaded"]
    assert {(event["model"], event["event"]) for event in found} == {("one", "status_change")}


def test_a_stop_ends_the_events(start: Start) -> None:
    server = start()
    with http.stream("GET", server.url + "/models/sse") as answer:
        assert answer.status_code == 200
        server.stop()


def test_a_stop_ends_waiting_and_running_requests(start: Start) -> None:
    factories = {"one": FakeFactory(name="one"), "two": FakeFactory(name="two", load_s=30)}
    server = start(factories, most=2)
    answers: list[httpx.Response] = []
    text_of(say(server, "one"))
    clients = [
        threading.Thread(target=lambda: answers.append(say(server, "two"))),
        threading.Thread(target=lambda: answers.append(say(server, "one", "[slow]abc"))),
    ]
    for client in clients:
        client.start()
    eventually(lambda: len(server.pool.models["two"].wishes) == 1)
    eventually(lambda: server.pool.models["one"].is_busy)
    began_s = time.monotonic()
    server.stop()
    for client in clients:
        client.join(20)
    assert time.monotonic() - began_s < 10
    assert sorted(answer.status_code for answer in answers) == [200, 503]


def test_unknown_paths_and_the_description_of_all_routes(start: Start) -> None:
    server = start()
    for path in ("/favicon.ico", "/v1/nothing?model=one"):
        status, message, kind = error_of(http.get(server.url + path))
        assert (status, kind) == (404, "not_found_error"), message
    assert error_of(http.put(server.url + "/completion"))[0] in (400, 405)
    paths = http.get(server.url + "/openapi.json").json()["paths"]
    assert {"/models/load", "/v1/chat/completions", "/v1/messages", "/v1/models"} <= set(paths)
    erased = http.post(server.url + "/slots/0?action=erase&model=one")
    assert erased.status_code == 200, erased.text
    assert server.statuses() == {"one": "loaded", "two": "unloaded"}


def test_a_body_that_is_no_object_gets_400(start: Start) -> None:
    server = start()
    for data in (b"", b"[1]", b"{", b'{"model": 3}'):
        answer = http.post(server.url + "/v1/completions", content=data)
        assert answer.status_code == 400, data
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{"
        client.sendall(head)
    assert text_of(say(server, "one")).startswith("hello")


def test_a_body_counts_while_it_arrives(start: Start) -> None:
    server = start()
    half = b"x" * 300_000
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port), timeout=20) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.host}:{address.port}\r\n"
        client.sendall(head.encode() + b"Content-Type: application/json\r\n")
        client.sendall(b"Content-Length: 600000\r\n\r\n" + half)
        eventually(lambda: server.shared.bodies.n_bytes == len(half))
    eventually(lambda: server.shared.bodies.n_bytes == 0)


def test_bodies_of_all_models_count_together_and_each_once(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(most=2)
    kib = 1024
    monkeypatch.setattr(body, "MOST_BYTES_AT_ONCE", 600 * kib)
    large = {"model": "one", "prompt": "[forever]", "stream": True, "user": "x" * 400 * kib}
    url = server.url + "/v1/completions"
    with http.stream("POST", url, json=large, timeout=60) as stream:
        assert stream.status_code == 200
        n_bytes = len(json.dumps(large, separators=(",", ":")))
        eventually(lambda: abs(server.shared.bodies.n_bytes - n_bytes) < 100)
        other = http.post(url, json={**large, "model": "two", "stream": False})
        assert error_of(other)[0] == 503
        assert "not answered yet" in error_of(other)[1]
        assert text_of(say(server, "two")).startswith("hello"), "a small body finds room"
    eventually(lambda: server.shared.bodies.n_bytes == 0)


def test_names_are_found_as_ollamas_clients_write_them(start: Start) -> None:
    """With `:latest`, and in any case, if only one model can be meant."""
    names = ("Qwen3:8B", "one", "ONE", "tagged:latest")
    entries = [*(Entry(name, ()) for name in names), Entry("last", (), aliases=("Little",))]
    factories = {entry.name: FakeFactory(name=entry.name) for entry in entries}
    server = start(factories, entries=lambda: entries)
    for asked, found in (
        ("Qwen3:8B:latest", "Qwen3:8B"),
        ("qwen3:8b", "Qwen3:8B"),
        ("one:latest", "one"),
        ("ONE", "ONE"),
        ("ONE:latest", "ONE"),
        ("tagged:latest", "tagged:latest"),
        ("Tagged:latest", "tagged:latest"),
        ("tagged", "tagged:latest"),
        ("little:latest", "last"),
        ("One", None),
        ("one:8b", None),
        (":latest", None),
    ):
        answer = say(server, asked)
        assert answer.status_code == (400 if found is None else 200), (asked, answer.text)
        if found is not None:
            assert answer.json()["model"] == found
    listed = http.get(server.url + "/api/tags").json()["models"]
    assert [model["name"] for model in listed] == [entry.name for entry in entries]


def test_a_model_that_was_unloaded_has_not_failed(start: Start) -> None:
    server = start()
    for name in ("one", "two"):
        text_of(say(server, name))
    http.post(server.url + "/models/unload", json={"model": "two"})
    eventually(lambda: server.statuses()["two"] == "unloaded")
    listed = http.get(server.url + "/models").json()["data"]
    assert not [m["id"] for m in listed if {"failed", "exit_code"} & m["status"].keys()]
