"""Evaluates the exported models with llama.cpp: bits per byte and greedy agreement.

Also lets the target continue training text; a draft is trained on these continuations.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import llama_cpp
import numpy as np
from rich.progress import Progress

from lab.options import engine_options
from lab.train.shapes import EOS_ID, N_CTX, SEED
from offload.engine import Engine, open_engine
from offload.ggml.library.lib import library
from specoffload.draft_making.continuations import N_PROMPT, continued

STRIDE = 1536  # windows of N_CTX tokens overlap by a quarter, so most tokens see 512 before them
N_AGREED = 64

N_PARALLEL = 32


class LlamaModel:
    """A GGUF file opened on the CPU. Every call starts with an empty KV cache."""

    def __init__(
        self, path: Path, n_threads: int = os.cpu_count() or 1, *, exact_cache: bool = False
    ) -> None:
        """`exact_cache` keeps keys and values as float32. llama.cpp rounds to float16 by default,
        which can change a router's choice between close scores."""
        cache = llama_cpp.GGML_TYPE_F32 if exact_cache else llama_cpp.GGML_TYPE_F16
        library()  # redirects llama.cpp's log to a logger that is silent by default
        self.llama = llama_cpp.Llama(
            str(path),
            n_ctx=N_CTX,
            n_batch=N_CTX,
            n_ubatch=512,
            n_gpu_layers=0,
            logits_all=True,
            type_k=cache,
            type_v=cache,
            n_threads=n_threads,
            n_threads_batch=n_threads,
            verbose=False,
        )

    def tokenize(self, text: str) -> list[int]:
        ids: list[int] = self.llama.tokenize(text.encode(), add_bos=False, special=False)
        return ids

    def detokenize(self, ids: list[int]) -> str:
        return bytes(self.llama.detokenize(ids)).decode(errors="replace")

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Logits, float32 [len(tokens), n_vocab]. Raises ValueError for more than N_CTX tokens."""
        if len(tokens) > N_CTX:
            raise ValueError(f"{len(tokens)} tokens do not fit the context of {N_CTX}")
        self.llama.reset()
        self.llama.eval(tokens)
        return np.array(self.llama.scores[: len(tokens)], dtype=np.float32)

    def greedy(self, tokens: list[int], n_new: int) -> list[int]:
        """`n_new` greedily chosen tokens after `tokens`. No token ends the text early."""
        self.llama.reset()
        self.llama.eval(tokens)
        made: list[int] = []
        for _ in range(n_new):
            made.append(int(self.llama.scores[self.llama.n_tokens - 1].argmax()))
            self.llama.eval(made[-1:])
        return made

    def close(self) -> None:
        self.llama.close()


# -- figures ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Likelihood:
    nats: float
    n_tokens: int
    n_bytes: int

    @property
    def bits_per_byte(self) -> float:
        return self.nats / np.log(2.0) / self.n_bytes


def negative_log_likelihood(model: LlamaModel, ids: list[int]) -> float:
    """Nats of ids[1:], each token given those before it, within windows of N_CTX tokens."""
    total, scored = 0.0, 1
    for start in range(0, max(1, len(ids) - N_CTX + STRIDE), STRIDE):
        window = ids[start : start + N_CTX]
        skip = scored - start
        if skip >= len(window):
            break
        logits = model.logits(window)[skip - 1 : -1]
        labels = np.array(window[skip:])
        top = logits.max(-1)
        log_z = np.log(np.exp(logits - top[:, None]).sum(-1, dtype=np.float64)) + top
        total += float((log_z - logits[np.arange(len(labels)), labels]).sum())
        scored = start + len(window)
    return total


def likelihood(model: LlamaModel, text: str, n_tokens: int | None = None) -> Likelihood:
    """The likelihood of a whole file after EOS, or of its first `n_tokens` tokens."""
    ids = model.tokenize(text)[:n_tokens]
    n_bytes = len(model.llama.detokenize(ids)) if n_tokens else len(text.encode())
    return Likelihood(negative_log_likelihood(model, [EOS_ID, *ids]), len(ids), n_bytes)


def agreement(target: LlamaModel, draft: LlamaModel, prompt: str) -> float:
    """Share of the target's `N_AGREED` greedy tokens that the draft also finds likeliest."""
    ids = target.tokenize(prompt)
    made = target.greedy(ids, N_AGREED)
    guesses = draft.logits(ids + made)[len(ids) - 1 : -1].argmax(-1)
    return float((guesses == np.array(made)).mean())


def own_agreement(engine: Engine, prompt: str) -> float:
    """Share of the target's `N_AGREED` greedy tokens that its own layer drafts as first token.

    The engine must be open with layers for multi-token prediction.
    """
    layers, sequences = engine.opened.row_draft, engine.sequences
    assert layers is not None
    history = engine.tokenize(prompt, add_special=False, parse_special=False)
    sequences.rewind(0, 0)
    if len(history) > 1:
        sequences.extend(0, history[:-1], 0)
    n_right = 0
    for _ in range(N_AGREED):
        guess = int(layers.extend(0, layers.tail(0, history))[-1].argmax())
        history.append(int(sequences.extend(0, history[-1:], 1)[0].argmax()))
        n_right += guess == history[-1]
    return n_right / N_AGREED


# -- continuations ---------------------------------------------------------------------------------


def make_continuations(
    target: Path, tokens: np.ndarray, newline_ids: np.ndarray, deadline_s: float, n_threads: int
) -> np.ndarray:
    """Make sequences, uint16 [n, LENGTH], until the deadline. Each is a prompt from a random line
    start, continued greedily."""
    rng = np.random.default_rng(SEED)
    starts = np.flatnonzero(np.isin(tokens, newline_ids)) + 1  # after a token that ends a line
    starts = starts[starts < len(tokens) - N_PROMPT]
    options = engine_options(
        device="cpu",
        n_ctx=N_PARALLEL * 256,
        n_sequences=N_PARALLEL,
        n_outputs=N_PROMPT,
        n_threads=n_threads,
        n_threads_batch=n_threads,
    )
    begun, parts = time.monotonic(), []
    with open_engine(target, options) as engine, Progress(refresh_per_second=0.2) as progress:
        bar = progress.add_task("continuations", total=deadline_s)
        while (elapsed := time.monotonic() - begun) < deadline_s or not parts:
            progress.update(bar, completed=elapsed)
            prompts = np.stack([tokens[s : s + N_PROMPT] for s in rng.choice(starts, N_PARALLEL)])
            parts.append(continued(engine, prompts)["tokens"].astype(np.uint16))
    return np.concatenate(parts)
