"""Images on the page: chosen, pasted and dropped, sent, shown after a reload, and refused."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Seen, send, wait_for_answer
from conftest import shown
from image_parts import model_with_projector, png
from program import serving
from running import eventually

from offload.images.building import image_library

IMAGE = png(60, 40, 1)
URL = "data:image/png;base64," + base64.b64encode(IMAGE).decode()
# Gives the page an event with an image, as a person's paste or drop does.
_GIVE = """([kind, url]) => {
  const bytes = Uint8Array.from(atob(url.split(",")[1]), (c) => c.charCodeAt(0));
  const data = new DataTransfer();
  data.items.add(new File([bytes], "image.png", { type: "image/png" }));
  const init = { bubbles: true, cancelable: true };
  const event = kind === "paste"
    ? new ClipboardEvent("paste", { ...init, clipboardData: data })
    : new DragEvent("drop", { ...init, dataTransfer: data });
  document.getElementById("composer-text").dispatchEvent(event);
}"""


@pytest.fixture(scope="module")
def images_url(browser: Any, models: Path) -> Iterator[str]:
    image_library()
    model, projector = model_with_projector("qwen2vl", models)
    flags = ("--mmproj", str(projector), "--predict", "8", "-c", "2048")
    with serving(str(model), *flags) as program:
        yield program.url


@pytest.fixture
def images_page(browser: Any, images_url: str, seen: Seen) -> Iterator[Any]:
    with shown(browser, images_url, seen) as page:
        yield page


@pytest.mark.parametrize("kind", ["paste", "drop", "choose"])
def test_an_image_is_sent_and_shown_again(images_page: Any, seen: Seen, kind: str) -> None:
    page = images_page
    if kind == "choose":
        file = {"name": "a.png", "mimeType": "image/png", "buffer": IMAGE}
        with page.expect_file_chooser() as chooser:
            page.get_by_role("button", name="Add images").click()
        chooser.value.set_files(file)
    else:
        page.evaluate(_GIVE, [kind, URL])
    page.locator("#tray .picture").wait_for()
    send(page, "what is it?")
    wait_for_answer(page)
    part = {"type": "image_url", "image_url": {"url": URL}}
    wanted = [{"role": "user", "content": [part, {"type": "text", "text": "what is it?"}]}]
    assert seen.bodies[-1]["messages"] == wanted
    assert page.locator("#tray").is_hidden()
    page.reload()
    wait_for_answer(page)
    assert page.locator("article.user .picture").get_attribute("src") == URL


def test_an_image_can_be_removed_and_sent_without_words(images_page: Any, seen: Seen) -> None:
    page = images_page
    page.evaluate(_GIVE, ["paste", URL])
    page.get_by_role("button", name="Remove the image").click()
    assert page.get_by_role("button", name="Send").is_disabled()
    page.evaluate(_GIVE, ["drop", URL])
    page.locator("#tray .picture").wait_for()
    page.get_by_role("button", name="Send").click()
    wait_for_answer(page)
    assert [part["type"] for part in seen.bodies[-1]["messages"][0]["content"]] == ["image_url"]


def test_a_model_without_a_projector_refuses_images_on_the_page(page: Any) -> None:
    assert page.locator("#attach").is_hidden()
    page.evaluate(_GIVE, ["paste", URL])
    eventually(lambda: "reads no images" in page.locator("#banner").inner_text())
    assert page.locator("#tray").is_hidden()
