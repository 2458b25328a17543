"""System calls for page placement through ctypes, for Linux on 64-bit machines.

If the kernel refuses a call, PlacementRefused has the call's name and the kernel's reason. Calls
through ctypes release the interpreter's lock, so threads can fault in pages in parallel. Addresses
are integers, and `numa.memory` owns the memory.
"""

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from numa.errors import PlacementRefused
from numa.topology import format_list

# asm/unistd: the numbers of mbind, move_pages.
_SYSCALLS = {
    "x86_64": {"mbind": 237, "move_pages": 279},
    "aarch64": {"mbind": 235, "move_pages": 239},
    "riscv64": {"mbind": 235, "move_pages": 239},
}

# linux/mempolicy.h
MPOL_PREFERRED = 1
MPOL_INTERLEAVE = 3

# asm-generic/mman-common.h
MADV_DONTNEED = 4
MADV_DONTFORK = 10
MADV_DOFORK = 11
MADV_HUGEPAGE = 14
MADV_NOHUGEPAGE = 15
MADV_POPULATE_WRITE = 23
MADV_COLLAPSE = 25

_MAP_NORESERVE = 0x4000
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4
_MASK_WORDS = 16  # 1024 nodes, the kernel's own limit
_MASK_BITS = 64 * _MASK_WORDS

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
_libc.mremap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p,
]  # fmt: skip
_libc.syscall.restype = ctypes.c_long


def map_anonymous(size_bytes: int) -> mmap.mmap:
    """Fresh private memory, untouched. Raises PlacementRefused."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        return mmap.mmap(-1, size_bytes, flags=flags)
    except OSError as e:
        words = f"the kernel refused mmap for {size_bytes} bytes ({e.strerror})"
        raise PlacementRefused(words) from e


def address_of(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def move_pages(source: int, target: int, size_bytes: int) -> None:
    """Move whole pages of private memory to another address, without copying them.

    Drops the pages that were at the target. The source has no pages afterwards. Both have to be
    mapped, the source as one mapping. Raises PlacementRefused, also before Linux 5.7.
    """
    how = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
    if _libc.mremap(source, size_bytes, size_bytes, how, target) == _MAP_FAILED:
        raise _refusal("mremap", f"{size_bytes} bytes")


def map_again(address: int, size_bytes: int) -> None:
    """Replace whole pages of private memory by fresh memory, without huge pages.

    Mappings of moved pages stay separate ones, and the kernel limits their number. Fresh ones
    merge with their neighbours. Raises PlacementRefused.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc.mmap(address, size_bytes, protection, flags, -1, 0) == _MAP_FAILED:
        raise _refusal("mmap", f"{size_bytes} bytes")
    advise(address, size_bytes, MADV_NOHUGEPAGE)


def advise(address: int, size_bytes: int, advice: int) -> None:
    """Call madvise(2) for whole pages. Raises PlacementRefused."""
    if _libc.madvise(address, size_bytes, advice) != 0:
        raise _refusal(f"madvise({_ADVICE_NAMES.get(advice, advice)})", f"{size_bytes} bytes")


_ADVICE_NAMES = {value: name for name, value in globals().items() if name.startswith("MADV_")}


def touch(address: int, size_bytes: int) -> None:
    """Fault in whole pages on the calling thread's node, or where their memory policy says.

    Keeps the contents. Raises PlacementRefused, also if memory runs out.
    """
    try:
        advise(address, size_bytes, MADV_POPULATE_WRITE)
    except PlacementRefused as refusal:
        if getattr(refusal.__cause__, "errno", None) != errno.EINVAL:
            raise
        # Linux before 5.14 lacks this advice, so write each page's first byte over itself.
        for page in range(address, address + size_bytes, mmap.PAGESIZE):
            byte = ctypes.c_char.from_address(page)
            byte.value = byte.value


def bind_pages(address: int, size_bytes: int, mode: int, nodes: Sequence[int]) -> None:
    """Set a memory policy for a range of pages with mbind(2).

    MPOL_PREFERRED without nodes places a page where the first thread that touches it runs, even if
    the process has another policy. Raises PlacementRefused, with EPERM in containers without
    CAP_SYS_NICE and ENOSYS on kernels without mbind.
    """
    mask = (ctypes.c_ulong * _MASK_WORDS)()
    for node in nodes:
        mask[node // 64] |= 1 << (node % 64)
    # The kernel reads one bit less than this argument says.
    status = _libc.syscall(
        ctypes.c_long(_number("mbind")),
        ctypes.c_void_p(address),
        ctypes.c_ulong(size_bytes),
        ctypes.c_long(mode),
        ctypes.byref(mask),
        ctypes.c_ulong(_MASK_BITS + 1),
        ctypes.c_ulong(0),
    )
    if status != 0:
        raise _refusal("mbind", f"nodes {list(nodes)}")


def node_of_pages(addresses: Sequence[int]) -> list[int]:
    """The node of each page, or a negative errno such as -ENOENT for a page that is not present.

    Raises PlacementRefused. In many containers move_pages(2) needs CAP_SYS_NICE.
    """
    n_pages = len(addresses)
    if n_pages == 0:
        return []
    pages = (ctypes.c_void_p * n_pages)(*addresses)
    status = (ctypes.c_int * n_pages)()
    # Without target nodes, move_pages only reports where pages are.
    result = _libc.syscall(
        ctypes.c_long(_number("move_pages")),
        ctypes.c_int(0),
        ctypes.c_ulong(n_pages),
        pages,
        None,
        status,
        ctypes.c_int(0),
    )
    if result < 0:
        raise _refusal("move_pages", f"{n_pages} pages")
    return list(status)


@contextmanager
def running_on(cpus: Sequence[int]) -> Iterator[None]:
    """Bind the calling thread to `cpus` during the block. Raises PlacementRefused."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        raise PlacementRefused(
            f"the kernel refused processor {format_list(tuple(cpus))} ({error.strerror});"
            " the thread runs where it ran before"
        ) from error
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _number(name: str) -> int:
    machine = platform.machine()
    if os.name != "posix" or machine not in _SYSCALLS:
        raise PlacementRefused(f"{name}: not known on {machine}") from OSError(errno.ENOSYS, name)
    return _SYSCALLS[machine][name]


def _refusal(call: str, what: str) -> PlacementRefused:
    error = OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    refusal = PlacementRefused(f"the kernel refused {call} for {what} ({error.strerror})")
    refusal.__cause__ = error
    return refusal
