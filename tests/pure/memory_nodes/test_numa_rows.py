"""The partition is ggml's: every row once, contiguous per thread, where no thread steals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numa_models import model_weights

from numa.rows import Build, Driver, Weight, driver_of, is_static, reads, row_slabs, stolen_bytes

STATIC = [Driver.VEC_DOT, Driver.TILED_EXPERT, Driver.REPACK]


@given(st.sampled_from(STATIC), st.integers(1, 3000), st.integers(1, 130), st.booleans())
def test_every_row_belongs_to_exactly_one_thread_in_order(
    driver: Driver, n_rows: int, n_threads: int, routed: bool
) -> None:
    if driver is Driver.REPACK:
        n_rows = -(-n_rows // 8) * 8  # ggml repacks only whole groups of columns
    slabs = row_slabs(driver, n_rows, n_threads, routed=routed)
    assert len(slabs) == n_threads
    assert slabs[0][0] == 0
    assert slabs[-1][1] == n_rows
    assert all(a[1] == b[0] for a, b in zip(slabs, slabs[1:], strict=False))


def test_vec_dot_slabs_are_rounded_up_so_the_last_threads_may_get_nothing() -> None:
    # ggml-cpu.c: dr0 = ceil(nr0 / nth) = 3 for 160 rows over 64 threads.
    slabs = row_slabs(Driver.VEC_DOT, 160, 64, routed=False)
    assert slabs[52:55] == [(156, 159), (159, 160), (160, 160)]


def test_tiled_experts_are_cut_in_groups_of_64_rows() -> None:
    # tiled.cpp: 32 groups over 64 threads, thread i has [32*i/64, 32*(i+1)/64): every other one.
    slabs = row_slabs(Driver.TILED_EXPERT, 2048, 64, routed=True)
    assert slabs[:4] == [(0, 0), (0, 64), (64, 64), (64, 128)]


def test_repacked_boundaries_are_rounded_up_to_whole_column_groups() -> None:
    # repack.cpp:forward_mul_mat_id: 2048*i/56 = 0, 36, 73 -> 0, 40, 80.
    assert row_slabs(Driver.REPACK, 2048, 56, routed=True)[:2] == [(0, 40), (40, 80)]


def test_a_stealing_driver_has_no_slabs() -> None:
    with pytest.raises(ValueError, match="steal"):
        row_slabs(Driver.STEALING, 100, 4, routed=False)


@pytest.mark.parametrize(
    ("quant", "routed", "n_tokens", "driver"),
    [
        ("q4_k", False, 7, Driver.VEC_DOT),
        ("q4_k", False, 8, Driver.STEALING),
        ("q4_k", True, 8, Driver.TILED_EXPERT),
        ("q4_k", True, 7, Driver.VEC_DOT),
        ("q8_0", False, 1, Driver.VEC_DOT),
        ("q8_0", False, 2, Driver.STEALING),
        ("q8_0", True, 64, Driver.VEC_DOT),
        ("f16", False, 2, Driver.STEALING),
        ("mxfp4", False, 512, Driver.VEC_DOT),
    ],
)
def test_the_driver_depends_on_quantisation_and_tokens(
    quant: str, routed: bool, n_tokens: int, driver: Driver
) -> None:
    weight = Weight("w", 4096, 4096, 1, routed, quant)
    assert driver_of(weight, n_tokens) is driver
    assert is_static(weight, n_tokens) == (driver is not Driver.STEALING)


def test_a_build_without_the_optional_kernels_never_steals() -> None:
    plain = Build(tiled=False, llamafile=False)
    assert all(is_static(w, 512, plain) for w in model_weights("GLM-4.6", "q4_k"))


def test_experts_are_read_alike_each_by_all_threads() -> None:
    weight = Weight("ffn_up_exps", 2048, 4032, 3, routed=True)
    found = reads(weight, 64)
    assert len(found) == 3 * 64
    assert {r.n_bytes for r in found} == {32 * 4032}
    assert [r.thread for r in found[64:67]] == [0, 1, 2]
    assert found[64].start_bytes == weight.matrix_bytes


def test_heads_go_to_threads_whole_once_tokens_times_heads_outnumber_rows() -> None:
    # nr0 = 128 rows, nr1 = 1 token x 128 heads: not nr0 > nr1, so ggml cuts the activations.
    found = reads(Weight("attn_v_b", 128, 544, 128, quant="q8_0"), 64)
    assert [(r.start_bytes, r.stop_bytes) for r in found[:2]] == [(0, 69632), (69632, 139264)]
    assert [r.thread for r in found[:4]] == [0, 0, 1, 1]


def test_a_large_batch_over_few_rows_makes_every_thread_read_everything() -> None:
    weight = Weight("w", 256, 1024, quant="mxfp4")
    assert {(r.start_bytes, r.stop_bytes) for r in reads(weight, 8, 512)} == {(0, 256 << 10)}


@given(st.integers(1, 400), st.integers(1, 5), st.integers(1, 70), st.booleans())
def test_at_one_token_the_reads_are_disjoint_and_cover_the_weight(
    n_rows: int, n_matrices: int, n_threads: int, routed: bool
) -> None:
    weight = Weight("w", n_rows, 18, n_matrices, routed)
    found = sorted(reads(weight, n_threads), key=lambda r: r.start_bytes)
    assert found[0].start_bytes == 0
    assert all(a.stop_bytes == b.start_bytes for a, b in zip(found, found[1:], strict=False))
    assert found[-1].stop_bytes == weight.size_bytes


def test_the_share_of_a_batch_that_is_stolen_is_known_beforehand() -> None:
    weights = model_weights("DeepSeek-R1", "q4_k")
    assert stolen_bytes(weights, 1)[0] == 0
    stolen, total = stolen_bytes(weights, 8)
    dense = sum(w.size_bytes for w in weights if not w.routed)
    assert (stolen, total) == (dense, sum(w.size_bytes for w in weights))
