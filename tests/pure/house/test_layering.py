"""Rules of the code base: allowed imports, pure modules, and the modules that may use ctypes, print
and the environment.

ALLOWED lists temporary exceptions with their reason. They must be removed.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Set
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
# The folders and single files of a package, from the bottom up. Each imports only what stands in
# lines above its own.
LAYERS = {
    "offload": (
        ("kv_overrides",),
        ("alignment", "backends", "decode", "errors", "model", "notes", "regular_file", "units"),
        ("header_check", "routing", "sampling", "trace"),
        ("header_overrides",),
        ("schedule",),
        ("times",),
        ("plan",),
        ("ggml",),
        ("device", "images", "mla", "model_file"),
        ("load_check", "store", "threads"),
        ("open_check", "remote", "stream"),
        ("sequences",),
        ("options", "torch_draft"),
        ("probe",),
        ("opening",),
        ("engine",),
        ("measuring", "worker"),
    ),
    "specoffload": (
        ("chat", "ctrl_c", "errors"),
        ("generation", "output_file"),
        ("cpu_load", "kept_bounds", "kept_values"),
        ("kept_engines",),
        ("kept", "report"),
        ("kept_doubts",),
        ("kept_list", "kept_machine"),
        ("config",),
        ("models",),
        ("opening",),
        ("speculation",),
        ("slots",),
        ("session",),
        ("bench", "draft_making", "server", "terminal"),
        ("commands",),
        ("cli",),
        ("__main__",),
    ),
}
FORBIDDEN_STEMS = {"utils", "util", "common", "helpers", "base", "misc"}

# Modules that decide from plain data and return plain data. Neither they nor anything they import,
# nested imports included, touches the native library, a clock, the environment or a file.
PURE = (
    "offload.plan",
    "offload.times",
    "offload.backends",
    "offload.decode",
    "offload.units",
    "offload.routing.routing",
    "offload.schedule",
    "offload.model",
    "offload.sampling",
    "offload.threads.numa_plan",
    "offload.threads.governor",
    "offload.torch_draft.plan",
    "specdec.policies",
    "specoffload.chat",
    "numa.threads",
    "numa.place",
    "numa.topology",
    "numa.tune",
)
IMPURE_MODULES = {
    *("ctypes", "io", "mmap", "os", "psutil", "resource", "select", "shutil", "signal", "socket"),
    *("subprocess", "tempfile", "threading", "time", "multiprocessing", "asyncio", "logging"),
}
HARMLESS = {"mmap.PAGESIZE", "io.StringIO"}  # a constant of the machine, and memory of its own
IMPURE_CALLS = {
    *("open", "print", "input"),
    *("read_text", "read_bytes", "write_text", "write_bytes", "exists", "is_file", "is_dir"),
    *("iterdir", "glob", "rglob", "stat", "resolve", "unlink", "mkdir", "touch"),
}
# What knows addresses in memory: the Python side of native code, and the programs of the player.
_BORDER = (
    "offload/ggml/",
    "offload/images/mtmd.py",
    *(
        f"offload/stream/{name}.py"
        for name in ("doorbell", "entries", "layers_ahead", "play", "program")
    ),
)
BACKEND = re.compile(r"[^A-Za-z]*(?:CUDA|ROCm|HIP|MUSA|Vulkan|Metal|MTL|SYCL)(?![A-Za-z_])")
PRINTS = {"sys.stdout", "sys.stderr"}

# law -> path -> reason of the temporary exception, and who will remove it
ALLOWED: dict[str, dict[str, str]] = {
    "pure": {},
    "print": {},
    "address": {},
}


@functools.cache
def sources() -> tuple[Path, ...]:
    return tuple(sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py")))


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path: Path, *, typing_too: bool = True) -> list[tuple[str, int]]:
    """(module, line) of every import in the file, inside functions too.

    `from a import b` names a and a.b. Imports for the type checker alone never run.
    """
    skipped = set() if typing_too else {id(node) for node in _for_typing(tree(path))}
    found: list[tuple[str, int]] = []
    for node in ast.walk(tree(path)):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            module = node.module or ""
            found.append((module, node.lineno))
            found += [(f"{module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def _for_typing(module: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(module):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for statement in node.body:
                yield from ast.walk(statement)


def name_of(path: Path) -> str:
    """The path relative to the repository's root, for messages."""
    return str(path.relative_to(ROOT))


