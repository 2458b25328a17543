"""The store with real models: same logits, one copy of weights, split files, loading errors."""

from __future__ import annotations

import mmap
import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from lab.synth import write_preset
from numa.memory import PlacedMemory
from offload.decode import Batch
from offload.errors import BadModel, DoesNotFit, ModelChanged
from offload.ggml.context import Context
from offload.ggml.hostbuffer import HostBufferType
from offload.ggml.library import abi
from offload.ggml.library.callback import Pending
from offload.ggml.library.lib import library
from offload.ggml.memory import AnonymousMemory, HostRange
from offload.ggml.model import Model, ModelPlacement
from offload.model import ModelFacts, TensorEntry
from offload.model_file import read_facts
from offload.plan.placement import make_plan
from offload.store import store as store_module
from offload.store.store import HostRoom, Store, StoreOptions
from offload.times.context_memory import ContextOptions

TOKENS = [1, 7, 3, 200, 11]
ON_CPU = StoreOptions()


@dataclass
class Loaded:
    """A model on the CPU whose experts lie in a buffer type of ours."""

    model: Model
    pending: Pending
    host: HostBufferType
    store: Store | None

    def logits(self) -> NDArray[np.float32]:
        """Logits [5, n_vocab] of five tokens."""
        context = Context(self.model, ContextOptions(n_ctx=64, n_threads=1), self.pending)
        rows = context.decode(Batch(TOKENS, range(5), [0] * 5, [True] * 5, 5))
        context.close()
        return rows

    def close(self) -> None:
        self.model.close()


def streamed_of(facts: ModelFacts) -> tuple[TensorEntry, ...]:
    streamed = make_plan(facts).streamed
    assert streamed
    return streamed


def load(
    path: Path,
    options: StoreOptions | None,
    store: Store | None = None,
    patterns: Sequence[str] | None = None,
) -> Loaded:
    """Load a model. The store reads its experts if `options` or `store` is given, else libllama."""
    facts = read_facts(path)
    if options is not None and store is None:
        store = Store(facts, streamed_of(facts), options)
    pending = Pending()
    host = HostBufferType("TEST", store or AnonymousMemory(), pending, placer=store)
    patterns = patterns or make_plan(facts).patterns()
    placement = ModelPlacement(
        overrides=tuple((pattern, host) for pattern in patterns),
        use_extra_bufts=False,
        load_mode="mmap",
    )
    if store is None:
        return Loaded(Model(path, placement, pending), pending, host, None)
    with store.loading(pending):
        model = Model(path, placement, pending, store.watching(lambda *_: None))
    try:
        store.finish()
    except BaseException:
        model.close()
        raise
    return Loaded(model, pending, host, store)


def logits_of(path: Path, options: StoreOptions | None) -> NDArray[np.float32]:
    loaded = load(path, options)
    rows = loaded.logits()
    loaded.close()
    return rows


def cached_pages(path: Path, start: int = 0, stop: int | None = None) -> int:
    with (
        path.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapping,
    ):
        stop = len(mapping) if stop is None else stop
        part = HostRange.of_mapping(mapping).part(start, stop - start)
        return part.resident_bytes() // mmap.PAGESIZE


def drop(path: Path) -> None:
    """Take the file out of the page cache, or skip the test."""
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_pages(path):
        pytest.skip("the page cache of this file system cannot be dropped")


@pytest.fixture(scope="module")
def mid_moe(models: Path) -> Path:
    """A model of some 60 MB, nearly all of it experts."""
    return write_preset(
        "qwen3-30b-a3b", models / "mid_moe.gguf", size="tiny", seed=4, n_expert=64, n_ff_exp=1024
    )


