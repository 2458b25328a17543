"""The exported models through llama.cpp alone: bits per byte, greedy agreement, and the target's
continuations of training text, which are what a draft is asked to guess."""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import dataclass
from pathlib import Path

import llama_cpp
import numpy as np
from rich.progress import Progress

from lab.train.shapes import EOS_ID, N_CTX, SEED
from offload.ggml.library.lib import library

STRIDE = 1536  # windows of N_CTX tokens overlap by a quarter, so most tokens see 512 before them
N_AGREED = 64

N_PARALLEL = 32
N_PROMPT, N_NEW = 96, 96
LENGTH = N_PROMPT + N_NEW


class LlamaModel:
    """A GGUF opened on the CPU; every call starts from an empty cache."""

    def __init__(
        self, path: Path, n_threads: int = os.cpu_count() or 1, *, exact_cache: bool = False
    ) -> None:
        """`exact_cache` keeps keys and values as float32; llama.cpp's default rounds to float16,
        which alone can flip a close call of the router."""
        cache = llama_cpp.GGML_TYPE_F32 if exact_cache else llama_cpp.GGML_TYPE_F16
        library()  # its log then goes into a logger that is silent by itself
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
        """float32 [len(tokens), n_vocab]; raises ValueError past the context."""
        if len(tokens) > N_CTX:
            raise ValueError(f"{len(tokens)} tokens do not fit the context of {N_CTX}")
        self.llama.reset()
        self.llama.eval(tokens)
        return np.array(self.llama.scores[: len(tokens)], dtype=np.float32)

    def greedy(self, tokens: list[int], n_new: int) -> list[int]:
        """The `n_new` most probable tokens, one after the other; stops at no token."""
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
    """Nats of ids[1:] given what comes before each, within windows of N_CTX tokens."""
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
    """Of a whole file after EOS, or of its first `n_tokens` tokens."""
    ids = model.tokenize(text)[:n_tokens]
    n_bytes = len(model.llama.detokenize(ids)) if n_tokens else len(text.encode())
    return Likelihood(negative_log_likelihood(model, [EOS_ID, *ids]), len(ids), n_bytes)


def agreement(target: LlamaModel, draft: LlamaModel, prompt: str) -> float:
    """Share of the target's `N_AGREED` greedy tokens that are the draft's first choice there."""
    ids = target.tokenize(prompt)
    made = target.greedy(ids, N_AGREED)
    guesses = draft.logits(ids + made)[len(ids) - 1 : -1].argmax(-1)
    return float((guesses == np.array(made)).mean())


# -- continuations ---------------------------------------------------------------------------------


class ParallelGreedy:
    """Decodes `N_PARALLEL` sequences of one model side by side, each by its own greedy choice."""

    def __init__(self, path: Path, n_threads: int) -> None:
        library()  # its log then goes into a logger that is silent by itself
        settings = llama_cpp.llama_model_default_params()
        settings.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
        if not self.model:
            raise FileNotFoundError(f"llama.cpp cannot load {path.name}")
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = N_PARALLEL * 256
        options.n_batch = options.n_ubatch = 512
        options.n_seq_max = N_PARALLEL
        options.n_threads = options.n_threads_batch = n_threads
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(512, 0, 1)

    def _decode(self, rows: list[tuple[int, int, int]], n_logits: int) -> np.ndarray:
        """Rows of (token, position, sequence); logits of the last `n_logits`, one row each."""
        self.batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            self.batch.token[i], self.batch.pos[i] = token, position
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, sequence
            self.batch.logits[i] = i >= len(rows) - n_logits
        if llama_cpp.llama_decode(self.context, self.batch) != 0:
            raise RuntimeError(f"llama.cpp could not decode {len(rows)} tokens")
        if not n_logits:
            return np.empty((0, self.n_vocab), np.float32)
        pointer = llama_cpp.llama_get_logits(self.context)
        floats = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(floats, (n_logits, self.n_vocab))

    def continue_all(self, prompts: np.ndarray) -> np.ndarray:
        """int [N_PARALLEL, N_PROMPT] -> uint16 [N_PARALLEL, LENGTH], the prompts included."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), False)
        out = np.zeros((N_PARALLEL, LENGTH), dtype=np.uint16)
        out[:, :N_PROMPT] = prompts
        for sequence in range(N_PARALLEL):
            ids = prompts[sequence].tolist()
            logits = self._decode([(t, i, sequence) for i, t in enumerate(ids)], 1)
            out[sequence, N_PROMPT] = logits[0].argmax()
        for position in range(N_PROMPT, LENGTH - 1):
            rows = [(int(out[s, position]), position, s) for s in range(N_PARALLEL)]
            out[:, position + 1] = self._decode(rows, N_PARALLEL).argmax(-1)
        return out

    def close(self) -> None:
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)


def line_starts(tokens: np.ndarray, newline_ids: np.ndarray) -> np.ndarray:
    """Positions in the training stream after a token that ends in a newline."""
    ends = np.flatnonzero(np.isin(tokens, newline_ids)) + 1
    return ends[ends < len(tokens) - N_PROMPT]


def make_continuations(
    target: Path, tokens: np.ndarray, newline_ids: np.ndarray, deadline_s: float, n_threads: int
) -> np.ndarray:
    """uint16 [n, LENGTH] until the deadline: prompts from random line starts, greedy tails."""
    rng = np.random.default_rng(SEED)
    starts = line_starts(tokens, newline_ids)
    greedy = ParallelGreedy(target, n_threads)
    begun, parts = time.monotonic(), []
    with Progress(refresh_per_second=0.2) as progress:
        bar = progress.add_task("continuations", total=deadline_s)
        while (elapsed := time.monotonic() - begun) < deadline_s or not parts:
            progress.update(bar, completed=elapsed)
            chosen = rng.choice(starts, N_PARALLEL)
            prompts = np.stack([tokens[s : s + N_PROMPT] for s in chosen])
            parts.append(greedy.continue_all(prompts))
    greedy.close()
    return np.concatenate(parts)
