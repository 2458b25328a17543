"""Texts in a context: sequences of tokens, trees, own layers that draft, and their decodes."""
