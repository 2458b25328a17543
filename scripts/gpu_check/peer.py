"""llama.cpp by itself on the same file: experts in host memory, its own offload of large batches.

Uses llama_cpp's low-level functions and nothing of ours but the tokens. Its argument is a JSON
object; its last line of output is one, too: batch size -> median seconds of a step.
"""

from __future__ import annotations

import ctypes as C
import json
import statistics
import sys
import time
from typing import Any

import llama_cpp.llama_cpp as llama
from steps import PREFIX, tokens_of

EXPERTS = C.create_string_buffer(rb"\.ffn_(up|down|gate|gate_up)_exps\.weight$")


def open_model(asked: dict[str, Any]) -> Any:
    params = llama.llama_model_default_params()
    params.n_gpu_layers = 999 if asked["device"] else 0
    params.load_mode = 0  # not mapped: the host buffer may then be the device's pinned one
    cpu = C.CFUNCTYPE(C.c_void_p)(("ggml_backend_cpu_buffer_type", llama._lib))()
    overrides = (C.c_void_p * 4)(C.addressof(EXPERTS), cpu, None, None)
    params.tensor_buft_overrides = C.cast(overrides, C.c_void_p)
    params.use_extra_bufts = False
    by_name = C.CFUNCTYPE(C.c_void_p, C.c_char_p)(("ggml_backend_dev_by_name", llama._lib))
    device = by_name(asked["device"].encode()) if asked["device"] else None
    devices = (C.c_void_p * 2)(device, None)
    params.devices = C.cast(devices, C.c_void_p)
    model = llama.llama_model_load_from_file(asked["path"].encode(), params)
    if not model:
        sys.exit("the model could not be loaded")
    return model


def open_context(model: Any, asked: dict[str, Any]) -> Any:
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch = asked["n_ctx"], max(asked["batches"])
    params.n_ubatch = max(asked["batches"])
    params.n_threads = params.n_threads_batch = asked["n_threads"]
    params.flash_attn_type = asked["flash_attn"]
    params.op_offload = True
    params.no_perf = True
    context = llama.llama_init_from_model(model, params)
    if not context:
        sys.exit("the context could not be made")
    return context


def step(context: Any, batch: Any, tokens: list[int], start: int) -> None:
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, start + i, 1
        batch.seq_id[i][0], batch.logits[i] = 0, i == len(tokens) - 1
    if status := llama.llama_decode(context, batch):
        sys.exit(f"decoding {len(tokens)} tokens failed with status {status}")
    llama.llama_synchronize(context)


def main() -> None:
    asked = json.loads(sys.argv[1])
    quiet = llama.llama_log_callback(lambda *_: None)
    llama.llama_log_set(quiet, None)
    llama.llama_backend_init()
    model = open_model(asked)
    context = open_context(model, asked)
    memory = llama.llama_get_memory(context)
    n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    batch = llama.llama_batch_init(max(*asked["batches"], PREFIX), 0, 1)
    step(context, batch, tokens_of(PREFIX, 0, n_vocab), 0)
    medians = {}
    for n in asked["batches"]:
        times = []
        for repetition in range(asked["repetitions"] + 1):
            tokens = tokens_of(n, repetition, n_vocab)
            start = time.perf_counter()
            step(context, batch, tokens, PREFIX)
            times.append(time.perf_counter() - start)
            llama.llama_memory_seq_rm(memory, 0, PREFIX, -1)
        medians[n] = statistics.median(times[1:])
    llama.llama_batch_free(batch)
    llama.llama_free(context)
    llama.llama_model_free(model)
    print(json.dumps(medians))


if __name__ == "__main__":
    main()
