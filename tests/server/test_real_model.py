"""`specoffload serve` as a user starts it, with the embedded pair and the openai client."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from program import ENVIRONMENT, SERVE, Program
from running import eventually, http

PROMPT = "def fibonacci(n):\n"


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    """The server on `sim` with streamed experts. Other test files use plain libllama."""
    command = [*SERVE, "--device", "sim", "--min-batch", "3"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT
    ) as process:
        try:
            running = Program(process)
            yield running
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=30)
            assert process.returncode == 0, output
            assert "Traceback" not in output
            assert not psutil.wait_procs(children, timeout=10)[1], "no process is left"
        finally:
            process.kill()


def _complete(program: Program, prompt: str, n: int) -> str:
    with program.client() as client:
        answer = client.completions.create(model="any", prompt=prompt, max_tokens=n)
    return answer.choices[0].text


def test_a_completion_streams_the_text_that_it_gives_whole(program: Program) -> None:
    with program.client() as client:
        whole = client.completions.create(model="any", prompt=PROMPT, max_tokens=24)
        stream = client.completions.create(
            model="any",
            prompt=PROMPT,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    text = whole.choices[0].text
    assert text.strip()
    assert "".join(c.choices[0].text for c in chunks if c.choices) == text
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens
    if whole.choices[0].finish_reason == "length":
        assert whole.usage.completion_tokens == 24


def test_the_draft_is_used_and_the_timings_say_so(program: Program) -> None:
    with program.client() as client:
        answer = client.completions.create(model="any", prompt=PROMPT, max_tokens=32)
    timings = answer.model_extra["timings"]
    assert 0 < timings["draft_n_accepted"] <= timings["draft_n"]
    assert timings["predicted_per_second"] > 0
    n_cached = answer.usage.prompt_tokens_details.cached_tokens
    assert timings["cache_n"] == n_cached
    assert timings["prompt_n"] + n_cached == answer.usage.prompt_tokens > 0
    speculation = timings["speculation"]
    assert speculation["rounds"] * speculation["tokens_per_round"] == timings["predicted_n"]
    assert speculation["verify_ms"] > 0
    assert sum(speculation["accepted_per_drafter"].values()) == timings["draft_n_accepted"]


def test_a_json_schema_is_followed_through_drafts(program: Program) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "on": {"type": "boolean"}},
        "required": ["n", "on"],
    }
    with program.client() as client:
        answer = client.chat.completions.create(
            model="any",
            messages=[{"role": "user", "content": "A number and a switch."}],
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            max_tokens=200,
        )
    assert answer.choices[0].finish_reason == "stop"
    found = json.loads(answer.choices[0].message.content)
    assert isinstance(found["n"], int)
    assert isinstance(found["on"], bool)
    assert answer.model_extra["timings"]["draft_n"] > 0


def test_a_chat_with_the_demo_pair_is_continued_text(program: Program) -> None:
    messages = [{"role": "user", "content": "Write a function that adds two numbers."}]
    prompt = http.post(program.url + "/apply-template", json={"messages": messages}).json()
    assert prompt["prompt"] == messages[0]["content"], "the demo pair knows no chats"
    props = http.get(program.url + "/props").json()
    assert props["only_continues"] is True
    assert props["default_generation_settings"]["params"]["n_predict"] == 128
    with program.client() as client:
        answer = client.chat.completions.create(model="any", messages=messages, max_tokens=16)
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    n_tokens = answer.usage.completion_tokens
    assert n_tokens == 16 if answer.choices[0].finish_reason == "length" else 0 < n_tokens < 16
    body = {"content": prompt["prompt"], "parse_special": True}
    tokens = http.post(program.url + "/tokenize", json=body).json()["tokens"]
    assert answer.usage.prompt_tokens == len(tokens)


def _has_libllama(process: psutil.Process) -> bool:
    return any("libllama" in place.path for place in process.memory_maps())


def test_a_killed_engine_is_told_to_its_client_and_the_next_request_is_served(
    program: Program,
) -> None:
    api = psutil.Process(program.process.pid)
    assert not _has_libllama(api), "the API process never loads the native library"
    [engine] = [child for child in api.children() if _has_libllama(child)]
    body = {"prompt": PROMPT, "stream": True, "ignore_eos": True}
    with http.stream("POST", program.url + "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert json.loads(next(lines)[6:])["choices"][0]["finish_reason"] is None
        engine.kill()
        error = json.loads([line for line in lines if line][-1][6:])["error"]
    assert "killed by SIGKILL" in error["message"]
    assert error["type"] == "server_error"
    eventually(lambda: http.get(program.url + "/health").status_code == 200, 60)
    assert _complete(program, PROMPT, 4)
    assert http.get(program.url + "/props").json()["engine_restarts"] == 1


def test_a_bad_model_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("once upon a time\n" * 100)
    done = subprocess.run([*SERVE, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    [sentence] = [line for line in done.stderr.splitlines() if line.startswith("specoffload:")]
    assert "not a GGUF file" in sentence
    assert "Traceback" not in done.stderr


def test_an_answer_that_the_context_cuts_says_so(pair: Program) -> None:
    text = "x = 1\n" * 320
    body = {"max_tokens": 10**6, "messages": [{"role": "user", "content": text}]}
    told = http.post(pair.url + "/v1/messages", json=body, timeout=120).json()
    assert told["stop_reason"] == "model_context_window_exceeded"
    usage = told["usage"]
    counts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert sum(usage[name] for name in (*counts, "output_tokens")) == 2048
    cut = http.post(pair.url + "/v1/messages", json={**body, "max_tokens": 2}, timeout=120).json()
    assert cut["stop_reason"] == "max_tokens"
