"""Errors of the target's side.

OffloadError
├── LibraryMismatch    the installed libllama is not the one the ABI mirror was made from
├── BadModel           the file is missing, damaged, or of an unknown architecture
├── DoesNotFit         memory, context or slots are too small for what was asked
├── DeviceUnavailable  the device named by --device does not exist or cannot be wrapped
├── NotSupported       this model, or this server with it, cannot do what was asked
├── NotWritten         a result could not be written to its file
├── BadRequest         tokens, positions or a sequence that the engine cannot take
└── DeviceFailed       a copy or a computation failed; the request is lost, the engine may go on
"""


class OffloadError(Exception):
    """Root of everything `offload` raises on purpose."""


class LibraryMismatch(OffloadError):
    """The installed library is not the pinned one."""


class BadModel(OffloadError):
    """The model file cannot be used."""


class DoesNotFit(OffloadError):
    """A budget is too small; `least_bytes` is the least that works, if known."""

    def __init__(self, words: str, least_bytes: int | None = None) -> None:
        super().__init__(words)
        self.least_bytes = least_bytes


class DeviceUnavailable(OffloadError):
    """No such device, or it cannot be wrapped."""


class BadRequest(OffloadError):
    """The caller's tokens or sequence are not usable."""


class NotSupported(OffloadError):
    """The model cannot do what was asked."""


class NotWritten(OffloadError):
    """A result could not be written to its file: the disk is full, or fails."""


class DeviceFailed(OffloadError):
    """A copy or a computation failed on the device."""
