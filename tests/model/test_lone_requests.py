"""The logits of a request that runs alone depend only on the request itself, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lossless_parts import EXACT
from test_slots import FIVE, SPECS, draft_of, model, open_slots, texts_of

from lab.options import engine_options
from offload.engine import open_engine
from specoffload.generation.generation import GenerateOptions
from specoffload.session.session import Session
from specoffload.slots.request import Request

FRESH = GenerateOptions(n_predict=12, ignore_eos=True, n_probs=3, cache_prompt=False)
REUSING = replace(FRESH, cache_prompt=True)
# Weights are f32. Quantised products round their input to 8 bits, which hides most differences.
KINDS = ("deepseek-v3", "gpt-oss", "qwen3next")
Told = list[tuple[int, float, tuple[float, ...]]]


def told(request: Request) -> Told:
    """Each token of a finished request, its logprob, and the logprobs of the three likeliest."""
    assert request.is_over
    assert request.error is None
    found = [logprob for piece in request.pieces for logprob in piece.logprobs]
    return [(t.chosen.token, t.chosen.logprob, tuple(o.logprob for o in t.top)) for t in found]


def run(session: Session, *texts: list[int], options: GenerateOptions = REUSING) -> list[Request]:
    """Run requests for these texts at once, until all have ended."""
    requests = [session.start(text, options) for text in texts]
    while not session.is_idle:
        session.step()
    return requests


def alone(session: Session, text: list[int], options: GenerateOptions) -> Told:
    (request,) = run(session, text, options=options)
    return told(request)


def n_reused(session: Session, text: list[int]) -> int:
    (request,) = run(session, text)
    stats = request.pieces[-1].stats
    assert stats is not None
    return stats.n_cached_tokens


# -- what was asked before ------------------------------------------------------------------------


def asked(session: Session) -> list[int]:
    return texts_of(session)[4]


def one_kept(session: Session) -> None:
    run(session, texts_of(session)[3])


def several_kept(session: Session) -> None:
    for text in texts_of(session)[1:4]:
        run(session, text)


def together(session: Session) -> None:
    run(session, *texts_of(session)[:4])


def cancelled(session: Session) -> None:
    """Cancel two requests while one reads its prompt and the other writes."""
    texts = texts_of(session)
    requests = [session.start(text, REUSING) for text in (texts[5], texts[2])]
    for _ in range(5):
        session.step()
    for request in requests:
        session.cancel(request)


def asked_before(session: Session) -> None:
    run(session, asked(session), options=FRESH)
    run(session, asked(session)[:30] + [7] * 9)


def erased(session: Session) -> None:
    together(session)
    session.batcher.slots[0].clear()


HISTORIES: tuple[Callable[[Session], None], ...] = (
    one_kept, several_kept, together, cancelled, asked_before, erased,
)  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def session(request: pytest.FixtureRequest, models: Path) -> Iterator[Session]:
    path = model(request.param, models)
    with open_slots(path, SPECS["alone"], 4, ctx_size=2048, cache_ram_bytes=1 << 24) as session:
        yield session


@pytest.fixture(scope="module")
def wanted(session: Session) -> Told:
    return alone(session, asked(session), FRESH)


@pytest.mark.parametrize("history", HISTORIES)
def test_logits_do_not_depend_on_what_was_asked_before(
    session: Session, wanted: Told, history: Callable[[Session], None]
) -> None:
    """The prompt is evaluated afresh twice, and then reused."""
    for _ in range(2):
        history(session)
        assert alone(session, asked(session), FRESH) == wanted
    assert alone(session, asked(session), REUSING) == wanted


# -- in other settings ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft", "spec"),
    [("itself", FIVE), ("stranger", FIVE), (None, {"--spec-type": "suffix", **FIVE})],
)
def test_drafts_of_one_length_change_nothing_either_when_prompts_are_not_reused(
    draft: str | None, spec: dict[str, object], models: Path
) -> None:
    """A model's drafts depend on where its cells lie. Suffix drafts depend only on the request's
    text."""
    path = model("mistral-large", models)
    kept = None if draft is None else draft_of(draft, "mistral-large", models)
    with open_slots(path, spec, 4, draft=kept, ctx_size=2048, cache_ram_bytes=1 << 24) as session:
        answers = []
        for history in (lambda _: None, *HISTORIES):
            history(session)
            answers.append(alone(session, asked(session), FRESH))
        assert all(answer == answers[0] for answer in answers)


def test_a_request_without_drafts_is_as_alone_as_a_session_without(models: Path) -> None:
    path = model("mistral-large", models)
    more: dict[str, Any] = {"ctx_size": 2048, "cache_ram_bytes": 1 << 24}
    with open_slots(path, SPECS["alone"], 4, **more) as session:
        wanted = alone(session, asked(session), FRESH)
    with open_slots(path, FIVE, 4, draft=draft_of("itself", "mistral-large", models), **more) as s:
        for history in HISTORIES[:4]:
            history(s)
            assert alone(s, asked(s), replace(REUSING, draft_max=0)) == wanted


@pytest.mark.parametrize("n_bytes", [0, 20_000], ids=["no host memory", "too little"])
def test_prompts_without_room_in_host_memory_stay_unless_they_are_not_to_be_reused(
    n_bytes: int, models: Path
) -> None:
    path = model("mistral-large", models)
    with open_slots(path, SPECS["alone"], 4, ctx_size=2048, cache_ram_bytes=n_bytes) as session:
        texts = texts_of(session)
        wanted = alone(session, asked(session), FRESH)
        run(session, texts[2])
        run(session, texts[6])
        assert [n_reused(session, text) for text in (texts[2], texts[6])] == [299, 199]
        assert alone(session, asked(session), FRESH) == wanted
        assert [n_reused(session, text) for text in (texts[2], texts[6])] == [0, 0]


def test_an_emptied_memory_begins_at_its_first_cell(models: Path) -> None:
    """After these sequences, the search for free cells stands in the middle of the sliding windows'
    cells."""
    left_behind = (
        *((1, 1), (2, 64), (0, 64), (1, 1), (0, 64), (1, 1), (0, 64)),
        *((0, 1), (2, 20), (1, 1), (0, 64), (0, 200), (0, 64), (1, 200)),
    )
    options = engine_options(
        device="cpu", n_ctx=4096, n_batch=64, n_ubatch=64, n_sequences=4, n_threads=1,
        n_threads_batch=1, **EXACT,
    )  # fmt: skip
    text = [(29 * i + 5) % 60 for i in range(700)]
    with open_engine(model("gpt-oss", models), options) as engine:
        sequences = engine.sequences
        wanted = sequences.extend(0, text, 1)
        sequences.rewind(0, 0)
        for sequence, n_tokens in left_behind:
            sequences.extend(sequence, [7] * n_tokens, 0)
        for sequence in range(3):
            sequences.rewind(sequence, 0)
        assert (sequences.extend(0, text, 1) == wanted).all()
