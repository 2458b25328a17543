"""Compiling ggml's libraries for GPUs: settings, going on after Ctrl-C, and the report.

False programs take the places of cmake, ninja and sccache.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_libraries import fatbin, library

from offload.ggml.gpu_code import Code

SCRIPT = Path(__file__).parents[3] / "scripts" / "gpu_backend.py"
sys.path.insert(0, str(SCRIPT.parent))
import gpu_backend  # noqa: E402  (a script, not a package)
from gpu_backend import Build, Refused, Spent, settings  # noqa: E402

CODES = (Code((8, 9)), Code((9, 0), ptx=(9, 0)))
# Each call compiles one more file. The second file of the first call takes until it is stopped.
NINJA = """#!/bin/sh
folder=$2; mkdir -p $folder/bin
echo "ninja: Entering directory"
n=$(cat $folder/n 2>/dev/null || echo 0)
n=$((n + 1)); echo $n >$folder/n
trap 'echo interrupted >>$folder/said; exit 130' INT
echo "[$n/2] Building CUDA object a.cu.o"
[ $n = 2 ] || { sleep 60 & wait; }
cp "$LIBRARY" $folder/bin/libggml-cuda.so
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder of work with a source archive and a toolkit, as an earlier call has left them."""
    ggml = tmp_path / "work/source/vendor/llama.cpp/ggml/src/ggml-cuda"
    ggml.mkdir(parents=True)
    (ggml / "ggml-cuda.cu").write_text(
        "CU_CHECK(cuMemCreate(&handle)); cuDeviceGet(&d, 0); cudaMalloc(&p); cuBLAS(x);\n"
    )
    for name in ("done", "bin/nvcc"):
        file = tmp_path / "work/toolkit/nvidia/cu13" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return tmp_path / "work"


@pytest.fixture
def environ(work: Path) -> dict[str, str]:
    """Variables whose PATH leads to false programs, and LIBRARY, which ninja yields."""
    tools = work.parent / "bin"
    tools.mkdir()
    for name, text in (
        ("ninja", NINJA),
        ("sccache", f"#!/bin/sh\necho $* $SCCACHE_BASEDIRS >>{work}/sccache.txt\n"),
        ("cmake", "#!/bin/sh\necho '-- GL_EXT_bfloat16 not supported by glslc'\n"),
        ("strip", "#!/bin/sh\n"),
    ):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    so = library(work.parent / "made.so", fatbin(CODES, 2_000_000))
    path = f"{tools}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "LIBRARY": str(so), "PYTHONUNBUFFERED": "1"}


def command(work: Path, *words: str) -> list[str]:
    source, made = str(work / "source"), str(work / "made")
    return [sys.executable, str(SCRIPT), "cuda", source, made, "--work", str(work), *words]


def test_a_call_that_was_stopped_goes_on_and_times_add_up(
    work: Path, environ: dict[str, str]
) -> None:
    with subprocess.Popen(command(work), env=environ, stderr=subprocess.PIPE, text=True) as first:
        assert first.stderr is not None
        for line in first.stderr:
            if "1 of 2 files" in line:
                first.send_signal(signal.SIGINT)
        assert first.wait() == 130
    assert (work / "build-cuda/said").read_text() == "interrupted\n"
    spent = work / "build-cuda/spent.json"
    assert re.fullmatch(r'\{"cuda 75-real;[^"]+": [\d.]+\}', spent.read_text())
    done = subprocess.run(command(work), env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "libggml-cuda.so: 4 MB, compiled in" in done.stderr
    assert "CUDA 13, code for compute capability 8.9 and PTX 9.0: 8.9 2.0 MB, PTX 9.0 2.0 MB" in (
        done.stderr
    )
    assert "glslc does not know GL_EXT_bfloat16" in done.stderr
    assert (work / "made/libggml-cuda.so").exists()
    assert spent.read_text() == "{}"
    log = (work / "cuda.log").read_text()
    assert log.count("Building CUDA object") == 2
    if not Path(sys.executable).with_name("sccache").exists():
        assert (work / "sccache.txt").read_text().splitlines() == [
            *(f"{word} {work}/source" for word in ("--start-server", "--stop-server") * 2)
        ]


def test_a_compiler_that_fails_shows_the_end_of_its_log(
    work: Path, environ: dict[str, str]
) -> None:
    ninja = work.parent / "bin/ninja"
    ninja.write_text("#!/bin/sh\necho 'nvcc fatal: no disk space'\nexit 1\n")
    done = subprocess.run(command(work), env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "cuda.log\nnvcc fatal: no disk space" in done.stderr
    assert "Traceback" not in done.stderr


def test_seconds_of_other_architectures_are_kept_apart(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(gpu_backend.time, "monotonic", lambda: now[0])

    def call(architectures: str, seconds: float, *, done: bool) -> float:
        build = Build("cuda", work / "source", work, 1, architectures)
        build.folder.mkdir(exist_ok=True)
        spent = Spent(build)
        now[0] += seconds
        return spent.stop(done=done)

    assert call("89-real", 10, done=False) == 10
    assert call("86-real", 5, done=True) == 5
    assert call("89-real", 7, done=True) == 17
    assert call("89-real", 1, done=True) == 1


def test_the_settings_name_compiler_stub_and_architectures(
    work: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", environ["PATH"])
    words = settings(Build("cuda", work / "source", work, 1, "89-real;90"))
    toolkit = work / "toolkit/nvidia/cu13"
    for wanted in (
        "-DGGML_CUDA=ON",
        "-DGGML_BACKEND_DL=ON",
        "-DCMAKE_CUDA_ARCHITECTURES=89-real;90",
        f"-DCMAKE_CUDA_COMPILER={toolkit}/bin/nvcc",
        f"-DCUDA_cuda_driver_LIBRARY={work}/stubs/libcuda.so",
    ):
        assert wanted in words
    names = subprocess.run(
        ["nm", "-D", "--defined-only", work / "stubs/libcuda.so"], capture_output=True, text=True
    ).stdout
    assert re.findall(r" T (\w+)", names) == ["cuDeviceGet", "cuMemCreate"]
    other = Build("cuda", work / "source", work, 1, "89-real", work / "cuda12")
    assert other.folder != Build("cuda", work / "source", work, 1).folder
    with pytest.raises(Refused, match="there is no .*cuda12/bin/nvcc"):
        settings(other)


def test_vulkan_needs_glslc(
    work: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = work.parent / "bin"
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.delenv("VULKAN_SDK", raising=False)
    build = Build("vulkan", work / "source", work, 1)
    with pytest.raises(Refused, match="apt-get install libvulkan-dev glslc"):
        settings(build)
    (work / "sdk/bin").mkdir(parents=True)
    shutil.copy(tools / "cmake", work / "sdk/bin/glslc")
    monkeypatch.setenv("VULKAN_SDK", str(work / "sdk"))
    words = settings(build)
    assert "-DGGML_VULKAN=ON" in words
    assert not [word for word in words if "CUDA_ARCHITECTURES" in word]
    assert environ["LIBRARY"]


@pytest.mark.parametrize(
    ("script", "words", "said"),
    [
        ("wheel", ["--gpu", "rocm"], "--gpu takes cuda or vulkan, not 'rocm'"),
        ("wheel", ["--gpu"], "--gpu takes cuda or vulkan, not ''"),
        ("wheel", ["--gpus", "cuda"], "no flag --gpus"),
        (
            "release",
            ["--gpu", "vulkan", "--gpu", "all"],
            "cuda, vulkan, or the file of a wheel for GPUs, not 'all'",
        ),
        (
            "release",
            ["--gpu", "gone-1cuda13-py3-none-any.whl"],
            "not 'gone-1cuda13-py3-none-any.whl'",
        ),
        ("release", ["--gpus"], "no flag --gpus"),
        ("check-gpu-wheel", [], "'' is no file: name a wheel"),
        ("check-gpu-wheel", ["none.whl"], "'none.whl' is no file"),
    ],
)
def test_a_wrong_word_is_refused_before_anything_is_done(
    script: str, words: list[str], said: str
) -> None:
    done = subprocess.run(
        [SCRIPT.with_name(script), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
