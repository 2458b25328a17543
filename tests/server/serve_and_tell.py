"""`specoffload serve ...`, whose API process says at its end which libraries it loaded.

python serve_and_tell.py serve [MODEL] ...
"""

from __future__ import annotations

import sys

from specoffload.cli import main

if __name__ == "__main__":
    try:
        main()
    finally:
        print("loaded llama_cpp" if "llama_cpp" in sys.modules else "no llama_cpp", flush=True)
