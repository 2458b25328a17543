"""Measures a model larger than memory beside llama-server with mmap; prints one JSON object.

    scripts/lab/run disk                    4.5 GB mixture, memory for 40 % of it, both servers
    ... --model FILE --share 0.4 --tokens 64 --prompt 512,2048 --threads 2
    ... --vs PATH                           llama-server to compare with; `none`: without;
                                            default: what scripts/build-llama-server made
    ... --their-tokens 8                    tokens that llama-server generates, since it is slow
    ... --device cpu|sim                    the device of our server

Both servers run in a control group of version 1 whose memory is limited to `--share` of the file,
on the same threads, one after the other. Making the group takes root. For each length of `--prompt`
each server is started again, with nothing in the page cache or in a profile. It evaluates a prompt
and generates tokens (`cold`), and then does the same with other texts (`warm`). Decodes are timed
only with the first length. The text of the model is drawn as its skewed routing expects.

`reader` has the rate of a plain reader of the same sizes at several depths. `bound_tps` is the
speed of a prompt if this reader reads the file once: all of it (`cold`), or what is larger than the
limit of the group (`warm`). `disk` is what our server has read so far, and how long it waited for
it. A request took `wall_s`, and `user_s` and `system_s` of the CPUs. The ratios are ours over
llama-server's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from lab.bench_server.__main__ import llama_server
from lab.synth import write_preset
from lab.synth.routing import drawn_text
from offload.model_file import read_facts
from offload.store.disk_speed import DEPTHS, disk_speed
from specoffload.bench.llama_server import post, running_server

_GROUPS = Path("/sys/fs/cgroup/memory")
_PATIENCE_S = 600.0
_SHAPE: dict[str, Any] = {
    "n_layer": 12, "n_embd": 2048, "n_ff_exp": 768, "n_expert": 128, "n_expert_used": 8,
    "n_vocab": 8192, "n_head": 32, "n_head_kv": 4, "n_ctx": 8192, "routing": "skewed",
    "quant": "Q4_K_M",
}  # fmt: skip


@contextlib.contextmanager
def control_group(limit_bytes: int) -> Iterator[Path]:
    """Make a control group with this limit on memory, and remove it after the block."""
    group = _GROUPS / f"specoffload-disk-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield group
    finally:
        for _ in range(50):  # the kernel removes ended processes from the group a little later
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def drop(path: Path) -> None:
    """Drop the file from the page cache."""
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def inside(group: Path, command: Sequence[str]) -> list[str]:
    """A command line that runs `command` in the group."""
    return ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group), *command]


def speeds(port: int, n_vocab: int, n_prompt: int, n_tokens: int, seed: int) -> dict[str, float]:
    """Tokens/s of a prompt, and of the tokens after it if there are several."""
    text = drawn_text(n_vocab - 300, n_prompt, seed)
    body = {
        "prompt": text, "n_predict": n_tokens, "temperature": 1.0, "seed": seed, "top_k": 0,
        "top_p": 1.0, "min_p": 0.0, "ignore_eos": True, "cache_prompt": False,
    }  # fmt: skip
    answer = post(port, body)
    found = answer["timings"]
    result = {"prompt_tps": round(found["prompt_per_second"], 2), "n_tokens": found["predicted_n"]}
    if n_tokens > 1:
        result["decode_tps"] = round(found["predicted_per_second"], 2)
    return result


def measured(
    command: Sequence[str], model: Path, n_prompt: int, n_tokens: int, limit_bytes: int, log: Path
) -> dict[str, Any]:
    """Run a server in a control group. Returns its speeds, and the most memory that it took."""
    drop(model)
    n_vocab = read_facts(model).header.lengths.get("tokenizer.ggml.tokens", 8192)
    with control_group(limit_bytes) as group, tempfile.TemporaryDirectory() as profiles:
        command = ["env", f"SPECOFFLOAD_PROFILE_DIR={profiles}", *command]
        began_s = time.monotonic()
        with running_server(inside(group, command), log, patience_s=_PATIENCE_S) as (_, port):
            result: dict[str, Any] = {"start_s": round(time.monotonic() - began_s, 2)}
            for seed, when in enumerate(("cold", "warm")):
                before, began_s = cpu_times(group), time.monotonic()
                result[when] = speeds(port, n_vocab, n_prompt, n_tokens, seed)
                times = {"wall_s": time.monotonic() - began_s}
                times |= {name: s - before[name] for name, s in cpu_times(group).items()}
                result[when] |= {name: round(s, 2) for name, s in times.items()}
                if "--metrics" in command:
                    result[when]["disk"] = disk_counters(port)
            result["rss_bytes"] = _counts(group / "memory.stat")["rss"]
        result |= memory_use(group)
    return result


def cpu_times(group: Path) -> dict[str, float]:
    """Return the CPU seconds of a group's processes so far: in programs, and in the kernel."""
    pids = (group / "cgroup.procs").read_text().split()
    found = [psutil.Process(int(pid)).cpu_times() for pid in pids]
    return {"user_s": sum(t.user for t in found), "system_s": sum(t.system for t in found)}


