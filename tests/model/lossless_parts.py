"""Shared by the tests of losslessness: an exact target, a judge, and a count of memory cells.

The target is an f32 copy of the embedded one in the exact setting: caches in f32 and no flash
attention. There batches of different sizes agree to 1e-4. Weights of 8 bits round activations too.
Flash attention rounds keys and values to f16, and sums in f16 (docs/speculation.md).
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from budgets import ON_GPU, budget
from numpy.typing import NDArray
from resolved import config_of

from lab.options import Streaming
from offload.engine import Engine
from offload.ggml.sampler import SamplerChain
from offload.sampling.options import checked
from offload.times.search import TimingRequest
from offload.times.table import CostTable, DecodeTime
from specdec.costs.profile import CostProfile
from specdec.types import Round
from specoffload.config.options import Toggle
from specoffload.config.resolution import demo_file
from specoffload.generation.generation import FinishReason, GenerateOptions
from specoffload.generation.statistics import GenerationStats
from specoffload.session.session import SEQUENCE, Session

N_CTX = 1024
N_PREDICT = 24
# With flash attention or f16 caches, logits depend on how a text is cut into batches by up to 1e-2.
EXACT: dict[str, Any] = {"flash_attn": "off", "type_k": "f32", "type_v": "f32"}
# Largest difference of a prefix's logits between batches of one token and of several in the exact
# setting, where only the order of sums differs. Logits of a wrong prefix differ far more.
BATCH_NOISE = 1e-4
NEAR_TIE = 1e-4  # difference of logits that BATCH_NOISE may turn round
_STATE_MAGIC = 0xAF143CD8
_CANDIDATES = 24  # likeliest tokens that are examined for a near tie

Logits = NDArray[np.float32]
GREEDY = GenerateOptions(n_predict=N_PREDICT, ignore_eos=True)
SAMPLED = GenerateOptions(
    n_predict=N_PREDICT,
    ignore_eos=True,
    temperature=0.8,
    top_k=20,
    repeat_penalty=1.1,
    frequency_penalty=0.1,
    seed=11,
)
FIXED: dict[str, object] = {"--spec-policy": "fixed", "--spec-draft-n-max": 4}


def write_f32(path: Path) -> Path:
    """Write the embedded target with f32 weights to `path`. Returns `path`."""
    return write_quantised(path, "LLAMA_FTYPE_ALL_F32")


def write_quantised(path: Path, ftype: str) -> Path:
    """Write the embedded target with weights of libllama's `ftype` to `path`. Returns `path`."""
    import llama_cpp.llama_cpp as native

    params = native.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = getattr(native, ftype), True
    source = str(demo_file("target.gguf")).encode()
    assert native.llama_model_quantize(source, str(path).encode(), params) == 0
    return path


def cheap_batches() -> CostProfile:
    """A profile in which a batch costs hardly more than one token, so that policies draft.

    Its seconds are far above the real ones. Times of real rounds therefore make drafted batches
    look even cheaper.
    """
    return CostProfile(tuple(1.0 + 1e-4 * n for n in range(64)), draft_step_s=1e-6)


def let_batches_be_cheap(patch: pytest.MonkeyPatch) -> None:
    """Replace the sessions' measurements: every way takes the times of `cheap_batches`.

    Nothing is learned from the true times, in which such drafts may not pay.
    """

    def measured(
        _: object,
        text: object,
        table: CostTable,
        request: TimingRequest,
        *__: object,
        **___: object,
    ) -> float:
        for way in request.ways:
            for n, seconds in enumerate(cheap_batches().step_s, 1):
                table.add(way, n, DecodeTime(seconds, n_timed=1))
        return 0.0

    patch.setattr("specoffload.speculation.costs.measure", measured)
    patch.setattr("specoffload.speculation.costs.SessionCosts.learns", False)
    patch.setattr("specoffload.speculation.draft_prices.step_by_depth_s", lambda *_: {0: 1e-6})


def open_session(
    model: Path, spec: Mapping[str, object], place: str = "resident", **more: Any
) -> Session:
    """A session that drafts by `spec`, with the embedded draft model if it asks for one.

    `place` is "resident", "streamed", "streamed from 2" (for batches of at least 2 tokens) or
    "split" (between the CPU and a device with slots for half of the experts).
    """
    options: dict[str, Any] = {"ctx_size": N_CTX, "device": "cpu" if place == "resident" else "sim"}
    options |= EXACT
    if "draft" in str(spec.get("--spec-type", "draft")):
        options["draft"] = demo_file("draft.gguf")
    if place == "split":
        half = budget(model, Streaming(), "half")
        options |= {"n_gpu_layers": ON_GPU}
        options |= {"vram_bytes": half, "n_cpu_moe": 99, "min_batch": "1000", "hybrid": Toggle.ON}
    elif place != "resident":
        options["min_batch"] = "2" if place == "streamed from 2" else "1"
    parallel = more.pop("parallel", 1)
    # Use one thread. Several would spin while they wait for each other on a busy machine.
    config = config_of(model=model, threads=1, spec_given=spec, **(options | more))
    return Session(replace(config, parallel=parallel))


