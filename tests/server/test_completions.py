"""/v1/completions with lists, echoes and suffixes. /completion and /infill as in llama-server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_generator import TAIL, FakeFactory
from resolved import line_of
from running import Running, StartServer, eventually, http

from specoffload.generation.generation import AskedOptions
from specoffload.server.api.parameters import prompts_of


def _post(server: Running, path: str, **body: Any) -> Any:
    answer = http.post(server.url + path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def _events(server: Running, path: str, **body: Any) -> list[Any]:
    with http.stream("POST", server.url + path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        text = answer.read().decode()  # iter_lines() would cut it at U+2028 too
    lines = [line for line in text.split("\n\n") if line.startswith("data: ")]
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


# -- prompts


def test_text_and_ids_in_turn_are_one_prompt() -> None:
    assert prompts_of(["a", 1, 2.0, "b"]) == [("a", 1, 2, "b")]
    assert prompts_of([["a", 1], "c"]) == [("a", 1), "c"]


# -- OpenAI's


def test_each_prompt_of_a_list_has_its_answer_in_its_place(start_server: StartServer) -> None:
    server = start_server(FakeFactory(n_parallel=3), max_queue=0)
    prompts = [f"p{i}" for i in range(8)]
    found = _post(server, "/v1/completions", prompt=prompts)
    assert [(c["index"], c["text"]) for c in found["choices"]] == [
        (i, prompt + TAIL) for i, prompt in enumerate(prompts)
    ]
    assert found["usage"]["prompt_tokens"] == 8 * 3
    eventually(lambda: server.props()["requests_processing"] == 0)


def test_a_stream_tells_the_answers_of_a_list_apart(start_server: StartServer) -> None:
    server = start_server(FakeFactory(n_parallel=2))
    options = {"stream_options": {"include_usage": True}}
    events = _events(server, "/v1/completions", prompt=["a", "b", "c"], **options)
    assert events[-1] == "[DONE]"
    texts = ["", "", ""]
    ends = []
    for event in events[:-2]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            ends += [choice["index"]] * (choice["finish_reason"] is not None)
    assert texts == [p + TAIL for p in "abc"]
    assert sorted(ends) == [0, 1, 2]
    assert events[-2]["usage"]["prompt_tokens"] == 6


def test_several_answers_to_each_prompt(start_server: StartServer) -> None:
    server = start_server(FakeFactory(n_parallel=2))
    found = _post(server, "/v1/completions", prompt=["a", "b"], n=3)
    assert [c["text"] for c in found["choices"]] == ["a" + TAIL] * 3 + ["b" + TAIL] * 3
    assert found["usage"]["prompt_tokens"] == 4
    one = _post(server, "/v1/completions", prompt="a")["usage"]["completion_tokens"]
    assert found["usage"]["completion_tokens"] == 6 * one
    told = _post(server, "/v1/completions", prompt="[options]", n=3, seed=7, time_limit_s=9)
    texts = [choice["text"] for choice in told["choices"]]
    assert all(f"seed={7 + i}" in text for i, text in enumerate(texts))
    assert all("time_limit_s=9" in text for text in texts)


@pytest.mark.parametrize("path", ["/completion", "/infill", "/v1/completions"])
def test_limits_of_lines_reach_the_answer(start_server: StartServer, path: str) -> None:
    server = start_server(FakeFactory())
    around = {"input_prefix": "[options]", "input_suffix": ""} if path == "/infill" else {}
    found = _post(
        server, path, **{"prompt": "[options]", "n_indent": 4, "t_max_predict_ms": 250} | around
    )
    text = found["content"] if "content" in found else found["choices"][0]["text"]
    assert "n_indent=4" in text
    assert "t_max_predict_ms=250" in text


def test_a_request_that_breaks_off_takes_its_other_answers_along(
    start_server: StartServer,
) -> None:
    server = start_server(FakeFactory(n_parallel=2))
    answer = http.post(server.url + "/v1/completions", json={"prompt": ["[forever]", "[raise]"]})
    assert answer.status_code == 500
    eventually(lambda: server.props()["requests_processing"] == 0)


def test_more_answers_than_there_may_be_are_refused(server: Running) -> None:
    body = {"prompt": ["a"] * 600, "n": 2}
    answer = http.post(server.url + "/v1/completions", json=body)
    assert answer.status_code == 400
    assert "at most 1024 answers" in answer.json()["error"]["message"]


@pytest.mark.parametrize("prompt", ["hé", list("hé".encode()), ["h", *"é".encode()]])
def test_an_echo_is_the_prompts_text_however_it_was_given(server: Running, prompt: Any) -> None:
    text = _post(server, "/v1/completions", prompt=prompt, echo=True)["choices"][0]["text"]
    assert text == "hé" + "hé" + TAIL
    events = _events(server, "/v1/completions", prompt=prompt, echo=True, max_tokens=1)
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == "hé" + "h"


def test_a_suffix_asks_for_the_middle(server: Running) -> None:
    found = _post(server, "/v1/completions", prompt="ab", suffix="cd")
    assert found["choices"][0]["text"] == "<ab|cd>" + TAIL
    for body, status in (
        ({"prompt": "[no-fim]", "suffix": "x"}, 501),
        ({"prompt": [97], "suffix": "x"}, 400),
        ({"prompt": "a", "suffix": "x", "echo": True}, 400),
    ):
        answer = http.post(server.url + "/v1/completions", json=body)
        assert answer.status_code == status, answer.text


# -- llama-server's


def test_a_native_completion_has_llama_servers_fields(server: Running) -> None:
    for path in ("/completion", "/completions"):
        found = _post(server, path, prompt="x", n_predict=3, seed=7, return_tokens=True)
        assert found["content"] == ("x" + TAIL)[:3]
        assert found["tokens"] == list(("x" + TAIL)[:3].encode())
        assert (found["tokens_predicted"], found["tokens_evaluated"]) == (3, 2)
        assert (found["stop"], found["stop_type"], found["stopping_word"]) == (True, "limit", "")
        assert found["generation_settings"]["n_predict"] == 3
        assert found["generation_settings"]["seed"] == 7
        assert found["prompt"] == "x"
        assert found["timings"]["predicted_n"] == 3


def test_why_an_answer_ended_is_told(server: Running) -> None:
    assert _post(server, "/completion", prompt="x")["stop_type"] == "eos"
    found = _post(server, "/completion", prompt="abcdef", stop=["zz", "de"])
    assert (found["stop_type"], found["stopping_word"]) == ("word", "de")
    assert found["content"] == "abc"


def test_a_native_stream_ends_with_the_whole_answers_fields(server: Running) -> None:
    events = _events(server, "/completion", prompt="x", timings_per_token=True)
    *chunks, last = events
    assert "".join(event["content"] for event in events) == "x" + TAIL
    assert all(event["stop"] is False for event in chunks)
    assert last["stop"] is True
    assert last["stop_type"] == "eos"
    counts = [event["timings"]["predicted_n"] for event in chunks]
    assert counts == sorted(counts)
    assert "timings" not in _events(server, "/completion", prompt="x")[0]


def test_several_native_prompts_are_answered_with_a_list(server: Running) -> None:
    found = _post(server, "/completion", prompt=["a", [98], ["c", 100]])
    assert [answer["content"] for answer in found] == ["a" + TAIL, "b" + TAIL, "cd" + TAIL]
    assert [answer["index"] for answer in found] == [0, 1, 2]


def test_only_the_fields_that_are_asked_for_are_told(server: Running) -> None:
    fields = ["content", "generation_settings/n_predict", "no/such"]
    found = _post(server, "/completion", prompt="x", n_predict=1, response_fields=fields)
    assert found == {"content": "x", "generation_settings/n_predict": 1}


def test_infill_writes_the_middle(server: Running) -> None:
    body = {"input_prefix": "a", "input_suffix": "b", "prompt": "c", "n_predict": 6}
    assert _post(server, "/infill", **body)["content"] == "<a|b>c"
    extra = [{"filename": "f.py", "text": "t"}]
    assert _events(server, "/infill", **body, input_extra=extra)[-1]["stop"] is True
    body["input_prefix"] = "[no-fim]"
    answer = http.post(server.url + "/infill", json=body)
    assert answer.status_code == 501
    assert answer.json()["error"]["type"] == "not_supported_error"
    for bad in ({}, {"input_prefix": "a"}, {"input_prefix": 5, "input_suffix": "b"}):
        assert http.post(server.url + "/infill", json=bad).status_code == 400


def test_the_suffix_comes_first_in_infill_if_the_server_was_started_so(
    start_server: StartServer,
) -> None:
    server = start_server(defaults=line_of("--spm-infill", command="serve").of(AskedOptions))
    body = {"input_prefix": "a", "input_suffix": "b", "prompt": "c", "n_predict": 6}
    assert _post(server, "/infill", **body)["content"] == "<b|a>c"
    # A request cannot choose, as in llama-server.
    assert _post(server, "/infill", **body, spm_infill=False)["content"] == "<b|a>c"


def test_a_client_that_leaves_a_list_frees_every_place(start_server: StartServer) -> None:
    server = start_server(FakeFactory(n_parallel=2))
    body = {"prompt": ["[forever]"] * 5, "stream": True}
    with http.stream("POST", server.url + "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
        eventually(lambda: server.props()["requests_processing"] == 2)
    eventually(lambda: server.props()["requests_processing"] == 0)
