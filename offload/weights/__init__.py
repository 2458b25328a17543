"""Streamed weights: the slots they are copied to, what is copied when, and what carries it out.

`slots`, `keep`, `schedule`, `predict` and `coalesce` decide, in plain data; `copy` and `stream`
execute. `serial` is the slow twin of both.
"""
