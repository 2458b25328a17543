"""Memory nodes: threads bound to processors, weights on the node whose threads read them.

docs/numa.md explains it. topology, threads, place and tune decide; machine reads the kernel's
description; memory and sys carry decisions out; doctor looks for obstacles.
"""
