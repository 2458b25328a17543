"""Keeps what the Responses API answered, for clients that send ids in place of items.

A client may name an earlier response (`previous_response_id`) or items of one (`item_reference`).
Responses are kept in memory, those of each key apart, unless a request has `store: false`. Limits
of number, size and age decide which are dropped: first the least recently used one of the key that
has most.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from specoffload.server.access import owner_of
from specoffload.server.api.answers import to_json
from specoffload.server.api.body import invalid
from specoffload.server.api.refusals import Json
from specoffload.server.engine.messages import Event, Problem, RequestFailed

_MOST = 4096  # responses of all keys
_MOST_BYTES = 64 * 2**20  # limit for all responses with their input
MOST_ENTRY_BYTES = 8 * 2**20  # of a request's own input; with more it is not kept
_KEPT_S = 24 * 3600.0  # seconds after the last use
_OVERHEAD_BYTES = 1024  # of an entry's objects
_REMEDY = "send the whole input instead, with store: false"


@dataclass(frozen=True)
class _StoredResponse:
    """A response, and the items that its request added to the conversation before it."""

    id: str
    previous_id: str | None
    items: tuple[bytes, ...]  # input, then output, each as JSON
    output_ids: tuple[str, ...]
    response: bytes  # JSON without `output`
    used_s: float

    @property
    def outputs(self) -> tuple[bytes, ...]:
        return self.items[len(self.items) - len(self.output_ids) :]

    @property
    def n_bytes(self) -> int:
        return _OVERHEAD_BYTES + len(self.response) + sum(map(len, self.items))


class _Owned:
    """The responses of one key, the least recently used first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[str, _StoredResponse] = OrderedDict()
        self.n_bytes = 0
        self.items: dict[str, tuple[str, bytes]] = {}  # ids of responses and JSON, by items' ids

    def add(self, entry: _StoredResponse) -> None:
        self.entries[entry.id] = entry
        self.n_bytes += entry.n_bytes
        for item_id, item in zip(entry.output_ids, entry.outputs, strict=True):
            self.items[item_id] = entry.id, item

    def drop(self, entry_id: str) -> None:
        entry = self.entries.pop(entry_id)
        self.n_bytes -= entry.n_bytes
        for item_id in entry.output_ids:
            self.items.pop(item_id, None)


class StoredResponses:
    """The responses of one server. Used on one event loop."""

    def __init__(
        self,
        *,
        most: int = _MOST,
        most_bytes: int = _MOST_BYTES,
        kept_s: float = _KEPT_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """At most `most` responses of `most_bytes` are kept, for `kept_s` after their last use."""
        self._most, self._most_bytes, self._kept_s, self._now = most, most_bytes, kept_s, now
        self._owners: dict[str, _Owned] = {}

    @property
    def n_bytes(self) -> int:
        return sum(owned.n_bytes for owned in self._owners.values())

    def __len__(self) -> int:
        return sum(len(owned.entries) for owned in self._owners.values())

    def keep(
        self, owner: str, response: Json, own_input: Sequence[bytes], previous_id: str | None
    ) -> None:
        """Keep a response that has ended. `own_input`: what its request added, each as JSON."""
        outputs = response["output"]
        entry = _StoredResponse(
            id=response["id"],
            previous_id=previous_id,
            items=(*own_input, *(to_json(item).encode() for item in outputs)),
            output_ids=tuple(item["id"] for item in outputs),
            response=to_json({**response, "output": []}).encode(),
            used_s=self._now(),
        )
        self._owners.setdefault(owner, _Owned()).add(entry)
        self._drop_old()
        while len(self) > self._most or self.n_bytes > self._most_bytes:
            name = max(self._owners, key=lambda name: self._owners[name].n_bytes)
            self._drop(name, next(iter(self._owners[name].entries)))

    def conversation(self, owner: str, response_id: str) -> list[bytes]:
        """Return all items up to the end of a response. Raises RequestFailed (400)."""
        self._drop_old()
        entries: list[_StoredResponse] = []
        wanted: str | None = response_id
        while wanted is not None:
            entry = self._used(owner, wanted)
            if entry is None:
                words = _not_kept("response", wanted)
                event = Event.UNKNOWN_RESPONSE
                raise invalid(f"previous_response_id: {words}; {_REMEDY}", event=event)
            entries.append(entry)
            wanted = entry.previous_id
        return [item for entry in reversed(entries) for item in entry.items]

    def item(self, owner: str, where: str, item_id: str) -> bytes:
        """Return an item of a response. Raises RequestFailed (400) that names the place `where`."""
        self._drop_old()
        owned = self._owners.get(owner) or _Owned()
        place = owned.items.get(item_id)
        if place is None:
            raise invalid(f"{where}: {_not_kept('item', item_id)}; {_REMEDY}")
        self._used(owner, place[0])
        return place[1]

    def response(self, owner: str, response_id: str) -> Json:
        """Return a whole response. Raises RequestFailed (404)."""
        self._drop_old()
        entry = self._used(owner, response_id)
        if entry is None:
            raise _unknown(response_id)
        response: Json = json.loads(entry.response)
        return response | {"output": [json.loads(item) for item in entry.outputs]}

    def delete(self, owner: str, response_id: str) -> None:
        """Forget a response. Raises RequestFailed (404)."""
        if self._used(owner, response_id) is None:
            raise _unknown(response_id)
        self._drop(owner, response_id)

    def _used(self, owner: str, response_id: str) -> _StoredResponse | None:
        """Return a response, which is now the most recently used one."""
        owned = self._owners.get(owner)
        entry = None if owned is None else owned.entries.get(response_id)
        if owned is None or entry is None:
            return None
        owned.entries[response_id] = entry = replace(entry, used_s=self._now())
        owned.entries.move_to_end(response_id)
        return entry

    def _drop_old(self) -> None:
        oldest_s = self._now() - self._kept_s
        for name, owned in list(self._owners.items()):
            while owned.entries:
                entry = next(iter(owned.entries.values()))
                if entry.used_s >= oldest_s:
                    break
                self._drop(name, entry.id)

    def _drop(self, owner: str, entry_id: str) -> None:
        self._owners[owner].drop(entry_id)
        if not self._owners[owner].entries:
            del self._owners[owner]


def stored_router(stored: StoredResponses) -> APIRouter:
    router = APIRouter(tags=["responses"])

    @router.get("/v1/responses/{response_id}")
    async def read(request: Request, response_id: str) -> Response:
        """A response that is kept."""
        return JSONResponse(stored.response(owner_of(request.scope), response_id))

    @router.delete("/v1/responses/{response_id}")
    async def delete(request: Request, response_id: str) -> Response:
        """Forgets a response."""
        stored.delete(owner_of(request.scope), response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    return router


def _not_kept(kind: str, wanted: str) -> str:
    return (
        f"no {kind} {wanted[:80]!r} is kept. Responses without store: false are kept in memory, "
        f"for {_KEPT_S / 3600:.0f} hours at most"
    )


def _unknown(response_id: str) -> RequestFailed:
    words, event = _not_kept("response", response_id), Event.UNKNOWN_RESPONSE
    return RequestFailed(Problem("NotFound", words, 404, "not_found_error", event=event))
