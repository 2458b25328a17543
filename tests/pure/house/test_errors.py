"""Every error class has a meaning at a terminal and over HTTP."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest

import numa.errors
import offload.errors
import specdec.errors
import specoffload.errors
from offload.errors import BadModel, DeviceFailed, DoesNotFit
from specoffload.errors import KNOWN, meaning_of

MODULES = (numa.errors, offload.errors, specdec.errors, specoffload.errors)


def classes(module: ModuleType) -> list[type[Exception]]:
    found = inspect.getmembers(module, inspect.isclass)
    return [c for _, c in found if c.__module__ == module.__name__ and issubclass(c, Exception)]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_the_tree_in_the_docstring_names_every_class(module: ModuleType) -> None:
    assert module.__doc__ is not None
    for kind in classes(module):
        assert kind.__name__ in module.__doc__


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_error_is_caught_at_the_top(module: ModuleType) -> None:
    for kind in classes(module):
        assert issubclass(kind, KNOWN)


@pytest.mark.parametrize(
    ("error", "exit_code", "status"),
    [
        (BadModel("x"), 2, 400),
        (DoesNotFit("x"), 2, 400),
        (DeviceFailed("x"), 1, 500),
        (RuntimeError("ours"), 1, 500),
    ],
)
def test_the_cause_decides_the_exit_code_and_the_status(
    error: Exception, exit_code: int, status: int
) -> None:
    meaning = meaning_of(error)
    assert (meaning.exit_code, meaning.http_status) == (exit_code, status)