@functools.cache
def modules() -> dict[str, Path]:
    named = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in sources()}
    return {name.removesuffix(".__init__"): path for name, path in named.items()}


@functools.cache
def edges() -> dict[str, set[str]]:
    """module -> modules of ours that it imports, at any level of nesting."""
    return {
        name: {m for m, _ in imports_of(path, typing_too=False)} & set(modules())
        for name, path in modules().items()
    }


def outside_the_list(law: str, bad: dict[str, list[str]]) -> dict[str, list[str]]:
    """Violations of a law that ALLOWED does not list. Fails if an entry of ALLOWED is outdated."""
    stale = set(ALLOWED[law]) - set(bad)
    assert not stale, f"{law}: {sorted(stale)} breaks nothing any more, take it off the list"
    return {path: lines for path, lines in bad.items() if path not in ALLOWED[law]}


def test_a_package_imports_only_what_the_law_allows() -> None:
    bad = []
    for path in sources():
        package = path.relative_to(ROOT).parts[0]
        for module, line in imports_of(path):
            top = module.split(".")[0]
            ours = top in PACKAGES
            allowed = top in MAY_IMPORT[package] if ours else top != "lab"  # scripts/lab
            if package == "numa" and not ours:
                allowed = top in sys.stdlib_module_names or top == "psutil"
            if not allowed:
                bad.append(f"{name_of(path)}:{line}: {package} may not import {module}")
    assert bad == []


@pytest.mark.parametrize("package", sorted(LAYERS))
def test_folders_import_only_what_lies_below_them(package: str) -> None:
    height = {name: at for at, names in enumerate(LAYERS[package]) for name in names}
    parts = {name.split(".")[1] for name in modules() if name.startswith(f"{package}.")}
    assert parts == set(height), "LAYERS names every folder and file of the package"
    bad = []
    for name, others in edges().items():
        for other in others:
            if not (name.startswith(f"{package}.") and other.startswith(f"{package}.")):
                continue
            part, below = name.split(".")[1], other.split(".")[1]
            if part != below and height[below] >= height[part]:
                bad.append(f"{name} imports {other}")
    assert bad == []


def test_ctypes_stays_at_the_border() -> None:
    def is_border(path: Path) -> bool:
        return name_of(path).startswith(_BORDER) or name_of(path) == "numa/sys.py"

    bad = [
        f"{name_of(path)}:{line}"
        for path in sources()
        if not is_border(path)
        for module, line in imports_of(path)
        if module.split(".")[0] == "ctypes"
    ]
    assert bad == []


def test_no_bare_address_leaves_the_border() -> None:
    """Outside the border and numa no module reads addresses. Handles have methods instead."""
    bad: dict[str, list[str]] = {}
    for path in sources():
        if name_of(path).startswith((*_BORDER, "numa/", "specdec/")):
            continue
        lines = [
            f"{node.lineno}: {ast.unparse(node)}"
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Attribute)
            and node.attr in ("address", "address_of", "handle")
            and ast.unparse(node) != "super().handle"  # the method of a route
        ]
        if lines:
            bad[name_of(path)] = lines
    assert outside_the_list("address", bad) == {}


def test_the_environment_is_read_in_one_file() -> None:
    """A second file sets the variables that the native library reads, and two others call
    compilers."""
    readers = {
        *("specoffload/config/environment.py", "offload/ggml/library/lib.py"),
        *("offload/ggml/compiling.py", "offload/ggml/player_building.py"),
        "offload/images/building.py",
    }
    bad = [
        f"{name_of(path)}:{node.lineno}"
        for path in sources()
        if name_of(path) not in readers
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    ]
    assert bad == []


def test_only_the_program_prints() -> None:
    bad: dict[str, list[str]] = {}
    for path in sources():
        if name_of(path).startswith("specoffload/"):
            continue
        lines = [f"{node.lineno}" for node in ast.walk(tree(path)) if _prints(node)]
        lines += [f"{line}: {m}" for m, line in imports_of(path) if m.split(".")[0] == "rich"]
        if lines:
            bad[name_of(path)] = lines
    assert outside_the_list("print", bad) == {}


