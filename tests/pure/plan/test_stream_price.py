"""The price of separate streams, and its table in docs/log.md."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lab import stream_price
from lab.synth.published import published_facts
from lab.tables import page_of


def test_own_cells_spare_computing_and_no_reading(tmp_path: Path) -> None:
    """Keys of few heads are read more slowly than they are computed with; MLA's are not."""
    few, mla = (
        stream_price.price(published_facts(title, tmp_path), 4, 16384)
        for title in ("Qwen3-30B-A3B", "DeepSeek-R1")
    )
    assert few.own_decode_s == few.decode_s
    assert mla.own_decode_s < 0.9 * mla.decode_s
    for price in (few, mla):
        assert price.own_prompt_s < 0.8 * price.prompt_s


def test_the_page_has_what_the_model_says(tmp_path: Path) -> None:
    (row,) = stream_price.rows(tmp_path, ("gpt-oss-120b",), (2,), (4096,))
    table = stream_price.table([row])
    assert table.splitlines()[-1] in page_of("stream-price").read_text(encoding="utf-8")


def test_contexts_that_no_plan_has_are_said(tmp_path: Path) -> None:
    (row,) = stream_price.rows(tmp_path, ("DeepSeek-R1",), (8,), (61440,))
    assert row[3] == "does not fit"
    assert len(row) == len(stream_price.COLUMNS)


def test_a_prompt_beside_answers_pays_for_their_own_decodes(tmp_path: Path) -> None:
    """Ubatches take equally many tokens of each conversation, so answers do not ride along."""
    price = stream_price.price(published_facts("DeepSeek-R1", tmp_path), 4, 16384)
    assert price.own_beside_s == price.own_prompt_s + price.n_ubatches * price.own_decode_s
    assert price.n_ubatches == 1
    assert price.helps
    assert not replace(price, own_decode_s=price.decode_s, own_prompt_s=price.prompt_s).helps
