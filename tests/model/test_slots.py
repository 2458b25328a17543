"""Requests that share a model each write what they would write alone, whatever the others do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from lossless_parts import EXACT, NEAR_TIE, assert_each_position_once, let_batches_be_cheap
from resolved import config_of
from test_lossless_recurrent import write_model

from lab.options import engine_options
from lab.synth import write_preset
from offload.engine import open_engine
from offload.errors import BadRequest, DeviceFailed, NotWritten
from offload.kv_overrides import KvOverride
from offload.model_file import read_facts
from specdec.decoding.loop import StepReport
from specdec.options import MOST_DRAFTED
from specoffload.config.resolution import demo_file, demo_prompts
from specoffload.generation.generation import GenerateOptions
from specoffload.generation.statistics import GenerationStats
from specoffload.session.session import Session
from specoffload.slots.request import Request
from specoffload.slots.slot import Slot

N_PREDICT = 24
FIVE: dict[str, object] = {"--spec-policy": "fixed", "--spec-draft-n-max": 5}
SPECS: dict[str, dict[str, object]] = {
    "alone": {"--spec-type": "none"},
    "suffix": {"--spec-type": "suffix", **FIVE},
    "itself": {"--spec-type": "draft", **FIVE},  # its own weights: drafts are right
    "stranger": {"--spec-type": "draft", **FIVE},  # other random weights: drafts are wrong
}
KINDS = ("mistral-large", "deepseek-v3", "mamba2", "qwen3next", "qwen35moe")


def model(kind: str, models: Path, seed: int = 6) -> Path:
    """Write a tiny model with attention, MLA, recurrent or hybrid memory. Returns its path."""
    if kind in ("mamba2", "qwen3next", "qwen35moe"):
        return write_model(models, kind, seed, with_text=True)
    path = models / f"slots-{kind}-{seed}.gguf"
    return write_preset(kind, path, size="tiny", seed=seed, quant="f32", vocab="bytes")


def draft_of(spec: str, kind: str, models: Path) -> Path | None:
    return {"itself": model(kind, models), "stranger": model(kind, models, 7)}.get(spec)


SERVING = (
    *("cache_disk", "cache_idle_slots", "cache_ram_bytes", "slot_save_path", "slot_similarity"),
    *("kv_unified", "most_each"),
)


def open_slots(model: Path, spec: dict[str, object], parallel: int, **more: Any) -> Session:
    serving = {n: more.pop(n) for n in SERVING if n in more}
    options = {"model": model, "device": "cpu", "threads": 1, "ctx_size": 1024, **EXACT, **more}
    config = config_of(spec_given=dict(spec), **options)
    return Session(replace(config, parallel=parallel, **serving))


@dataclass
class Answer:
    tokens: list[int]
    stats: GenerationStats
    text: str = ""


def answer_of(request: Request) -> Answer:
    assert request.is_over
    assert request.error is None
    stats = request.pieces[-1].stats
    assert stats is not None
    return Answer(
        [t for piece in request.pieces for t in piece.tokens],
        stats,
        "".join(piece.text for piece in request.pieces),
    )


def together(
    session: Session, texts: Sequence[Sequence[int]], options: GenerateOptions
) -> list[Answer]:
    """Run all texts at once. Two start per step, so that some are read while others write."""
    requests: list[Request] = []
    waiting, n_steps = list(texts), 0
    while waiting or not session.is_idle:
        for _ in range(min(2, len(waiting))):
            requests.append(session.start(waiting.pop(0), options))
        session.step()
        n_steps += 1
        # Checked only every 8 steps, because a check copies each sequence's state.
        if session.target.sequences.can_rewind and n_steps % 8 == 0:
            for slot in session.slots():
                if slot.n_tokens:
                    assert_each_position_once(session.target, slot.id)
    return [answer_of(request) for request in requests]


def in_turn(
    session: Session, texts: Sequence[Sequence[int]], options: GenerateOptions
) -> list[Answer]:
    return [together(session, [text], options)[0] for text in texts]


class Plain:
    """The target alone, which judges answers by its logits."""

    def __init__(self, model: Path) -> None:
        self._model = model

    def check(self, prompt: Sequence[int], got: list[int], wanted: list[int]) -> None:
        """Check that the tokens are the same, or that their first difference is a near tie."""
        if got == wanted:
            return
        at = next(i for i, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b)
        with open_engine(self._model, engine_options(device="cpu", n_ctx=1024, **EXACT)) as engine:
            row = engine.sequences.extend(0, [*prompt, *wanted[:at]], 1)[0]
        gap = abs(float(row[got[at]] - row[wanted[at]]))
        assert gap <= NEAR_TIE, f"token {at} is {got[at]} and not {wanted[at]}, {gap} away"


def texts_of(session: Session) -> list[list[int]]:
    """Nine prompts from 1 to 300 tokens; two of them share their first half."""
    words = "\n".join(demo_prompts("code") + demo_prompts("prose"))
    sizes = (60, 1, 300, 17, 120, 5, 200, 33, 90)
    found = [
        session.tokenize(words[71 * i :][: 2 * n], add_special=True, parse_special=False)[:n]
        for i, n in enumerate(sizes)
    ]
    found[7] = [*found[4][:60], *found[7]]
    return found


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def wanted(kind: str, models: Path) -> tuple[list[list[int]], list[list[int]]]:
    """The prompts, and their answers in a session of one slot that forgets each text before the
    next."""
    with open_slots(model(kind, models), SPECS["alone"], 1) as session:
        texts, answers = texts_of(session), []
        for text in texts:
            session.forget()
            options = GenerateOptions(n_predict=N_PREDICT, ignore_eos=True)
            answers += [answer.tokens for answer in in_turn(session, [text], options)]
    return texts, answers


@pytest.mark.parametrize(
    ("spec", "parallel", "ubatch"), [("alone", 9, 512), ("itself", 3, 16), ("stranger", 9, 512)]
)
def test_a_prompt_among_others_gets_the_answer_it_gets_alone(
    kind: str, models: Path, wanted: tuple[list[list[int]], list[list[int]]],
    spec: str, parallel: int, ubatch: int,
) -> None:  # fmt: skip
    """Either all requests have slots, or few slots are reused and small ubatches read prompts."""
    path, (texts, answers) = model(kind, models), wanted
    options = GenerateOptions(n_predict=N_PREDICT, ignore_eos=True)
    more = {"ctx_size": 2048, "ubatch_size": ubatch, "batch_size": max(ubatch, 64)}
    draft = draft_of(spec, kind, models)
    with open_slots(path, SPECS[spec], parallel, draft=draft, **more) as session:
        for _ in range(2):  # the second time, slots hold prompts
            got = together(session, texts, options)
            for text, answer, tokens in zip(texts, got, answers, strict=True):
                Plain(path).check(text, answer.tokens, tokens)
        n_drafted = sum(answer.stats.n_drafted for answer in got)
        n_accepted = sum(answer.stats.n_accepted for answer in got)
        assert (n_drafted > 0) == (spec != "alone")
        assert spec != "itself" or n_accepted > 0.9 * n_drafted
        assert spec != "stranger" or n_accepted < 0.1 * n_drafted
        if parallel == 9:
            assert sum(answer.stats.n_cached_tokens for answer in got) > 0


@pytest.fixture(scope="module")
def pair(exact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """The embedded pair, whose draft pays for every sequence."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path_factory.mktemp("slots")))
        let_batches_be_cheap(patch)
        with open_slots(exact, {}, 9, draft=demo_file("draft.gguf"), ctx_size=2048) as session:
            yield session


