"""Reads and writes cost curves as JSON, GGML_BATCH_COSTS and llama-batched-bench's JSONL."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specdec.costs.profile import CostProfile, Timed
from specdec.errors import BadProfile
from specdec.whole_file import read_text, write_json, write_text

_MOST_TITLE = 200  # most characters of a title
_C_NOT_FINITE = re.compile(r"(?<=:) *-?(nan|inf)\b")  # nan and inf as C's printf writes them
MOST_PROFILE_BYTES = 1 << 20  # largest file, larger than that of 10,000 batch sizes


def save(path: Path, costs: CostProfile) -> None:
    """Write a curve as JSON, whole or not at all. Raises OSError."""
    write_json(path, asdict(costs))


def load(path: Path, flag: str = "") -> CostProfile:
    """Read a curve in any of the three formats. Raises BadProfile.

    `flag` is the flag that named the file; errors of the file mention it.
    """
    where = f"{flag} {path}".lstrip()
    try:
        text = read_text(path, MOST_PROFILE_BYTES)
    except (OSError, UnicodeDecodeError) as e:
        raise BadProfile(f"{where}: cannot be read as UTF-8 text ({e})") from e
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise BadProfile(f"{where}: the file is empty")
    if any('"speed_tg"' in line for line in lines):
        return parse_batched_bench(text)
    if not text.lstrip().startswith(("{", "[")):
        costs = lines[-1].partition("=")[2] or lines[-1]
        return parse_batch_costs(costs.strip("\"' "))
    try:
        return _parse(json.loads(text))
    except (BadProfile, KeyError, TypeError, ValueError, OverflowError, RecursionError) as e:
        raise BadProfile(f"{where} is damaged: {e!s:.200}") from e


def _parse(data: Any) -> CostProfile:
    if not isinstance(data, dict):
        raise BadProfile("it is not a JSON object")
    return CostProfile(
        tuple(data["step_s"]),
        float(data.get("draft_step_s", 0.0)),
        data.get("relative") is True,
        tuple(Timed(int(t["n"]), int(t["n_repeats"]), float(t["spread"])) for t in data["timed"]),
        str(data.get("title", ""))[:_MOST_TITLE],
    )


def export(path: Path, costs: CostProfile) -> str:
    """Write a curve in the format that the file's ending names. Returns the format's name.

    `.json` is our own format, `.jsonl` llama-batched-bench's. Other files get GGML_BATCH_COSTS.
    Raises BadProfile if the file cannot be written.
    """
    try:
        if path.suffix == ".json":
            save(path, costs)
            return "a profile of specoffload"
        if path.suffix == ".jsonl":
            write_text(path, format_batched_bench(costs))
            return "llama-batched-bench's JSONL"
        write_text(path, f"GGML_BATCH_COSTS={format_batch_costs(costs)}\n")
    except OSError as e:
        raise BadProfile(f"--export {path}: {e}") from e
    return "GGML_BATCH_COSTS"


def parse_batch_costs(text: str) -> CostProfile:
    """The curve of GGML_BATCH_COSTS: comma-separated c[n] of which the first is 1.

    The format is that of llama.cpp #17034. Raises BadProfile with the position of an entry that is
    not a number above 0.
    """
    costs = []
    for i, part in enumerate(text.split(",")):
        try:
            costs.append(float(part))
        except ValueError:
            raise BadProfile(
                f"entry {i + 1} of GGML_BATCH_COSTS is {part.strip()!r}, not a number"
            ) from None
    try:
        return CostProfile.from_normalised(costs)
    except BadProfile as e:
        raise BadProfile(f"GGML_BATCH_COSTS={text}: {e}") from e


def format_batch_costs(profile: CostProfile) -> str:
    """The value of GGML_BATCH_COSTS, with up to three decimals as profiling scripts print it."""
    return ",".join(f"{c:.3f}".rstrip("0").rstrip(".") for c in profile.normalised)


def parse_batched_bench(text: str) -> CostProfile:
    """The curve in llama-batched-bench's JSONL. Raises BadProfile.

    T(n) is the time of a step in which each of n sequences writes one token (`-pps -npl 1,2,..
    -ntg 1`). If nothing was written (`-npp 1,2,.. -ntg 0`), it is the time of a prompt of n tokens.

    Times after prompts of P and of 2 P tokens are extrapolated to an empty context. The speed there
    is 2 v(P) - v(2P), as in the published scripts. If every batch size has several records, the
    first of each is dropped as a warm-up, and the others are averaged. Lines that do not begin with
    "{" are skipped.
    """
    steps: defaultdict[int, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    prompts: defaultdict[int, list[float]] = defaultdict(list)
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("{"):
            continue
        try:
            # Speeds that were not measured are 0/0. C prints nan, which is not JSON.
            record = json.loads(_C_NOT_FINITE.sub(" NaN", line))
            n_prompt, n, n_steps = int(record.get("pp", 0)), int(record["pl"]), int(record["tg"])
            speed = float(record["speed_tg" if n_steps else "speed_pp"])
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as e:
            raise BadProfile(
                f"line {number} is not a record of llama-batched-bench: {e!r:.200}"
            ) from e
        if not 0 < speed < math.inf:
            name = "speed_tg" if n_steps else "speed_pp"
            raise BadProfile(f"line {number}: {name} is {speed}; it must be above 0")
        if n_steps:
            steps[n_prompt][n].append(n / speed)
        elif n == 1:
            prompts[n_prompt].append(n_prompt / speed)
    if not steps and sorted(prompts) != list(range(1, len(prompts) + 1)):
        raise BadProfile(
            f"the bench has times of prompts alone (-ntg 0), of {_listed(prompts)} tokens; a "
            "profile needs decodes of 1, 2, 3, ... tokens: -npl 1,2,3,... -ntg 1"
        )
    if not steps:
        return CostProfile(_means(prompts))
    by_prompt = {n_prompt: _means(times) for n_prompt, times in sorted(steps.items())}
    return (
        CostProfile(next(iter(by_prompt.values())))
        if len(by_prompt) == 1
        else _at_empty_context(by_prompt)
    )


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _means(times: Mapping[int, list[float]]) -> tuple[float, ...]:
    """Mean seconds of batch sizes 1, 2, 3, ..., without warm-ups.

    Raises BadProfile if a size is missing.
    """
    if not times or sorted(times) != list(range(1, len(times) + 1)):
        raise BadProfile(f"batch sizes 1, 2, 3, ... are needed; the bench has {_listed(times)}")
    warm = all(len(t) > 1 for t in times.values())
    kept = {n: t[1:] if warm else t for n, t in times.items()}
    return tuple(sum(kept[n]) / len(kept[n]) for n in sorted(kept))


def _at_empty_context(by_prompt: Mapping[int, tuple[float, ...]]) -> CostProfile:
    """The curve for an empty context, from the times after prompts of P and of 2 P tokens.

    Raises BadProfile for other prompts, or if the times allow no extrapolation.
    """
    sizes = sorted(by_prompt)
    if len(sizes) > 2 or sizes[1] != 2 * sizes[0] or len(set(map(len, by_prompt.values()))) > 1:
        raise BadProfile(
            f"the bench has prompts of {_listed(sizes)} tokens, whose times are not one series: "
            "give one size, or P and 2 P with the same batch sizes, which are extrapolated to an "
            "empty context"
        )
    speeds = []
    for n, (near_s, far_s) in enumerate(zip(*(by_prompt[size] for size in sizes), strict=True), 1):
        if far_s <= near_s / 2:
            raise BadProfile(
                f"a batch of {n} took {near_s:.3g} s behind a prompt of {sizes[0]} tokens and "
                f"{far_s:.3g} s behind {sizes[1]}, so nothing can be said of an empty context: "
                "run the bench again"
            )
        speeds.append(1.0 / (2.0 / near_s - 1.0 / far_s))
    title = f"extrapolated to an empty context from prompts of {sizes[0]} and {sizes[1]} tokens"
    return CostProfile(tuple(speeds), title=title)


def format_batched_bench(profile: CostProfile) -> str:
    """The profile as llama-batched-bench's JSONL, with its keys in the same order."""
    lines = []
    for i, t in enumerate(profile.step_s):
        n = i + 1
        record = {
            "n_kv_max": 0, "n_batch": profile.n_max, "n_ubatch": profile.n_max,
            "flash_attn": 0, "is_pp_shared": 1, "is_tg_separate": 0, "n_gpu_layers": 0,
            "n_threads": 0, "n_threads_batch": 0, "pp": 0, "tg": 1, "pl": n, "n_kv": n,
            "t_pp": 0.0, "speed_pp": 0.0, "t_tg": t, "speed_tg": n / t, "t": t, "speed": n / t,
        }  # fmt: skip
        lines.append(json.dumps(record))
    return "\n".join(lines) + "\n"
