"""The user's own llama-server on the same file, over HTTP: for `bench --vs llama-server=PATH` and
`gpu-check split --llama-server PATH`."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offload.errors import DeviceFailed, DeviceUnavailable
from offload.model import ModelFacts
from specoffload.config.resolution import Config
from specoffload.errors import UsageError
from specoffload.peers.tuned import TunedLlama, with_expert_caches

DRAFT_MAX = (4, 16, 48)
DRAFT_P_MIN = (0.5, 0.75, 0.9)
_LOAD_PATIENCE_S = 1800.0
_ANSWER_PATIENCE_S = 600.0


@dataclass(frozen=True)
class ServerSpeed:
    """Tokens per second over all prompts, as llama-server's own `timings` count them."""

    flags: tuple[str, ...]
    prefill_tps: float
    decode_tps: float
    acceptance_rate: float | None
    n_cpu_moe: int = 0  # as in TunedLlama
    moe_cache_mib: int = 0


def program_of(text: str) -> Path:
    """The program of `llama-server=PATH`. Raises UsageError for anything else."""
    kind, equals, path = text.partition("=")
    if kind != "llama-server" or not equals or not path:
        raise UsageError(f"--vs {text}: must be llama-server=PATH")
    if not Path(path).is_file():
        raise UsageError(f"--vs {text}: there is no file {path}")
    return Path(path)


def sweep(draft: Path | None) -> list[tuple[str, ...]]:
    """Flags to try: none, and with a draft every longest draft with every least probability."""
    if draft is None:
        return [()]
    return [
        (),
        *(
            ("-md", str(draft), "--draft-max", str(n), "--draft-p-min", str(p))
            for n in DRAFT_MAX
            for p in DRAFT_P_MIN
        ),
    ]


def known_names(flags: Sequence[str], help_text: str) -> list[str]:
    """Flags under the names that this build of llama-server knows: newer ones renamed them."""
    renamed = {"--draft-max": "--spec-draft-n-max", "--draft-p-min": "--spec-draft-p-min"}
    return [
        renamed[flag] if flag in renamed and renamed[flag] in help_text else flag for flag in flags
    ]


def ways_of(program: Path, facts: ModelFacts, tuned: TunedLlama) -> list[TunedLlama]:
    """`tuned`, and with the expert cache where this build's --help lists the flag.

    Raises DeviceUnavailable if the program cannot be run.
    """
    knows_cache = "--moe-cache-mib" in _help_text(program)
    return with_expert_caches(facts, tuned) if knows_cache else [tuned]


def cache_words(n_cpu_moe: int, moe_cache_mib: int) -> tuple[str, ...]:
    """The flags that name a way with the expert cache; none without it."""
    if not moe_cache_mib:
        return ()
    return "--n-cpu-moe", str(n_cpu_moe), "--moe-cache-mib", str(moe_cache_mib)


def measure_server(
    program: Path,
    config: Config,
    tuned: TunedLlama,
    flags: Sequence[str],
    texts: Sequence[str],
    n_predict: int,
) -> ServerSpeed:
    """Start it, write after each text (the first twice, as warm-up), stop it.

    Raises DeviceUnavailable if it cannot be started, DeviceFailed if it does not answer.
    """
    command = _command(
        program, config.model, tuned, flags, n_ctx=config.ctx_size or 0, n_threads=config.threads
    )
    with _running(command) as url:
        request = {"n_predict": n_predict, "temperature": 0.0, "ignore_eos": True,
                   "cache_prompt": False}  # fmt: skip
        answers = [_post(f"{url}/completion", request | {"prompt": t}) for t in (texts[0], *texts)]
    speed = summed(flags, [answer["timings"] for answer in answers[1:]])
    return replace(speed, n_cpu_moe=tuned.n_cpu_moe, moe_cache_mib=tuned.moe_cache_mib)


def followed_s(
    program: Path,
    model: Path,
    tuned: TunedLlama,
    tokens: Sequence[int],
    *,
    n_warm: int,
    n_ctx: int,
    n_threads: int,
) -> list[float]:
    """Start it, have it decode a given text token by token, stop it. Seconds of each token behind
    the first `n_warm`, by the server's own clock.

    Every request is one token longer than the last, whose tokens the server still has. Raises as
    `measure_server`, and DeviceFailed if the server evaluates more than the new token.
    """
    found = []
    request = {"n_predict": 1, "temperature": 0.0, "cache_prompt": True, "id_slot": 0}
    command = _command(program, model, tuned, (), n_ctx=n_ctx, n_threads=n_threads)
    with _running([*command, "--parallel", "1"]) as url:
        for n in range(1, len(tokens) + 1):
            answer = _post(f"{url}/completion", request | {"prompt": list(tokens[:n])})
            if n <= n_warm:
                continue
            timings = answer["timings"]
            if timings["prompt_n"] != 1:
                raise DeviceFailed(
                    f"it evaluated {timings['prompt_n']} tokens of a text of which it had all but 1"
                )
            found.append(timings["prompt_ms"] / 1e3)
    return found


def summed(flags: Sequence[str], timings: Sequence[dict[str, Any]]) -> ServerSpeed:
    """Speeds over several answers."""
    total = {
        key: sum(t.get(key, 0) for t in timings)
        for key in ("prompt_n", "prompt_ms", "predicted_n", "predicted_ms", "draft_n",
                    "draft_n_accepted")
    }  # fmt: skip
    drafted = total["draft_n"]
    return ServerSpeed(
        tuple(flags),
        1e3 * total["prompt_n"] / total["prompt_ms"],
        1e3 * total["predicted_n"] / total["predicted_ms"],
        total["draft_n_accepted"] / drafted if drafted else None,
    )


def _help_text(program: Path) -> str:
    try:
        done = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise DeviceUnavailable(f"llama-server {program}: cannot be run ({e})") from e
    return done.stdout + done.stderr


def _command(
    program: Path,
    model: Path,
    tuned: TunedLlama,
    flags: Sequence[str],
    *,
    n_ctx: int,
    n_threads: int,
) -> list[str]:
    own = [str(program), "-m", str(model), "-c", str(n_ctx), "-t", str(n_threads)]
    return [*own, *tuned.arguments(), *known_names(flags, _help_text(program))]


@contextmanager
def _running(command: list[str]) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_loaded(process, url)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_loaded(process: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + _LOAD_PATIENCE_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise DeviceFailed(f"it ended with status {process.returncode} while loading")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise DeviceFailed(f"it was not ready after {_LOAD_PATIENCE_S:.0f} s")


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_PATIENCE_S) as answer:
            found: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as e:
        raise DeviceFailed(f"it answered {e.code}: {e.read(300).decode(errors='replace')}") from e
    except OSError as e:
        raise DeviceFailed(f"it did not answer: {e}") from e
    return found
