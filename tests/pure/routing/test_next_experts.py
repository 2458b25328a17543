"""Guesses of the next layers' experts by their routers, and when they are no longer made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

from offload.decode import Rows
from offload.model import Header, ModelFacts, TensorEntry, WeightPlace
from offload.routing.next_experts import Embeddings, NextExperts, Router
from offload.routing.routing import RoutingGuess

N_EMBD, N_EXPERTS, N_USED = 16, 16, 2
LAYERS = [2, 3, 4, 5, 6, 7]


class Memory:
    """Memory that holds only the experts `there`. Records what is read ahead."""

    def __init__(self, there: Iterable[tuple[int, int]] = ()) -> None:
        self.there, self.read = set(there), dict[int, list[int]]()

    def is_there(self, layer: int, expert: int) -> bool:
        return (layer, expert) in self.there

    def read_ahead(self, layer: int, experts: Iterable[int]) -> None:
        if chosen := list(experts):
            self.read[layer] = chosen


def one_hot(*experts: int) -> Rows:
    """Rows for which a router of identity chooses these experts, the first one first."""
    rows = np.zeros((1, N_EMBD), np.float32)
    rows[0, list(experts)] = np.arange(len(experts), 0, -1)
    return rows


def router(**more: Rows) -> Router:
    weights = np.eye(N_EXPERTS, N_EMBD, dtype=np.float32)
    return Router(weights, np.ones(N_EMBD, np.float32), **more)


def following(memory: Memory, embeddings: Embeddings | None = None, **more: Router) -> NextExperts:
    routers = dict.fromkeys(LAYERS, router())
    chosen = routers | {int(name[1:]): each for name, each in more.items()}
    return NextExperts(memory, chosen, N_USED, embeddings)


def read(ahead: NextExperts, at: int, rows: Rows, guess: RoutingGuess | None = None) -> None:
    ahead.read_ahead(LAYERS, at, guess or RoutingGuess(), len(rows), lambda: rows)


def test_the_first_layer_guesses_for_four_and_the_others_for_the_next_and_the_fourth() -> None:
    memory = Memory()
    ahead = following(memory)
    read(ahead, 0, one_hot(7, 5))
    assert memory.read == {3: [7, 5], 4: [7, 5], 5: [7, 5], 6: [7, 5]}
    memory.read.clear()
    read(ahead, 1, one_hot(1, 2))
    assert memory.read == {4: [1, 2], 7: [1, 2]}
    memory.read.clear()
    read(ahead, len(LAYERS) - 1, one_hot(1, 2))
    assert memory.read == {}


def test_the_weights_of_both_norms_count() -> None:
    """Rows have this layer's norm as a factor. A guess replaces it by the next layer's norm."""
    norm = np.ones(N_EMBD, np.float32)
    norm[3], norm[8] = 100.0, 0.0
    memory = Memory()
    ahead = following(memory, l2=Router(router().weights, norm))
    read(ahead, 0, norm * one_hot(5, 3, 8))
    assert memory.read[3] == [5, 3], "the values that were multiplied with 0 are not known"


def test_biases_before_and_behind_the_sigmoid_count() -> None:
    bias = np.zeros(N_EXPERTS, np.float32)
    bias[9] = 0.4
    memory = Memory()
    ahead = following(memory, l3=router(bias=bias), l4=router(late_bias=bias))
    read(ahead, 0, one_hot(0, 1) * 0.1)
    assert memory.read[3] == [9, 0]
    assert memory.read[4] == [9, 0]
    assert memory.read[5] == [0, 1]


def test_first_choices_of_all_tokens_come_before_second_ones() -> None:
    memory = Memory()
    read(following(memory), 0, np.concatenate((one_hot(4, 5), one_hot(6, 4), one_hot(1, 2))))
    assert memory.read[3] == [4, 6, 1, 5, 2]


def test_experts_in_slots_are_not_read() -> None:
    memory = Memory()
    following(memory).read_ahead(
        LAYERS, 0, RoutingGuess(), 1, lambda: one_hot(4, 5), lambda layer, e: e == layer + 1
    )
    assert memory.read == {3: [5], 4: [4], 5: [4, 5], 6: [4, 5]}


def test_what_tokens_chose_before_is_read_without_their_rows() -> None:
    memory, guess, layers = Memory(), RoutingGuess(), [*range(3, 21)]
    ahead = following(memory)
    guess.expect([17])
    for layer in layers:
        ids = np.array([[layer % 15, 15]])
        guess.observe(layer, np.bincount(ids.ravel(), minlength=N_EXPERTS), ids)
    for at, expected in ((-1, layers[:16]), (0, layers[16:17]), (1, layers[17:18]), (9, [])):
        memory.read.clear()
        ahead.read_ahead(layers, at, guess, 1, lambda: pytest.fail("rows are not needed"))
        assert {layer: set(found) for layer, found in memory.read.items()} == {
            layer: {layer % 15, 15} for layer in expected
        }


def test_wrong_guesses_end_and_right_ones_bring_them_back() -> None:
    memory = Memory()
    ahead = following(memory)

    def decode(used: tuple[int, ...]) -> None:
        for at, layer in enumerate(LAYERS):
            ahead.judge(layer, used)
            read(ahead, at, one_hot(4, 5))

    decode((4, 5))
    assert memory.read
    for _ in range(100):
        decode((8, 9))
    memory.read.clear()
    decode((8, 9))
    assert memory.read == {}
    for _ in range(100):
        decode((4, 5))
    memory.read.clear()
    decode((4, 5))
    assert set(memory.read) == set(LAYERS[1:]), "only the next layer is guessed now"


def test_experts_in_memory_do_not_make_guesses_right() -> None:
    memory = Memory((layer, 4) for layer in LAYERS)
    ahead = following(memory)
    for _ in range(100):
        for at, layer in enumerate(LAYERS):
            ahead.judge(layer, (4, 9))
            read(ahead, at, one_hot(4, 5))
    memory.read.clear()
    read(ahead, 0, one_hot(4, 5))
    assert memory.read == {}


def embeddings_of(path: Path, *rows: Rows) -> Embeddings:
    """Write embeddings as a file with eight other bytes before them, and return them."""
    values = np.concatenate(rows).astype(np.float16)
    path.write_bytes(bytes(8) + values.tobytes())
    shape = values.shape[::-1]
    entry = TensorEntry("token_embd.weight", "f16", shape, 8, values.nbytes)
    header = Header({}, (entry,))
    facts = ModelFacts(path, "x", "x", header, {entry.name: WeightPlace(path, entry)})
    found = Embeddings.of(facts)
    assert found is not None
    return found


def begin(ahead: NextExperts, tokens: Sequence[int], layers: Sequence[int] = LAYERS) -> None:
    """Begin a decode of tokens that were not decoded before."""
    guess = RoutingGuess()
    guess.expect(tokens)
    ahead.read_ahead(layers, -1, guess, len(tokens), lambda: pytest.fail("there are no rows yet"))


def test_embeddings_of_unseen_tokens_guess_for_the_first_layers(tmp_path: Path) -> None:
    norm = np.ones(N_EMBD, np.float32)
    norm[3] = 100.0
    memory, late = Memory(), np.zeros(N_EXPERTS, np.float32)
    late[9] = 0.3  # more than the largest difference of sigmoids, for rows of mean square 1
    rows = one_hot(7, 5), 1e-3 * one_hot(8, 3), one_hot(1, 2)
    ahead = following(
        memory, embeddings_of(tmp_path / "rows", *rows),
        l3=Router(router().weights, norm), l4=router(late_bias=late),
    )  # fmt: skip
    begin(ahead, [1])
    assert memory.read == {2: [8, 3], 3: [3, 8], 4: [8, 3], 5: [8, 3]}
    begin(ahead, [2, 0])
    assert memory.read[2] == [1, 7, 2, 5], "first choices come first"


def test_no_embedding_guesses_for_layers_of_a_later_device(tmp_path: Path) -> None:
    memory = Memory()
    begin(following(memory, embeddings_of(tmp_path / "rows", one_hot(7, 5))), [0], LAYERS[2:])
    assert memory.read == {}


def test_bad_guesses_from_embeddings_end_but_not_those_from_rows(tmp_path: Path) -> None:
    memory = Memory()
    ahead = following(memory, embeddings_of(tmp_path / "rows", one_hot(7, 5)))

    def decode() -> None:
        memory.read.clear()
        begin(ahead, [0])
        for at, layer in enumerate(LAYERS):
            ahead.judge(layer, (1, 2))
            read(ahead, at, one_hot(1, 2))

    decode()
    assert LAYERS[0] in memory.read
    for _ in range(300):
        decode()
    assert set(memory.read) == set(LAYERS[1:])


def test_embeddings_that_cannot_be_read_give_no_guess(tmp_path: Path) -> None:
    memory, path = Memory(), tmp_path / "rows"
    ahead = following(memory, embeddings_of(path, one_hot(7, 5)))
    path.write_bytes(bytes(9))
    begin(ahead, [0])
    path.unlink()
    begin(ahead, [0])
    assert memory.read == {}


@pytest.mark.parametrize("rows", [None, np.zeros((1, 3), np.float32)])
def test_rows_of_another_form_give_no_guess(rows: Rows | None) -> None:
    memory = Memory()
    following(memory).read_ahead(LAYERS, 0, RoutingGuess(), 1, lambda: rows)
    assert memory.read == {}
