"""Speculative decoding that a measured cost profile guides; knows no inference library.

`decode` is the loop; a `Target` is what it runs on; drafters propose, policies decide how long.
"""

from specdec.decoding.decode import decode, decode_alone
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
    "decode_alone",
]
