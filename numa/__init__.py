"""Binds threads to processors, and places weights on the memory node whose threads read them.

docs/numa.md explains the terms. `topology`, `threads`, `place` and `tune` make decisions. `machine`
reads the kernel's description, `memory` and `sys` place pages, and `doctor` looks for obstacles.
"""