def test_a_draft_model_drafts_for_all_and_changes_no_answer(pair: Session, exact: Path) -> None:
    options = GenerateOptions(n_predict=N_PREDICT, ignore_eos=True)
    texts = texts_of(pair)
    with open_slots(exact, SPECS["alone"], 1, ctx_size=2048) as alone:
        wanted = [answer.tokens for answer in in_turn(alone, texts, options)]
    n_rounds = 0

    def count(report: StepReport) -> None:
        nonlocal n_rounds
        n_rounds += len(report.rounds)

    pair.batcher.on_step.append(count)
    got = together(pair, texts, options)
    pair.batcher.on_step.pop()
    assert sum(answer.stats.n_accepted for answer in got) > 20
    assert n_rounds < len(texts) * N_PREDICT
    assert min(pair.counters()[name] for name in ("joint_steps", "draft_batches")) > 0
    for text, answer, tokens in zip(texts, got, wanted, strict=True):
        Plain(exact).check(text, answer.tokens, tokens)


def test_each_request_has_its_own_limits_of_drafts_and_the_same_answer(
    pair: Session, exact: Path
) -> None:
    texts = texts_of(pair)[:4]
    plain = GenerateOptions(n_predict=N_PREDICT, ignore_eos=True)
    limits: list[dict[str, Any]] = [{}, {"draft_max": 0}, {"draft_min": 3}, {"draft_p_min": 0.9}]
    with open_slots(exact, SPECS["alone"], 1, ctx_size=2048) as alone:
        wanted = [answer.tokens for answer in in_turn(alone, texts, plain)]
    pair.forget()
    asked = [replace(plain, **limit) for limit in limits]
    requests = [pair.start(text, wish) for text, wish in zip(texts, asked, strict=True)]
    while not pair.is_idle:
        pair.step()
    answers = [answer_of(request) for request in requests]
    for text, answer, tokens in zip(texts, answers, wanted, strict=True):
        Plain(exact).check(text, answer.tokens, tokens)
    lengths = [{n for n, _ in answer.stats.draft_lengths} for answer in answers]
    assert lengths[1] == {0}
    assert not lengths[2] & {1, 2}
    assert max(lengths[0]) > 2
    assert answers[3].stats.n_drafted < answers[0].stats.n_drafted


