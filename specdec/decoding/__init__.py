"""Draft, verify, accept, roll back: the decoding loops."""
