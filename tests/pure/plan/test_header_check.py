"""A header whose numbers contradict its weights is refused; a plan of any other adds up."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.errors import BadModel, DoesNotFit
from offload.header_check import COUNTS, SINGLE, check_header
from offload.model import Header, ModelFacts, TensorEntry, WeightPlace
from offload.plan.placement import PlanRequest, make_plan
from offload.times.context_memory import ContextOptions, context_memory, layer_context_bytes

ROOT = Path(__file__).parents[3]
N_EMBD, N_FF, N_EXPERTS, N_LAYERS = 64, 32, 4, 3
REMOVED = None
GOOD: dict[str, Any] = {
    "block_count": N_LAYERS,
    "context_length": 4096,
    "embedding_length": N_EMBD,
    "attention.head_count": 4,
    "attention.head_count_kv": (2, 2, 2),
    "attention.key_length": 16,
    "attention.value_length": 16,
    "expert_count": N_EXPERTS,
    "expert_used_count": 2,
    "expert_feed_forward_length": N_FF,
    "feed_forward_length": N_FF,
}


def f32(name: str, *shape: int) -> TensorEntry:
    n = 1
    for size in shape:
        n *= size
    return TensorEntry(name, "f32", shape, 0, 4 * n)


def facts(
    architecture: str = "qwen3moe", more: tuple[TensorEntry, ...] = (), **changed: Any
) -> ModelFacts:
    """A mixture of three layers, with other values of keys (`__` stands for a dot)."""
    values = GOOD | {key.replace("__", "."): value for key, value in changed.items()}
    metadata = {f"{architecture}.{k}": v for k, v in values.items() if v is not REMOVED}
    entries = {"token_embd.weight": f32("token_embd.weight", N_EMBD, 100)}
    for i in range(N_LAYERS):
        for entry in (
            f32(f"blk.{i}.attn_k.weight", N_EMBD, 32),
            f32(f"blk.{i}.attn_q.weight", N_EMBD, 64),
            f32(f"blk.{i}.ffn_gate_exps.weight", N_EMBD, N_FF, N_EXPERTS),
            f32(f"blk.{i}.ffn_up_exps.weight", N_EMBD, N_FF, N_EXPERTS),
            f32(f"blk.{i}.ffn_down_exps.weight", N_FF, N_EMBD, N_EXPERTS),
        ):
            entries[entry.name] = entry
    entries |= {entry.name: entry for entry in more}
    lengths = {key: len(value) for key, value in metadata.items() if isinstance(value, tuple)}
    # A list of strings, or a long one, is not read: its length alone is known.
    texts = [k for k, v in metadata.items() if isinstance(v, tuple) and any(map(_is_text, v))]
    header = Header(
        {k: v for k, v in metadata.items() if k not in texts}, tuple(entries.values()), lengths
    )
    places = {name: WeightPlace(Path("m.gguf"), entry) for name, entry in entries.items()}
    return ModelFacts(Path("m.gguf"), architecture, "m", header, places)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def test_a_good_header_passes() -> None:
    check_header(facts())
    check_header(facts(expert_used_count=(1, 2, 4)))
    check_header(facts(nextn_predict_layers=1, block_count=4))  # whose weights were left out


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"block_count": REMOVED}, "lacks qwen3moe.block_count"),
    ({"context_length": REMOVED}, "lacks qwen3moe.context_length"),
    ({"embedding_length": REMOVED}, "lacks qwen3moe.embedding_length"),
    ({"block_count": 0}, "block_count is 0"),
    ({"full_attention_interval": 0}, "full_attention_interval is 0"),  # layers are divided by it
    ({"block_count": (300_000_000, 1)}, "block_count is a list of 2 values"),
    ({"block_count": 5}, "block_count is 5, and the last weights are those of layer 2"),
    ({"block_count": 2}, "block_count is 2, and there are weights of layer 2"),
    ({"block_count": 300_000_000}, "block_count is 300000000 for 16 weights"),
    ({"nextn_predict_layers": 3}, "nextn_predict_layers is 3 for 3 layers"),
    ({"expert_count": 0, "expert_used_count": 0}, "expert_count is 0, and blk.0.ffn_gate_exps"),
    ({"expert_count": 3}, "expert_count is 3, and blk.0.ffn_gate_exps.weight holds 4 experts"),
    ({"expert_count": 5000}, "expert_count is 5000, and blk.0"),
    ({"expert_count": 1_000_000}, "expert_count is 1000000, and blk.0"),
    ({"expert_count": REMOVED}, "expert_count is 0, and blk.0"),
    ({"expert_used_count": 999}, "expert_used_count is 999, and must be from 1 to the 4"),
    ({"expert_used_count": 0}, "expert_used_count is 0, and must be from 1 to the 4"),
    ({"expert_used_count": REMOVED}, "lacks qwen3moe.expert_used_count"),
    ({"expert_used_count": 1e30}, r"expert_used_count is 1e\+30, and must be a whole number"),
    ({"attention__head_count_kv": -4}, "head_count_kv is -4, and must be from 0"),
    ({"attention__head_count_kv": (2, -2, 2)}, "head_count_kv is -2, and must be from 0"),
    ({"attention__key_length": -128}, "key_length is -128, and must be from 0"),
    ({"attention__key_length": "16"}, "key_length is '16', and must be a whole number"),
    ({"attention__key_length": 2**32}, "key_length is 4294967296, and must be from 0"),
    ({"attention__head_count": (4,) * 4}, "head_count lists 4 values for 3 layers"),
    ({"attention__head_count": ("a", "b")}, "head_count is a list of 2 values that are no numbers"),
    ({"attention__head_count": True}, "head_count is True, and must be a whole number"),
    ({"embedding_length": 128}, "embedding_length is 128, and a row of token_embd.weight has 64"),
    ({"ple__heads_per_ngram": 2, "ple__ngram_size": 1}, "ple.ngram_size is 1, and must be 2"),
    ({"ple__heads_per_ngram": 2, "ple__ngram_size": 2}, "ple.layer_multipliers lists 0 numbers"),
    (
        {"ple__heads_per_ngram": 1, "ple__ngram_size": 2, "ple__layer_multipliers": ("a", "b")},
        "ple.layer_multipliers lists 0 numbers, and 2 are needed",
    ),
]


@pytest.mark.parametrize(("changed", "words"), REFUSED)
def test_a_contradiction_is_named(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(BadModel, match=words):
        check_header(facts(**changed))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v.blk.0.attn_q.weight", "vision or audio part in the same file.*ollama.*mmproj"),
        ("mm.0.weight", "vision or audio part in the same file"),
        ("blk.1.ffn_gate.7.weight", "every expert in a tensor of its own.*Mixtral"),
        ("blk.3.attn_k.weight", "block_count is 3, and there are weights of layer 3"),
    ],
)
def test_weights_that_do_not_belong_there_are_named(name: str, words: str) -> None:
    with pytest.raises(BadModel, match=words):
        check_header(facts(more=(f32(name, 32, 2),)))


@pytest.mark.parametrize("counted", [1, REMOVED])
@pytest.mark.parametrize("embedding", [(), (f32("token_embd.weight", N_EMBD, 100),)])
def test_layers_for_prediction_alone_are_no_model(
    counted: int | None, embedding: tuple[TensorEntry, ...]
) -> None:
    names = ("nextn.eh_proj.weight", "nextn.enorm.weight", "attn_q.weight")
    head = facts(nextn_predict_layers=counted, block_count=4)
    entries = (*embedding, *(f32(f"blk.3.{name}", N_EMBD, 2) for name in names))
    places = {entry.name: WeightPlace(Path("m.gguf"), entry) for entry in entries}
    with pytest.raises(BadModel, match=r"is only a draft head, .*\(blk.3.nextn.eh_proj.weight\)"):
        check_header(replace(head, weights=places))
    if counted:
        check_header(replace(head, weights=head.weights | places))  # the model has its layers


@pytest.mark.parametrize(
    ("kind", "words"), [("adapter", "an adapter"), ("imatrix", "an importance matrix")]
)
def test_files_beside_a_model_are_told_what_they_are(kind: str, words: str) -> None:
    plain = facts()
    metadata = plain.header.metadata | {"general.type": kind}
    with pytest.raises(BadModel, match=f"is {words}.*: name the model that it belongs to"):
        check_header(replace(plain, header=replace(plain.header, metadata=metadata)))


@pytest.mark.parametrize("architecture", ["clip", "qwen3\x00moe", "qwen3 moe", "\x1b[31m"])
def test_architectures_of_no_model(architecture: str) -> None:
    words = "projector for images" if architecture == "clip" else "names the architecture"
    with pytest.raises(BadModel, match=words):
        check_header(facts(architecture))


def test_every_number_that_is_read_is_checked() -> None:
    """Each key that the code asks a header for is in the table of counts."""
    asked: set[str] = set()
    for path in [*ROOT.glob("offload/**/*.py"), *ROOT.glob("specoffload/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("number", "per_layer")
                and node.args
                and isinstance(node.args[0], ast.Constant)
                and isinstance(node.args[0].value, str)
            ):
                asked.add(node.args[0].value)
    assert {"block_count", "attention.head_count_kv"} <= asked
    assert asked - COUNTS == set()
    assert SINGLE < COUNTS


ARCHITECTURES = (
    *("qwen3moe", "deepseek2", "deepseek4", "glm5-next", "minimax-m3", "qwen4exp", "minimax-01"),
    *("gemma3n", "kimi-linear", "lfm2moe", "jamba", "llama4", "gpt-oss", "rwkv6"),
)
NUMBERS = st.one_of(
    st.sampled_from([-(2**31), -4, -1, 0, 1, 2, 3, 4, 16, 64, 999, 5000, 2**31, 2**32 - 1, 2**63]),
    st.integers(-10, 300),
    st.floats(),
    st.booleans(),
    st.sampled_from(["", "many", "\0"]),
)
VALUES = st.one_of(st.none(), NUMBERS, st.lists(NUMBERS, max_size=6).map(tuple))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(ARCHITECTURES),
    st.dictionaries(st.sampled_from(sorted(COUNTS)), VALUES, max_size=3),
    st.sampled_from([1 << 20, 1 << 24, 1 << 30, 24 << 30]),
)
def test_any_header_is_refused_or_has_a_plan_that_adds_up(
    architecture: str, changed: dict[str, Any], vram_bytes: int
) -> None:
    model = facts(architecture, **{key.replace(".", "__"): v for key, v in changed.items()})
    try:
        check_header(model)
        context = ContextOptions(n_ctx=512, n_ubatch=32)
        memory = context_memory(model, context)
        assert (
            min(memory.kv_bytes, memory.recurrent_bytes, memory.compute_bytes, memory.pool_bytes)
            >= 0
        )
        assert all(size >= 0 for size in layer_context_bytes(model, context))
        plan = make_plan(model, PlanRequest(budget_bytes=vram_bytes, context=context))
    except (BadModel, DoesNotFit):
        return
    assert min(plan.resident_bytes, plan.streamed_bytes, plan.slot_bytes, plan.reserve_bytes) >= 0
    assert plan.resident_bytes + plan.slot_bytes + plan.reserve_bytes <= vram_bytes
