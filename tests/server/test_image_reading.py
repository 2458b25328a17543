"""Images that take long, that cannot be read, or that come in unusual forms."""

from __future__ import annotations

import base64
import json
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from image_parts import model_with_projector, png, slow_jpeg
from program import Program, serving
from running import eventually, http

from offload.images.building import image_library
from specoffload.server.api.images import MOST_IMAGES

IMAGE = png(56, 57, 1)
DATA = base64.b64encode(IMAGE).decode()
WEBP = b"RIFF\x20\0\0\0WEBPVP8 " + bytes(30)
BROKEN = {
    "WebP": WEBP,
    "header only": b"\x89PNG\r\n\x1a\nnothing",
    "cut off": png(150, 90)[:400],
    "HEIC": b"\0\0\0\x18ftypheic" + bytes(40),
    "SVG": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "text": b"Error: no screen",
    "too large": png(9000, 9000, None),
}


@pytest.fixture(scope="module")
def program(models: Path) -> Iterator[Program]:
    image_library()
    model, projector = model_with_projector("qwen2vl", models)
    few = ("--image-max-tokens", "64", "--parallel", "2")
    with serving(str(model), "--mmproj", str(projector), *few) as running:
        yield running


def url_of(file: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(file).decode()


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def chat(program: Program, *messages: dict[str, Any], **more: Any) -> httpx.Response:
    body = {"max_tokens": 4, "messages": messages, **more}
    return http.post(program.url + "/v1/chat/completions", json=body)


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*content]}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def tool_turn(*content: Any) -> tuple[dict[str, Any], ...]:
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": [*content]}
    return user(text("see")), {"role": "assistant", "tool_calls": [call]}, result


# ---- forms of base64

PADDED = next(IMAGE + bytes(n) for n in range(3) if (len(IMAGE) + n) % 3)  # with = at the end
PLAIN = base64.b64encode(PADDED).decode()
LINES = base64.encodebytes(PADDED).decode()  # of 76 letters, as the command base64 writes them
FORMS = {
    "lines": f"data:image/png;base64,{LINES}",
    "lines of CR LF": "data:image/png;base64," + LINES.replace("\n", "\r\n"),
    "no padding": f"data:image/png;base64,{PLAIN.rstrip('=')}",
    "for addresses": "data:image/png;base64," + base64.urlsafe_b64encode(PADDED).decode(),
    "in an address": "data:image/png;base64," + PLAIN.replace("+", "%2B").replace("=", "%3D"),
    "no type": f"data:;base64,{PLAIN}",
    "bytes": f"data:application/octet-stream;base64,{PLAIN}",
    "charset": f"data:image/png;charset=utf-8;base64,{PLAIN}",
    "upper case": f"DATA:image/PNG;BASE64,{PLAIN}",
    "another type": f"data:image/jpeg;base64,{PLAIN}",
    "blanks": f"  data:image/png; base64, {PLAIN} \n",
    "alone": PLAIN,
    "alone, lines": LINES,
}


@pytest.mark.parametrize("form", FORMS)
def test_base64_is_read_in_each_form_that_programs_write(program: Program, form: str) -> None:
    wanted = chat(program, user(part(url_of(PADDED)), text("?"))).json()["choices"]
    answer = chat(program, user(part(FORMS[form]), text("?")))
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == wanted
    marker = http.get(program.url + "/props").json()["media_marker"]
    prompt = {"prompt_string": f"a {marker} b", "multimodal_data": [FORMS[form]]}
    raw = http.post(program.url + "/completion", json={"prompt": prompt, "n_predict": 2})
    assert raw.status_code == 200, raw.text


@pytest.mark.parametrize("data", [LINES, f"data:image/png;base64,{PLAIN}", PLAIN.rstrip("=")])
def test_anthropics_sources_are_read_in_these_forms_too(program: Program, data: str) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content = [{"type": "image", "source": source}, text("?")]
    body = {"max_tokens": 2, "messages": [{"role": "user", "content": content}]}
    answer = http.post(program.url + "/v1/messages", json=body)
    assert answer.status_code == 200, answer.text


def test_the_responses_api_reads_an_address_in_an_object_too(program: Program) -> None:
    image = {"type": "input_image", "image_url": {"url": url_of(IMAGE)}}
    content = [image, {"type": "input_text", "text": "?"}]
    body = {"max_output_tokens": 2, "input": [{"role": "user", "content": content}]}
    answer = http.post(program.url + "/v1/responses", json=body)
    assert answer.status_code == 200, answer.text


# ---- images that cannot be read


@pytest.mark.parametrize("kind", BROKEN)
def test_an_unreadable_image_of_a_tool_is_left_out_and_named(program: Program, kind: str) -> None:
    found = chat(program, *tool_turn(text("got: "), part(url_of(BROKEN[kind])), text(".")))
    assert found.status_code == 200, found.text
    assert found.headers["x-ignored-parameters"] == "image in the result of call_1"
    said = chat(program, *tool_turn(text("got: [image omitted].")))
    assert said.json()["choices"] == found.json()["choices"]
    assert said.json()["usage"]["prompt_tokens"] == found.json()["usage"]["prompt_tokens"]
    refused = chat(program, user(part(url_of(BROKEN[kind])), text("?")))
    assert refused.status_code == 400
    assert "image 1 of 1 cannot be read: it" in refused.json()["error"]["message"]