@pytest.mark.parametrize(
    "spec",
    [
        {"--spec-accept": "reject"},
        {"--spec-type": "suffix,draft"},
        {"--spec-type": "ngram-mod,draft", "--spec-accept": "reject"},
    ],
    ids=["drawn", "chained", "chained and drawn"],
)
def test_drawn_and_chained_drafts_are_made_together_and_change_no_answer(
    exact: Path, spec: dict[str, object], batches_are_cheap: None
) -> None:
    options = GenerateOptions(n_predict=N_PREDICT, ignore_eos=True)
    draft = demo_file("draft.gguf")
    with open_slots(exact, spec, 5, draft=draft, ctx_size=2048) as session:
        texts = texts_of(session)[:5]
        got = together(session, texts, options)
        assert session.counters()["draft_batches"] > 0
    with open_slots(exact, SPECS["alone"], 1, ctx_size=2048) as alone:
        wanted = [answer.tokens for answer in in_turn(alone, texts, options)]
    assert sum(answer.stats.n_accepted for answer in got) > 10
    for text, answer, tokens in zip(texts, got, wanted, strict=True):
        Plain(exact).check(text, answer.tokens, tokens)


SAMPLED = GenerateOptions(n_predict=16, temperature=0.9, seed=7, ignore_eos=True)
GRAMMAR = GenerateOptions(n_predict=16, grammar='root ::= "ab"+ "c"')
PENALTIES = GenerateOptions(n_predict=16, repeat_penalty=1.5, ignore_eos=True)


def test_samplers_grammars_penalties_and_stops_are_each_requests_own(pair: Session) -> None:
    texts = texts_of(pair)
    wishes = [SAMPLED, GRAMMAR, PENALTIES, replace(SAMPLED, seed=8), replace(GRAMMAR, n_predict=7)]
    wishes += [GenerateOptions(n_predict=16, ignore_eos=True), replace(SAMPLED, temperature=0.2)]

    def run(one_by_one: bool) -> list[Answer]:
        pair.forget()
        requests = []
        for text, wish in zip(texts, wishes, strict=False):
            requests.append(pair.start(text, wish))
            while one_by_one and not pair.is_idle:
                pair.step()
        while not pair.is_idle:
            pair.step()
        return [answer_of(request) for request in requests]

    alone, all_at_once = run(True), run(False)
    assert [a.tokens for a in all_at_once] == [a.tokens for a in alone]
    assert set(all_at_once[1].text) <= set("abc")
    assert all_at_once[0].tokens != all_at_once[3].tokens


@pytest.mark.parametrize(("kind", "parallel"), [("deepseek-v3", 4), ("mamba2", 4), ("mamba2", 2)])
def test_several_answers_to_a_prompt_evaluate_it_once(
    kind: str, parallel: int, models: Path
) -> None:
    with open_slots(model(kind, models), SPECS["alone"], parallel) as session:
        text = texts_of(session)[2]
        seeds = [replace(SAMPLED, seed=seed) for seed in (5, 6, 7)]
        first = session.start(text, seeds[0])
        requests = [first, *(session.start(text, seed, first) for seed in seeds[1:])]
        while not session.is_idle:
            session.step()
        got = [answer_of(request) for request in requests]
        assert [answer.stats.n_cached_tokens for answer in got] == [0, len(text) - 1, len(text) - 1]
        for answer, seed in zip(got, seeds, strict=True):
            session.forget()
            assert together(session, [text], seed)[0].tokens == answer.tokens


