"""Parses flag values that are more than a number or a name.

Each function takes the text of a value. Its ValueError says what the value must be.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
from collections.abc import Callable
from enum import StrEnum
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Any, Literal

from numa.topology import GGML_MAX_CPUS
from offload.errors import BadRequest
from offload.kv_overrides import read_overrides
from offload.plan.workload import DECODING, TokenMix
from offload.remote.address import Address, parse_addresses
from offload.sampling.options import sampler_names
from offload.times.min_batch import MinBatch
from offload.units import parse_bytes, parse_rate
from specdec.options import DRAFTER_ALIASES, DrafterName, PolicyName
from specdec.user_path import user_path
from specdec.whole_file import MOST_BYTES, decoded, read_text
from specoffload.config.flag import FALSE, TRUE, ValueKind, choice, utf8_text, whole
from specoffload.config.options import (
    CpuRange,
    DiskRoom,
    Ram,
    RunOrder,
    SplitMode,
    Toggle,
    WorkloadName,
)

NEVER = 1 << 30  # min-batch in tokens that no batch reaches
ALL_LAYERS = 9999
_ALONE = (DrafterName.NONE, DrafterName.SYNTHETIC)
_DEBUG_LEVEL = 4  # llama.cpp's level for debug messages
_MOST_SEED = 2**32 - 2  # libllama's seeds are 32 bits, and 0xFFFFFFFF means "random"


def min_batch(text: str) -> MinBatch | Literal["auto"]:
    """A number of tokens as `3`, numbers by kind of weight as `dense=8,experts=24`, or a word.

    The words are `auto` and `off`.
    """
    if text == "auto":
        return "auto"
    if text == "off":
        return MinBatch(NEVER, NEVER)
    default = MinBatch()
    values = {"experts": default.experts, "dense": default.dense}
    for part in text.split(","):
        kind, equals, number = part.rpartition("=")
        if not number.strip().isdecimal() or int(number) < 1:
            raise ValueError(f"{number.strip() or part!r} must be a whole number from 1")
        if not equals:
            values = dict.fromkeys(values, int(number))
        elif kind.strip() in values:
            values[kind.strip()] = int(number)
        else:
            raise ValueError(f"kinds are dense and experts, not {kind.strip()}")
    return MinBatch(values["experts"], values["dense"])


def listening(text: str) -> Address:
    """HOST:PORT to listen on. Port 0 takes a free one."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) >= 1 << 16:
        raise ValueError("must be HOST:PORT with a port from 0 to 65535")
    return Address(host, int(port))


def network(text: str) -> IPv4Network | IPv6Network:
    """An address, or a network of addresses."""
    try:
        return ip_network(text.strip())
    except ValueError as e:
        raise ValueError(f"must be an address or a network such as 10.0.0.0/24 ({e})") from None


def token_mix(text: str) -> TokenMix | None:
    """`auto` (None), `decode`, or numbers of prompt tokens and generated tokens as `4000:500`."""
    if text == "auto":
        return None
    if text == "decode":
        return DECODING
    numbers = re.fullmatch(r"(\d{1,12}):(\d{1,12})", text)
    if numbers is None or not int(numbers[1]) + int(numbers[2]):
        raise ValueError("must be auto, decode, or PROMPT:GENERATED tokens as in 4000:500")
    return TokenMix(int(numbers[1]), int(numbers[2]))


def ram(text: str) -> Ram:
    """A size, a bandwidth, or both: `512GiB`, `200GB/s`, `512GiB,200GB/s`."""
    size_bytes: int | None = None
    bytes_per_s: float | None = None
    for part in text.split(","):
        if "/" in part:
            bytes_per_s = parse_rate(part)
        else:
            size_bytes = parse_bytes(part)
    return Ram(size_bytes, bytes_per_s)


def disk_room(text: str) -> DiskRoom:
    """A size, and perhaps a folder after a comma: `50GiB`, `50GiB,/var/cache/prompts`."""
    size, comma, folder = text.partition(",")
    size_bytes = parse_bytes(size)
    if comma and not folder:
        raise ValueError("names no folder after the comma")
    if not size_bytes > 0:
        raise ValueError("must have a size above 0")
    return DiskRoom(size_bytes, user_path(folder) if folder else None)


def ram_size(text: str) -> int:
    """The size in a value of --ram. A bandwidth may follow the size, but only `plan` uses it."""
    there = ram(text)
    if there.size_bytes is None:
        raise ValueError("has no size, e.g. 48GiB; only plan reads the speed of RAM")
    return there.size_bytes


