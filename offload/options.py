"""The options of opening a model: what is wanted of its plan, and how it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from numa.threads import EVERYWHERE, Processors
from offload.device import MeasureLinks
from offload.plan.repacking import MeasureLayouts
from offload.plan.wanted import Wanted
from offload.remote.address import RemoteOptions
from offload.store.store import StoreOptions
from offload.stream.options import StreamingOptions
from offload.stream.read_speed import MeasureReads
from offload.threads.numa_plan import NumaPlan


@dataclass(frozen=True)
class ProjectorOptions:
    """A projector for images, and where it computes. None: the file's own limits of tokens."""

    path: Path
    on_cpu_reason: str = ""  # "": the model's device computes it
    least_tokens: int | None = None  # of an image
    most_tokens: int | None = None


@dataclass(frozen=True)
class EngineOptions:
    """The options of opening a model. Names are llama.cpp's where the meaning is the same.

    The layout is decided from `wanted` alone, and `Start` has it. These options stay as they are.
    """

    device: str = "auto"  # names of devices, separated by commas
    remote: RemoteOptions = RemoteOptions()
    wanted: Wanted = Wanted()
    streaming: StreamingOptions = StreamingOptions()
    store: StoreOptions = StoreOptions()
    row_file: Path | None = None  # a file that drafts from the model's rows, if it is usable
    projector: ProjectorOptions | None = None  # None: prompts have no images
    pooling: str | None = None  # kind of embeddings (plan/context.py); None: no embeddings
    numa: NumaPlan | None = None  # its teams replace n_threads and n_threads_batch
    # Processors of threads that `numa` does not bind: of one-token decodes, and of larger ones.
    decode_on: Processors = EVERYWHERE
    batch_on: Processors = EVERYWHERE
    measure_links: MeasureLinks | None = None  # returns several links' rates; None: typical
    trial_folder: Path | None = None  # folder for results of AMX trials; None: try at each start
    measure_layouts: MeasureLayouts | None = None  # None: repack all, as llama.cpp does
    # Decides whether kernels read and write rows of prompts in pinned memory, by measured reads.
    # None: they do, on CUDA.
    measure_reads: MeasureReads | None = None

    @property
    def processors(self) -> tuple[Processors, Processors]:
        """The processors of threads for one-token decodes, and for larger ones."""
        return self.decode_on, self.batch_on