def disk_counters(port: int) -> dict[str, float]:
    """Return the bytes that our server read from the disk, and its rate while it was reading."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    names = r"(disk_\w+?|experts_\w+?)_total"
    found = {
        k: float(v) for k, v in re.findall(rf"^specoffload:internal_{names} (\S+)$", text, re.M)
    }
    if not found.get("disk_busy_s"):
        return {}  # all experts are in memory
    return found | {"bytes_per_s": round(found["disk_bytes"] / found["disk_busy_s"])}


def memory_use(group: Path) -> dict[str, int]:
    """Return the most memory that a group took, and how often its limit was in the way."""
    return {
        "limit_bytes": int((group / "memory.limit_in_bytes").read_text()),
        "most_bytes": int((group / "memory.max_usage_in_bytes").read_text()),
        "n_at_limit": int((group / "memory.failcnt").read_text()),
        "n_killed": _counts(group / "memory.oom_control")["oom_kill"],
    }


def _counts(path: Path) -> dict[str, int]:
    return {k: int(v) for k, v in (line.split(" ") for line in path.read_text().splitlines())}


def lab_model() -> Path:
    """Return the path of the 4.5 GB mixture, which is written if it does not exist."""
    path = Path.home() / ".cache" / "specoffload" / "lab" / "disk.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_preset("qwen3moe", path, **_SHAPE)
    return path


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--share", type=float, default=0.4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--their-tokens", type=int, default=8)  # about 0.3 tokens/s
    parser.add_argument("--prompt", default="512,2048")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--vs")
    parser.add_argument("--log", default=os.devnull)
    return parser.parse_args(words)


def main() -> int:
    args = arguments()
    args.model = args.model or lab_model()
    size_bytes, lengths = args.model.stat().st_size, [int(n) for n in args.prompt.split(",")]
    limit_bytes = int(args.share * size_bytes)
    n_ctx = max(4096, 2 * max(lengths))
    common = ["-m", str(args.model), "-t", str(args.threads), "-c", str(n_ctx), "-np", "1"]
    own = [sys.executable, "-m", "specoffload", "serve", *common, "--device", args.device]
    servers = {"ours": ([*own, "--spec-type", "none", "--metrics"], args.tokens)}
    if program := llama_server(args.vs):
        theirs = [str(program), *common, "-tb", str(args.threads), "--no-warmup", "--no-repack"]
        servers["llama-server"] = theirs, args.their_tokens
    reader = {n: disk_speed(args.model, n) for n in DEPTHS}
    result: dict[str, Any] = {
        "model_bytes": size_bytes,
        "reader": {str(n): round(rate) for n, rate in reader.items()},
    }
    passes_per_s = max(reader.values()) / size_bytes
    for n_prompt in lengths:
        found: dict[str, Any] = {
            name: measured(
                command, args.model, n_prompt, n_tokens if n_prompt == lengths[0] else 1,
                limit_bytes, Path(args.log),
            )
            for name, (command, n_tokens) in servers.items()
        }  # fmt: skip
        if program is not None:
            found["ratios"] = {
                f"{when} {what}": round(found["ours"][when][what] / speed, 2)
                for when in ("cold", "warm")
                for what, speed in found["llama-server"][when].items()
                if what.endswith("_tps")
            }
        found["bound_tps"] = {
            "cold": round(n_prompt * passes_per_s, 1),
            "warm": round(n_prompt * passes_per_s / (1 - args.share), 1),
        }
        result[f"prompts of {n_prompt} tokens"] = found
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
