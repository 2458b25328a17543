"""Experts that are copied for later while the link is idle. Pure.

A miss of a split layer is no wait but the CPU's work. So nothing is in a hurry to be copied, and a
copy that the link has no time for would delay those that a layer waits for, and take the memory
bandwidth that the CPU computes with.
"""

from __future__ import annotations


def n_promotions(idle_s: float, copy_s: float, most: int) -> int:
    """Experts, `most` at most, whose copies of `copy_s` each fit in the link's idle seconds."""
    if most * copy_s <= idle_s:
        return max(0, most)
    return max(0, int(idle_s / copy_s))
