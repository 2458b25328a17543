"""Images in requests: forms of all APIs, caches, files of the server's machine, refusals."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from image_parts import model_with_projector, png
from program import Program, serving
from running import Running, http

from offload.errors import BadRequest
from offload.images.building import image_library
from specoffload.server.api.images import MOST_IMAGES, ConversationImages

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
    return folder


@pytest.fixture(scope="module")
def program(models: Path, folder: Path) -> Iterator[Program]:
    image_library()
    model, projector = model_with_projector("qwen2vl", models)
    with serving(str(model), "--mmproj", str(projector), "--media-path", str(folder)) as running:
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
    assert "<__media_" in rendered["prompt"]


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
        ("http://127.0.0.1:1/x.png", "fetches no addresses"),
        ("file:///etc/passwd", "has no file"),
        ("file://../image.png", "has no file"),
        ("file://out/passwd", "has no file"),
    ],
)
def test_a_bad_image_gets_a_400_and_the_server_goes_on(
    program: Program, url: str, words: str
) -> None:
    response = http.post(program.url + "/v1/chat/completions", json=openai_body(url))
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]
    assert http.get(program.url + "/health").status_code == 200


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
    images = ConversationImages(are_read=True, media_path=None)
    markers = {images.take("messages[0]", URL) for _ in range(MOST_IMAGES)}
    assert len(markers) == 1
    assert images.found is not None
    assert images.found.files == (IMAGE,) * MOST_IMAGES
    with pytest.raises(BadRequest, match=f"may have {MOST_IMAGES} images"):
        images.take("messages[0]", URL)
