"""scripts/lab/run bench-server notices what it is there to notice."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import pytest
from fake_generator import FakeFactory
from running import StartServer

from lab.bench_server.client import alone, load
from lab.bench_server.judge import MOST_GAP, Judge, unexplained
from specoffload import demo
from specoffload.server.api.native import NativeWording
from specoffload.session.generation import Piece

PROMPTS = ["hello", "there"]


@pytest.mark.parametrize("mistake", [0, 2])
def test_a_lost_and_a_doubled_token_are_noticed(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, mistake: int
) -> None:
    server = start_server(FakeFactory(n_parallel=2))
    server.wait_until_healthy()
    port = int(server.url.rpartition(":")[2])
    known = asyncio.run(alone(port, PROMPTS, 5))
    assert [answer.text for answer in known.values()] == PROMPTS
    well = asyncio.run(load(port, known, 5, 3, 0.2))
    assert well.n_answers >= 3
    assert well.n_tokens == 5 * well.n_answers
    assert not well.errors
    assert not well.differing
    told, n_told = NativeWording.piece, 0

    def piece(wording: NativeWording, index: int, piece: Piece) -> bytes:
        nonlocal n_told
        n_told += 1
        times = mistake if piece.finish_reason is None and n_told % 7 == 0 else 1
        return told(wording, index, piece) * times

    monkeypatch.setattr(NativeWording, "piece", piece)
    badly = asyncio.run(load(port, known, 5, 3, 0.2))
    assert badly.errors.total() + badly.differing.total() > 0


def test_the_judge_tells_mistakes_from_near_ties() -> None:
    model = Path(demo.__path__[0]) / "target.gguf"
    prompt = "def add(a, b):\n    return "
    with closing(Judge(model, 1, 512)) as judge:
        tokens = judge.likeliest(prompt, 16)
        assert judge.gap(prompt, tokens) < 0.1
        for at in (0, 5, 10):
            lost = [*tokens[:at], *tokens[at + 1 :]]
            doubled = [*tokens[: at + 1], *tokens[at:]]
            bad, most = unexplained(judge, [(prompt, lost), (prompt, doubled)])
            assert len(bad) == 2
            assert most > MOST_GAP
