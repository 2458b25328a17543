"""Changes the embedded draft model, and compares what each change loses and saves.

Usage: scripts/lab/run draft-study [--turns N] [--json]

Changes: other types of weights (G = bits), a layer less, narrower feed-forward parts, and pruned
vocabularies. Each changed draft is measured in three ways. Both models read greedy texts of the
target (agreement, KL and 1 - TV of a draft's first token). A step is timed. Then the pair writes
other texts with the default policy, and each decode of the target is held to a T(n), as if its
weights streamed. So the tokens per second are real, except for what the target computes.

libllama cannot leave rows of the output matrix out. A pruned vocabulary is imitated by logits of
minus infinity, so its step is no cheaper here.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from time import perf_counter, sleep
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from lab.options import engine_options
from offload.engine import Engine, open_engine
from offload.model_file import read_facts
from specdec.costs.draft_quality import TextCompared, block_lengths, compared
from specdec.costs.profile import CostProfile
from specdec.decoding.acceptance import Greedy, MatchAcceptance
from specdec.decoding.drafting import ChainDrafting
from specdec.decoding.loop import DecodingLoop
from specdec.decoding.member import BatchMember
from specdec.drafters.model import ModelDrafter
from specdec.policies.throughput import Throughput
from specoffload import report
from specoffload.config.resolution import demo_file, demo_prompts
from specoffload.draft_making.weights import DraftWeights, read_weights, write_copy
from specoffload.opening.draft_model import measure_step

N_TEXTS, N_TOKENS = 8, 64  # texts in each of the two sets, and tokens of a text
_STEP_MS = 4.0  # T(1) to which decodes of the target are held
CURVES = {
    "flat": lambda n: 1.0 + 0.005 * n,
    "rising": lambda n: 1.0 + 0.25 * n,
}


@dataclass(frozen=True)
class Variant:
    """A changed draft: the type of its matrices, and what is left of them."""

    name: str
    kind: Type = Type.Q8_0
    n_layers: int = 2
    n_ff: int = 512
    n_kept: int = 4096  # tokens of the vocabulary


VARIANTS = (
    Variant("as embedded, q8_0"),
    Variant("f16", Type.F16),
    Variant("q5_0", Type.Q5_0),
    Variant("q4_0", Type.Q4_0),
    Variant("1 of 2 layers", n_layers=1),
    Variant("feed-forward 384 of 512", n_ff=384),
    Variant("feed-forward 256 of 512", n_ff=256),
    Variant("3,072 of 4,096 tokens", n_kept=3072),
    Variant("2,048 of 4,096 tokens", n_kept=2048),
    Variant("1,024 of 4,096 tokens", n_kept=1024),
)


@dataclass(frozen=True)
class Measured:
    """A variant's results.

    `predicted` are the speeds of the best constant draft length by curve, in units of plain
    decoding, from the agreement and the step. `rates` are tokens per second, as medians.
    """

    name: str
    file_bytes: int  # bytes of the weights that a step reads
    step_ms: float
    agreement: float
    kl: float
    overlap: float
    predicted: dict[str, float]
    rates: dict[str, float]


def write_variant(variant: Variant, path: Path, source: Path) -> int:
    """Write the changed model to `path`. Returns the bytes of its weights."""
    facts = read_facts(source)
    weights = narrowed(read_weights(facts), variant)
    kinds = {name: variant.kind if w.ndim == 2 else Type.F32 for name, w in weights.items()}
    changed = {"llama.block_count": variant.n_layers, "llama.feed_forward_length": variant.n_ff}
    return write_copy(source, path, weights, kinds, changed)


def narrowed(weights: DraftWeights, variant: Variant) -> DraftWeights:
    """The weights without the last layers, and with the strongest channels of each feed-forward.

    A channel's strength is the product of the norms of its three vectors.
    """
    out = {}
    for name, values in weights.items():
        parts = name.split(".")
        if parts[0] == "blk" and int(parts[1]) >= variant.n_layers:
            continue
        if parts[0] == "blk" and parts[2] in ("ffn_gate", "ffn_up", "ffn_down"):
            prefix = f"blk.{parts[1]}.ffn_"
            gate, up, down = (weights[f"{prefix}{x}.weight"] for x in ("gate", "up", "down"))
            norms = [np.linalg.norm(x, axis=1) for x in (gate, up, down.T)]
            strength = np.prod(norms, axis=0)
            kept = np.sort(np.argsort(-strength, kind="stable")[: variant.n_ff])
            values = values[:, kept] if parts[2] == "ffn_down" else values[kept]
        out[name] = np.ascontiguousarray(values)
    return out


class Wrapped:
    """A model's sequences with other logits, or with decodes held to a time."""

    def __init__(self, sequences: Any, change: Callable[[NDArray[np.float32]], Any] | None = None,
                 held_s: Callable[[int], float] | None = None) -> None:  # fmt: skip
        self._sequences, self._change, self._held_s = sequences, change, held_s

    def __getattr__(self, name: str) -> Any:
        if name in ("n_tree_leaves", "extend_tree", "keep_path"):
            raise AttributeError(name)  # chains only
        return getattr(self._sequences, name)

    def extend(self, sequence: int, tokens: Sequence[int], n_logits: int | None = None) -> Any:
        began = perf_counter()
        rows = self._sequences.extend(sequence, tokens, n_logits)
        if n_logits != 0:
            self._hold(began, len(tokens))
        return rows if self._change is None else self._change(rows)

    def extend_batch(self, parts: Sequence[tuple[int, Sequence[int], int]]) -> Any:
        began = perf_counter()
        rows = self._sequences.extend_batch(parts)
        self._hold(began, sum(len(tokens) for _, tokens, _ in parts))
        return rows

    def _hold(self, began: float, n: int) -> None:
        if self._held_s is not None:
            # Sleeping alone would be late by a scheduler's tick.
            end = began + self._held_s(n)
            if (left := end - perf_counter()) > 2e-3:
                sleep(left - 1e-3)
            while perf_counter() < end:
                pass


