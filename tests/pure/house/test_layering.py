"""The import law: who may import whom, where ctypes and the environment live."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("numa", "specdec", "offload", "specoffload")
MAY_IMPORT = {
    "numa": {"numa"},
    "specdec": {"specdec"},
    "offload": {"offload", "numa"},
    "specoffload": set(PACKAGES),
}
FORBIDDEN_STEMS = {"utils", "util", "common", "helpers", "base", "misc"}


def sources() -> list[Path]:
    return sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))


def imports_of(path: Path) -> list[tuple[str, int]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: list[tuple[str, int]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found.append((node.module or "", node.lineno))
    return found


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", sources(), ids=ids)
def test_a_package_imports_only_what_the_law_allows(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    for module, line in imports_of(path):
        top = module.split(".")[0]
        if top in PACKAGES:
            assert top in MAY_IMPORT[package], f"{path}:{line}: {package} may not import {module}"
        if package == "numa":
            allowed = top in sys.stdlib_module_names or top in ("numa", "psutil")
            assert allowed, f"{path}:{line}: numa imports the standard library and psutil only"


@pytest.mark.parametrize("path", sources(), ids=ids)
def test_ctypes_stays_at_the_border(path: Path) -> None:
    relative = path.relative_to(ROOT)
    if relative.parts[:2] == ("offload", "ggml") or relative == Path("numa/sys.py"):
        return
    modules = {module.split(".")[0] for module, _ in imports_of(path)}
    assert "ctypes" not in modules, f"{relative}: ctypes belongs to offload/ggml and numa/sys.py"


@pytest.mark.parametrize("path", sources(), ids=ids)
def test_the_environment_is_read_in_one_file(path: Path) -> None:
    if path == ROOT / "specoffload" / "config" / "environment.py":
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        reads = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
        assert not reads, f"{path}:{node.lineno}: environment variables are read in env.py"


def test_no_file_is_called_utils() -> None:
    bad = [p for p in sources() if p.stem in FORBIDDEN_STEMS]
    assert bad == []


def test_there_are_no_import_cycles() -> None:
    modules = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in sources()}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    edges = {name: _top_level_imports(path) & set(modules) for name, path in modules.items()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for other in sorted(edges[name]):
                visit(other, (*path, name))
            done.add(name)

    for name in sorted(edges):
        visit(name, ())


def _top_level_imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_help_does_not_load_the_native_library() -> None:
    import subprocess

    code = (
        "import sys\n"
        "from specoffload.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "assert 'llama_cpp' not in sys.modules, 'loaded'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "serve" in done.stdout
