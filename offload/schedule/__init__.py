"""Decides which piece is copied when, and into which slot. Pure."""