def test_one_that_fails_leaves_the_others_alone(pair: Session) -> None:
    texts = texts_of(pair)
    options = GenerateOptions(n_predict=12, ignore_eos=True)
    wanted = in_turn(pair, texts[:2], options)
    good = [pair.start(text, options) for text in texts[:2]]
    # Nothing can follow the first letter, so this request fails while the others are written.
    grammar = 'root ::= "a" [^\\x00-\\U0010FFFF]'
    bad = pair.start(texts[3], GenerateOptions(grammar=grammar, n_predict=9, ignore_eos=True))
    with pytest.raises(BadRequest, match="does not parse"):
        pair.start(texts[3], GenerateOptions(grammar="root ::= ("))
    while not pair.is_idle:
        pair.step()
    assert [answer_of(request).tokens for request in good] == [a.tokens for a in wanted]
    assert bad.is_over
    assert isinstance(bad.error, BadRequest)
    assert "cannot be followed" in str(bad.error)
    assert len(bad.history) == len(texts[3]) + 1
    assert not any(slot.is_processing for slot in pair.slots())


def test_a_cancelled_request_frees_its_slot_at_once(pair: Session) -> None:
    options = GenerateOptions(ignore_eos=True)
    texts = texts_of(pair)
    running = [pair.start(text, options) for text in texts]
    waiting = pair.start(texts[0], options)
    for _ in range(4):
        pair.step()
    assert sum(slot.is_processing for slot in pair.slots()) == 9
    pair.cancel(running[2])
    pair.cancel(waiting)
    pair.cancel(waiting)
    assert sum(slot.is_processing for slot in pair.slots()) == 8
    for request in running:
        pair.cancel(request)
    assert pair.is_idle
    assert pair.step() == []


def test_many_answers_to_a_prompt_do_not_keep_out_who_asks_for_one(exact: Path) -> None:
    options = GenerateOptions(n_predict=8, ignore_eos=True)
    with open_slots(exact, SPECS["alone"], 2) as session:
        texts = texts_of(session)
        first = session.start(texts[0], options)
        many = [first, *(session.start(texts[0], options, first) for _ in range(5))]
        one = session.start(texts[1], options)
        order = []
        while not session.is_idle:
            order += [r for r in session.step() if r.is_over]
    assert len(order) == 7
    assert order.index(one) <= 2, "it got the second slot, or the first that was free"
    assert {id(r) for r in order} == {id(r) for r in (*many, one)}


def test_a_request_may_name_its_slot_and_refuse_what_is_held(pair: Session) -> None:
    pair.forget()
    text = texts_of(pair)[0]
    options = GenerateOptions(n_predict=4, ignore_eos=True)
    wanted = together(pair, [text], replace(options, id_slot=5))[0]
    assert [slot.id for slot in pair.slots() if slot.n_tokens] == [5]
    fresh = together(pair, [text], replace(options, cache_prompt=False))[0]
    assert (fresh.stats.n_cached_tokens, fresh.tokens) == (0, wanted.tokens)
    again = together(pair, [text], replace(options, id_slot=5))[0]
    assert (again.stats.n_cached_tokens, again.tokens) == (len(text) - 1, wanted.tokens)
    with pytest.raises(BadRequest, match="there are slots 0 to 8"):
        pair.start(text, replace(options, id_slot=9))
    # Drafts may write a short answer in the first step.
    busy = pair.start(text, replace(options, id_slot=3, n_predict=24, draft_max=0))
    waits, passes = pair.start(text, replace(options, id_slot=3)), pair.start(text, options)
    pair.step()
    assert [r.slot is not None for r in (busy, waits, passes)] == [True, False, True]
    while not pair.is_idle:
        pair.step()
    assert answer_of(waits).tokens == wanted.tokens


def test_a_time_limit_ends_an_answer_as_it_is(pair: Session) -> None:
    text = texts_of(pair)[0]
    request = pair.start(text, GenerateOptions(ignore_eos=True, time_limit_s=1e-9))
    while not pair.is_idle:
        pair.step()
    answer = answer_of(request)
    assert request.pieces[-1].finish_reason == "length"
    assert len(answer.tokens) <= 1 + MOST_DRAFTED, "it ends with its first round"
    unlimited = GenerateOptions(ignore_eos=True, time_limit_s=1e9, n_predict=12)
    assert len(together(pair, [text], unlimited)[0].tokens) == 12


@pytest.mark.parametrize("limit", [{"n_indent": 60}, {"t_max_predict_ms": 1}])
def test_limits_of_lines_end_an_answer(pair: Session, limit: dict[str, int]) -> None:
    text = texts_of(pair)[0]
    whole, cut = (
        together(pair, [text], GenerateOptions(ignore_eos=True, n_predict=200, **its))[0]
        for its in ({}, limit)
    )
    assert len(cut.tokens) < len(whole.tokens)
    assert cut.tokens == whole.tokens[: len(cut.tokens)]
    assert "\n" in cut.text
    assert whole.text.startswith(cut.text)


