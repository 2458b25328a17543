"""Tunes llama.cpp for a file and a GPU memory size, and times the user's llama-server over HTTP.

`bench --vs llama-server=PATH` and `gpu-check split` use it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numa.threads import EVERYWHERE, Processors
from offload.errors import DeviceFailed, DeviceUnavailable, OffloadError
from offload.kv_overrides import override_flags
from offload.model import ModelFacts, TensorEntry, is_experts, layer_of
from specdec.options import DrafterName
from specdec.user_path import user_path
from specoffload import report
from specoffload.bench.child import ending_with_us
from specoffload.config.resolution import Config
from specoffload.errors import UsageError
from specoffload.opening.header import target_facts

UBATCHES = (512, 1024, 2048, 4096)
# Names of the matrices of a layer, including its experts.
_PRODUCTS = r"blk\.{}\.(attn|ffn)_[a-z_]+\.weight"


@dataclass(frozen=True)
class TunedLlama:
    """llama.cpp's settings for one file."""

    n_cpu_moe: int  # number of first layers whose experts the CPU computes
    # Number of first layers whose dense weights the CPU computes. It is above 0 only if the
    # weights do not fit the GPU even with all experts (none in dense models) on the CPU.
    n_dense_layers_on_cpu: int
    n_ubatch: int
    on_gpu: bool
    moe_cache_mib: int = 0  # device memory for a cache of the CPU's experts; 0: no cache
    cache_flags: tuple[str, ...] = ()  # further flags of that cache
    load_flags: tuple[str, ...] = ("--no-mmap",)  # how weights for the CPU are loaded
    model_flags: tuple[str, ...] = ()  # flags by which the model differs from its file

    def cpu_weights(self) -> str:
        """A regular expression for the weights in host memory; "" if all are on the GPU."""
        parts = []
        if self.n_cpu_moe:
            layers = "|".join(map(str, range(self.n_cpu_moe)))
            parts.append(rf"blk\.({layers})\.ffn_(up|down|gate|gate_up)_(ch|)exps")
        if self.n_dense_layers_on_cpu:
            layers = "|".join(map(str, range(self.n_dense_layers_on_cpu)))
            parts.append(_PRODUCTS.format(f"({layers})"))
        return "|".join(parts)

    @property
    def n_batch(self) -> int:
        """Largest batch in tokens: llama.cpp's default, or the ubatch if that is larger."""
        return max(2048, self.n_ubatch)

    def arguments(self) -> list[str]:
        """llama-server's flags for these settings."""
        flags = ["-ub", str(self.n_ubatch), "-b", str(self.n_batch), *self.model_flags]
        if self.on_gpu:
            flags += ["-ngl", "99"]
        if self.n_dense_layers_on_cpu:
            flags += ["-ot", f"{self.cpu_weights()}=CPU", *self.load_flags]
        elif self.n_cpu_moe:
            flags += ["--n-cpu-moe", str(self.n_cpu_moe), *self.load_flags]
        if self.moe_cache_mib:
            # flags of newer builds only
            flags += ["--moe-cache-mib", str(self.moe_cache_mib), *self.cache_flags]
        return flags

    def command_line(self, path: str) -> str:
        """A shell command that starts llama-server with these settings and the model at `path`."""
        return shlex.join(["llama-server", "-m", path, *self.arguments()])


def tune_for(
    facts: ModelFacts, *, vram_bytes: int | None, reserve_bytes: int, n_ubatch: int
) -> TunedLlama:
    """Settings that move the fewest layers to the CPU so that the rest fits `vram_bytes`.

    Experts are moved before dense weights. `vram_bytes` is None without a GPU. `reserve_bytes` is
    for the KV cache and compute buffers at this ubatch.
    """
    if vram_bytes is None:
        return TunedLlama(0, 0, n_ubatch, on_gpu=False, model_flags=override_flags(facts.overrides))
    entries = [place.entry for place in facts.weights.values()]
    # llama.cpp keeps the input embeddings on the CPU.
    total = sum(e.size_bytes for e in entries if not e.name.startswith("token_embd."))
    left = vram_bytes - reserve_bytes - total
    products = [e for e in entries if re.fullmatch(_PRODUCTS.format(r"\d+"), e.name)]
    n_cpu_moe, left = _moved(left, _by_layer([e for e in entries if is_experts(e)]))
    n_dense, left = _moved(left, _by_layer([e for e in products if not is_experts(e)]))
    return TunedLlama(
        n_cpu_moe, n_dense, n_ubatch, on_gpu=True, model_flags=override_flags(facts.overrides)
    )


