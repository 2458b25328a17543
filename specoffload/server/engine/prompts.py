"""From a job to its prompt's tokens, refused before much is computed."""

from __future__ import annotations

from offload.errors import BadRequest, DoesNotFit
from specoffload.server.engine.messages import ChatJob, GeneratingJob, InfillJob
from specoffload.session.generation import Generator, ModelCard


class PromptTooLong(DoesNotFit):
    """Carries the two numbers that llama-server's error shape has fields for."""

    def __init__(self, n_prompt_tokens: int, n_ctx: int, *, at_least: bool = False) -> None:
        """`at_least`: the text was not even made tokens, so many it has at the least."""
        super().__init__(
            f"the prompt has {'at least ' * at_least}{n_prompt_tokens} tokens, the context {n_ctx},"
            " and the answer needs at least one: shorten the prompt or raise --ctx-size"
        )
        self.n_prompt_tokens = n_prompt_tokens


def check_text(text: str, card: ModelCard) -> None:
    """Raises PromptTooLong for a text longer than the context, were each token the longest.

    libllama takes quadratic time and much memory to find special tokens in long texts.
    """
    n_bytes = len(text.encode())
    if n_bytes > card.n_ctx * card.longest_token_bytes:
        n_tokens = -(-n_bytes // card.longest_token_bytes)
        raise PromptTooLong(n_tokens, card.n_ctx, at_least=True)


def prompt_tokens(generator: Generator, job: GeneratingJob) -> list[int]:
    """A template writes its own special tokens, so none is added to what it returns.

    Raises BadRequest, DoesNotFit or NotSupported.
    """
    card = generator.card
    if isinstance(job, ChatJob):
        check_text(job.text, card)
        tokens = generator.tokenize(job.text, add_special=False, parse_special=True)
    elif isinstance(job, InfillJob):
        for text in (job.fill.prefix, job.fill.suffix, job.fill.prompt):
            check_text(text, card)
        for _, text in job.fill.extra:
            check_text(text, card)
        tokens = generator.fill_tokens(job.fill, job.options)
    else:
        tokens = _mixed_tokens(generator, card, job.prompt)
    _check(tokens, card.n_vocab, card.n_ctx)
    return tokens


def text_tokens(generator: Generator, prompt: str | tuple[int | str, ...]) -> list[int]:
    """Of a text that is read alone. Raises BadRequest or DoesNotFit."""
    card = generator.card
    tokens = _mixed_tokens(generator, card, prompt)
    if not tokens:
        raise BadRequest("the input is empty: at least one token is needed")
    check_ids(tokens, card.n_vocab)
    return tokens


def _mixed_tokens(
    generator: Generator, card: ModelCard, prompt: str | tuple[int | str, ...]
) -> list[int]:
    if isinstance(prompt, str):
        check_text(prompt, card)
        return generator.tokenize(prompt, add_special=True, parse_special=True)
    tokens: list[int] = []
    for at, part in enumerate(prompt):
        if isinstance(part, str):
            check_text(part, card)
            tokens += generator.tokenize(part, add_special=at == 0, parse_special=True)
        else:
            tokens.append(part)
    return tokens


def _check(tokens: list[int], n_vocab: int, n_ctx: int) -> None:
    if not tokens:
        raise BadRequest("the prompt is empty: at least one token is needed")
    check_ids(tokens, n_vocab)
    if len(tokens) >= n_ctx:
        raise PromptTooLong(len(tokens), n_ctx)


def check_ids(tokens: list[int] | tuple[int, ...], n_vocab: int) -> None:
    """Raises BadRequest for an id that is no token's."""
    for at, token in enumerate(tokens):
        if not 0 <= token < n_vocab:
            raise BadRequest(
                f"prompt[{at}] is token {token}: the vocabulary has tokens 0 to {n_vocab - 1}"
            )
