"""setup.py compiles the player in an environment that has setuptools alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
_FINDER = """
import sys
class OnlyOurs:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top != "offload":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, OnlyOurs())
"""


def test_what_setup_imports_needs_no_package() -> None:
    lines = (ROOT / "setup.py").read_text(encoding="utf-8").splitlines()
    imports = [line for line in lines if line.startswith("from offload")]
    assert imports
    code = "\n".join([_FINDER, *imports])
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
