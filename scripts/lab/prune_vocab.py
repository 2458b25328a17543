"""Counts a draft's tokens over a corpus, and writes the ids of the most frequent ones.

    scripts/lab/run prune-vocab DRAFT.gguf src/ docs/ --keep 32768 -o kept.txt

A corpus is files or folders. Files that are too large or not UTF-8 are skipped. Tokens that end a
text and single bytes are always kept. The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

from offload.ggml.library.callback import Pending
from offload.ggml.library.log import opening
from offload.ggml.model import Model, ModelPlacement
from specdec.whole_file import write_text
from specoffload.errors import KNOWN, UsageError

_MOST_BYTES = 4 << 20  # largest file of a corpus
_PIECE = 1 << 16  # characters per call of the tokenizer


def texts_of(corpus: Iterable[Path]) -> list[str]:
    files = [f for path in corpus for f in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    texts = []
    for file in files:
        if file.is_file() and file.stat().st_size <= _MOST_BYTES:
            try:
                texts.append(file.read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                continue
    return texts


def choose_kept(
    counts: Counter[int], always: Collection[int], n: int, n_vocab: int
) -> tuple[int, ...]:
    """`n` token ids in rising order: those of `always`, and the most frequent others.

    If these are fewer than `n`, ids that were never counted are added. The lowest come first,
    because vocabularies begin with bytes and short words. Raises UsageError if `n` is not possible.
    """
    if not max(1, len(always)) <= n <= n_vocab:
        raise UsageError(
            f"{n} tokens cannot be kept: the number must be at least {max(1, len(always))}, which "
            f"are always kept, and at most {n_vocab}, the whole vocabulary"
        )
    others = sorted(set(range(n_vocab)) - set(always), key=lambda token: (-counts[token], token))
    return tuple(sorted([*always, *others[: n - len(always)]]))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/lab/run prune-vocab",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("draft", type=Path, help="DRAFT.gguf")
    parser.add_argument("corpus", nargs="+", type=Path, help="files or folders of text")
    parser.add_argument("-o", "--output", type=Path, default=Path("kept.txt"))
    parser.add_argument("--keep", type=int, default=32768, help="number of ids to keep")
    args = parser.parse_args()
    if missing := [path for path in (args.draft, *args.corpus) if not path.exists()]:
        parser.error(f"{missing[0]}: no such file or folder")
    try:
        print(json.dumps(prune(args.draft, args.corpus, args.keep, args.output)))
    except KNOWN as e:
        sys.exit(f"scripts/lab/run prune-vocab: {e}")


def prune(draft: Path, corpus: list[Path], n_kept: int, output: Path) -> dict[str, object]:
    """Write the kept ids to `output`. Returns figures of the count. Raises UsageError."""
    with opening(draft):  # loads only the tokenizer, without the weights
        model = Model(draft, ModelPlacement(no_alloc=True, load_mode="none"), Pending())
    counts: Counter[int] = Counter()
    texts = texts_of(corpus)
    for text in texts:
        for at in range(0, len(text), _PIECE):
            piece = text[at : at + _PIECE]
            counts.update(model.tokenize(piece, add_special=False, parse_special=False))
    if not counts:
        raise UsageError(f"no text in {', '.join(map(str, corpus))}")
    always = {
        token
        for token in range(model.n_vocab)
        if model.is_end(token) or len(model.piece(token, special=False)) == 1
    }
    kept = choose_kept(counts, always, n_kept, model.n_vocab)
    share = sum(counts[token] for token in kept) / counts.total()
    remark = (
        f"{len(kept)} of {model.n_vocab} tokens of {draft.name}, {share:.4%} of "
        f"{counts.total()} counted in {len(texts)} files"
    )
    write_text(output, f"# {remark}\n" + "".join(f"{token}\n" for token in kept))
    print(f"{output}: {remark}")
    return {
        "n_kept": len(kept),
        "n_vocab": model.n_vocab,
        "coverage": share,
        "n_counted": counts.total(),
        "output": str(output),
    }


if __name__ == "__main__":
    main()
