"""Flags and environment variables: their table, their reading, and the resulting configuration."""