def ways_of(program: Path, facts: ModelFacts, tuned: TunedLlama) -> list[TunedLlama]:
    """Settings to measure: `tuned`, and what else this build has: direct reads, an expert cache.

    A cache replaces the resident experts of all layers, or of half of the layers. It takes the
    device memory that these experts had. Each size is also combined with each of `cache_settings`.
    Raises DeviceUnavailable if the program cannot be run.
    """
    ways = [tuned]
    if not tuned.on_gpu:
        return ways
    help_text = _help_text(program)
    if tuned.cpu_weights():
        ways += [replace(tuned, load_flags=flags) for flags in load_settings(help_text)]
    if tuned.n_dense_layers_on_cpu:
        return ways
    if "--moe-cache-mib" not in help_text:
        return ways
    layers = _by_layer(facts.expert_weights)
    n_resident = sum(size > 0 for size in layers[tuned.n_cpu_moe :])
    for n_moved in dict.fromkeys((n_resident, n_resident // 2)):
        last = tuned.n_cpu_moe
        while sum(size > 0 for size in layers[tuned.n_cpu_moe : last]) < n_moved:
            last += 1
        mib = sum(layers[tuned.n_cpu_moe : last]) >> 20
        if mib:
            cached = replace(tuned, n_cpu_moe=last, moe_cache_mib=mib)
            ways += [replace(cached, cache_flags=f) for f in ((), *cache_settings(help_text))]
    return ways


def load_settings(help_text: str) -> list[tuple[str, ...]]:
    """Flags of loading to try beside --no-mmap, if the build that wrote `help_text` has them.

    Direct reads were reported to make prompts 3 times as fast as with mapped files.
    """
    mode = re.search(_LOAD_MODE + r"\b(.*?)(?=\n\s*-|\Z)", help_text, re.DOTALL)
    return [(_LOAD_MODE, "dio")] if mode and re.search(r"\bdio\b", mode[1]) else []


def cache_settings(help_text: str) -> list[tuple[str, ...]]:
    """Flags of the expert cache to try, besides its size, that the build of `help_text` knows.

    `--moe-cache-policy` is tried with each value that its help lists as `{a,b}` or `<a|b>`.
    `--moe-cache-cpu-share` is tried with CPU_SHARES, in percent if its help says so.
    """
    settings: list[tuple[str, ...]] = []
    if policy := re.search(_POLICY + r"[ \t]+[<{\[]([^>}\]\n]+)[>}\]]", help_text):
        names = re.split(r"[|,]", policy[1])
        settings += [(_POLICY, name.strip()) for name in names]
    # The text of one flag ends where the next line begins with a flag.
    if share := re.search(_CPU_SHARE + r"\b(.*?)(?=\n\s*-|\Z)", help_text, re.DOTALL):
        in_percent = "%" in share[1] or "percent" in share[1]
        values = [f"{100 * x:.0f}" if in_percent else str(x) for x in CPU_SHARES]
        settings += [(_CPU_SHARE, value) for value in values]
    return settings


def combined_ways(speeds: Mapping[TunedLlama, float]) -> list[TunedLlama]:
    """Settings to measure after those of `ways_of`: the fastest policy with each CPU share.

    `speeds` has the tokens/s of the ways that were measured. Returns [] unless a policy and a share
    were.
    """
    of_policy = [way for way in speeds if _POLICY in way.cache_flags]
    shares = dict.fromkeys(way.cache_flags for way in speeds if _CPU_SHARE in way.cache_flags)
    if not of_policy:
        return []
    best = max(of_policy, key=lambda way: speeds[way])
    return [replace(best, cache_flags=(*best.cache_flags, *share)) for share in shares]


def unread_policy(help_text: str) -> str:
    """Return a note if the help names policies of the cache only in prose, otherwise ""."""
    if _POLICY not in help_text or any(_POLICY in f for f in cache_settings(help_text)):
        return ""
    return (
        f"llama-server's help names no values of {_POLICY} as {{a,b}} or <a|b>, so only its "
        "default policy is measured"
    )


def _by_layer(entries: Sequence[TensorEntry]) -> list[int]:
    """Bytes of `entries` by layer, up to the last layer with an entry."""
    sizes = [0] * (1 + max((layer_of(e.name) for e in entries), default=-1))
    for entry in entries:
        sizes[layer_of(entry.name)] += entry.size_bytes
    return sizes


def _moved(left_bytes: int, layers: Sequence[int]) -> tuple[int, int]:
    """Move layers to the CPU, starting at the first, until `left_bytes` is not negative.

    Returns the number of moved layers, and `left_bytes` afterwards. `layers` has bytes by layer.
    """
    n = 0
    while left_bytes < 0 and n < len(layers):
        left_bytes += layers[n]
        n += 1
    return n, left_bytes


_LOAD_MODE = "--load-mode"
_POLICY, _CPU_SHARE = "--moe-cache-policy", "--moe-cache-cpu-share"
# Shares of the missing experts that llama-server's CPU computes instead of copying them.
CPU_SHARES = (0.25, 0.5, 1.0)
MTP_DRAFT_MAX = (1, 2, 3)
DRAFT_MAX = (4, 16, 48)
DRAFT_P_MIN = (0.5, 0.75, 0.9)
_LOAD_PATIENCE_S = 1800.0
_ANSWER_PATIENCE_S = 600.0


@dataclass(frozen=True)
class ServerSpeed:
    """Tokens per second over all prompts, from the `timings` in llama-server's answers."""

    flags: tuple[str, ...]
    prefill_tps: float
    decode_tps: float
    acceptance_rate: float | None
    n_cpu_moe: int = 0  # same field as in TunedLlama
    moe_cache_mib: int = 0
    cache_flags: tuple[str, ...] = ()
    load_flags: tuple[str, ...] = ()  # only if they differ from --no-mmap


def program_of(text: str) -> Path:
    """The path in `llama-server=PATH`. Raises UsageError for other text or a missing file."""
    kind, equals, path = text.partition("=")
    if kind != "llama-server" or not equals or not path:
        raise UsageError(f"--vs {text}: must be llama-server=PATH")
    program = user_path(path)
    if not program.is_file():
        raise UsageError(f"--vs {text}: there is no file {path}")
    return program


def sweep(draft: Path | None, by_rows: DrafterName | None = None) -> list[tuple[str, ...]]:
    """Sets of flags to try: none, and with a draft each of DRAFT_MAX with each of DRAFT_P_MIN.

    `by_rows`: the drafter, if the draft is a file that drafts from the target's rows.
    """
    if draft is None:
        return [()]
    kind = () if by_rows is None else ("--spec-type", f"draft-{by_rows}")
    return [
        (),
        *(
            (*kind, "-md", str(draft), "--draft-max", str(n), "--draft-p-min", str(p))
            for n in DRAFT_MAX
            for p in DRAFT_P_MIN
        ),
    ]


def mtp_sweep(n_mtp_layers: int, help_text: str) -> list[tuple[str, ...]]:
    """Flags that draft by the model's own layers (MTP), if the file and this build have them."""
    if not n_mtp_layers or "draft-mtp" not in help_text:
        return []
    return [("--spec-type", "draft-mtp", "--draft-max", str(n)) for n in MTP_DRAFT_MAX]


def known_names(flags: Sequence[str], help_text: str) -> list[str]:
    """`flags` with draft flags renamed if the build that wrote `help_text` has the newer names."""
    renamed = {"--draft-max": "--spec-draft-n-max", "--draft-p-min": "--spec-draft-p-min"}
    return [
        renamed[flag] if flag in renamed and renamed[flag] in help_text else flag for flag in flags
    ]


def server_name(
    flags: Sequence[str],
    n_cpu_moe: int,
    moe_cache_mib: int,
    cache_flags: Sequence[str] = (),
    load_flags: Sequence[str] = (),
) -> str:
    """A name for llama-server with these flags, and with its cache unless `moe_cache_mib` is 0."""
    cache = f" --n-cpu-moe {n_cpu_moe} --moe-cache-mib {moe_cache_mib}" if moe_cache_mib else ""
    return " ".join((f"llama-server{cache}", *cache_flags, *load_flags, *flags))


def measure_ways(
    program: Path, config: Config, tuned: TunedLlama, texts: Sequence[str], n_predict: int
) -> list[ServerSpeed]:
    """Measure the user's llama-server as tuned, and with each setting of its cache, if any.

    The fastest of the cache's policies is also measured with each share of the CPU. Then measures
    the fastest of all with each setting of the draft's flags, and with the
    model's own draft layers if the file and the build have them. A failed measurement
    is left out, and a note says why.
    """
    rows: list[ServerSpeed] = []

    def measure(way: TunedLlama, flags: Sequence[str]) -> None:
        try:
            rows.append(measure_server(program, config, way, flags, texts, n_predict))
        except OffloadError as e:
            name = server_name(
                flags, way.n_cpu_moe, way.moe_cache_mib, way.cache_flags, _unusual(way)
            )
            report.note(f"{name} is left out: {e}")

    try:
        facts = target_facts(config)
        ways = ways_of(program, facts, tuned)
        help_text = _help_text(program)
        mtp = mtp_sweep(facts.n_mtp_layers, help_text)
    except OffloadError as e:
        report.note(f"llama-server is left out: {e}")
        return []
    plain, *drafting = sweep(config.spec.draft, config.spec.options.from_file)
    if len(ways) > 1 and (words := unread_policy(help_text)):
        report.note(words)
    for way in ways:
        measure(way, plain)
    by_setting = {(way.moe_cache_mib, way.cache_flags, _unusual(way)): way for way in ways}
    speeds = {by_setting[_setting(row)]: row.decode_tps for row in rows}
    for way in combined_ways(speeds):
        by_setting[way.moe_cache_mib, way.cache_flags, _unusual(way)] = way
        measure(way, plain)
    if rows:
        best = max(rows, key=lambda row: row.decode_tps)
        fastest = by_setting[_setting(best)]
        for flags in (*drafting, *mtp):
            measure(fastest, flags)
    return rows


def _unusual(way: TunedLlama) -> tuple[str, ...]:
    """The flags of loading if they are not those that every build has."""
    return () if way.load_flags == TunedLlama.load_flags else way.load_flags


def _setting(row: ServerSpeed) -> tuple[int, tuple[str, ...], tuple[str, ...]]:
    return row.moe_cache_mib, row.cache_flags, row.load_flags


def measure_server(
    program: Path,
    config: Config,
    tuned: TunedLlama,
    flags: Sequence[str],
    texts: Sequence[str],
    n_predict: int,
) -> ServerSpeed:
    """Start llama-server, let it continue each text, and stop it. The first text also warms it up.

    Raises DeviceUnavailable if it cannot be started, DeviceFailed if it does not answer.
    """
    command = _command(
        program,
        config.model,
        tuned,
        flags,
        n_ctx=config.ctx_size or 0,
        n_threads=config.threads,
        on=config.decode_on,
    )
    with running_server(command) as (_, port):
        request = {"n_predict": n_predict, "temperature": 0.0, "ignore_eos": True,
                   "cache_prompt": False}  # fmt: skip
        answers = [post(port, request | {"prompt": t}) for t in (texts[0], *texts)]
    speed = summed(flags, [answer["timings"] for answer in answers[1:]])
    return replace(
        speed,
        n_cpu_moe=tuned.n_cpu_moe,
        moe_cache_mib=tuned.moe_cache_mib,
        cache_flags=tuned.cache_flags,
        load_flags=_unusual(tuned),
    )


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
    """Decode `tokens` one by one in llama-server. Returns the seconds of each after `n_warm`.

    Starts llama-server and stops it at the end. Each request has one token more than the previous
    one, whose tokens the server still holds. The server's own clock measures the times. Raises
    the errors of `measure_server`, and DeviceFailed if the server evaluates more than the new
    token.
    """
    seconds = []
    request = {"n_predict": 1, "temperature": 0.0, "cache_prompt": True, "id_slot": 0}
    command = _command(program, model, tuned, (), n_ctx=n_ctx, n_threads=n_threads)
    with running_server([*command, "--parallel", "1"]) as (_, port):
        for n in range(1, len(tokens) + 1):
            answer = post(port, request | {"prompt": list(tokens[:n])})
            if n <= n_warm:
                continue
            timings = answer["timings"]
            if timings["prompt_n"] != 1:
                raise DeviceFailed(
                    f"it evaluated {timings['prompt_n']} tokens of a text of which it had all but 1"
                )
            seconds.append(timings["prompt_ms"] / 1e3)
    return seconds


def summed(flags: Sequence[str], timings: Sequence[dict[str, Any]]) -> ServerSpeed:
    """Speeds over several answers, from the `timings` of each."""
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
    on: Processors = EVERYWHERE,
) -> list[str]:
    own = [str(program), "-m", str(model), "-c", str(n_ctx), "-t", str(n_threads)]
    if on.cpus:
        own += ["--cpu-mask", on.mask, "--cpu-strict", str(int(on.strict))]
    return [*own, *tuned.arguments(), *known_names(flags, _help_text(program))]


@contextmanager
def running_server(
    command: Sequence[str],
    log: Path = Path(os.devnull),
    patience_s: float = _LOAD_PATIENCE_S,
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start a server, yield its process and port once it is ready, and end it after the block.

    It also ends if this process is killed.
    The server must take --host and --port, and answer /health. Its output goes to `log`. Raises
    DeviceFailed if it ends while it loads, or is not ready after `patience_s` seconds.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("w") as out:
        process = subprocess.Popen(
            ending_with_us([*command, "--host", "127.0.0.1", "--port", str(port)]),
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_until_ready(process, port, patience_s)
        yield process, port
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, patience_s: float) -> None:
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        if process.poll() is not None:
            raise DeviceFailed(f"it ended with status {process.returncode} while loading")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise DeviceFailed(f"it was not ready after {patience_s:.0f} s")


def post(port: int, body: dict[str, Any]) -> dict[str, Any]:
    url = f"http://127.0.0.1:{port}/completion"
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_PATIENCE_S) as answer:
            content: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as e:
        raise DeviceFailed(f"it answered {e.code}: {e.read(300).decode(errors='replace')}") from e
    except OSError as e:
        raise DeviceFailed(f"it did not answer: {e}") from e
    return content
