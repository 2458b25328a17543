"""Writes random-weight GGUF files of any architecture and size, to test shapes, memory and speed.

Such models write noise, so they show nothing about quality or acceptance rates.
"""

from lab.synth.shape import Shape, resolve
from lab.synth.write import Plan, plan_preset, plan_shape, write, write_header_only, write_preset

__all__ = [
    "Plan",
    "Shape",
    "plan_preset",
    "plan_shape",
    "resolve",
    "write",
    "write_header_only",
    "write_preset",
]
