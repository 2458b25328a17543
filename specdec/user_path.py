"""Paths as users write them."""

from __future__ import annotations

from pathlib import Path


def user_path(text: str) -> Path:
    """The path that a user wrote. `~` at its beginning is the home folder, as in a shell.

    No shell replaces it behind `=`, in presets, and in quoted values of variables.
    """
    path = Path(text)
    if not text.startswith("~"):  # such as `./~`, from which Path removes the `./`
        return path
    try:
        return path.expanduser()
    except RuntimeError:  # there is no user of this name, or no home folder
        return path
