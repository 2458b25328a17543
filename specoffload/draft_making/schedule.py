"""Which records a training step reads, and how fast it learns. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WARM_UP = 0.02  # share of the time during which the learning rate rises
_SEED = 20240


def rate_factor(share: float) -> float:
    """The learning rate after `share` of the time, as a share of the largest: up, then to 0."""
    return min(share / WARM_UP + 0.02, max(0.0, (1.0 - share) / (1.0 - WARM_UP)), 1.0)


def batch_rows(n_records: int, n_batch: int, step: int) -> NDArray[np.int64]:
    """The numbers of the records of a step. Every record is used once before any is used again.

    A rest of the records that is smaller than a batch is left out of a pass over them.
    """
    n_batch = min(n_batch, n_records)
    n_steps = n_records // n_batch  # of a pass over the records
    order = np.random.default_rng((_SEED, step // n_steps)).permutation(n_records)
    at = step % n_steps * n_batch
    return order[at : at + n_batch]
