"""Reads the arguments that only llama-bench writes in its own way, as ours. Pure.

llama-bench's switches take a value (`-mmp 0`), where llama.cpp's other programs have two names
(tools/llama-bench/llama-bench.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specoffload.config.flag import FALSE, TRUE
from specoffload.errors import UsageError

# Switches with a value, and the arguments that "off" and "on" stand for.
_SWITCHES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    **dict.fromkeys(("-mmp", "--mmap"), (("--no-mmap",), ("--mmap",))),
    **dict.fromkeys(("-nkvo", "--no-kv-offload"), (("--kv-offload",), ("--no-kv-offload",))),
    **dict.fromkeys(("-nopo", "--no-op-offload"), ((), ("--no-op-offload",))),
    **dict.fromkeys(("-dio", "--direct-io"), ((), ("--load-mode", "dio"))),
    **dict.fromkeys(("-embd", "--embeddings"), ((), ())),
    "--no-host": ((), ("--no-host",)),
    "--repack": (("--no-repack",), ("--repack",)),
}
_NEEDS_VALUE = frozenset({"-mmp", "-dio", "--direct-io", "-embd", "--embeddings"})
# Flags with a value and without effect.
_IDLE = {
    **dict.fromkeys(("-oe", "--output-err"), "rows are written to standard output only (--output)"),
    "--delay": "tests follow each other without a pause",
}
_MODELS = frozenset({"-m", "--model", "-hf", "-hfr", "--hf-repo"})


@dataclass
class BenchArguments:
    """Arguments as the other commands write them, and what is said about the changes."""

    words: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ignored: list[tuple[str, str]] = field(default_factory=list)  # (arguments, reason)


def read_llama_bench(words: Sequence[str]) -> BenchArguments:
    """Translate the arguments of `bench`. Raises UsageError for what cannot be measured here."""
    arguments = BenchArguments()
    model = ""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, inline = word.partition("=")
        if word == "--":
            arguments.words += [word, *rest]
            break
        value = inline if equals else (rest[0] if rest else "")
        if name in _MODELS:
            if model:
                raise UsageError(
                    f"{model} and {name} {value}: bench measures one model a call, so call it for "
                    "each"
                )
            model = f"{name} {value}"
        if name in _SWITCHES and (name in _NEEDS_VALUE or equals or _is_list(value)):
            if not equals and rest:
                rest.pop(0)
            _read_switch(name, value, arguments)
        elif name in _IDLE and value:
            if not equals:
                rest.pop(0)
            arguments.ignored.append((f"{name} {value}", _IDLE[name]))
        elif name == "--progress" and not equals:
            continue  # always shown
        elif name == "-rpc":
            arguments.words.append("=".join(["--rpc", inline]) if equals else "--rpc")
        elif name in ("-ot", "--override-tensor") and ";" in value and not equals:
            arguments.words += [word, rest.pop(0).replace(";", ",")]
        elif name in ("-dev", "--device") and _names_devices(value) and not equals:
            arguments.words += [word, rest.pop(0).replace("/", ",")]
        else:
            arguments.words.append(word)
    return arguments


def _is_list(text: str) -> bool:
    return bool(text) and all(part in (*TRUE, *FALSE) for part in text.split(","))


def _names_devices(text: str) -> bool:
    """True for several devices as llama-bench separates them; rates such as 2GB/s have `=`."""
    return "/" in text and "=" not in text


def _read_switch(name: str, value: str, arguments: BenchArguments) -> None:
    values = {part in TRUE for part in value.split(",")}
    if not _is_list(value):
        raise UsageError(f"{name} {value}: must be 0 or 1")
    if len(values) > 1:
        raise UsageError(
            f"{name} {value}: only -p, -n, -pg, -d, -b, -ub, -ctk, -ctv, -fa, -t, -ngl and -ncmoe "
            "take lists here: call bench once for each value"
        )
    is_on = values.pop()
    if is_on and name in ("-embd", "--embeddings"):
        raise UsageError(f"{name} {value}: bench times answers, not embeddings; leave it out")
    words = _SWITCHES[name][is_on]
    arguments.words += words
    if words:
        arguments.notes.append(f"{name} {value} is read as {' '.join(words)}")
