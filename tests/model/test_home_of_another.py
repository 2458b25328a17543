"""A HOME that this user may not enter, and a model file without a pre-tokenizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from offload.header_check import tokenizer_reason

ROOT = Path(__file__).parents[2]
# Root may enter every folder, unless these capabilities are dropped.
AS_OTHERS = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Another user's home, as after `sudo -u` or with `docker run --user`."""
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can give a folder to another user")
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    os.chown(home, 65534, 65534)
    return home


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("doctor", ""),
        ("models", "is left out: this user may not read it"),
        ("plan MODEL", ""),
        ("run -m MODEL -no-cnv -p x -n 1 --device cpu", ""),
        ("run -hf u/r -p x", "cannot be written (Permission denied): have HF_HOME name"),
        ("plan u/r --offline", "u/r is not in"),
    ],
)
def test_a_home_of_another_user_ends_no_command_in_a_traceback(
    words: str, said: str, home: Path
) -> None:
    command = words.replace("MODEL", str(ROOT / "specoffload/demo/target.gguf")).split()
    others = ("HF_", "XDG_", "SPECOFFLOAD_PROFILE_DIR")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(others)}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [*AS_OTHERS, sys.executable, "-m", "specoffload", *command],
        env={**kept, "HOME": str(home), "PYTHONPATH": path, "HF_ENDPOINT": "http://127.0.0.1:1"},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=100,
    )
    assert "Traceback" not in done.stderr
    assert said in " ".join((done.stdout + done.stderr).split())
    assert done.returncode in (0, 1, 2)


@pytest.mark.parametrize(
    ("metadata", "is_said"),
    [
        ({"tokenizer.ggml.model": "gpt2"}, True),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": ""}, True),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2"}, False),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "default"}, False),
        ({"tokenizer.ggml.model": "llama"}, False),
        ({}, False),
    ],
)
def test_a_missing_pre_tokenizer_is_said(metadata: dict[str, object], is_said: bool) -> None:
    words = tokenizer_reason(metadata)
    assert ("pre-tokenizer" in words) == is_said
