"""A report has predictions beside measurements, what surprised, and no name of the user's."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.published_cases import Case
from lab.reported import cases_of
from specoffload.bench.machine_report import (
    FORM,
    LEFT_OUT,
    PrivateNames,
    Term,
    bell_use,
    split_use,
    surprise_words,
    terms_of,
)

NAMES = st.text("abcdefghijklmnopqrstuvwxyzABCXYZäß0123456789-_. +", min_size=1, max_size=14).map(
    lambda name: f"q{name.strip('. ')}q"
)


@settings(deadline=None)
@given(st.lists(NAMES, min_size=1, max_size=4), NAMES, NAMES, NAMES, st.sampled_from(range(6)))
def test_no_name_of_a_folder_a_user_or_a_host_is_in_a_report(
    folders: list[str], user: str, host: str, file: str, form: int
) -> None:
    path = Path("/", *folders, f"{file}.gguf")
    names = PrivateNames.of([path], [user, f"{host}.example.org"])
    texts = [
        str(path),
        f"{folders[-1]}: no space left",
        f"cannot open '{path}' ({user})",
        f"AMD EPYC of {host.upper()}",
        f"~/{folders[0]}",
        f"C:\\{folders[0]}\\model.gguf",
    ]
    data = {"a": [texts[form], {"b": (texts[form], 3)}], "n": 1.5, "is_on": True, "none": None}
    written = json.dumps(names.free_all(data), ensure_ascii=False).lower()
    for name in (*folders, user, host):
        assert name.lower() not in written
    assert json.loads(written)["n"] == 1.5


@pytest.mark.parametrize(
    "text",
    ["AMD EPYC", "Intel(R) Core(TM) i7-12700 CPU @ 2.60GHz", "NVIDIA GeForce RTX 4090", "Q4_K_M",
     "llama-cpp-python 0.3.36 979201e1", "Qwen3 30B A3B", "in place"],
)  # fmt: skip
def test_words_of_hardware_and_files_stay(text: str) -> None:
    names = PrivateNames.of([Path("/home/anna/models/q/m.gguf")], ["anna", "desk"])
    assert names.free(text) == text
    assert names.free(f"{text} /home/x") == LEFT_OUT
    assert names.free(f"{text} Anna") == LEFT_OUT


def report_of() -> dict[str, Any]:
    return {
        "form": FORM,
        "predicted": {
            "wrapped": {"answer_tps": 20.0, "prompt_tps": 400.0},
            "batches_s": {"in place": {1: 0.05, 8: 0.1}, "split": {1: 0.04}},
            "hits": 0.8,
        },
        "speeds": {"wrapped": {"answer_tps": [9.0, 10.0, 11.0], "prompt_tps": [390.0]}},
        "batches": {"in place": [{"n": 1, "seconds": 0.1}, {"n": 4, "seconds": 0.2}]},
        "hits": {"rate": 0.75},
        "model": {"name": "Qwen3 30B", "architecture": "qwen3moe", "type": "Q4_K_M",
                  "size_bytes": 17 << 30, "n_layers": 48},
        "settings": {"n_prompt": 2048},
        "machine": {"cpu": "Ryzen 9 7950X", "cores": 16, "n_nodes": 1},
        "devices": [{"description": "NVIDIA GeForce RTX 4090", "on_gpu": True}],
        "llama_server": [
            {"flags": [], "cache_flags": [], "load_flags": [], "moe_cache_mib": 0, "n_cpu_moe": 30,
             "decode_tps": 41.234, "prefill_tps": 300.0, "acceptance_rate": None},
            {"flags": ["-md", LEFT_OUT], "cache_flags": [], "load_flags": [], "moe_cache_mib": 0,
             "n_cpu_moe": 30, "decode_tps": 50.0, "prefill_tps": 300.0, "acceptance_rate": 0.7},
        ],
    }  # fmt: skip


def test_terms_are_what_was_both_predicted_and_measured() -> None:
    terms = {term.what: term for term in terms_of(report_of())}
    assert list(terms) == ["answers", "prompts", "T(1) in place", "hits of split layers"]
    assert terms["answers"].ratio == 2.0
    assert terms["T(1) in place"].ratio == 0.5
    assert [name for name, term in terms.items() if term.surprises] == ["answers", "T(1) in place"]
    assert terms_of({"form": FORM}) == []


@pytest.mark.parametrize("ratio", [1.24, 1.27])
def test_a_term_surprises_beyond_its_tolerance_in_both_directions(ratio: float) -> None:
    for predicted, measured in ((ratio, 1.0), (1.0, ratio)):
        term = Term("answers", "tokens/s", 10 * predicted, 10 * measured, 0.25)
        assert term.surprises == (ratio > 1.25)


def test_surprises_say_how_far_off_and_which_way_the_furthest_first() -> None:
    terms = [
        Term("answers", "tokens/s", 20.0, 10.0, 0.25),
        Term("T(8) split", "s", 0.1, 0.3, 0.2),
        Term("T(1) split", "s", 0.1, 0.05, 0.2),
        Term("prompts", "tokens/s", 100.0, 139.0, 0.4),
        Term("hits", "share", 0.5, 0.9, 0.2),
        Term("prompts again", "tokens/s", 100.0, 0.0, 0.4),
    ]
    assert surprise_words(terms) == [
        "prompts again: 0 tokens/s measured, 100 tokens/s predicted",
        "T(8) split: 3.00 × slower than predicted",
        "answers: 2.00 × slower than predicted",
        "T(1) split: 2.00 × faster than predicted",
        "hits: 1.80 × more than predicted",
    ]
    many = [Term(f"T({n})", "s", 1.0, 2.0, 0.2) for n in range(9)]
    assert surprise_words(many)[-1] == "and 3 more, which the file has"


def test_split_layers_have_hits_and_waits_if_there_were_any() -> None:
    counters = {"n_pairs_hit": 6, "n_pairs_streamed": 1, "n_pairs_host": 3, "split_layers": 2,
                "split_s": 0.01, "host_s": 0.004, "layers_rung": 5}  # fmt: skip
    assert split_use(counters) == {
        "rate": 0.6, "n_pairs": 10, "n_layers": 2, "layer_wait_s": 0.005, "layer_cpu_s": 0.002,
    }  # fmt: skip
    assert split_use({}) == {}
    assert bell_use(counters, "no CUDA") == {
        "layers_rung": 5, "layers_ahead": 0, "layers_repeated": 0, "n_repairs": 0,
        "why_not": "no CUDA",
    }  # fmt: skip


def test_a_report_becomes_cases_in_the_form_of_published_speeds() -> None:
    (case,) = cases_of(
        report_of(),
        name="r1",
        source="https://example.org",
        ram_gbs=83.2,
        n_channels=2,
        pcie_gbs=32,
    )
    assert (case.id, case.gpu, case.engine, case.tg_tps) == (
        "r1-ncmoe30",
        "RTX 4090",
        "llama.cpp",
        41.23,
    )
    assert (case.n_resident_layers, case.file_gib, case.flags) == (18, 17.0, "-ncmoe 30")
    assert {f.name for f in fields(Case)} == set(vars(case)), "the form of published.jsonl"
    without = report_of() | {"llama_server": []}
    for report, why in ((without, "no speeds of llama-server"), ({}, "no report of form")):
        with pytest.raises(ValueError, match=why):
            cases_of(report, name="r", source="", ram_gbs=1, n_channels=1, pcie_gbs=1)
