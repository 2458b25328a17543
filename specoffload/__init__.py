"""specoffload: big mixture-of-experts models on one GPU and a lot of RAM."""

__version__ = "0.1.0"
