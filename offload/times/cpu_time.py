"""The CPU's time for a product of few rows: reading the weights, plus computing each row. Pure.

One row is bound by reading. Each further row adds a part of the time of one row, also while reading
is the longer of both: published cost curves whose rows read the same weights are straight lines
(docs/background.md, costs). From a number of rows on, as in prompts, reading hides behind
computing.
"""

from __future__ import annotations

import numpy as np

from offload.times.machine import Real

ROW_SHARE = 0.2  # time that a further row adds, in units of the time of one row
_FEW_ROWS = 8  # rows from which on reading hides behind computing


def product_s(read_s: Real, row_s: Real, n_rows: Real) -> Real:
    """Return the seconds of a product of `n_rows`.

    `read_s` are the seconds of reading its weights. They contain the computation of the first row,
    unless that takes longer. `row_s` are the seconds of computing one row alone.
    """
    added_s = np.minimum(ROW_SHARE * read_s, row_s)
    few_s = read_s + added_s * (np.minimum(n_rows, _FEW_ROWS) - 1)
    return np.maximum(few_s, row_s * n_rows)
