"""Changed graphs for a worker: each is computed or refused, and writes nowhere else.

The worker runs in this process, and its computing process has guards (`guarded_worker.py`). A graph
is recorded from a real client, changed at random, and sent on a connection of its own. The next
connection must be served. A refusal is one sentence. Every now and then the unchanged graph must
give the first answer again.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from unittest.mock import patch

from lab.attack import ATTACK, guarded_worker
from lab.attack.graph_changes import change, change_data
from lab.attack.outcome import Breach, Outcome
from lab.attack.rpc_messages import (
    GET,
    GRAPH,
    SET,
    Graph,
    Line,
    Recorded,
    moved_body,
    moved_to,
    record,
)
from lab.worker_operations import written
from offload.model_file import read_facts
from offload.plan.wanted import Wanted
from offload.remote.address import Address
from offload.remote.hello import LayersAsked, WorkerFacts, ask_for
from offload.schedule.splitter import stay
from offload.stream.options import StreamingOptions
from offload.worker.serving import WorkerOptions
from specoffload.server import worker as server_worker
from specoffload.server.worker import Worker
from specoffload.server.worker_gate import WorkerGate

# Presets, and tiny mixtures for operations that no preset has: states, an indexer, rows that a
# graph computes as floats, shared caches, streams and positions of several kinds.
MODELS = (
    *("deepseek-v3", "qwen3-30b-a3b", "gpt-oss-20b", "qwen3-next-80b-a3b"),
    *("granitehybrid", "deepseek32", "minimax-m3", "deepseek4", "lfm2moe", "kimi-linear"),
    *("gemma4", "qwen35moe"),
)
_DEVICE = "sim:vram=2MiB"
_WITNESS = 20  # tries between two unchanged graphs
_SPLIT_BLOCKS = 10  # the first blocks of an architecture, which a worker that splits gets as well
_MOST_LETTERS = 400  # characters of the longest sentence
_REFUSED = re.compile(r"error: a graph of \S+ was refused: \S.*")
_ASSERTED = "error: the computing process ended (exit code 1)"  # an assertion of ggml's own server


@dataclass
class _Served:
    """A guarded worker of this process, and what it said."""

    path: Path
    splits: bool = False  # the CPU computes missing experts
    lines: list[str] = field(default_factory=list)
    address: Address = Address("127.0.0.1", 0)

    @contextmanager
    def running(self) -> Iterator[_Served]:
        facts = read_facts(self.path)
        wanted = Wanted(hybrid=self.splits, plan_for_splits=self.splits)
        streaming = StreamingOptions(splitter=stay if self.splits else None)
        options = WorkerOptions(facts.path, _DEVICE, wanted, streaming)
        known = WorkerFacts.of(facts)
        say = self.lines.append
        worker = Worker(options, known, say, lambda *_: None, n_layers=facts.n_layers)
        with contextlib.closing(worker), WorkerGate("127.0.0.1", 0, worker, ()) as gate:
            if error := worker.open_device().error:
                raise RuntimeError(error)
            self.address = Address("127.0.0.1", int(gate.server_address[1]))
            threading.Thread(target=gate.serve_forever, daemon=True).start()
            last = list(ask_for(self.address, LayersAsked(0, facts.n_layers, head=True)))[-1]
            if last.error:
                raise RuntimeError(last.error)
            yield self
            gate.shutdown()


def graphs_part(seed: int, numbers: range, folder: Path) -> Outcome:
    """Send the graphs `numbers` to workers of several models, which take turns by blocks."""
    outcome = Outcome("graphs", len(numbers))
    with patch.object(server_worker, "serve_layers", guarded_worker.serve_guarded):
        for nth, name in enumerate(MODELS):
            mine = [number for number in numbers if number // _WITNESS % len(MODELS) == nth]
            if mine:
                path = written(name, folder / f"{name}.gguf")
                _attack(seed, mine, path, outcome)
                first = _WITNESS * _SPLIT_BLOCKS * len(MODELS)
                few = [number for number in mine if number < first]
                if few:
                    _attack(seed, few, path, outcome, splits=True)
                outcome.figures[f"tries of {name} split"] = len(few)
    return outcome


def _attack(
    seed: int, numbers: Sequence[int], path: Path, outcome: Outcome, *, splits: bool = False
) -> None:
    with _Served(path, splits).running() as served:
        recorded = record(path, served.address)
        outcome.figures[f"graphs of {path.stem}"] = len(recorded)
        expected = [_send(served, one, one.graph)[1] for one in recorded]
        for n, number in enumerate(numbers):
            random = Random(f"{seed} graphs {number}")
            nth = random.randrange(len(recorded))
            graph = Graph.of(recorded[nth].graph)
            one, made = _hostile(recorded[nth], graph, random)
            before = len(served.lines)
            wrong = _try(served, one, graph.body(), before, outcome)
            if n % _WITNESS == _WITNESS - 1 or n == len(numbers) - 1:
                wrong = wrong or _witness(served, recorded[nth], expected[nth])
            if wrong:
                command = f"{ATTACK} --part graphs --seed {seed} --only {number}"
                what = f"{path.stem}{' split' * splits} {', '.join(made)}: {wrong}"
                outcome.breaches.append(Breach(what, command))


def _hostile(one: Recorded, graph: Graph, random: Random) -> tuple[Recorded, list[str]]:
    """Change the graph, the data that is sent before it, or both. Returns the changes' names."""
    made: list[str] = []
    ways = random.choice(("graph", "graph", "integers", "integers", "both", "floats"))
    if ways in ("graph", "both"):
        made += change(graph, random)
    if ways != "graph":
        kinds = ("f32",) if ways == "floats" else ("i32", "i64")
        one = replace(one, inputs=change_data(one.inputs, random, *kinds))
        made.append("floats" if ways == "floats" else "integers")
    return one, made


