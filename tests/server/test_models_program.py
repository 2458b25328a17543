"""`specoffload serve` with several real models, as a program."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from program import SERVE, serving
from running import eventually, http

from specoffload.config.resolution import demo_file

NAMES = ("large", "small")
PROMPT = "def sum_of_squares(values):\n    total = 0\n    for value in values:\n" * 24


def answer(url: str, model: str, prompt: str = "def f(x):", **more: object) -> dict[str, object]:
    body = {"model": model, "prompt": prompt, "n_predict": 4, **more}
    found = http.post(url + "/completion", json=body, timeout=60)
    assert found.status_code == 200, found.text
    told: dict[str, object] = found.json()
    return told


def statuses(url: str) -> dict[str, str]:
    found = http.get(url + "/models").json()["data"]
    return {model["id"]: model["status"]["value"] for model in found}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two models under names of their own, and files that are none."""
    folder = tmp_path / "models"
    (folder / "large").mkdir(parents=True)
    (folder / "large" / "target.gguf").symlink_to(demo_file("target.gguf"))
    (folder / "small.gguf").symlink_to(demo_file("draft.gguf"))
    (folder / "mmproj-small.gguf").touch()
    (folder / "notes.txt").touch()
    return folder


def test_models_of_a_folder_with_presets(folder: Path, tmp_path: Path) -> None:
    presets = tmp_path / "models.ini"
    presets.write_text("[*]\nnp = 2\n\n[small]\nalias = little\nc = 1024\nload-on-startup = 1\n")
    flags = ("--device", "cpu", "--models-dir", str(folder), "--models-preset", str(presets))
    without_context = SERVE.index("--ctx-size")
    assert SERVE[without_context + 1] == "512"  # a typed flag takes precedence over the file
    with serving(*flags) as program:
        url = program.url
        eventually(lambda: statuses(url) == {"large": "unloaded", "small": "loaded"}, 60)
        assert answer(url, "little")["model"] == "small"
        assert answer(url, "large")["model"] == "large"
        assert statuses(url) == {"large": "loaded", "small": "unloaded"}
        props = http.get(url + "/props?model=large").json()
        assert props["default_generation_settings"]["n_ctx"] == 512
        assert props["total_slots"] == 2


def test_each_model_finds_its_prompts_again_on_the_disk(folder: Path, tmp_path: Path) -> None:
    small, large = str(folder / "small.gguf"), str(folder / "large")
    disk = ("--cache-disk", f"1GiB,{tmp_path / 'prompts'}", "--device", "cpu", "-c", "2048")
    with serving(*disk, small, large) as program:
        texts = {}
        for name in ("small", "large", "small", "large"):
            told = answer(program.url, name, PROMPT, temperature=0)
            cached = told["timings"]["cache_n"]  # type: ignore[index]
            if name in texts:
                assert cached > 256, told["timings"]
                assert told["content"] == texts[name]
            else:
                assert cached == 0
            texts[name] = told["content"]


def test_each_model_finds_its_prompts_again_in_ram(folder: Path) -> None:
    """Each switch closes a process. Idle time and `unload` close one, too."""
    flags = ("--models-dir", str(folder), "--device", "cpu", "-c", "2048")
    with serving(*flags) as program:
        texts = {}
        for name in ("small", "large", "small", "large"):
            told = answer(program.url, name, PROMPT, temperature=0)
            timings: dict[str, int] = told["timings"]  # type: ignore[assignment]
            if name in texts:
                assert timings["prompt_n"] <= 2
                assert timings["cache_n"] > 256
                assert timings["cache_disk_n"] == 0
                assert told["content"] == texts[name]
            else:
                assert timings["cache_n"] == 0
            texts[name] = told["content"]
        http.post(program.url + "/models/unload", json={"model": "large"})
        eventually(lambda: statuses(program.url)["large"] == "unloaded")
        again = answer(program.url, "large", PROMPT, temperature=0)
        assert again["timings"]["prompt_n"] <= 2  # type: ignore[index]
        # "large" is open. A killed engine loses its own prompts only.
        engines = psutil.Process(program.process.pid).children()
        engine = max(engines, key=lambda process: process.memory_info().rss)
        engine.kill()
        eventually(lambda: engine not in psutil.Process(program.process.pid).children())
        eventually(lambda: statuses(program.url)["large"] == "loaded", 30)
        for name, cached in (("large", 0), ("small", 256)):
            told = answer(program.url, name, PROMPT, temperature=0)
            assert told["timings"]["cache_n"] >= cached  # type: ignore[index]
            assert (told["timings"]["cache_n"] > 0) == (name == "small")  # type: ignore[index]
            assert told["content"] == texts[name]


