"""The page with several models: a list to choose from, and the progress of loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from browser import Seen, send, served, shown, wait_for_answer
from running import eventually

from specoffload.config.resolution import demo_file


def test_the_chosen_model_answers_and_stays_chosen(
    browser: Any, seen: Seen, tmp_path: Path
) -> None:
    for name, file in (("one", "target.gguf"), ("two", "draft.gguf")):
        (tmp_path / f"{name}.gguf").symlink_to(demo_file(file))
    with (
        served("--models-dir", str(tmp_path), "-n", "8") as url,
        shown(browser, url, seen) as page,
    ):
        choice = page.get_by_label("Model", exact=True)
        options = choice.locator("option")
        assert options.all_inner_texts() == ["one (unloaded)", "two (unloaded)"]
        for n, name in enumerate(("two", "one"), 1):
            choice.select_option(name)
            choice.blur()
            send(page, "def f(x):")
            wait_for_answer(page, n)
            assert seen.bodies[-1]["model"] == name
            page.get_by_role("option", name=name, exact=True).wait_for(state="attached")
        page.reload()
        page.locator("article.assistant").first.wait_for()
        eventually(lambda: choice.input_value() == "one")
        page.get_by_role("tab", name="Why").click()
        page.locator("#why").get_by_text("one").first.wait_for()


def test_after_a_failed_load_the_page_goes_back_to_the_model_that_works(
    browser: Any, seen: Seen, tmp_path: Path
) -> None:
    for name, file in (("one", "target.gguf"), ("two", "draft.gguf")):
        (tmp_path / f"{name}.gguf").symlink_to(demo_file(file))
    (tmp_path / "junk.gguf").write_bytes(b"junk" * 999)
    with (
        served("--models-dir", str(tmp_path), "-n", "8") as url,
        shown(browser, url, seen) as page,
    ):
        choice = page.get_by_label("Model", exact=True)
        welcome, banner = page.locator("#welcome"), page.locator("#banner")
        choice.select_option("two")
        welcome.get_by_text("two is not loaded. Your first message loads it").wait_for()
        page.get_by_role("button", name="Load it now").click()
        welcome.get_by_text("two is ready.").wait_for(timeout=60_000)
        assert page.get_by_role("button", name="Load it now").count() == 0
        assert choice.input_value() == "two"

        choice.select_option("junk")
        page.get_by_role("button", name="Load it now").click()  # while the list has the focus
        banner.get_by_text("junk could not be loaded: ").wait_for(timeout=60_000)
        assert "is not a GGUF file" in banner.inner_text()
        assert banner.inner_text().endswith("Messages go to two again.")
        assert choice.input_value() == "two"
        assert "junk (failed)" in choice.locator("option").all_inner_texts()

        choice.select_option("junk")
        welcome.get_by_text("junk could not be loaded: ").wait_for()
        assert banner.is_hidden()
        send(page, "def f(x):")
        error = wait_for_answer(page).locator(".error").inner_text()
        assert "is not a GGUF file" in error
        banner.get_by_text("junk could not be loaded. Messages go to two again.").wait_for()
        send(page, "def f(x):")
        assert wait_for_answer(page, 2).locator(".meter-summary").inner_text().startswith("two")
        assert seen.bodies[-1]["model"] == "two"
        assert banner.is_hidden()


def test_a_server_of_one_model_shows_no_list(page: Any) -> None:
    assert page.locator("#model-choice").is_hidden()
    assert page.locator("#model-name").is_visible()
