"""Conversations that leave the cells and come back, on real servers: no text differs, none is lost.

Models are in f32, and so are caches, without flash attention. There a text does not depend on how
it is cut into batches.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from image_parts import model_with_projector, png
from program import Program, serving
from running import http

from lab.synth import write_preset
from lab.synth.mtp import write_mtp
from offload.images.building import image_library

EXACT = ("--flash-attn", "off", "--cache-type-k", "f32", "--cache-type-v", "f32")
DRAFTS = ("--spec-type", "suffix", "--spec-policy", "fixed", "--spec-draft-n-max", "3")
SCRIPT = Path(__file__).with_name("serve_moving.py")
N_CLIENTS, N_TURNS, N_PREDICT = 64, 2, 8


def server(
    model: Path, n_slots: int, *flags: str, moves: bool = True
) -> AbstractContextManager[Program]:
    """A server with this many slots. With `moves`, idle conversations leave at once."""
    settings = ("--device", "cpu", *EXACT, "--ctx-size", "4096", "--metrics", *flags)
    entry = (str(SCRIPT),) if moves else ("-m", "specoffload")
    return serving(str(model), *settings, "--parallel", str(n_slots), entry=entry)


def tiny(kind: str, models: Path) -> Path:
    path = models / f"moving-{kind}.gguf"
    if kind == "mimo2":
        return write_mtp(models, kind)
    return path if path.exists() else write_preset(kind, path, size="tiny", seed=6, quant="f32")


def words(seed: int, n: int) -> list[int]:
    return [(seed * i + i * i % 11 + 7 * seed) % 250 for i in range(n)]


def ask(url: str, tokens: Sequence[int], **more: Any) -> dict[str, Any] | None:
    """The answer to a prompt of tokens; None if the server's queue is full."""
    body = {
        "prompt": [*tokens], "n_predict": N_PREDICT, "temperature": 0, "ignore_eos": True,
        "return_tokens": True, **more,
    }  # fmt: skip
    answer = http.post(url + "/completion", json=body, timeout=300)
    if answer.status_code == 503:
        assert 1 <= int(answer.headers["Retry-After"]) <= 60
        return None
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


class Talk:
    """One client's conversation: what it asks, what it was answered and what was evaluated."""

    def __init__(self, client: int, n_words: int) -> None:
        self.client, self.n_words, self.tokens = client, n_words, words(client, n_words)
        self.answers: list[list[int]] = []
        self.n_evaluated: list[int] = []  # of each turn's prompt

    def turn(self, url: str, **more: Any) -> None:
        while (answer := ask(url, self.tokens, **more)) is None:
            time.sleep(0.25)
        self.answers.append(answer["tokens"])
        self.n_evaluated.append(answer["timings"]["prompt_n"])
        self.tokens += [*answer["tokens"], *words(self.client + len(self.answers), 5)]

    def all_turns(self, url: str, **more: Any) -> Talk:
        for _ in range(N_TURNS):
            self.turn(url, **more)
        return self


def counters(program: Program) -> dict[str, float]:
    lines = http.get(program.url + "/metrics").text.splitlines()
    pairs = [line.split(" ") for line in lines if line.startswith("specoffload:")]
    return {pair[0].partition(":")[2]: float(pair[1]) for pair in pairs if "{" not in pair[0]}


def alone(model: Path, talks: Sequence[Talk]) -> list[list[list[int]]]:
    """The answers of conversations that have a server to themselves, one after the other."""
    with server(model, 1, "--spec-type", "none", "--cache-ram", "0", moves=False) as program:
        return [Talk(talk.client, talk.n_words).all_turns(program.url).answers for talk in talks]


