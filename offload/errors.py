"""The errors that `offload` raises.

OffloadError
├── LibraryMismatch    the installed libllama is not the version that this program is made for
├── BadModel           the file is missing, damaged, or of an unknown architecture
│   └── TruncatedModel     the file is shorter than its header says
├── DoesNotFit         memory, context or slots are too small for the request
├── DeviceUnavailable  the device named by --device does not exist or cannot be wrapped
│   └── WorkerUnavailable  a worker of --rpc cannot be reached, is busy, or has another version
├── GraphRefused       a worker's client sent a graph that could write to a weight or elsewhere
├── NotSupported       this model, or this server with it, cannot do the request
├── NotWritten         a result could not be written to its file
│   └── UnusableFolder a flag's folder cannot be made or written, so the program cannot start
├── BadRequest         tokens, positions or a sequence that the engine cannot take
├── DecodeStopped      another thread has stopped the decode, which left nothing behind
└── DeviceFailed       a copy or a computation failed; the request is lost, the engine may go on
    └── ModelChanged       the model's file changed while it was open; the engine has to start again
"""

from __future__ import annotations

from pathlib import Path


class OffloadError(Exception):
    """The base class of all errors that `offload` raises on purpose."""


class LibraryMismatch(OffloadError):
    """The installed library is not the supported version."""


class BadModel(OffloadError):
    """The model file cannot be used."""


class TruncatedModel(BadModel):
    """The model file is shorter than its header says."""


class DoesNotFit(OffloadError):
    """A budget is too small. `least_bytes` is the smallest that works, or None if unknown."""

    def __init__(self, words: str, least_bytes: int | None = None) -> None:
        super().__init__(words)
        self.least_bytes = least_bytes


class DeviceUnavailable(OffloadError):
    """The device does not exist, or it cannot be wrapped."""


class WorkerUnavailable(DeviceUnavailable):
    """A worker cannot be used now. The server tries again if it has used the worker before."""


class BadRequest(OffloadError):
    """The caller's tokens or sequence are not usable."""


class DecodeStopped(OffloadError):
    """Another thread has stopped the decode. The sequences hold what they held before."""


class NotSupported(OffloadError):
    """The model, or this server with it, cannot do the request."""


class GraphRefused(OffloadError):
    """A client's graph could write where it must not. The worker has not computed it."""


class NotWritten(OffloadError):
    """A result could not be written to its file: the disk is full, or fails."""


class UnusableFolder(NotWritten):
    """A folder that a flag needs cannot be made or written to. Another start fails alike."""


class DeviceFailed(OffloadError):
    """A copy or a computation failed on the device."""


class ModelChanged(DeviceFailed):
    """Another program wrote to the model's file `path` while it was open."""

    def __init__(self, words: str, path: Path) -> None:
        super().__init__(words)
        self.path = path

    def __reduce__(self) -> tuple[type[ModelChanged], tuple[str, Path]]:
        return ModelChanged, (str(self), self.path)