def drafters(text: str) -> tuple[DrafterName, ...]:
    """Drafters' names separated by commas. llama.cpp's names are accepted, too."""
    names = []
    for part in (part.strip() for part in text.split(",")):
        name = DRAFTER_ALIASES.get(part, part)
        if ":" in part:
            raise ValueError(
                f"{part!r} is ik_llama.cpp's form; here a drafter's sizes have flags of their own, "
                "such as --draft-max and --spec-ngram-mod-n-match"
            )
        if name not in tuple(DrafterName):
            raise ValueError(f"{part!r} is unknown; there are {', '.join(DrafterName)}")
        names.append(DrafterName(name))
    if len(set(names)) != len(names):
        raise ValueError("names a drafter twice")
    for alone in _ALONE:
        if alone in names and len(names) > 1:
            raise ValueError(f"{alone} stands alone")
    return tuple(names)


def several(names: type[StrEnum]) -> Callable[[str], tuple[StrEnum, ...]]:
    """A function that reads names separated by commas, and drops names that repeat."""

    def read(text: str) -> tuple[StrEnum, ...]:
        parts = [part.strip() for part in text.split(",")]
        for part in parts:
            if part not in tuple(names):
                raise ValueError(f"{part!r} is unknown; there are {', '.join(names)}")
        return tuple(names(part) for part in dict.fromkeys(parts))

    return read


def replacements(text: str) -> tuple[tuple[str, str], ...]:
    """Pairs (target, draft) from `TARGET=DRAFT,...`."""
    pairs = []
    for part in filter(None, text.split(",")):
        target, equals, draft = part.partition("=")
        if not equals or not target:
            raise ValueError(f"{part!r} is not TARGET=DRAFT")
        pairs.append((target, draft))
    return tuple(pairs)


def numbers(text: str) -> tuple[float, ...]:
    """Numbers separated by commas or, as in llama.cpp's --tensor-split, by slashes."""
    try:
        return tuple(float(number) for number in re.split("[,/]+", text))
    except ValueError:
        raise ValueError("must be numbers with commas between them, as in 3,1") from None


def split_mode(text: str) -> SplitMode:
    """`layer` or `none`. llama.cpp has more modes."""
    modes: dict[str, SplitMode] = {"layer": "layer", "none": "none"}
    if text in modes:
        return modes[text]
    raise ValueError(
        "must be layer or none: other modes divide single weights, but here weights stream whole "
        "(`specoffload plan` says what a further GPU brings)"
    )


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers separated by commas."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError("must be whole numbers, comma separated")
    return tuple(int(part) for part in parts)


def pair_of_counts(text: str) -> tuple[int, int]:
    """Two whole numbers as `512,128`."""
    pair = counts(text)
    if len(pair) != 2:
        raise ValueError("must be numbers of prompt tokens and of generated tokens, as in 512,128")
    return pair[0], pair[1]


def sizes(text: str) -> int | tuple[int, ...]:
    """One size for all devices, or one for each device as `24GiB,12GiB`."""
    each = tuple(parse_bytes(part) for part in text.split(","))
    return each[0] if len(each) == 1 else each


def links(text: str) -> tuple[float, ...]:
    """One rate for all devices, or one for each device as `25GB/s,12GB/s`."""
    return tuple(parse_rate(part) for part in text.split(","))


def _or_none(is_none: Callable[[int], bool], least: int | None = None) -> Callable[[str], Any]:
    """A function that reads a whole number of at least `least`, or None if `is_none` accepts it."""

    def read(text: str) -> int | None:
        value = whole(text)
        if least is not None and value < least:
            raise ValueError(f"must be at least {least}")
        return None if is_none(value) else value

    return read


_MOST_NAMED_LAYER = 4096


def cpu_moe(text: str) -> int | frozenset[int] | None:
    """A number of layers, `auto` (None), or `not:LAYER,...`, the set of all others' numbers."""
    if text == "auto":
        return None
    if text.startswith("not:"):
        named = frozenset(whole(number) for number in text.removeprefix("not:").split(","))
        if not all(0 <= layer <= _MOST_NAMED_LAYER for layer in named):
            raise ValueError(f"layers must be from 0 to {_MOST_NAMED_LAYER}")
        return named
    value = whole(text)
    if value < 0:
        raise ValueError("must be at least 0 or auto")
    return value


def layers(text: str) -> int | None:
    """A number of layers, `all` (ALL_LAYERS), or `auto` (None)."""
    if text in ("auto", "-1"):
        return None
    if text == "all":
        return ALL_LAYERS
    value = whole(text)
    if value < 0:
        raise ValueError("must be at least 0, all or auto")
    return value


def words(text: str) -> tuple[str, ...]:
    """The words of a command line that is the value of a flag, split as a shell does."""
    try:
        return tuple(shlex.split(text))
    except ValueError as e:
        raise ValueError(f"cannot be split into words: {e}") from None


