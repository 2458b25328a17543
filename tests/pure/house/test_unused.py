"""The product uses each of its functions, classes and constants.

Uses in tests and scripts do not count, because they would keep code alive that no user reaches.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = ("numa", "specdec", "offload", "specoffload")

# Names that the product defines for a program of scripts/: a page that describes what they do, and
# its words.
MEASURING = {
    "calls_into_python": ("docs/gpu.md", "calls of Python"),
    "followed_s": ("docs/gpu.md", "gpu-check` measures"),
}
# Methods that a base class or a protocol of another package calls: the name of the base class.
CALLED_BY_BASE = {
    "do_GET": "BaseHTTPRequestHandler",
    "do_POST": "BaseHTTPRequestHandler",
    "log_message": "BaseHTTPRequestHandler",
    "handle_error": "ThreadingTCPServer",
    "verify_request": "ThreadingTCPServer",
    "emit": "logging.Handler",
    "capture_signals": "uvicorn.Server",
    "eof_received": "H11Protocol",
    "send_400_response": "H11Protocol",
    "optionxform": "configparser.RawConfigParser",
}


class Names:
    """Names that modules define, with the bases of a method's class, and names that they use."""

    def __init__(self) -> None:
        self.defined: dict[str, str] = {}
        self.used: set[str] = set()

    def read(self, source: str) -> None:
        module = ast.parse(source)
        for node in module.body:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._constants(target)
            elif isinstance(node, ast.AnnAssign):
                self._constants(node.target)
        bases: dict[ast.AST, str] = {}
        for node in ast.walk(module):
            if isinstance(node, ast.Name):
                if isinstance(node.ctx, ast.Load):
                    self.used.add(node.id)
            elif isinstance(node, ast.Attribute):
                if isinstance(node.ctx, ast.Load):
                    self.used.add(node.attr)
            elif isinstance(node, ast.Constant):
                if isinstance(node.value, str) and ("import " in node.value or ":" in node.value):
                    # Code for a child process, or a name that is looked up: "module:name".
                    self.used |= {name for found in _IN_TEXT.findall(node.value) for name in found}
            elif isinstance(node, ast.alias):
                if node.asname:
                    self.used.add(node.name.rpartition(".")[2])
            elif isinstance(node, ast.ClassDef):
                bases |= dict.fromkeys(node.body, " ".join(map(ast.unparse, node.bases)))
                self.defined.setdefault(node.name, "")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not any(
                # A decorator that is called, such as a route, keeps the function.
                isinstance(decorator, ast.Call)
                for decorator in node.decorator_list
            ):
                self.defined[node.name] = bases.get(node, "")

    def _constants(self, target: ast.expr) -> None:
        for part in target.elts if isinstance(target, ast.Tuple) else [target]:
            if isinstance(part, ast.Name):
                self.defined[part.id] = ""

    def unused(self) -> dict[str, str]:
        """Unused names. A function that only calls itself counts as used."""
        return {
            name: bases
            for name, bases in self.defined.items()
            if name not in self.used and not name.startswith("__")
        }


_IN_TEXT = re.compile(r"\bimport (\w+)|^[\w.]+:(\w+)$")


def test_the_product_uses_what_it_defines() -> None:
    names = Names()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if path.name != "abi.py":  # generated: constants of llama.cpp's headers
                names.read(path.read_text(encoding="utf-8"))
    in_c = set(re.findall(r"\w+", (ROOT / "offload/ggml/player.c").read_text(encoding="utf-8")))
    found = {name: bases for name, bases in names.unused().items() if name not in in_c}
    called = {n for n, bases in found.items() if n in CALLED_BY_BASE and CALLED_BY_BASE[n] in bases}
    assert sorted(found.keys() - called - MEASURING.keys()) == []
    assert called == CALLED_BY_BASE.keys(), "an exception that is no longer needed"
    assert MEASURING.keys() <= found.keys(), "an exception that is no longer needed"


def test_pages_describe_what_is_kept_for_measuring() -> None:
    for name, (page, words) in MEASURING.items():
        assert words in (ROOT / page).read_text(encoding="utf-8"), name


def test_names_that_nothing_uses_are_found() -> None:
    code = """
LIMIT, _REST = 3, 4
def helper(): return _REST
def caller(): helper()
class Kept(Base):
    def method(self): return other.read
    def read(self): ...
@router.get("/x")
def route(): ...
"""
    names = Names()
    names.read(code)
    assert names.unused() == {"LIMIT": "", "caller": "", "Kept": "", "method": "Base"}
