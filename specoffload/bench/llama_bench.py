"""Writes results in llama-bench's formats, so that programs that read its output read ours. Pure.

The keys have the names, order and types of llama.cpp's tools/llama-bench. `path` is added.
"""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

from offload.times.steadiness import is_steady

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
JsonRow = dict[str, Any]


def row_of(
    conditions: Mapping[str, Any], path: str, samples_s: Sequence[float], **test: int
) -> JsonRow:
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


def written(rows: Sequence[JsonRow], form: str) -> str:
    """The rows as text in `form`, one of `BENCH_FORMATS`."""
    if form == "json":
        return json.dumps(rows, indent=2) + "\n"
    if form == "jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows)
    if form == "csv":
        return _csv(rows)
    return markdown(_COLUMNS, [_cells(row) for row in rows])


def _csv(rows: Sequence[JsonRow]) -> str:
    return _CSV_HEAD + "".join(map(_csv_line, rows))


_CSV_HEAD = ",".join(FIELDS) + "\n"


def _csv_line(row: JsonRow, fields: Sequence[str] = FIELDS) -> str:
    text = StringIO()
    values = [row[field] for field in fields]
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow([int(v) if isinstance(v, bool) else v for v in values])
    return text.getvalue()


_COLUMNS = ("model", "size", "params", "backend", "threads", "path", "test", "t/s")


def _cells(row: JsonRow) -> list[str]:
    gib = row["model_size"] / 2**30
    size = f"{gib:.2f} GiB" if gib >= 1 else f"{gib * 1024:.2f} MiB"
    params = row["model_n_params"]
    many = f"{params / 1e9:.2f} B" if params >= 1e9 else f"{params / 1e6:.2f} M"
    return [
        row["model_type"], size, many, row["backends"], str(row["n_threads"]), row["path"],
        name_of_test(row), _speed(row),
    ]  # fmt: skip


def name_of_test(row: Mapping[str, Any]) -> str:
    """llama-bench's name of a test, such as `pp512+tg128 @ d1024`."""
    parts = [f"{kind}{row[key]}" for kind, key in (("pp", "n_prompt"), ("tg", "n_gen")) if row[key]]
    return "+".join(parts) + (f" @ d{row['n_depth']}" if row["n_depth"] else "")


def _speed(row: Mapping[str, Any]) -> str:
    return f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}"


def _speed_if_steady(row: Mapping[str, Any]) -> str:
    """Like `_speed`, or the range of speeds if the deviation is as large as the mean."""
    mean = row["avg_ts"]
    if not mean or is_steady(row["stddev_ts"] / mean):
        return _speed(row)
    return f"{min(row['samples_ts']):.2f} to {max(row['samples_ts']):.2f}"


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with the first column aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    return _markdown_head(columns, widths) + "".join(_markdown_line(row, widths) for row in rows)


def _markdown_head(columns: Sequence[str], widths: Sequence[int]) -> str:
    rule = [
        f"{'-' * max(2, w)}" if i == 0 else f"{'-' * max(1, w - 1)}:" for i, w in enumerate(widths)
    ]
    return _markdown_line(columns, widths) + _markdown_line(rule, widths)


def _markdown_line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cell.ljust(width) if i == 0 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return f"| {' | '.join(padded)} |\n"


# Columns of a setting that a sweep varies: llama-bench's head of it, and the key.
_SWEPT_COLUMNS = {
    "threads": "n_threads", "n_batch": "n_batch", "n_ubatch": "n_ubatch", "type_k": "type_k",
    "type_v": "type_v", "ngl": "n_gpu_layers", "n_cpu_moe": "n_cpu_moe", "fa": "flash_attn",
}  # fmt: skip
_SPEED_WIDTH = 18


class RowWriter:
    """Writes the rows of a sweep one at a time, each as soon as it is measured. Pure.

    The texts of `head`, of `row` for each row, and of `foot` make up the output in `form`. If it is
    None, that is a table for people, without the columns that are equal in all rows.
    """

    def __init__(
        self,
        planned: Sequence[Mapping[str, Any]],
        form: str | None,
        more: Mapping[str, str] | None = None,
    ) -> None:
        """`planned` are the rows to come, with all settings and tests but without times.

        `more` has further keys of the rows by the heads of their columns.
        """
        self._form, self._n_written = form, 0
        self._more = more or {}
        self._fields = (*FIELDS, *self._more.values())
        varied = {
            head: key for head, key in _SWEPT_COLUMNS.items()
            if len({row.get(key) for row in planned}) > 1
        }  # fmt: skip
        fixed = () if form is None else ("model", "size", "params", "backend", "threads", "path")
        self._varied = {head: key for head, key in varied.items() if head not in fixed}
        self._columns = (*fixed, *self._varied, *self._more, "test", "t/s")
        self._n_fixed = len(fixed)
        cells = [self._markdown_cells({**row, "avg_ts": 0.0, "stddev_ts": 0.0}) for row in planned]
        widths = [max(map(len, column)) for column in zip(self._columns, *cells, strict=True)]
        self._widths = [*widths[:-1], _SPEED_WIDTH]

    def _markdown_cells(self, row: Mapping[str, Any]) -> list[str]:
        varied = [str(row[key]) for key in self._varied.values()]
        varied += [_cell(row[key]) for key in self._more.values()]
        speed = _speed_if_steady(row) if self._form is None else _speed(row)
        return [*_cells(dict(row))[: self._n_fixed], *varied, name_of_test(row), speed]

    @property
    def head(self) -> str:
        """The text before the first row."""
        if self._form == "json":
            return "[\n"
        if self._form == "jsonl":
            return ""
        if self._form == "csv":
            return ",".join(self._fields) + "\n"
        return _markdown_head(self._columns, self._widths)

    def row(self, row: JsonRow) -> str:
        """The text of the next row."""
        self._n_written += 1
        if self._form == "json":
            indented = "\n".join(f"  {line}" for line in json.dumps(row, indent=2).splitlines())
            return indented if self._n_written == 1 else f",\n{indented}"
        if self._form == "jsonl":
            return json.dumps(row) + "\n"
        if self._form == "csv":
            return _csv_line(row, self._fields)
        return _markdown_line(self._markdown_cells(row), self._widths)

    @property
    def foot(self) -> str:
        """The text after the last row."""
        return "\n]\n" if self._form == "json" else ""


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else str(value)
