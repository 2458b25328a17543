"""Reads flags and environment variables by a table, and makes the configuration of them."""
