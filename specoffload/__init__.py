"""specoffload: big mixture-of-experts models on one GPU and a lot of RAM."""

from offload import __version__ as __version__
