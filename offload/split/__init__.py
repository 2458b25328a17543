"""Hybrid layers: each expert where it finishes first."""