@pytest.mark.parametrize("kind", ["mistral-large", "mimo2", "qwen3next"])
def test_64_clients_whose_conversations_move_get_their_own_texts(kind: str, models: Path) -> None:
    """Full attention; sliding windows and layers that draft; recurrent states."""
    model = tiny(kind, models)
    n = N_CLIENTS if kind == "mistral-large" else 12
    talks = [Talk(client, 60 + 3 * client) for client in range(1, n + 1)]
    drafts = ("--spec-type", "draft-mtp", *DRAFTS[2:]) if kind == "mimo2" else DRAFTS
    with (
        server(model, 4, *drafts, "--max-queue", str(n // 2)) as program,
        ThreadPoolExecutor(n) as threads,
    ):
        list(threads.map(lambda talk: talk.all_turns(program.url), talks))
        counted = counters(program)
    assert [talk.answers for talk in talks] == alone(model, talks)
    later = [n for talk in talks for n in talk.n_evaluated[1:]]
    assert max(later) <= 5 + N_PREDICT + 1, "only what is new is evaluated: nothing was lost"
    # How many return depends on which client the machine lets ask first.
    assert counted["internal_idle_returns_total"] > 0
    assert counted["internal_idle_moves_total"] > 0


@pytest.mark.parametrize("has_disk", [False, True])
def test_a_full_cache_ram_loses_no_conversation(
    has_disk: bool, models: Path, tmp_path: Path
) -> None:
    """Without a disk, those that have no room stay in their cells."""
    model = tiny("mistral-large", models)
    talks = [Talk(client, 330) for client in (3, 5, 7, 9)]
    disk = ("--cache-disk", f"1GiB,{tmp_path / 'kept'}") if has_disk else ()
    with server(model, 4, *DRAFTS, "--cache-ram", "1", *disk) as program:
        for _ in range(N_TURNS):
            for talk in talks:
                talk.turn(program.url)
        counted = counters(program)
        program.process.terminate()
        output, _ = program.process.communicate(timeout=60)
    assert [talk.answers for talk in talks] == alone(model, talks)
    assert all(max(talk.n_evaluated[1:]) <= 5 + N_PREDICT + 1 for talk in talks)
    assert "is not kept" not in output
    assert 0 < counted["internal_idle_returns_total"] <= counted["internal_idle_moves_total"] + 1
    read_from_disk = counted["prompt_tokens_from_disk_total"]
    if has_disk:
        assert read_from_disk > 0
    else:
        assert read_from_disk == 0
        assert counted["internal_idle_cells_read_total"] > 1000, "some stayed"


@pytest.mark.parametrize("kind", ["qwen2vl", "gemma3", "qwen3.5-35b-a3b"])
def test_a_conversation_with_an_image_moves_out_and_back(kind: str, models: Path) -> None:
    """M-RoPE; images whose tokens see each other, with sliding windows; recurrent states."""
    image_library()
    model, projector = model_with_projector(kind, models)
    found = []
    for moves in (False, True):
        flags = ("--mmproj", str(projector), *DRAFTS)
        stays = () if moves else ("--no-cache-idle-slots",)
        with server(model, 3, *flags, *stays, moves=moves) as program:
            texts, n_cached = image_talk(program)
            found.append((texts, n_cached, counters(program)))
    (stayed, n_cached, before), (moved, n_cached_moved, counted) = found
    assert before["internal_idle_moves_total"] == before["internal_idle_returns_total"] == 0
    assert counted["internal_idle_moves_total"] >= 2
    assert counted["internal_idle_returns_total"] >= 2
    assert moved == stayed
    assert n_cached_moved == n_cached
    assert n_cached[1] > 30, "the image is not evaluated again"


def image_talk(program: Program) -> tuple[list[str], list[int]]:
    """Two turns about an image, and two other conversations between them."""
    data = base64.b64encode(png(150, 90, 1)).decode()
    talk: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Look: "},
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
                {"type": "text", "text": "what is it?" * 5},
            ],
        }
    ]
    other = [{"role": "user", "content": "What is the time? " * 20}]
    texts, n_cached = [], []
    for _ in range(3):
        for messages in (talk, other):
            body = {"messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            answer = http.post(program.url + "/v1/chat/completions", json=body, timeout=300)
            assert answer.status_code == 200, answer.text
            text = answer.json()["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go"}]
            texts.append(text)
            if messages is talk:
                usage = answer.json()["usage"]
                n_cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    return texts, n_cached
