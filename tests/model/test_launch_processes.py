"""Published command lines as real processes: each starts on a tiny model of its architecture,
answers one token, and ends with exit code 0."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from test_launch_lines import LAUNCHES, STARTING, Launch

from lab.synth import write_preset

ROOT = Path(__file__).parents[2]
LIMIT_S = 120
# Where a port of this machine is asked for, and a text is to be short.
ALSO = {
    "serve": ("--host", "127.0.0.1", "--port", "0"),
    "run": ("-n", "1"),
    "bench": ("-n", "1", "-r", "1"),
}


def words_of(launch: Launch, models: Path, folder: Path) -> list[str]:
    """The line's words, over files that exist."""
    target, draft = models / f"launch-{launch.preset}.gguf", models / "launch-draft.gguf"
    for preset, path in ((launch.preset, target), ("qwen2.5-0.5b", draft)):
        if not path.exists():
            write_preset(preset, path, size="tiny", seed=3)
    places = {"TARGET": str(target), "DRAFT": str(draft)}
    places |= {word: str(folder / word.lower()) for word in ("CACHE", "SLOTS", "LOOKUP", "LOGS")}
    (folder / "slots").mkdir()
    return [launch.command, *(places.get(w, w) for w in launch.words), *ALSO[launch.command]]


def start(launch: Launch, models: Path, folder: Path) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", "specoffload", *words_of(launch, models, folder)],
        env={
            **os.environ, **launch.environ, "PYTHONPATH": path,
            "SPECOFFLOAD_PROFILE_DIR": str(models / "launch-profiles"),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def url_of(process: subprocess.Popen[str]) -> str:
    """The server's address, once its model is loaded."""
    assert process.stdout is not None
    url = ""
    for line in process.stdout:
        url = line.split()[-1] if line.startswith("listening on ") else url
        if line.startswith("model loaded"):
            return url
    assert process.stderr is not None
    pytest.fail(process.stderr.read())


def ask(url: str, launch: Launch) -> int:
    """The tokens of an answer of one."""
    headers = {"Content-Type": "application/json"}
    if "--api-key" in launch.words:
        headers["Authorization"] = "Bearer " + launch.words[launch.words.index("--api-key") + 1]
    body = json.dumps({"prompt": "def f(n):", "max_tokens": 1, "ignore_eos": True}).encode()
    with urlopen(Request(url + "/v1/completions", body, headers), timeout=LIMIT_S) as response:
        return int(json.load(response)["usage"]["completion_tokens"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "launch", STARTING, ids=[f"{i}: {launch.source}" for i, launch in enumerate(STARTING)]
)
def test_a_published_line_starts_and_answers(launch: Launch, models: Path, tmp_path: Path) -> None:
    process = start(launch, models, tmp_path)
    timer = threading.Timer(LIMIT_S, process.kill)
    timer.start()
    try:
        if launch.command == "serve":
            assert ask(url_of(process), launch) == 1
            process.send_signal(signal.SIGTERM)
        _, errors = process.communicate()
        assert process.returncode == 0, errors
        assert "Traceback" not in errors
    finally:
        timer.cancel()
        process.kill()
        process.communicate()


def test_all_but_the_line_for_several_machines_are_started() -> None:
    benches = [launch for launch in LAUNCHES if launch.command == "bench"]
    assert len(STARTING) == len(LAUNCHES) - len(benches) - 1 == 12