def _try(
    served: _Served, recorded: Recorded, body: bytes, before: int, outcome: Outcome
) -> str:  # fmt: skip
    """Send one graph. Returns what went wrong, or an empty text."""
    try:
        _send(served, recorded, body)
    except TimeoutError:
        return "no answer"
    except OSError:
        pass
    said = served.lines[before:]
    errors = [line for line in said if line.startswith("error: ")]
    outcome.tally[_kind(errors)] += 1
    return breach_of(errors)


def breach_of(errors: Sequence[str]) -> str:
    """Return the first error that is no refusal in one sentence, or an empty text.

    An assertion of ggml's own server may end the computing process (docs/defence.md). Any other
    error is a failure of the worker, also one that only has an exception's text.
    """
    for line in errors:
        is_refusal = _REFUSED.fullmatch(line) and len(line) <= _MOST_LETTERS
        if not is_refusal and line != _ASSERTED:
            return line
    return ""


def _kind(errors: Sequence[str]) -> str:
    if not errors:
        return "computed, or not read as a graph"
    return "refused" if "was refused" in errors[0] else "ended the process: " + errors[0][-60:]


def _witness(served: _Served, recorded: Recorded, expected: bytes) -> str:
    try:
        is_same = _send(served, recorded, recorded.graph)[1] == expected
    except OSError as e:
        return f"the next client was not served ({e}): {served.lines[-3:]}"
    return "" if is_same else "the next client's answer has changed"


def _send(served: _Served, recorded: Recorded, body: bytes) -> tuple[str, bytes]:
    """Send a graph and what belongs to it. Returns the connection's name, and the result."""
    with Line(served.address) as line:
        moved = line.place(recorded)
        for message in recorded.inputs:
            line.send(SET, moved_body(message.body, moved))
        graph = Graph.of(body)
        moved_to(graph.tensors, moved)
        line.send(GRAPH, graph.body())
        return line.name, line.ask(GET, moved_body(recorded.read.body, moved))
