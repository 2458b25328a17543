"""Speculative decoding guided by a measured cost profile; knows no inference library.

`decode` runs the decoding loop on a `Target`. Drafters propose tokens, policies decide how many.
"""

from specdec.decoding.drafting import decode
from specdec.types import Chooser, Decision, Draft, Drafter, Policy, Round, Target

__all__ = [
    "Chooser",
    "Decision",
    "Draft",
    "Drafter",
    "Policy",
    "Round",
    "Target",
    "decode",
]
