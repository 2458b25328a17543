"""`specoffload serve` with several models: lists them, and opens one as its own server would."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from offload.errors import DeviceFailed
from specoffload import report
from specoffload.commands.serve import ServedAs, open_session
from specoffload.config.command_line import CommandLine, Given, OptionField, read_command_line
from specoffload.config.environment import Environment
from specoffload.config.flag import HIDDEN
from specoffload.config.options import Options, ServeOptions
from specoffload.config.presets import EVERY, UNNAMED, Preset, notes_on, read_preset_file
from specoffload.config.resolution import Config
from specoffload.errors import KNOWN, UsageError
from specoffload.models.folder import models_of, projector_beside
from specoffload.models.names import model_in, read_hub_name
from specoffload.server.engine.supervisor import stamp_of
from specoffload.server.log import LogSettings, ServerLog
from specoffload.server.router.model import DEFAULT_STOP_TIMEOUT_S, Entry
from specoffload.server.router.planning import check_one, limited, plan_all
from specoffload.server.router.run import ModelParts, serve_models
from specoffload.server.router.sharing import Share, SharedBytes, share
from specoffload.server.unwaited import never_wait_for_output
from specoffload.slots.prompt_shelf import PromptShelf

_MODEL, _REPO, _ALIAS = (Options, "model"), (Options, "hf_repo"), (Options, "alias")
_DRAFT, _PROJECTOR = (Options, "draft"), (Options, "mmproj")
_PROJECTOR_URL, _PROJECTOR_AUTO = (Options, "mmproj_url"), (Options, "mmproj_auto")
_MODELS = (ServeOptions, "models")


def serve_several(line: CommandLine, served_as: Callable[..., ServedAs]) -> None:
    """Serve the models that a command line names, until stopped.

    `served_as` resolves the command line of one model, for its header alone if asked to. Raises
    UsageError, and SystemExit with a non-zero exit code.
    """
    serving = line.of(ServeOptions)
    options = line.options
    for place in (_MODEL, _REPO):
        if place in line.given:
            one = line.given[place]
            raise UsageError(
                f"{one.name} {one.value} names one model, and {_source(line)} several: leave out "
                "one of the two"
            )
    never_wait_for_output()
    if options.verbose or options.library_log:
        report.be_verbose(library_level=options.library_log)
    settings = LogSettings(serving.log_file, serving.log_timestamps, serving.log_prefix)
    log = ServerLog(settings)
    log.follow_warnings()
    catalogue = _Catalogue(line)
    entries = catalogue.entries()
    for words in catalogue.idle:
        log.note(words)
    for entry in entries:
        log.say(f"model {entry.name} ({entry.source})")

    def parts_of(entry: Entry, share: Share | None, shelf: PromptShelf | None) -> ModelParts:
        served = served_as(_line(entry))
        config = served.config
        for words in config.notes:
            log.note(f"{entry.name}: {words}")
        if share is not None:
            config, told = _with_share(config, share)
            log.say(f"{entry.name}: {told}")
        factory = functools.partial(
            open_session,
            config,
            report.is_verbose(),
            report.library_log_level(),
            settings,
            shelf=shelf,
        )
        workers = config.remote.workers if config.uses_workers else ()
        return ModelParts(factory, served.chat, served.defaults, workers)

    def plan(entries: Sequence[Entry]) -> SharedBytes:
        configs = {}
        for entry in entries:
            try:
                configs[entry.name] = served_as(_line(entry), header_only=True).config
            except KNOWN as e:  # its start will say it again
                log.note(f"{entry.name} has no plan: {e}")
        planned = plan_all(configs)
        for words in planned.reasons:
            log.note(words)
        mib = serving.cache_ram_mib
        shelf_bytes = planned.room.host_bytes if mib < 0 else mib << 20
        sharing = share(
            planned.needs, planned.room, serving.models_max, shelf_bytes, planned.devices
        )
        for name in sorted(planned.needs.keys() - sharing.device_bytes.keys()):
            log.say(f"{name} fits beside no other model, so it is opened alone")
        return sharing

    whole: dict[str, object] = {}  # stamps of files that could be opened, by model

    def check(entry: Entry) -> None:
        config = served_as(_line(entry)).config
        stamps = [
            stamp_of(file) for file in (config.model, config.spec.draft, config.mmproj) if file
        ]
        if whole.get(entry.name) == (entry, stamps):
            return
        problem = check_one(config)
        if problem is not None:
            raise (UsageError if problem.exit_code == 2 else DeviceFailed)(problem.message)
        whole[entry.name] = entry, stamps

    try:
        code = serve_models(catalogue.entries, parts_of, plan, check, serving, log=log)
    except KNOWN as e:
        log.error(e)
        raise
    if code:
        raise SystemExit(code)


def _line(entry: Entry) -> CommandLine:
    assert isinstance(entry.line, CommandLine)
    return entry.line


def _with_share(config: Config, share: Share) -> tuple[Config, str]:
    """Return the configuration with a model's share of the memory, and a sentence on the share."""
    told = []
    if share.each_device_bytes:
        each = " and ".join(map(report.bytes_text, share.each_device_bytes))
        several = len(share.each_device_bytes) > 1
        told.append(f"takes up to {each} of the device{'s' * several}")
        config = limited(config, share.each_device_bytes)
    wanted = config.cache_ram_bytes
    if wanted is None or share.prompt_bytes < wanted:
        config = replace(config, cache_ram_bytes=share.prompt_bytes)
    told.append(
        f"keeps up to {report.bytes_text(config.cache_ram_bytes or 0)} of prompts (--cache-ram)"
    )
    return config, ", ".join(told)


