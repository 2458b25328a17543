"""Random models: the library loads them, they compute, and writing them costs no memory."""

from __future__ import annotations

import ctypes
import json
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import llama_cpp.llama_cpp as llama
import numpy as np
import pytest
from gguf import GGUFReader
from numpy.typing import NDArray

from lab.synth import plan_preset, plan_shape, write, write_header_only, write_preset
from lab.synth.shape import PRESETS, ImpossibleShape, find_preset, read_description
from offload.errors import BadRequest
from offload.ggml.library.lib import library
from offload.model import layer_of
from offload.model_file import read_facts

ROOT = Path(__file__).parents[2]
# Parameters in billions, as published, without the layers for multi-token prediction.
PUBLISHED_PARAMETERS = {
    "deepseek-v3": 671,
    "kimi-k2": 1026,
    "kimi-k3": 2780,
    "deepseek-v2": 236,
    "deepseek-v2-lite": 15.7,
    "deepseek-v3.2": 672,
    "glm-4.5": 353,
    "glm-4.5-air": 107,
    "glm-4.6": 353,
    "glm-5": 744,
    "glm-5.3-flash": 313,
    "qwen3-235b-a22b": 235,
    "qwen3-30b-a3b": 30.5,
    "qwen3-next-80b-a3b": 79.7,
    "qwen3.5-35b-a3b": 34.7,
    "qwen3.5-122b-a10b": 122,
    "qwen3.8-flash-next": 176,
    "deepseek-v4-flash": 284,
    "qwen2.5-72b": 72.7,
    "qwen2.5-32b": 32.8,
    "qwen2.5-0.5b": 0.494,
    "qwen3-0.6b": 0.596,
    "mistral-large": 123,
    "mistral-7b": 7.25,
    "llama-3.3-70b": 70.6,
    "llama-4-maverick": 401,
    "llama-4-scout": 108,
    "command-a": 111,
    "command-r7b": 8.03,
    "gemma-2-27b": 27.2,
    "gemma-2-2b": 2.61,
    "gemma-3n-e4b": 6.87,
    "minimax-m2": 229,
    "minimax-m3": 426,
    "gpt-oss-120b": 117,
    "gpt-oss-20b": 20.9,
}


@contextmanager
def opened(path: Path) -> Iterator[int]:
    library()  # quiets the library's log
    params = llama.llama_model_default_params()
    params.n_gpu_layers = 0
    params.use_extra_bufts = False  # with them the library aborts on AMX machines
    model = llama.llama_model_load_from_file(str(path).encode(), params)
    assert model, f"{path} does not load"
    try:
        yield model
    finally:
        llama.llama_model_free(model)


def logits_of(model: int, tokens: list[int]) -> NDArray[np.float32]:
    """Logits [n tokens, n_vocab] of one batch, through libllama alone."""
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_threads, params.n_threads_batch = 64, 16, 1, 1
    params.n_outputs_max = params.n_outputs_max_per_seq = len(tokens)
    context = llama.llama_init_from_model(model, params)
    assert context
    batch = llama.llama_batch_init(len(tokens), 0, 1)
    try:
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        assert llama.llama_decode(context, batch) == 0
        n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        rows = (llama.llama_get_logits_ith(context, i) for i in range(len(tokens)))
        return np.stack([np.ctypeslib.as_array(row, (n_vocab,)).copy() for row in rows])
    finally:
        llama.llama_batch_free(batch)
        llama.llama_free(context)


def assert_alive(path: Path, tokens: list[int]) -> None:
    with opened(path) as model:
        logits = logits_of(model, tokens)
    assert np.isfinite(logits).all()
    assert (logits.std(axis=1) > 0.5).all(), "flat logits"
    likeness = np.corrcoef(logits)[np.triu_indices(len(tokens), 1)]
    assert (likeness < 0.95).all(), "every token gets the same logits"
    assert (logits.argmax(axis=1) != tokens).any(), "every token only predicts itself"


@pytest.mark.parametrize("preset", PRESETS)
def test_every_tiny_preset_loads_and_tells_tokens_apart(preset: str, tmp_path: Path) -> None:
    path = write_preset(preset, tmp_path / "tiny.gguf", size="tiny")
    assert path.stat().st_size <= 10_000_000
    assert_alive(path, [3, 77, 140, 200])


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        ("deepseek-v3", {"size": "tiny-vulkan"}),
        ("deepseek-v3", {"fused_experts": True}),
        ("deepseek-v3", {"scale": 2.0, "n_expert": 32, "n_expert_used": 6}),
        ("deepseek-v2-lite", {"n_layer": 27, "vocab": "none"}),
        ("qwen3next", {"n_layer": 8}),
        ("qwen3moe", {"metadata": {"rope.freq_base": 5000.0}}),
    ],
)
def test_variants_load_and_tell_tokens_apart(
    preset: str, overrides: dict[str, object], tmp_path: Path
) -> None:
    path = write_preset(preset, tmp_path / "variant.gguf", **overrides)  # type: ignore[arg-type]
    assert_alive(path, [3, 77, 140, 200])


