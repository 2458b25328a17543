"""Runs a function before a socket of one thread begins to listen.

ggml's server creates, binds and listens to its socket in one call, so nothing else can prepare that
socket. Linux can stop a thread at a system call and ask another thread about it (seccomp's user
notification, https://docs.kernel.org/userspace-api/seccomp_filter.html). This needs no privilege.
"""

from __future__ import annotations

import ctypes as C
import errno
import fcntl
import os
import platform
import struct
import threading
from collections.abc import Callable

_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER, _NEW_LISTENER = 1, 8  # SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER
_NOTIFY, _ALLOW = 0x7FC00000, 0x7FFF0000  # SECCOMP_RET_USER_NOTIF, SECCOMP_RET_ALLOW
_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # SECCOMP_IOCTL_NOTIF_RECV, SECCOMP_IOCTL_NOTIF_SEND
_CONTINUE = 1  # SECCOMP_USER_NOTIF_FLAG_CONTINUE
_QUESTION = struct.Struct("=QIIiIQ6Q")  # seccomp_notif: id, pid, flags, and seccomp_data
_ANSWER = struct.Struct("=QqiI")  # seccomp_notif_resp: id, val, error, flags
# Instructions of Linux's filters (linux/bpf_common.h), and offsets in seccomp_data
_LOAD_4, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER, _ARCHITECTURE = 0, 4
# By machine: AUDIT_ARCH, and the numbers of the system calls seccomp and listen
_MACHINES = {
    "x86_64": (0xC000003E, 317, 50),
    "aarch64": (0xC00000B7, 277, 201),
    "riscv64": (0xC00000F3, 277, 201),
}


class _SocketFilter(C.Structure):
    _fields_ = (("n", C.c_ushort), ("steps", C.c_void_p))


def before_listening(prepare: Callable[[int], None]) -> None:
    """Call `prepare` with the socket's descriptor before each listen(2) of the calling thread.

    The thread waits until `prepare` returns. If it raises, listen fails with EPERM. This also
    holds for threads that the calling thread starts from now on. Raises OSError if the system
    cannot do this.
    """
    notified = _notified_of_listen()
    threading.Thread(target=_answer, args=(notified, prepare), name="listen", daemon=True).start()


def _notified_of_listen() -> int:
    """Stop listen(2) of this thread from now on. Returns the descriptor that gets the calls."""
    known = _MACHINES.get(platform.machine())
    if known is None:
        raise OSError(errno.ENOSYS, f"no numbers of system calls for {platform.machine()}")
    architecture, seccomp, listen = known
    steps = [
        (_LOAD_4, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 0, 3, architecture),
        (_LOAD_4, 0, 0, _NUMBER),
        (_JUMP_EQUAL, 0, 1, listen),
        (_RETURN, 0, 0, _NOTIFY),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = C.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = _SocketFilter(len(steps), C.addressof(code))
    libc = C.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(C.get_errno(), f"no_new_privs: {os.strerror(C.get_errno())}")
    notified: int = libc.syscall(seccomp, _SET_MODE_FILTER, _NEW_LISTENER, C.byref(program))
    if notified < 0:
        raise OSError(C.get_errno(), f"seccomp: {os.strerror(C.get_errno())}")
    return notified


def _answer(notified: int, prepare: Callable[[int], None]) -> None:
    """Prepare the sockets of all stopped calls, one after the other, for ever."""
    while True:
        question = bytearray(_QUESTION.size)
        try:
            fcntl.ioctl(notified, _RECEIVE, question)
        except InterruptedError:
            continue
        number, *_, fd, _, _, _, _, _ = _QUESTION.unpack(question)
        try:
            prepare(fd)
            answer = _ANSWER.pack(number, 0, 0, _CONTINUE)
        except Exception:
            answer = _ANSWER.pack(number, 0, -errno.EPERM, 0)
        try:
            fcntl.ioctl(notified, _SEND, bytearray(answer))
        except FileNotFoundError:  # the stopped thread was interrupted, and calls again
            continue
