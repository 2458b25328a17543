"""Traces of runs: timed events in lanes, and figures computed from them."""
