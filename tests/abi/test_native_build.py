"""AMX is tried once, in a child process, and messages name what the library's build lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.options import engine_options
from offload.engine import open_engine
from offload.ggml import layout_speed, native_build
from offload.ggml.backend import Stream
from offload.ggml.extra_buffers import (
    amx_buffer_type,
    amx_product_is_right,
    extra_buffer_types,
)
from offload.ggml.native_build import (
    AmxVerdict,
    amx_verdict,
    library_build,
    may_repack,
    missing_in_build,
)
from offload.ggml.threads import cpu_device, cpu_features
from offload.plan.repacking import LayoutTimes, WeightKind


class Trial:
    """Stands in for the child process that tries AMX. `times` counts its runs."""

    def __init__(self, why_not: str) -> None:
        self.why_not, self.times = why_not, 0

    def __call__(self) -> str:
        self.times += 1
        return self.why_not


@pytest.fixture
def amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library and a processor with AMX."""
    monkeypatch.setattr(native_build, "amx_buffer_type", lambda: 1)


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("why_not", ["", "dies of SIGSEGV"])
def test_amx_is_tried_once_per_build(tmp_path: Path, why_not: str) -> None:
    trial = Trial(why_not)
    first = amx_verdict(tmp_path / "kept", trial)
    second = amx_verdict(tmp_path / "kept", trial)
    assert first == second
    assert first is not None
    assert first.works == (not why_not)
    assert why_not in first.sentence
    assert trial.times == 1


@pytest.mark.usefixtures("amx")
def test_another_build_is_tried_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial("gives wrong numbers")
    amx_verdict(tmp_path, trial)
    monkeypatch.setattr(native_build, "_cpu_backend_digest", lambda: "mended")
    trial.why_not = ""
    verdict = amx_verdict(tmp_path, trial)
    assert verdict is not None
    assert verdict.works
    assert trial.times == 2


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("text", ["", "{", "[]", '{"why_not": 3}'])
def test_a_damaged_record_is_replaced(tmp_path: Path, text: str) -> None:
    trial = Trial("dies of SIGILL")
    amx_verdict(tmp_path, trial)
    (record,) = tmp_path.iterdir()
    record.write_text(text, encoding="utf-8")
    assert amx_verdict(tmp_path, trial) == amx_verdict(tmp_path, trial)
    assert trial.times == 2


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize(
    "why_not", ["could not be tried (timed out)", "dies of SIGKILL", "dies of SIGTERM", "fails (x)"]
)
def test_a_trial_that_did_not_end_decides_one_start_alone(tmp_path: Path, why_not: str) -> None:
    """A busy machine, or one without memory, says nothing of the library."""
    trial = Trial(why_not)
    for _ in range(2):
        verdict = amx_verdict(tmp_path, trial)
        assert verdict is not None
        assert not verdict.works
        assert why_not in verdict.sentence
        assert "the next start tries it again" in verdict.sentence
        assert "miscompiled" not in verdict.sentence
    assert trial.times == 2
    trial.why_not = ""
    assert amx_verdict(tmp_path, trial) == AmxVerdict(True)
    (record,) = tmp_path.iterdir()
    record.write_text(f'{{"why_not": "{why_not}"}}', encoding="utf-8")  # as earlier versions kept
    assert amx_verdict(tmp_path, trial) == AmxVerdict(True)
    assert trial.times == 4


@pytest.mark.usefixtures("amx")
def test_a_trial_that_takes_too_long_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_build, "_TRIAL_S", 0.0)
    verdict = amx_verdict(tmp_path)
    assert verdict is not None
    assert "could not be tried" in verdict.sentence
    assert not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("amx")
def test_without_a_folder_that_can_be_written_it_is_tried_each_time(tmp_path: Path) -> None:
    trial = Trial("")
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    for folder in (None, in_the_way):
        assert amx_verdict(folder, trial) is not None
    assert trial.times == 2


def test_without_amx_there_is_nothing_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "amx_buffer_type", lambda: None)
    assert amx_verdict(None, Trial("not called")) is None


