"""Threads pinned, weights' rows on the node whose threads read them (docs/numa.md).

Deciding: topology, pinning, rows, place, strategy, tune. Reading: machine, over sysfs and cgroup.
Doing: bind, memory, measure, over sys (the only ctypes). Looking: doctor. On a machine with one
memory node all of it is a no-op.
"""
