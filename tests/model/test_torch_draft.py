"""The torch draft against an exact libllama: tokens, probabilities, rewinding, batching."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from speculation_parts import proposed

torch = pytest.importorskip("torch", reason="torch is not installed: scripts/test-extras runs this")

from draft_parts import (  # noqa: E402
    PRESETS,
    ExactLlama,
    LiveBytes,
    RecordingCapturer,
    exact_llama,
    storage,
    write_synth,
)
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

from lab.options import engine_options  # noqa: E402
from lab.synth import write_preset  # noqa: E402
from lab.synth.library import write_f32  # noqa: E402
from offload.engine import open_engine  # noqa: E402
from offload.errors import BadModel, BadRequest, DeviceFailed, DoesNotFit  # noqa: E402
from offload.torch_draft.draft import Drafted, TorchDraft  # noqa: E402
from offload.torch_draft.plan import TorchDraftOptions  # noqa: E402
from offload.torch_draft.steps import Draws, greedy  # noqa: E402
from specdec.drafters.model import ModelDrafter  # noqa: E402
from specdec.policies.rules import PMin  # noqa: E402
from specoffload.config.resolution import demo_file, demo_prompts  # noqa: E402

pytestmark = pytest.mark.extra("torch")

N_CTX = 512
N_PROMPTS = 60
N_STEPS = 6
MOST = {"f32": 1e-3, "bf16": 2e-2}  # difference of probabilities from exact arithmetic


@dataclass(frozen=True)
class Files:
    """A model file, its f32 copy, and prompts for both."""

    path: Path
    exact: Path
    prompts: list[list[int]]


@pytest.fixture(scope="module", params=["embedded", *PRESETS])
def files(request: pytest.FixtureRequest, models: Path) -> Files:
    name = request.param
    if name == "embedded":
        path = demo_file("draft.gguf")
        prompts = real_prompts(path)
    else:
        path = write_synth(name, models / f"draft-{name}.gguf", "bf16")
        prompts = random_prompts(512)
    return Files(path, write_f32(path, models / f"draft-{name}-f32.gguf"), prompts)


def real_prompts(path: Path) -> list[list[int]]:
    """Token sequences of many lengths from the embedded texts."""
    text = "\n".join(demo_prompts())
    with open_engine(path, engine_options(device="cpu", n_ctx=256)) as engine:
        tokens = engine.tokenize(text, add_special=False)
    rng = np.random.default_rng(3)
    starts = rng.integers(0, len(tokens) - 80, N_PROMPTS)
    lengths = rng.integers(1, 80, N_PROMPTS)
    return [tokens[s : s + n] for s, n in zip(starts, lengths, strict=True)]


def random_prompts(n_vocab: int) -> list[list[int]]:
    rng = np.random.default_rng(4)
    return [rng.integers(0, n_vocab, n).tolist() for n in rng.integers(1, 60, N_PROMPTS)]


def judged(llama: ExactLlama, prompt: list[int], drafted: Drafted) -> Iterator[tuple[float, ...]]:
    """Yields three errors of each drafted token.

    They are the error of its p, the error of the gap between the two best tokens, and how much less
    likely it is than the best token.
    """
    llama.clear()
    p = llama.probabilities(prompt)
    for i, token in enumerate(drafted.tokens[:, 0].tolist()):
        second, best = np.sort(p)[-2:]
        yield (
            abs(p[token] - drafted.p[i, 0]),
            abs(best - second - drafted.gap[i, 0]),
            best - p[token],
        )
        p = llama.probabilities([token])


@pytest.mark.parametrize("dtype", MOST)
def test_tokens_and_probabilities_are_libllamas(files: Files, dtype: str) -> None:
    worst = np.zeros(3)
    n_other = 0
    with (
        TorchDraft(files.path, TorchDraftOptions(n_ctx=N_CTX, dtype=dtype)) as draft,  # type: ignore[arg-type]
        exact_llama(files.exact) as llama,
    ):
        for prompt in files.prompts:
            draft.rewind(0, 0)
            for differences in judged(llama, prompt, draft.draft([(0, prompt)], N_STEPS)):
                worst = np.maximum(worst, differences)
                n_other += differences[2] > 0
    print(f"{files.path.name} {dtype}: worst {worst}, {n_other} other tokens")
    assert worst[0] <= MOST[dtype]
    assert worst[1] <= 2 * MOST[dtype]
    assert worst[2] <= 2 * MOST[dtype], "another token than the best, and no near tie"
    assert n_other <= (0 if dtype == "f32" else 0.05 * N_PROMPTS * N_STEPS)


def test_probabilities_over_ten_candidates_are_their_share_of_the_ten() -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(3))
    best = np.exp(-np.sort(-logits.numpy().astype(np.float64), axis=1)[:, :10])
    token, p, gap = greedy(logits.clone(), 10)
    assert token.tolist() == logits.argmax(-1).tolist()
    assert p.tolist() == pytest.approx((best[:, 0] / best.sum(1)).tolist(), rel=1e-5)
    assert gap.tolist() == pytest.approx(
        ((best[:, 0] - best[:, 1]) / best.sum(1)).tolist(), rel=1e-5
    )
    assert greedy(logits.clone())[1].max() < p.max()


# -- variants of the architectures ----------------------------------------------------------------

YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 48,
}
VARIANTS = {
    "linear": ("qwen3", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    "yarn": ("qwen3", YARN),
    "yarn, other magnitude": ("qwen3", {**YARN, "rope.scaling.attn_factor": 1.3}),
    "base": ("llama", {"rope.freq_base": 12345.0}),
    "one head of keys": ("qwen2", {"attention.head_count_kv": 1}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_rope_and_heads_are_libllamas(variant: str, tmp_path: Path) -> None:
    architecture, metadata = VARIANTS[variant]
    path = write_synth(architecture, tmp_path / "variant.gguf", "f32", metadata=metadata)
    options = TorchDraftOptions(n_ctx=N_CTX, dtype="f32")
    with TorchDraft(path, options) as draft, exact_llama(path) as llama:
        prompt = random_prompts(512)[0] * 4  # longer than YaRN's original context
        found = list(judged(llama, prompt, draft.draft([(0, prompt)], 16)))
    assert np.max(found, axis=0) == pytest.approx(np.zeros(3), abs=1e-4)


QUANTS = ("f16", "bf16", "q8_0", "q4_0", "q4_K", "q6_K", "q5_0")


@pytest.mark.parametrize("quant", QUANTS)
def test_every_quantisation_is_read_as_libllama_reads_it(quant: str, tmp_path: Path) -> None:
    path = write_synth("qwen2", tmp_path / "quant.gguf", quant, n_embd=256, n_ff=256)
    exact = write_f32(path, tmp_path / "exact.gguf")
    options = TorchDraftOptions(n_ctx=N_CTX, dtype="f32")
    with TorchDraft(path, options) as draft, exact_llama(exact) as llama:
        types = {place.entry.type for place in draft.facts.weights.values()}
        assert quant.lower() in {kind.lower() for kind in types}
        for prompt in random_prompts(512)[:5]:
            draft.rewind(0, 0)
            found = list(judged(llama, prompt, draft.draft([(0, prompt)], N_STEPS)))
            assert np.max(found, axis=0) == pytest.approx(np.zeros(3), abs=1e-4)


# -- sequences ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(models: Path) -> Path:
    return write_synth("qwen3", models / "draft-tiny.gguf", "f32")


@pytest.fixture(scope="module")
def three(tiny: Path) -> Iterator[TorchDraft]:
    """A draft with three sequences. `fresh` is its twin with one sequence."""
    options = TorchDraftOptions(n_ctx=128, n_sequences=3, dtype="f32", samples=True)
    with TorchDraft(tiny, options) as draft:
        yield draft


@pytest.fixture(scope="module")
def fresh(tiny: Path) -> Iterator[TorchDraft]:
    with TorchDraft(tiny, TorchDraftOptions(n_ctx=128, dtype="f32")) as draft:
        yield draft


def same(found: Drafted, part: int, twin: Drafted) -> None:
    assert found.tokens[:, part].tolist() == twin.tokens[:, 0].tolist()
    assert found.p[:, part] == pytest.approx(twin.p[:, 0], abs=1e-4)
    assert found.gap[:, part] == pytest.approx(twin.gap[:, 0], abs=2e-4)


actions = st.lists(
    st.tuples(
        st.sampled_from(["feed", "draft", "more", "cut"]),
        st.sets(st.integers(0, 2), min_size=1),
        st.lists(st.integers(0, 511), min_size=1, max_size=12),
        st.integers(1, 4),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(actions)
def test_any_order_of_calls_leaves_what_a_fresh_evaluation_would(
    three: TorchDraft, fresh: TorchDraft, steps: list[tuple[str, set[int], list[int], int]]
) -> None:
    held: dict[int, list[int]] = {s: [] for s in range(3)}
    ends: dict[int, int] = {}  # last drafted token by sequence that may draft more
    for s in held:
        three.rewind(s, 0)
    for action, chosen, tokens, n in steps:
        sequences = sorted(chosen)
        if max(len(h) for h in held.values()) > 100:
            break
        if action == "feed":
            three.extend(sequences[0], tokens, 0)
            held[sequences[0]] += tokens
            ends.pop(sequences[0], None)
        elif action == "cut":
            s = sequences[0]
            held[s] = held[s][: len(held[s]) * n // 5]
            three.rewind(s, len(held[s]))
            ends.pop(s, None)
        elif action == "draft":
            parts = [(s, tokens[: 1 + s * 3]) for s in sequences]
            last = three.draft(parts, n)
            for i, (s, new) in enumerate(parts):
                same(last, i, from_scratch(fresh, held[s] + new, n))
                held[s] += [*new, *last.tokens[:-1, i].tolist()]
            ends = dict(zip(sequences, last.tokens[-1].tolist(), strict=True))
        elif ends:
            wanted = list(ends)[: max(1, len(ends) - n % 2)]
            last = three.draft_more(wanted, n)
            for i, s in enumerate(wanted):
                same(last, i, from_scratch(fresh, [*held[s], ends[s]], n))
                held[s] += [ends[s], *last.tokens[:-1, i].tolist()]
            ends = dict(zip(wanted, last.tokens[-1].tolist(), strict=True))
        assert [three.length(s) for s in range(3)] == [len(held[s]) for s in range(3)]


def test_a_saved_sequence_goes_on_in_another_lane(three: TorchDraft) -> None:
    text = [5, 7, 11, 13, 17]
    for s in range(3):
        three.rewind(s, 0)
    three.extend(1, text, 0)
    state = three.save(1)
    assert len(state) == three.saved_bytes(1)
    wanted = three.draft([(1, [19])], 4)
    three.rewind(1, 0)
    three.extend(2, [3] * 9, 0)
    three.load(2, state, text)
    assert three.length(2) == len(text)
    same(three.draft([(2, [19])], 4), 0, wanted)
    with pytest.raises(DeviceFailed, match="are no state of 4 tokens"):
        three.load(0, state, text[:4])


def from_scratch(draft: TorchDraft, history: list[int], n_steps: int) -> Drafted:
    draft.rewind(0, 0)
    return draft.draft([(0, history)], n_steps)


def test_a_long_prompt_in_chunks_is_the_prompt_token_by_token(tiny: Path) -> None:
    prompt = np.random.default_rng(6).integers(0, 512, 300).tolist()
    with TorchDraft(tiny, TorchDraftOptions(n_ctx=N_CTX, dtype="f32")) as draft:
        whole = draft.draft([(0, prompt)], 4)
        assert draft.counters.n_fed == len(prompt)
        draft.rewind(0, 0)
        for token in prompt[:-1]:
            draft.draft([(0, [token])], 1)
        same(draft.draft([(0, prompt[-1:])], 4), 0, whole)
        assert draft.counters.n_fed == 2 * len(prompt), "no token was evaluated twice"


def test_k_tokens_are_k_steps_and_one_copy(three: TorchDraft) -> None:
    for s in range(3):
        three.rewind(s, 0)
    before = (three.counters.n_steps, three.counters.n_host_copies)
    three.draft([(0, [1, 2]), (2, [3])], 8)
    three.draft_more([0, 2], 4)
    assert (three.counters.n_steps, three.counters.n_host_copies) == (before[0] + 12, before[1] + 2)


class StepByStep:
    """A draft that drafts one token in a call."""

    n_steps_max = 1

    def __init__(self, draft: TorchDraft) -> None:
        self._draft = draft

    def __getattr__(self, name: str) -> object:
        return getattr(self._draft, name)


def test_drafts_in_blocks_are_those_of_a_step_per_call(
    three: TorchDraft, fresh: TorchDraft
) -> None:
    for s in range(3):
        three.rewind(s, 0)
    fresh.rewind(0, 0)
    single, blocks = ModelDrafter(StepByStep(fresh)), ModelDrafter(three)  # type: ignore[arg-type]
    rng = np.random.default_rng(21)
    text = [1, 2, 3]
    for i in range(25):
        limit = int(rng.integers(1, 9))
        a = proposed(single, 0, text, PMin(8, 0.2), limit)
        b = proposed(blocks, 0, text, PMin(8, 0.2), limit)
        assert a.tokens == b.tokens
        assert b.probs == pytest.approx(a.probs, abs=1e-4)
        text += [*a.tokens[: i % 3], int(rng.integers(512))]
    assert three.counters.n_host_copies < fresh.counters.n_host_copies


# -- captured steps -------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", PRESETS)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_replayed_steps_are_the_eager_ones(
    architecture: str, dtype: str, models: Path, tmp_path: Path
) -> None:
    """Replaying a captured step runs none of its Python code, and drafts the same tokens."""
    path = write_synth(architecture, tmp_path / "captured.gguf", "bf16")
    options = TorchDraftOptions(n_ctx=300, n_sequences=2, dtype=dtype, samples=True)  # type: ignore[arg-type]
    capturer = RecordingCapturer()
    uniforms = np.random.default_rng(2).random((5, 1))
    with TorchDraft(path, options) as eager, TorchDraft(path, options, capturer) as captured:
        for draft in (eager, captured):
            draft.found = []  # type: ignore[attr-defined]
            for prompt in random_prompts(512)[:6]:
                draft.rewind(0, 0)
                draft.rewind(1, 0)
                draft.found.append(draft.draft([(0, prompt[:3]), (1, prompt)], 5))  # type: ignore[attr-defined]
                draft.found.append(draft.draft_more([1], 3))  # type: ignore[attr-defined]
                draft.rewind(1, len(prompt) + 2)
                drawing = Draws(0.8, uniforms)
                draft.found.append(draft.draft([(1, prompt[:2])], 5, drawing))  # type: ignore[attr-defined]
        for a, b in zip(eager.found, captured.found, strict=True):  # type: ignore[attr-defined]
            assert (a.tokens == b.tokens).all()
            assert (a.p == b.p).all()
            assert (a.gap == b.gap).all()
            assert a.rows is None or (a.rows == b.rows).all()
        counters = captured.counters
        assert counters.n_replays == counters.n_steps == eager.counters.n_steps
        assert eager.counters.n_replays == 0
        assert counters.n_captures == len(capturer.graphs) < 12


def test_graphs_touch_only_tensors_that_stay(tiny: Path) -> None:
    capturer = RecordingCapturer()
    with TorchDraft(tiny, TorchDraftOptions(n_ctx=300, dtype="bf16"), capturer) as draft:
        draft.draft([(0, [1, 2, 3])], 5)
        steps = draft._steps
        assert steps is not None
        network = steps.network
        lasting = {
            storage(t)
            for t in (
                *network._t.values(), network._row_base, network._columns,
                steps._order, steps._lane,
            )
        }  # fmt: skip
        assert len({storage(t) for t in network._t.values()}) == 1, "one block"
        for graph in capturer.graphs:
            assert graph.outside <= lasting
        addresses = [steps._inputs.data_ptr(), steps._host["inputs"].data_ptr()]
        n_captures = draft.counters.n_captures
        for length in range(3, 60):
            draft.rewind(0, min(length, draft.length(0)))
            draft.draft([(0, [length, 7])], 2)
        now = [steps._inputs.data_ptr(), steps._host["inputs"].data_ptr()]
        assert addresses == now
        assert draft.counters.n_captures <= n_captures + 1  # two tokens need their own capture


# -- drawing --------------------------------------------------------------------------------------


def test_drawn_tokens_are_distributed_as_their_rows_say(three: TorchDraft) -> None:
    rng = np.random.default_rng(12)
    three.rewind(0, 0)
    three.extend(0, [5, 6, 7], 0)
    counts = np.zeros(three.n_vocab)
    n_draws = 3000
    for _ in range(n_draws):
        three.rewind(0, 3)
        found = three.draft([(0, [8])], 1, Draws(0.7, rng.random((1, 1))))
        counts[found.tokens[0, 0]] += 1
    row = found.row(0, 0)
    assert row.sum() == pytest.approx(1.0)
    assert found.p[0, 0] == pytest.approx(row.max(), abs=1e-6)
    three.rewind(0, 3)
    cold = three.draft([(0, [8])], 1)
    hot = row**0.7 / (row**0.7).sum()  # the probabilities at temperature 1
    assert cold.p[0, 0] == pytest.approx(hot.max(), abs=1e-4)
    frequent = row > 5 / n_draws
    expected = np.append(row[frequent], row[~frequent].sum()) * n_draws
    seen = np.append(counts[frequent], counts[~frequent].sum())
    chi2 = float(((seen - expected) ** 2 / expected).sum())
    degrees = len(expected) - 1
    assert chi2 < degrees + 5 * np.sqrt(2 * degrees)


# -- a vocabulary that is cut, or pruned ----------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])  # separate output matrix, and tied
def test_a_pruned_vocabulary_drafts_the_best_of_what_was_kept(
    architecture: str, tmp_path: Path
) -> None:
    path = write_synth(architecture, tmp_path / "pruned.gguf", "f32")
    kept = tuple(range(0, 512, 3))
    whole = TorchDraftOptions(n_ctx=N_CTX, dtype="f32", samples=True)
    pruned = replace(whole, kept=kept)
    drawing = Draws(1.0, np.full((1, 1), 0.3))
    with TorchDraft(path, whole) as all_, TorchDraft(path, pruned) as some:
        assert some.layout.pieces["output"].shape == (len(kept), all_.shape.n_embd)
        for prompt in random_prompts(512)[:10]:
            for draft in (all_, some):
                draft.rewind(0, 0)
            row = all_.draft([(0, prompt)], 1, drawing).row(0, 0)
            of_kept = np.zeros(512)
            of_kept[list(kept)] = row[list(kept)]
            of_kept /= of_kept.sum()
            drawn = some.draft([(0, prompt)], 1, drawing)
            assert drawn.row(0, 0) == pytest.approx(of_kept, abs=1e-5)
            assert drawn.tokens[0, 0] in kept
            some.rewind(0, 0)
            best = some.draft([(0, prompt)], 1)
            assert best.tokens[0, 0] == of_kept.argmax()
            assert best.p[0, 0] == pytest.approx(of_kept.max(), abs=1e-5)


def test_padding_that_the_target_does_not_have_is_never_drafted(tiny: Path) -> None:
    with TorchDraft(tiny, TorchDraftOptions(n_ctx=N_CTX, dtype="f32", n_vocab=40)) as draft:
        for prompt in random_prompts(512)[:20]:
            draft.rewind(0, 0)
            assert draft.draft([(0, prompt)], 4).tokens.max() < 40


# -- bad input ------------------------------------------------------------------------------------


def test_other_architectures_are_refused_by_name(tiny_moe: Path, models: Path) -> None:
    with pytest.raises(BadModel, match=r"knows llama, qwen2, qwen3, not deepseek2"):
        TorchDraft(tiny_moe)


def test_a_tensor_that_the_graph_would_leave_out_is_refused(tmp_path: Path) -> None:
    path = write_preset("qwen2.5-72b", tmp_path / "bias.gguf", quant="f32")
    TorchDraft(path, TorchDraftOptions(n_ctx=256)).close()
    data = path.read_bytes()
    name = b"blk.0.attn_output.weight"
    assert data.count(name) == 1
    path.write_bytes(data.replace(name, b"blk.0.attn_outpux.weight"))
    with pytest.raises(BadModel, match=r"tensor blk\.0\.attn_outpux\.weight has no place"):
        TorchDraft(path)


def test_calls_that_cannot_be_are_refused_and_change_nothing(three: TorchDraft) -> None:
    for s in range(3):
        three.rewind(s, 0)
    three.extend(0, [1, 2, 3], 0)
    bad = (
        (
            lambda: three.draft([(0, list(range(100)))], 60),
            DoesNotFit,
            "exceed the draft's context",
        ),
        (lambda: three.draft([(3, [1])], 1), BadRequest, "sequence 3 does not exist"),
        (lambda: three.draft([(0, [])], 1), BadRequest, "no new token"),
        (lambda: three.draft([(0, [1]), (0, [2])], 1), BadRequest, "twice"),
        (lambda: three.draft([(0, [512])], 1), BadRequest, "token 512 is not in the vocabulary"),
        (lambda: three.draft([(0, [1])], 17), BadRequest, "17 steps at once"),
        (lambda: three.draft_more([1], 1), BadRequest, "sequence 1 was not in the last draft"),
        (lambda: three.rewind(0, 4), BadRequest, "4 tokens cannot be kept of 3"),
    )
    for call, error, words in bad:
        with pytest.raises(error, match=words):
            call()
        assert three.length(0) == 3


def test_a_draft_without_drawing_says_so(fresh: TorchDraft) -> None:
    with pytest.raises(BadRequest, match="without drawing"):
        fresh.draft([(0, [1])], 1, Draws(1.0, np.zeros((1, 1))))


def test_a_kept_token_beyond_the_vocabulary_is_refused(tiny: Path) -> None:
    with pytest.raises(BadRequest, match="kept token 512 is not in the vocabulary of 512"):
        TorchDraft(tiny, TorchDraftOptions(n_ctx=256, kept=(3, 512)))


def test_a_closed_draft_says_so_and_closes_twice(tiny: Path) -> None:
    draft = TorchDraft(tiny, TorchDraftOptions(n_ctx=256))
    draft.close()
    draft.close()
    with pytest.raises(BadRequest, match="has been closed"):
        draft.draft([(0, [1])], 1)


# -- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_activations_stay_within_what_was_planned(tiny: Path, dtype: str) -> None:
    n_ctx = 4096
    prompt = np.random.default_rng(9).integers(0, 512, n_ctx - 20).tolist()
    options = TorchDraftOptions(n_ctx=n_ctx, dtype=dtype, samples=True)  # type: ignore[arg-type]
    with TorchDraft(tiny, options) as draft:
        draft.extend(0, prompt[: n_ctx // 2], 0)
        with LiveBytes() as live:
            draft.extend(0, prompt[n_ctx // 2 : n_ctx // 2 + 200], 0)
            draft.draft([(0, [1])], 4, Draws(1.0, np.full((4, 1), 0.5)))
        assert draft.layout.chunk < 512, "depth limits the chunk, so the limit is tried"
        assert 0.2 * draft.layout.scratch_bytes < live.most <= draft.layout.scratch_bytes


def test_everything_is_freed_on_close(tiny: Path) -> None:
    draft = TorchDraft(tiny, TorchDraftOptions(n_ctx=256))
    draft.draft([(0, [1, 2])], 3)
    assert draft._steps is not None
    block = StorageWeakRef(draft._steps.network._t["kv"].untyped_storage())
    assert not block.expired()
    draft.close()
    gc.collect()
    assert block.expired()


def test_a_step_that_the_device_cannot_compute_fails_when_it_is_tried_out(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = TorchDraft(tiny, TorchDraftOptions(n_ctx=256, samples=True))
    before = draft.draft([(0, [1, 2])], 4).tokens
    draft.rewind(0, 0)
    draft.try_out()
    assert draft.length(0) == 0
    assert (draft.draft([(0, [1, 2])], 4).tokens == before).all()

    def refused(*_: object) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr("offload.torch_draft.network.product", refused)
    with pytest.raises(DeviceFailed, match="failed on cpu: no kernel image"):
        draft.try_out()
    with pytest.raises(BadRequest, match="has been closed"):
        draft.draft([(0, [1])], 1)
