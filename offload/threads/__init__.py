"""Threads of decodes: how many compute, and on which processors and memory nodes."""
