"""A server whose files have names that are no UTF-8 answers every route with text that is."""

from __future__ import annotations

import os
from pathlib import Path

from program import serving
from running import http

from specoffload.config.resolution import demo_file


def test_names_that_are_no_utf_8_are_served_and_told(tmp_path: Path) -> None:
    model, draft, slots = (
        tmp_path / os.fsdecode(name) for name in (b"m\xff.gguf", b"d\xff.gguf", b"s\xff")
    )
    model.symlink_to(demo_file("target.gguf"))
    draft.symlink_to(demo_file("draft.gguf"))
    slots.mkdir()
    flags = ("-m", str(model), "--draft", str(draft), "--slot-save-path", str(slots), "--metrics")
    with serving(*flags, "--slots") as program:
        for path in (
            "/v1/models",
            "/v1/models/m\ufffd",
            "/props",
            "/server_info",
            "/metrics",
            "/slots",
        ):
            answer = http.get(program.url + path)
            assert answer.status_code == 200, (path, answer.text)
            answer.content.decode("utf-8")
        assert http.get(program.url + "/v1/models").json()["data"][0]["id"] == "m\ufffd"
        body = {"prompt": "def f(", "max_tokens": 4}
        written = http.post(program.url + "/v1/completions", json=body).json()
        assert written["model"] == "m\ufffd"
        for name, status in (("saved", 200), ("half\udcff", 400)):
            text = b'{"filename": "%s"}' % name.encode("ascii", "backslashreplace")
            saved = http.post(
                program.url + "/slots/0?action=save",
                content=text,
                headers={"Content-Type": "application/json"},
            )
            assert saved.status_code == status, saved.text
        assert [file.name for file in slots.iterdir()] == ["saved"]