WAYS = {
    "direct": ON_CPU,
    "--mmap": StoreOptions(keep_page_cache=True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cold", [True, False], ids=["cold", "warm"])
def test_the_store_gives_the_bits_of_what_libllama_loads(
    tiny_moe: Path, way: str, cold: bool
) -> None:
    plain = logits_of(tiny_moe, None)
    assert np.isfinite(plain).all()
    assert plain.std() > 0
    if cold:
        drop(tiny_moe)
    assert np.array_equal(logits_of(tiny_moe, WAYS[way]), plain)


def test_libllama_neither_reads_nor_copies_streamed_weights(mid_moe: Path) -> None:
    drop(mid_moe)
    loaded = load(mid_moe, ON_CPU)
    store, facts = loaded.store, read_facts(mid_moe)
    assert store is not None
    report = store.report
    assert report is not None
    n = len(streamed_of(facts))
    assert (report.n_tensors, loaded.host.n_left_out) == (n, n)
    assert report.n_mapped_unread == 1
    assert report.weight_bytes == sum(e.size_bytes for e in streamed_of(facts))
    if report.not_direct_reason:
        pytest.skip(report.not_direct_reason)
    assert report.counters.direct_bytes >= report.weight_bytes
    assert report.counters.buffered_bytes == report.counters.cached_bytes == 0
    for run in store.layout.runs:
        stop = min(run.stop_bytes, mid_moe.stat().st_size)
        pages = -(-run.size_bytes // 4096)
        # Reading resident weights may cache pages at both ends of a run, and read-ahead pages.
        assert cached_pages(mid_moe, run.start_bytes, stop) < max(34, pages // 4)
    loaded.close()


def memory_bytes(key: str) -> int:
    match = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match
    return int(match[1]) << 10


def test_the_weights_are_held_once_and_given_back(mid_moe: Path) -> None:
    load(mid_moe, ON_CPU).close()  # the first model allocates memory for good
    before = memory_bytes("RssAnon")
    loaded = load(mid_moe, ON_CPU)
    assert loaded.store is not None
    assert loaded.store.report is not None
    loaded.store.huge_pages(wait=True)
    weights = loaded.store.report.weight_bytes
    assert weights > 30 << 20
    held = memory_bytes("RssAnon") - before
    assert weights * 0.9 < held < weights + (16 << 20)
    loaded.close()
    assert loaded.store.memory is None
    assert memory_bytes("RssAnon") - before < 16 << 20


@pytest.fixture(scope="module")
def split_moe(tiny_moe: Path, models: Path) -> tuple[Path, int]:
    """The tiny model split into files of 12 tensors. Returns the first file and their number."""
    reader = gguf.GGUFReader(tiny_moe)
    architecture = reader.fields["general.architecture"].contents()
    out = models / "split.gguf"
    writer = gguf.GGUFWriter(out, architecture, split_max_tensors=12)
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            element = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], element)
    for t in reader.tensors:
        writer.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(models.glob("split-*.gguf"))
    return parts[0], len(parts)


@pytest.mark.parametrize("way", WAYS)
def test_the_parts_of_a_split_model_are_all_read(
    tiny_moe: Path, split_moe: tuple[Path, int], way: str
) -> None:
    path, n_parts = split_moe
    loaded = load(path, WAYS[way])
    assert loaded.store is not None
    assert loaded.store.report is not None
    assert loaded.store.report.n_mapped_unread == n_parts > 1
    assert len({run.file for run in loaded.store.layout.runs}) > 1
    assert np.array_equal(loaded.logits(), logits_of(tiny_moe, None))
    loaded.close()


# -- what goes wrong ---------------------------------------------------------------------------


def copy_of(path: Path, folder: Path) -> Path:
    copied = folder / "copy.gguf"
    copied.write_bytes(path.read_bytes())
    return copied


class Memories:
    """Allocates the store's memory, and records it in `made`."""

    def __init__(self) -> None:
        self.made: list[PlacedMemory] = []

    def __call__(self, size_bytes: int) -> PlacedMemory:
        self.made.append(PlacedMemory(size_bytes))
        return self.made[-1]


def nothing_is_left(memories: Memories, n_threads: int) -> bool:
    return not any(m.address for m in memories.made) and threading.active_count() == n_threads


def test_a_file_cut_short_after_its_header_was_read_is_refused_before_loading(
    tiny_moe: Path, tmp_path: Path
) -> None:
    path, memories, n_threads = copy_of(tiny_moe, tmp_path), Memories(), threading.active_count()
    facts = read_facts(path)
    store = Store(facts, streamed_of(facts), ON_CPU, memories)
    os.truncate(path, path.stat().st_size - 100_000)
    with pytest.raises(BadModel, match="it was cut short"), store.loading(Pending()):
        pytest.fail("nothing may be loaded")
    assert nothing_is_left(memories, n_threads)


class Cutting(Store):
    """A store whose file is truncated after libllama has placed the last tensor."""

    def start_reading(self) -> None:
        last = self.layout.runs[-1]
        os.truncate(last.file, last.end_bytes - 10_000)
        super().start_reading()


def test_a_file_cut_short_while_it_is_loaded_is_an_error(tiny_moe: Path, tmp_path: Path) -> None:
    path, memories, n_threads = copy_of(tiny_moe, tmp_path), Memories(), threading.active_count()
    facts = read_facts(path)
    store = Cutting(facts, streamed_of(facts), ON_CPU, memories)
    with pytest.raises(ModelChanged, match="cut short while it was open"):
        load(path, None, store)
    assert nothing_is_left(memories, n_threads)


def test_ctrl_c_while_libllama_loads_ends_the_loading(mid_moe: Path) -> None:
    memories, n_threads = Memories(), threading.active_count()
    before = registry_entry()
    facts = read_facts(mid_moe)
    store = Store(facts, streamed_of(facts), ON_CPU, memories)

    def interrupt(step: str, done: float) -> None:
        raise KeyboardInterrupt

    pending = Pending()
    host = HostBufferType("TEST", store, pending, placer=store)
    overrides = ((r"_exps\.weight$", host),)
    placement = ModelPlacement(overrides=overrides, use_extra_bufts=False, load_mode="mmap")
    with pytest.raises(KeyboardInterrupt), store.loading(pending):
        Model(mid_moe, placement, pending, store.watching(interrupt))
    assert nothing_is_left(memories, n_threads)
    assert registry_entry() == before


def registry_entry() -> int:
    lib = library()
    cpu = lib.ggml_backend_dev_by_type(abi.GGML_BACKEND_DEVICE_TYPE_CPU)
    registry = abi.ggml_backend_reg.from_address(lib.ggml_backend_dev_backend_reg(cpu))
    address: int = registry.iface.get_proc_address
    return address


def test_a_tensor_that_was_not_planned_is_refused_by_name(tiny_moe: Path) -> None:
    memories, n_threads = Memories(), threading.active_count()
    facts = read_facts(tiny_moe)
    store = Store(facts, streamed_of(facts)[:1], ON_CPU, memories)
    with pytest.raises(BadModel, match=r"wants to stream tensor blk\..*not known"):
        load(tiny_moe, None, store, patterns=[r"_exps\.weight$"])
    assert nothing_is_left(memories, n_threads)


def test_too_little_memory_is_refused_before_anything_is_read(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "room_now", lambda: HostRoom(1 << 20, "free memory"))
    with pytest.raises(DoesNotFit, match=r"free memory\); use --mmap"):
        load(tiny_moe, ON_CPU)
    loaded = load(tiny_moe, StoreOptions(keep_page_cache=True))
    assert np.isfinite(loaded.logits()).all()
    loaded.close()


def test_progress_rises_to_one(mid_moe: Path) -> None:
    drop(mid_moe)
    facts, pending = read_facts(mid_moe), Pending()
    store = Store(facts, streamed_of(facts), ON_CPU)
    told: list[float] = []

    def tell(step: str, done: float) -> None:
        assert step == "reading weights"
        told.append(done)

    host = HostBufferType("TEST", store, pending, placer=store)
    overrides = ((r"_exps\.weight$", host),)
    placement = ModelPlacement(overrides=overrides, use_extra_bufts=False, load_mode="mmap")
    with store.loading(pending):
        model = Model(mid_moe, placement, pending, store.watching(tell))
    store.finish(tell)
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert 0 <= told[0] < 1
    model.close()
