"""Numbers and names that pages and help texts state are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from numa.place import _MIN_HUGE_SHARE
from offload.decode import SMALL_BATCH
from offload.ggml.memory import MOST_AT_ONCE_BYTES
from offload.plan.context_choice import AGENT_CTX, MOST_LOSS_FOR_AGENTS
from offload.plan.long_prompts import LEAST_GAIN, LONG_UBATCHES
from offload.plan.sharing import SMALL_UBATCHES, UBATCHES
from offload.routing.routing import N_KEPT
from offload.store.expert_memory import _WATCH_S
from offload.times.search import budget_s
from specdec.options import MOST_DRAFTED
from specoffload.bench.llama_bench import DEFAULTS, FIELDS
from specoffload.config.options import Options
from specoffload.config.placing import _PLACING
from specoffload.config.speculation import _SNAPSHOTS
from specoffload.config.table import TABLE
from specoffload.server.api.body import ALIASES
from specoffload.server.api.parameters import MAX_STOP_LETTERS, MAX_STOPS
from specoffload.server.engine.client import _SAY_PROMPT_S
from specoffload.server.log import _LEVELS
from specoffload.server.sockets import SocketLimits
from specoffload.server.unwaited import _MOST_WAITING_BYTES
from specoffload.slots.prompt_files import LEAST_TOKENS
from specoffload.slots.slot import _SMALL_BYTES

LIMITS = SocketLimits()
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
    return rf"{least_s:g}\s+seconds, or {n_tokens:g} T\(1\),? .{{0,30}}at most {most_s:g} seconds"


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
        ("numa", rf"reads at least {_MIN_HUGE_SHARE:.0%} of it"),
        ("disk", {0.1: "ten times a second"}[_WATCH_S]),
        ("server", rf"a request's header \| {LIMITS.header_s:g} s, then 408"),
        (
            "server",
            rf"its body \| {LIMITS.body_s:g} s, and a second more for each "
            rf"{LIMITS.body_bytes_per_s >> 10} KiB received",
        ),
        ("server", rf"between two requests \| {LIMITS.keep_alive_s} s"),
        ("server", rf"reads nothing of its answer \| {LIMITS.write_s:g} s"),
        ("server", rf"`stop` \| {MAX_STOPS} texts of {MAX_STOP_LETTERS:,} letters"),
        ("server", rf"Texts of less than {LEAST_TOKENS} tokens are not worth a file"),
        ("server", rf"a checkpoint of them takes at most {_SMALL_BYTES >> 20} MiB"),
        ("server", rf"a line every {_SAY_PROMPT_S:g} s for a long prompt"),
        ("server", rf"Up to {_MOST_WAITING_BYTES >> 20} MiB of lines wait"),
        ("server", rf"takes {AGENT_CTX:,} tokens if they cost at most {MOST_LOSS_FOR_AGENTS:.0%}"),
    ],
)
def test_a_page_states_the_number_of_the_code(page: str, words: str) -> None:
    assert re.search(words.replace("%", " %"), _page(page)), words


def test_the_page_names_every_flag_that_a_plan_is_made_without() -> None:
    """The flags whose cost a plan looks at, under any of their names."""
    line = _page("plans").partition("leaves the choice to you. It is about ")[2].partition(". ")[0]
    names = {field: flag.names + flag.off for field in _PLACING for flag in TABLE
             if (flag.section, flag.field) == (Options, field)}  # fmt: skip
    assert set(names) == set(_PLACING)
    named = re.findall(r"`(-[\w-]+)`", line)
    assert [field for field, all_names in names.items() if not set(named) & {*all_names}] == []
    assert len(named) == len(_PLACING)


def test_the_ubatch_flag_states_the_sizes_that_are_tried() -> None:
    sizes = (*SMALL_UBATCHES, *UBATCHES, *LONG_UBATCHES)
    assert f"between {min(sizes)} and {max(sizes)}" in _help("--ubatch-size")
    assert f"it takes {UBATCHES[0]}." in _help("--ubatch-size")
    assert f"takes over {UBATCHES[-1]} only if" in _help("--ubatch-size")
    assert f"gain at least {LEAST_GAIN * 100:.0f} %" in _help("--ubatch-size")


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
