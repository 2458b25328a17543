"""Loads the player, a small native library, and mirrors its structs (player.c describes them).

`scripts/setup` and `pip install` compile it. In a checkout whose source has changed since, the
first use compiles it again, which takes a second (building.py).
"""

from __future__ import annotations

import ctypes as C
import functools
from pathlib import Path
from typing import Any

from offload.errors import LibraryMismatch
from offload.ggml.player_building import SOURCE, compile_player

_P, _N, _D = C.c_void_p, C.c_int64, C.c_double


def _fields(*of: tuple[str, Any]) -> list[tuple[str, Any]]:
    return [(name, kind) for names, kind in of for name in names.split()]


class Calls(C.Structure):
    """ggml's functions, and the offsets of fields in its tensors."""

    _fields_ = _fields(
        ("compute set get synchronize set_n_threads set_threadpool", _P),
        ("at_ne at_nb at_data at_buffer at_parameters", _N),
    )


class PlayerCounts(C.Structure):
    """Counts of one decode, by their names in StreamCounters."""

    _fields_ = _fields(
        ("cuts bands router_reads hits misses prefetched_used", _N),
        ("n_pairs_hit n_pairs_streamed n_pairs_host n_recorded n_nodes_ahead split_layers", _N),
        ("whole_graphs n_repairs layers_ahead layers_repeated layers_missed n_between", _N),
        ("layers_rung rows_by_kernels", _N),
        ("host_s split_s step_s idle_s native_s between_s left_s", _D),
    )


class PlayerPart(C.Structure):
    _fields_ = _fields(("first end", _N), ("graph uid", _P), ("first_uid", C.c_uint64))


class RedirectEntry(C.Structure):
    _fields_ = _fields(("source own other", _P))


class View(C.Structure):
    _fields_ = _fields(("tensor base", _P), ("stride axis", _N))


class PlayerHost(C.Structure):
    _fields_ = _fields(
        ("graph", _P),
        ("most row_bytes rows_per_token n_counts n_sources n_scales", _N),
        ("ids places inputs rows counts sources scales staging results placing", _P),
        ("header_bytes out_bytes n_out_counts n_into_counts", _N),
        ("out_counts into_counts into set_rows down", _P),
    )


class PlayerCosts(C.Structure):
    _fields_ = _fields(
        ("n_lines n_ends n_rows n_copies", _N),
        ("by_rows_s work copies_s idle", _P),
        ("idle_fixed_s copy_s", _D),
    )


class Layer(C.Structure):
    _fields_ = _fields(
        ("layer cut at last n_experts n_used n_tokens n_slots n_own_slots", _N),
        ("may_repeat n_ahead n_readers", _N),
        ("ids_tensor ids_at", _P), ("ids_bytes ids_stride", _N),
        ("rows_tensor rows_to", _P), ("rows_bytes", _N),
        ("slot_ids_tensor slot_ids slot_of state last_use reason rank score by_token", _P),
        ("likeliest likeliest_score record recorded", _P),
        ("n_record n_redirects n_reads n_views home", _N),
        ("redirects views host weights scale_tables output", _P),
        ("first_slot n_slots_seen n_pairs n_on_device n_on_host n_early waits missed", _N),
        ("split_at_s", _D), ("issues", _N),
    )  # fmt: skip


class Segment(C.Structure):
    _fields_ = _fields(("part other first end next", _N))


class PlayerAhead(C.Structure):
    """Memory for layers that are computed before the router's ids are known."""

    _fields_ = _fields(
        ("segments", _P), ("n_segments", _N), ("moved", _P), ("n_moved", _N),
        ("resume ids_tensor ids", _P), ("ids_bytes", _N),
        ("ids_at table_at table_tensor table there taken", _P), ("n_table n_taken", _N),
    )  # fmt: skip


class Bell(C.Structure):
    """A stream beside the backend's, the driver's calls for it, events and words."""

    _fields_ = _fields(
        ("wait_for record write wait query backend_record backend_wait", _P),
        ("see tell stream routed landed backend_routed backend_landed rung answered", _P),
        ("n_told n_ahead n_layers n_steps is_broken", _N),
    )  # fmt: skip


class Ringing(C.Structure):
    _fields_ = _fields(("products rest device_row host_row", _N), ("ids rows", _P))