def _source(line: CommandLine) -> str:
    names = line.names(ServeOptions, "models_dir", "models_preset")
    return names[0] if names else " ".join(map(str, line.of(ServeOptions).models))


class _Catalogue:
    """The models of a command line.

    `idle` has a sentence for each key of the preset file without effect, or with another value, and
    for each file of the folder that is no model.
    """

    def __init__(self, line: CommandLine) -> None:
        self._line = line
        self.idle: list[str] = []

    def entries(self) -> list[Entry]:
        """Read the folder and the presets (again). Raises UsageError."""
        serving = self._line.of(ServeOptions)
        presets: Mapping[str, Preset] = {}
        if serving.models_preset is not None:
            presets = read_preset_file(serving.models_preset)
        self.idle = notes_on(presets)
        places: dict[str, dict[OptionField, Given]] = {}
        sources: dict[str, str] = {}
        owners: dict[str, str] = {}  # names of models by aliases that their folders give
        for path in serving.models:
            name = _name_of(path)
            if name in places:
                raise UsageError(f"model '{name}' appears multiple times")
            places[name] = {_MODEL: Given(path, str(path))}
            sources[name] = "models_dir"
        if serving.models_dir is not None:
            listed = models_of(serving.models_dir)
            self.idle += [
                f"--models-dir leaves out {file}: {reason}"
                for file, reason in listed.left_out.items()
            ]
            for model in listed.models:
                if model.name in places:
                    raise UsageError(f"model '{model.name}' appears multiple times")
                for alias in model.aliases:
                    owners[alias] = model.name
                places[model.name] = {_MODEL: Given(model.model, "--models-dir")}
                for place, file in ((_DRAFT, model.draft), (_PROJECTOR, model.projector)):
                    if file is not None:
                        places[model.name][place] = Given(file, "--models-dir")
                sources[model.name] = "models_dir"
        presets = _by_names(presets, owners)
        for name in presets:
            if name != EVERY:
                places.setdefault(name, {})
                sources[name] = "preset"
        every = presets.get(EVERY, Preset())
        entries = []
        for name, own in sorted(places.items()):
            preset = presets.get(name, Preset()).over(every)
            line = _line_of(self._line, name, own, preset)
            aliases = [alias for alias, owner in owners.items() if owner == name]
            entries.append(_entry(name, sources[name], line, preset, aliases))
        _check_names(entries)
        if not entries:
            raise UsageError(f"{_source(self._line)}: no models there")
        return entries


def _by_names(presets: Mapping[str, Preset], owners: Mapping[str, str]) -> dict[str, Preset]:
    """Return presets by the names of models. A section may have a folder's name instead."""
    by_model: dict[str, Preset] = {}
    for section, preset in presets.items():
        name = owners.get(section, section)
        if name in by_model:
            raise UsageError(f"the presets of {section!r} and {name!r} are both for {name!r}")
        by_model[name] = preset
    return by_model


