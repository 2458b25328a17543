"""Handles of ggml's buffers and tensors: nodes of graphs, weights, and tensors of our own.

ggml's tensors live as long as their graph or model. A handle owns only a tensor that we made.
`Redirect` and `Relocation` change ggml's tensors for a while and restore them.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.errors import DoesNotFit
from offload.ggml.library import abi
from offload.ggml.library.lib import library, op_number
from offload.ggml.memory import HostRange
from offload.ggml.native import Moves

TENSOR = abi.ggml_tensor
Dims = tuple[int, int, int, int]  # ggml's order: the row first

_OP = TENSOR.op.offset
_SRC = TENSOR.src.offset
_N_SOURCES = TENSOR.src.size // 8
_BUFFER = TENSOR.buffer.offset
_DATA = TENSOR.data.offset
_VIEW_SRC = TENSOR.view_src.offset
_NAME = TENSOR.name.offset
_POINTER = C.sizeof(C.c_void_p)
_LOWEST = 4096  # lowest address of a tensor; numpy refuses arrays at address 0
_int_at = C.c_int.from_address
_pointer_at = C.c_void_p.from_address


def op_at(address: int) -> int:
    """Return the operation number of the node at `address`. Takes 0.2 us."""
    return _int_at(address + _OP).value


def source_at(address: int, index: int) -> int:
    """Return the address of the node's source `index`, or 0 if there is none."""
    return _pointer_at(address + _SRC + index * _POINTER).value or 0


def sources_at(address: int) -> list[int]:
    """Return the addresses of the node's sources, in order, up to the first missing one."""
    words: list[int] = (C.c_size_t * _N_SOURCES).from_address(address + _SRC)[:]
    return words[: words.index(0)] if 0 in words else words


def buffer_at(address: int) -> int:
    """Return the address of the buffer that the tensor lies in, or 0 if it has none."""
    return _pointer_at(address + _BUFFER).value or 0


def data_at(address: int) -> int:
    """Return the address of the tensor's data, or 0 if it has none yet."""
    return _pointer_at(address + _DATA).value or 0


def name_is_at(address: int, start: bytes) -> bool:
    """True if the name of the tensor at `address` begins with `start`."""
    return C.string_at(address + _NAME, len(start)) == start


def root_at(address: int) -> int:
    """Return the address of the viewed tensor if this one is a view, otherwise `address`."""
    return _pointer_at(address + _VIEW_SRC).value or address


def size_at(address: int) -> int:
    """Return the number of bytes from the tensor's first element to its last."""
    return int(library().ggml_nbytes(address))


class _Everywhere:
    """The address space as an array of overlapping tensor structs, one every 8 bytes.

    numpy reads only the elements that are indexed.
    """

    __array_interface__ = {  # noqa: RUF012
        "version": 3,
        "data": (_LOWEST, True),
        "typestr": f"|V{C.sizeof(TENSOR)}",
        "shape": (1 << 44,),
        "strides": (_POINTER,),
    }


_everywhere = np.asarray(_Everywhere())


