"""The calls that libllama makes to a device, recorded by a device that computes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from null_device import NullDevice

from offload.decode import Batch
from offload.ggml.context import Context
from offload.ggml.hostbuffer import HostBufferType
from offload.ggml.library.callback import Pending
from offload.ggml.memory import AnonymousMemory
from offload.ggml.model import Model, ModelPlacement
from offload.model_file import read_facts
from offload.times.context_memory import ContextOptions


@contextmanager
def on_null(path: Path, *, experts_in_host: bool) -> Iterator[tuple[NullDevice, Context]]:
    """A model opened on a null device.

    With `experts_in_host` the experts are in host memory, otherwise all weights are on the device.
    """
    pending = Pending()
    host = HostBufferType("NULL_HOST", AnonymousMemory(), pending)
    device = NullDevice(pending, host)
    placement = ModelPlacement(
        devices=(device,),
        overrides=((r"_exps\.weight$", host),) if experts_in_host else (),
        n_gpu_layers=999,
        use_extra_bufts=False,
    )
    model = Model(path, placement, pending)
    context = Context(model, ContextOptions(n_ctx=256, n_batch=64, n_ubatch=64), pending)
    yield device, context
    context.close()
    model.close()
    assert device.n_open == 0, "every stream that was opened is closed"


def decode(context: Context, n: int, start: int = 0) -> None:
    wanted = [False] * (n - 1) + [True]
    context.decode(Batch([1] * n, range(start, start + n), [0] * n, wanted, n))


def test_each_decode_is_one_graph_which_libllama_uses_again(tiny_moe: Path) -> None:
    with on_null(tiny_moe, experts_in_host=False) as (device, context):
        assert device.n_open == 1
        assert device.asked == [], "no weight lies in our host memory"
        for i in range(4):
            decode(context, 3, 3 * i)
        assert len(device.computed) == 4
        uids, sizes = zip(*device.computed, strict=True)
        assert len(set(sizes)) == 1
        assert len(set(uids)) < 4, "the same graph again keeps its uid"
        assert all(uids)
        decode(context, 5, 12)
        assert device.computed[-1][0] not in uids, "another batch size is another graph"


def test_it_is_asked_for_every_product_with_a_weight_in_host_memory(tiny_moe: Path) -> None:
    experts = {entry.name for entry in read_facts(tiny_moe).expert_weights}
    with on_null(tiny_moe, experts_in_host=True) as (device, context):
        device.asked.clear()
        decode(context, 3)
        assert set(device.asked) == experts
        assert len(device.computed) == 1, (
            "it takes all of them, so no node between them is left to the CPU"
        )
