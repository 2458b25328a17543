"""A server in a control group with too little memory for its experts is never near the limit."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lab import disk
from lab.synth.write import plan_preset, write
from specoffload.bench.llama_server import post, running_server

MIB = 1 << 20
LIMIT_BYTES = 512 * MIB
N_SLOTS, N_CTX, N_VOCAB = 3, 6144, 2048


@pytest.fixture(scope="module")
def mixture(models: Path) -> Path:
    """1.1 GB of experts. They are zeros, so their reads are as fast as the kernel can make them."""
    planned = plan_preset(
        "qwen3moe", n_layer=20, n_embd=1024, n_ff_exp=512, n_expert=64, n_expert_used=4, n_head=16,
        n_head_kv=4, n_ctx=8192, n_vocab=N_VOCAB, quant="Q4_K_M",
    )  # fmt: skip
    path = write(planned, models / "group.gguf", holes="_exps.")
    assert 2 * LIMIT_BYTES < path.stat().st_size < 3 * LIMIT_BYTES
    assert path.stat().st_blocks * 512 < 200 * MIB
    return path


def ask(port: int, n_tokens: int, seed: int) -> dict[str, Any]:
    prompt = disk.drawn_text(N_VOCAB - 300, n_tokens, seed)
    answer = post(
        port, {"prompt": prompt, "n_predict": 8, "ignore_eos": True, "cache_prompt": True}
    )
    found: dict[str, Any] = answer["timings"]
    return found


def test_the_limit_of_a_control_group_is_never_reached(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for a first start, long prompts, simultaneous requests and kept prompts."""
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path))
    command = [
        sys.executable, "-m", "specoffload", "serve", "-m", str(mixture), "-t", "1", "-c",
        str(N_CTX), "-np", str(N_SLOTS), "--device", "cpu", "--spec-type", "none", "--metrics",
    ]  # fmt: skip
    log = tmp_path / "log"
    with ExitStack() as opened:
        try:
            group = opened.enter_context(disk.control_group(LIMIT_BYTES))
        except OSError as e:
            pytest.skip(f"no control group of version 1 can be made: {e}")
        server = running_server(disk.inside(group, command), log, patience_s=300)
        _, port = opened.enter_context(server)
        assert ask(port, 1500, 0)["prompt_n"] == 1500
        with ThreadPoolExecutor(N_SLOTS) as requests:
            answers = list(requests.map(lambda i: ask(port, [60, 300][i % 2], 1 + i), range(8)))
        assert all(answer["predicted_n"] == 8 for answer in answers)
        n_read = [ask(port, 60, seed)["prompt_n"] for seed in (21, 22, 23, 24, 21)]
        assert n_read[-1] < n_read[0] == 60, "the prompt was kept"
        read = disk.disk_counters(port)
        use = disk.memory_use(group)
    assert read["disk_bytes"] > 2 * mixture.stat().st_size
    assert (use["n_killed"], use["n_at_limit"]) == (0, 0), log.read_text()[-2000:]
    assert 0.75 * LIMIT_BYTES < use["most_bytes"] < LIMIT_BYTES
