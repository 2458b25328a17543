"""Trains the embedded demo pair: makes data, tokeniser, target and draft, exports and measures."""
