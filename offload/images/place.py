"""Chooses where a projector computes. Pure."""

from __future__ import annotations

_MOST_SHARE = 1 / 8  # of a GPU's memory, which experts would use otherwise
_BUFFER_BYTES = 512 << 20  # libmtmd's buffers for an image of usual size; an estimate


def projector_bytes(file_bytes: int) -> int:
    """Return an estimate of the memory that a projector of this size takes where it computes."""
    return file_bytes + _BUFFER_BYTES


def on_cpu_reason(file_bytes: int, device_bytes: int, *, n_devices: int, offload: bool) -> str:
    """Return why the CPU has to compute the projector, or "" if the GPU computes it.

    `device_bytes`: memory of the GPU for the model, 0 without a GPU. `n_devices`: the devices that
    a start may use. `offload`: --mmproj-offload.
    """
    if not device_bytes:
        return "no GPU computes"
    if not offload:
        return "--no-mmproj-offload"
    if n_devices > 1:
        return "several GPUs may share the model, and --device names no single one"
    needed_bytes = projector_bytes(file_bytes)
    if needed_bytes > _MOST_SHARE * device_bytes:
        return (
            f"its {needed_bytes / 2**20:.0f} MiB are more than an eighth of the GPU's "
            f"{device_bytes / 2**20:.0f} MiB"
        )
    return ""