class PlayerEvent(C.Structure):
    _fields_ = _fields(("kind layer a b", _N), ("start_s end_s", _D))


class Player(C.Structure):
    _fields_ = _fields(
        ("calls stream cpu program", _P), ("n_words", _N),
        ("parts", _P), ("n_parts", _N),
        ("layers", _P), ("n_layers n_stops", _N),
        ("costs", _P), ("splitter", _N),
        ("interrupt", _P), ("n_threads", _N * 2), ("pools", _P * 2),
        ("chosen recording clocked python_open from_disk whole clock_ns", _N),
        ("half_life", _D), ("rule_used rule_scan rule_skipped", _N), ("decay", _D),
        ("token_rows", _P), ("n_token_rows most_token_rows", _N),
        ("events", _P), ("most_events n_events", _N), ("counts", PlayerCounts),
        ("ids rows used resident kinds experts slots shown order ends ahead", _P),
        ("bell ringing", _P), ("first_part is_careful", _N),
        ("late late_pairs", _P),
        ("n_late n_arrived n_late_done most_pairs most_experts most_lines", _N),
        ("n_used at phase done open layer until status use known", _N), ("read_s", _D),
    )  # fmt: skip


_MIRRORS = (
    Calls, PlayerCounts, PlayerPart, RedirectEntry, View, PlayerHost, PlayerCosts, Layer, Segment,
    PlayerAhead, Bell, Ringing, PlayerEvent, Player,
)  # fmt: skip
SUBMITTED, READ_IDS, COMPUTED, PLACED = range(4)  # kinds of events
(
    DONE, FAILED, FAILED_ON_CPU, FAILED_TO_PLACE, WRONG_ID, WRONG_PROGRAM, DRIVER_FAILED,
    YIELD_SUBMIT, YIELD_STOP, YIELD_CLOCK, YIELD_NEED, YIELD_WAIT, YIELD_ISSUE, YIELD_FETCH,
    YIELD_LATE,
) = range(15)  # fmt: skip
BROKEN = -1  # `status` of DRIVER_FAILED if the watchdog has released the device
IS_DIVIDED = 2  # `phase` of a layer whose experts Python has divided
STAY, ALL_ON_DEVICE, BY_COSTS = range(3)  # how the player divides experts


class PlayerFunctions:
    """The player's functions."""

    def __init__(self, path: Path) -> None:
        handle = C.CDLL(str(path))
        self.play: Any = self._bind(handle, "player_play", _N, _P)
        self.send: Any = self._bind(handle, "player_send", _N, _P)
        self.begin: Any = self._bind(handle, "player_begin", None, _P)
        self.check: Any = self._bind(handle, "player_check", _N, _P)
        self.move: Any = self._bind(handle, "player_move", None, _P, _N)
        self.point: Any = self._bind(handle, "player_point", None, _P, _N)
        self.fill: Any = self._bind(handle, "player_fill", None, _P, _P, _P, _P, _N, _P, _N)
        self.divide: Any = self._bind(handle, "player_divide", None, _P, _N)
        self.other_slots: Any = self._bind(handle, "player_other_slots", _N, _N, _P, _N, _N)
        self.fill_in: Any = self._bind(handle, "player_fill_in", None, _P, _N, _N, _P, _N, _N)
        self.table_slots: Any = self._bind(
            handle, "player_table_slots", _N, _P, _P, _P, _N, _N, _N, _N, _P, _P, _P, _P
        )
        sizes = (_N * len(_MIRRORS))()
        self._bind(handle, "player_sizes", None, _P)(sizes)
        if list(sizes) != [C.sizeof(mirror) for mirror in _MIRRORS]:
            raise LibraryMismatch(
                f"{path} was compiled from other sources than those beside {Path(__file__).name}"
            )

    @staticmethod
    def _bind(handle: Any, name: str, result: Any, *arguments: Any) -> Any:
        function = getattr(handle, name)
        function.restype, function.argtypes = result, arguments
        return function


@functools.cache
def native() -> PlayerFunctions:
    """Return the player. The first call compiles it if the installed library has other sources.

    Raises LibraryMismatch.
    """
    return PlayerFunctions(compile_player(SOURCE.parent))