def test_a_damaged_file_closes_no_model_and_a_new_file_is_found(folder: Path) -> None:
    """The folder is looked at again for a name that is unknown."""
    whole = demo_file("draft.gguf").read_bytes()
    (folder / "junk.gguf").write_bytes(b"junk" * 999)
    (folder / "short.gguf").write_bytes(whole[: len(whole) // 2])
    with serving("--models-dir", str(folder), "--device", "cpu") as program:
        assert answer(program.url, "small")["content"]
        for name, words in (("junk", "is not a GGUF file"), ("short", "the file ends at byte")):
            body = {"model": name, "prompt": "x", "n_predict": 2}
            refused = http.post(program.url + "/completion", json=body, timeout=60)
            assert refused.status_code == 500
            assert words in refused.text
            assert statuses(program.url) == dict.fromkeys(
                ("junk", "large", "short"), "unloaded"
            ) | {"small": "loaded"}
        (folder / "added.gguf").write_bytes(whole)
        assert answer(program.url, "added")["model"] == "added"
        program.process.send_signal(signal.SIGTERM)
        output, _ = program.process.communicate(timeout=30)
    assert output.count("closing small") == 1, output
    assert output.count("small: prompts are kept in RAM 100%") <= 1, output


def test_a_pipe_in_the_folder_keeps_no_server_from_ending(folder: Path) -> None:
    """SIGTERM while the folder is listed again and again. Its pipes are open, and have no data."""
    (folder / "more").mkdir()
    pipes = [folder / "x.gguf", folder / "more" / "mmproj-y.gguf"]
    for pipe in pipes:
        os.mkfifo(pipe)
    writers = [os.open(pipe, os.O_RDWR | os.O_NONBLOCK) for pipe in pipes]
    n_lists = 0

    def list_again() -> None:
        nonlocal n_lists
        with suppress(httpx.HTTPError):
            while http.get(program.url + "/models?reload=1").status_code == 200:
                n_lists += 1

    with serving("--models-dir", str(folder), "--device", "cpu") as program:
        assert set(statuses(program.url)) == set(NAMES)
        client = threading.Thread(target=list_again)
        client.start()
        eventually(lambda: n_lists > 3)
        program.process.send_signal(signal.SIGTERM)
        began_s = time.monotonic()
        assert program.process.wait(20) == 0
        assert time.monotonic() - began_s < 15
        client.join(20)
        output = program.process.communicate()[0]
    for writer in writers:
        os.close(writer)
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("vram", "together"),
    [
        ("20MiB", {"large": "loaded", "small": "loaded"}),
        ("4MiB", {"large": "unloaded", "small": "loaded"}),
    ],
)
def test_the_plan_says_whether_models_fit_together(
    folder: Path, vram: str, together: dict[str, str]
) -> None:
    flags = ("--device", "sim", "--vram", vram, "--models-dir", str(folder), "--models-max", "2")
    with serving(*flags, "--spec-type", "none") as program:
        texts = [answer(program.url, name, temperature=0)["content"] for name in ("large", "small")]
        assert statuses(program.url) == together
        assert answer(program.url, "large", temperature=0)["content"] == texts[0]


def test_models_share_two_devices(folder: Path) -> None:
    flags = ("--device", "sim,sim", "--vram", "16MiB,12MiB", "--models-dir", str(folder))
    with serving(*flags, "--models-max", "2", "--spec-type", "none") as program:
        for name in NAMES:
            assert answer(program.url, name)["content"]
        assert set(statuses(program.url).values()) == {"loaded"}
        program.process.send_signal(signal.SIGTERM)
        output, _ = program.process.communicate(timeout=30)
    assert "no plan" not in output
    assert output.count("MiB of the device") == 2, output
    assert output.count("of prompts (--cache-ram)") == 2


def test_a_command_line_that_names_no_list_of_models_is_refused(folder: Path) -> None:
    loose = folder / "loose.ini"
    loose.write_text(f"threads = 1\n[*]\nc = 512\n[a]\nmodel = {folder / 'small.gguf'}\n")
    for flags, words in (
        (["--models-dir", str(folder / "none")], "no such folder"),
        (["--models-dir", str(folder), "-m", "x.gguf"], "names one model"),
        (["--models-preset", str(folder / "none.ini")], "No such file"),
        (["a/x.gguf", "b/x.gguf"], "model 'x' appears multiple times"),
        (["--models-preset", str(loose)], "'default' names no model"),
        (["--models-preset", str(loose)], "for all models belong below [*]"),
    ):
        ended = subprocess.run([*SERVE, *flags], capture_output=True, text=True, timeout=60)
        assert ended.returncode == 2, (flags, ended.stderr)
        assert words in ended.stderr + ended.stdout, flags
        assert "Traceback" not in ended.stderr


def test_a_stop_after_a_client_left_in_the_middle_of_a_prompt_does_not_wait(folder: Path) -> None:
    """SIGTERM at once after the client: its prompt must not keep the server from ending."""
    for models in (
        [str(folder / "small.gguf"), str(folder / "large")],
        ["-m", str(folder / "large")],
    ):
        with serving(
            *models, "--device", "cpu", "-c", "4096", "-b", "4096", "-ub", "4096"
        ) as program:
            answer(program.url, "large")
            with pytest.raises(Exception, match="timed out"):
                http.post(
                    program.url + "/completion",
                    json={"model": "large", "prompt": [5] * 3900, "n_predict": 64},
                    timeout=0.1,
                )
            program.process.send_signal(signal.SIGTERM)
            began_s = time.monotonic()
            assert program.process.wait(20) == 0
            assert time.monotonic() - began_s < 15
