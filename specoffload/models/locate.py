"""Finds the file of a model by its path or name, before anything is opened."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from specoffload import report
from specoffload.config.environment import Environment
from specoffload.config.options import Options
from specoffload.errors import UsageError
from specoffload.models.local import find_ollama
from specoffload.models.names import HubName, OllamaName, model_in, read_hub_name, read_name


def located(options: Options, environment: Environment) -> Options:
    """Returns `options` with files for `model` and `draft`. Missing files are fetched.

    A model that is found by a name gets this name as alias. Raises UsageError or FetchFailed.
    """
    words = (options.model, options.hf_repo, "model", "hf_repo")
    model, name = _found(words, options.hf_file, options, environment)
    draft, _ = _found((options.draft, options.hf_repo_draft, "draft", "hf_repo_draft"), None,
                      options, environment)  # fmt: skip
    if options.hf_file is not None and options.hf_repo is None:
        raise UsageError(f"{options.name('hf_file')} {options.hf_file} needs -hf user/repo")
    named = {
        field: options.given[repo]
        for field, repo in (("model", "hf_repo"), ("draft", "hf_repo_draft"))
        if repo in options.given
    }
    return replace(
        options,
        model=model,
        draft=draft,
        given={**options.given, **named},
        alias=options.alias or (name.rpartition("/")[2] if name else None),
    )


def _found(
    words: tuple[Path | None, str | None, str, str],
    file: str | None,
    options: Options,
    environment: Environment,
) -> tuple[Path | None, str]:
    """The file of one model, and the name that it was found by, if any."""
    path, repo, field, repo_field = words
    if repo is not None:
        if path is not None:
            raise UsageError(
                f"{options.name(repo_field)} {repo} and {options.name(field)} {path} name two "
                "models: give one of them"
            )
        named = read_hub_name(repo, file or "")
        if named is None:
            raise UsageError(f"{options.name(repo_field)} {repo}: expected user/repo[:quant]")
        return _fetched(named, options), str(named)
    if path is None:
        return None, ""
    if path.is_dir():
        return model_in(path), ""
    if path.exists() or (len(path.parts) > 1 and path.parent.is_dir()):
        return path, ""
    found = read_name(str(path))
    match found:
        case HubName():
            return _fetched(found, options), str(found)
        case OllamaName():
            return find_ollama(found, environment.ollama_folders), str(found)
    return path, ""  # opening it says what is wrong


def _fetched(name: HubName, options: Options) -> Path:
    from specoffload.models.hub import fetch

    path = fetch(name, offline=options.offline, token=options.hf_token)
    report.detail(f"{name}: {path}")
    return path
