"""Layers computed ahead while experts are missing give the resident model's numbers on a GPU.

On the stand-in for CUDA, the fixture `no_misuse` fails if a token names a slot twice in a product
whose kernel looks for each expert only once.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from on_gpu import Logits, assert_close, options, slots_for

from lab.synth import write_preset
from offload.device import DeviceChoice
from offload.engine import Engine, open_engine
from offload.schedule.splitter import Splitter, all_on_device, stay
from offload.stream import play
from offload.times.min_batch import NEVER, MinBatch

SIZES = (9, 12, 16, 17, 1, 4)  # tokens of a batch; 9 are more than vector kernels take
# Rows are whole blocks of k-quants and of iq1_m. 17 tokens do not use all experts. If they did, a
# streamed layer would not be computed ahead.
SHAPE = {"n_embd": 256, "n_ff_exp": 256, "n_expert": 64}


def changing(engine: Engine) -> tuple[Logits, dict[int, int]]:
    """Logits of batches whose tokens change, so that most decodes lack experts, and the number of
    repairs by batch size."""
    rows, n_repairs = [], dict.fromkeys(SIZES, 0)
    for i, n in enumerate((*SIZES, *SIZES)):
        before = engine.counters().n_repairs
        engine.sequences.rewind(0, 0)
        tokens = [(37 * k + 11 * n + 5 * i) % engine.n_vocab for k in range(n)]
        rows.append(engine.sequences.extend(0, tokens))
        n_repairs[n] += engine.counters().n_repairs - before
    return np.concatenate(rows), n_repairs


@pytest.mark.parametrize(
    "splitter", [stay, all_on_device, None], ids=["stay", "device", "streamed"]
)
@pytest.mark.parametrize("quant", ["q4_K", "q3_K", "iq1_m", "bf16"])
def test_layers_computed_ahead_without_all_experts_are_repaired(
    gpu: DeviceChoice, models: Path, quant: str, splitter: Splitter | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if "llvmpipe" in gpu.device.description:
        pytest.skip("Mesa's software driver writes to buffers that libllama and ggml-vulkan freed")
    path = models / f"ahead-{quant}.gguf"
    if not path.exists():
        write_preset("qwen3-30b-a3b", path, quant=f"q8_0,experts={quant}", seed=1, **SHAPE)
    monkeypatch.setattr(play.Waits, "choose", lambda _, n_layers: n_layers)
    with open_engine(path, options(gpu, stream_experts=False, n_ubatch=32)) as engine:
        expected, _ = changing(engine)
    streaming = slots_for(path, "half", hybrid=True, splitter=splitter or stay, doorbell=False)
    first = NEVER if splitter else 1
    if splitter is None:
        streaming = {**streaming, "hybrid": False, "splitter": None}
    least = MinBatch(experts=first, dense=first)
    with open_engine(path, options(gpu, streaming, n_ubatch=32, min_batch=least)) as engine:
        got, n_repairs = changing(engine)
    not_ahead = [n for n in SIZES if n >= 9 and n_repairs[n] == 0]
    assert not not_ahead, n_repairs
    assert_close(got, expected, 0.08)
