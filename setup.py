"""Compiles the player into the package. pyproject.toml has all the rest."""

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent))
from offload.errors import LibraryMismatch  # noqa: E402
from offload.ggml.player_building import GRAPHS, SOURCE, compile_player, library_name  # noqa: E402


class BuildPlayer(build_ext):
    """Makes a library for ctypes. It does not use Python, so its name has no Python version."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1], library_name()))

    def build_extension(self, ext: Extension) -> None:
        folder = Path(self.get_ext_fullpath(ext.name)).parent
        folder.mkdir(parents=True, exist_ok=True)
        try:
            compile_player(folder)
        except LibraryMismatch as e:
            sys.exit(f"specoffload cannot be installed: {e}")


class AnyPython(bdist_wheel):
    """Names the wheel for every Python 3 on this kind of machine."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


sources = [str(path.relative_to(Path(__file__).parent)) for path in (SOURCE, GRAPHS)]
setup(
    ext_modules=[Extension("offload.ggml.player_lib", sources)],
    cmdclass={"build_ext": BuildPlayer, "bdist_wheel": AnyPython},
)
