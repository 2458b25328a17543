"""Functions that the engine process calls between two steps (`EngineCall`), and checks of prompts.

The checks refuse bad prompts before much is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from offload.errors import BadRequest, DoesNotFit
from offload.images.place_tokens import image_spans
from specoffload.generation.generation import ModelCard, SlotAction, SlotInfo, SlotResult
from specoffload.server.engine.messages import (
    ChatJob,
    CompletionJob,
    GeneratingJob,
    InfillJob,
    Prompt,
    TextWithImages,
)
from specoffload.session.images import PromptImages

if TYPE_CHECKING:  # the API process has no engine
    import numpy as np
    from numpy.typing import NDArray

    from specoffload.session.session import Session


class PromptTooLong(DoesNotFit):
    """The context has no room for the prompt and an answer. `n_prompt_tokens` is for llama-server's
    form of this error."""

    def __init__(self, n_prompt_tokens: int, n_ctx: int, *, at_least: bool = False) -> None:
        """`at_least`: the text was not tokenised, and has at least this many tokens."""
        super().__init__(
            f"the prompt has {'at least ' * at_least}{n_prompt_tokens} tokens, the context {n_ctx},"
            " and the answer needs at least one: shorten the prompt or raise --ctx-size"
        )
        self.n_prompt_tokens, self.is_lower_bound = n_prompt_tokens, at_least


class TextTooLong(DoesNotFit):
    """A text has more tokens than can be embedded at once."""

    def __init__(self, n_tokens: int, n_most: int) -> None:
        super().__init__(
            f"a text of {n_tokens} tokens cannot be embedded: at most {n_most} are read at once; "
            "raise --ubatch-size"
        )
        self.n_tokens, self.n_most = n_tokens, n_most


class Embedded(NamedTuple):
    """The embedding of one text: float32 [1, width] if pooled, else [n_tokens, width]."""

    rows: NDArray[np.float32]
    n_tokens: int
    is_pooled: bool


def tokenize(session: Session, text: str, add_special: bool, parse_special: bool) -> list[int]:
    check_text(text, session.card)
    return session.tokenize(text, add_special=add_special, parse_special=parse_special)


def tokenize_in_pieces(
    session: Session, text: str, add_special: bool, parse_special: bool
) -> list[tuple[int, bytes]]:
    """Return the token ids of `text`, each with the bytes of its piece."""
    ids = tokenize(session, text, add_special, parse_special)
    return [(id_, session.piece(id_)) for id_ in ids]


def detokenize(session: Session, tokens: Sequence[int]) -> str:
    check_ids(tokens, session.card.n_vocab)
    return session.detokenize(tokens)


def embed(session: Session, prompt: Prompt) -> Embedded:
    """Return the embedding of `prompt`, which has no images.

    Raises BadRequest, DoesNotFit or NotSupported.
    """
    tokens = _tokens(session, prompt)
    if not tokens:
        raise BadRequest("the input is empty: at least one token is needed")
    check_ids(tokens, session.card.n_vocab)
    if session.most_embedded is not None and len(tokens) > session.most_embedded:
        raise TextTooLong(len(tokens), session.most_embedded)
    rows, is_pooled = session.embed(tokens)
    return Embedded(rows, len(tokens), is_pooled)


def counters(session: Session) -> dict[str, float]:
    return dict(session.counters())


def slots(session: Session) -> tuple[SlotInfo, ...]:
    return session.slots()


def change_slot(session: Session, number: int, action: SlotAction, filename: str) -> SlotResult:
    return session.change_slot(number, action, filename)


def prompt_tokens(session: Session, job: GeneratingJob) -> list[int]:
    """Return the prompt tokens of a job. Raises BadRequest, DoesNotFit or NotSupported."""
    card = session.card
    if isinstance(job, ChatJob):
        tokens = chat_tokens(session, job.text, job.images)
    elif isinstance(job, InfillJob):
        fill = job.fill
        for text in (fill.prefix, fill.suffix, fill.prompt, *(text for _, text in fill.extra)):
            check_text(text, card)
        tokens = session.fill_tokens(fill, job.options)
    else:
        tokens = _tokens(session, job.prompt)
    if not tokens:
        raise BadRequest("the prompt is empty: at least one token is needed")
    if not _has_images(job):
        check_ids(tokens, card.n_vocab)
    if len(tokens) >= card.n_ctx:
        raise PromptTooLong(len(tokens), card.n_ctx)
    return tokens


def _has_images(job: GeneratingJob) -> bool:
    if isinstance(job, ChatJob):
        return job.images is not None
    return isinstance(job, CompletionJob) and isinstance(job.prompt, TextWithImages)


def chat_tokens(session: Session, text: str, images: PromptImages | None) -> list[int]:
    """Return the tokens of a rendered conversation, whose template wrote its special tokens.

    Raises BadRequest for a file that is no image, and if the template left an image out.
    """
    if images is None:
        return tokenize(session, text, add_special=False, parse_special=True)
    check_text(text, session.card)
    return session.image_prompt(images.parts(text), add_special=False)


def kept_places(session: Session, job: ChatJob, tokens: Sequence[int]) -> tuple[int, ...]:
    """Return how many of the prompt's tokens end before or at each of `job.cache_ends`, ascending.

    `tokens` are those of the job's prompt. A place between two images is left out if an image takes
    several groups of places, as tiles do.
    """
    from specoffload.slots.choosing import common  # the API process has no slots

    starts = [0, *(span.end for span in image_spans(tokens))]  # of the texts before and after
    n_texts = 1 if job.images is None else len(job.images.files) + 1
    places = set()
    for end in job.cache_ends:
        texts = [job.text[:end]]
        if job.images is not None:
            texts = texts[0].split(job.images.marker)
        is_last = len(texts) == n_texts
        if not is_last and len(texts) > 1 and len(starts) != n_texts:
            continue
        start = starts[-1] if is_last else starts[len(texts) - 1]
        before = session.tokenize(texts[-1], add_special=False, parse_special=True)
        places.add(start + common(before, tokens[start:]))
    return tuple(sorted(places - {0}))


def count_tokens(session: Session, text: str, images: PromptImages | None) -> int:
    return len(chat_tokens(session, text, images))


def check_fits(session: Session, text: str, images: PromptImages, add_special: bool) -> None:
    """Raise PromptTooLong if the context has no room for the prompt with images of these sizes."""
    check_text(text, session.card)
    tokens = session.image_prompt(images.parts(text), add_special=add_special)
    if len(tokens) >= session.card.n_ctx:
        raise PromptTooLong(len(tokens), session.card.n_ctx)


def _tokens(session: Session, prompt: Prompt) -> list[int]:
    if isinstance(prompt, TextWithImages):
        check_text(prompt.text, session.card)
        return session.image_prompt(prompt.images.parts(prompt.text), add_special=True)
    tokens: list[int] = []
    for at, part in enumerate([prompt] if isinstance(prompt, str) else prompt):
        if isinstance(part, str):
            tokens += tokenize(session, part, add_special=at == 0, parse_special=True)
        else:
            tokens.append(part)
    return tokens


def check_text(text: str, card: ModelCard) -> None:
    """Raise PromptTooLong if the text exceeds the context even with the longest tokens.

    Very long texts do not reach libllama, because it takes quadratic time to find special tokens.
    """
    n_bytes = len(text.encode())
    if n_bytes > card.n_ctx * card.longest_token_bytes:
        n_tokens = -(-n_bytes // card.longest_token_bytes)
        raise PromptTooLong(n_tokens, card.n_ctx, at_least=True)


def check_ids(tokens: Sequence[int], n_vocab: int) -> None:
    """Raise BadRequest for an id outside the vocabulary."""
    for at, token in enumerate(tokens):
        if not 0 <= token < n_vocab:
            raise BadRequest(
                f"prompt[{at}] is token {token}: the vocabulary has tokens 0 to {n_vocab - 1}"
            )
