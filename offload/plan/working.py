"""Computes the memory that streamed layers take beside slots and the context's buffers. Pure.

A prompt's layers are computed in passes, which gather rows of pairs (offload/stream/passes.py).
The CPU computes other pairs in host memory, of prompts (offload/stream/prompt_side.py) and of small
batches (offload/stream/cpu_side.py). The sizes follow from the file's header.
`tests/model/test_working_memory.py` compares them with what runs allocate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from operator import add

from offload.model import ModelFacts, TensorEntry, is_experts, layer_of
from offload.schedule.pair_rows import PairShape, prompt_host_pairs, small_batch_pairs
from offload.schedule.passes import group_size, most_passes

LEAST_BYTES = 1 << 20  # smallest buffer for rows, for tables and for ids
# Most results that decodes on a GPU keep for layers computed before the host knows their experts.
# Larger batches wait for each layer.
MOST_AHEAD_BYTES = 16 << 20
_AHEAD_ROWS = 24  # rows that each layer is expected to keep then: three of each of eight tokens
# Numbers of results between a layer's products, as multiples of its inner width. Others have one.
_JOINING = {"bailingmoe3": 4, "kimi-k3": 9, "nemotron_h_moe": 2}
_DOWN = "ffn_down_exps"  # the name of a layer's last product
_ROW_FOR_EACH_PAIR = frozenset({"llama4"})  # a token's rows are weighted before gate and up


@dataclass(frozen=True)
class WorkingMemory:
    """Memory of streamed layers' rows, tables and ids, in bytes."""

    pass_bytes: int = 0  # device: rows and tables of pairs in passes
    small_bytes: int = 0  # device: rows from the CPU, ids, and results kept, in small batches
    host_prompt_bytes: int = 0  # host: pairs that the CPU computes of prompts
    host_small_bytes: int = 0  # host: pairs that the CPU computes of small batches

    @property
    def device_bytes(self) -> int:
        return self.pass_bytes + self.small_bytes

    @property
    def host_bytes(self) -> int:
        return self.host_prompt_bytes + self.host_small_bytes

    def __add__(self, other: WorkingMemory) -> WorkingMemory:
        return WorkingMemory(*map(add, astuple(self), astuple(other)))


def working_memory(
    facts: ModelFacts, n_ubatch: int, *, splits: bool, on_gpu: bool = True
) -> WorkingMemory:
    """Return the working memory of a model whose experts stream, in ubatches of `n_ubatch` tokens.

    `splits`: the CPU may compute a part of a layer's experts.
    """
    by_layer = _chains(facts)
    if not by_layer:
        return WorkingMemory()
    shapes = {_pair_shape(facts, chain) for chain in by_layer.values()}
    largest = max(shapes, key=lambda shape: shape.launch_bytes(n_ubatch, copied=False))
    n_experts = facts.n_experts
    expert_bytes = facts.expert_bytes // max(1, len(by_layer) * n_experts)
    n_passes = most_passes(n_experts, int(group_size(n_experts, n_experts, expert_bytes)))
    pass_bytes = max(LEAST_BYTES, largest.launch_bytes(n_ubatch, copied=largest.may_copy))
    pass_bytes += max(LEAST_BYTES, largest.tables_bytes(n_ubatch, n_passes))
    small_bytes, host_prompt_bytes, host_small_bytes = LEAST_BYTES, 0, 0
    if on_gpu:
        kept_bytes = _AHEAD_ROWS * len(by_layer) * 4 * facts.number("embedding_length")
        small_bytes += min(MOST_AHEAD_BYTES, kept_bytes)
    for shape in shapes if splits else ():  # layers whose chains differ have memory of their own
        small, prompt = small_batch_pairs(shape.n_used), prompt_host_pairs(n_ubatch * shape.n_used)
        small_bytes += shape.placed_bytes(small)
        host_prompt_bytes += sum(shape.host_bytes(prompt, n_ubatch * shape.rows_per_token))
        host_small_bytes += sum(shape.host_bytes(small))
    return WorkingMemory(pass_bytes, small_bytes, host_prompt_bytes, host_small_bytes)


def _chains(facts: ModelFacts) -> dict[int, list[TensorEntry]]:
    """Return the experts' matrices and their biases, by layer."""
    chains = defaultdict[int, list[TensorEntry]](list)
    for entry in (*facts.expert_weights, *facts.expert_biases):
        chains[layer_of(entry.name)].append(entry)
    return chains


def _pair_shape(facts: ModelFacts, chain: Sequence[TensorEntry]) -> PairShape:
    """Return the rows of one pair of a layer, as the library computes it."""
    n_in = n_out = facts.number("embedding_length")
    widths: list[int] = []
    for entry in chain:
        n_rows, n_columns = (*entry.shape, 1)[:2]
        if not is_experts(entry):  # a bias; that of down is added after the chain
            widths += [] if _DOWN in entry.name else [n_rows]
        elif _DOWN in entry.name:
            n_out = n_columns
            widths += [n_rows] * _JOINING.get(facts.architecture, 1)
        else:
            n_in = n_rows
            widths.append(n_columns)
    n_used = max(1, facts.n_experts_used)
    by_pair = n_used if facts.architecture in _ROW_FOR_EACH_PAIR else 1
    return PairShape(n_used, n_in, (*widths, n_out), by_pair)
