"""The alignment of what this package places in a device's memory, and rounded sizes. Pure."""

ALIGNMENT_BYTES = 256  # alignment of tensors that we place; devices ask for at most this


def aligned(size_bytes: int) -> int:
    """Round bytes up, so that a tensor after them is aligned."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def power_of_two(n: int) -> int:
    """Return the least power of two that is at least `n`, and at least 1."""
    return 1 << max(0, n - 1).bit_length()
