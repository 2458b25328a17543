"""`specoffload bench` with lists of values: a row for each combination, as llama-bench does."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from offload.errors import OffloadError
from offload.times.context_memory import DEFAULT_UBATCH
from specoffload import report
from specoffload.bench.llama_bench import JsonRow, RowWriter, row_of
from specoffload.bench.load import warn_of_load
from specoffload.bench.sweep import TimedTest
from specoffload.commands.bench import on_some_device, row_conditions, with_bench_context
from specoffload.config.options import BenchOptions
from specoffload.config.resolution import Config
from specoffload.errors import UsageError
from specoffload.opening.draft_model import real_text
from specoffload.session.session import SEQUENCE, Session

_N_WARM_UP = 8  # tokens that are written before the timed repetitions
_PATH = "wrapped"  # our device without drafts, as in the comparison with llama.cpp


def bench_sweep(configs: Sequence[Config], tests: Sequence[TimedTest], own: BenchOptions) -> None:
    """Measure each test with each configuration, and print each row when it is measured.

    Nothing is drafted. A configuration that cannot be opened is left out, and a note says why.
    Raises UsageError if no test has tokens, or the first error if nothing could be measured.
    """
    if not tests:
        raise UsageError("-p 0 and -n 0 leave nothing to measure: give -p, -n or -pg a number")
    if own.output is not None:
        report.only_data(True)
    warn_of_load()
    first = on_some_device(configs[0])
    n_needed = max(test.n_total for test in tests)
    configs = [
        replace(with_bench_context(c, n_needed).without_drafts, device=first.device)
        for c in configs
    ]
    if first.spec.has_steps:
        report.note(
            "a sweep measures without drafts; bench without lists of values measures with them too"
        )
    conditions = [_conditions(config) for config in configs]
    planned = [_planned(c, test) for c in conditions for test in tests]
    writer = RowWriter(planned, own.output)
    if own.output is None:
        report.line(_about(planned[0]))
    _write(own, writer.head)
    rows: list[JsonRow] = []
    with report.log_lines_held():  # a line between two rows would end a table in Markdown
        failed = _measure_all(configs, conditions, tests, own, writer, rows)
    _write(own, writer.foot)
    if failed is not None and not rows:
        raise failed
    if own.output is None:
        report.data({"rows": rows})


def _measure_all(
    configs: Sequence[Config],
    conditions: Sequence[dict[str, Any]],
    tests: Sequence[TimedTest],
    own: BenchOptions,
    writer: RowWriter,
    rows: list[JsonRow],
) -> OffloadError | None:
    """Add the rows of all configurations to `rows`. Returns the first error, if there was one."""
    failed = None
    for config, condition in zip(configs, conditions, strict=True):
        try:
            for row in _measured(config, condition, tests, own.repetitions):
                rows.append(row)
                _write(own, writer.row(row))
        except OffloadError as e:
            failed = failed or e
            report.note(f"{_setting_words(config)} is left out: {e}")
    return failed


def _write(own: BenchOptions, text: str) -> None:
    """Write a piece of the output. With --json, only the rows at the end are written."""
    if own.output is not None:
        report.raw(text)
    else:
        report.text(text)


def _conditions(config: Config) -> dict[str, Any]:
    sizes = {"n_batch": config.batch_size, "n_ubatch": config.ubatch_size or DEFAULT_UBATCH}
    layers = {"n_gpu_layers": config.n_gpu_layers, "n_cpu_moe": _n_cpu_moe(config)}
    chosen = {key: value for key, value in layers.items() if value is not None}
    return row_conditions(config) | {"n_cpu_moe": 0} | sizes | chosen


def _n_cpu_moe(config: Config) -> int | str | None:
    """The value of --n-cpu-moe as it is written; None if none was given."""
    asked = config.n_cpu_moe
    if isinstance(asked, frozenset):
        return f"not:{','.join(map(str, sorted(asked)))}"
    return asked if isinstance(asked, int) else None


def _planned(conditions: dict[str, Any], test: TimedTest) -> dict[str, Any]:
    return conditions | asdict(test) | {"path": _PATH}


def _about(row: dict[str, Any]) -> str:
    return (
        f"{row['model_type']}, {report.bytes_text(row['model_size'])}, on {row['devices']} with "
        f"{report.plural(row['n_threads'], 'thread')}; tokens/s, mean ± deviation"
    )


def _setting_words(config: Config) -> str:
    layers = {"-ngl": config.n_gpu_layers, "-ncmoe": _n_cpu_moe(config)}
    asked = "".join(f" {name} {value}" for name, value in layers.items() if value is not None)
    return (
        f"-b {config.batch_size} -ub {config.ubatch_size or 'auto'} -ctk {config.type_k} "
        f"-fa {config.flash_attn} -t {config.threads}{asked}"
    )


def _measured(
    config: Config, conditions: dict[str, Any], tests: Sequence[TimedTest], repetitions: int
) -> Iterator[JsonRow]:
    """Open `config` once, and yield the row of each test. Raises OffloadError."""
    with Session(config, keeps_hits=False) as session:
        target = session.target
        conditions = conditions | {
            "n_ubatch": target.layout.context.n_ubatch,
            "n_threads": target.layout.context.n_threads or conditions["n_threads"],
        }
        text = itertools.cycle(real_text(target))
        for test in tests:
            if test.n_total > target.n_ctx:
                report.note(
                    f"a test of {test.n_total} tokens is left out: the context has "
                    f"{target.n_ctx} (--ctx-size)"
                )
                continue
            _time_s(session, replace(test, n_gen=min(_N_WARM_UP, test.n_gen)), text)
            samples_s = [_time_s(session, test, text) for _ in range(repetitions)]
            yield row_of(conditions, _PATH, samples_s, **asdict(test))


def _time_s(session: Session, test: TimedTest, text: Iterator[int]) -> float:
    """Seconds of a test. The next tokens of `text` stand for the prompt and for the answer."""
    sequences = session.target.sequences
    held = sequences.length(SEQUENCE)
    depth_is_held = 0 < test.n_depth <= held
    if depth_is_held and sequences.can_drop(SEQUENCE, held - test.n_depth):
        sequences.rewind(SEQUENCE, test.n_depth)
    else:
        sequences.rewind(SEQUENCE, 0)
        _read(session, test.n_depth, text)
    began = time.perf_counter()
    _read(session, test.n_prompt, text)
    for _ in range(test.n_gen):
        sequences.extend(SEQUENCE, [next(text)], 1)
    return time.perf_counter() - began


def _read(session: Session, n_tokens: int, text: Iterator[int]) -> None:
    """Evaluate the next `n_tokens` of `text`, with logits for the last of them."""
    sequences = session.target.sequences
    for at in range(0, n_tokens, sequences.n_batch):
        n = min(sequences.n_batch, n_tokens - at)
        is_last = at + n == n_tokens
        sequences.extend(SEQUENCE, list(itertools.islice(text, n)), int(is_last))
