"""Images in requests: forms of all APIs, caches, files of the server's machine, refusals."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_hosts import file, host
from image_parts import model_with_projector, png
from program import SERVE, Program, serving
from running import Running, http

from lab.synth.mtp import write_mtp
from lab.synth.projector import write_projector
from offload.errors import BadRequest
from offload.images.building import image_library
from offload.model_file import read_facts
from specoffload.server.api.images import MOST_IMAGES, ConversationImages, MediaRules

IMAGE = png(150, 90, 1)
DATA = base64.b64encode(IMAGE).decode()
URL = f"data:image/png;base64,{DATA}"
NO_PROJECTOR = "image input is not supported - hint: if this is unexpected, you may need to provide"


def openai_body(url: str = URL, **more: Any) -> dict[str, Any]:
    content = [
        {"type": "text", "text": "Look: "},
        {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
        {"type": "text", "text": "what is it?"},
    ]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 8, **more}


def anthropic_body(**more: Any) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    content = [
        {"type": "text", "text": "Look: "},
        {"type": "image", "source": source},
        {"type": "text", "text": "what is it?"},
    ]
    return {"messages": [{"role": "user", "content": content}], **more}


def responses_body(**more: Any) -> dict[str, Any]:
    content = [
        {"type": "input_text", "text": "Look: "},
        {"type": "input_image", "image_url": URL},
        {"type": "input_text", "text": "what is it?"},
    ]
    return {"input": [{"role": "user", "content": content}], **more}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    (folder / "image.png").write_bytes(IMAGE)
    (folder / "out").symlink_to("/etc")
    (folder / "loop").symlink_to("loop")
    return folder


@pytest.fixture(scope="module")
def program(models: Path, folder: Path) -> Iterator[Program]:
    image_library()
    model, projector = model_with_projector("qwen2vl", models)
    media = ("--media-path", str(folder), "--allow-media-urls", "all")
    with serving(str(model), "--mmproj", str(projector), *media) as running:
        yield running


def answered(program: Program, path: str, body: dict[str, Any]) -> Any:
    response = http.post(program.url + path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_all_apis_give_the_answer_to_an_image(program: Program) -> None:
    first = answered(program, "/v1/chat/completions", openai_body())
    text, usage = first["choices"][0]["message"]["content"], first["usage"]
    again = answered(program, "/v1/chat/completions", openai_body())
    assert again["choices"][0]["message"]["content"] == text
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    other = answered(program, "/v1/messages", anthropic_body(max_tokens=8))
    assert other["content"][0]["text"] == text
    counted = answered(program, "/v1/messages/count_tokens", anthropic_body())
    assert counted == {"input_tokens": usage["prompt_tokens"]}
    third = answered(program, "/v1/responses", responses_body(max_output_tokens=8))
    assert third["output"][0]["content"][0]["text"] == text
    local = answered(program, "/v1/chat/completions", openai_body("file://image.png"))
    assert local["choices"][0]["message"]["content"] == text
    rendered = answered(program, "/apply-template", {"messages": openai_body()["messages"]})
    with host(file(IMAGE)) as remote:
        fetched = answered(program, "/v1/chat/completions", openai_body(remote.url + "/i.png"))
    assert fetched["choices"][0]["message"]["content"] == text
    marker = http.get(program.url + "/props").json()["media_marker"]
    assert rendered["prompt"].count(marker) == 1
    asked = {"messages": openai_body()["messages"]}
    for path, body in (("chat/completions", asked), ("responses", responses_body())):
        counted = answered(program, f"/v1/{path}/input_tokens", body)
        assert counted["input_tokens"] == usage["prompt_tokens"]


def test_raw_prompts_with_images_are_continued(program: Program) -> None:
    marker = http.get(program.url + "/props").json()["media_marker"]
    prompt = {"prompt_string": f"Look: {marker} what is it?", "multimodal_data": [DATA]}
    text = {"prompt_string": "Look: what is it?"}
    first = answered(program, "/completion", {"prompt": prompt, "n_predict": 8})
    assert first["prompt"] == prompt["prompt_string"]
    assert first["tokens_evaluated"] > 10
    second = answered(program, "/v1/completions", {"prompt": prompt, "max_tokens": 8, "n": 2})
    assert [choice["text"] for choice in second["choices"]] == [first["content"]] * 2
    assert second["usage"]["prompt_tokens"] == first["tokens_evaluated"]
    several = answered(program, "/completion", {"prompt": [text, prompt, "Hi"], "n_predict": 8})
    assert several[1]["content"] == first["content"]
    alone = answered(program, "/completion", {"prompt": text["prompt_string"], "n_predict": 8})
    assert several[0]["content"] == alone["content"]


def test_bad_raw_prompts_get_llama_servers_words(program: Program, server: Running) -> None:
    marker = http.get(program.url + "/props").json()["media_marker"]

    def refused(url: str, prompt: Any, **more: Any) -> str:
        response = http.post(url + "/v1/completions", json={"prompt": prompt, **more})
        assert response.status_code == 400, response.text
        return str(response.json()["error"]["message"])

    def prompt(text: Any, *files: Any) -> dict[str, Any]:
        return {"prompt_string": text, "multimodal_data": list(files)}

    no_image = base64.b64encode(b"no image").decode()
    for words, given in {
        '"prompt" elements must be a string, a list of tokens, a JSON object': {"text": "x"},
        "Failed to tokenize prompt: prompt has 0 media markers for 1 files": prompt("x", DATA),
        "Failed to tokenize prompt: prompt has 2 media": prompt(f"{marker}{marker} x", DATA),
        "prompt.multimodal_data[0]: the image is not base64": prompt(f"{marker} x", "$"),
        "image 1 of 1 cannot be read: it is no image of a known type": prompt(
            f"{marker} x", no_image
        ),
        "prompt: multimodal_data must be a list of files": prompt(f"{marker} x", 7),
        "prompt: prompt_string must be text if": prompt([1, 2], DATA),
        f"prompt: a request may have {MOST_IMAGES} images": prompt("x", *[DATA] * 65),
    }.items():
        assert refused(program.url, given).startswith(words)
    assert "without images" in refused(program.url, prompt(f"{marker} x", DATA), echo=True)
    assert "prompt as text" in refused(program.url, prompt(f"{marker} x", DATA), suffix="y")
    assert refused(server.url, prompt("x", DATA)) == (
        "Multimodal data provided, but model does not support multimodal requests."
    )
    embedded = http.post(program.url + "/v1/embeddings", json={"input": prompt("x", DATA)})
    assert embedded.status_code == 400


def test_images_in_results_of_tools_are_read(program: Program) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [
        {"type": "text", "text": "a picture"}, {"type": "image", "source": source},
    ]}  # fmt: skip
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    body = {
        "messages": [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ],
        "tools": [{"name": "look", "input_schema": {"type": "object", "properties": {}}}],
    }
    with_image = answered(program, "/v1/messages/count_tokens", body)["input_tokens"]
    del result["content"][1]  # type: ignore[attr-defined]
    assert with_image > answered(program, "/v1/messages/count_tokens", body)["input_tokens"] + 10


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:image/png;base64," + base64.b64encode(IMAGE[:99]).decode(), "damaged or cut off"),
        ("data:image/png;base64,$", "not base64"),
        ("data:image/png;base64,", "empty"),
        ("data:text/plain;base64,aGk=", "is not data:image/TYPE;base64"),
        ("http://127.0.0.1:1/x.png", "'127.0.0.1' cannot be connected to"),
        ("file:///etc/passwd", "has no file"),
        ("file://../image.png", "has no file"),
        ("file://out/passwd", "has no file"),
        ("file://loop", "has no file"),
        ("file://image.png\0", "has no file"),
        ("file://" + "x" * 5000, "has no file"),
        ("file://\ud800", "has no file"),
    ],
)
def test_a_bad_image_gets_a_400_and_the_server_goes_on(
    program: Program, url: str, words: str
) -> None:
    body = json.dumps(openai_body(url))  # in ASCII, because a client may send half a pair
    response = http.post(program.url + "/v1/chat/completions", content=body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]
    assert http.get(program.url + "/health").status_code == 200


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
        {"type": "input_video", "input_video": {"data": "AAAA"}},
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
    ],
)
def test_sound_and_video_are_refused_in_one_sentence(
    program: Program, server: Running, part: dict[str, Any]
) -> None:
    body = {"messages": [{"role": "user", "content": [part]}]}
    kind = "audio" if "audio" in part["type"] else "video"
    for url in (program.url, server.url):
        response = http.post(url + "/v1/chat/completions", json=body)
        assert response.status_code == 400
        words = response.json()["error"]["message"]
        assert words.startswith(f"{kind} input is not supported")
        assert "\n" not in words


def test_a_server_whose_model_aborts_on_images_does_not_start(models: Path) -> None:
    """It ends with one sentence, before any request with an image could end the engine."""
    model, projector = write_mtp(models, "glm4moe"), models / "glm4moe-serve-mmproj.gguf"
    write_projector(projector, "qwen2.5vl_merger", read_facts(model).number("embedding_length"))
    words = [*SERVE, str(model), "--mmproj", str(projector), "--device", "cpu"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert f"cannot open {model}, the library stopped at an assertion" in last
    assert "does not support multimodal" in last
    assert done.stderr.count("stopped at an assertion") == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", openai_body()),
        ("/v1/messages", anthropic_body(max_tokens=8)),
        ("/v1/responses", responses_body()),
    ],
)
def test_without_a_projector_images_are_refused_in_llama_servers_words(
    server: Running, path: str, body: dict[str, Any]
) -> None:
    response = http.post(server.url + path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(NO_PROJECTOR)


def test_a_request_may_have_many_images_but_not_any_number() -> None:
    images = ConversationImages(MediaRules(), are_read=True)
    markers = {images.take("messages[0]", URL) for _ in range(MOST_IMAGES)}
    assert len(markers) == 1
    found = asyncio.run(images.fetched(asyncio.Semaphore()))
    assert [image.file for image in found] == [IMAGE] * MOST_IMAGES
    with pytest.raises(BadRequest, match=f"may have {MOST_IMAGES} images"):
        images.take("messages[0]", URL)