def only(kept: NDArray[np.bool_]) -> Callable[[NDArray[np.float32]], NDArray[np.float32]]:
    """Sets the logits of tokens that are not `kept` [n_vocab] to minus infinity."""
    return lambda rows: np.where(kept, rows, -np.inf).astype(np.float32)


def greedy_texts(target: Engine, texts: Sequence[str]) -> list[tuple[int, list[int], Any]]:
    """For each text: (length of its prompt, prompt and continuation, the target's logits)."""
    found = []
    for text in texts:
        prompt = target.tokenize(text, add_special=True, parse_special=False)
        history, rows = list(prompt), []
        target.sequences.rewind(0, 0)
        target.sequences.extend(0, prompt[:-1], 0)
        for _ in range(N_TOKENS):
            rows.append(target.sequences.extend(0, history[-1:], 1)[0])
            history.append(int(rows[-1].argmax()))
        found.append((len(prompt), history, np.stack(rows)))
    return found


def quality(draft: Any, texts: Sequence[tuple[int, list[int], Any]]) -> TextCompared:
    """Both models along the texts, one after the other."""
    parts = []
    for n_prompt, text, rows in texts:
        draft.rewind(0, 0)
        draft.extend(0, text[: n_prompt - 1], 0)
        parts.append(compared(rows, draft.extend(0, text[n_prompt - 1 : -1], len(rows))))
    joined = [np.concatenate([getattr(p, x) for p in parts]) for x in ("agrees", "kl", "overlap")]
    return TextCompared(*joined)


def profile_of(curve: Callable[[int], float], step_s: float) -> CostProfile:
    """T(n) of the held target, with the draft's step."""
    return CostProfile(tuple(_STEP_MS / 1e3 * curve(n) for n in range(64)), step_s)


def rate(target: Engine, draft: Any, curve: Callable[[int], float], step_s: float,
         prompts: Sequence[list[int]]) -> float:  # fmt: skip
    """Tokens per second with the default policy, decodes of the target held to the curve."""
    profile = profile_of(curve, step_s)
    policy = Throughput(profile)
    held = Wrapped(target.sequences, held_s=profile.time)
    drafting = ChainDrafting(held, ModelDrafter(draft), policy)  # type: ignore[arg-type]
    n_tokens, took_s = 0, 0.0
    for prompt in prompts:
        target.sequences.rewind(0, 0)
        draft.rewind(0, 0)
        loop = DecodingLoop(held, drafting)  # type: ignore[arg-type]
        accept = MatchAcceptance(Greedy())
        loop.add(BatchMember(0, list(prompt), accept, N_TOKENS, lambda _: False))
        while not loop.is_idle:
            for _, round_ in loop.step().rounds:
                n_tokens += len(round_.emitted)
                took_s += round_.draft_s + round_.verify_s + round_.rollback_s
    return n_tokens / took_s


