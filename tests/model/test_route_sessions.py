"""--route-cached in a session: what it says, what it keeps apart, and what an answer counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from resolved import config_of, line_of
from splits import at_random

from offload.notes import NoteKind, kind_of
from specoffload import report
from specoffload.config.environment import Environment, read_host
from specoffload.config.options import Toggle
from specoffload.config.resolution import resolve
from specoffload.errors import UsageError
from specoffload.generation.generation import GenerateOptions
from specoffload.generation.statistics import GenerationStats
from specoffload.server.api.answers import timings_of
from specoffload.session.session import Session

OPTIONS = GenerateOptions(n_predict=24, temperature=0.0, ignore_eos=True)
PROMPT = "def read(path):\n"
WORDS = "routing prefers cached experts (strength 1): texts differ from the model's own"


def answer_of(session: Session, prompt: str) -> tuple[str, GenerationStats]:
    pieces = [*session.generate(prompt, OPTIONS)]
    stats = pieces[-1].stats
    assert stats is not None
    return "".join(piece.text for piece in pieces), stats


def test_a_session_says_counts_and_keeps_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path))
    few = {"device": "sim:vram=8MiB", "ctx_size": 512, "threads": 1, "hybrid": Toggle.ON,
           "without": frozenset({"lend"})}  # fmt: skip
    found: dict[float, tuple[str, GenerationStats]] = {}
    made_by: dict[float, dict[str, str]] = {}
    for strength in (0.0, 1.0):
        config = config_of(**few, route_cached=strength, spec_given={"--spec-type": "none"})
        # Measured times would decide which experts are copied.
        config = replace(config, streaming=replace(config.streaming, splitter=at_random(1)))
        with Session(config) as session:
            said = [note for note in session.notes if WORDS in note]
            assert len(said) == (strength > 0)
            assert all(kind_of(note) is NoteKind.FLAGS for note in said), "every command shows it"
            found[strength] = answer_of(session, PROMPT)
            made_by[strength] = dict(session.target.sequences.made_by)
            assert session.target.opened.routing.is_on == (strength == 0.0), "hits are the model's"
            assert session.counters()["routed_choices"] == found[strength][1].n_choices
    (own, plain), (_, routed) = found[0.0], found[1.0]
    assert own
    assert plain.n_choices == 0
    assert "routing" not in timings_of(plain)
    # Each layer that streams chooses 4 experts for each of 23 decoded tokens, and in the prompt.
    assert routed.n_choices % 4 == 0
    assert routed.n_choices > 4 * 23
    assert routed.n_choices > routed.n_choices_kept > 0.5 * routed.n_choices
    assert routed.n_choices_cached > routed.n_own_cached
    timings = timings_of(routed)["routing"]
    assert timings["kept"] == routed.n_choices_kept / routed.n_choices
    assert timings["hits"] > timings["hits_without"]
    lines = report.summary(routed)
    assert any(line.startswith("routing kept ") for line in lines)
    assert made_by[1.0] == {**made_by[0.0], "--route-cached": "1, --route-keep 2"}


def test_without_a_gpu_it_is_said_to_have_no_effect() -> None:
    config = config_of(device="cpu", ctx_size=256, threads=1, route_cached=0.5)
    with Session(config, keeps_hits=False) as session:
        assert any("--route-cached" in note and "ignored" in note for note in session.notes)
        assert not any("prefers cached" in note for note in session.notes)


def test_it_is_said_if_every_choice_is_left_to_the_router() -> None:
    config = config_of(
        device="sim:vram=8MiB", ctx_size=256, threads=1, hybrid=Toggle.ON, route_cached=1.0,
        route_keep=4, without=frozenset({"profile"}), spec_given={"--spec-type": "none"},
    )  # fmt: skip
    with Session(config, keeps_hits=False) as session:
        words = "--route-cached ignored: --route-keep 4 leaves all 4 experts of a token"
        assert any(words in note for note in session.notes)
        assert not any("prefers cached" in note for note in session.notes)
        assert answer_of(session, PROMPT)[1].n_choices == 0
        opened = session.target.opened
        assert all(device.routing is None for device in opened.devices)
        assert not session.config.streaming.route.is_on


@pytest.mark.parametrize("words", [("--route-cached", "1.5"), ("--route-cached", "-1"),
                                   ("--route-keep", "-1")])  # fmt: skip
def test_values_out_of_range_are_refused(words: tuple[str, str]) -> None:
    with pytest.raises(UsageError, match=words[0]):
        line_of(*words)


def test_the_exact_setting_and_a_preference_exclude_each_other() -> None:
    exact = ("--flash-attn", "off", "--cache-type-k", "f32", "--cache-type-v", "f32")
    host = read_host(Environment())
    with pytest.raises(UsageError, match=r"--route-cached 0.5 changes texts.*exact setting"):
        resolve(line_of("--route-cached", "0.5", *exact).options, host)
    assert resolve(line_of("--route-cached", "0", *exact).options, host).streaming.route.n_kept == 2
    config = resolve(line_of("--route-keep", "3").options, host)
    assert any("--route-keep" in reason and "--route-cached is off" in reason
               for reason in config.reasons)  # fmt: skip