def runs(text: str) -> tuple[RunOrder, ...]:
    """At least two runs separated by commas, as `seq,seq,par`. The first one is the baseline."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if part not in tuple(RunOrder):
            raise ValueError(f"{part!r} is unknown; there are {', '.join(RunOrder)}")
    if len(parts) < 2:
        raise ValueError(
            "must be two runs or more, as in seq,par: later ones are compared with the first"
        )
    return tuple(map(RunOrder, parts))


def conversations(name: str) -> tuple[tuple[str, ...], ...]:
    """The conversations in the file `name`, each a tuple of questions.

    Each line is a conversation: a question, or in a .jsonl file a JSON string or a list of them.
    """
    is_json = user_path(name).suffix == ".jsonl"
    talks = []
    for number, line in enumerate(contents(name).splitlines(), 1):
        if not line.strip():
            continue
        questions: object = line
        if is_json:
            try:
                questions = json.loads(line)
            except (ValueError, RecursionError):
                questions = None
        if isinstance(questions, str):
            questions = [questions]
        if not isinstance(questions, list) or not questions:
            raise ValueError(f"line {number} must be a JSON string, or a list of strings")
        if not all(isinstance(question, str) and question.strip() for question in questions):
            raise ValueError(f"line {number} must have only questions that are texts, none empty")
        talks.append(tuple(questions))
    if not talks:
        raise ValueError("has no question")
    return tuple(talks)


_OPEN_FILE = re.compile(r"/dev/stdin|/(?:dev|proc/self)/fd/(\d+)")  # `<(command)` is the latter


def contents(name: str) -> str:
    """The text in the file `name`. It may be standard input or an open pipe, as `<(command)` is."""
    try:
        if name == "-":
            return _read_open(0, name)
        if (number := _OPEN_FILE.fullmatch(name)) is not None:
            return _read_open(int(number[1] or 0), name)
        return read_text(user_path(name))
    except OSError as e:
        raise ValueError(f"cannot be read ({e.strerror})") from None
    except UnicodeDecodeError as e:
        raise ValueError(f"cannot be read as UTF-8 text ({e})") from None


def _read_open(handle: int, name: str) -> str:
    """All text of a file that this process has open. Raises OSError and UnicodeDecodeError."""
    with os.fdopen(os.dup(handle), "rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"more than {MOST_BYTES} bytes, which are read at most", name)
    return decoded(content, name)


def cpu_mask(text: str) -> tuple[int, ...]:
    """The processors of a mask in hexadecimal, as `0xf`. No bit set means no mask (llama.cpp)."""
    digits = text.removeprefix("0x").removeprefix("0X")
    if not re.fullmatch("[0-9a-fA-F]+", digits):
        raise ValueError("must be a mask in hexadecimal, such as 0xff for the first 8 processors")
    digits = digits.lstrip("0")
    if 4 * len(digits) > GGML_MAX_CPUS:
        raise ValueError(f"must have at most {GGML_MAX_CPUS} bits, as ggml's masks have")
    bits = int(digits or "0", 16)
    return tuple(cpu for cpu in range(bits.bit_length()) if bits >> cpu & 1)


def cpu_range(text: str) -> CpuRange:
    """A range of processors as `0-7`. Without a first or a last one, it is the machine's."""
    match = re.fullmatch(r"([0-9]{0,9})-([0-9]{0,9})", text.strip())
    if match is None:
        raise ValueError("must be a range of processors such as 0-7")
    first, last = int(match[1] or 0), int(match[2]) if match[2] else None
    if max(first, last or 0) >= GGML_MAX_CPUS:
        raise ValueError(f"must end below {GGML_MAX_CPUS}, the bits of ggml's masks")
    if last is not None and last < first:
        raise ValueError(f"must not end before it begins ({last} is below {first})")
    return CpuRange(first, last)


def is_on(text: str) -> bool:
    if text not in (*TRUE, *FALSE):
        raise ValueError("must be 0 or 1")
    return text in TRUE


def keys(text: str) -> str:
    """API keys separated by commas, without blanks around them. None may be empty."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ValueError("must be a key, or several with commas between them")
    return ",".join(parts)


def seed(text: str) -> int | None:
    """A seed; None for -1 or 2^32 - 1, which mean a random seed in llama.cpp."""
    value = whole(text)
    if value == -1 or value == _MOST_SEED + 1:
        return None
    if not 0 <= value <= _MOST_SEED:
        raise ValueError(f"must lie between 0 and {_MOST_SEED}, or be -1 (random)")
    return value


def samplers(text: str) -> tuple[str, ...]:
    """Samplers' names separated by semicolons, as in llama.cpp, or by commas."""
    try:
        return sampler_names([name for name in re.split("[;,]", text) if name.strip()])
    except BadRequest as e:
        raise ValueError(str(e)) from None


