"""A client of a worker that computes all layers. A process of its own, as ggml aborts on failures.

    python worker_client.py MODEL HOST:PORT N,N,...

It decodes batches of N tokens with libllama alone and with the worker. Before each of the worker's
decodes it prints a line and waits for one. At the end it prints the largest difference of all
logits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from offload.decode import Batch
from offload.ggml.context import Context
from offload.ggml.library.callback import Pending
from offload.ggml.model import Model, ModelPlacement
from offload.ggml.rpc import RemoteWeights, add_worker
from offload.model_file import read_facts
from offload.remote.address import parse_address
from offload.remote.hello import LayersAsked, ask_for
from offload.times.context_memory import ContextOptions

_CONTEXT = ContextOptions(n_ctx=256, n_batch=64, n_ubatch=64, n_outputs=64, n_threads=1,
                          n_threads_batch=1, flash_attn="off")  # fmt: skip


def decoded(
    model: Model, pending: Pending, sizes: list[int], before: Callable[[], None]
) -> list[NDArray[np.float32]]:
    context, random, start, found = (
        Context(model, _CONTEXT, pending),
        np.random.default_rng(7),
        0,
        [],
    )
    for n in sizes:
        tokens = random.integers(0, model.n_vocab, n).tolist()
        before()
        found.append(context.decode(Batch(tokens, range(start, start + n), [0] * n, [True] * n, n)))
        start += n
    before()
    context.close()
    return found


def main(path: Path, worker: str, sizes: list[int]) -> None:
    facts, pending = read_facts(path), Pending()
    for state in ask_for(parse_address(worker), LayersAsked(0, facts.n_layers, head=True)):
        print(state.doing or "loaded", flush=True)
    (device,) = add_worker(worker)
    weights = RemoteWeights("SPEC_REMOTE", device, pending)
    plain = Model(path, ModelPlacement(use_extra_bufts=False), pending)
    placement = ModelPlacement(
        devices=(device,),
        overrides=((r"^(blk\.\d+\.|output)", weights),),
        n_gpu_layers=999,
        use_extra_bufts=False,
        load_mode="mmap",
    )
    remote = Model(path, placement, pending)
    weights.loaded()

    def mark() -> None:
        print("mark", flush=True)
        sys.stdin.readline()

    wanted = decoded(plain, pending, sizes, lambda: None)
    found = decoded(remote, pending, sizes, mark)
    most = max(float(np.abs(a - b).max()) for a, b in zip(wanted, found, strict=True))
    print(f"difference {most} of {max(float(np.abs(a).max()) for a in wanted)}", flush=True)
    remote.close()
    plain.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], [int(n) for n in sys.argv[3].split(",")])
