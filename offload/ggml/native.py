"""Loads the functions of graphs.c, and mirrors its structs."""

from __future__ import annotations

import ctypes as C
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offload.errors import LibraryMismatch
from offload.ggml.library import abi, log
from offload.ggml.library.lib import library, op_number
from offload.ggml.player_building import SOURCE, compile_player

_P, _N = C.c_void_p, C.c_int64
_N_KEY = 16
_N_ANSWERS = 1 << 12  # answers that a device remembers, a power of two


def _fields(*of: tuple[str, Any]) -> list[tuple[str, Any]]:
    return [(name, kind) for names, kind in of for name in names.split()]


class StructOffsets(C.Structure):
    """Offsets in ggml's structs, and their sizes in bytes."""

    _fields_ = _fields(
        (
            "tensor_bytes buffer type ne nb op src n_src view_src buft header_bytes n_nodes nodes",
            _N,
        ),
        ("use_counts hash_set uid device_bytes stream_bytes data graph_compute set_rows", _N),
    )


class ProductAnswer(C.Structure):
    _fields_ = _fields(("key", _N * _N_KEY), ("takes", _N))


class HostTypes(C.Structure):
    """The types of our host memory, and the numbers of the operations that multiply."""

    _fields_ = _fields(("types", _P * 2), ("product experts", _N))


class Answers(C.Structure):
    """What the native functions know about a device. Lies directly behind the device's struct."""

    _fields_ = _fields(
        ("supports_op supports_buft inner ask memory host", _P), ("remembers is_sure", _N),
        ("table", _P), ("n_table n_asked is_direct", _N), ("interrupt heeds cache_type", _P),
        ("attention attention_batch only_cpu", _N),
    )  # fmt: skip

    def remember(self) -> None:
        """Make room for answers. They are kept while `remembers` is set."""
        self._table = (ProductAnswer * _N_ANSWERS)()
        self.table, self.n_table = C.addressof(self._table), _N_ANSWERS

    def forget(self) -> None:
        """Forget all answers, because Python might answer otherwise now."""
        if self.n_table:
            C.memset(self.table, 0, C.sizeof(self._table))


class StreamEntry(C.Structure):
    """What the native functions know about a stream. Lies directly behind the stream's struct."""

    _fields_ = _fields(
        ("compute inner python answers", _P), ("n_direct", _N), ("copy copy_cache", _P)
    )  # fmt: skip


class Snapshot(C.Structure):
    _fields_ = _fields(("n_bytes n_nodes n_tensors", _N))


class PointerMove(C.Structure):
    """A pointer in one of ggml's structs, and its two values."""

    _fields_ = _fields(("pointer there back", _P))


class SchedulerBuffer(C.Structure):
    """A buffer in which a scheduler allocates its graphs, and the bytes of it that they use."""

    _fields_ = _fields(
        ("buffer base init_tensor reset alloc_size before", _P), ("is_lent end touched", _N),
        ("next", _P),
    )  # fmt: skip


_MIRRORS = (
    StructOffsets,
    ProductAnswer,
    HostTypes,
    Answers,
    StreamEntry,
    Snapshot,
    PointerMove,
    SchedulerBuffer,
)


class GraphFunctions:
    """The functions of graphs.c."""

    def __init__(self, path: Path) -> None:
        handle = C.CDLL(str(path))
        self.products: Any = _bind(handle, "graphs_products", _N, _P, _P, _P, _N)
        self.snapshot: Any = _bind(handle, "graphs_snapshot", _P, _P, _N)
        self.matches: Any = _bind(handle, "graphs_match", C.c_bool, _P, _P)
        self.forget: Any = _bind(handle, "graphs_forget", None, _P)
        self.move: Any = _bind(handle, "graphs_move", None, _P, _N, _N)
        self.watch: Any = _bind(handle, "graphs_watch", None, _P)
        self.unwatch: Any = _bind(handle, "graphs_unwatch", None, _P)
        self.unwatch_rows: Any = _bind(handle, "graphs_unwatch_rows", None, _P)
        self._written: Any = _bind(handle, "graphs_written", _N, _P, _P)
        self.copy = _address(handle, "graphs_copy")
        self.base = _address(handle, "graphs_base")
        self.reset = _address(handle, "graphs_reset")
        self.init_tensor = _address(handle, "graphs_init_tensor")
        self.supports_op = _address(handle, "graphs_supports_op")
        self.compute = _address(handle, "graphs_compute")
        self.supports_buft = _address(handle, "graphs_supports_buft")
        sizes = (_N * len(_MIRRORS))()
        _bind(handle, "graphs_sizes", None, _P)(sizes)
        if list(sizes) != [C.sizeof(mirror) for mirror in _MIRRORS]:
            raise LibraryMismatch(
                f"{path} was compiled from other sources than those beside {Path(__file__).name}"
            )
        _bind(handle, "graphs_use_layout", None, _P)(C.byref(_offsets()))
        to_python = _bind(handle, "graphs_log_to", None, _P)
        log.pass_through(library(), to_python, _address(handle, "graphs_log"))

    def written_rows(self, cache: int) -> range | None:
        """Return the rows of the cache at an address (offload/ggml/ram_cache.py)."""
        rows = (_N * 2)()
        return range(rows[0], rows[1] + 1) if self._written(cache, rows) else None


def _bind(handle: Any, name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(handle, name)
    function.restype, function.argtypes = result, arguments
    return function


def _address(handle: Any, name: str) -> int:
    return C.cast(getattr(handle, name), _P).value or 0


def _offsets() -> StructOffsets:
    tensor, graph = abi.ggml_tensor, abi.ggml_cgraph
    return StructOffsets(
        tensor_bytes=C.sizeof(tensor), buffer=tensor.buffer.offset, type=tensor.type.offset,
        ne=tensor.ne.offset, nb=tensor.nb.offset, op=tensor.op.offset, src=tensor.src.offset,
        n_src=tensor.src.size // C.sizeof(_P), view_src=tensor.view_src.offset,
        buft=abi.ggml_backend_buffer.buft.offset, header_bytes=graph.uid.offset,
        n_nodes=graph.n_nodes.offset, nodes=graph.nodes.offset,
        use_counts=graph.use_counts.offset, hash_set=graph.visited_hash_set.offset,
        uid=graph.uid.offset, device_bytes=C.sizeof(abi.ggml_backend_device),
        stream_bytes=C.sizeof(abi.ggml_backend), data=tensor.data.offset,
        graph_compute=abi.ggml_backend.iface.offset + abi.ggml_backend_i.graph_compute.offset,
        set_rows=op_number("SET_ROWS"),
    )  # fmt: skip


@functools.cache
def native() -> GraphFunctions:
    """Return the functions. The first call compiles them if the installed library has other
    sources. Raises LibraryMismatch."""
    return GraphFunctions(compile_player(SOURCE.parent))


class Moves:
    """Pointers that have other values while a graph is submitted."""

    def __init__(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """`moves`: (address of a pointer, value while a graph is submitted, its own value)."""
        self.n_pointers = len(moves)
        if moves:
            self._entries = (PointerMove * len(moves))(*[PointerMove(*move) for move in moves])
            self._move, self._at = native().move, C.addressof(self._entries)

    def there(self) -> None:
        if self.n_pointers:
            self._move(self._at, self.n_pointers, 1)

    def back(self) -> None:
        if self.n_pointers:
            self._move(self._at, self.n_pointers, 0)
