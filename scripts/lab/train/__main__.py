"""Train, export and measure the embedded demo pair (needs `pip install specoffload[train]`).

`scripts/lab/run train all` runs every step; each step can be run alone and resumed after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from lab import ROOT

STEPS = (
    *("data", "tokenizer", "prompts", "target", "continuations", "draft", "export", "mtp"),
    "measure",
)
APART = ("reread",)  # not part of `all`
EPILOG = """steps, in the order `all` runs them
  data       counts the standard library's files and the held-out ones
  tokenizer  trains the tokeniser on the training files and encodes them
  prompts    picks the held-out prompts that benches and agreement use
  target     trains the deepseek2-shaped target until --target-deadline-s of wall-clock time
  continuations  lets the target continue training text greedily, for the draft to learn from
  draft      trains the llama-shaped draft until --draft-deadline-s, its last part on what the
             target says (--distill-from)
  export     writes both GGUFs from the latest checkpoints, also while a training runs
  reread     (not part of all) restores tokenizer.json and the training text of an exported
             target, so that mtp can run without the checkpoints
  mtp        trains a layer for multi-token prediction until --mtp-deadline-s, with the target's
             weights as they are, and adds it to the target's file
  measure    measures the exported pair on the held-out files; writes CARD.md and card.json
"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=(*STEPS, *APART, "all"))
    parser.add_argument(
        "--work", type=Path, default=ROOT / ".work" / "train", help="checkpoints and tokens"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "specoffload" / "demo", help="where the pair goes"
    )
    parser.add_argument(
        "--stdlib", type=Path, help="standard library folder (default: this interpreter's)"
    )
    parser.add_argument("--target-deadline-s", type=float, default=5400.0)
    parser.add_argument("--continuations-deadline-s", type=float, default=300.0)
    parser.add_argument("--draft-deadline-s", type=float, default=900.0)
    parser.add_argument("--mtp-deadline-s", type=float, default=900.0)
    parser.add_argument(
        "--distill-from",
        type=float,
        default=0.5,
        help="share of the draft's run from which it follows the target; 1 is never",
    )
    parser.add_argument(
        "--peak", type=float, default=1.0, help="factor of the learning rates; 0.3 to go on"
    )
    parser.add_argument(
        "--micro-tokens", type=int, default=8192, help="tokens per forward and backward pass"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    return parser.parse_args()


def share_cores() -> None:
    """Let waiting OpenMP threads sleep. If they spin, training on a busy machine is ten times
    slower."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")


def stop_like_ctrl_c() -> None:
    """Let SIGTERM and SIGINT save a checkpoint, also if a background shell had SIGINT ignored."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def main() -> None:
    arguments = parse_arguments()
    share_cores()
    stop_like_ctrl_c()
    from lab.train import steps  # torch reads the settings above when it is imported

    try:
        for step in STEPS if arguments.step == "all" else (arguments.step,):
            getattr(steps, f"run_{step}")(arguments)
    except KeyboardInterrupt:
        sys.exit("stopped; a training step saved its checkpoint and the same command goes on")


if __name__ == "__main__":
    main()
