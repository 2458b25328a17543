"""`specoffload bench --agent`: does a model solve as many tasks with drafts as without them?

Each way of decoding is a server of its own, with its engine process. The ways are no drafts, each
drafter that the command line would use alone, and all of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

from offload.errors import OffloadError
from specdec.options import DrafterName
from specoffload import report
from specoffload.bench.agent import PLAIN, PlayedWay, play_all, verdict
from specoffload.bench.agent_tasks import TASKS
from specoffload.bench.openai_server import OpenAIServer
from specoffload.commands.bench import commit, machine
from specoffload.commands.bench_drafters import TOGETHER, drafters_of, drafting
from specoffload.commands.bench_serving import serving
from specoffload.config.options import BenchOptions
from specoffload.config.resolution import Config
from specoffload.errors import UsageError

N_PREDICT = 512  # most tokens of an answer, unless -n is given
StartedServer = AbstractContextManager[str]  # yields the address


def bench_agent(config: Config, own: BenchOptions, n_predict: int) -> None:
    """Play the tasks in each way of decoding `config`. Raises SystemExit(1) if numbers differ.

    A way that cannot be opened, or whose server ends, does not pass either.
    """
    names = drafters_of(config)
    ways = {PLAIN: serving(drafting(config, (DrafterName.NONE,)))}
    ways |= {str(name): serving(drafting(config, (name,))) for name in names}
    if len(names) > 1:
        ways[TOGETHER] = serving(drafting(config, names))
    model = config.alias or config.model.stem
    _play_and_show(ways, own, n_predict, {"model": config.model.name, "shown": model})


def bench_agent_at(own: BenchOptions, n_predict: int) -> None:
    """Play the tasks at each of the given addresses. Raises UsageError, and SystemExit(1)."""
    ways: dict[str, StartedServer] = {
        url: nullcontext(url) for url in dict.fromkeys(own.agent_urls)
    }
    _play_and_show(ways, own, n_predict, {"model": None, "shown": "the given servers"})


def _play_and_show(
    servers: Mapping[str, StartedServer], own: BenchOptions, n_predict: int, told: Mapping[str, Any]
) -> None:
    ways, failed = list[PlayedWay](), dict[str, str]()
    with report.progress("playing tasks") as show:
        for number, (name, server) in enumerate(servers.items()):
            try:
                with server as url:
                    client = OpenAIServer(url, n_predict, "--agent")
                    ask = partial(client.call_tools, client.model(), own.tool_choice)
                    ways.append(play_all(name, TASKS, ask, _share(show, number, len(servers))))
            except (OffloadError, UsageError) as e:
                if not ways:
                    raise
                failed[name] = str(e)
    verdict_of_ways = verdict(ways, failed)
    _show(ways, str(told["shown"]))
    for sentence in verdict_of_ways.sentences:
        report.paragraph(sentence)
    report.data(
        {
            "agent": [_as_data(way, ways[0]) for way in ways],
            "failed": failed,
            "n_tasks": len(TASKS),
            "tool_choice": own.tool_choice,
            "passes": verdict_of_ways.passes,
            "sentences": verdict_of_ways.sentences,
            "machine": machine(), "commit": commit(), "model": told["model"],
        }
    )  # fmt: skip
    if not verdict_of_ways.passes:
        raise SystemExit(1)


def _share(show: Callable[[float], object], number: int, n: int) -> Callable[[float], object]:
    """Progress of way `number` of `n` ways, from its own share."""
    return lambda share: show((number + share) / n)


def _show(ways: Sequence[PlayedWay], model: str) -> None:
    heads = ("drafts by", "tasks solved", "valid calls", "same calls", "accepted drafts")
    report.table(f"{len(TASKS)} tasks with tools, by {model}", heads, list(_rows(ways)))


def _rows(ways: Sequence[PlayedWay]) -> Iterator[tuple[str, ...]]:
    for way in ways:
        yield (
            way.name,
            f"{way.n_solved} of {len(way.outcomes)}",
            f"{way.n_valid} of {way.n_calls}",
            "" if way is ways[0] else f"{way.n_same(ways[0])} of {len(way.outcomes)} tasks",
            f"{way.n_accepted} of {way.n_drafted}",
        )


def _as_data(way: PlayedWay, baseline: PlayedWay) -> dict[str, Any]:
    return {
        "name": way.name,
        "n_solved": way.n_solved,
        "n_calls": way.n_calls,
        "n_valid": way.n_valid,
        "n_same": way.n_same(baseline),
        "n_drafted": way.n_drafted,
        "n_accepted": way.n_accepted,
        "tasks": [asdict(outcome) for outcome in way.outcomes],
    }
