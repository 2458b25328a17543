"""The program's own errors, and the exit code and HTTP status of every error.

SpecOffloadError
├── UsageError   invalid flags or arguments
├── NotStored    a result could not be written to its file
├── FetchFailed  a model cannot be downloaded now
└── (offload.errors.OffloadError, specdec.errors.SpecDecError, numa.errors.NumaError: their trees)

Exit code 2: the input was bad. 1: something failed. 130: interrupted. 143: terminated.
"""

from __future__ import annotations

from dataclasses import dataclass

from numa.errors import NumaError
from offload import errors as offload_errors
from specdec.errors import SpecDecError


class SpecOffloadError(Exception):
    """Base class of the errors that the program itself raises on purpose."""


class UsageError(SpecOffloadError):
    """Flags or arguments are invalid, or ask for something that cannot be done."""


class NotStored(SpecOffloadError):
    """A result was shown, but could not be written to its file."""


class FetchFailed(SpecOffloadError):
    """A model cannot be fetched, because of the network, the disk or the hub."""


KNOWN: tuple[type[Exception], ...] = (
    SpecOffloadError,
    offload_errors.OffloadError,
    SpecDecError,
    NumaError,
)


@dataclass(frozen=True)
class Meaning:
    """An error's exit code and HTTP status. `type` is llama-server's error type."""

    exit_code: int
    http_status: int
    type: str


_INVALID = Meaning(2, 400, "invalid_request_error")
_FAILED = Meaning(1, 500, "server_error")
_MEANINGS: tuple[tuple[type[Exception], Meaning], ...] = (
    (offload_errors.DeviceFailed, _FAILED),
    (FetchFailed, _FAILED),
    (NotStored, _FAILED),
    (offload_errors.UnusableFolder, Meaning(2, 500, "server_error")),
    (offload_errors.NotWritten, _FAILED),
    (offload_errors.DoesNotFit, Meaning(2, 400, "exceed_context_size_error")),
    (offload_errors.NotSupported, Meaning(2, 501, "not_supported_error")),
    (offload_errors.OffloadError, _INVALID),
    (SpecDecError, _INVALID),
    (NumaError, _INVALID),
    (SpecOffloadError, _INVALID),
)


def meaning_of(error: BaseException) -> Meaning:
    """The meaning of an error, by the first row that matches it. Unknown errors are failures."""
    for kind, meaning in _MEANINGS:
        if isinstance(error, kind):
            return meaning
    return _FAILED
