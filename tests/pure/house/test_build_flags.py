"""The build flags of libllama for each driver, CUDA toolkit, user flag and compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "build_flags.py"
sys.path.insert(0, str(SCRIPT.parent))
import build_flags  # noqa: E402  (a script, not a package)
import cuda_toolkits  # noqa: E402
from offload.ggml import drivers  # noqa: E402
from offload.ggml.drivers import Card, CudaDriver, Version, nvidia_driver  # noqa: E402

RPC = "-DGGML_RPC=on"
CUDA = "-DGGML_CUDA=on -DCMAKE_CUDA_ARCHITECTURES=native"
Root = dict[str, str]
RTX_2080 = Card("RTX 2080", (7, 5))
RTX_4090 = Card("RTX 4090", (8, 9))
RTX_5090 = Card("RTX 5090", (12, 0))
GTX_1080 = Card("GTX 1080", (6, 1))
NATIVE = (drivers.NVIDIA,)
WSL2 = (drivers.WSL_GPU, "usr/lib/wsl/lib/libcuda.so")


def executable(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="ascii")
    path.chmod(0o755)
    return path


def a_file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def nvcc(folder: Path, version: str) -> Path:
    return executable(folder / "nvcc", f'echo "Cuda compilation tools, release {version}, V1"')


def machine(tmp_path: Path, *files: str, nvcc_on_path: str = "", amx_fails: bool = False) -> Root:
    """A root with these files, and a compiler whose trial of AMX fails or not."""
    for name in files:
        a_file(tmp_path / name)
    if nvcc_on_path:
        nvcc(tmp_path / "bin", nvcc_on_path)
    # The last argument is the program to write.
    trial = f'for out; do :; done; echo "#!/bin/sh" >$out; echo "exit {3 * amx_fails}" >>$out'
    executable(tmp_path / "bin/cc", f"{trial}; chmod +x $out")
    return {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "CC": str(tmp_path / "bin/cc")}


def of_cards(monkeypatch: pytest.MonkeyPatch, cuda: Version, *cards: Card) -> None:
    """Let the driver of a false root answer."""
    monkeypatch.setattr(drivers, "_asked", lambda _: CudaDriver(cuda, cards))


def test_a_plain_machine_takes_pips_defaults_and_rpc(tmp_path: Path) -> None:
    environ = machine(tmp_path)
    assert build_flags.flags("auto", environ, tmp_path) == ({"CMAKE_ARGS": RPC}, [])


def test_the_user_may_leave_rpc_out(tmp_path: Path) -> None:
    own = {"CMAKE_ARGS": "-DGGML_RPC=off"}
    environ = machine(tmp_path) | own
    assert build_flags.flags("auto", environ, tmp_path) == (own, [])


@pytest.mark.parametrize("driver", [NATIVE, WSL2])
def test_a_driver_and_nvcc_give_a_cuda_build_behind_the_users_own_arguments(
    driver: tuple[str, ...], tmp_path: Path
) -> None:
    environ = machine(tmp_path, *driver, nvcc_on_path="12.8") | {"CMAKE_ARGS": "-DGGML_LTO=on"}
    found, notes = build_flags.flags("auto", environ, tmp_path)
    assert found == {"CMAKE_ARGS": f"-DGGML_LTO=on {RPC} {CUDA}"}
    assert "compiled with CUDA" in notes[0]
    assert build_flags.flags("none", environ, tmp_path) == (
        {"CMAKE_ARGS": f"-DGGML_LTO=on {RPC}"},
        [],
    )


@pytest.mark.parametrize("driver", [NATIVE, WSL2])
def test_a_driver_without_nvcc_says_what_to_install(
    driver: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_cards(monkeypatch, (12, 4), RTX_4090)
    environ = machine(tmp_path, *driver) | {"PATH": f"{tmp_path}/bin"}
    found, (note,) = build_flags.flags("auto", environ, tmp_path)
    assert found == {"CMAKE_ARGS": RPC}
    for words in ("no nvcc", "nvidia-cuda-toolkit", "11.8 or newer, for RTX 4090", "up to 12.x"):
        assert words in note
    with pytest.raises(build_flags.Refused, match="no nvcc"):
        build_flags.flags("cuda", environ, tmp_path)


@pytest.mark.parametrize("files", [(drivers.AMD,), (drivers.WSL_GPU,)])
def test_a_gpu_that_auto_leaves_unused_gets_a_word(files: tuple[str, ...], tmp_path: Path) -> None:
    found, (note,) = build_flags.flags("auto", machine(tmp_path, *files), tmp_path)
    assert found == {"CMAKE_ARGS": RPC}
    assert f"/{files[0]}" in note
    assert "CPU alone" in note


@pytest.mark.parametrize(
    ("folder", "variable"),
    [
        ("usr/local/cuda", ""),
        ("usr/local/cuda-12.8", ""),
        ("opt/cuda", ""),
        ("home/me/cuda", "CUDA_HOME"),
        ("home/me/cuda", "CUDA_PATH"),
        ("home/me/cuda", "CUDACXX"),
    ],
)
def test_a_toolkit_that_is_not_on_path_is_used_and_named(
    folder: str, variable: str, tmp_path: Path
) -> None:
    there = nvcc(tmp_path / folder / "bin", "12.8")
    environ = machine(tmp_path, *NATIVE)
    if variable:
        environ[variable] = str(there if variable == "CUDACXX" else tmp_path / folder)
    found, notes = build_flags.flags("auto", environ, tmp_path)
    assert found == {"CMAKE_ARGS": f"{RPC} {CUDA} -DCMAKE_CUDA_COMPILER={there}"}
    assert f"nvcc 12.8 is used from {there}" in notes


def test_a_toolkit_too_old_for_the_card_makes_way_for_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_cards(monkeypatch, (12, 8), RTX_4090)
    environ = machine(tmp_path, *NATIVE, nvcc_on_path="11.5")
    found, (note,) = build_flags.flags("auto", environ, tmp_path)
    assert found == {"CMAKE_ARGS": RPC}
    assert "nvcc 11.5" in note
    assert "too old for RTX 4090 (compute capability 8.9), which needs CUDA 11.8" in note

    nvcc(tmp_path / "usr/local/cuda-9.1/bin", "9.1")
    newer = nvcc(tmp_path / "usr/local/cuda-12.4/bin", "12.4")
    found, _ = build_flags.flags("auto", environ, tmp_path)
    assert found["CMAKE_ARGS"].endswith(f"-DCMAKE_CUDA_COMPILER={newer}")


@pytest.mark.parametrize(
    ("version", "runs", "cards", "words"),
    [
        ((11, 5), (12, 4), (RTX_2080,), ""),
        ((11, 8), (12, 4), (RTX_4090,), ""),
        ((12, 4), (12, 8), (RTX_4090, RTX_5090), "too old for RTX 5090"),
        ((12, 8), (13, 0), (RTX_5090,), ""),
        ((12, 8), (12, 4), (RTX_4090,), ""),  # the driver runs each minor version of CUDA 12
        ((13, 0), (12, 4), (RTX_4090,), "too new for the driver, which runs CUDA 12.4"),
        ((13, 0), (13, 0), (GTX_1080,), "no code for GTX 1080"),
        ((12, 9), (13, 0), (GTX_1080,), ""),
        ((13, 0), (13, 1), (Card("of tomorrow", (15, 0)),), ""),
        ((12, 4), (13, 1), (Card("of tomorrow", (15, 0)),), "too old for of tomorrow"),
        ((13, 0), None, (), ""),
        (None, (12, 4), (RTX_4090,), ""),
    ],
)
def test_a_toolkit_is_held_to_the_cards_and_the_driver(
    version: Version | None, runs: Version | None, cards: tuple[Card, ...], words: str
) -> None:
    toolkit = cuda_toolkits.Toolkit("/bin/nvcc", version, is_on_path=True)
    reason = cuda_toolkits.reason(toolkit, CudaDriver(runs, cards))
    assert words in reason
    assert bool(words) == bool(reason)


LIBCUDA = r"""
int cuDriverGetVersion(int *v) { *v = 12040; return 0; }
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *n) { *n = 2; return 0; }
int cuDeviceGet(int *device, int n) { *device = n; return 0; }
int cuDeviceGetName(char *name, int n, int device)
{ name[0] = 'A' + device; name[1] = 0; return 0; }
int cuDeviceGetAttribute(int *v, int which, int device)
{ *v = which == 75 ? 8 : 6 + device; return 0; }
"""


def test_the_driver_of_wsl2_tells_its_cards(tmp_path: Path) -> None:
    (library,) = (a_file(tmp_path / name) for name in WSL2[1:])
    a_file(tmp_path / drivers.WSL_GPU)
    assert nvidia_driver(tmp_path) == CudaDriver()  # a file that is no library
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library],
        input=LIBCUDA.encode(),
        check=True,
    )
    cards = (Card("A", (8, 6)), Card("B", (8, 7)))
    assert nvidia_driver(tmp_path) == CudaDriver((12, 4), cards)
    (tmp_path / drivers.WSL_GPU).unlink()
    assert nvidia_driver(tmp_path) is None


@pytest.mark.parametrize(
    ("gpu", "option", "program"),
    [("rocm", "GGML_HIP", "hipcc"), ("vulkan", "GGML_VULKAN", "glslc")],
)
def test_other_backends_are_asked_for_by_name(
    tmp_path: Path, gpu: str, option: str, program: str
) -> None:
    environ = machine(tmp_path, *NATIVE) | {"PATH": f"{tmp_path}/bin"}
    with pytest.raises(build_flags.Refused, match=f"--gpu {gpu} needs {program}"):
        build_flags.flags(gpu, environ, tmp_path)
    executable(tmp_path / "bin" / program, "exit 0")
    found, _ = build_flags.flags(gpu, environ, tmp_path)
    assert found == {"CMAKE_ARGS": f"{RPC} -D{option}=on"}


def test_a_compile_that_cannot_succeed_is_refused_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--gpu", "none"], capture_output=True, text=True, check=False,
        env={"PATH": str(tmp_path), "CC": "true", "CXX": "g++-nowhere -O2"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    line = "scripts/setup: there is no compiler"
    assert [text.startswith(line) for text in done.stderr.splitlines()] == [True]


def test_a_compiler_that_miscompiles_amx_compiles_without_it(tmp_path: Path) -> None:
    environ = machine(tmp_path, amx_fails=True) | {"CFLAGS": "-g"}
    found, notes = build_flags.flags("auto", environ, tmp_path)
    without = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
    assert found == {"CMAKE_ARGS": RPC, "CFLAGS": f"-g {without}", "CXXFLAGS": without}
    assert "114098" in notes[0]


def test_a_compiler_that_is_missing_or_refuses_the_trial_changes_nothing(tmp_path: Path) -> None:
    assert not build_flags.miscompiles_amx(str(tmp_path / "none"))
    assert not build_flags.miscompiles_amx(str(executable(tmp_path / "cc", "exit 1")))


def test_the_output_is_what_a_shell_takes(tmp_path: Path) -> None:
    environ = machine(tmp_path) | {"CMAKE_ARGS": "-DA='b c'"}
    printed = subprocess.run(
        [sys.executable, str(SCRIPT), "--gpu", "none"],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    seen = subprocess.run(
        ["bash", "-c", f"{printed}\nprintenv CMAKE_ARGS"],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/usr/bin:/bin"},
    ).stdout
    assert seen == f"-DA='b c' {RPC}\n"
