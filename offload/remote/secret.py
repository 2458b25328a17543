"""The proof that a client of `specoffload worker` and the worker know the same secret.

The proof comes before everything else on a connection, before HTTP and before ggml's protocol:

    client: magic, nonce of the client (32 bytes)
    worker: status, nonce of the worker (32 bytes)
    client: HMAC-SHA256 of "client", both nonces
    worker: status, HMAC-SHA256 of "worker", both nonces

Each side chooses a nonce for each connection, so a recorded proof is worth nothing later. The
client proves first, so a stranger learns nothing that depends on the secret. What follows on the
connection is neither encrypted nor signed: that is the network's task (docs/defence.md).
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field
from typing import Protocol

from offload.errors import WorkerUnavailable

# The first byte tells the protocols apart: a letter begins HTTP, and the number 14 ggml's greeting.
# An older worker takes this for HTTP. The line's end lets it refuse the request at once.
MAGIC = b"#specoffload secret 1\n"
LEAST_SECRET_CHARS = 16
MOST_SECRET_CHARS = 1024
_NONCE_BYTES = _PROOF_BYTES = 32
_GO_ON, _NO_SECRET, _WRONG = b"\x01", b"\x02", b"\x03"
FLAG, VARIABLE = "--rpc-secret-file", "SPECOFFLOAD_RPC_SECRET"
NEEDED = (
    f"this worker has a secret, and the client did not prove that it knows it: {FLAG} FILE or "
    f"{VARIABLE} gives it to a client (specoffload alone can prove it, llama.cpp cannot)"
)


class TimedConnection(Protocol):
    """A connection with a deadline. Both methods raise OSError."""

    def sendall(self, data: bytes, /) -> None: ...

    def receive(self, n_bytes: int) -> bytes:
        """Return the next `n_bytes` bytes, or fewer if the peer ends the connection."""
        ...


@dataclass(frozen=True)
class Secret:
    """A text that a worker and its clients both have. No message and no `repr` shows it."""

    key: bytes = field(repr=False)

    @classmethod
    def of(cls, text: str) -> Secret:
        """Return the secret in `text`, without blanks at its ends. Raises ValueError."""
        text = text.strip()
        if not LEAST_SECRET_CHARS <= len(text) <= MOST_SECRET_CHARS:
            raise ValueError(
                f"a secret has {LEAST_SECRET_CHARS} to {MOST_SECRET_CHARS} characters, and this "
                f"has {len(text)}; `openssl rand -hex 32` makes one"
            )
        return cls(text.encode())

    def _proof(self, side: bytes, nonces: bytes) -> bytes:
        return hmac.digest(self.key, side + nonces, "sha256")

    def prove(self, connection: TimedConnection, worker: str) -> None:
        """Prove to a worker that this client knows the secret, and let the worker prove it, too.

        Raises WorkerUnavailable with one sentence if either proof fails, and OSError.
        """
        mine = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(MAGIC + mine)
        status, theirs = _answer(connection, _NONCE_BYTES)
        if status == _NO_SECRET:
            raise WorkerUnavailable(
                f"the worker at {worker} has no secret, so it cannot prove that it is yours: start "
                f"it with {FLAG} and this secret, too, or leave {FLAG} out here"
            )
        if status != _GO_ON or len(theirs) != _NONCE_BYTES:
            raise WorkerUnavailable(
                f"the worker at {worker} proves no secret: it is missing behind a tunnel, it "
                "refuses this machine, or it is llama.cpp's rpc-server or an older specoffload, "
                f"which have no secrets (then leave {FLAG} out)"
            )
        connection.sendall(self._proof(b"client", mine + theirs))
        status, proof = _answer(connection, _PROOF_BYTES)
        if status == _GO_ON and hmac.compare_digest(proof, self._proof(b"worker", mine + theirs)):
            return
        reason = "did not prove that it knows the secret"
        if status == _WRONG:
            reason = "has another secret"
        raise WorkerUnavailable(f"the worker at {worker} {reason}: give both the same {FLAG}")


def _answer(connection: TimedConnection, n_bytes: int) -> tuple[bytes, bytes]:
    """Return a worker's status and the bytes after it, fewer if the worker ends the connection."""
    try:
        status = connection.receive(1)
        return status, connection.receive(n_bytes) if status == _GO_ON else b""
    except ConnectionError:  # an rpc-server resets a connection that begins with another byte
        return b"", b""


def reason_of(connection: TimedConnection, secret: Secret | None) -> str:
    """Let the client of a new connection prove that it knows `secret`, the worker's own.

    Returns "" if it does. The connection has then proved the same to the client. Otherwise returns
    the reason, and the connection must be closed. Raises OSError.
    """
    start = connection.receive(len(MAGIC) + _NONCE_BYTES)
    theirs = start[len(MAGIC) :]
    if not start.startswith(MAGIC) or len(theirs) != _NONCE_BYTES:
        return "it began a proof of a secret and did not end it"
    if secret is None:
        connection.sendall(_NO_SECRET)
        return f"it wants a proof of a secret, and this worker has none ({FLAG})"
    mine = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(_GO_ON + mine)
    proof = connection.receive(_PROOF_BYTES)
    if len(proof) != _PROOF_BYTES:
        return "it began a proof of a secret and did not end it"
    if not hmac.compare_digest(proof, secret._proof(b"client", theirs + mine)):
        connection.sendall(_WRONG)
        return f"it has another secret than this worker ({FLAG})"
    connection.sendall(_GO_ON + secret._proof(b"worker", theirs + mine))
    return ""
