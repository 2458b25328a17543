"""Counts a draft's tokens over a corpus, writes the ids worth drafting: --draft-vocab reads them.

    scripts/lab/run prune-vocab DRAFT.gguf src/ docs/ --keep 32768 -o kept.txt
    scripts/lab/run prune-vocab --measure --keep 4096,2048,1024,512      on the embedded pair

A corpus is files, or folders of them; what is not UTF-8 is skipped. End tokens and single bytes are
always kept. --measure counts over CPython's standard library less the files that the embedded pair
was never shown, and drafts on the embedded texts: acceptance lost, time of a step. The last line is
JSON. Runs in the environment that scripts/setup makes; a step is the torch draft's on the CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_MOST_BYTES = 4 << 20  # of one file of a corpus
_PIECE = 1 << 16  # characters tokenised at once
_N_PREDICT = 48


def files_of(corpus: Iterable[Path]) -> Iterator[Path]:
    for path in corpus:
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (file for file in found if file.is_file())


def text_of(file: Path) -> str:
    """ "" for what is too large or is no text."""
    if file.stat().st_size > _MOST_BYTES:
        return ""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def count(texts: Iterable[str], tokenize: Any, n_vocab: int) -> list[int]:
    counts = [0] * n_vocab
    for text in texts:
        for at in range(0, len(text), _PIECE):
            for token in tokenize(text[at : at + _PIECE]):
                counts[token] += 1
    return counts


class Vocabulary:
    """The draft's tokenizer, read without its weights."""

    def __init__(self, path: Path) -> None:
        from offload.ggml.library.callback import Pending
        from offload.ggml.library.log import opening
        from offload.ggml.llama import Model, ModelPlacement

        with opening(path):
            self.model = Model(path, ModelPlacement(no_alloc=True, load_mode="none"), Pending())
        self.n_vocab = self.model.n_vocab

    def tokenize(self, text: str) -> list[int]:
        return self.model.tokenize(text, add_special=False, parse_special=False)

    @property
    def always(self) -> set[int]:
        """Tokens that end a text, and single bytes, of which anything can be spelt."""
        ends = {t for t in range(self.n_vocab) if self.model.is_end(t)}
        return ends | {t for t in range(self.n_vocab) if self._is_byte(t)}

    def _is_byte(self, token: int) -> bool:
        return len(self.model.piece(token, special=False)) == 1


def write(args: argparse.Namespace) -> dict[str, Any]:
    from specoffload.speculation.kept_tokens import choose_kept, coverage, write_kept

    vocabulary = Vocabulary(args.draft)
    texts = [text_of(file) for file in files_of(args.corpus)]
    counts = count(texts, vocabulary.tokenize, vocabulary.n_vocab)
    if not sum(counts):
        sys.exit(f"scripts/lab/run prune-vocab: no text in {', '.join(map(str, args.corpus))}")
    kept = choose_kept(counts, vocabulary.always, args.keep[0])
    share = coverage(counts, kept)
    remark = (f"{len(kept)} of {vocabulary.n_vocab} tokens of {args.draft.name}, {share:.4%} of "
              f"{sum(counts)} counted in {len(texts)} files")  # fmt: skip
    write_kept(args.output, kept, remark)
    print(f"{args.output}: {remark}")
    return {"n_kept": len(kept), "n_vocab": vocabulary.n_vocab, "coverage": share,
            "n_counted": sum(counts), "output": str(args.output)}  # fmt: skip


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The embedded pair: what acceptance is lost at each size, and what a step takes."""
    import tempfile

    from lab.train.data import is_held_out, is_wanted, stdlib_root
    from specoffload.config.resolution import demo_file
    from specoffload.speculation.kept_tokens import choose_kept, coverage, write_kept

    vocabulary = Vocabulary(demo_file("draft.gguf"))
    root = stdlib_root()
    names = [p.relative_to(root).as_posix() for p in sorted(root.rglob("*.py"))]
    wanted = [n for n in names if is_wanted(n) and not is_held_out(n)]
    counts = count((text_of(root / n) for n in wanted), vocabulary.tokenize, vocabulary.n_vocab)
    prompts = json.loads(demo_file("prompts.json").read_text(encoding="utf-8"))
    shown = count([row["text"] for row in prompts], vocabulary.tokenize, vocabulary.n_vocab)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for n in args.keep:
            kept = choose_kept(counts, vocabulary.always, n)
            path = Path(folder) / f"{n}.txt"
            write_kept(path, kept, "measured")
            row = {"n_kept": n, "coverage": coverage(counts, kept),
                   "coverage_of_texts": coverage(shown, kept)}  # fmt: skip
            rows.append(row | drafted(path if n < vocabulary.n_vocab else None, prompts))
            print(", ".join(f"{k} {v:.4g}" for k, v in rows[-1].items()), flush=True)
    return {"measured": rows}


def drafted(kept: Path | None, prompts: list[dict[str, str]]) -> dict[str, float]:
    from specdec.costs.measure import measure_step
    from specoffload.config.command_line import read_command_line
    from specoffload.config.host import read_host
    from specoffload.config.resolution import resolve
    from specoffload.session.generation import GenerateOptions
    from specoffload.session.session import Session

    words = ["--device", "cpu", "--draft-engine", "torch", "--draft-type", "f32", "--policy",
             "fixed", "--draft-max", "4", "-c", "512", "-t", "1"]  # fmt: skip
    words += [] if kept is None else ["--draft-vocab", str(kept)]
    config = resolve(read_command_line("run", words).options, read_host())
    options = GenerateOptions(n_predict=_N_PREDICT, ignore_eos=True)
    n_drafted = n_accepted = n_rounds = n_tokens = 0
    with Session(config) as session:
        for row in prompts:
            *_, last = session.generate(row["text"], options)
            assert last.stats is not None
            n_drafted += last.stats.n_drafted
            n_accepted += last.stats.n_accepted
            n_rounds += last.stats.n_rounds
            n_tokens += last.stats.n_tokens
        text = session.draft.tokenize(prompts[0]["text"], add_special=False)  # type: ignore[union-attr]
        model = session.draft.sequences  # type: ignore[union-attr]
        step_s = min(measure_step(model, 0, text, 8) for _ in range(9))
    return {"acceptance": n_accepted / n_drafted, "tokens_per_round": n_tokens / n_rounds,
            "step_s": step_s}  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/lab/run prune-vocab", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("draft", nargs="?", type=Path, help="DRAFT.gguf")
    parser.add_argument("corpus", nargs="*", type=Path, help="files or folders of text")
    parser.add_argument("-o", "--output", type=Path, default=Path("kept.txt"))
    parser.add_argument("--keep", default="32768", help="ids kept; with --measure several")
    parser.add_argument("--measure", action="store_true", help="on the embedded pair")
    args = parser.parse_args()
    try:
        args.keep = [int(n) for n in args.keep.split(",")]
    except ValueError:
        parser.error(f"--keep {args.keep}: must be whole numbers, comma separated")
    if not args.measure and (args.draft is None or not args.corpus or len(args.keep) != 1):
        parser.error("a draft, a corpus and one --keep are needed, or --measure")
    missing = [
        p for p in ([args.draft, *args.corpus] if not args.measure else []) if not p.exists()
    ]
    if missing:
        parser.error(f"{missing[0]}: no such file or folder")
    return args


def main() -> None:
    args = arguments()
    from specoffload.errors import KNOWN

    try:
        found = measure(args) if args.measure else write(args)
    except KNOWN as e:
        sys.exit(f"scripts/lab/run prune-vocab: {e}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
