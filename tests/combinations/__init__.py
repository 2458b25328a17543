"""Combinations of features: a table of what can be combined, and programs that try its pairs."""
