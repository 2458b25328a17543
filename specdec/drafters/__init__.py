"""Drafters, one file each: what proposes tokens."""