# -- memory cells ---------------------------------------------------------------------------------


def cell_positions(engine: Engine, sequence: int = SEQUENCE) -> list[int]:
    """The position of every attention cell of a sequence, read from its serialised state.

    The state begins with a magic number, the sequence, the number of streams and the number of
    cells (state_write in llama-context.cpp and llama-kv-cache.cpp). Each cell has its position, the
    number of sequences and their ids. Models with rotary sections store 12 more bytes before the
    ids. Each cell lists only this sequence, so exactly one of the two layouts fits. If each
    sequence has a stream of its own, the streams before it have no cells.
    """
    state = engine.opened.context.state(sequence, 0)
    magic, owner_said, n_streams = struct.unpack_from("<IiI", state)
    assert (magic, owner_said, n_streams) == (
        _STATE_MAGIC, sequence, engine.opened.context.n_streams,
    )  # fmt: skip
    n_before = sequence if n_streams > 1 else 0
    *before, n_cells = struct.unpack_from(f"<{n_before + 1}I", state, 12)
    assert not any(before)
    start = 16 + 4 * n_before
    for layout in ("<iIi", "<iI12xi"):
        size = struct.calcsize(layout)
        cells = [struct.unpack_from(layout, state, start + size * i) for i in range(n_cells)]
        if all((n, owner) == (1, sequence) for _, n, owner in cells):
            return [position for position, _, _ in cells]
    raise AssertionError(f"{n_cells} cells whose layout is unknown")


def assert_each_position_once(engine: Engine, sequence: int = SEQUENCE) -> None:
    """Check that each position of the sequence has exactly one cell.

    A faulty restore of a checkpoint leaves cells of rejected tokens (llama.cpp #19493).
    """
    found = sorted(cell_positions(engine, sequence))
    twice = sorted({a for a, b in zip(found, found[1:], strict=False) if a == b})
    assert not twice, f"positions {twice} have several cells"
    wanted = set(range(engine.sequences.length(sequence)))
    wrong = sorted(wanted ^ set(found))
    assert not wrong, (
        f"{len(wanted)} tokens are held, and positions {wrong} are missing or too many"
    )


# -- fresh evaluations -----------------------------------------------------------------------------


def distance_from_fresh(engine: Engine, tokens: Sequence[int], n_prompt: int, row: Logits) -> float:
    """Distance of `row` [n_vocab] from the logits of `tokens` evaluated from an empty memory.

    A router whose experts nearly tie may choose others in batches of another size, and then the
    logits jump. Therefore the text is evaluated in several ways and the smallest distance counts:
    all at once, batches of 1, 2 and 3 after the prompt, and a last batch of 1 to 8.
    """
    n = len(tokens)
    splits = [[0, n]]
    splits += [[0, *range(n_prompt, n, size), n] for size in (1, 2, 3)]
    splits += [[0, n - last, n] for last in range(1, min(9, n))]
    found = float("inf")
    for split in splits:
        engine.sequences.rewind(SEQUENCE, 0)
        for start, end in itertools.pairwise(dict.fromkeys(split)):
            fresh = engine.sequences.extend(SEQUENCE, tokens[start:end], 1)[0]
        found = min(found, float(np.abs(fresh - row).max()))
        if found < BATCH_NOISE / 2:
            break
    return found


# -- the target's own choice ----------------------------------------------------------------------


@dataclass
class Answer:
    """A prompt and the tokens that were written after it."""

    prompt: list[int]
    tokens: list[int]


@dataclass
class Run(Answer):
    """One generation: its answer, its rounds and its statistics."""

    text: str
    finish_reason: FinishReason
    stats: GenerationStats
    rounds: list[Round]
    answer: list[int]  # tokens of the pieces, which end before a stop sequence

    @property
    def n_rejected(self) -> int:
        return self.stats.n_drafted - self.stats.n_accepted


def generate(opened: Session, prompt: str | Sequence[int], request: GenerateOptions) -> Run:
    """Generate one answer, and check the cells of target and draft after every round."""
    tokens = (
        opened.tokenize(prompt, add_special=True, parse_special=True)
        if isinstance(prompt, str)
        else list(prompt)
    )
    text = ""
    answer: list[int] = []
    rounds: list[Round] = []
    opened.batcher.on_step.append(
        lambda report: rounds.extend(round_ for _, round_ in report.rounds)
    )
    for piece in opened.generate(tokens, request):
        text += piece.text
        answer += piece.tokens
        assert_each_position_once(opened.target)
        if opened.draft is not None:
            assert_each_position_once(opened.draft)
    opened.batcher.on_step.pop()
    assert piece.stats is not None
    assert piece.finish_reason is not None
    out = [token for round_ in rounds for token in round_.emitted]
    return Run(tokens, out, text, piece.finish_reason, piece.stats, rounds, answer)


