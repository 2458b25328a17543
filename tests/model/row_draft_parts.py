"""Sessions and checks that tests of EAGLE-3 files, block drafts and MTP layers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from budgets import ON_GPU
from mtp_parts import prompts, written
from resolved import config_of
from test_mtp_matrix import EVENTS, N_CTX, SIZES, Case, Plainly, Player
from test_slots import answer_of, open_slots

from lab.options import Streaming, engine_options
from offload.engine import EngineOptions, open_engine
from offload.times.min_batch import MinBatch
from specoffload.generation.generation import GenerateOptions
from specoffload.session.session import Session


def options_of_way(
    way: str, split_bytes: Callable[[], int], n_sequences: int = 1, **more: Any
) -> EngineOptions:
    """An engine that computes the target in one of `mtp_parts.WAYS`, in f32.

    `split_bytes` returns the device memory for split layers.
    """
    is_split = way == "split"
    least = 1000 if is_split else 1
    return engine_options(
        device="cpu" if way == "resident" else "sim",
        min_batch=MinBatch(least, least),
        streaming=Streaming(
            hybrid=is_split,
            vram_bytes=split_bytes() if is_split else None,
            n_gpu_layers=ON_GPU if is_split else None,
        ),
        n_ctx=512 * n_sequences,
        n_sequences=n_sequences,
        flash_attn="off",
        type_k="f32",
        type_v="f32",
        **more,
    )


def check_greedy_texts(
    target: Path, ways: Sequence[str], most_drafted: int, opened: Callable[..., Session]
) -> None:
    """Play every way with one and several requests, all lengths of drafts and all events.

    `opened` opens a session for a way and a number of requests at a time.
    """
    numbers = iter(np.random.default_rng(3).permutation(40).tolist() * 20)
    plainly = Plainly(target)
    for (w, way), (s, size) in product(enumerate(ways), enumerate(SIZES)):
        with opened(way, size, ctx_size=N_CTX, cache_ram_bytes=None) as session:
            player = Player(session, plainly, size)
            for block in range(1, most_drafted + 1):
                if block % 2 == s:  # half of the lengths with each size
                    event = EVENTS[(block // 2 + w) % 4]
                    player.play(Case(block, event, tuple(next(numbers) for _ in range(size))))
            assert session.target.opened.row_draft is not None
            assert not session.target.opened.row_draft.n_unknown_rows
        assert not player.wrong
        assert not player.ties
        assert player.n_accepted > player.n_texts
    plainly.close()


def check_distribution(
    target: Path, draft: Path, spec: Mapping[str, Any], *, n_seeds: int, n_drawn: int
) -> None:
    """Check that a seed gives plain decoding's text, and that rejection keeps the distribution.

    `n_seeds` texts are compared, and `n_drawn` tokens are drawn.
    """
    sampled = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    text = prompts(1)[0]
    with (
        open_slots(target, {"--spec-type": "none"}, 1) as plain,
        open_slots(target, spec, 1, draft=draft) as session,
    ):
        for seed in range(n_seeds):
            assert written(session, text, 20, seed=seed, **sampled) == written(
                plain, text, 20, seed=seed, **sampled
            )
        plain.target.sequences.rewind(0, 0)
        logits = plain.target.sequences.extend(0, text, 1)[-1].astype(np.float64)
    p = np.exp(logits - logits.max())
    p /= p.sum()
    counts, n_accepted = np.zeros(len(p)), 0
    with open_slots(target, {**spec, "--spec-accept": "reject"}, 1, draft=draft) as session:
        for seed in range(n_drawn):
            request = session.start(text, GenerateOptions(n_predict=2, seed=seed, **sampled))
            while not session.is_idle:
                session.step()
            answer = answer_of(request)
            counts[answer.tokens[0]] += 1
            n_accepted += answer.stats.n_accepted
    likeliest = np.argsort(-p)[:7]
    drawn = [*counts[likeliest], n_drawn - counts[likeliest].sum()]
    wanted = np.array([*p[likeliest], 1 - p[likeliest].sum()]) * n_drawn
    assert n_accepted
    assert float(((drawn - wanted) ** 2 / wanted).sum()) < 24.3  # 7 degrees of freedom, 0.1 %


def notes_without(target: Path, draft: Path, spec_type: str) -> list[str]:
    """The notes of a session that runs without a file that cannot draft, as an engine does."""
    given = {"--spec-type": spec_type}
    config = config_of(
        model=target, draft=draft, device="cpu", threads=1, ctx_size=256, spec_given=given
    )
    with Session(config) as session:
        assert session.speculation is None
        assert written(session, [5, 6, 7], n=3)
        notes = [*session.notes]
    with open_engine(target, engine_options(device="cpu", n_ctx=256, row_file=draft)) as engine:
        assert engine.opened.row_draft is None
        assert engine.opened.no_rows_reason
    return notes
