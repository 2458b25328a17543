"""scripts/lab/run bench-server detects the failures that it looks for."""

from __future__ import annotations

import asyncio
import json

import pytest
from fake_generator import FakeFactory
from running import StartServer

from lab.bench_server.__main__ import main
from lab.bench_server.client import alone, ask, load
from specoffload.generation.generation import TextPiece
from specoffload.server.api.native import NativeWording

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

    def piece(wording: NativeWording, index: int, piece: TextPiece) -> bytes:
        nonlocal n_told
        n_told += 1
        times = mistake if piece.finish_reason is None and n_told % 7 == 0 else 1
        return told(wording, index, piece) * times

    monkeypatch.setattr(NativeWording, "piece", piece)
    badly = asyncio.run(load(port, known, 5, 3, 0.2))
    assert badly.errors.total() + badly.differing.total() > 0


def test_the_header_and_the_first_text_are_timed_apart(start_server: StartServer) -> None:
    port = int(start_server().url.rpartition(":")[2])
    answer = asyncio.run(ask(port, {"prompt": "[prefill]"}))
    assert answer.sent_s < answer.first_s < answer.content_s <= answer.ended_s
    assert answer.content_s - answer.sent_s >= 0.7  # what the fake sleeps before its first piece


def test_a_real_server_makes_no_mistake_under_load(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command starts `serve` with the embedded pair, with drafts off and on."""
    words = ["--vs", "none", "--streams", "6", "--seconds", "2", "--load-tokens", "6"]
    monkeypatch.setattr("sys.argv", ["bench-server", *words, "--turns", "1", "--rounds", "1",
                                     "--requests", "1", "--tokens", "8"])  # fmt: skip
    assert main() == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["load"]) == {"drafts off", "drafts on"}
    for load_of in result["load"].values():
        assert load_of["answers"] >= 6
        assert load_of["errors"] == 0
        assert load_of.get("of_them_not_by_near_ties", 0) == 0
    assert result["load"]["drafts off"]["drafted"] == 0 < result["load"]["drafts on"]["drafted"]
    assert result["turns"]["1"]["ours"] > 0
