"""Drafts by a model's MTP layers equal those of a fresh evaluation, and change no text."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path

import llama_cpp.llama_cpp as native
import pytest
from budgets import ON_GPU, budget
from mtp_parts import (
    NEAR_TIE,
    WAYS,
    check_each_draft,
    fresh_draft,
    half_of,
    open_mtp,
    prompts,
    written,
)
from own_layer_steps import steps_of
from resolved import config_of
from row_draft_parts import options_of_way
from splits import at_random
from test_sequences_elsewhere import in_file

from lab.options import Streaming, engine_options
from lab.synth.mtp import ARCHITECTURES, MIXTURES, SEVERAL, write_mtp
from offload.engine import EngineOptions, open_engine
from offload.errors import BadModel, BadRequest
from offload.ggml.library.lib import library
from offload.model_file import read_facts
from offload.plan.row_draft import MTP_ARCHITECTURES, plan_mtp
from offload.times.context_memory import ContextOptions
from specdec.decoding.loop import StepReport
from specdec.options import OF_TEXT
from specdec.policies.rules import Fixed
from specoffload.generation.generation import GenerateOptions
from specoffload.opening.drafters import usable_drafters
from specoffload.opening.header import target_facts
from specoffload.session.session import Session
from specoffload.slots.slot_files import read_sequence
from specoffload.speculation.speculation import DraftingParts


def options_of(way: str, path: Path, n_sequences: int = 1) -> EngineOptions:
    return options_of_way(way, partial(half_of, path), n_sequences, mtp=True)


@pytest.mark.parametrize("architecture", MIXTURES)
def test_texts_and_drafts_are_the_same_if_prompts_are_computed_in_passes(
    models: Path, architecture: str
) -> None:
    """Routers choose 2 of 8 experts, so all ways have to compute equal bits in equal batches."""
    few = {"expert_used_count": 2}
    path = write_mtp(models, architecture, name="-few", own=few)
    with open_engine(path, options_of("resident", path)) as engine:
        expected = [*steps_of(engine)]
    layers = plan_mtp(read_facts(path), ContextOptions(), None)
    least = budget(path, Streaming(n_gpu_layers=ON_GPU), "least")
    for way in ("streamed", "split"):
        opened = options_of(way, path)
        streaming = Streaming(
            n_gpu_layers=ON_GPU, passes="on", splitter=at_random(1),
            vram_bytes=least + layers.weight_bytes,
        )  # fmt: skip
        with open_engine(path, engine_options(opened, streaming=streaming)) as engine:
            assert [*steps_of(engine)] == expected
            counters = engine.counters()
        assert counters.passes > 0
        assert (counters.n_pairs_host > 0) == (way == "split")


def test_every_architecture_whose_layers_may_draft_is_tested() -> None:
    """`scripts/lab/run architectures --source` compares the list with the library's source."""
    assert set(ARCHITECTURES) == MTP_ARCHITECTURES


def test_keys_on_which_the_library_would_fail_are_refused(tmp_path: Path) -> None:
    path = write_mtp(tmp_path, "deepseek4", own={"attention.indexer.key_length": 64}, name="-64")
    with open_engine(path, options_of("resident", path)) as engine:
        assert engine.opened.row_draft is None
        assert "keys and the indexer's keys both have 64 values" in engine.opened.no_rows_reason
        assert len(engine.sequences.extend(0, [1, 2, 3])) == 3


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("n_sequences", [1, 4])
def test_each_draft_is_that_of_a_fresh_evaluation(
    models: Path, architecture: str, n_sequences: int, way: str
) -> None:
    """Drafts are accepted at random, so that rows of every length are kept and dropped."""
    path = write_mtp(models, architecture)
    with (
        open_engine(path, options_of(way, path, n_sequences)) as engine,
        open_engine(path, options_of("resident", path)) as fresh,
    ):
        check_each_draft(engine, fresh)


def test_layers_that_do_not_fit_are_left_out(models: Path) -> None:
    path = write_mtp(models, SEVERAL)
    options = options_of("split", path)
    tight = budget(path, Streaming(), "half")
    options = engine_options(options, vram_bytes=tight)
    with open_engine(path, options) as engine:
        assert engine.opened.row_draft is None
        assert engine.opened.plan is not None
        assert any("are left out" in reason for reason in engine.opened.plan.reasons)