class Judge:
    """The target alone, one token at a time: its logits after each prefix of an answer."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._known: dict[tuple[object, ...], list[Logits]] = {}

    def rows(self, prompt: Sequence[int], tokens: Sequence[int], size: int = 1) -> list[Logits]:
        """The row of logits [n_vocab] before each of `tokens`, evaluated in batches of `size`."""
        key = (tuple(prompt), tuple(tokens), size)
        if key not in self._known:
            engine = self.engine
            engine.sequences.rewind(SEQUENCE, 0)
            if len(prompt) > 1:
                engine.sequences.extend(SEQUENCE, prompt[:-1], n_logits=0)
            fed = [prompt[-1], *tokens[:-1]]
            batches = [fed[i : i + size] for i in range(0, len(fed), size)]
            self._known[key] = [
                row for b in batches for row in engine.sequences.extend(SEQUENCE, b)
            ]
        return self._known[key]

    def check(self, run: Run | Answer, request: GenerateOptions) -> None:
        """Check that plain decoding chooses each token after the same prefix and with the same
        random number.

        Either token of a near tie is accepted.
        """
        chain = self._chain(request, run.prompt)
        rows = self.rows(run.prompt, run.tokens)
        for i, (row, token) in enumerate(zip(rows, run.tokens, strict=True)):
            chosen = chain.choose(row, ())
            assert chosen == token or self._is_near_tie(request, run, i), (
                f"token {i} is {token}, plain decoding chooses {chosen}"
            )
            chain.accepted(token)
        chain.close()

    def check_support(self, run: Run, request: GenerateOptions) -> None:
        """Check that the request's sampler gives each token a probability above 0."""
        chain = self._chain(request, run.prompt)
        for row, token in zip(self.rows(run.prompt, run.tokens), run.tokens, strict=True):
            if chain.probabilities(row, ())[token] == 0.0:
                # By rounding alone, the token may have missed the limit of top-k or min-p.
                nearly = row.copy()
                nearly[token] += NEAR_TIE
                assert chain.probabilities(nearly, ())[token] > 0.0
            chain.accepted(token)
        chain.close()

    def _chain(self, request: GenerateOptions, prompt: Sequence[int]) -> SamplerChain:
        return SamplerChain(self.engine.model, checked(request, 512), prompt)

    def _is_near_tie(self, request: GenerateOptions, run: Run | Answer, i: int) -> bool:
        """True if plain decoding chooses token i from the logits of another batch size, or from
        logits shifted by at most NEAR_TIE.

        For each n, the n likeliest tokens are shifted against all others by NEAR_TIE, up and down.
        That moves the border between the two groups as far as NEAR_TIE allows.
        """
        rows = self.rows(run.prompt, run.tokens)
        others = [self.rows(run.prompt, run.tokens, size)[i] for size in (2, 3)]
        for row in (rows[i], *others):
            order = np.argsort(-row, kind="stable")[:_CANDIDATES]
            if run.tokens[i] not in order:
                continue
            shifts = [np.zeros(len(row), np.float32)]
            for n in range(1, len(order)):
                shifts.append(np.full(len(row), -NEAR_TIE / 2, np.float32))
                shifts[-1][order[:n]] = NEAR_TIE / 2
            for shift in shifts:
                for shifted in (row + shift, row - shift):
                    if self._choice(request, run, rows[:i], shifted) == run.tokens[i]:
                        return True
        return False

    def _choice(
        self,
        request: GenerateOptions,
        run: Run | Answer,
        rows: Sequence[Logits],
        row: Logits,
    ) -> int:
        """The sampler's choice from `row` after it chose the run's tokens from `rows`."""
        chain = self._chain(request, run.prompt)
        for before, token in zip(rows, run.tokens, strict=False):
            chain.choose(before, ())
            chain.accepted(token)
        chosen = chain.choose(row, ())
        chain.close()
        return chosen


def judged(
    opened: Session,
    judge: Judge,
    texts: Iterable[str],
    *,
    rejects: bool = False,
    requests: Sequence[GenerateOptions] = (GREEDY, SAMPLED),
) -> list[Run]:
    """Generate from an empty memory, and check each run with the judge. Returns the runs.

    With rejection sampling (`rejects`), sampled texts are only checked to be possible.
    """
    runs = []
    for request, text in itertools.product(requests, texts):
        opened.forget()
        runs.append(run := generate(opened, text, request))
        if rejects and request.temperature:
            judge.check_support(run, request)
        else:
            judge.check(run, request)
    assert all(len(run.tokens) == N_PREDICT for run in runs)
    return runs


def assert_kept_and_rejected(runs: Sequence[Run]) -> None:
    """Check that drafts were both accepted and rejected; otherwise the judge's verdict means
    little."""
    assert sum(run.n_rejected for run in runs) > 0
    assert sum(run.stats.n_accepted for run in runs) > 0
