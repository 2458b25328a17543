"""`specoffload run`: answers or continues one text."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from offload.regular_file import check_regular
from specdec.user_path import user_path
from specdec.whole_file import decoded, real_path
from specoffload import report
from specoffload.chat.conversation import Message
from specoffload.config.flag import utf8_text
from specoffload.config.options import ChatOptions, RunOptions
from specoffload.config.resolution import Config
from specoffload.errors import NotStored, UsageError
from specoffload.generation.generation import GenerateOptions, TextPiece
from specoffload.models.names import may_name_model
from specoffload.opening.header import target_facts
from specoffload.output_file import check_output
from specoffload.session.session import Session
from specoffload.terminal.chat import limit_words
from specoffload.terminal.command import answer_text, as_data, opened, say_how_it_went, with_bar

_NAME = re.compile(r"(?=.*[\d./:-])[\w.-]+([/:][\w.-]+)*")


def split_model_and_prompt(
    word: str | None, model: Path | None, prompt: str | None
) -> tuple[Path | None, str | None]:
    """Decide whether the positional argument is the model or the prompt. Returns (model, prompt).

    `model` and `prompt` are the values of flags. A word that looks like a model's name is never
    taken for a prompt. Raises UsageError if one is given twice, or the word could be either.
    """
    if word is None:
        return model, prompt
    if model is None and may_name_model(word):
        return user_path(word), prompt
    if prompt is not None:
        raise UsageError(
            f"Unexpected {word!r}: it is not a .gguf file, and a prompt was given already"
        )
    if model is None and _NAME.fullmatch(word):
        raise UsageError(
            f"there is no file {word!r}; a model is a .gguf file, user/repo of the hub or "
            f"ollama:{word}; -p {word!r} has the embedded pair continue it as text"
        )
    return model, word


_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|[nrt'\"\\])")
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}


def unescaped(text: str) -> str:
    """`text` with llama.cpp's escapes replaced. Other backslashes stay."""

    def read(match: re.Match[str]) -> str:
        what = match[1]
        return chr(int(what[1:], 16)) if what[0] == "x" else _ESCAPED.get(what, what)

    return _ESCAPE.sub(read, text)


def read_prompt(words: str | None, *, escape: bool = False) -> str:
    """The prompt's text. Raises UsageError if there is none, or if it is not UTF-8."""
    if not words:
        raise UsageError('the prompt is empty: specoffload run "def fibonacci(n):", or -p TEXT')
    try:
        words = utf8_text(words)
    except ValueError as e:
        raise UsageError(f"the prompt {e}") from None
    return unescaped(words) if escape else words


def piped_text() -> str | None:
    """All of standard input if it is a pipe or a file; None if it is a terminal or empty.

    Raises UsageError if it is not UTF-8.
    """
    if sys.stdin is None or sys.stdin.isatty():
        return None
    try:
        content = sys.stdin.buffer.read()
        text = decoded(content, "standard input").replace("\r\n", "\n").replace("\r", "\n")
        return text.rstrip("\n") or None
    except OSError as e:
        raise UsageError(f"standard input cannot be read: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise UsageError(f"standard input cannot be read as UTF-8 text ({e})") from e


def run_prompt(
    config: Config,
    prompt_text: Callable[[], str],
    sampling: GenerateOptions,
    own: RunOptions,
    chat: ChatOptions,
    *,
    has_limit: bool,
) -> None:
    """Answer a text with the model's chat template, or continue it, and print statistics.

    `own.conversation` is True to answer, False to continue, and None to answer if there is a
    template. `own.n_predict` limits a continued text. It limits an answer only with `has_limit`,
    because answers end by themselves. Errors of the model file are raised before
    errors of the prompt.
    """

    target_facts(config)
    prompt = prompt_text()
    if own.prompt_cache is not None:
        _check_prompt_cache(own.prompt_cache, is_written=not own.prompt_cache_ro)
    limited = replace(sampling, n_predict=own.n_predict)
    with opened(config) as session:
        answers = own.conversation
        if answers is None:
            answers = chat.template is not None or bool(session.card.chat_template)
            if not answers and not config.is_demo:
                report.detail("the model file has no chat template: the text is continued")
        _use_kept_prompt(session, own.prompt_cache)
        if answers:
            last = answer_text(
                session, prompt, limited if has_limit else sampling, chat, has_limit=has_limit
            )
        else:
            if chat.system is not None:
                report.note("--system-prompt ignored: the text is continued as it is")
            last = _continue(session, prompt, limited, has_limit=has_limit)
        if own.prompt_cache is not None and not own.prompt_cache_ro and last.stats is not None:
            n_kept = None if own.prompt_cache_all else last.stats.n_prompt_tokens
            _keep_prompt(session, own.prompt_cache, n_kept)


def _check_prompt_cache(file: Path, *, is_written: bool) -> None:
    """Raise UsageError before the model is read if `file` cannot be read or written."""
    if is_written:
        check_output("--prompt-cache", file)
    try:
        if file.exists():
            check_regular(file)
    except OSError as e:
        raise UsageError(f"--prompt-cache {file}: {e.strerror or e}") from e


def _use_kept_prompt(session: Session, file: Path | None) -> None:
    """Load the KV cache in `file`, if that exists. Raises UsageError or BadRequest."""
    try:
        if file is not None and file.exists():
            session.batcher.slots[0].read(file, session.batcher.make_room)
    except OSError as e:
        raise UsageError(f"--prompt-cache {file}: {e.strerror or e}") from e


def _keep_prompt(session: Session, file: Path, n_tokens: int | None) -> None:
    """Write the KV cache of the first `n_tokens` tokens, or of all if None, to `file`.

    The last of these tokens is left out, because it is evaluated again in any case. Raises
    NotStored if the file cannot be written.
    """
    slot = session.batcher.slots[0]
    if n_tokens is not None:
        slot.reuse(slot.tokens[:n_tokens])
    try:
        if slot.tokens:  # empty after a prompt of one token
            # A link stays, and the file behind it is replaced.
            slot.write(real_path(file))
    except OSError as e:
        raise NotStored(f"--prompt-cache {file}: cannot be written ({e.strerror or e})") from e


def _continue(
    session: Session, prompt: str, options: GenerateOptions, *, has_limit: bool
) -> TextPiece:
    n_prompt = len(session.tokenize(prompt, add_special=True, parse_special=True))
    text, last = "", TextPiece("")
    if report.console().is_terminal:
        report.text(prompt)
    with report.log_lines_held():
        for piece in with_bar(session.generate(prompt, options), n_prompt, session):
            text, last = text + piece.text, piece
            report.text(piece.text)
        report.text("\n")
    if last.finish_reason == "length" and not has_limit:
        report.note(limit_words(last, options))
    say_how_it_went(last)
    report.data(as_data(session, Message(text), last))
    return last
