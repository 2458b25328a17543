"""Numbers and names that pages and help texts state are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from numa.place import _MIN_HUGE_SHARE
from offload.decode import SMALL_BATCH
from offload.ggml.memory import MOST_AT_ONCE_BYTES
from offload.plan.sharing import SMALL_UBATCHES, UBATCHES
from offload.routing.routing import N_KEPT
from offload.store.expert_memory import _WATCH_S
from offload.times.search import budget_s
from specdec.options import MOST_DRAFTED
from specoffload.bench.llama_bench import DEFAULTS, FIELDS
from specoffload.config.speculation import _SNAPSHOTS
from specoffload.config.table import TABLE
from specoffload.server.api.body import ALIASES
from specoffload.server.log import _LEVELS

ROOT = Path(__file__).parents[3]


def _page(name: str) -> str:
    """The words of a page, without the ends of its lines."""
    return " ".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8").split())


def _help(name: str) -> str:
    """The help of all flags of this name."""
    return " ".join(f"{flag.help} {flag.more}" for flag in TABLE if name in flag.names)


def _budget(n_ways: int) -> str:
    """Words on the seconds of a first start's measurement."""
    one_s = 0.125  # long enough that T(1) decides
    n_tokens = budget_s(one_s, n_ways) / one_s
    least_s, most_s = budget_s(0.0, n_ways), budget_s(60.0, n_ways)
    return rf"{least_s:g}\s+seconds, or {n_tokens:g} T\(1\),? .*at most {most_s:g} seconds"


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("speculation", _budget(1)),
        ("speculation", _budget(2)),
        ("speculation", rf"Drafts of up to {_SNAPSHOTS} tokens can be taken back with a snapshot"),
        ("speculation", rf"a tree of up to {MOST_DRAFTED} tokens"),
        ("hybrid", rf"in batches of up to {SMALL_BATCH} tokens are recorded"),
        ("hybrid", rf"holds the last {N_KEPT:,} tokens"),
        ("gpu", rf"in parts of {MOST_AT_ONCE_BYTES >> 30} GiB"),
        ("numa", rf"reads at least {_MIN_HUGE_SHARE:.0%} of it".replace("%", " %")),
        ("disk", {0.1: "ten times a second"}[_WATCH_S]),
    ],
)
def test_a_page_states_the_number_of_the_code(page: str, words: str) -> None:
    assert re.search(words, _page(page)), words


def test_the_ubatch_flag_states_the_sizes_that_are_tried() -> None:
    sizes = (*SMALL_UBATCHES, *UBATCHES)
    assert f"between {min(sizes)} and {max(sizes)}" in _help("--ubatch-size")
    assert f"it takes {UBATCHES[0]}." in _help("--ubatch-size")


def test_the_log_flag_and_the_page_name_every_letter() -> None:
    assert re.findall(r"\b[A-Z]\b", _help("--log-prefix")) == list(_LEVELS)
    named = _page("server").partition("adds the letter of the level:")[2].partition(".")[0]
    assert re.findall(r"\b[A-Z]\b", named) == list(_LEVELS)


def test_the_page_names_every_form_of_a_requests_reasoning_budget() -> None:
    forms = [name for name, own in ALIASES.items() if own == "thinking_budget_tokens"]
    line = _page("chat-formats").partition("ends the reasoning after N tokens.")[2][:300]
    assert len(forms) > 3
    assert [name for name in forms if f"`{name}`" not in line] == []


def test_the_help_names_the_keys_that_llama_bench_has_not() -> None:
    added = [name for name in FIELDS if name not in DEFAULTS]
    assert added == ["path"]
    assert all(f"`{name}`" in _help("--output") for name in added)