def test_the_tiny_product_is_right_in_plain_memory() -> None:
    assert amx_product_is_right(cpu_device().buffer_type)


def test_the_real_trial_comes_back_with_an_answer() -> None:
    """The trial runs in a child process, so that a miscompiled library ends only the child."""
    if amx_buffer_type() is None:
        pytest.skip("the library or this processor has no AMX")
    verdict = amx_verdict(None)
    assert verdict is not None
    if verdict.works:
        assert amx_product_is_right()
    else:
        assert "SIGSEGV" in verdict.sentence or "wrong numbers" in verdict.sentence


def test_a_batch_is_computed_whatever_the_trial_says(tiny_dense: Path, tmp_path: Path) -> None:
    options = engine_options(device="cpu", n_ctx=256, trial_folder=tmp_path)
    with open_engine(tiny_dense, options) as engine:
        assert engine.sequences.extend(0, list(range(1, 20)), n_logits=1).shape == (
            1,
            engine.n_vocab,
        )
        verdict = amx_verdict(tmp_path, Trial("is not tried again"))
        said = [note for note in engine.opened.notes if note.startswith("AMX")]
        assert said == ([] if verdict is None or verdict.works else [verdict.sentence])


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (("proc/driver/nvidia/version",), "--gpu cuda"),
        (("dev/dxg", "usr/lib/wsl/lib/libcuda.so"), "--gpu cuda"),
        (("dev/dxg", "usr/lib/wsl/lib/libcuda.so.1"), "--gpu cuda"),
        (("dev/dxg",), "no CUDA of Windows"),
        (("dev/kfd",), "--gpu rocm"),
    ],
)
def test_a_driver_that_the_build_does_not_use_is_named(
    tmp_path: Path, files: tuple[str, ...], words: str
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (sentence,) = missing_in_build(tmp_path, has_gpu=False)
    assert words in sentence
    assert missing_in_build(tmp_path, has_gpu=True) == ()


def test_a_build_without_avx2_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor : 0\nflags\t\t: sse avx avx2\n")
    monkeypatch.setattr(native_build, "cpu_features", lambda: {"AVX": "1"})
    assert "AVX2" in missing_in_build(tmp_path, has_gpu=True)[0]
    monkeypatch.setattr(native_build, "cpu_features", lambda: {"AVX": "1", "AVX2": "1"})
    assert missing_in_build(tmp_path, has_gpu=True) == ()


def test_the_build_is_named_by_package_version_and_sizes() -> None:
    name, version, digest = library_build().split()
    assert (name, version, len(digest)) == ("llama-cpp-python", "0.3.36", 8)


def test_both_layouts_are_timed_where_ggml_can_repack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_speed, "_LEAST_S", 0.0)
    can_repack = "CPU_REPACK" in extra_buffer_types() and cpu_features().get("AVX2") == "1"
    computed: list[int] = []
    real = layout_speed._TimedProduct.seconds

    def seconds(product: layout_speed._TimedProduct, n_tokens: int, stream: Stream) -> float:
        """The product is computed. Layouts take turns, and every turn is faster than the last."""
        assert real(product, n_tokens, stream) > 0
        computed.append(n_tokens)
        return float(n_tokens * (100 - len(computed)))

    monkeypatch.setattr(layout_speed._TimedProduct, "seconds", seconds)
    for kind in (WeightKind(True, "q4_0"), WeightKind(False, "q4_0")):
        computed.clear()
        found = layout_speed.layout_times(kind)
        # Four turns of one token, then four of a prompt. The last ones are the fastest.
        assert found == (LayoutTimes(93, 92, 85, 84) if can_repack else None)
    assert layout_speed.layout_times(WeightKind(False, "f32")) is None


def test_mla_is_not_repacked_beside_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["blk.0.attn_k_b.weight"]
    for verdict, works in ((None, True), (AmxVerdict(True), False)):
        monkeypatch.setattr(native_build, "amx_verdict", lambda _, verdict=verdict: verdict)
        found = may_repack(names, None)
        assert (found.works, "k_b" in found.sentence) == (works, not works)
        assert may_repack(["blk.0.attn_k.weight"], None).works