# -- which models draft by themselves --------------------------------------------------------------


def test_own_layers_draft_unless_another_drafter_is_named(models: Path) -> None:
    path = write_mtp(models, "glm4moe")
    assert config_of(model=path).spec.options.drafters == (*OF_TEXT, "mtp")
    both = config_of(model=path, draft=path).spec.options.drafters
    assert both == (*OF_TEXT, "mtp", "draft")
    none = config_of(model=path, spec_given={"--spec-type": "none"})
    assert none.spec.options.drafters == ("none",)


RESOLVING = """
import sys
events = []
sys.addaudithook(lambda event, _: events.append(event))
from own_layer_steps import steps_of
from resolved import config_of
from row_draft_parts import options_of_way
from splits import at_random
from pathlib import Path
drafters = config_of(model=Path(sys.argv[1])).spec.options.drafters
started = {"subprocess.Popen", "os.fork", "os.posix_spawn", "os.system"} & {*events}
print(*drafters, sorted(started), "llama_cpp" in sys.modules)
"""


def test_resolving_starts_no_process_and_loads_no_library(models: Path) -> None:
    path = write_mtp(models, "glm4moe")
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    words = [sys.executable, "-c", RESOLVING, str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split("\n")[-2] == "ngram-mod suffix mtp [] False", done.stderr


def test_a_file_without_the_layers_of_its_header_runs_without_them(tmp_path: Path) -> None:
    path = write_mtp(tmp_path, "glm4moe", without=r"^blk\.4\.")
    given = {"--spec-type": "mtp"}
    config = config_of(model=path, device="cpu", threads=1, ctx_size=256, spec_given=given)
    with Session(config) as session:
        assert session.speculation is None
        why = "--spec-type mtp: its layers were left out of the file, so nothing drafts"
        assert why in session.notes
        assert written(session, [5, 6, 7], n=3)
    with open_engine(path, engine_options(device="cpu", n_ctx=256, mtp=True)) as engine:
        assert engine.opened.row_draft is None
        assert "left out of the file" in engine.opened.no_rows_reason


def test_a_library_without_such_contexts_runs_without_the_layers(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_mtp(models, "glm4moe")
    monkeypatch.setattr(library(), "has_nextn", False)
    with Session(config_of(model=path, device="cpu", threads=1, ctx_size=256)) as session:
        assert session.target.opened.row_draft is None
        assert any("drafts by ngram-mod, suffix, lengths" in note for note in session.notes)
        why = "library has no functions for it, so ngram-mod and suffix draft alone"
        assert any(why in note for note in session.notes)


def counting(path: Path, folder: Path, n: int) -> Path:
    """Copy a file with another number of layers for multi-token prediction in its header."""
    key = f"{read_facts(path).architecture}.nextn_predict_layers".encode()
    whole = path.read_bytes()
    at = whole.index(key) + len(key) + 4  # 4 bytes: the value's type
    found = folder / f"counts-{n}.gguf"
    found.write_bytes(whole[:at] + struct.pack("<I", n) + whole[at + 4 :])
    return found


def test_a_count_that_the_tensors_do_not_bear_out_is_told(models: Path, tmp_path: Path) -> None:
    path = write_mtp(models, "glm4moe")
    two = counting(path, tmp_path, 2)
    config = config_of(model=two, spec_given={"--spec-type": "mtp"})
    spec = usable_drafters(target_facts(config), config.spec)
    assert spec.options.drafters == ("none",)
    assert any("computes one of glm4moe" in reason for reason in spec.reasons)
    with pytest.raises(BadModel, match="nextn_predict_layers is 99 for 5 layers; the file is dama"):
        read_facts(counting(path, tmp_path, 99))
    none = counting(path, tmp_path, 0)
    with (
        pytest.raises(BadModel, match="has blk.4.nextn.*, but its header counts no layers of"),
        open_engine(none, engine_options(device="cpu", n_ctx=256)),
    ):
        pass


@pytest.mark.parametrize("mtp", [False, True])
@pytest.mark.parametrize(
    ("architecture", "weight"),
    [("deepseek2", "attn_norm"), ("glm4moe", "ffn_gate_inp"), ("qwen3next", "attn_norm")],
)
def test_a_layer_that_lacks_a_weight_is_told(
    models: Path, tmp_path: Path, architecture: str, weight: str, mtp: bool
) -> None:
    """The library reads all of these weights, with or without the layer."""
    layer = read_facts(write_mtp(models, architecture)).n_layers
    path = write_mtp(tmp_path, architecture, without=rf"^blk\.{layer}\.{weight}\.")
    why = rf"lacks blk\.{layer}\.{weight}\.weight of its layer for multi-token prediction"
    with (
        pytest.raises(BadModel, match=why),
        open_engine(path, engine_options(device="cpu", n_ctx=256, mtp=mtp)),
    ):
        pass


def test_rows_cost_one_copy_a_decode(models: Path) -> None:
    """The copy has the size of the rows, whatever the size of the context."""
    path = write_mtp(models, "deepseek2")
    with open_engine(path, options_of("resident", path)) as engine:
        assert engine.opened.row_draft is not None
        engine.sequences.extend(0, [5] * 30, 0)
        assert engine.opened.context.rows(30).shape == (30, 128)
        assert engine.opened.row_draft.length(0) == 0, (
            "nothing is computed before a draft asks for it"
        )


class SeldomAsked(Fixed):
    """A policy that says of the layers that they will not be asked for long."""

    says_so = True

    def may_ask(self, source: str) -> bool:
        return not self.says_so


@pytest.mark.parametrize("architecture", ["deepseek2", "qwen35moe", SEVERAL])
def test_rows_are_not_taken_while_nobody_will_draft(models: Path, architecture: str) -> None:
    """Afterwards the layers draft again. Texts are those of plain decoding all along."""
    path = write_mtp(models, architecture)
    text = (prompts(40, seed=2)[0] * 20)[:60]
    with open_mtp(path, "resident") as session:
        speculation, layers = session.speculation, session.target.opened.row_draft
        assert speculation is not None
        assert layers is not None
        plain = written(session, text, 40, draft_max=0)
        policy = SeldomAsked(2)
        speculation.use(DraftingParts(speculation.drafter, policy))
        session.forget()
        assert written(session, [*text], 10) == plain[:10]  # drafts need no rows of earlier tokens
        assert layers.is_paused
        n_taken = layers.n_taken
        with layers.paused():
            pass
        assert layers.is_paused, "a measurement does not end the pause"
        session.forget()
        policy.says_so = False
        *_, last = session.generate(text, GenerateOptions(n_predict=40, ignore_eos=True))
        assert not layers.is_paused
        assert layers.n_taken > n_taken
        assert last.stats is not None
        assert last.stats.n_drafted > 10
        session.forget()
        assert written(session, text, 40) == plain
        layers.is_paused = True
        speculation.policy = Fixed(2)
        assert not layers.is_paused, "another policy may want drafts at once"


@pytest.mark.parametrize("architecture", ["deepseek2", SEVERAL])
def test_a_text_that_is_rewound_while_rows_are_not_taken_is_not_another_one(
    models: Path, architecture: str
) -> None:
    path = write_mtp(models, architecture)
    with open_engine(path, options_of("resident", path)) as engine:
        layers = engine.opened.row_draft
        assert layers is not None
        first, other = [*range(5, 65)], [*range(100, 150)]
        engine.sequences.extend(0, first, 0)
        layers.is_paused = True
        engine.sequences.rewind(0, 10)
        engine.sequences.extend(0, other, 0)
        assert layers.saved(0, 60) == b"", "the first text's rows are not the other one's"
        assert layers.tail(0, [*first[:10], *other, 7]) == [7]


@pytest.mark.parametrize("architecture", ["deepseek2", "qwen35moe", SEVERAL])
def test_a_kept_prompt_drafts_what_a_fresh_one_does(models: Path, architecture: str) -> None:
    """One prompt continues the text, and others leave it earlier or share its beginning.

    Every token's hidden row is known, so drafts are those of a fresh text.
    """
    path = write_mtp(models, architecture)
    text, other = prompts(40, seed=2)[0], prompts(40, seed=4)[7]
    text = (text * 20)[:60]
    with (
        open_mtp(path, "resident", parallel=2) as session,
        open_engine(path, options_of("resident", path)) as fresh,
    ):
        assert session.target.opened.row_draft is not None
        found: list[tuple[list[int], tuple[int, ...]]] = []
        history: list[int] = []

        def note(report: StepReport) -> None:
            for _, round_ in report.rounds:
                found.append((list(history), round_.draft.tokens))
                history.extend(round_.emitted)

        session.batcher.on_step.append(note)
        answer: list[int] = []
        for prompt in (text, [*text, *other], [*text[:40], *other], [*text[:50], *other[::-1]]):
            history[:] = [*prompt]
            answer = written(session, prompt, draft_max=2)
        assert answer
        assert session.target.opened.row_draft.n_unknown_rows == 0
        n_equal = n_drafted = 0
        for before, tokens in found:
            if tokens:
                wanted, gaps = fresh_draft(fresh, before, len(tokens))
                n_drafted += 1
                n_equal += list(tokens) == wanted or min(gaps) < NEAR_TIE
        assert n_drafted > 20
        assert n_equal == n_drafted


def test_other_drafters_go_on_without_the_layers(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library(), "has_nextn", False)
    given = {"--spec-type": "mtp,suffix", "--spec-policy": "fixed"}
    path = write_mtp(models, "glm4moe")
    config = config_of(model=path, device="cpu", threads=1, ctx_size=256, spec_given=given)
    with Session(config) as session:
        assert session.speculation is not None
        assert session.speculation.drafter.name == "suffix"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_saved_text_drafts_what_a_fresh_one_does(
    models: Path, tmp_path: Path, architecture: str
) -> None:
    """The text is saved in host memory and in files, cut after drafts, and loaded elsewhere."""
    path, text = write_mtp(models, architecture), prompts(40, seed=2)[0] * 3
    own, without = tmp_path / "own", tmp_path / "without"
    # The library loads deepseek4's states only into contexts for as many sequences.
    n_plain = 2 if architecture == "deepseek4" else 1
    with (
        open_engine(path, options_of("resident", path, 2)) as engine,
        open_engine(path, options_of("resident", path)) as fresh,
        open_engine(
            path, engine_options(options_of("resident", path, n_plain), mtp=False)
        ) as plain,
    ):
        layers, sequences = engine.opened.row_draft, engine.sequences
        assert layers is not None

        def draft(sequence: int) -> list[int]:
            found, feed = [], layers.tail(sequence, text)
            for _ in range(2):
                found.append(int(layers.extend(sequence, feed)[-1].argmax()))
                feed = found[-1:]
            return found

        wanted, gaps = fresh_draft(fresh, text, 2)
        assert min(gaps) > NEAR_TIE
        sequences.extend(0, text[:-1], 0)
        assert draft(0) == wanted
        saved = sequences.save(0)
        assert len(saved) <= sequences.saved_bytes(0) + 16
        n_bytes = in_file(own, sequences, text[:-1])
        for source in (saved, own):
            sequences.extend(1, [1, 2, 3], 0)
            if isinstance(source, Path):
                found, n_read = read_sequence(source, sequences, 1)
                assert (list(found.tokens), n_read) == (text[:-1], n_bytes)
            else:
                sequences.load(1, source, text[:-1])
            assert draft(1) == wanted
            assert layers.n_unknown_rows == 0
            sequences.rewind(1, 0)
        assert read_sequence(own, plain.sequences, 0)[1] == n_bytes, "the layers' part is skipped"
        n_plain = in_file(without, plain.sequences, text[:-1])
        found, n_read = read_sequence(without, sequences, 1)
        assert (list(found.tokens), n_read) == (text[:-1], n_plain)
        draft(1)
        assert layers.n_unknown_rows == 1
        tokens = (ctypes.c_int32 * 512)()
        n = native.llama_state_seq_load_file(
            plain.opened.context.handle, str(own).encode(), 0, tokens, 512, ctypes.c_size_t()
        )
        assert n, "llama.cpp reads it as well"
        # The size of the layers' part is 16 bytes before the end.
        own.write_bytes(own.read_bytes()[:-16] + struct.pack("<Q", n_bytes // 2) + b"own rows")
        with pytest.raises(BadRequest, match="own is damaged"):
            read_sequence(own, sequences, 1)
        assert sequences.length(1) == 0
        assert draft(0) == wanted
