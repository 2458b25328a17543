"""llama-server's /slots: their state, and saving, restoring and erasing them. Pure."""

from __future__ import annotations

from typing import Any, get_args

from offload.errors import BadRequest
from specoffload.server.api.wire import SlotRequest
from specoffload.server.engine.messages import Event, SlotChanged, SlotJob, Slots
from specoffload.session.generation import SlotAction

_COUNTS = {"save": ("n_saved", "n_written"), "restore": ("n_restored", "n_read")}


def slot_job(number: int, action: str | None, request: SlotRequest) -> SlotJob:
    """Raises BadRequest for an action that is none, or one without its file name."""
    for known in get_args(SlotAction):
        if action == known:
            if known != "erase" and not request.filename:
                raise BadRequest(f"{known} needs a filename in the body")
            return SlotJob(number, known, request.filename or "")
    raise BadRequest(f"action {action!r} is not one of {', '.join(get_args(SlotAction))}")


def slots_body(event: Event, n_ctx: int) -> list[dict[str, Any]]:
    """One entry for each slot."""
    assert isinstance(event, Slots)
    return [
        {
            "id": slot.id,
            "n_ctx": n_ctx,
            "is_processing": slot.is_processing,
            "n_tokens": slot.n_tokens,
            "n_prompt_tokens": slot.n_prompt_tokens,
            "next_token": [
                {
                    "has_next_token": slot.is_processing,
                    "n_remain": slot.n_remain,
                    "n_decoded": slot.n_decoded,
                }
            ],
        }
        for slot in event.slots
    ]


def slot_body(event: Event) -> dict[str, Any]:
    """The result of an action, by llama-server's names."""
    assert isinstance(event, SlotChanged)
    job, result = event.job, event.result
    if job.action == "erase":
        return {"id_slot": job.number, "n_erased": result.n_tokens}
    tokens, size = _COUNTS[job.action]
    return {
        "id_slot": job.number,
        "filename": job.filename,
        tokens: result.n_tokens,
        size: result.n_bytes,
        "timings": {f"{job.action}_ms": 1e3 * result.took_s},
    }
