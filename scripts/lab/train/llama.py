"""The little of llama.cpp that measuring needs: load, tokenise, all logits of one sequence."""

from __future__ import annotations

import os
from pathlib import Path

import llama_cpp
import numpy as np

from lab.train.shapes import N_CTX
from offload.ggml.library.lib import library


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
