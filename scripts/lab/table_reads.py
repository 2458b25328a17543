"""Measures what a table on the disk costs, beside the same table in RAM, with a tiny gemma3n.

Prints ratios of seconds: prompts and single tokens whose rows are not in the page cache, with and
without reading them ahead, and the same tokens again, whose rows are in the page cache then.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from lab.options import engine_options
from lab.synth.tables import table_shape
from lab.synth.write import plan_shape, write
from lab.timing import decode_s
from offload.engine import Engine, EngineOptions, open_engine
from offload.store.table_rows import TableRows

N_VOCAB = 1 << 18
N_PROMPT, N_TOKENS, N_TRIES = 512, 64, 5


def options(ram_bytes: int | None) -> EngineOptions:
    return engine_options(
        device="cpu", ram_bytes=ram_bytes, n_ctx=2048, n_batch=N_PROMPT,
        n_ubatch=128, n_outputs=16, n_threads=1, n_threads_batch=1,
    )  # fmt: skip


@contextmanager
def without_reading_ahead() -> Iterator[None]:
    real = TableRows._ask
    TableRows._ask = lambda self, pages: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        TableRows._ask = real  # type: ignore[method-assign]


def forget(path: Path) -> None:
    """Drop the file's pages that no process has used from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def speeds(engine: Engine, tokens: list[int]) -> tuple[float, float]:
    """Return the seconds of a prompt, and the median of one token after it."""
    sequences, prompt = engine.sequences, tokens[:N_PROMPT]
    sequences.rewind(0, 0)
    prompt_s = decode_s(sequences, prompt, 1)
    return prompt_s, statistics.median(decode_s(sequences, [token]) for token in tokens[N_PROMPT:])


def main() -> None:
    rng = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        shape = replace(table_shape("gemma3n"), n_vocab=N_VOCAB)
        path = write(plan_shape(shape, "bytes"), Path(folder) / "table.gguf", 1)
        os.sync()
        found: dict[str, list[tuple[float, float]]] = {}
        texts = [rng.integers(3, N_VOCAB - 8, N_PROMPT + N_TOKENS).tolist() for _ in range(N_TRIES)]
        for text in texts:
            for name, ram_bytes in (("in RAM", None), ("ahead", 1), ("not ahead", 1)):
                with open_engine(path, options(ram_bytes)) as engine:
                    assert bool(engine.layout.on_disk) == (name != "in RAM")
                    speeds(engine, [*range(3, 3 + len(text))])  # makes graphs
                    if name == "in RAM":
                        found.setdefault(name, []).append(speeds(engine, text))
                        continue
                    forget(path)
                    if name == "ahead":
                        found.setdefault("ahead, unread", []).append(speeds(engine, text))
                        found.setdefault("ahead, read before", []).append(speeds(engine, text))
                    else:
                        with without_reading_ahead():
                            found.setdefault("not ahead, unread", []).append(speeds(engine, text))
        plain = [statistics.median(its) for its in zip(*found["in RAM"], strict=True)]
        print(f"in RAM: prompt {plain[0] * 1e3:.1f} ms, token {plain[1] * 1e3:.2f} ms")
        for name, times in found.items():
            each = [statistics.median(its) for its in zip(*times, strict=True)]
            print(f"{name}: prompt x {each[0] / plain[0]:.2f}, token x {each[1] / plain[1]:.2f}")


if __name__ == "__main__":
    main()