def test_other_images_are_read_beside_one_that_is_left_out(program: Program) -> None:
    good, bad = part(url_of(IMAGE)), part(url_of(png(150, 90)[:400]))
    wanted = chat(program, *tool_turn(good, text(" [image omitted] "), good, text("x")))
    found = chat(program, *tool_turn(good, text(" "), bad, text(" "), good, text("x")))
    assert found.json()["choices"] == wanted.json()["choices"]


@pytest.mark.parametrize("url", [url_of(WEBP), "http://127.0.0.1:1/a.png", "file:///x", "%", ""])
def test_an_image_of_an_earlier_turn_does_not_end_the_chat(program: Program, url: str) -> None:
    first = user(text("a"), part(url))
    assert chat(program, first).status_code == 400
    later = chat(program, first, {"role": "assistant", "content": "no"}, user(text("and?")))
    assert later.status_code == 200, later.text
    assert later.headers["x-ignored-parameters"] == "image in messages[0]"
    # Clients keep a refused question, and ask the next one (Rapid-MLX #2378).
    assert chat(program, first, user(text("and?"))).status_code == 200
    # It is the last turn's image also if the answer is to go on with a text.
    begun = {"role": "assistant", "content": "I see"}
    assert chat(program, first, begun, continue_final_message=True).status_code == 400


def test_the_oldest_images_of_tools_are_left_out_of_too_many(program: Program) -> None:
    shot = part(url_of(png(28, 28, 1)))
    body = {"messages": tool_turn(*[shot] * (MOST_IMAGES + 1), text("."))}
    found = http.post(program.url + "/v1/chat/completions/input_tokens", json=body)
    assert found.status_code == 200, found.text
    assert found.headers["x-ignored-parameters"].count("image in the result of call_1") == 16
    refused = chat(program, user(*[shot] * (MOST_IMAGES + 1), text("?")))
    assert refused.status_code == 400


def test_all_apis_name_what_is_left_out(program: Program) -> None:
    data = base64.b64encode(WEBP).decode()
    source = {"type": "base64", "media_type": "image/webp", "data": data}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [
        {"type": "image", "source": source}]}  # fmt: skip
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    messages = [
        {"role": "user", "content": "see"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    items = [
        {"role": "user", "content": "see"},
        {"type": "function_call", "call_id": "t", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "t", "output": [
            {"type": "input_image", "image_url": f"data:image/webp;base64,{data}"}]},
    ]  # fmt: skip
    for path, body in {
        "messages": {"max_tokens": 2, "messages": messages},
        "messages/count_tokens": {"messages": messages},
        "responses": {"max_output_tokens": 2, "input": items},
        "responses/input_tokens": {"input": items},
    }.items():
        answer = http.post(f"{program.url}/v1/{path}", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-ignored-parameters"] == "image in the result of t", path


# ---- time and memory


def decoders(program: Program) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(program.process.pid).children(recursive=True):
        try:
            if process.name().startswith("decode-image"):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def test_others_are_answered_while_a_hostile_image_is_decoded(program: Program) -> None:
    slow = [part(url_of(slow_jpeg())), text("?")]
    answers: list[httpx.Response] = []
    body = {"max_tokens": 4, "messages": [user(*slow)]}
    asked = threading.Thread(
        target=lambda: answers.append(
            httpx.post(program.url + "/v1/chat/completions", json=body, timeout=120)
        )
    )
    asked.start()
    try:
        eventually(lambda: len(decoders(program)) == 2, 20)  # one for the request, one for the file
        lines: list[str] = []
        body = {"max_tokens": 60, "stream": True, "ignore_eos": True, "messages": [user(text("a"))]}
        with http.stream("POST", program.url + "/v1/chat/completions", json=body) as stream:
            lines += [line for line in stream.iter_lines() if line.startswith("data: {")]
        assert len(lines) >= 20  # a token may be a part of a letter
        image = chat(program, user(part(url_of(IMAGE)), text("?")))
        assert image.status_code == 200
        assert not answers  # the hostile request is not over yet
        assert decoders(program)
    finally:
        asked.join(120)
    (refused,) = answers
    assert refused.status_code == 400
    assert "takes over 5 s of processor time" in refused.json()["error"]["message"]


def test_a_client_that_leaves_ends_its_decoder(program: Program) -> None:
    body = {"max_tokens": 4, "messages": [user(part(url_of(slow_jpeg(60_000, 4000))), text("?"))]}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            program.url + "/v1/chat/completions",
            json=body,
            timeout=httpx.Timeout(30, read=1),
        )
    eventually(lambda: not decoders(program), 3)
    assert chat(program, user(text("a"))).status_code == 200


def test_a_prompt_that_is_too_long_is_refused_before_an_image_is_decoded(program: Program) -> None:
    """The file has a header alone, so decoding it would be refused."""
    size = struct.pack(">IIBBBBB", 4000, 4000, 8, 2, 0, 0, 0)
    header = png(1, 1)[:8] + struct.pack(">I", 13) + b"IHDR" + size + bytes(4)
    more = header + struct.pack(">I", 3) + b"IDAT" + bytes(7)
    content = [part(url_of(more)), text("word " * 600)]
    answer = chat(program, user(*content))
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "exceed_context_size_error", answer.text
    body = {"messages": [user(part(url_of(more)), text("?"))]}
    counted = http.post(program.url + "/v1/chat/completions/input_tokens", json=body)
    assert counted.json()["input_tokens"] > 30
    decoded = chat(program, user(part(url_of(more)), text("?")))
    assert "damaged or cut off" in json.dumps(decoded.json())