def breaker(text: str) -> str:
    """A text that ends a repetition, or "" for `none`. Newlines and tabs may be escaped."""
    return "" if text == "none" else text.replace("\\n", "\n").replace("\\t", "\t")


def logit_bias(text: str) -> tuple[int, float]:
    """A token's id and its bias, as `15043+1`. `15043-inf` forbids the token."""
    match = re.fullmatch(r"(\d+)([+-](?:\d+\.?\d*|\.\d+|inf))", text.strip())
    if match is None or match[2] == "+inf":
        raise ValueError("must be a token's id and its bias, as in 15043+1 or 15043-inf")
    return int(match[1]), float(match[2])


def json_object(text: str) -> object:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("must be a JSON object") from None
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")
    return value


def verbosity(text: str) -> int:
    """llama.cpp's level of log lines if it is the debug level or above, else 0."""
    level = whole(text)
    return level if level >= _DEBUG_LEVEL else 0


MIN_BATCH = ValueKind("N", min_batch, is_open=True)
ANY_TEXT = ValueKind("TEXT", lambda text: utf8_text(text) or None)  # None: no text
CONTENTS = ValueKind("FILE", contents)
TOKEN_MIX = ValueKind("auto|decode|P:G", token_mix, is_open=True)
CPU_MOE = ValueKind("N", cpu_moe, is_open=True)
AUTO_INT = ValueKind("N", lambda text: None if text == "auto" else whole(text), is_open=True)
RATE = ValueKind("SIZE/s", parse_rate, is_open=True)
ADDRESS = ValueKind("HOST:PORT", listening)
NETWORK = ValueKind("ADDRESS", network)
SIZES = ValueKind("SIZE,...", sizes, is_open=True)
LINKS = ValueKind("SIZE/s,...", links, is_open=True)
ADDRESSES = ValueKind("HOST:PORT,...", parse_addresses)
RAM_SIZE = ValueKind("SIZE", ram_size, is_open=True)
RAM = ValueKind("SIZE,SIZE/s", ram, is_open=True)
DISK_ROOM = ValueKind("SIZE[,FOLDER]", disk_room)
DRAFTERS = ValueKind("NAME,...", drafters, is_open=True)
REPLACEMENTS = ValueKind("TARGET=DRAFT,...", replacements)
RATES = ValueKind("P,...", numbers, is_open=True)
SHARES = ValueKind("X,...", numbers, is_open=True)
SPLIT_MODE = ValueKind("layer|none", split_mode, is_open=True)
COUNTS = ValueKind("N,...", counts, is_open=True)
POLICIES = ValueKind("NAME,...", several(PolicyName), is_open=True)
WORKLOADS = ValueKind("NAME,...", several(WorkloadName), is_open=True)
RUNS = ValueKind("RUN,...", runs, is_open=True)
CONVERSATIONS = ValueKind("FILE", conversations)
PAIR_OF_COUNTS = ValueKind("N,N", pair_of_counts, is_open=True)
SEED = ValueKind("N", seed, is_open=True)
SAMPLER_NAMES = ValueKind("NAME;...", samplers, is_open=True)
BREAKER = ValueKind("TEXT", breaker)
LOGIT_BIAS = ValueKind("ID+BIAS", logit_bias)
KV_OVERRIDES = ValueKind("KEY=TYPE:VALUE,...", read_overrides, is_open=True)
KEYS = ValueKind("KEY,...", keys, is_secret=True)
N_PREDICT = ValueKind("N", _or_none(lambda n: n < 0), is_open=True)  # None: to the context's end
REASONING_BUDGET = ValueKind("N", _or_none(lambda n: n == -1, least=-1), is_open=True)  # None: any
PARALLEL = ValueKind("N", _or_none(lambda n: n == -1), is_open=True)  # None: chosen at start
CPU_MASK = ValueKind("MASK", cpu_mask, is_open=True)
CPU_RANGE = ValueKind("LO-HI", cpu_range, is_open=True)
ON_OFF = ValueKind("0|1", is_on, is_open=True)
THREADS = ValueKind("N", _or_none(lambda n: n <= 0), is_open=True)  # None: chosen at start
LAYERS = ValueKind("N", layers, is_open=True)
WORDS = ValueKind("WORDS", words)
JSON_OBJECT = ValueKind("JSON", json_object)
VERBOSITY = ValueKind("N", verbosity, is_open=True)
TOGGLE = choice(
    tuple(Toggle),
    {
        **dict.fromkeys(TRUE, Toggle.ON),
        **dict.fromkeys(FALSE, Toggle.OFF),
        "-1": Toggle.AUTO,
    },
)
