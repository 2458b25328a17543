"""Trains the embedded demo pair: data, tokeniser, target, draft, export and measurement."""
