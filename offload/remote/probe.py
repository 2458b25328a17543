"""Greets a worker before ggml does. ggml's client ends the process if a worker does not answer."""

from __future__ import annotations

import struct
from contextlib import closing

from offload.errors import WorkerUnavailable
from offload.remote.address import Address
from offload.remote.deadline import DeadlineSocket, connect

CONNECT_S = 3.0
_ANSWER_S = 5.0
_HELLO = 14  # RPC_CMD_HELLO, the same number in all of ggml's versions
_CAPS_BYTES = 24
COUNT_DEVICES = struct.pack("<BQ", 15, 0)  # RPC_CMD_DEVICE_COUNT without a body
GREETING = struct.pack("<BQ", _HELLO, _CAPS_BYTES) + bytes(_CAPS_BYTES)
_ANSWER = struct.Struct("<Q4B24s")  # size of the answer, version, padding, capabilities
_COUNT_ANSWER = struct.Struct("<QI")  # size of the answer, number of devices
# More than a machine has. ggml's client makes an object for each device that a worker claims.
MOST_DEVICES = 64


def greeting_answer(version: tuple[int, int, int]) -> bytes:
    """Return the answer to a greeting by a server of this version, which can use TCP alone."""
    return _ANSWER.pack(_ANSWER.size - 8, *version, 0, bytes(_CAPS_BYTES))


def greet(
    worker: Address, *, connect_s: float = CONNECT_S, answer_s: float = _ANSWER_S
) -> tuple[int, int, int]:
    """Return the version of the worker's protocol.

    Raises WorkerUnavailable with one sentence if the worker cannot be reached, does not answer in
    `answer_s` seconds, or is no RPC server.
    """
    with closing(_connected(worker, connect_s)) as connection:
        return _greeted(worker, connection, answer_s)


def count_devices(
    worker: Address, *, connect_s: float = CONNECT_S, answer_s: float = _ANSWER_S
) -> int:
    """Return the number of devices that a worker offers. Raises WorkerUnavailable.

    Refuses a worker that claims more than MOST_DEVICES.
    """
    with closing(_connected(worker, connect_s)) as connection:
        _greeted(worker, connection, answer_s)
        answer = _asked(worker, connection, COUNT_DEVICES, _COUNT_ANSWER.size, answer_s)
    if len(answer) != _COUNT_ANSWER.size:
        raise WorkerUnavailable(gone(str(worker)))
    size, n_devices = _COUNT_ANSWER.unpack(answer)
    if size != _COUNT_ANSWER.size - 8 or n_devices > MOST_DEVICES:
        raise WorkerUnavailable(
            f"the worker at {worker} claims {n_devices} devices, and a worker has at most "
            f"{MOST_DEVICES}: it is no RPC server of ggml, or it is hostile (--rpc)"
        )
    return int(n_devices)


def reach(worker: Address, connect_s: float = CONNECT_S) -> None:
    """Raise WorkerUnavailable, with one sentence, if nobody accepts connections at the address."""
    _connected(worker, connect_s).close()


def _connected(worker: Address, connect_s: float) -> DeadlineSocket:
    try:
        return connect(worker, connect_s)
    except OSError as e:
        if isinstance(e, ConnectionError) and not isinstance(e, ConnectionRefusedError):
            raise _closes(worker) from e  # the same servers, noticed a moment earlier
        reason = "no answer" if isinstance(e, TimeoutError) else e.strerror or str(e)
        raise WorkerUnavailable(
            f"the worker at {worker} cannot be reached within {connect_s:g} s ({reason}): start "
            "`specoffload worker` or rpc-server there, or correct --rpc"
        ) from e


def _greeted(worker: Address, connection: DeadlineSocket, answer_s: float) -> tuple[int, int, int]:
    answer = _asked(worker, connection, GREETING, _ANSWER.size, answer_s)
    if len(answer) != _ANSWER.size:
        raise _closes(worker)
    size, *version, _, _ = _ANSWER.unpack(answer)
    if size != _ANSWER.size - 8:
        raise _not_rpc(worker, f"an answer of {size} bytes")
    return (version[0], version[1], version[2])


def _asked(
    worker: Address, connection: DeadlineSocket, question: bytes, n_bytes: int, answer_s: float
) -> bytes:
    """Send a question, and return an answer of `n_bytes`, or less if the worker closes.

    Question and answer may take `answer_s` together.
    """
    connection.end_in(answer_s)
    try:
        connection.sendall(question)
        return connection.receive(n_bytes)
    except TimeoutError:
        raise silent(worker, answer_s) from None
    except ConnectionError:  # reset, as by an SSH tunnel without a worker at its other end
        return b""
    except OSError as e:
        raise _not_rpc(worker, e.strerror or str(e)) from e


def _closes(worker: Address) -> WorkerUnavailable:
    return WorkerUnavailable(
        f"the worker at {worker} closes connections at once: it serves another client, is "
        "missing behind a tunnel, wants a secret (--rpc-secret-file), or is no RPC server of ggml "
        "(--rpc)"
    )


def gone(worker: str) -> str:
    """Return the sentence for a worker that closes a connection in use."""
    return f"the worker at {worker} is gone: it closed the connection; start it again"


def silent(worker: Address, answer_s: float) -> WorkerUnavailable:
    """Return the error for a worker that can be reached and does not answer."""
    return WorkerUnavailable(
        f"the worker at {worker} does not answer within {answer_s:g} s: it hangs, or it is serving "
        "another client, and it serves one at a time"
    )


def _not_rpc(worker: Address, reason: str) -> WorkerUnavailable:
    return WorkerUnavailable(
        f"{worker} (--rpc) is not an RPC server of ggml: it answers a greeting wrongly ({reason})"
    )
