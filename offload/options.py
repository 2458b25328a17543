"""The options of opening a model, from which its layout is decided."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

from offload.plan.found import Wanted
from offload.plan.layout import Layout
from offload.plan.repacking import MeasureLayouts
from offload.probe import Asked, MeasureLinks
from offload.remote.address import RemoteOptions
from offload.store.store import StoreOptions, watched
from offload.stream.options import StreamingOptions
from offload.threads.numa_plan import NumaPlan
from offload.times.context import ContextOptions
from offload.times.min_batch import MinBatch


@dataclass(frozen=True)
class ProjectorOptions:
    """A projector for images, and where it computes. None: the file's own limits of tokens."""

    path: Path
    why_on_cpu: str = ""  # "": the model's device computes it
    least_tokens: int | None = None  # of an image
    most_tokens: int | None = None


@dataclass(frozen=True)
class EngineOptions(ContextOptions):
    """The options of opening a model. Names are llama.cpp's where the meaning is the same."""

    device: str = "auto"  # names of devices, separated by commas
    tensor_split: tuple[float, ...] = ()  # devices' shares of the layers; (): planned
    remote: RemoteOptions = RemoteOptions()
    min_batch: MinBatch = MinBatch()
    stream_experts: bool = True  # False: the whole model is resident on the device
    streaming: StreamingOptions = StreamingOptions()
    store: StoreOptions = StoreOptions()
    wrapped: bool = True  # False: libllama sees the real device, as for a draft
    most_ubatch: int | None = None  # largest ubatch that the plan may choose; None: use n_ubatch
    mtp: bool = False  # load the layers for multi-token prediction, if the file has usable ones
    eagle: Path | None = None  # an EAGLE-3 file that drafts from the model's rows, if it is usable
    projector: ProjectorOptions | None = None  # None: prompts have no images
    pooling: str | None = None  # kind of embeddings (plan/context.py); None: no embeddings
    numa: NumaPlan | None = None  # its teams replace n_threads and n_threads_batch
    mla_crossover: int | None = None  # most tokens for MLA's broadcast form (tests); None: choose
    measure_links: MeasureLinks | None = None  # returns several links' rates; None: typical
    trial_folder: Path | None = None  # folder for results of AMX trials; None: try at each start
    repack: bool | None = None  # repack weights for the CPU; None: if `measure_layouts` prefers it
    measure_layouts: MeasureLayouts | None = None  # None: repack all, as llama.cpp does
    chooses_cache: bool = False  # the plan may put the KV cache into RAM, if `kv_offload` is True

    @property
    def context(self) -> ContextOptions:
        """The options of the context alone."""
        return ContextOptions(**{f.name: getattr(self, f.name) for f in fields(ContextOptions)})

    def opened_as(self, layout: Layout) -> EngineOptions:
        """Return these options with what `layout` decided."""
        context = {f.name: getattr(layout.context, f.name) for f in fields(ContextOptions)}
        limits = None if layout.experts is None else watched(layout.experts)
        store = replace(self.store, expert_limits=limits, on_disk=layout.on_disk)
        return replace(self, **context, min_batch=layout.min_batch, store=store)

    @property
    def asked(self) -> Asked:
        """Where to look for devices."""
        streaming = self.streaming
        return Asked(
            self.device, self.tensor_split, self.remote,
            streaming.draft_device if streaming.reserve_bytes else None,
            self.wrapped, streaming.machine, self.measure_links,
        )  # fmt: skip

    @property
    def wanted(self) -> Wanted:
        """What the layout depends on."""
        streaming = self.streaming
        return Wanted(
            context=self.context,
            request=replace(streaming, stream_experts=self.stream_experts),
            shares=self.tensor_split,
            min_batch=self.min_batch,
            vram_bytes=streaming.vram_bytes,
            device_bytes=streaming.device_bytes,
            each_device_bytes=streaming.each_device_bytes,
            draft_device=streaming.draft_device,
            wraps=self.wrapped,
            most_ubatch=self.most_ubatch,
            mtp=self.mtp,
            splits=streaming.hybrid,
            prefetches=streaming.prefetch,
            keeps_page_cache=self.store.keep_page_cache,
            ram_bytes=self.store.ram_bytes,
            order=self.remote.order,
            repack=self.repack,
            chooses_cache=self.chooses_cache,
        )
