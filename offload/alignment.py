"""The alignment of what this package places in a device's memory. Pure."""

ALIGNMENT_BYTES = 256  # alignment of tensors that we place; devices ask for at most this


def aligned(size_bytes: int) -> int:
    """Round bytes up, so that a tensor after them is aligned."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
