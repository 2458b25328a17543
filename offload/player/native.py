"""Loads the player, a small native library, and mirrors its structs (player.c describes them).

`scripts/setup` and `pip install` compile it. If the sources are newer, it is compiled anew when it
is first used, which takes a second.
"""

from __future__ import annotations

import ctypes as C
import functools
import hashlib
import os
import shlex
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from offload.errors import LibraryMismatch

SOURCE = Path(__file__).with_name("player.c")
# Without contraction, sums have the bits that numpy's have.
FLAGS = ("-O2", "-std=c11", "-D_GNU_SOURCE", "-ffp-contract=off", "-fPIC", "-shared")
_P, _N, _D = C.c_void_p, C.c_int64, C.c_double


def _fields(*of: tuple[str, Any]) -> list[tuple[str, Any]]:
    return [(name, kind) for names, kind in of for name in names.split()]


class Calls(C.Structure):
    """ggml's functions, and the offsets of fields in its tensors."""

    _fields_ = _fields(
        ("compute set get synchronize set_n_threads set_threadpool", _P),
        ("at_ne at_nb at_data at_buffer at_parameters", _N),
    )


class Counts(C.Structure):
    """Counts of one decode, by their names in StreamCounters."""

    _fields_ = _fields(
        ("cuts bands router_reads hits misses prefetched_used", _N),
        ("n_pairs_hit n_pairs_streamed n_pairs_host n_recorded n_nodes_ahead split_layers", _N),
        ("host_s split_s step_s idle_s native_s", _D),
    )


class Part(C.Structure):
    _fields_ = _fields(("first end", _N), ("graph uid", _P), ("first_uid", C.c_uint64))


class RedirectEntry(C.Structure):
    _fields_ = _fields(("source own other", _P))


class View(C.Structure):
    _fields_ = _fields(("tensor base", _P), ("stride axis", _N))


class Host(C.Structure):
    _fields_ = _fields(
        ("graph", _P),
        ("most row_bytes rows_per_token n_counts n_sources n_scales", _N),
        ("ids places inputs rows counts sources scales staging results placing", _P),
        ("header_bytes out_bytes n_out_counts n_into_counts", _N),
        ("out_counts into_counts into set_rows", _P),
    )


class Costs(C.Structure):
    _fields_ = _fields(
        ("n_lines n_ends n_rows n_copies", _N),
        ("by_rows_s work copies_s idle", _P),
        ("idle_fixed_s copy_s", _D),
    )


class Layer(C.Structure):
    _fields_ = _fields(
        ("layer cut at last n_experts n_used n_tokens n_slots may_repeat n_ahead n_readers", _N),
        ("ids_tensor ids_at", _P), ("ids_bytes ids_stride", _N),
        ("rows_tensor rows_to", _P), ("rows_bytes", _N),
        ("slot_ids_tensor slot_ids slot_of state last_use reason rank score by_token", _P),
        ("likeliest likeliest_score record recorded", _P),
        ("n_record n_redirects n_views", _N),
        ("redirects views host weights scale_tables output", _P),
        ("first_slot n_slots_seen n_pairs n_on_device n_on_host waits missed", _N),
        ("split_at_s", _D), ("issues", _N),
    )  # fmt: skip


class Event(C.Structure):
    _fields_ = _fields(("kind layer a b", _N), ("start_s end_s", _D))


class Player(C.Structure):
    _fields_ = _fields(
        ("calls stream cpu program", _P), ("n_words", _N),
        ("parts", _P), ("n_parts", _N),
        ("layers", _P), ("n_layers n_stops", _N),
        ("costs", _P), ("splitter", _N),
        ("interrupt", _P), ("n_threads", _N * 2), ("pools", _P * 2),
        ("chosen recording clocked paced python_open timed from_disk", _N),
        ("half_life", _D), ("rule_used rule_scan", _N), ("decay", _D),
        ("token_rows", _P), ("n_token_rows", _N),
        ("events", _P), ("most_events n_events", _N), ("counts", Counts),
        ("ids rows resident kinds experts slots shown order ends", _P),
        ("most_pairs most_experts most_lines", _N),
        ("at phase done open layer until status use", _N),
    )  # fmt: skip


_MIRRORS = (Calls, Counts, Part, RedirectEntry, View, Host, Costs, Layer, Event, Player)
SUBMITTED, READ_IDS, COMPUTED, PLACED = range(4)  # kinds of events
(
    DONE, FAILED, FAILED_ON_CPU, FAILED_TO_PLACE, WRONG_ID, WRONG_PROGRAM, YIELD_SUBMIT, YIELD_STOP,
    YIELD_CLOCK, YIELD_DIVIDE, YIELD_NEED, YIELD_START, YIELD_WAIT, YIELD_FINISH, YIELD_ISSUE,
    YIELD_FETCH,
) = range(16)  # fmt: skip
STAY, ALL_ON_DEVICE, BY_COSTS, BY_PYTHON = range(4)  # how the player divides experts


class Native:
    """The player's functions."""

    def __init__(self, path: Path) -> None:
        handle = C.CDLL(str(path))
        self.play: Any = self._bind(handle, "player_play", _N, _P)
        self.begin: Any = self._bind(handle, "player_begin", None, _P)
        self.check: Any = self._bind(handle, "player_check", _N, _P)
        self.point: Any = self._bind(handle, "player_point", None, _P, _N)
        self.fill: Any = self._bind(handle, "player_fill", None, _P, _P, _P, _P, _N, _P, _N)
        self.other_slots: Any = self._bind(handle, "player_other_slots", _N, _N, _P, _N, _N)
        self.fill_in: Any = self._bind(handle, "player_fill_in", None, _P, _N, _N, _P, _N, _N)
        sizes = (_N * len(_MIRRORS))()
        self._bind(handle, "player_sizes", None, _P)(sizes)
        if list(sizes) != [C.sizeof(mirror) for mirror in _MIRRORS]:
            raise LibraryMismatch(f"{path} is of other sources than {Path(__file__).name}")

    @staticmethod
    def _bind(handle: Any, name: str, result: Any, *arguments: Any) -> Any:
        function = getattr(handle, name)
        function.restype, function.argtypes = result, arguments
        return function


def library_name() -> str:
    """Return the file name of the library that is compiled from the present source.

    The name does not end with .so, because Python would take the file for a module.
    """
    digest = hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode()).hexdigest()[:12]
    return f"libplayer-{digest}.so.1"


def compile_player(folder: Path, flags: tuple[str, ...] = FLAGS) -> Path:
    """Compile the player into `folder`, unless it is there, and return the library's path.

    Raises LibraryMismatch if the compiler fails or is missing.
    """
    path = folder / library_name()
    if path.exists() and flags == FLAGS:
        return path
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    try:
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as made:
            pass
        command = [*compiler, *flags, "-o", made.name, str(SOURCE), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            Path(made.name).replace(path)
            return path
        Path(made.name).unlink()
        why = done.stderr.strip().splitlines()[:1]
    except OSError as e:
        why = [str(e)]
    raise LibraryMismatch(
        f"the player could not be compiled into {folder} ({' '.join(why)}); run scripts/setup, or "
        "install a C compiler"
    )


@functools.cache
def native() -> Native:
    """Return the player. The first call loads it, and compiles it if its source is newer.

    Raises LibraryMismatch.
    """
    here = SOURCE.parent
    if (here / library_name()).exists() or os.access(here, os.W_OK):
        return Native(compile_player(here))
    with tempfile.TemporaryDirectory() as folder:  # the library stays mapped
        return Native(compile_player(Path(folder)))
