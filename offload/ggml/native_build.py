"""Identifies the native library's build, tries its AMX kernels, and reports missing features.

gcc before 12.4 and 13.3 miscompiles ggml's AMX kernels (gcc bug 114098). They read 8 of the 64
bytes of the tile configuration, and the first product of two tokens ends the process. So one
product is tried in a child process, once per build, if library and processor have AMX.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from offload.ggml.drivers import has_amd_driver, nvidia_driver, wsl_gpu_without_cuda
from offload.ggml.extra_buffers import amx_buffer_type
from offload.ggml.installed import cuda_unused, package_folder
from offload.ggml.library.abi import PACKAGE_VERSION
from offload.ggml.threads import cpu_features

_PACKAGE = "llama-cpp-python"
_TRIAL_S = 60.0
_GIVES_WRONG, _DIES = "gives wrong numbers", "dies of "
# Signals of a process whose machine code is wrong. Others come from outside, as SIGKILL does.
_FAULTS = frozenset({"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV"})
_RIGHT, _WRONG = 0, 3  # exit codes of the trial
_TRIAL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
sys.path[:] = {path!r}
from offload.ggml.drivers import has_amd_driver, nvidia_driver, wsl_gpu_without_cuda
from offload.ggml.extra_buffers import amx_product_is_right
sys.exit({right} if amx_product_is_right() else {wrong})
"""
_BUILT_WITHOUT = (
    "{name} driver is here, but the library was built without it and computes on the CPU: "
    "take a wheel for it (docs/install.md), or scripts/setup --gpu {flag} builds it anew"
)
_REBUILD = "rebuild it with gcc 12.4, 13.3 or newer, or without AMX: scripts/setup does"


@dataclass(frozen=True)
class AmxVerdict:
    """The decision whether weights may be repacked, and a sentence for the user if not."""

    works: bool
    sentence: str = ""


def library_build() -> str:
    """Return the native library's version and a digest of its files' sizes, as one string."""
    sizes = sorted(str(path.stat().st_size) for path in _library_files())
    digest = hashlib.sha256(",".join(sizes).encode()).hexdigest()[:8]
    return f"{_PACKAGE} {_version()} {digest}"


def _version() -> str:
    try:
        return importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:  # specoffload's own wheel holds the library
        return PACKAGE_VERSION


def _library_files() -> list[Path]:
    try:
        paths = [Path(str(f.locate())) for f in importlib.metadata.files(_PACKAGE) or []]
    except importlib.metadata.PackageNotFoundError:
        package = package_folder()
        paths = [] if package is None else [*package.rglob("*")]
    return [p for p in paths if (".so" in p.name or p.suffix in (".dylib", ".dll")) and p.exists()]


def _cpu_backend_digest() -> str:
    """Return a digest of the CPU backend's bytes, because a rebuilt one may have the same size."""
    digest = hashlib.sha256()
    for path in sorted(p for p in _library_files() if "ggml-cpu" in p.name):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def may_repack(weight_names: Iterable[str], folder: Path | None) -> AmxVerdict:
    """Decide whether ggml's extra buffers may repack weights for this processor.

    Models with MLA's k_b are refused if there is AMX, because llama.cpp 0.3.36 aborts on a
    quantised k_b in AMX's extra buffers. `folder`: as for `amx_verdict`.
    """
    verdict = amx_verdict(folder)
    if verdict is not None and any(name.endswith("attn_k_b.weight") for name in weight_names):
        return AmxVerdict(False, "no weight is repacked: llama.cpp cannot store MLA's k_b for AMX")
    return verdict or AmxVerdict(True)


def amx_verdict(folder: Path | None, trial: Callable[[], str] | None = None) -> AmxVerdict | None:
    """Return the verdict for this build, or None without AMX. The result is kept in `folder`.

    `trial` is called if no result is kept. It returns the reason why AMX does not work, or "".
    A trial that did not end, for example on a busy machine, is not kept and decides this start
    alone.
    """
    if amx_buffer_type() is None:
        return None
    path = None if folder is None else folder / f"amx-{_cpu_backend_digest()}.json"
    reason = _kept(path)
    if reason is None:
        reason = (trial or _try_in_a_child)()
        if _is_of_the_build(reason):
            _keep(path, reason)
    if not reason:
        return AmxVerdict(True)
    if not _is_of_the_build(reason):
        return AmxVerdict(
            False,
            f"AMX is left unused by this start, and the next start tries it again: a product with "
            f"it {reason}",
        )
    return AmxVerdict(
        False,
        f"AMX is left unused: a product with it {reason}, since the library was miscompiled (gcc "
        f"bug 114098); {_REBUILD}",
    )


def _is_of_the_build(reason: str) -> bool:
    """True if a trial's reason, or "", can only come from the library's machine code."""
    return reason in ("", _GIVES_WRONG) or reason.removeprefix(_DIES) in _FAULTS


def _kept(path: Path | None) -> str | None:
    try:
        kept = json.loads(path.read_text(encoding="utf-8")) if path is not None else {}
    except (OSError, ValueError):
        return None  # there is no file yet, or it is damaged, so the trial runs again
    reason = kept.get("why_not") if isinstance(kept, dict) else None
    return reason if isinstance(reason, str) and _is_of_the_build(reason) else None


def _keep(path: Path | None, reason: str) -> None:
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"why_not": reason}) + "\n", encoding="utf-8")
    except OSError:
        return  # without a writable folder, each start runs the trial again


def _try_in_a_child() -> str:
    code = _TRIAL.format(path=sys.path, right=_RIGHT, wrong=_WRONG)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, check=False, timeout=_TRIAL_S
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        return f"could not be tried ({e})"
    if done.returncode == _RIGHT:
        return ""
    if done.returncode == _WRONG:
        return _GIVES_WRONG
    if done.returncode < 0:
        return f"{_DIES}{signal.Signals(-done.returncode).name}"
    return f"fails ({done.stderr.decode('utf-8', 'replace').strip()[-200:]})"


def missing_in_build(root: Path = Path("/"), *, has_gpu: bool) -> tuple[str, ...]:
    """Return sentences on hardware that the build does not use. `root` is for tests."""
    missing = []
    if not has_gpu and nvidia_driver(root) is not None:
        missing.append(cuda_unused(root) or _BUILT_WITHOUT.format(name="an NVIDIA", flag="cuda"))
    if not has_gpu and has_amd_driver(root):
        missing.append(_BUILT_WITHOUT.format(name="an AMD", flag="rocm"))
    if not has_gpu and wsl_gpu_without_cuda(root):
        missing.append(
            "WSL2 has a GPU (/dev/dxg) but no CUDA of Windows: for an NVIDIA card, install its "
            "driver in Windows (none in WSL2), and run scripts/setup again"
        )
    flags = _processor_flags(root)
    if "avx2" in flags and cpu_features().get("AVX2") != "1":
        missing.append(
            "this processor has AVX2 and the library was built without it, which is several times "
            "slower: scripts/setup builds it for this machine"
        )
    return tuple(missing)


def _processor_flags(root: Path) -> set[str]:
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return set()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return set(line.partition(":")[2].split())
