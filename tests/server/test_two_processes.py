"""The API process never loads the native library: what is wrong with a file, the engine says."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
from running import eventually, http

PROGRAM = Path(__file__).with_name("serve_and_tell.py")


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(PROGRAM), "serve", *map(str, arguments), "--port", "0"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def maps_of(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def test_the_api_process_serves_without_the_native_library() -> None:
    with start("--no-spec", "--ctx-size", "256", "--threads", "1") as process:
        try:
            assert process.stdout is not None
            url = next(line for line in process.stdout if "listening on" in line).split()[-1]
            eventually(lambda: http.get(url + "/health").status_code == 200, 60)
            body = {"prompt": "def f(", "max_tokens": 4}
            answer = http.post(url + "/v1/completions", json=body)
            assert answer.status_code == 200
            assert answer.json()["usage"]["completion_tokens"] > 0
            assert "libllama" not in maps_of(process.pid)
            engines = psutil.Process(process.pid).children()
            assert any("libllama" in maps_of(engine.pid) for engine in engines)
            process.send_signal(signal.SIGTERM)
            output, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert output.splitlines()[-1] == "no llama_cpp"
    assert "Traceback" not in errors


def test_a_bad_model_is_the_engines_sentence_and_exit_code_2(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("once upon a time\n" * 100)
    with start(path) as process:
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert output.splitlines()[-1] == "no llama_cpp"
    sentences = [line for line in errors.splitlines() if line.startswith("specoffload:")]
    assert len(sentences) == 1
    assert "not a GGUF file" in sentences[0]
    assert "Traceback" not in errors
