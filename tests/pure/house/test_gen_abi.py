"""scripts/gen-abi reads or refuses C declarations, and abi.py was made from the pinned release."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from offload.ggml.library import abi

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def gen() -> ModuleType:
    """The script as a module."""
    path = ROOT / "scripts" / "gen-abi"
    sys.path.insert(0, str(path.parent))  # path as when the script runs
    try:
        loader = SourceFileLoader("gen_abi", str(path))
        spec = importlib.util.spec_from_loader("gen_abi", loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["gen_abi"] = module  # needed by dataclasses
        loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


HEADER = """
typedef struct thing * thing_t;
struct inner { _Bool on; };
enum colour { RED, GREEN = 5, BLUE, };
struct outer {
    int n;
    const char * label;
    thing_t thing;
    struct inner inner;
    enum colour colour;
    int64_t ne[16 / sizeof(int32_t)];
    struct thing ** list;
    const char * (*get_name)(thing_t t);
    void (*set)(thing_t t, const void * data, uint8_t value, size_t size);
    _Bool (*find)(const struct thing * t, const char * name);
    enum colour (*paint) (void);
};
"""


def test_members_become_ctypes_and_strings_are_bytes_only_as_arguments(gen: ModuleType) -> None:
    ffi = gen.declarations(HEADER, ("inner", "outer"), ("colour",))
    outer = ffi.typeof("struct outer")
    assert {
        name: gen.ctype(field.type).removeprefix("ctypes.") for name, field in outer.fields
    } == {
        "n": "c_int",
        "label": "c_void_p",
        "thing": "c_void_p",
        "inner": "inner",
        "colour": "c_int",
        "ne": "c_int64 * 4",
        "list": "c_void_p",
        "get_name": "c_void_p",
        "set": "c_void_p",
        "find": "c_void_p",
        "paint": "c_void_p",
    }
    prototypes = {
        name: gen.prototype_source(field.type)
        for name, field in outer.fields
        if field.type.kind == "function"
    }
    assert prototypes == {
        "get_name": "(P, P)",
        "set": "(None, P, P, U8, SIZE)",
        "find": "(BOOL, P, STR)",
        "paint": "(INT)",
    }
    assert ffi.typeof("enum colour").relements == {"RED": 0, "GREEN": 5, "BLUE": 6}


@pytest.mark.parametrize(
    "member", ["long double x;", "unknown_t x;", "int bits : 3;", "int t[2][3];"]
)
def test_c_that_has_no_ctype_here_is_refused(gen: ModuleType, member: str) -> None:
    def read() -> str:
        ffi = gen.declarations(f"struct outer {{ int n; {member} }};", ("outer",), ())
        return str(gen.struct_source("outer", ffi.typeof("struct outer")))

    with pytest.raises(gen.Refused):
        read()


def test_the_compiler_refuses_another_layout(gen: ModuleType, tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    text = (
        "import ctypes\nGGML_TWO = 2\n"
        "class pair(ctypes.Structure):\n"
        "    _fields_ = [('a', ctypes.c_int), ('b', ctypes.c_int64)]\n"
    )
    header = "#include <stddef.h>\nstruct pair { int a; long long b; };\nenum { GGML_TWO = 2 };\n"
    source = tmp_path / "asserts.c"
    source.write_text(header + gen.layout_asserts(text))
    gen.run(tmp_path, source, "-fsyntax-only")
    for wrong in (header.replace("long long", "short"), header.replace("= 2", "= 3")):
        source.write_text(wrong + gen.layout_asserts(text))
        with pytest.raises(gen.Refused, match="assert"):
            gen.run(tmp_path, source, "-fsyntax-only")


def test_the_checked_in_mirror_is_of_the_pinned_release(gen: ModuleType) -> None:
    assert gen.pinned_version() == abi.PACKAGE_VERSION
    assert {n for n in vars(abi) if n.startswith("ggml")} == set(gen.STRUCTS)
    assert len(abi.SOURCES) == len(gen.HEADERS) + 1


def test_a_source_of_another_release_is_refused(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp" / "__init__.py").write_text('__version__ = "0.3.16"\n')
    script = ROOT / "scripts" / "gen-abi"
    before = Path(abi.__file__).read_bytes()
    done = subprocess.run(
        [sys.executable, str(script), "--source", str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert f"pins llama-cpp-python {abi.PACKAGE_VERSION}, the source is 0.3.16" in done.stderr
    assert "Traceback" not in done.stderr
    assert Path(abi.__file__).read_bytes() == before