def ranks_agree(measure: Sequence[float], rates: Sequence[float]) -> float:
    """Spearman's rank correlation; ties get their mean rank."""

    def ranks(values: Sequence[float]) -> NDArray[np.float64]:
        array = np.asarray(values)
        return np.array([fmean([np.sum(array < v), np.sum(array <= v) - 1]) for v in array])

    return float(np.corrcoef(ranks(measure), ranks(rates))[0, 1])


def study(n_turns: int, folder: Path, variants: Sequence[Variant] = VARIANTS) -> list[Measured]:
    """Measure all variants, by turns."""
    options = engine_options(device="cpu", n_ctx=1024, n_threads=1, n_threads_batch=1)
    code, prose = demo_prompts("code"), demo_prompts("prose")
    half = N_TEXTS // 2
    first = [*code[:half], *prose[:half]]
    others = [*code[half : 2 * half], *prose[half : 2 * half]]
    with open_engine(demo_file("target.gguf"), options) as target:
        texts = greedy_texts(target, first)
        counts = Counter(t for text in (*code[10:], *prose[8:]) for t in
                         target.tokenize(text, add_special=True, parse_special=False))  # fmt: skip
        prompts = [target.tokenize(t, add_special=True, parse_special=False) for t in others]
        drafts, sizes = [], []
        for i, variant in enumerate(variants):
            path = folder / f"{i}.gguf"
            sizes.append(write_variant(variant, path, demo_file("draft.gguf")))
            drafts.append(open_engine(path, options))
        models = []
        for variant, draft in zip(variants, drafts, strict=True):
            order = sorted(range(draft.n_vocab), key=lambda t: (-counts[t], t))
            kept = np.zeros(draft.n_vocab, bool)
            kept[order[: variant.n_kept]] = True
            models.append(Wrapped(draft.sequences, None if kept.all() else only(kept)))
        steps: list[list[float]] = [[] for _ in variants]
        rates: list[dict[str, list[float]]] = [{c: [] for c in CURVES} for _ in variants]
        for _ in range(n_turns):
            for i, draft in enumerate(drafts):
                steps[i].append(measure_step(draft.sequences, texts[0][1], 64))
            for name, curve in CURVES.items():
                for i, model in enumerate(models):
                    rates[i][name].append(rate(target, model, curve, median(steps[i]), prompts))
        found = []
        for i, variant in enumerate(variants):
            text = quality(models[i], texts)
            step_s = median(steps[i])
            predicted = {
                name: max(
                    block.gain for block in block_lengths([text], profile_of(curve, step_s), 16)
                )
                for name, curve in CURVES.items()
            }
            agreement, kl, overlap = (float(x.mean()) for x in (text.agrees, text.kl, text.overlap))
            found.append(
                Measured(
                    variant.name, sizes[i], 1e3 * step_s, agreement, kl, overlap, predicted,
                    {name: median(values) for name, values in rates[i].items()},
                )
            )  # fmt: skip
        for draft in drafts:
            draft.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/lab/run draft-study", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--turns", type=int, default=3, help="times that each variant is measured")
    parser.add_argument("--json", action="store_true", help="print one line of JSON alone")
    args = parser.parse_args()
    report.only_data(args.json)
    with tempfile.TemporaryDirectory() as folder:
        found = study(args.turns, Path(folder))
    report.table(
        f"changed drafts of the embedded pair; T(1) held to {_STEP_MS:g} ms",
        ("draft", "MB", "step, ms", "agreement", "KL", "1 - TV", *(f"t/s, {c}" for c in CURVES)),
        [
            (m.name, f"{m.file_bytes / 1e6:.2f}", f"{m.step_ms:.2f}", f"{m.agreement:.3f}",
             f"{m.kl:.3f}", f"{m.overlap:.3f}", *(f"{r:.0f}" for r in m.rates.values()))
            for m in found
        ],
    )  # fmt: skip
    agreeing = {}
    for curve in CURVES:
        rates = [m.rates[curve] for m in found]
        measures = {
            "agreement": [m.agreement for m in found],
            "KL": [-m.kl for m in found],
            "1 - TV": [m.overlap for m in found],
            "step": [-m.step_ms for m in found],
            "prediction by T(n)": [m.predicted[curve] for m in found],
        }
        agreeing[curve] = {name: ranks_agree(v, rates) for name, v in measures.items()}
        words = ", ".join(f"{name} {value:.2f}" for name, value in agreeing[curve].items())
        report.line(f"rank correlation with tokens per second, {curve}: {words}")
    report.data({"drafts": [asdict(m) for m in found], "rank_correlation": agreeing})


if __name__ == "__main__":
    main()
