"""Fill a folder with what the checks of scripts/numa-vm need: this Python, its libraries, numa.

Usage: python scripts/numa_vm_root.py ROOT
"""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

_LEFT_OUT = ("test", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "site-packages")
_REPOSITORY = Path(__file__).parents[1]


def main() -> None:
    root = Path(sys.argv[1])
    executable = Path(sys.executable).resolve()
    library = Path(sysconfig.get_path("stdlib"))
    ignore = shutil.ignore_patterns(*_LEFT_OUT, "__pycache__", "config-*", "*.a", "*.exe")
    # Python finds its library only below the same prefix as here.
    shutil.copytree(library, root / library.relative_to("/"), ignore=ignore)
    _place(executable, root)
    (root / "bin/python3").symlink_to(executable)
    modules = list((library / "lib-dynload").glob("*.so"))
    for shared in sorted({s for file in [executable, *modules] for s in _libraries(file)}):
        _place(Path(shared), root)
    shutil.copytree(_REPOSITORY / "numa", root / "app/numa", ignore=ignore)
    shutil.copy(_REPOSITORY / "scripts/numa_vm_check.py", root / "app")


def _place(file: Path, root: Path) -> None:
    target = root / file.relative_to("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, target)


def _libraries(file: Path) -> list[str]:
    """Absolute paths in ldd's output: `name => /path (0x...)` and `/lib64/ld-... (0x...)`."""
    answer = subprocess.run(["ldd", file], capture_output=True, text=True, check=False).stdout
    return [word for word in answer.split() if word.startswith("/")]


if __name__ == "__main__":
    main()
