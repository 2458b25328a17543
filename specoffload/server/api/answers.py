"""Parts that answers of all APIs share: token counts, timings, server-sent events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from starlette.datastructures import Headers

from specoffload.chat.conversation import Delta, Message
from specoffload.chat.parser import StreamParser
from specoffload.generation.generation import TextPiece
from specoffload.generation.statistics import GenerationStats
from specoffload.server.api.refusals import Json

to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
DONE = b"data: [DONE]\n\n"
MARK = "‡"  # the place of a text in the JSON of a `TextLine`


# ---- events of a stream

STREAM_HEADERS = Headers(
    {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",  # keeps nginx from holding events back
    }
)


def server_sent(body: Json) -> bytes:
    """Return one event without a name. JSON has no raw line feed, so one data line is enough."""
    return b"data: " + to_json(body).encode() + b"\n\n"


def named_events(events: Iterable[Json]) -> bytes:
    """Return events named by their type, for Anthropic's API and the Responses API."""
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (event["type"].encode(), to_json(event).encode())
        for event in events
    )


class TextLine:
    """A prepared event, which is sent many times with different texts."""

    def __init__(self, body: Json) -> None:
        """`body` has MARK in the place of the text, after all other texts from the client."""
        head, tail = to_json(body).rsplit(f'"{MARK}"', 1)
        self._head, self._tail = b"data: " + head.encode(), tail.encode() + b"\n\n"

    def sent(self, text: str) -> bytes:
        return self._head + to_json(text).encode() + self._tail


# ---- counts and times of an answer


def usage_of(answers: Sequence[GenerationStats], n_per_prompt: int = 1) -> Json:
    """Return OpenAI's `usage` of several answers.

    Each group of `n_per_prompt` answers shares a prompt, which counts once.
    """
    prompts = answers[::n_per_prompt]
    n_prompt = sum(stats.n_prompt_tokens for stats in prompts)
    n_answers = sum(stats.n_tokens for stats in answers)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_answers,
        "total_tokens": n_prompt + n_answers,
        "prompt_tokens_details": {"cached_tokens": sum(s.n_cached_tokens for s in prompts)},
    }


def timings_of(stats: GenerationStats) -> Json:
    """Return llama-server's `timings` (milliseconds, tokens per second), with details of drafts."""

    def ratio(a: float, b: float) -> float:
        return a / b if b > 0 else 0.0

    timings: Json = {
        "waited_ms": 1e3 * stats.waited_s,
        "cache_n": stats.n_cached_tokens,
        "cache_disk_n": stats.n_from_disk,
        "prompt_n": stats.n_prompt_tokens - stats.n_cached_tokens,
        "prompt_ms": 1e3 * stats.prefill_s,
    }
    if stats.n_prefilled:  # else the prompt was cached, and its last token belongs to the answer
        timings |= {
            "prompt_per_token_ms": 1e3 * stats.prefill_s / stats.n_prefilled,
            "prompt_per_second": ratio(stats.n_prefilled, stats.prefill_s),
        }
    timings |= {
        "predicted_n": stats.n_tokens,
        "predicted_ms": 1e3 * stats.decode_s,
        "predicted_per_token_ms": ratio(1e3 * stats.decode_s, stats.n_tokens),
        "predicted_per_second": stats.tokens_per_s,
    }
    if stats.n_drafted:
        timings |= {
            "draft_n": stats.n_drafted,
            "draft_n_accepted": stats.n_accepted,
            "speculation": {
                "rounds": stats.n_rounds,
                "tokens_per_round": stats.tokens_per_round,
                "acceptance_rate": stats.acceptance_rate,
                "acceptance_per_position": list(stats.acceptance_per_position),
                "draft_steps": stats.n_draft_steps,
                "draft_ms": 1e3 * stats.draft_s,
                "verify_ms": 1e3 * stats.verify_s,
                "rollback_ms": 1e3 * stats.rollback_s,
                "checkpoints": stats.n_checkpoints,
                "restores": stats.n_restores,
                "rounds_per_draft_length": {str(n): r for n, r in stats.draft_lengths},
                "accepted_per_drafter": dict(stats.accepted_by_source),
                "decisions": dict(stats.decisions),
                "reasons": [
                    {"kind": kind, "rounds": n_rounds, "reason": last}
                    for kind, n_rounds, last in stats.reasons
                ],
            },
        }
    if stats.streamed_bytes:
        timings["streamed_bytes"] = stats.streamed_bytes
    if stats.n_choices:
        timings["routing"] = {
            "choices": stats.n_choices,
            "kept": ratio(stats.n_choices_kept, stats.n_choices),
            "hits": ratio(stats.n_choices_cached, stats.n_choices),
            "hits_without": ratio(stats.n_own_cached, stats.n_choices),
        }
    return timings


# ---- the parts of a chat's answer


class ParsedAnswer:
    """Reads one answer to a chat, as it grows, into content, reasoning and tool calls."""

    def __init__(self, parser: StreamParser) -> None:
        self.message = Message()
        self.n_reasoning = 0  # tokens of reasoning, without those of the round that ends it
        self._parser = parser

    def add(self, piece: TextPiece) -> list[Delta]:
        """Read a piece, and return the parts that it adds."""
        deltas = self._parser.feed(piece.text)
        if self._parser.is_reasoning:
            self.n_reasoning += len(piece.tokens)
        if piece.finish_reason is not None:
            deltas += self._parser.finish(cut=piece.finish_reason == "length")
        for delta in deltas:
            self.message.add(delta)
        return deltas
