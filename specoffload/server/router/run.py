"""Runs the server of several models, and returns the exit code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from offload.remote.address import Address
from specoffload.chat.conversation import ChatSettings
from specoffload.config.options import ServeOptions
from specoffload.generation.generation import GenerateOptions
from specoffload.server.api.context import ServerContext
from specoffload.server.api.shared import SharedParts
from specoffload.server.engine.process import Factory
from specoffload.server.log import ServerLog
from specoffload.server.renderer import Renderer
from specoffload.server.router.model import Entry, RoutedEngine, Served
from specoffload.server.router.pool import ModelPool
from specoffload.server.router.several import SeveralModels
from specoffload.server.router.sharing import Share, SharedBytes
from specoffload.server.router.shelves import Shelves
from specoffload.server.run import media_rules, serve_parts
from specoffload.slots.prompt_shelf import PromptShelf


class ModelParts(NamedTuple):
    """The parts from which a model's engine and context are made."""

    factory: Factory
    chat: ChatSettings | None = None
    defaults: GenerateOptions | None = None
    workers: Sequence[Address] = ()


def serve_models(
    entries: Callable[[], Sequence[Entry]],
    parts_of: Callable[[Entry, Share | None, PromptShelf | None], ModelParts],
    plan: Callable[[Sequence[Entry]], SharedBytes],
    check: Callable[[Entry], None],
    options: ServeOptions,
    *,
    log: ServerLog,
) -> int:
    """Serve several models; returns as `serve` does. A model that fails does not end the server.

    `entries` reads the list of models. `parts_of` is called in a thread when a model is first used,
    with its share of the memory, and the shelf for its prompts. `plan` decides these shares.
    `check` raises if a model cannot be opened even alone.
    """
    shelves = Shelves(None if options.cache_ram_mib < 0 else options.cache_ram_mib << 20)

    def planned(entries: Sequence[Entry]) -> SharedBytes:
        sharing = plan(entries)
        shelves.limit_bytes = sharing.shelf_bytes
        return sharing

    def parts(renderer: Renderer) -> tuple[SeveralModels, ModelPool]:
        shared, media = SharedParts(), media_rules(options)

        def make(entry: Entry, share: Share | None) -> Served:
            shelf = shelves.of(entry)
            own = parts_of(entry, share, None if shelf is None else shelf.file)
            engine = RoutedEngine(
                own.factory,
                max_queue=options.max_queue,
                workers=own.workers,
                chat=own.chat,
                say=lambda line: log.say(f"{entry.name}: {line}"),
            )
            engine.shelf = shelf
            context = ServerContext(
                engine, renderer, own.defaults, own.chat, media=media, shared=shared
            )
            return Served(engine, context)

        pool = ModelPool(
            entries(),
            make,
            plan=planned,
            check=check,
            most=options.models_max,
            idle_s=options.idle_s if options.idle_s >= 0 else None,
            most_waiting=options.max_queue + 1,
            say=log.say,
        )
        models = SeveralModels(
            pool,
            entries=entries,
            on_list=shelves.keep_only,
            shared=shared,
            has_metrics=options.metrics,
            autoload=options.models_autoload,
        )
        return models, pool

    return serve_parts(parts, options, log)
