"""`python -m specoffload` is `specoffload`."""

from specoffload.cli import main

main()
