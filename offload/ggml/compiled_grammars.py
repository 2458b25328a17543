"""Keeps the grammars compiled last, because clients send the same ones again and again."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from offload.errors import BadRequest
from offload.sampling.grammar import Grammar

_MOST_S = 2.0  # processor time that compiling the kept ones took; a second stands for about 50 MB
_LEAST_KEPT = 4  # are kept in any case, so that a request finds what was compiled for it
_MOST_KEPT = 32


class GivenGrammar(NamedTuple):
    """A grammar as a request has it: GBNF with its first rule, or a JSON schema as text."""

    gbnf: str | None
    json_schema: str | None
    root: str = "root"


@dataclass(frozen=True)
class _Compiled:
    result: Grammar | BadRequest
    took_s: float


class CompiledGrammars:
    """Compiled grammars, and the errors of those that cannot be followed. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[GivenGrammar, _Compiled] = OrderedDict()

    def __contains__(self, given: GivenGrammar) -> bool:
        with self._lock:
            return given in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, given: GivenGrammar, compiled: Callable[[], Grammar]) -> Grammar:
        """Return a copy of the grammar, which is `compiled` if it is not kept.

        Raises BadRequest if `compiled` does or did so.
        """
        with self._lock:
            kept = self._kept.get(given)
        if kept is None:
            kept = _compiled(compiled)
        self.put(given, kept.result, kept.took_s)
        if isinstance(kept.result, BadRequest):
            raise BadRequest(str(kept.result))
        return kept.result.copied()

    def put(self, given: GivenGrammar, result: Grammar | BadRequest, took_s: float) -> None:
        """Keep a result as the newest. `took_s` is the processor time of compiling it."""
        with self._lock:
            self._kept[given] = _Compiled(result, took_s)
            self._kept.move_to_end(given)
            total_s = sum(kept.took_s for kept in self._kept.values())
            while len(self._kept) > _LEAST_KEPT and (
                total_s > _MOST_S or len(self._kept) > _MOST_KEPT
            ):
                _, oldest = self._kept.popitem(last=False)
                total_s -= oldest.took_s


def _compiled(compiled: Callable[[], Grammar]) -> _Compiled:
    began_s = time.thread_time()
    result: Grammar | BadRequest
    try:
        result = compiled()
    except BadRequest as e:
        result = e
    return _Compiled(result, time.thread_time() - began_s)