# -- prompts that are kept -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mistral-large", "deepseek-v3", "mamba2", "qwen35moe"])
def test_conversations_in_turns_are_each_evaluated_once(kind: str, models: Path) -> None:
    """Three conversations share two slots. The one without a slot is kept in host memory."""
    path = model(kind, models)
    options = GenerateOptions(n_predict=6, ignore_eos=True)
    with (
        open_slots(path, SPECS["alone"], 2, cache_ram_bytes=1 << 30) as session,
        open_slots(path, SPECS["alone"], 1) as fresh,
    ):
        texts = [list(text) for text in (texts_of(session)[i] for i in (2, 4, 6))]
        for turn in range(3):
            for text in texts:
                (answer,) = together(session, [text], options)
                fresh.forget()
                (wanted,) = together(fresh, [text], options)
                Plain(path).check(text, answer.tokens, wanted.tokens)
                n_new = 1 if turn == 0 else 6
                if turn:
                    assert answer.stats.n_cached_tokens == len(text) - n_new
                    assert answer.stats.n_prompt_tokens == len(text)
                text += [*wanted.tokens, 3, 5, 7, 9, 11]
        assert len(session.batcher.store) > 0


def test_a_prompt_that_cannot_be_kept_is_told_of_once(
    models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = model("mistral-large", models)
    options = GenerateOptions(n_predict=2, ignore_eos=True)
    with open_slots(path, SPECS["alone"], 1, cache_ram_bytes=1000) as session:
        for i in (2, 6, 2):
            together(session, [texts_of(session)[i]], options)
    said = [r.getMessage() for r in caplog.records if "is not kept" in r.getMessage()]
    assert len(said) == 1
    assert "--cache-ram" in said[0]


def test_a_prompt_shares_the_beginning_of_one_that_is_being_answered(exact: Path) -> None:
    options = GenerateOptions(n_predict=30, ignore_eos=True)
    with open_slots(exact, SPECS["alone"], 3) as session:
        text = texts_of(session)[2]
        first = session.start(text, options)
        for _ in range(4):
            session.step()
        others = [session.start([*text[:150], 9, 8], options), session.start(text, options)]
        while not session.is_idle:
            session.step()
        got = [answer_of(request) for request in (first, *others)]
        assert [a.stats.n_cached_tokens for a in got] == [0, 150, len(text) - 1]
        wanted = in_turn(session, [text, [*text[:150], 9, 8]], options)
    for text_, answer, tokens in zip(
        (text, [*text[:150], 9, 8], text), got, (*wanted, wanted[0]), strict=True
    ):
        Plain(exact).check(text_, answer.tokens, tokens.tokens)


def test_when_the_context_is_full_the_last_one_waits_and_goes_on_later(exact: Path) -> None:
    """Four answers of 150 tokens each do not fit 512 tokens with their prompts."""
    options = GenerateOptions(n_predict=150, ignore_eos=True)
    with open_slots(exact, SPECS["suffix"], 4, ctx_size=512, cache_ram_bytes=1 << 30) as session:
        texts = [text[:90] for text in (texts_of(session)[i] for i in (2, 4, 6, 0))]
        requests = [session.start(text, options) for text in texts]
        most = 0
        while not session.is_idle:
            session.step()
            most = max(most, sum(slot.is_processing for slot in session.slots()))
            assert sum(slot.n_tokens for slot in session.slots()) <= 512
        got = [answer_of(request) for request in requests]
        assert most >= 3
        assert [len(answer.tokens) for answer in got] == [150] * 4
        session.forget()
        wanted = in_turn(session, texts, options)
    for text, answer, alone in zip(texts, got, wanted, strict=True):
        Plain(exact).check(text, answer.tokens, alone.tokens)


def test_idle_prompts_make_room_for_one_that_needs_the_whole_context(exact: Path) -> None:
    options = GenerateOptions(n_predict=4, ignore_eos=True)
    with open_slots(exact, SPECS["alone"], 3, ctx_size=512, cache_ram_bytes=1 << 30) as session:
        texts = texts_of(session)
        together(session, [texts[6], texts[8]], options)
        whole = (texts[2] * 2)[:500]
        (answer,) = together(session, [whole], options)
        assert len(answer.tokens) == 4
        (again,) = together(session, [texts[6]], options)
        assert again.stats.n_cached_tokens == len(texts[6]) - 1, "it came back from host memory"


# -- saved slots -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["deepseek-v3", "mamba2"])
def test_a_slot_that_was_saved_goes_on_after_a_restart(
    kind: str, models: Path, tmp_path: Path
) -> None:
    path = model(kind, models)
    options = GenerateOptions(n_predict=6, ignore_eos=True)
    with open_slots(path, SPECS["alone"], 2, slot_save_path=tmp_path) as session:
        text = texts_of(session)[4]
        (answer,) = together(session, [text], options)
        saved = session.change_slot(0, "save", "chat")
        folder = tmp_path.rename(tmp_path.with_name("away"))
        with pytest.raises(NotWritten, match="slot 0 is not saved to chat in --slot-save-path: No"):
            session.change_slot(0, "save", "chat")
        folder.rename(tmp_path)
        longer = [*text, *answer.tokens, 1, 2, 3]
        (wanted,) = together(session, [longer], options)
        assert saved.n_bytes == (tmp_path / "chat").stat().st_size
        assert session.change_slot(0, "erase", "").n_tokens > 0
        assert session.slots()[0].n_tokens == 0
    with open_slots(path, SPECS["alone"], 2, slot_save_path=tmp_path) as session:
        restored = session.change_slot(1, "restore", "chat")
        assert (restored.n_tokens, restored.n_bytes) == (saved.n_tokens, saved.n_bytes)
        (got,) = together(session, [longer], options)
        assert got.tokens == wanted.tokens
        assert got.stats.n_cached_tokens == saved.n_tokens


@pytest.mark.parametrize("kind", ["qwen3moe", "deepseek-v3"])
@pytest.mark.parametrize("store_mib", [0, 64])
def test_a_restored_slot_finds_room_beside_idle_conversations(
    kind: str, store_mib: int, models: Path, tmp_path: Path
) -> None:
    path = model(kind, models)
    options = GenerateOptions(n_predict=4, ignore_eos=True)
    more = {"slot_save_path": tmp_path, "cache_ram_bytes": store_mib << 20}
    with open_slots(path, SPECS["alone"], 3, ctx_size=256, **more) as session:
        texts = [[3 + (7 * i + n) % 90 for i in range(150)] for n in (0, 31)]
        answers = [together(session, [texts[0]], replace(options, id_slot=0))[0]]
        saved = session.change_slot(0, "save", "chat")
        answers += together(session, [texts[1]], replace(options, id_slot=1))
        session.change_slot(0, "erase", "")
        assert session.slots()[1].n_tokens > 150, "no room for both"
        restored = session.change_slot(0, "restore", "chat")
        assert restored.n_tokens == saved.n_tokens
        assert session.slots()[1].n_tokens == 0
        for text, answer, is_kept in zip(texts, answers, (True, bool(store_mib)), strict=True):
            (again,) = together(session, [text], options)
            assert again.tokens == answer.tokens
            assert (again.stats.n_cached_tokens > 0) == is_kept


def test_a_slot_is_not_restored_beside_a_request_that_takes_its_room(
    models: Path, tmp_path: Path
) -> None:
    path = model("qwen3moe", models)
    options = GenerateOptions(n_predict=60, ignore_eos=True)
    with open_slots(path, SPECS["alone"], 2, ctx_size=256, slot_save_path=tmp_path) as session:
        text = [3 + 7 * i % 90 for i in range(150)]
        short = replace(options, n_predict=1, id_slot=0)
        together(session, [text], short)
        n_tokens = session.change_slot(0, "save", "chat").n_tokens
        together(session, [[5, 6, 7]], short)
        held = session.slots()[0].n_tokens
        running = session.start(text, replace(options, id_slot=1))
        while not running.pieces:
            session.step()
        with pytest.raises(BadRequest, match=f"the {n_tokens} tokens of chat have no room beside"):
            session.change_slot(0, "restore", "chat")
        assert session.slots()[0].n_tokens == held, "it keeps what it holds"
        while not running.is_over:
            session.step()
        assert session.change_slot(0, "restore", "chat").n_tokens == n_tokens


def test_what_is_wrong_with_a_slot_or_its_file_is_one_sentence(
    models: Path, tmp_path: Path
) -> None:
    path = model("mistral-large", models)
    (tmp_path / "text").write_text("once upon a time")
    with open_slots(path, SPECS["alone"], 2, slot_save_path=tmp_path) as session:
        for number, action, name, words in (
            (2, "save", "x", "slot 2 does not exist: there are slots 0 to 1"),
            (0, "save", "x", "slot 0 holds nothing"),
            (0, "restore", "missing", "missing: No such file"),
            (0, "save", "a" * 300, "at most 200 bytes"),
            (0, "restore", "text", "text is no saved sequence"),
            (0, "restore", "../text", "must be a name"),
        ):
            with pytest.raises(BadRequest, match=words):
                session.change_slot(number, action, name)  # type: ignore[arg-type]
        request = session.start([1, 2, 3], GenerateOptions(ignore_eos=True))
        session.step()
        with pytest.raises(BadRequest, match="slot 0 is at work"):
            session.change_slot(0, "erase", "")
        session.cancel(request)
    with (
        open_slots(path, SPECS["alone"], 1) as session,
        pytest.raises(BadRequest, match="--slot-save-path"),
    ):
        session.change_slot(0, "save", "x")


@pytest.mark.parametrize("kind", ["mistral-large", "mamba2"])
def test_a_file_that_cannot_be_restored_leaves_the_slot_as_it_was(
    kind: str, models: Path, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("once upon a time")
    options = GenerateOptions(n_predict=4, ignore_eos=True)
    with open_slots(model(kind, models), SPECS["alone"], 2, slot_save_path=tmp_path) as session:
        text = texts_of(session)[4]
        (answer,) = together(session, [text], options)
        saved = session.change_slot(0, "save", "chat")
        raw = (tmp_path / "chat").read_bytes()
        (tmp_path / "cut").write_bytes(raw[: len(raw) // 2])
        (tmp_path / "changed").write_bytes(raw[:-30] + b"x" + raw[-29:])
        for name in ("missing", "text", "changed"):
            with pytest.raises(BadRequest, match=name):
                session.change_slot(0, "restore", name)
            assert session.slots()[0].n_tokens == saved.n_tokens
        longer = [*text, *answer.tokens, 1, 2, 3]
        (got,) = together(session, [longer], options)
        assert got.stats.n_cached_tokens == saved.n_tokens
        with pytest.raises(BadRequest, match="cut"):
            session.change_slot(0, "restore", "cut")


def test_a_saved_slot_with_a_changed_byte_is_refused(models: Path, tmp_path: Path) -> None:
    path = model("mistral-large", models)
    with open_slots(path, SPECS["alone"], 2, slot_save_path=tmp_path) as session:
        together(session, [texts_of(session)[4]], GenerateOptions(n_predict=4, ignore_eos=True))
        n_bytes = session.change_slot(0, "save", "chat").n_bytes
        whole = (tmp_path / "chat").read_bytes()
        assert len(whole) == n_bytes
        for at in (13, n_bytes // 3, n_bytes // 2, n_bytes - 20, n_bytes - 1):
            changed = bytearray(whole)
            changed[at] ^= 0x10
            (tmp_path / "chat").write_bytes(changed)
            with pytest.raises(BadRequest, match="chat is damaged: its checksum does not match"):
                session.change_slot(1, "restore", "chat")
            assert session.slots()[1].n_tokens == 0
        n_named = int.from_bytes(whole[-16:-12], "little")
        state = whole[: -16 - n_named]
        (tmp_path / "chat").write_bytes(state)  # as llama-server writes it
        assert session.change_slot(1, "restore", "chat").n_tokens > 0
        (tmp_path / "chat").write_bytes(state + b"specoff1" + crc32(state).to_bytes(4, "little"))
        with pytest.raises(BadRequest, match="earlier version, which did not note the model"):
            session.change_slot(1, "restore", "chat")


def test_a_slot_of_another_model_of_the_same_shape_is_refused(tmp_path: Path) -> None:
    """The state of a fine-tune, or of other rope settings, has the same size."""
    paths = {
        seed: write_preset("mistral-large", tmp_path / f"{seed}.gguf", size="tiny", seed=seed)
        for seed in (1, 2)
    }
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(paths[1].read_bytes())
    linear = {"rope_scaling": "linear", "rope_scale": 8.0}
    overridden = {"kv_overrides": (KvOverride("llama.attention.layer_norm_rms_epsilon", 0.5),)}
    with open_slots(paths[1], SPECS["alone"], 1, slot_save_path=tmp_path) as session:
        together(session, [texts_of(session)[4]], GenerateOptions(n_predict=4, ignore_eos=True))
        saved = session.change_slot(0, "save", "chat")
    for path, more, words in (
        (paths[2], {}, r"chat was saved with another model \(hash\)"),
        (paths[1], linear, "chat was saved with another rope setting"),
        (paths[1], overridden, r"chat was saved with another --override-kv \(none\) than this one"),
        (paths[1], {"type_k": "f16"}, "chat was saved with another type of cached keys"),
    ):
        with open_slots(path, SPECS["alone"], 1, slot_save_path=tmp_path, **more) as session:
            with pytest.raises(BadRequest, match=words):
                session.change_slot(0, "restore", "chat")
            assert session.slots()[0].n_tokens == 0
    with open_slots(renamed, SPECS["alone"], 1, slot_save_path=tmp_path) as session:
        assert session.change_slot(0, "restore", "chat").n_tokens == saved.n_tokens


def test_weights_that_are_no_numbers_end_the_request_with_a_sentence(
    models: Path, tmp_path: Path
) -> None:
    path = tmp_path / "nan.gguf"
    path.write_bytes(model("mistral-large", models).read_bytes())
    weight = read_facts(path).weights["output_norm.weight"].entry
    with path.open("r+b") as file:
        file.seek(weight.offset_bytes)
        file.write(b"\xff\xff\xff\x7f")  # NaN
    with open_slots(path, SPECS["alone"], 1, warmup=False) as session:
        for options in (
            GenerateOptions(temperature=0.0),
            GenerateOptions(),
            GenerateOptions(grammar='root ::= "a"'),
        ):
            request = session.start([1, 2, 3], replace(options, n_predict=4))
            while not request.is_over:
                session.step()
            assert isinstance(request.error, DeviceFailed)
            assert str(request.error).startswith("the model's logits are not numbers, so no token")
            assert not any(piece.text for piece in request.pieces)


@pytest.mark.parametrize(("similar", "in_use"), [(0.1, [True, False]), (0.9, [True, True])])
def test_slot_prompt_similarity_is_the_share_that_chooses_a_slot(
    models: Path, similar: float, in_use: list[bool]
) -> None:
    path = model("mistral-large", models)
    with open_slots(path, SPECS["alone"], 2, slot_similarity=similar) as session:
        first, second = list(range(30, 42)), [*range(30, 36), *range(50, 56)]
        for tokens in (first, second):  # half of each text is common: too little to copy
            together(session, [tokens], GenerateOptions(n_predict=1, ignore_eos=True))
        held = [slot.n_tokens > 0 for slot in session.slots()]
        assert held == in_use


def test_a_failed_decode_voids_the_checkpoints_of_a_recurrent_slot(models: Path) -> None:
    """The failure empties the sequence. The next prompt begins at a checkpoint made after it."""
    text = [7 + i % 50 for i in range(60)]
    options = engine_options(device="cpu", n_ctx=256, **EXACT)
    with open_engine(model("qwen3next", models), options) as engine:
        slot, sequences = Slot(0, engine.sequences, None, 4), engine.sequences
        for end in (20, 40):
            sequences.extend(0, text[slot.n_held : end], 0)
            slot.mark()
        wanted = sequences.extend(0, text[40:])[-1]
        sequences._undo(0, 60)  # as after a decode that failed
        assert slot.n_held == 0
        sequences.extend(0, text[:50], 0)
        slot.mark()
        slot.keep(text)
        assert slot.reuse(text[:45]) == 0, "the checkpoint at 40 tokens is void"
        sequences.extend(0, text[:50], 0)
        slot.keep(text)
        assert slot.reuse(text) == 50
        assert abs(sequences.extend(0, text[50:])[-1] - wanted).max() < NEAR_TIE


def test_requests_that_another_thread_makes_during_steps_write_the_same(models: Path) -> None:
    """A server's second thread does so, and the main thread queues them between two steps."""
    options = GenerateOptions(n_predict=N_PREDICT, stop=("zz",), grammar="root ::= [a-z ]+")
    words = ["def hello", "a longer text, " * 20, "x = 5", "for i in range(" * 10] * 3
    with open_slots(model("mistral-large", models), SPECS["suffix"], 4) as session:

        def made(text: str) -> Request:
            tokens = session.tokenize(text, add_special=True, parse_special=True)
            return session.new_request(tokens, options)

        texts = [session.tokenize(text, add_special=True, parse_special=True) for text in words]
        expected = in_turn(session, texts, options)
        for _ in range(5):  # on a busy machine no step may run while the other thread computes
            session.forget()
            requests, n_during = [session.start(texts[0], options)], 0
            with ThreadPoolExecutor(1) as second:
                making = [second.submit(made, text) for text in words[1:]]
                while making or not session.is_idle:
                    n_during += bool(making) and not session.is_idle
                    session.step()
                    while making and making[0].done():
                        requests.append(making.pop(0).result())
                        session.enqueue(requests[-1])
            if n_during > 1:
                break
        assert n_during > 1
        assert [answer_of(r).text for r in requests] == [answer.text for answer in expected]
