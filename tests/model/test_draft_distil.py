"""`draft distil`: the target's texts, a draft's weights as arrays, and their training."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from in_process import command

from lab.options import engine_options
from lab.synth import write_preset
from offload.engine import Engine, open_engine
from offload.model_file import read_facts
from specoffload.config.resolution import demo_file
from specoffload.draft_making.continuations import (
    N_NEW,
    N_PARALLEL,
    N_PROMPT,
    ContinuationFile,
    about_records,
    continue_prompts,
    continued,
)
from specoffload.draft_making.corpus import cut
from specoffload.draft_making.weights import read_weights, write_copy, written_types

TARGET, DRAFT = demo_file("target.gguf"), demo_file("draft.gguf")
HAS_TORCH = importlib.util.find_spec("torch") is not None
SOURCE = Path(__file__).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def target() -> Iterator[Engine]:
    options = engine_options(device="cpu", n_ctx=N_PARALLEL * 256, n_sequences=N_PARALLEL)
    with open_engine(TARGET, options) as engine:
        yield engine


def test_the_target_continues_each_prompt_greedily(target: Engine) -> None:
    tokens = target.tokenize(SOURCE, add_special=False)
    prompts = np.array([tokens[:N_PROMPT], tokens[N_PROMPT : 2 * N_PROMPT]], np.uint32)
    found = continued(target, prompts)
    assert (found["tokens"][:, :N_PROMPT] == prompts).all()
    assert (found["ids"][:, N_PROMPT - 1 :, 0] == found["tokens"][:, N_PROMPT:]).all()
    rows = target.sequences.extend(0, found["tokens"][1, :-1].tolist(), N_NEW)
    target.sequences.rewind(0, 0)
    # Batches of other sizes round in another way, so near-ties may differ.
    assert (rows.argmax(1) == found["tokens"][1, N_PROMPT:]).mean() > 0.97
    p = np.exp(rows[0] - rows[0].max())
    first = found["probabilities"][1, N_PROMPT - 1, 0]
    assert first == pytest.approx(p.max() / p.sum(), abs=0.02)


def test_texts_go_on_after_an_interruption(target: Engine, tmp_path: Path) -> None:
    tokens = target.tokenize(SOURCE, add_special=False)
    prompts = cut([np.resize(tokens, 60 * N_PROMPT).tolist()], [], N_PROMPT)
    about = about_records(target.facts, prompts)
    path = tmp_path / "continuations.bin"

    def stop_at(share: float) -> None:
        if share > 0.2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        continue_prompts(target, prompts, ContinuationFile(path, about), 1e-9, lambda _: stop_at(1))
    file = ContinuationFile(path, about)
    assert len(file) == 0
    continue_prompts(target, prompts, file, 1e-9, lambda _: None)  # no time: only the least
    assert len(file) == N_PARALLEL * -(-(prompts.n_held_out + N_PARALLEL) // N_PARALLEL)
    n = len(file)
    continue_prompts(target, prompts, ContinuationFile(path, about), 1e-9, lambda _: None)
    assert len(file) == n
    assert (file.records(0)["tokens"][:, :N_PROMPT] == prompts.tokens[:n]).all()


def test_a_copy_with_the_same_weights_is_the_same_model(tmp_path: Path) -> None:
    facts = read_facts(DRAFT)
    weights = read_weights(facts)
    assert weights["token_embd.weight"].shape == (4096, 160)
    copy = tmp_path / "copy.gguf"
    write_copy(DRAFT, copy, weights, written_types(facts))
    again = read_facts(copy)
    assert dict(again.header.metadata) == dict(facts.header.metadata)
    assert {n: p.entry.type for n, p in again.weights.items()} == {
        n: p.entry.type for n, p in facts.weights.items()
    }
    for name, values in read_weights(again).items():
        assert np.array_equal(values, weights[name]), name


def test_types_that_gguf_only_reads_are_written_as_q8_0(tmp_path: Path) -> None:
    facts = read_facts(DRAFT)
    name = "blk.0.attn_q.weight"
    place = facts.weights[name]
    other = replace(place, entry=replace(place.entry, type="q4_K"))
    found = written_types(replace(facts, weights={**facts.weights, name: other}))
    assert found[name] is Type.Q8_0
    assert found["output_norm.weight"] is Type.F32


def test_a_copy_that_fails_leaves_no_file(tmp_path: Path) -> None:
    facts = read_facts(DRAFT)
    bad = read_weights(facts) | {"blk.0.attn_q.weight": np.zeros((3, 5), np.float32)}
    with pytest.raises(Exception, match=r"."):
        write_copy(DRAFT, tmp_path / "copy.gguf", bad, written_types(facts))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "draft distil needs a model, a draft model and texts"),
        ((TARGET, DRAFT), "draft distil needs a model, a draft model and texts"),
        ((TARGET, DRAFT, __file__), "draft distil needs -o NEW.gguf"),
        ((TARGET, TARGET, __file__, "-o", "n.gguf"), "knows llama, qwen2, qwen3, not deepseek2"),
        ((TARGET, DRAFT, __file__, "-o", "none/n.gguf"), "there is no folder"),
        ((TARGET, DRAFT, __file__, "-o", DRAFT), "would overwrite what it is made of"),
        ((TARGET, DRAFT, __file__, "-o", TARGET), "would overwrite what it is made of"),
        ((TARGET, DRAFT, __file__, "-o", __file__), "would overwrite what it is made of"),
        ((TARGET, DRAFT, __file__, "-o", "."), "is a folder"),
        ((TARGET, DRAFT, __file__, "-o", "n.gguf", "--learning-rate", "2"), "--learning-rate 2"),
    ],
)
def test_what_cannot_be_trained_is_one_sentence(
    words: tuple[str | Path, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = command("draft", "distil", *words, "--device", "cpu")
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(HAS_TORCH, reason="torch is installed")
def test_without_torch_the_package_to_install_is_named(tmp_path: Path) -> None:
    new = tmp_path / "n.gguf"
    done = command("draft", "distil", TARGET, DRAFT, __file__, "-o", new, "--device", "cpu")
    assert done.returncode == 2
    assert "pip install 'specoffload[train]'" in " ".join(done.stderr.split())


@pytest.mark.extra("torch")
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_the_network_computes_what_libllama_computes(architecture: str, tmp_path: Path) -> None:
    import torch
    from draft_parts import exact_llama, write_synth

    from offload.torch_draft.plan import read_shape
    from specoffload.draft_making.network import TrainableDraft

    path = write_synth(architecture, tmp_path / "draft.gguf", "f32")
    facts = read_facts(path)
    network = TrainableDraft(
        read_shape(facts), read_weights(facts), torch.device("cpu"), torch.float32
    )
    tokens = np.random.default_rng(3).integers(0, 200, 24)
    ours = torch.softmax(network.logits(torch.from_numpy(tokens)[None])[0], -1).detach().numpy()
    with exact_llama(path) as llama:
        for i, token in enumerate(tokens.tolist()):
            assert np.abs(llama.probabilities([token]) - ours[i]).max() < 1e-4


@pytest.mark.extra("torch")
def test_training_raises_agreement_and_goes_on_after_ctrl_c(target: Engine, tmp_path: Path) -> None:
    import torch

    from offload.torch_draft.plan import read_shape
    from specoffload.draft_making.network import TrainableDraft
    from specoffload.draft_making.training import TrainingPlan, agreement, train

    torch.set_num_threads(1)
    facts = read_facts(DRAFT)
    weights, rng = read_weights(facts), np.random.default_rng(1)
    disturbed = {
        name: (w + rng.normal(0, 0.4 * w.std(), w.shape) if w.ndim == 2 else w).astype(np.float32)
        for name, w in weights.items()
    }
    tokens = target.tokenize(SOURCE, add_special=False)
    records = continued(target, np.array(tokens[: 8 * N_PROMPT], np.uint32).reshape(8, N_PROMPT))
    plan = TrainingPlan(40.0, 0.01, 4, tmp_path / "checkpoint.pt", "hash")

    def network() -> TrainableDraft:
        return TrainableDraft(read_shape(facts), disturbed, torch.device("cpu"), torch.float32)

    def ticking() -> Iterator[float]:
        return itertools.count(0.0, 1.0)

    n_called = 0

    def interrupt(share: float, words: str) -> None:
        nonlocal n_called
        n_called += 1
        if n_called == 5:
            raise KeyboardInterrupt

    ticks = ticking()
    with pytest.raises(KeyboardInterrupt):
        train(network(), records, records, plan, interrupt, lambda: next(ticks))
    shares: list[float] = []
    resumed = network()
    done = train(
        resumed, records, records, plan, lambda share, _: shares.append(share), lambda: next(ticks)
    )
    assert shares[0] > 5 / 40, "it goes on after five steps"
    assert done.n_steps > 10
    assert done.best_agreement > done.first_agreement + 0.05
    assert agreement(resumed, records, 4) == pytest.approx(done.best_agreement, abs=0.01)
    with pytest.raises(Exception, match="belongs to another draft"):
        train(network(), records, records, replace(plan, draft_hash="x"), lambda *_: None)


@pytest.mark.extra("torch")
@pytest.mark.slow
def test_the_command_writes_a_draft_and_judges_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr("specoffload.bench.draft_quality._N_TEXTS", (1, 1))
    (text := tmp_path / "text.py").write_text(SOURCE * 3, encoding="utf-8")
    new, before = tmp_path / "new.gguf", DRAFT.read_bytes()
    words = ("draft", "distil", TARGET, DRAFT, text, "-o", new, "--time-limit", "4")
    done = command(*words, "--device", "cpu", "-t", "1", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["agreement_after"] > found["agreement_before"] - 0.1, "few tokens, so noise"
    assert found["draft_quality"]["positions"][0]["agreement"] > 0.3
    assert found["verdict"]
    assert read_facts(new).architecture == "llama"
    assert DRAFT.read_bytes() == before
    assert not list(tmp_path.glob("*.new"))


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    other = write_preset("qwen3-0.6b", tmp_path / "other.gguf", seed=1)
    new = tmp_path / "n.gguf"
    done = command("draft", "distil", TARGET, other, __file__, "-o", new, "--device", "cpu")
    assert done.returncode == 2
    assert "needs a draft with the target's vocabulary: " in " ".join(done.stderr.split())
    assert not new.exists()
