"""Puts what a request of the Responses API names by id into its input."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from specoffload.server.api.answers import to_json
from specoffload.server.api.body import invalid, too_large
from specoffload.server.api.response_input import InputItem, ResponsesRequest
from specoffload.server.api.stored import MOST_ENTRY_BYTES, StoredResponses


class WholeRequest(NamedTuple):
    """A request whose input has all items.

    `own_input` is what the request adds to the conversation, each item as JSON. It is None if the
    response is not to be kept.
    """

    request: ResponsesRequest
    own_input: Sequence[bytes] | None


def whole_request(
    stored: StoredResponses, owner: str, request: ResponsesRequest, most_bytes: int
) -> WholeRequest:
    """Return the request with the items that it names by id, which must belong to `owner`.

    Raises RequestFailed: 400 for unknown ids, and 413 if all items together are over `most_bytes`.
    """
    given = request.input
    items = [InputItem(role="user", content=given)] if isinstance(given, str) else given
    previous_id, keeps = request.previous_response_id, request.store is not False
    names_items = previous_id is not None or any(map(_is_reference, items))
    if not names_items and not keeps:
        return WholeRequest(request, None)
    before = stored.conversation(owner, previous_id) if previous_id else []
    own: list[bytes] = []
    n_own_bytes, n_before_bytes = 0, sum(map(len, before))
    for at, item in enumerate(items):
        own.append(_json_of(stored, owner, f"input[{at}]", item))
        n_own_bytes += len(own[-1])
        if names_items and n_before_bytes + n_own_bytes > most_bytes:
            raise too_large(most_bytes)
        if n_own_bytes > MOST_ENTRY_BYTES:
            keeps = False
            if not names_items:
                break
    if names_items:
        every = [InputItem.model_validate(json.loads(item)) for item in (*before, *own)]
        request = request.model_copy(update={"input": every, "previous_response_id": None})
    return WholeRequest(request, own if keeps else None)


def _is_reference(item: InputItem) -> bool:
    """True for an item that only names another one. Its type may be left out."""
    untyped = item.type is None and item.role is None and item.id is not None
    return item.type == "item_reference" or untyped


def _json_of(stored: StoredResponses, owner: str, where: str, item: InputItem) -> bytes:
    if not _is_reference(item):
        return to_json(item.model_dump(exclude_unset=True)).encode()
    if not item.id:
        raise invalid(f"{where}: item_reference needs an id")
    return stored.item(owner, where, item.id)
