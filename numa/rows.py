"""Which thread reads which rows of a weight: ggml's own partition. Pure.

Valid once `ggml_numa_init` has run on a machine where `Topology.ggml_is_numa` holds. Then ggml
gives thread i of n a contiguous slab of rows, the same at each call, except in the drivers that
steal work: dense products of 8 rows and more through the tiled kernels, and float or simple
quantisations through llamafile's. `driver_of` says which driver a product takes.

Read from llama.cpp as vendored in llama-cpp-python 0.3.36, ggml/src/ggml-cpu/. A product whose
tokens outnumber its rows is cut by tokens instead, so each thread reads whole matrices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

# tiled/tiled.cpp: TILED_MMID_GROUP.
TILED_GROUP_ROWS = 64
# tiled/tiled.cpp:ggml_tiled_min_batch.
TILED_MIN_TOKENS = 8
# llamafile/sgemm.cpp:llamafile_sgemm: "only enable sgemm for prompt processing".
LLAMAFILE_MIN_TOKENS = 2

_TILED_QUANTS = frozenset(
    ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs", "iq3_xxs", "iq3_s"]
    + ["iq2_xxs", "iq2_xs", "iq2_s", "iq1_s", "iq1_m"]
)
_LLAMAFILE_QUANTS = frozenset(["f32", "bf16", "f16", "q8_0", "q4_0", "q5_0", "iq4_nl"])


class Driver(StrEnum):
    """The loop in ggml that hands rows to threads."""

    VEC_DOT = "vec_dot"
    TILED_EXPERT = "tiled_expert"
    REPACK = "repack"
    STEALING = "stealing"


@dataclass(frozen=True)
class Weight:
    """One weight: `n_matrices` matrices (experts, or heads of MLA) of `n_rows` rows each.

    `routed` weights are read by MUL_MAT_ID, the others by MUL_MAT. `quant` is ggml's type name in
    lower case. Rows are packed: matrix m starts at byte m * n_rows * row_bytes.
    """

    name: str
    n_rows: int
    row_bytes: int
    n_matrices: int = 1
    routed: bool = False
    quant: str = "q4_k"

    @property
    def matrix_bytes(self) -> int:
        return self.n_rows * self.row_bytes

    @property
    def size_bytes(self) -> int:
        return self.n_matrices * self.matrix_bytes


@dataclass(frozen=True)
class Build:
    """Which optional kernels the loaded ggml has. `repack_columns` is NB_COLS of the repacked type.

    `repacked` weights lie in ggml's own repack buffer; ours never do (use_extra_bufts is off for
    streamed weights), so False is what placement meets.
    """

    tiled: bool = True
    llamafile: bool = True
    repacked: bool = False
    repack_columns: int = 8


@dataclass(frozen=True)
class Read:
    """Thread `thread` reads bytes [start, stop) of the weight."""

    start_bytes: int
    stop_bytes: int
    thread: int

    @property
    def n_bytes(self) -> int:
        return self.stop_bytes - self.start_bytes


def driver_of(weight: Weight, n_tokens: int, build: Build | None = None) -> Driver:
    """The driver of a product with `n_tokens` rows of activations (per expert where routed).

    ggml-cpu.c:ggml_compute_forward_mul_mat tries tiled, then llamafile, then vec_dot;
    ggml_compute_forward_mul_mat_id tries tiled per expert, then vec_dot. AMX and KleidiAI buffers
    are not modelled: weights placed here do not lie in them.
    """
    build = build or Build()
    if build.repacked:
        return Driver.REPACK
    if build.tiled and weight.quant in _TILED_QUANTS and n_tokens >= TILED_MIN_TOKENS:
        return Driver.TILED_EXPERT if weight.routed else Driver.STEALING
    if (
        build.llamafile
        and not weight.routed
        and weight.quant in _LLAMAFILE_QUANTS
        and n_tokens >= LLAMAFILE_MIN_TOKENS
    ):
        return Driver.STEALING
    return Driver.VEC_DOT


def is_static(weight: Weight, n_tokens: int, build: Build | None = None) -> bool:
    """False where threads steal work, so that no placement can be local for that product."""
    return driver_of(weight, n_tokens, build) is not Driver.STEALING


def row_slabs(
    driver: Driver, n_rows: int, n_threads: int, *, routed: bool, n_columns: int = 8
) -> list[tuple[int, int]]:
    """[first, last) row of each thread within one matrix; empty slabs are (n, n).

    Raises ValueError for Driver.STEALING, which has no fixed slabs.
    """
    if driver is Driver.VEC_DOT:
        slabs = _by_ceiling(n_rows, n_threads)
    elif driver is Driver.TILED_EXPERT:
        slabs = _by_group(n_rows, n_threads)
    elif driver is Driver.REPACK:
        slabs = _repacked(n_rows, n_threads, n_columns, routed=routed)
    else:
        raise ValueError("threads steal work in this driver: it has no fixed row slabs")
    return slabs


def _by_ceiling(n_rows: int, n_threads: int) -> list[tuple[int, int]]:
    """ggml-cpu.c:ggml_compute_forward_mul_mat and _mul_mat_id where ggml_is_numa().

    nchunk0 = nth, dr0 = ceil(nr0 / nth), and each thread does the one chunk with its own number.
    """
    step = -(-n_rows // n_threads)
    return [(min(step * i, n_rows), min(step * (i + 1), n_rows)) for i in range(n_threads)]


def _by_group(n_rows: int, n_threads: int) -> list[tuple[int, int]]:
    """tiled/tiled.cpp:ggml_compute_forward_mul_mat_id_tiled_one_expert: groups of 64 rows."""
    n_groups = -(-n_rows // TILED_GROUP_ROWS)
    edges = [
        min(n_groups * i // n_threads * TILED_GROUP_ROWS, n_rows) for i in range(n_threads + 1)
    ]
    return list(zip(edges, edges[1:], strict=False))


def _repacked(
    n_rows: int, n_threads: int, n_columns: int, *, routed: bool
) -> list[tuple[int, int]]:
    """repack.cpp:forward_mul_mat_id and forward_mul_mat (with chunking disabled for NUMA).

    Boundaries are rounded up to NB_COLS rows. forward_mul_mat keeps one chunk per thread only while
    a chunk has NB_COLS rows at least; below that ggml steals, which is modelled as the same slabs.
    """
    if routed:
        edges = [n_rows * i // n_threads for i in range(n_threads + 1)]
    else:
        step = max(-(-n_rows // n_threads), n_columns)
        edges = [min(step * i, n_rows) for i in range(n_threads + 1)]
    edges = [min(-(-e // n_columns) * n_columns, n_rows) for e in edges]
    return list(zip(edges, edges[1:], strict=False))


def reads(
    weight: Weight, n_threads: int, n_tokens: int = 1, build: Build | None = None
) -> list[Read]:
    """Every read of one product with `n_tokens` activation rows (per expert where routed).

    Ordered by matrix, then thread. For routed weights all experts are listed: any may be chosen,
    and each has the same partition. Raises ValueError where threads steal work (`is_static`).
    """
    driver = driver_of(weight, n_tokens, build)
    n_rows_of_tokens = n_tokens if weight.routed else n_tokens * weight.n_matrices
    if driver is Driver.VEC_DOT and weight.n_rows <= n_rows_of_tokens:
        return _reads_by_token(weight, n_threads, n_tokens)
    columns = (build or Build()).repack_columns
    slabs = row_slabs(driver, weight.n_rows, n_threads, routed=weight.routed, n_columns=columns)
    return [
        Read(base + first * weight.row_bytes, base + last * weight.row_bytes, thread)
        for base in range(0, weight.size_bytes, weight.matrix_bytes)
        for thread, (first, last) in enumerate(slabs)
        if last > first
    ]


def _reads_by_token(weight: Weight, n_threads: int, n_tokens: int) -> list[Read]:
    """nchunk1 = nth: thread i does activation rows [dr1*i, dr1*(i+1)), in MUL_MAT matrix by matrix.

    A thread reads every matrix whose activations it has, whole; in MUL_MAT_ID the one expert.
    """
    n_matrices = 1 if weight.routed else weight.n_matrices
    found: list[Read] = []
    for thread, (first, last) in enumerate(_by_ceiling(n_tokens * n_matrices, n_threads)):
        if last <= first:
            continue
        matrices = range(first // n_tokens, (last - 1) // n_tokens + 1)
        experts = range(weight.n_matrices) if weight.routed else matrices
        found += [
            Read(m * weight.matrix_bytes, (m + 1) * weight.matrix_bytes, thread) for m in experts
        ]
    return sorted(found, key=lambda r: (r.start_bytes, r.thread))


def stolen_bytes(
    weights: Sequence[Weight], n_tokens: int, build: Build | None = None
) -> tuple[int, int]:
    """(bytes read by stealing threads, all bytes) of a batch: what the plan says about batches."""
    total = sum(w.size_bytes for w in weights)
    stolen = sum(w.size_bytes for w in weights if not is_static(w, n_tokens, build))
    return stolen, total
