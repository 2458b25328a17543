"""All ids that reach a backend are checked by one law, and a path that breaks it is found.

The fixture `ids_keep_the_law` (conftest.py) checks the uploads of all tests in this folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import id_law
import numpy as np
import pytest
from budgets import budget
from id_law import broken_law
from test_hybrid import logits, options, split_by

from lab.options import Streaming
from lab.synth import write_preset
from offload.device import choose_device
from offload.engine import EngineOptions, open_engine
from offload.errors import DeviceFailed
from offload.ggml.tensor import new_tensor
from offload.schedule.splitter import stay
from offload.stream import play
from offload.stream import split_path as split_path
from offload.stream.slot_ids import IdExchange
from offload.worker import split_costs


@pytest.mark.parametrize(
    ("ids", "repeats", "words"),
    [
        ([[0, 1], [1, 3]], False, ""),
        ([[0, 4]], True, "slots 0 to 4 of 4"),
        ([[-1, 3]], True, "slots -1 to 3 of 4"),
        ([[0, 1], [3, 3]], False, "1 of 2 tokens name a slot twice"),
        ([[3, 3]], True, ""),
    ],
)
def test_ids_are_in_range_and_distinct_for_each_token(
    ids: list[list[int]], repeats: bool, words: str
) -> None:
    assert broken_law(np.array(ids, np.int32), 4, repeats=repeats) == words


@pytest.fixture
def path(models: Path) -> Path:
    path = models / "id-law.gguf"
    if not path.exists():
        write_preset("qwen3-30b-a3b", path, size="tiny", seed=1)
    return path


def streamed(path: Path) -> EngineOptions:
    """Streams dense weights too, so that Python and not the player sends the experts' slots."""
    streaming = Streaming(hybrid=False, n_gpu_layers=0)
    return options(streaming | Streaming(vram_bytes=budget(path, streaming, "half")), 1)


def test_uploads_of_each_path_are_checked(
    path: Path, checked_ids: id_law.Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(play.Waits, "choose", lambda _, n_layers: n_layers)
    checked_ids.n_checked.clear()
    with open_engine(path, streamed(path)) as engine:
        engine.sequences.extend(0, [7 * i % engine.n_vocab for i in range(3)])
    assert checked_ids.n_checked["Python"] > 0
    with open_engine(path, split_by(stay, path, "half")) as engine:
        for _ in range(5):  # a graph goes ahead from its second decode on
            logits(engine)
    assert min(checked_ids.n_checked.get(name, 0) for name in ("player", "table")) > 0


def sends(
    change: Callable[[list[int], list[int]], tuple[list[int], list[int]]],
) -> Callable[..., None]:
    """Python's upload with experts and slots that `change` returns."""
    send = IdExchange.send

    def changed(
        exchange: IdExchange, slot_ids: Any, ids: Any, experts: Sequence[int], slots: Sequence[int]
    ) -> None:
        send(exchange, slot_ids, ids, *change(list(experts), list(slots)))

    return changed


def test_python_s_slots_that_repeat_are_found(
    path: Path, checked_ids: id_law.Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = sends(lambda experts, slots: (experts, [slots[0]] * len(slots)))
    monkeypatch.setattr(IdExchange, "send", changed)
    with open_engine(path, streamed(path)) as engine:
        engine.sequences.extend(0, [7 * i % engine.n_vocab for i in range(3)])
    broken, checked_ids.broken = checked_ids.broken, []
    assert any(line.startswith("Python: ") and "name a slot twice" in line for line in broken)


def test_the_player_s_slots_that_repeat_are_found(
    path: Path, checked_ids: id_law.Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_path, "may_repeat", lambda n_tokens, types: True)
    with open_engine(path, split_by(stay, path, "half")) as engine:
        logits(engine)
    broken, checked_ids.broken = checked_ids.broken, []
    assert any(line.startswith("player: ") and "name a slot twice" in line for line in broken)


def test_an_expert_without_a_slot_ends_the_decode_and_gets_no_old_slot(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(path, streamed(path)) as engine:
        tokens = [7 * i % engine.n_vocab for i in range(3)]
        engine.sequences.extend(0, tokens)  # all experts had slots
        engine.sequences.rewind(0, 0)
        changed = sends(lambda experts, slots: (experts[1:], slots[1:]))
        monkeypatch.setattr(IdExchange, "send", changed)
        with pytest.raises(DeviceFailed, match="an expert that has no slot"):
            engine.sequences.extend(0, tokens)


@pytest.mark.parametrize("is_broken", [False, True])
def test_the_experts_that_a_worker_s_measurement_draws_are_checked(
    is_broken: bool, checked_ids: id_law.Found
) -> None:
    device = choose_device("cpu").device
    buffer = device.allocate(4096, "ids")
    layer = split_costs.ExpertLayer.__new__(split_costs.ExpertLayer)
    layer._n_experts, layer._n_ids = 8, 4 * 3
    layer.ids = new_tensor("i32", (4, 3, 1, 1), (buffer, 0))
    random: Any = np.random.default_rng(1)
    if is_broken:
        random = SimpleNamespace(permutation=lambda n: np.full(n, n - 1))
    before = checked_ids.n_checked.get("measurement", 0)
    layer.choose(random)
    buffer.close()
    broken, checked_ids.broken = checked_ids.broken, []
    assert checked_ids.n_checked["measurement"] == before + 1
    assert broken == ["measurement: 3 of 3 tokens name a slot twice"] * is_broken
