"""`specoffload serve` as a walk treats it: ended and started again, with killed engines."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
from image_parts import model_with_projector

from combinations.truth import CACHE_WORDS
from specoffload.config.resolution import demo_file

START_S = 240.0
NAMES = ("large", "small")
# Flags of each setting. {folder} is its own.
SETTINGS: dict[str, tuple[str, ...]] = {
    "pair": (),
    "no drafts": ("--spec-type", "none"),
    "split": ("--device", "sim", "--hybrid", "on", "--vram", "12MiB"),
    "models in turns": ("--models-preset", "{folder}/models.ini", "--models-max", "1"),
    "models": ("--models-preset", "{folder}/models.ini", "--models-max", "2"),
    "models that sleep": (
        "--models-preset", "{folder}/models.ini", "--models-max", "2", "--sleep-idle-seconds", "2",
    ),
    # A position has two dimensions within an image.
    "eyes": ("{folder}/images-qwen2vl.gguf", "--mmproj", "{folder}/images-qwen2vl-mmproj.gguf"),
    # An image's tokens see each other. Some layers attend to the last 512 tokens only.
    "eyes and windows": (
        "{folder}/images-gemma3.gguf", "--mmproj", "{folder}/images-gemma3-mmproj.gguf",
    ),
    # Most layers are recurrent, and a part of the experts has slots on the device.
    "eyes and states": (
        "{folder}/images-qwen3.5-35b-a3b.gguf", "--mmproj",
        "{folder}/images-qwen3.5-35b-a3b-mmproj.gguf", "--device", "sim", "--hybrid", "on",
        "--vram", "1200KiB",
    ),
}  # fmt: skip
_EYES = {"eyes": "qwen2vl", "eyes and windows": "gemma3", "eyes and states": "qwen3.5-35b-a3b"}


class WalkedServer:
    """A server's process and its folder. It may be ended and started again."""

    def __init__(self, setting: str, n_streams: int, folder: Path) -> None:
        self.folder, self.setting = folder, setting
        self.names = NAMES if setting.startswith("models") else ("",)
        self.has_eyes = setting in _EYES
        self.n_ctx = 2048 if self.has_eyes else 1024  # their vocabulary has short tokens
        if self.has_eyes:
            self._model, _ = model_with_projector(_EYES[setting], folder)
        self._version = 0
        self.write_presets()
        (folder / "slots").mkdir()
        words = [
            "serve", "--host", "127.0.0.1", "--port", "0", "--temp", "0", "--threads", "1",
            "--ctx-size", str(self.n_ctx), "--parallel", str(n_streams), "--cache-ram", "1",
            "--cache-disk", "16MiB,{folder}/prompts", "--slot-save-path", "{folder}/slots",
            "--metrics", "--shutdown-timeout", "60", *CACHE_WORDS, *SETTINGS[setting],
        ]  # fmt: skip
        if "--device" not in words:
            words += ["--device", "cpu"]
        self._words = [word.replace("{folder}", str(folder)) for word in words]
        self.lines: list[str] = []
        self.url = ""
        self.start()

    def write_presets(self) -> None:
        """Write the file of presets, in which the small model has changed."""
        self._version += 1
        large, small = (demo_file(f"{name}.gguf") for name in ("target", "draft"))
        (self.folder / "models.ini").write_text(
            f"[large]\nmodel = {large}\n\n[small]\nmodel = {small}\nalias = little\n"
            f"top-k = {20 + self._version}\nload-on-startup = 1\n"
        )

    def model_file(self, name: str) -> Path:
        """The file of a model. `name` is empty if there is only one."""
        if self.has_eyes:
            return self._model
        return demo_file("draft.gguf" if name == "small" else "target.gguf")

    def start(self) -> None:
        """Start the program, and wait until it is healthy."""
        self._began = len(self.lines)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "specoffload", *self._words], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env={**os.environ, "SPECOFFLOAD_WITHOUT": "profile"},
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()
        wait_for("the program starts", lambda: self._found() or not self.is_running)
        found = self._found()
        assert found, "it does not start:\n" + self.log
        self.url = found[1]
        self.wait_healthy()

    def _found(self) -> re.Match[str] | None:
        return re.search(r"listening on (\S+)", "".join(self.lines[self._began :]))

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.lines.extend(process.stdout)

    def wait_healthy(self) -> None:
        wait_for("the server is healthy", lambda: self._is_healthy() or not self.is_running)

    def _is_healthy(self) -> bool:
        try:
            return httpx.get(self.url + "/health", timeout=10).status_code == 200
        except httpx.TransportError:
            return False

    @property
    def log(self) -> str:
        return "".join(self.lines)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill_engine(self) -> bool:
        """Kill the largest child, which has a model. False: there is none."""
        engines: dict[int, psutil.Process] = {}  # by resident bytes
        for child in psutil.Process(self._process.pid).children():
            with suppress(psutil.Error):  # it has just ended
                if "forkserver" not in " ".join(child.cmdline()):
                    engines[child.memory_info().rss] = child
        if engines:
            engines[max(engines)].kill()
        return bool(engines)

    def n_engines(self) -> int:
        """The number of its processes that have loaded the native library."""
        n = 0
        for child in psutil.Process(self._process.pid).children():
            with suppress(psutil.Error):  # it has just ended
                n += any("libllama" in part.path for part in child.memory_maps())
        return n

    def most_open(self) -> int:
        """The most files, sockets and pipes, or threads, that one of its processes has."""
        program = psutil.Process(self._process.pid)
        most = 0
        for process in (program, *program.children(recursive=True)):
            with suppress(psutil.Error):  # it has just ended
                most = max(most, process.num_fds(), process.num_threads())
        return most

    def terminate(self) -> None:
        """SIGTERM, as a service's stop. Returns at once."""
        self._process.send_signal(signal.SIGTERM)

    def wait_ended(self) -> None:
        """Wait for the end. Raises AssertionError if it is none that a user may see."""
        try:
            code = self._process.wait(120)
        except subprocess.TimeoutExpired:
            raise AssertionError("it does not end within 120 s of SIGTERM:\n" + self.log) from None
        self._close()
        assert code == 0, f"it ends with code {code}:\n{self.log[-2000:]}"

    def kill(self) -> None:
        if self.is_running:
            self._process.kill()
            self._process.wait()
        self._close()

    def _close(self) -> None:
        self._reader.join(10)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def check_log(self) -> None:
        """No line is a traceback."""
        if "Traceback" in self.log:
            at = self.log.index("Traceback")
            raise AssertionError(
                f"a traceback in the log: {self.log[max(0, at - 300) : at + 3000]}"
            )


def wait_for(what: str, is_true: object, timeout_s: float = START_S) -> None:
    """Wait until it is true. Raises AssertionError after `timeout_s`."""
    assert callable(is_true)
    end_s = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < end_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)
