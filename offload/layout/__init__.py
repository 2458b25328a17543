"""Decides where a model's weights, caches and computation go, before anything is loaded.

`probing` finds out what the machine has, `decision` decides from that and from what was asked for,
and the engine executes the resulting `Layout`. `specoffload plan` prints the same `Layout`.
"""
