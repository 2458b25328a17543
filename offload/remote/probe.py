"""Greets a worker before ggml does. ggml's client ends the process if a worker does not answer."""

from __future__ import annotations

import socket
import struct
from contextlib import closing

from offload.errors import WorkerUnavailable
from offload.remote.address import Address

CONNECT_S = 3.0
_ANSWER_S = 5.0
_HELLO = 14  # RPC_CMD_HELLO, the same number in all of ggml's versions
_CAPS_BYTES = 24
_ANSWER = struct.Struct("<Q4B24s")  # size of the answer, version, padding, capabilities


def greet(
    worker: Address, *, connect_s: float = CONNECT_S, answer_s: float = _ANSWER_S
) -> tuple[int, int, int]:
    """Return the version of the worker's protocol.

    Raises WorkerUnavailable with one sentence if the worker cannot be reached, does not answer in
    `answer_s` seconds, or is no RPC server.
    """
    try:
        connection = socket.create_connection((worker.host, worker.port), timeout=connect_s)
    except OSError as e:
        why = "no answer" if isinstance(e, TimeoutError) else e.strerror or str(e)
        raise WorkerUnavailable(
            f"the worker at {worker} cannot be reached within {connect_s:g} s ({why}): start "
            "`specoffload worker` or rpc-server there, or correct --rpc"
        ) from e
    with closing(connection):
        connection.settimeout(answer_s)
        try:
            connection.sendall(struct.pack("<BQ", _HELLO, _CAPS_BYTES) + bytes(_CAPS_BYTES))
            answer = _received(connection)
        except TimeoutError:
            raise silent(worker, answer_s) from None
        except ConnectionError:  # reset, as by an SSH tunnel without a worker at its other end
            answer = b""
        except OSError as e:
            raise _not_rpc(worker, e.strerror or str(e)) from e
    if len(answer) != _ANSWER.size:
        raise WorkerUnavailable(
            f"the worker at {worker} closes connections at once: it serves another client, is "
            "missing behind a tunnel, or is no RPC server of ggml (--rpc)"
        )
    size, *version, _, _ = _ANSWER.unpack(answer)
    if size != _ANSWER.size - 8:
        raise _not_rpc(worker, f"an answer of {size} bytes")
    return (version[0], version[1], version[2])


def silent(worker: Address, answer_s: float) -> WorkerUnavailable:
    """Return the error for a worker that can be reached and does not answer."""
    return WorkerUnavailable(
        f"the worker at {worker} does not answer within {answer_s:g} s: it hangs, or it is serving "
        "another client, and it serves one at a time"
    )


def _received(connection: socket.socket) -> bytes:
    answer = b""
    while len(answer) < _ANSWER.size and (part := connection.recv(_ANSWER.size - len(answer))):
        answer += part
    return answer


def _not_rpc(worker: Address, why: str) -> WorkerUnavailable:
    return WorkerUnavailable(
        f"{worker} (--rpc) is not an RPC server of ggml: it answers a greeting wrongly ({why})"
    )
