"""Checks a model's header: its numbers and names, the types of its tensors, its tokenizer. Pure.

Whoever plans or opens a model reads its header through `offload.model_file.read_facts`, which calls
this first. So the plan's formulas get whole numbers from 0 on, and lists of at most one entry per
layer. The library checks more when it loads a model (`offload.load_check`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping

from offload.errors import BadModel
from offload.model import Header, ModelFacts, TensorEntry, is_experts, layer_of

# Keys that hold one whole number, and never a list. The first three are in every model.
REQUIRED = ("block_count", "context_length", "embedding_length")
SINGLE = frozenset({*REQUIRED, "expert_count", "nextn_predict_layers"})
_AT_LEAST_1 = frozenset({*REQUIRED, "full_attention_interval"})  # the latter divides
# Keys that hold a whole number, or a list with a number for each layer.
COUNTS = SINGLE | {
    *("block_size", "selector_top_k"),  # of block drafts
    *("attention.compress_ratios", "attention.head_count", "attention.head_count_kv"),
    *("attention.indexer.block_size", "attention.indexer.key_length", "attention.indexer.kpool"),
    "attention.indexer.head_count",
    *("attention.indexer.top_k", "attention.indexer.types", "attention.key_length"),
    *("attention.key_length_mla", "attention.key_length_swa", "attention.kv_lora_rank"),
    *("attention.recurrent_layers", "attention.shared_kv_layers", "attention.sliding_window"),
    *("attention.sliding_window_pattern", "attention.value_length", "attention.value_length_mla"),
    *("attention.value_length_swa", "attention.causal", "expert_feed_forward_length"),
    "expert_used_count",
    *("expert_gating_func", "expert_shared_count", "expert_shared_feed_forward_length"),
    *("feed_forward_length", "full_attention_interval", "hyper_connection.count", "kda.head_dim"),
    *("leading_dense_block_count", "ple.conv_kernel", "ple.eos_token_id", "ple.heads_per_ngram"),
    *("ple.ngram_size", "pooling_type", "rope.dimension_count", "shortconv.l_cache"),
    *("rope.scaling.original_context_length", "ssm.conv_kernel", "ssm.group_count"),
    *("ssm.inner_size", "ssm.state_size", "target_hidden_size", "token_shift_count"),
    "wkv.head_size",
}
_FLAGS = frozenset(  # which may also be true or false
    {
        *("attention.causal", "attention.indexer.types", "attention.recurrent_layers"),
        "attention.sliding_window_pattern",
    }
)
_MOST = (1 << 32) - 1  # what the library's 32 bits hold
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*", re.ASCII)
_ONE_EXPERT = re.compile(r"^blk\.\d+\.ffn_(gate|up|down)\.\d+\.weight$")
_VISION = re.compile(r"^(v|mm|a|vision|audio)\.")
_HEAD = ".nextn.eh_proj.weight"  # which every layer for multi-token prediction has
_EAGLE = "eagle3"
_NO_MODELS = {  # by general.architecture, or by general.type
    "clip": "a projector for images or sound (mmproj), which computes nothing alone",
    "adapter": "an adapter (LoRA), which is not supported unless it is merged into its model",
    "controlvector": "a control vector, which is not supported",
    "imatrix": "an importance matrix, which only llama-quantize reads",
}


def check_header(facts: ModelFacts) -> None:
    """Raise BadModel with one sentence for a header that contradicts itself or its weights."""
    for what in _reasons(facts):
        raise BadModel(f"{facts.path}: {what}")


def value_reasons(header: Header) -> Iterator[str]:
    """Yield a sentence for each number by which the library would abort."""
    for key, value in header.metadata.items():
        values = value if isinstance(value, tuple) else (value,)
        if any(isinstance(x, float) and not math.isfinite(x) for x in values):
            yield f"{key} is not a finite number; the file is damaged"
        if key.endswith("_epsilon") and any(isinstance(x, float) and x < 0 for x in values):
            yield f"{key} is {value}, below 0; the file is damaged"


def _reasons(facts: ModelFacts) -> Iterator[str]:
    architecture = facts.architecture
    if not _NAME.fullmatch(architecture):
        yield f"names the architecture {architecture!r:.80}; the file is damaged"
    kind = facts.header.metadata.get("general.type")
    for name, what in _NO_MODELS.items():
        if name in (architecture, kind):
            yield f"is {what}: name the model that it belongs to"
    yield from _foreign_parts(facts)
    yield from _draft_head(facts)
    yield from _numbers(facts)
    yield from _layers(facts)
    yield from _experts(facts)
    yield from _ngram_lists(facts)
    yield from type_reasons(place.entry for place in facts.weights.values())
    embedding, n_embd = facts.weights.get("token_embd.weight"), facts.number("embedding_length")
    if embedding and architecture != _EAGLE and embedding.entry.shape[0] != n_embd:
        yield (
            f"{architecture}.embedding_length is {n_embd}, and a row of token_embd.weight has "
            f"{embedding.entry.shape[0]} values; the file is damaged"
        )


def _foreign_parts(facts: ModelFacts) -> Iterator[str]:
    """Complain of weights that other programs keep in the file, and the library does not."""
    if name := next((name for name in facts.weights if _VISION.match(name)), None):
        yield (
            f"holds its vision or audio part in the same file ({name}), as ollama writes it; the "
            "library reads such parts from a file of their own (mmproj): take this model from the "
            "Hugging Face hub (specoffload plan user/repo)"
        )
    if name := next((name for name in facts.weights if _ONE_EXPERT.match(name)), None):
        yield (
            f"keeps every expert in a tensor of its own ({name}), as Mixtral's files of 2023 do; "
            "the library needs a layer's experts in one tensor: take a newer file, or convert the "
            "model again"
        )


def _draft_head(facts: ModelFacts) -> Iterator[str]:
    """Complain of a file that has a model's layers for multi-token prediction, and no others.

    Other programs take such a file beside the model. The library opens it alone if the file repeats
    the embedding, and then reads past its memory.
    """
    heads = [name for name in facts.weights if name.endswith(_HEAD)]
    if heads and {layer_of(name) for name in facts.weights} <= {-1, *map(layer_of, heads)}:
        yield (
            f"is only a draft head, layers for multi-token prediction ({heads[0]}) without the "
            "model that they belong to: take a file of that model which has these layers, too; it "
            "drafts with them by itself, without --draft"
        )


def _numbers(facts: ModelFacts) -> Iterator[str]:
    architecture, header = facts.architecture, facts.header
    if not any(key.startswith(f"{architecture}.") for key in header.metadata):
        yield f"unknown model architecture {architecture!r}: the header has no numbers of it"
    for key in REQUIRED:
        name = f"{architecture}.{key}"
        if name not in header.metadata and name not in header.lengths:
            yield f"lacks {name}, without which the library opens no model"
    for key in sorted(COUNTS):
        name = f"{architecture}.{key}"
        value, n_values = header.metadata.get(name), header.lengths.get(name)
        if n_values is not None and key in SINGLE:
            yield f"{name} is a list of {n_values} values, and must be one whole number"
        if n_values is not None and not isinstance(value, tuple):
            yield f"{name} is a list of {n_values} values that are no numbers of layers"
        values = value if isinstance(value, tuple) else () if value is None else (value,)
        for one in values:
            if isinstance(one, bool) and key in _FLAGS:
                continue
            if isinstance(one, bool) or not isinstance(one, int):
                yield f"{name} is {one!r:.60}, and must be a whole number; the file is damaged"
            elif not 0 <= one <= _MOST:
                yield f"{name} is {one}, and must be from 0 to {_MOST}; the file is damaged"
        if key in _AT_LEAST_1 and 0 in (value, *values):
            yield f"{name} is 0; the file is damaged"


def _layers(facts: ModelFacts) -> Iterator[str]:
    architecture, n_layers = facts.architecture, facts.number("block_count")
    numbers = {layer for name in facts.weights if (layer := layer_of(name)) >= 0}
    n_found = max(numbers, default=-1) + 1
    n_mtp = facts.n_mtp_layers
    if n_layers > len(facts.weights):
        yield (
            f"{architecture}.block_count is {n_layers} for {len(facts.weights)} weights; the file "
            "is damaged"
        )
    if n_mtp and n_mtp >= n_layers:
        yield (
            f"{architecture}.nextn_predict_layers is {n_mtp} for {n_layers} layers; the file is "
            "damaged"
        )
    if n_found > n_layers:
        yield (
            f"{architecture}.block_count is {n_layers}, and there are weights of layer "
            f"{n_found - 1}; the file is damaged"
        )
    if numbers and n_found < n_layers - n_mtp:  # layers for multi-token prediction may be left out
        yield (
            f"{architecture}.block_count is {n_layers}, and the last weights are those of layer "
            f"{n_found - 1}; the file is damaged"
        )
    for key in sorted(COUNTS - SINGLE):
        n_values = facts.header.lengths.get(f"{architecture}.{key}", 0)
        if n_values > n_layers:
            yield f"{architecture}.{key} lists {n_values} values for {n_layers} layers"


def _experts(facts: ModelFacts) -> Iterator[str]:
    n_experts, name = facts.n_experts, f"{facts.architecture}.expert_count"
    for entry in (place.entry for place in facts.weights.values() if is_experts(place.entry)):
        if (n_there := _n_experts(entry)) != n_experts:
            yield (
                f"{name} is {n_experts}, and {entry.name} holds {n_there} experts; the file is "
                "damaged"
            )
    used = f"{facts.architecture}.expert_used_count"
    if n_experts and used not in facts.header.metadata:
        yield f"lacks {used}, without which the library opens no model with {n_experts} experts"
    n_used = max(facts.per_layer("expert_used_count"), default=0)
    if n_used > n_experts or (n_experts and not n_used):
        yield f"{used} is {n_used}, and must be from 1 to the {n_experts} of expert_count"


def _n_experts(entry: TensorEntry) -> int:
    """Return the third dimension. A shape is stored without the last dimensions that are 1."""
    return entry.shape[2] if len(entry.shape) > 2 else 1


def _ngram_lists(facts: ModelFacts) -> Iterator[str]:
    """Complain of lists by which rows of a table are found, if they are short or hold no rows."""
    per_gram = facts.number("ple.heads_per_ngram")
    if not per_gram:
        return
    n_before = facts.number("ple.ngram_size") - 1
    if n_before < 1:
        yield f"{facts.architecture}.ple.ngram_size is {n_before + 1}, and must be 2 or more"
    for key, n_wanted, least in (
        ("layer_multipliers", n_before + 1, 0),
        ("head_vocab_sizes", n_before * per_gram, 1),
        ("head_offsets", n_before * per_gram, 0),
    ):
        name = f"{facts.architecture}.ple.{key}"
        value = facts.header.metadata.get(name, ())
        values = value if isinstance(value, tuple) else (value,)
        if len(values) < n_wanted:
            yield f"{name} lists {len(values)} numbers, and {n_wanted} are needed"
        if not all(type(v) is int and v >= least for v in values):
            yield f"{name} must list whole numbers from {least} on; the file is damaged"


_BPE = "gpt2"  # the file's name of byte-pair encoding


def tokenizer_reason(metadata: Mapping[str, object]) -> str:
    """Return a sentence if the file does not say how texts are split into words, else "".

    llama.cpp warns in the same case (`missing pre-tokenizer type` in src/llama-vocab.cpp). Other
    tokenizers than byte-pair encoding need no such key.
    """
    if metadata.get("tokenizer.ggml.model") != _BPE or metadata.get("tokenizer.ggml.pre"):
        return ""
    return (
        "the file has no tokenizer.ggml.pre, so texts are split by llama.cpp's default "
        "pre-tokenizer: answers may be much worse; take a newer conversion of the model"
    )


# The library checks a weight's shape when it opens a file, and no more of its type than that rows
# are whole blocks. A kernel that meets a type without a product reads through a null pointer, and
# ends the process by SIGSEGV. One that meets a type that it was not written for ends it by an
# assertion.
#
# Types that are no weights, by ggml's names: integers, doubles, and what kernels make of the other
# factor of a product. They have no product of their own (`vec_dot` in ggml-cpu.c).
_NO_WEIGHTS = frozenset({"i8", "i16", "i32", "i64", "f64", "q8_1", "q8_K"})
_NUMBERS = ("i32", "i64")
# Tables of whole numbers: experts by token (DeepSeek-V4), and the tokens that an EAGLE-3 file
# drafts.
_TABLES = re.compile(r"(^|\.)(ffn_gate_tid2eid|d2t)(\.weight)?$")
# Tensors of more than one dimension that are added, multiplied element by element or convolved. The
# kernels for these operations read 32-bit floats next to activations.
_ELEMENTWISE = re.compile(
    r"\.bias$|norm|scale(\.weight)?$|^rope_f|sinks|\.ssm_(a|d)\b|\.ssm_dt$|conv1d|shortconv\.conv\."
    r"|_conv_base$"
)  # not ssm_dt.weight, which is a matrix (Mamba, Jamba), and may have any type

_VECTOR_FACTORS = re.compile(r"ffn_gate_inp_shexp")  # vectors that are multiplied as matrices are


def type_reasons(entries: Iterable[TensorEntry]) -> Iterator[str]:
    """Yield a sentence for each tensor whose type no kernel reads where the tensor is used."""
    for entry in entries:
        allowed = _allowed(entry)
        if allowed is None:
            if entry.type in _NO_WEIGHTS:
                yield (
                    f"{entry.name} has the type {entry.type}, in which no weights are multiplied; "
                    "the file is damaged"
                )
        elif entry.type not in allowed:
            yield (
                f"{entry.name} has the type {entry.type}, and must have {' or '.join(allowed)}; "
                "the file is damaged"
            )


def _allowed(entry: TensorEntry) -> tuple[str, ...] | None:
    """Return the types that a tensor may have, or None if it may have any type of weights."""
    if _TABLES.search(entry.name):
        return _NUMBERS
    is_vector = len(entry.shape) < 2 and not _VECTOR_FACTORS.search(entry.name)
    return ("f32",) if is_vector or _ELEMENTWISE.search(entry.name) else None
