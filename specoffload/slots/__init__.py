"""Requests that share an opened model: the slots they run in, and the prompts that are kept."""
