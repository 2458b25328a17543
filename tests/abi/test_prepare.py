"""Environment variables that the native library reads are set before it is loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys

CODE = """
import json, subprocess
from offload.ggml.library.lib import library
from offload.ggml.library.lib import prepare
library()
# Child processes inherit the environment that C sees.
names = ("GGML_CUDA_REGISTER_HOST", "GGML_NO_BACKTRACE", "GGML_CUDA_GRAPH_OPT")
seen = subprocess.run(["env"], capture_output=True, text=True).stdout.splitlines()
found = dict(line.split("=", 1) for line in seen if line.split("=")[0] in names)
print(json.dumps([found, prepare()]))
"""


def loaded_with(**variables: str) -> tuple[dict[str, str], list[str]]:
    """The variables that C sees after the first load, and the notes of `prepare`."""
    names = ("GGML_CUDA_REGISTER_HOST", "GGML_NO_BACKTRACE", "GGML_CUDA_GRAPH_OPT")
    environ = {k: v for k, v in os.environ.items() if k not in names} | variables
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environ, capture_output=True, text=True, check=True
    )
    found, notes = json.loads(done.stdout)
    return found, notes


def test_the_first_load_sets_what_is_needed_and_says_nothing() -> None:
    assert loaded_with() == ({"GGML_CUDA_REGISTER_HOST": "1", "GGML_NO_BACKTRACE": "1"}, [])


def test_what_the_user_has_set_stays() -> None:
    found, notes = loaded_with(GGML_NO_BACKTRACE="0", GGML_CUDA_GRAPH_OPT="0")
    assert found["GGML_NO_BACKTRACE"] == "0"
    assert found["GGML_CUDA_GRAPH_OPT"] == "0"
    assert notes == []


def test_reordered_graphs_are_switched_off_with_a_line() -> None:
    found, notes = loaded_with(GGML_CUDA_GRAPH_OPT="1")
    assert "GGML_CUDA_GRAPH_OPT" not in found
    assert len(notes) == 1
    assert "GGML_CUDA_GRAPH_OPT" in notes[0]