@pytest.mark.parametrize(
    "quant", ["f32", "bf16", "q4_0", "q4_K", "q5_K", "q6_K", "q8_0,experts=mxfp4"]
)
def test_every_type_can_be_written_and_computed_with(quant: str, tmp_path: Path) -> None:
    sizes = {"n_embd": 256, "n_ff": 256, "n_ff_exp": 256, "n_layer": 2, "n_expert": 8}
    path = write_preset("kimi-k2", tmp_path / "typed.gguf", quant=quant, **sizes)
    wanted = quant.rpartition("=")[2].upper()
    types = {t.name: t.tensor_type.name for t in GGUFReader(path).tensors}
    assert types["blk.1.ffn_up_exps.weight"] == wanted
    assert types["blk.1.ffn_gate_inp.weight"] == types["blk.1.attn_norm.weight"] == "F32"
    assert_alive(path, [3, 77, 140, 200])


@pytest.mark.parametrize("preset", PRESETS)
def test_a_full_shape_is_the_published_one_and_its_header_alone_says_all(
    preset: str, tmp_path: Path
) -> None:
    planned = plan_preset(preset, size="full", vocab="none")
    shape = planned.shape
    n_trunk = shape.number("block_count") - shape.number("nextn_predict_layers")
    n_parameters = sum(t.n_values for t in planned.tensors if layer_of(t.name) < n_trunk)
    assert n_parameters / 1e9 == pytest.approx(PUBLISHED_PARAMETERS[preset], rel=0.01)
    path = write_header_only(planned, tmp_path / "header.gguf")
    assert path.stat().st_size == planned.size_bytes
    assert path.stat().st_blocks * 512 < 1_000_000
    facts = read_facts(path)
    assert {name: place.entry.size_bytes for name, place in facts.weights.items()} == {
        t.name: t.n_bytes for t in planned.tensors
    }
    assert facts.architecture == PRESETS[find_preset(preset).name].architecture


def test_mixtures_give_the_types_and_the_size_of_published_files() -> None:
    planned = plan_preset("deepseek-r1", size="full", vocab="none")
    down = {t.type.name for t in planned.tensors if "ffn_down_exps" in t.name}
    assert down == {"Q4_K", "Q6_K"}
    assert {t.type.name for t in planned.tensors if "ffn_up_exps" in t.name} == {"Q4_K"}
    assert planned.size_bytes / 2**30 == pytest.approx(376.7, abs=1)
    planned = plan_preset("deepseek-r1", size="full", vocab="none", quant="UD-Q2_K_XL")
    kinds = Counter(t.type.name for t in planned.tensors)
    # Numbers that the loader prints for the published file (ik_llama.cpp #259).
    assert (kinds["Q2_K"], kinds["Q3_K"], kinds["F32"]) == (171, 3, 361)
    experts = {t.type.name for t in planned.tensors if "ffn_down_exps" in t.name}
    assert experts == {"Q2_K", "Q3_K"}


def test_a_layer_for_multi_token_prediction_is_in_the_file_and_not_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_preset("glm-4.6", tmp_path / "mtp.gguf")
    facts = read_facts(path)
    extra = [name for name in facts.weights if layer_of(name) == facts.number("block_count") - 1]
    assert any(".nextn." in name for name in extra)
    assert any("_exps" in name for name in extra)
    with caplog.at_level(logging.DEBUG, logger="offload.llama"), opened(path):
        pass
    for name in extra:
        assert f"unused tensor {name} " in caplog.text


def test_a_plan_tells_the_size_of_the_file_and_the_seed_its_bytes(tmp_path: Path) -> None:
    planned = plan_preset("deepseek-v3", n_layer=2, n_embd=1024, n_vocab=9001)
    seen: Counter[str] = Counter()

    def count(name: str, n_bytes: int) -> None:
        seen[name] += n_bytes

    path = write(planned, tmp_path / "planned.gguf", seed=5, on_progress=count)
    assert path.stat().st_size == planned.size_bytes
    assert seen == {t.name: t.n_bytes for t in planned.tensors}
    first = path.read_bytes()
    output = next(t for t in GGUFReader(path).tensors if t.name == "output.weight")
    assert len(np.unique(output.data, axis=0)) == 9001, "no two rows are equal"
    assert write(planned, path, seed=5).read_bytes() == first
    assert write(planned, path, seed=6).read_bytes() != first


