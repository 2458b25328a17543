"""The build flags of libllama for each driver, CUDA toolkit, user flag and compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "build_flags.py"
sys.path.insert(0, str(SCRIPT.parent))
import build_flags  # noqa: E402  (a script, not a package)

RPC = "-DGGML_RPC=on"


def executable(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="ascii")
    path.chmod(0o755)
    return path


def machine(tmp_path: Path, *, driver: bool, nvcc: bool, amx_fails: bool = False) -> dict[str, str]:
    """A root with or without a driver, and a compiler whose trial of AMX fails or not."""
    if driver:
        (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
        (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version", encoding="ascii")
    if nvcc:
        executable(tmp_path / "bin/nvcc", "exit 0")
    # The last argument is the program to write.
    trial = f'for out; do :; done; echo "#!/bin/sh" >$out; echo "exit {3 * amx_fails}" >>$out'
    executable(tmp_path / "bin/cc", f"{trial}; chmod +x $out")
    return {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "CC": str(tmp_path / "bin/cc")}


def test_a_plain_machine_takes_pips_defaults_and_rpc(tmp_path: Path) -> None:
    environ = machine(tmp_path, driver=False, nvcc=False)
    assert build_flags.flags("auto", environ, tmp_path) == ({"CMAKE_ARGS": RPC}, [])


def test_the_user_may_leave_rpc_out(tmp_path: Path) -> None:
    own = {"CMAKE_ARGS": "-DGGML_RPC=off"}
    environ = machine(tmp_path, driver=False, nvcc=False) | own
    assert build_flags.flags("auto", environ, tmp_path) == (own, [])


def test_a_driver_and_nvcc_give_a_cuda_build_behind_the_users_own_arguments(tmp_path: Path) -> None:
    environ = machine(tmp_path, driver=True, nvcc=True) | {"CMAKE_ARGS": "-DGGML_LTO=on"}
    found, notes = build_flags.flags("auto", environ, tmp_path)
    cuda = "-DGGML_CUDA=on -DCMAKE_CUDA_ARCHITECTURES=native"
    assert found == {"CMAKE_ARGS": f"-DGGML_LTO=on {RPC} {cuda}"}
    assert "compiled with CUDA" in notes[0]
    assert build_flags.flags("none", environ, tmp_path) == (
        {"CMAKE_ARGS": f"-DGGML_LTO=on {RPC}"},
        [],
    )


def test_a_driver_without_nvcc_says_what_to_install(tmp_path: Path) -> None:
    environ = machine(tmp_path, driver=True, nvcc=False) | {"PATH": f"{tmp_path}/bin"}
    found, notes = build_flags.flags("auto", environ, tmp_path)
    assert found == {"CMAKE_ARGS": RPC}
    assert "no nvcc" in notes[0]
    assert "nvidia-cuda-toolkit" in notes[0]


@pytest.mark.parametrize(("gpu", "option"), [("rocm", "GGML_HIP"), ("vulkan", "GGML_VULKAN")])
def test_other_backends_are_asked_for_by_name(tmp_path: Path, gpu: str, option: str) -> None:
    environ = machine(tmp_path, driver=True, nvcc=True)
    found, _ = build_flags.flags(gpu, environ, tmp_path)
    assert found == {"CMAKE_ARGS": f"{RPC} -D{option}=on"}


def test_a_compiler_that_miscompiles_amx_compiles_without_it(tmp_path: Path) -> None:
    environ = machine(tmp_path, driver=False, nvcc=False, amx_fails=True) | {"CFLAGS": "-g"}
    found, notes = build_flags.flags("auto", environ, tmp_path)
    without = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
    assert found == {"CMAKE_ARGS": RPC, "CFLAGS": f"-g {without}", "CXXFLAGS": without}
    assert "114098" in notes[0]


def test_a_compiler_that_is_missing_or_refuses_the_trial_changes_nothing(tmp_path: Path) -> None:
    assert not build_flags.miscompiles_amx(str(tmp_path / "none"))
    assert not build_flags.miscompiles_amx(str(executable(tmp_path / "cc", "exit 1")))


def test_the_output_is_what_a_shell_takes(tmp_path: Path) -> None:
    environ = machine(tmp_path, driver=False, nvcc=False) | {"CMAKE_ARGS": "-DA='b c'"}
    printed = subprocess.run(
        [sys.executable, str(SCRIPT), "--gpu", "vulkan"],
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
    assert seen == f"-DA='b c' {RPC} -DGGML_VULKAN=on\n"
