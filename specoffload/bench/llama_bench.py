"""Writes results in llama-bench's formats, so that programs that read its output read ours. Pure.

The keys have the names, order and types of llama.cpp's tools/llama-bench. `path` is added.
"""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

FORMATS = ("md", "csv", "json", "jsonl")
# Keys in llama-bench's order, with the values that settings have by default.
DEFAULTS: dict[str, Any] = {
    "build_commit": "unknown", "build_number": 0, "cpu_info": "", "gpu_info": "", "backends": "CPU",
    "model_filename": "", "model_type": "", "model_size": 0, "model_n_params": 0, "n_batch": 0,
    "n_ubatch": 0, "n_threads": 0, "cpu_mask": "0x0", "cpu_strict": False, "poll": 50,
    "type_k": "f16", "type_v": "f16", "n_gpu_layers": 0, "n_cpu_moe": 0, "split_mode": "none",
    "main_gpu": 0, "no_kv_offload": False, "flash_attn": -1, "devices": "auto",
    "tensor_split": "0.00", "tensor_buft_overrides": "none", "load_mode": "auto",
    "lazy_mode": "auto", "embeddings": False, "no_op_offload": 0, "no_host": False, "repack": True,
    "fit_target": 0, "fit_min_ctx": 0, "n_prompt": 0, "n_gen": 0, "n_depth": 0, "test_time": "",
    "avg_ns": 0, "stddev_ns": 0, "avg_ts": 0.0, "stddev_ts": 0.0,
}  # fmt: skip
FIELDS = (*DEFAULTS, "path")
Row = dict[str, Any]


def row_of(
    conditions: Mapping[str, Any], path: str, samples_s: Sequence[float], **test: int
) -> Row:
    """The row of one test on the path that is named `path`.

    `test` has llama-bench's n_prompt, n_gen and n_depth, in tokens. `samples_s` are the seconds of
    each repetition.
    """
    n_tokens = test.get("n_prompt", 0) + test.get("n_gen", 0)
    samples_ns = [round(s * 1e9) for s in samples_s]
    samples_ts = [n_tokens * 1e9 / ns for ns in samples_ns]
    return {
        **DEFAULTS,
        **conditions,
        **test,
        "avg_ns": round(statistics.fmean(samples_ns)),
        "stddev_ns": round(_deviation(samples_ns)),
        "avg_ts": statistics.fmean(samples_ts),
        "stddev_ts": _deviation(samples_ts),
        "path": path,
        "samples_ns": samples_ns,
        "samples_ts": samples_ts,
    }


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def written(rows: Sequence[Row], form: str) -> str:
    """The rows as text in `form`, one of FORMATS."""
    if form == "json":
        return json.dumps(rows, indent=2) + "\n"
    if form == "jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows)
    if form == "csv":
        return _csv(rows)
    return markdown(_COLUMNS, [_cells(row) for row in rows])


def _csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    text.write(",".join(FIELDS) + "\n")
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    for row in rows:
        values = [row[field] for field in FIELDS]
        writer.writerow([int(v) if isinstance(v, bool) else v for v in values])
    return text.getvalue()


_COLUMNS = ("model", "size", "params", "backend", "threads", "path", "test", "t/s")


def _cells(row: Row) -> list[str]:
    gib = row["model_size"] / 2**30
    size = f"{gib:.2f} GiB" if gib >= 1 else f"{gib * 1024:.2f} MiB"
    params = row["model_n_params"]
    many = f"{params / 1e9:.2f} B" if params >= 1e9 else f"{params / 1e6:.2f} M"
    test = f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}"
    if row["n_depth"]:
        test += f" @ d{row['n_depth']}"
    return [
        row["model_type"], size, many, row["backends"], str(row["n_threads"]), row["path"], test,
        f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}",
    ]  # fmt: skip


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with the first column aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |\n"

    rule = [
        f"{'-' * max(2, w)}" if i == 0 else f"{'-' * max(1, w - 1)}:" for i, w in enumerate(widths)
    ]
    return line(columns) + line(rule) + "".join(line(row) for row in rows)
