"""Wraps libllama and libggml. No other part of this package uses ctypes."""
