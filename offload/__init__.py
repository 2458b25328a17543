"""The engine: weights stream from host memory to a device that computes."""

__version__ = "0.1.0"