def _name_of(path: Path) -> str:
    is_file = path.suffix == ".gguf" or path.is_dir()
    return path.name.removesuffix(".gguf") if is_file else str(path)


def _line_of(
    line: CommandLine, name: str, own: Mapping[OptionField, Given], preset: Preset
) -> CommandLine:
    """Return the command line of a model's own server.

    Typed flags take precedence over the preset, and the preset over variables.
    """
    try:
        read = read_command_line("serve", preset.words, replace(Environment(), variables={}))
    except UsageError as e:
        raise UsageError(f"preset {name!r}: {e}") from None
    of_server = {_MODELS, _ALIAS}
    typed = {p: g for p, g in line.given.items() if p not in of_server and g.name.startswith("-")}
    variables = {p: g for p, g in line.given.items() if p not in {*of_server, *typed}}
    given = {**variables, **own, **read.given, **typed}
    if read.given.keys() & {_MODEL, _REPO}:  # the preset names another file than the folder
        for place in own.keys() - read.given.keys():
            del given[place]
    auto = given.get(_PROJECTOR_AUTO)
    if auto is not None and not auto.value and given.get(_PROJECTOR) is own.get(_PROJECTOR):
        given.pop(_PROJECTOR, None)  # --no-mmproj
    if not given.keys() & {_MODEL, _REPO}:
        if read_hub_name(name) is None:
            words = f"preset {name!r} names no model: add model = FILE or hf-repo = user/repo:quant"
            if name == UNNAMED:
                words += (
                    f"; lines before the first section are of this preset, and those for all "
                    f"models belong below [{EVERY}]"
                )
            raise UsageError(words)
        given[_REPO] = Given(name, f"preset {name}")
    given[_ALIAS] = Given(name, "the model's name")
    left_out = [(key, f"it is the server's own, not the model {name}'s") for key in preset.left_out]
    return replace(
        line,
        given=given,
        notes=(*line.notes, *read.notes),
        ignored=(*line.ignored, *read.ignored, *left_out),
        words=preset.words,
    )


def _entry(
    name: str, source: str, line: CommandLine, preset: Preset, aliases: Sequence[str]
) -> Entry:
    flag = "--model" if _MODEL in line.given else "--hf-repo"
    stop_s = preset.stop_timeout_s
    tags = preset.tags or tuple(filter(None, (line.of(ServeOptions).tags or "").split(",")))
    lines = (f"{key} = {value}\n" for key, value in preset.shown.items())
    return Entry(
        name,
        (flag, HIDDEN, *preset.shown_words),
        source,
        tags=tags,
        preset=f"[{name}]\n{''.join(lines)}" if preset.shown else "",
        loads_on_startup=bool(preset.loads_on_startup),
        stop_timeout_s=DEFAULT_STOP_TIMEOUT_S if stop_s is None else stop_s,
        aliases=tuple(dict.fromkeys((*preset.aliases, *aliases))),
        reads_images=_reads_images(line),
        line=line,
    )


def _reads_images(line: CommandLine) -> bool:
    """True if the line of a model names a projector, or takes the one beside its file.

    False for a model of the hub without `--mmproj`, as nothing is fetched for a list.
    """
    if line.given.keys() & {_PROJECTOR, _PROJECTOR_URL}:
        return True
    auto, path = line.given.get(_PROJECTOR_AUTO), line.options.model
    if auto is None or not auto.value or path is None or not path.exists():
        return False
    with suppress(UsageError, OSError):
        return projector_beside(model_in(path) if path.is_dir() else path).projector is not None
    return False


def _check_names(entries: Sequence[Entry]) -> None:
    """Raise UsageError if an alias is the name or an alias of another model."""
    owners = {entry.name: entry.name for entry in entries}
    for entry in entries:
        for alias in entry.aliases:
            owner = owners.setdefault(alias, entry.name)
            if owner != entry.name:
                raise UsageError(
                    f"alias '{alias}' for model '{entry.name}' conflicts with model '{owner}'"
                )
