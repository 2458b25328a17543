"""Drafters, which propose tokens. Each has its own file."""
