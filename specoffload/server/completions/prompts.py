"""The prompts of a completion request, in all the forms that servers take. Pure."""

from __future__ import annotations

from dataclasses import replace

from offload.errors import BadRequest
from specoffload.server.api.wire import CompletionRequest
from specoffload.server.engine.messages import CompletionJob, GeneratingJob, InfillJob
from specoffload.session.generation import GenerateOptions
from specoffload.session.infill import Fill

MOST_ANSWERS = 1024  # of one request: each takes its turn, and memory until the last has come

Prompt = str | tuple[int | str, ...]


def prompts_of(given: object, name: str = "prompt") -> list[Prompt]:
    """A text, token ids, both in turn, or a list of such; `name` is the field's. Raises
    BadRequest."""
    if isinstance(given, str):
        return [_filled(given)]
    if not isinstance(given, list):
        raise BadRequest(f"{name} must be text, token ids, or a list of such")
    if not given:
        raise BadRequest("the prompt is empty: at least one token is needed")
    if any(isinstance(part, list) for part in given) or all(isinstance(p, str) for p in given):
        if len(given) > MOST_ANSWERS:
            raise BadRequest(f"{name}: {len(given)} texts; at most {MOST_ANSWERS} in a request")
        return [_prompt(f"{name}[{at}]", part) for at, part in enumerate(given)]
    return [_prompt(name, given)]


def _prompt(where: str, given: object) -> Prompt:
    if isinstance(given, str):
        return _filled(given)
    if not isinstance(given, list):
        raise BadRequest(f"{where} must be text or a list of token ids")
    return _filled(tuple(_part(f"{where}[{at}]", part) for at, part in enumerate(given)))


def _part(where: str, part: object) -> int | str:
    if isinstance(part, float) and part.is_integer():
        return int(part)
    if isinstance(part, bool) or not isinstance(part, int | str):
        raise BadRequest(f"{where} must be text or a token id")
    return part


def _filled(prompt: Prompt) -> Prompt:
    if not prompt:
        raise BadRequest("the prompt is empty: at least one token is needed")
    return prompt


def completion_jobs(
    request: CompletionRequest, options: GenerateOptions
) -> tuple[list[Prompt], list[GeneratingJob]]:
    """The prompts, and a job for each, with its `n` answers.

    Raises BadRequest.
    """
    prompts = prompts_of(request.prompt)
    n = request.n or 1
    if n * len(prompts) > MOST_ANSWERS:
        raise BadRequest(f"{len(prompts)} prompts times n {n}: at most {MOST_ANSWERS} answers")
    asked = replace(options, n=n)
    return prompts, [_job(request, prompt, asked) for prompt in prompts]


def _job(request: CompletionRequest, prompt: Prompt, options: GenerateOptions) -> GeneratingJob:
    if not request.suffix:
        return CompletionJob(prompt, options, with_text=bool(request.echo))
    if not isinstance(prompt, str):
        raise BadRequest("suffix needs the prompt as text, not as token ids")
    if request.echo:
        raise BadRequest("suffix and echo exclude each other: send one of them")
    return InfillJob(Fill(prompt, request.suffix), options)