def test_the_byte_vocabulary_spells_any_text(tmp_path: Path) -> None:
    path = write_preset("mistral-7b", tmp_path / "text.gguf", n_layer=1)
    every_character = "".join(map(chr, range(1, 0x250)))
    text = f"to the \N{SNOWMAN}\n\tdef f(): {every_character}".encode()
    with opened(path) as model:
        vocab = llama.llama_model_get_vocab(model)
        tokens = (llama.llama_token * (len(text) + 8))()
        n = llama.llama_tokenize(vocab, text, len(text), tokens, len(tokens), False, False)
        assert 0 < n < len(text), "no merge was used"
        assert b"".join(piece(vocab, tokens[i]) for i in range(n)) == text


def piece(vocab: int, token: int) -> bytes:
    buffer = ctypes.create_string_buffer(64)
    n = llama.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, True)
    return buffer.raw[:n]


def test_a_tokenizer_is_copied_from_another_file(tmp_path: Path) -> None:
    donor = write_preset("mistral-7b", tmp_path / "donor.gguf", n_layer=1, n_vocab=700)
    path = write_preset("deepseek-v3", tmp_path / "copy.gguf", vocab=donor, n_layer=2)

    def tokenizer(file: Path) -> dict[str, object]:
        fields = GGUFReader(file).fields
        return {k: f.contents() for k, f in fields.items() if k.startswith("tokenizer.")}

    assert tokenizer(path) == tokenizer(donor)
    assert GGUFReader(path).fields["deepseek2.vocab_size"].contents() == 700
    assert_alive(path, [3, 77, 140, 690])
    with pytest.raises(BadRequest, match="700 tokens, not 600"):
        plan_preset("deepseek-v3", vocab=donor, n_vocab=600)
    with pytest.raises(BadRequest, match="--vocab"):
        plan_preset("deepseek-v3", vocab=tmp_path / "missing.gguf")


def test_a_file_that_cannot_be_finished_leaves_nothing_behind(tmp_path: Path) -> None:
    def stop(_: str, __: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_preset("deepseek-v3", tmp_path / "cut.gguf", on_progress=stop)
    with pytest.raises(BadRequest, match=r"needs \d+\.\d+ GB but its disk has"):
        write_preset("kimi-k2", tmp_path / "huge.gguf", size="full", quant="f32", vocab="none")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("n_heads", "is_possible"), [(4, True), (128, False)])
def test_an_architecture_without_a_preset_can_be_described(
    n_heads: int, is_possible: bool, tmp_path: Path
) -> None:
    """An impossible shape, on which the library asserts, does not end the process."""
    metadata = {
        "block_count": 3,
        "embedding_length": 64,
        "feed_forward_length": 64,
        "context_length": 256,
        "attention.head_count": n_heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "expert_count": 8,
        "expert_used_count": 2,
    }
    description = tmp_path / "mine.json"
    described = {"architecture": "olmoe", "metadata": metadata, "n_vocab": 600}
    description.write_text(json.dumps(described))
    shape = read_description(description)
    if is_possible:
        assert_alive(write(plan_shape(shape), tmp_path / "olmoe.gguf"), [3, 77, 140, 200])
    else:
        with pytest.raises(ImpossibleShape, match="library cannot build"):
            plan_shape(shape)


def synth(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lab.synth", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_the_command_writes_what_its_dry_run_announced(tmp_path: Path) -> None:
    path = tmp_path / "cli.gguf"
    options = ("deepseek-r1", str(path), "--layers", "5", "--experts", "8", "--quant", "q4_0")
    dry = synth(*options, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert not path.exists()
    done = synth(*options)
    assert done.returncode == 0, done.stderr
    assert f"({path.stat().st_size} bytes)" in dry.stdout.replace("\n", " ")
    assert_alive(path, [3, 77, 140, 200])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("deepsek",), "did you mean"),
        (("kimi-k2", "--experts", "2000"), "the library cannot build this shape"),
        (("deepseek-v3", "--set", "rope"), "KEY=VALUE"),
        (("missing.json",), "missing.json"),
    ],
)
def test_the_command_refuses_in_one_line_with_exit_code_2(
    arguments: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    done = synth(arguments[0], str(tmp_path / "x.gguf"), *arguments[1:])
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_help_cuts_no_name_that_has_to_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = synth("--help")
    assert shown.returncode == 0
    assert "--expert-scales" in shown.stdout
    assert "…" not in shown.stdout