def structs_at(addresses: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the structs of the tensors at these addresses, as words [n, words]."""
    structs: NDArray[np.void] = _everywhere[(addresses - np.uint64(_LOWEST)) >> np.uint64(3)]
    words: NDArray[np.uint64] = structs.view(np.uint64)
    return words.reshape(len(addresses), C.sizeof(TENSOR) // _POINTER)


def sources_of(structs: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the addresses of these structs' sources [n, sources], 0 for none."""
    return structs[:, _SRC // _POINTER : _VIEW_SRC // _POINTER]


def pointers_of(structs: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the part of these structs with the addresses of their sources and viewed tensors."""
    return structs[:, _SRC // _POINTER : _VIEW_SRC // _POINTER + 1]


def read_by(structs: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the addresses of these structs' sources and viewed tensors, without duplicates."""
    pointers = pointers_of(structs)
    return np.unique(pointers[pointers != 0])


class Buffer:
    """Zeroed device memory, which the caller closes. A NaN in unwritten memory would spread."""

    def __init__(self, buffer_type: int, size_bytes: int, what: str) -> None:
        self._lib = library()
        self.size_bytes = size_bytes
        address = self._lib.ggml_backend_buft_alloc_buffer(buffer_type, size_bytes)
        if not address:
            raise DoesNotFit(
                f"{size_bytes / 2**20:.2f} MiB of device memory for {what} were refused; "
                "lower --vram"
            )
        self.address: int = address
        self.base: int = self._lib.ggml_backend_buffer_get_base(address)
        self._lib.ggml_backend_buffer_clear(address, 0)

    def __repr__(self) -> str:
        return f"Buffer({self.size_bytes / 2**20:.1f} MiB at {self.base:#x})"

    @property
    def kind(self) -> int:
        """Address of the buffer type, for comparisons."""
        return int(self._lib.ggml_backend_buffer_get_type(self.address))

    @property
    def host_range(self) -> HostRange:
        """The whole buffer, which must be in host memory."""
        return HostRange(self.base, self.size_bytes, self)

    def close(self) -> None:
        address, self.address = self.address, 0
        if address:
            self._lib.ggml_backend_buffer_free(address)


class Tensor:
    """A tensor at an address. Tensors with the same address are equal."""

    __slots__ = ("_kept", "_struct", "address")

    def __init__(self, address: int) -> None:
        self.address = address
        self._struct: Any = TENSOR.from_address(address)
        self._kept: tuple[Tensor, ...] = ()

    @classmethod
    def _own(cls, struct: Any, kept: tuple[Tensor, ...] = ()) -> Tensor:
        made = cls.__new__(cls)
        made._struct, made.address, made._kept = struct, C.addressof(struct), kept
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tensor) and other.address == self.address

    def __hash__(self) -> int:
        return hash(self.address)

    def __repr__(self) -> str:
        return f"<Tensor {self.name} {self.type} {self.shape}>"

    # -- reading ---------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return bytes(self._struct.name).split(b"\0", 1)[0].decode("utf-8", "replace")

    @property
    def type(self) -> str:
        """The type's name in ggml, e.g. q4_K."""
        name: bytes = library().ggml_type_name(self._struct.type)
        return name.decode()

    @property
    def shape(self) -> Dims:
        a, b, c, d = self._struct.ne
        return a, b, c, d

    @property
    def strides(self) -> Dims:
        """Bytes from one element, row or matrix to the next."""
        a, b, c, d = self._struct.nb
        return a, b, c, d

    @property
    def position(self) -> int:
        """The address of the data, for comparisons; 0 if it has none yet."""
        return self._struct.data or 0

    @property
    def size_bytes(self) -> int:
        return int(library().ggml_nbytes(self.address))

    @property
    def is_view(self) -> bool:
        return bool(self._struct.view_src)

    @property
    def root(self) -> Tensor:
        """The tensor whose data this view shows, or this tensor."""
        return Tensor(root_at(self.address))

    @property
    def parameters(self) -> bytes:
        """Parameters of the operation, beside its sources."""
        return bytes(self._struct.op_params)

    @property
    def is_on_host(self) -> bool:
        """True if the tensor lies in host memory."""
        buffer = self._struct.buffer
        return bool(buffer) and bool(library().ggml_backend_buffer_is_host(buffer))

    @property
    def is_output(self) -> bool:
        """True if the tensor is flagged as an output of its graph."""
        return bool(self._struct.flags & abi.GGML_TENSOR_FLAG_OUTPUT)

    def is_op(self, name: str) -> bool:
        """True if the node computes the operation of that name, e.g. MUL_MAT."""
        return bool(self._struct.op == op_number(name))

    @property
    def operation(self) -> int:
        """The number of the operation that the node computes."""
        return int(self._struct.op)

    def source(self, index: int) -> Tensor | None:
        """Return the tensor that the node reads as its source `index`, or None."""
        address = source_at(self.address, index)
        return Tensor(address) if address else None

    def lie_as(self, address: int) -> None:
        """Give the tensor the buffer and the data of the tensor at `address`."""
        self._struct.buffer, self._struct.data = buffer_at(address), data_at(address)

    def lie_with(self, other: Tensor) -> None:
        """Give the tensor the buffer and the data of another one."""
        self.lie_as(other.address)

    def lie_from(self, buffer: Buffer, offset_bytes: int) -> None:
        """Point the tensor's data to an offset of a buffer."""
        _place(self._struct, buffer, offset_bytes)

    def lie_at(self, memory: HostRange) -> None:
        """Point the tensor's data to `memory`."""
        self._struct.data = memory.address

    def lie_in(self, buffer: int) -> None:
        """Set the tensor's buffer, which may place its data later. `buffer`: its address."""
        self._struct.buffer = buffer

    def show(self, whole: Tensor) -> None:
        """Make this view, which has no data, a view of our tensor `whole` at the same offset."""
        struct = self._struct
        struct.view_src, struct.buffer = whole.address, whole._struct.buffer
        struct.data = whole.position + struct.view_offs

    # -- making ----------------------------------------------------------------------------------

    def alike(
        self,
        shape: Dims | None = None,
        strides: Dims | None = None,
        *,
        at: tuple[Buffer, int] | None = None,
        sources: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Make a tensor of our own like this one, but never a view.

        `at` is a buffer and an offset in it. With `sources` the tensor computes this node's
        operation from them.
        """
        struct = self._copied()
        _shape(struct, shape, strides)
        if at is not None:
            _place(struct, *at)
        return Tensor._own(struct, _read(struct, sources))

    def computing(
        self, op: str, sources: Sequence[Tensor], *, shape: Dims | None = None,
        strides: Dims | None = None, like: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Make a node that writes to this tensor's data, with the op parameters of `like`."""
        struct = TENSOR.from_buffer_copy(self._struct)
        _shape(struct, shape, strides)
        struct.op = op_number(op)
        struct.flags |= abi.GGML_TENSOR_FLAG_COMPUTE  # backends skip nodes without it
        if like is not None:
            struct.op_params = like._struct.op_params
        return Tensor._own(struct, _read(struct, sources))

    def part(
        self, dim: int, first: int, n: int, *, sources: Sequence[Tensor] | None = None,
        at: tuple[Buffer, int] | None = None, seen_from: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Make a tensor of elements [first, first + n) of one dimension.

        With `sources` it computes this node's operation from them. Its data is that part of this
        tensor's data by default. With `at` the data is contiguous at an offset of a buffer. With
        `seen_from`, for views, the data is as far from the second tensor of the pair as this
        tensor's data is from the first.
        """
        struct = self._copied()
        struct.ne[dim] = n
        if at is not None:
            _place(struct, *at)
        elif seen_from is not None:
            whole, other = seen_from
            struct.buffer = other._struct.buffer
            struct.data = other.position + self.position - whole.position
        else:
            struct.data = self.position + first * self.strides[dim]
        return Tensor._own(struct, _read(struct, sources))

    def _copied(self) -> Any:
        """Return a copy of the struct, without what makes it a view."""
        struct = TENSOR.from_buffer_copy(self._struct)
        struct.view_src, struct.view_offs, struct.extra = None, 0, None
        return struct

    @property
    def sources(self) -> list[Tensor]:
        """The tensors that the node reads, in order, up to the first missing one."""
        sources = []
        for index in range(len(self._struct.src)):
            address = source_at(self.address, index)
            if not address:
                break
            sources.append(Tensor(address))
        return sources

    def integers(self) -> NDArray[np.int32] | NDArray[np.int64]:
        """Return the numbers of an i32 or i64 tensor, copied from the memory of its device."""
        struct = abi.ggml_tensor.from_address(self.address)
        raw = np.empty(library().ggml_nbytes(self.address), np.uint8)
        library().ggml_backend_tensor_get(self.address, raw.ctypes.data, 0, len(raw))
        kind = np.dtype(np.int64 if self.type == "i64" else np.int32)
        shape, strides = tuple(struct.ne)[::-1], tuple(struct.nb)[::-1]
        values: NDArray[np.int32] | NDArray[np.int64]
        values = np.ndarray(shape, kind, raw.data, 0, strides)
        return values

    @property
    def is_contiguous(self) -> bool:
        """True if the elements of an unquantised type lie in order without gaps."""
        (a, b, c, _), (element, *_) = self.shape, self.strides
        return self.strides == (element, element * a, element * a * b, element * a * b * c)

    def overlaps(self, other: Tensor) -> bool:
        """True if the data of both tensors share any bytes."""
        return (
            self.position < other.position + other.size_bytes
            and other.position < self.position + self.size_bytes
        )

    def with_parameters(self, params: Sequence[int]) -> Tensor:
        """Set the operation's parameters of a node of our own. Returns the node."""
        for i, param in enumerate(params):
            self._struct.op_params[i] = param
        return self

    def viewed(
        self, shape: Dims, strides: Dims, op: str = "VIEW", params: Sequence[int] = ()
    ) -> Tensor:
        """Make a node `op` with `params` that shows the same memory in another shape."""
        made = self.computing(op, [self], shape=shape, strides=strides)
        made._struct.view_src = self._struct.view_src or self.address
        for i, param in enumerate(params):
            made._struct.op_params[i] = param
        return made


def new_tensor(
    type_name: str, shape: Dims, at: tuple[Buffer, int] | None, op: str = "NONE",
    sources: Sequence[Tensor] = (), strides: Dims | None = None, name: str = "",
) -> Tensor:  # fmt: skip
    """Make a tensor of our own at an offset of a buffer, contiguous unless `strides` are given.

    With `op` it is a node that computes its data from `sources`. If `at` is None, it has no data
    until it is placed (`lie_in`).
    """
    struct = TENSOR()
    struct.type = type_number(type_name)
    lib = library()
    row_bytes = lib.ggml_row_size(struct.type, shape[0])
    element_bytes = lib.ggml_type_size(struct.type)
    nb = element_bytes, row_bytes, row_bytes * shape[1], row_bytes * shape[1] * shape[2]
    _shape(struct, shape, strides or nb)
    if at is not None:
        _place(struct, *at)
    C.memmove(C.addressof(struct) + _NAME, name.encode(), min(len(name.encode()), 63))
    struct.op = op_number(op)
    if op != "NONE":
        struct.flags |= abi.GGML_TENSOR_FLAG_COMPUTE  # backends skip nodes without it
    return Tensor._own(struct, _read(struct, sources))


def host_bytes(memory: HostRange) -> Tensor:
    """Return host memory as a tensor with one row of bytes, to copy from."""
    struct, n = TENSOR(), memory.size_bytes
    struct.type, struct.data = type_number("i8"), memory.address
    _shape(struct, (n, 1, 1, 1), (1, n, n, n))
    return Tensor._own(struct)


@cache
def type_number(name: str) -> int:
    """Return the number of a type by its name in ggml. Raises ValueError for an unknown name."""
    lib = library()
    for number in range(abi.GGML_TYPE_COUNT):
        if (lib.ggml_type_name(number) or b"").decode() == name:
            return number
    raise ValueError(f"the installed library knows no type {name}")


def _shape(struct: Any, shape: Dims | None, strides: Dims | None) -> None:
    if shape is not None:
        struct.ne[:] = shape
    if strides is not None:
        struct.nb[:] = strides


def _read(struct: Any, sources: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
    """Make the node read `sources`, unless they are None. Returns the tensors to keep alive."""
    if sources is None:
        return ()
    struct.src[:] = [s.address for s in sources] + [None] * (len(struct.src) - len(sources))
    return tuple(sources)


def _place(struct: Any, buffer: Buffer, offset_bytes: int) -> None:
    struct.buffer, struct.data = buffer.address, buffer.base + offset_bytes


class Redirect:
    """One source of a node, pointed elsewhere while the node is submitted."""

    __slots__ = ("_original", "_pointer")

    def __init__(self, node: Tensor, index: int) -> None:
        self._pointer = _pointer_at(node.address + _SRC + index * _POINTER)
        self._original = self._pointer.value

    def to(self, target: Tensor) -> None:
        """Read `target` instead; the caller keeps it until the computation is complete."""
        self._pointer.value = target.address

    def back(self) -> None:
        self._pointer.value = self._original

    @property
    def address(self) -> int:
        """The address of the tensor that the node reads now."""
        return self._pointer.value or 0

    @property
    def entry(self) -> tuple[int, int]:
        """The address of the node's pointer, and the pointer's own value."""
        return C.addressof(self._pointer), self._original or 0


class Relocation(Moves):
    """Results and their views, moved elsewhere while their graph is submitted."""

    def __init__(
        self, results: Sequence[tuple[Sequence[int], int]] = (), buffer: Buffer | None = None
    ) -> None:
        """`results`: (addresses of a result and its views, the result's offset in `buffer`)."""
        moves: list[tuple[int, int, int]] = []  # (address of a pointer, new value, old value)
        for addresses, offset_bytes in results:
            assert buffer is not None
            start = data_at(addresses[0])
            for address in addresses:
                was = data_at(address)
                moves.append((address + _DATA, buffer.base + offset_bytes + was - start, was))
                moves.append((address + _BUFFER, buffer.address, buffer_at(address)))
        super().__init__(moves)
