"""Judges whether two ways of computing a model give the same distribution of the next token.

Both ways read the same tokens (teacher forcing), and their logits are compared row by row by the
Kullback-Leibler divergence. Kernels round differently, and rounding decides near-ties of random
routers, so some rows use another expert and differ by more than others. They are counted as far.

Measured on a CPU with 64 experts and random routers: rounding (norms changed by 0.4 %) makes 0 to
17 % of the rows far with 4 layers, and 25 % with 48. If one layer gives all tokens wrong experts,
90 to 100 % are far, with 4, 8 and 48 layers. LOOSE has to allow that.

STRICT is for decisive routers (`decisive.py`), whose choices rounding cannot change. Measured there
with 4 layers: the worst of 162 rows diverges by 0.006 nats with norms changed by 0.4 %, and by
0.008 with 1 %. One wrong expert in one layer makes rows diverge by 0.02 to 0.26 nats if their
tokens chose it. tests/model/test_gpu_check.py repeats both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FAR = 0.01  # nats from which on a row is far


@dataclass(frozen=True)
class Limits:
    """The largest share of far rows, and the largest divergence of any row in nats."""

    far_share: float
    worst: float


LOOSE = Limits(far_share=0.5, worst=np.inf)
STRICT = Limits(far_share=0.05, worst=0.03)


def divergences(got: NDArray[Any], expected: NDArray[Any]) -> NDArray[np.float64]:
    """KL(expected || got) of each row of logits [n_rows, n_vocab], in nats."""
    p, q = _log_softmax(expected), _log_softmax(got)
    return np.asarray((np.exp(p) * (p - q)).sum(axis=1))


def _log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def judged(kl: NDArray[np.float64], limits: Limits = LOOSE) -> dict[str, Any]:
    """The median and the worst divergence in nats, the share of far rows, and whether `limits` hold
    (`same`).

    Rows that are not finite are never the same.
    """
    far = ~(kl <= FAR)  # NaN too
    share = float(far.mean()) if len(kl) else 1.0
    finite = kl[np.isfinite(kl)]
    return {
        "n_rows": len(kl),
        "kl_median": float(np.median(finite)) if len(finite) else float("inf"),
        "kl_worst": float(finite.max()) if len(finite) else float("inf"),
        "far_share": share,
        "same": bool(share <= limits.far_share and (kl <= limits.worst).all()
                     and len(finite) == len(kl) > 0),
    }  # fmt: skip