def _prints(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id == "print"
    return isinstance(node, ast.Attribute) and ast.unparse(node) in PRINTS


def test_what_decides_is_pure() -> None:
    """The modules on the list, and all that call themselves pure."""
    bad: dict[str, list[str]] = {}
    for name, path in sorted(modules().items()):
        is_listed = any(name == p or name.startswith(p + ".") for p in PURE)
        if is_listed or "Pure." in (ast.get_docstring(tree(path)) or ""):
            lines = [f"reaches {m}" for m in sorted(reached(name)) if m.startswith("offload.ggml")]
            for other in sorted(reached(name)):
                lines += [f"{other}:{what}" for what in impurities(modules()[other])]
            if lines:
                bad[name_of(path)] = lines
    assert outside_the_list("pure", bad) == {}


def reached(name: str) -> set[str]:
    """The module and everything of ours that it imports, directly or not."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        module = waiting.pop()
        if module in found:
            continue
        found.add(module)
        waiting += edges()[module]
    return found


def impurities(path: Path) -> list[str]:
    imported = imports_of(path, typing_too=False)
    harmless = {line for module, line in imported if module in HARMLESS}
    found = [
        f"{line} imports {module}"
        for module, line in imported
        if module.split(".")[0] in IMPURE_MODULES and line not in harmless
    ]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            called = node.func
            word = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
            if word in IMPURE_CALLS:
                found.append(f"{node.lineno} calls {word}")
    return found


def test_backends_are_told_apart_in_one_table() -> None:
    """No other module has the name of a backend by which it could know one."""
    bad = []
    for path in sources():
        if name_of(path) == "offload/backends.py":
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
                words = node.value if isinstance(node.value, str) else node.value.decode("latin1")
                if BACKEND.match(words) and " " not in words:
                    bad.append(f"{name_of(path)}:{node.lineno}: {words}")
    assert bad == []


def test_one_function_decides_which_devices_a_start_may_use() -> None:
    """Others would count, keep or plan for other devices than a start uses."""
    callers = {name_of(path) for path in sources() if "choose_devices(" in path.read_text("utf-8")}
    assert callers == {"offload/device.py"}


def test_no_file_is_called_utils() -> None:
    bad = [p for p in sources() if p.stem in FORBIDDEN_STEMS]
    assert bad == []


def test_there_are_no_import_cycles() -> None:
    """Imports inside functions and for the type checker alone count too, because a reader has to
    follow them as well."""
    needed = {
        name: {m for m, _ in imports_of(path)} & set(modules()) - {name}
        for name, path in modules().items()
    }
    assert knots(needed) == []


def knots(needed: Mapping[str, Set[str]]) -> list[list[str]]:
    """The sets of modules that all reach each other, of two modules or more."""
    left = {name: set(others) for name, others in needed.items()}
    while True:  # take away modules that need nothing, or that nothing needs
        named = set().union(*left.values())
        ends = {name for name, others in left.items() if not others or name not in named}
        if not ends:
            break
        left = {name: others - ends for name, others in left.items() if name not in ends}
    ways = {name: _ways(name, left) for name in left}
    found = {frozenset(b for b in ways[a] if a in ways[b]) for a in left if a in ways[a]}
    return sorted(sorted(knot) for knot in found)


def _ways(start: str, needed: Mapping[str, Set[str]]) -> set[str]:
    """What can be reached from a module; the module itself only if there is a way back."""
    found: set[str] = set()
    waiting = list(needed[start])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += needed[name]
    return found


def test_knots_of_imports_are_found() -> None:
    needed = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"d", "f"}, "f": set()}
    assert knots(needed) == [["a", "b", "c"], ["d", "e"]]
    assert knots({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_a_server_of_one_model_needs_no_file_of_several() -> None:
    """Files outside router/ cannot enter it, because none of them imports it."""
    router = "specoffload.server.router"
    users = {
        name
        for name, needed in edges().items()
        if not name.startswith(router) and any(other.startswith(router) for other in needed)
    }
    assert users == {"specoffload.commands.serve_models"}
    one = reached("specoffload.commands.serve")
    assert "specoffload.server.api.one_model" in one
    assert not {name for name in one if name.startswith(router)}


def test_help_does_not_load_the_native_library() -> None:
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
