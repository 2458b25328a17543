"""Shared by the tests of samplers: the embedded pair on the CPU, and rows of random logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from resolved import config_of

from specoffload.config.speculation import NO_DRAFTS
from specoffload.session.session import Session

PROMPT = "def fibonacci(n):\n"
FIXED: dict[str, object] = {"--spec-policy": "fixed", "--spec-draft-n-max": 4}


def opened(**spec: object) -> Session:
    given = {**FIXED, **spec}
    return Session(config_of(device="cpu", threads=1, ctx_size=512, spec_given=given))


def without_drafts() -> Session:
    return Session(config_of(device="cpu", threads=1, ctx_size=512, spec=NO_DRAFTS))


def row_of(session: Session, seed: int = 5) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    return rng.normal(0, 2, session.target.n_vocab).astype(np.float32)
