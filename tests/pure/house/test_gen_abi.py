"""scripts/gen-abi: what its parser reads and refuses; abi.py is of the pinned release."""

from __future__ import annotations

import ctypes
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
    sys.path.insert(0, str(path.parent))  # as when it is run
    try:
        loader = SourceFileLoader("gen_abi", str(path))
        spec = importlib.util.spec_from_loader("gen_abi", loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["gen_abi"] = module  # dataclasses look their module up
        loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


HEADER = """
typedef struct thing * thing_t;
struct inner { bool on; };
enum colour { RED, GREEN = 5, BLUE, };
struct outer {
    int n;
    const char * label;
    thing_t thing;
    struct inner inner;
    enum colour colour;
    int64_t ne[2 + 2];
    struct thing ** list;
    const char * (*get_name)(thing_t t);
    void (*set)(thing_t t, const void * data, uint8_t value, size_t size);
    bool (*find)(const struct thing * t, const char * name);
    enum colour (*paint) (void);
};
"""


def declarations(gen: ModuleType, text: str = HEADER) -> object:
    return gen.Declarations(text, ("inner", "outer"))


def test_members_become_ctypes(gen: ModuleType) -> None:
    fields = {f.name: f for f in declarations(gen).struct("outer")}  # type: ignore[attr-defined]
    assert {name: f.ctype for name, f in fields.items()} == {
        "n": "c_int",
        "label": "c_void_p",
        "thing": "c_void_p",
        "inner": "inner",
        "colour": "c_int",
        "ne": "c_int64",
        "list": "c_void_p",
        "get_name": "c_void_p",
        "set": "c_void_p",
        "find": "c_void_p",
        "paint": "c_void_p",
    }
    assert [name for name, f in fields.items() if f.is_array] == ["ne"]


def test_strings_are_bytes_as_arguments_and_addresses_as_results(gen: ModuleType) -> None:
    fields = {f.name: f for f in declarations(gen).struct("outer")}  # type: ignore[attr-defined]
    assert fields["get_name"].prototype == ("c_void_p", ("c_void_p",))
    assert fields["find"].prototype == ("c_bool", ("c_void_p", "c_char_p"))
    assert fields["set"].prototype == (None, ("c_void_p", "c_void_p", "c_uint8", "c_size_t"))
    assert fields["paint"].prototype == ("c_int", ())


def test_enumerators_are_named_in_order(gen: ModuleType) -> None:
    assert declarations(gen).enumerators("colour") == ["RED", "GREEN", "BLUE"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "member",
    [
        "long double x;",
        "unknown_t x;",
        "int a, b;",
        "int bits : 3;",
        "int table[2][3];",
        "struct thing by_value;",
        "void (*unnamed)(thing_t);",
        "union { int i; float f; } both;",
    ],
)
def test_c_that_the_parser_does_not_know_is_refused(gen: ModuleType, member: str) -> None:
    text = f"typedef struct thing * thing_t; struct outer {{ int n; {member} }};"
    with pytest.raises(gen.Refused):
        declarations(gen, text).struct("outer")  # type: ignore[attr-defined]


def test_a_layout_that_ctypes_does_not_share_with_the_compiler_is_refused(gen: ModuleType) -> None:
    fields = [gen.Field("a", "c_int"), gen.Field("b", "c_int64")]
    text = (
        "import ctypes\n"
        "class pair(ctypes.Structure):\n"
        "    _fields_ = [('a', ctypes.c_int), ('b', ctypes.c_int64)]\n"
    )

    def layout(size: int, b_offset: int) -> object:
        members = {"pair.a": 4, "pair.b": 8}
        return gen.Layout({"pair": size}, {"pair.a": 0, "pair.b": b_offset}, members, {}, {})

    gen.compare(text, {"pair": fields}, layout(16, 8))
    with pytest.raises(gen.Refused, match="16 bytes in ctypes, 12 in C"):
        gen.compare(text, {"pair": fields}, layout(12, 4))
    with pytest.raises(gen.Refused, match=r"pair\.b is at \(8, 8\) in ctypes, \(4, 8\) in C"):
        gen.compare(text, {"pair": fields}, layout(16, 4))


def test_numbers_come_from_the_compiler(gen: ModuleType, tmp_path: Path) -> None:
    if shutil.which(gen.compiler()[0]) is None:
        pytest.skip("no C compiler")
    header = "#include <stdbool.h>\nstruct s { char c; double d[3]; };\nenum e { A = 7, B };\n"
    wanted = {"size s": "sizeof(struct s)", "constant B": "B", "off": "offsetof(struct s, d)"}
    measured = gen.measure(tmp_path, header, wanted, tmp_path)
    mirror = type(
        "s", (ctypes.Structure,), {"_fields_": [("c", ctypes.c_char), ("d", ctypes.c_double * 3)]}
    )
    assert measured == {"size s": ctypes.sizeof(mirror), "constant B": 8, "off": 8}


def test_the_checked_in_mirror_is_of_the_pinned_release(gen: ModuleType) -> None:
    assert gen.pinned_version() == abi.PACKAGE_VERSION
    assert set(abi.SIZES) == set(gen.STRUCTS)
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
