"""Runs plain libllama as a separate program, without our devices, buffers and schedules.

    python -m offload.ggml.library.untouched < requests

Each line of standard input is a JSON object, each line of standard output its answer. The request
`open` loads a model as `llama-server -ngl 99 --n-cpu-moe N --no-mmap` does: llama.cpp's own offload
of large batches is on, and its weights may be repacked. `prefill`, `decode` and `follow` evaluate
tokens in sequence 0 from position `start` on. `tokenize` turns text into tokens. `close` ends the
program.
"""

from __future__ import annotations

import ctypes as C
import json
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

import llama_cpp.llama_cpp as llama
import numpy as np
from numpy.typing import NDArray

from offload.ggml.library.override_array import override_array
from offload.kv_overrides import read_override

_LOAD_WITHOUT_MMAP = 0
_CONTEXT_KEYS = ("n_ctx", "n_batch", "n_ubatch", "n_threads", "n_threads_batch")


class LibraryRefused(Exception):
    """A call of libllama failed. The text says which."""


class Untouched:
    """A model and a context of libllama. Close it."""

    def __init__(self, asked: dict[str, Any]) -> None:
        """`asked`: path, device (None: the CPU), cpu_weights (pattern of names that stay in host
        memory, "" for none), repack, flash_attn (-1, 0, 1), the context's sizes, and perhaps
        kv_overrides (values of --override-kv)."""
        self._model = self._open_model(asked)
        self._context = self._open_context(asked)
        self._memory = llama.llama_get_memory(self._context)
        self._n_batch = asked["n_batch"]
        self._batch = llama.llama_batch_init(self._n_batch, 0, 1)
        self._vocab = llama.llama_model_get_vocab(self._model)
        self.n_vocab = llama.llama_vocab_n_tokens(self._vocab)

    def _open_model(self, asked: dict[str, Any]) -> Any:
        params = llama.llama_model_default_params()
        params.n_gpu_layers = 999 if asked["device"] else 0
        params.use_extra_bufts = asked["repack"]
        by_name = C.CFUNCTYPE(C.c_void_p, C.c_char_p)(("ggml_backend_dev_by_name", llama._lib))
        device = by_name(asked["device"].encode()) if asked["device"] else None
        devices = (C.c_void_p * 2)(device, None)
        params.devices = C.cast(devices, C.c_void_p)
        overrides = tuple(map(read_override, asked.get("kv_overrides", ())))
        array = override_array(llama, overrides)
        params.kv_overrides = C.cast(array, type(params.kv_overrides))
        if asked["cpu_weights"]:
            # Without mmap libllama keeps these weights in the device's own pinned buffer.
            params.load_mode = _LOAD_WITHOUT_MMAP
            cpu = C.CFUNCTYPE(C.c_void_p)(("ggml_backend_cpu_buffer_type", llama._lib))()
            pattern = C.create_string_buffer(asked["cpu_weights"].encode())
            buffers = (C.c_void_p * 4)(C.addressof(pattern), cpu, None, None)
            params.tensor_buft_overrides = C.cast(buffers, C.c_void_p)
        model = llama.llama_model_load_from_file(asked["path"].encode(), params)
        if not model:
            raise LibraryRefused("the model could not be loaded: does it fit beside what is open?")
        return model

    def _open_context(self, asked: dict[str, Any]) -> Any:
        params = llama.llama_context_default_params()
        for key in _CONTEXT_KEYS:
            setattr(params, key, asked[key])
        params.flash_attn_type = asked["flash_attn"]
        params.op_offload = True
        params.no_perf = True
        context = llama.llama_init_from_model(self._model, params)
        if not context:
            raise LibraryRefused(f"no context of {asked['n_ctx']} tokens could be made")
        return context

    def close(self) -> None:
        llama.llama_batch_free(self._batch)
        llama.llama_free(self._context)
        llama.llama_model_free(self._model)

    def tokenize(self, text: str) -> dict[str, Any]:
        """Return the text's tokens, after the special tokens that begin a text of this model."""
        raw = text.encode()
        out = (llama.llama_token * (len(raw) + 8))()
        n = llama.llama_tokenize(self._vocab, raw, len(raw), out, len(out), True, False)
        if n < 0:
            raise LibraryRefused(f"a text of {len(raw)} bytes could not be tokenised")
        return {"tokens": list(out[:n])}

    def prefill(self, tokens: Sequence[int], start: int) -> dict[str, Any]:
        """Evaluate `tokens` from position `start` on; return seconds and the likeliest token."""
        llama.llama_memory_seq_rm(self._memory, 0, start, -1)
        began = time.perf_counter()
        for at in range(0, len(tokens), self._n_batch):
            self._step(tokens[at : at + self._n_batch], start + at)
        return {"s": time.perf_counter() - began, "next": self._likeliest()}

    def decode(self, token: int, n_tokens: int, start: int) -> dict[str, Any]:
        """Decode `n_tokens` greedy tokens one by one after `token`; return seconds and tokens."""
        llama.llama_memory_seq_rm(self._memory, 0, start, -1)
        tokens: list[int] = []
        began = time.perf_counter()
        for i in range(n_tokens):
            self._step([token], start + i)
            token = self._likeliest()
            tokens.append(token)
        return {"s": time.perf_counter() - began, "tokens": tokens}

    def follow(self, tokens: Sequence[int], start: int, logits: str = "") -> dict[str, Any]:
        """Evaluate `tokens` one by one from position `start` on.

        Returns the seconds of each token, and the likeliest token after it. If `logits` is the name
        of a file, the logits after each token are written to it, as numpy's [n_tokens, n_vocab].
        """
        llama.llama_memory_seq_rm(self._memory, 0, start, -1)
        seconds, following, rows = [], [], []
        for i, token in enumerate(tokens):
            began = time.perf_counter()
            self._step([token], start + i)
            seconds.append(time.perf_counter() - began)
            following.append(self._likeliest())
            if logits:
                rows.append(self._logits().copy())
        if logits:
            np.save(logits, np.stack(rows))
        return {"s": seconds, "next": following}

    def _step(self, tokens: Sequence[int], start: int) -> None:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, start + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, i == len(tokens) - 1
        if status := llama.llama_decode(self._context, batch):
            raise LibraryRefused(f"decoding {len(tokens)} tokens failed with status {status}")
        llama.llama_synchronize(self._context)

    def _logits(self) -> NDArray[np.float32]:
        """Return the logits after the last token. The next step overwrites the array."""
        row = llama.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(row, (self.n_vocab,))

    def _likeliest(self) -> int:
        return int(self._logits().argmax())


def answer_requests(requests: TextIO, answers: TextIO) -> None:
    """Write one answer per request until `close` or the end of `requests`, also for errors."""
    opened: Untouched | None = None
    try:
        for line in requests:
            asked = json.loads(line)
            do = asked.pop("do")
            answer: dict[str, Any] = {}
            try:
                if do == "open":
                    opened = Untouched(asked)
                    answer = {"n_vocab": opened.n_vocab}
                elif do == "close" or opened is None:
                    break
                else:
                    answer = getattr(opened, do)(**asked)
            except LibraryRefused as e:
                answer = {"error": str(e)}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    finally:
        if opened is not None:
            opened.close()


def main() -> None:
    quiet = llama.llama_log_callback(lambda *_: None)
    llama.llama_log_set(quiet, None)
    llama.llama_backend_init()
    with open(1, "w", closefd=False) as answers:
        answer_requests(sys.stdin, answers)


if __name__ == "__main__":
    main()
