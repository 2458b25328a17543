"""`specoffload serve --cache-disk`: a prompt is evaluated once, also if the server starts again."""

from __future__ import annotations

import signal
import stat
import subprocess
from pathlib import Path
from random import Random
from time import sleep

import pytest
from program import ENVIRONMENT, SERVE, Program, serving
from running import eventually, http

N_CTX = ("--ctx-size", "2048", "--device", "cpu", "--spec-type", "none")


def text_of(seed: int, n_lines: int = 60) -> str:
    drawn = Random(seed)
    lines = (f"    x{drawn.randrange(100)} = y{drawn.randrange(100)} + {i}" for i in range(n_lines))
    return "def f():\n" + "\n".join(lines) + "\n"


def complete(program: Program, prompt: str) -> tuple[str, int, int, int]:
    """Return the answer, and the numbers of prompt tokens: all, cached, and read from the disk."""
    with program.client() as client:
        answer = client.completions.create(model="any", prompt=prompt, max_tokens=6)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    n_cached = answer.usage.prompt_tokens_details.cached_tokens or 0
    timings = answer.model_extra["timings"]
    return answer.choices[0].text, answer.usage.prompt_tokens, n_cached, timings["cache_disk_n"]


def end(program: Program) -> str:
    """End the server as a service manager does, and return the rest of its output."""
    program.process.send_signal(signal.SIGTERM)
    output, _ = program.process.communicate(timeout=30)
    assert program.process.returncode == 0, output
    return output


def test_the_next_server_reads_the_prompt_from_the_disk(tmp_path: Path) -> None:
    flags = (*N_CTX, "--cache-disk", f"1GiB,{tmp_path / 'prompts'}", "--metrics")
    with serving(*flags) as program:
        first, n_prompt, n_cached, n_disk = complete(program, text_of(1))
        assert n_cached == n_disk == 0
        output = end(program)
    assert "prompts are written to the disk 100%" in output
    (file,) = (tmp_path / "prompts").glob("*.prompt")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with serving(*flags) as program:
        again, n_prompt, n_cached, n_disk = complete(program, text_of(1))
        assert again == first
        assert n_cached == n_disk == n_prompt - 1
        metrics = http.get(program.url + "/metrics").text
        assert f"specoffload:prompt_tokens_from_disk_total {n_disk}.0\n" in metrics
        output = end(program)
    assert "1 prompt of this model found (--cache-disk)" in output
    assert f"prompt {n_prompt} ({n_disk} read from the disk)" in output


def test_two_servers_share_a_folder(tmp_path: Path) -> None:
    flags = (*N_CTX, "--cache-disk", f"1GiB,{tmp_path}", "--cache-ram", "0", "--parallel", "1")
    with serving(*flags) as one, serving(*flags) as two:
        first, *_ = complete(one, text_of(1))
        complete(one, text_of(2))  # takes the only slot, so the first prompt goes to the disk
        eventually(lambda: len(list(tmp_path.glob("*.prompt"))) == 1, 10)
        again, n_prompt, n_cached, n_disk = complete(two, text_of(1))
        assert again == first
        assert n_cached == n_disk == n_prompt - 1


@pytest.mark.parametrize("n", [3])
def test_a_killed_server_leaves_whole_files_only(tmp_path: Path, n: int) -> None:
    """It is killed while requests evict each other's prompts to the disk."""
    flags = (*N_CTX, "--cache-disk", f"1GiB,{tmp_path}", "--cache-ram", "0", "--parallel", "1")
    wanted: dict[int, str] = {}
    drawn = Random(1)
    for _ in range(n):
        with serving(*flags) as program:
            for seed in range(3):
                text, n_prompt, n_cached, n_disk = complete(program, text_of(seed))
                assert wanted.setdefault(seed, text) == text
                assert n_disk in (0, n_cached)
            sleep(drawn.uniform(0, 0.02))
            program.process.kill()
            output, _ = program.process.communicate(timeout=30)
            assert "is not used" not in output
    with serving(*flags) as program:
        found = [complete(program, text_of(seed)) for seed in range(2)]
    assert [text for text, *_ in found] == [wanted[0], wanted[1]]
    assert all(n_disk == n_prompt - 1 for _, n_prompt, _, n_disk in found)


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = subprocess.run(
        [*SERVE, *N_CTX, "--cache-disk", f"1GiB,{tmp_path / 'file'}"],
        capture_output=True, text=True, timeout=60, env=ENVIRONMENT,
    )  # fmt: skip
    assert ended.returncode == 2
    assert "--cache-disk: no prompts can be kept in" in ended.stderr
    assert "Traceback" not in ended.stderr
