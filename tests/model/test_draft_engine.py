"""Drafts computed in torch change no text. The engine is chosen by measurement, or refused with
the reason."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: scripts/test-extras runs this")

from lossless_parts import let_batches_be_cheap  # noqa: E402
from test_slots import Plain, in_turn, together  # noqa: E402

from offload.device import choose_device  # noqa: E402
from offload.errors import BadModel, DeviceUnavailable, DoesNotFit  # noqa: E402
from offload.model_file import read_facts  # noqa: E402
from offload.torch_draft.network import allocate  # noqa: E402
from offload.torch_draft.plan import TorchDraftOptions, lay_out, read_shape  # noqa: E402
from specdec.drafters.model import ModelDrafter  # noqa: E402
from specdec.types import Draft, DraftRequest  # noqa: E402
from specoffload.config.command_line import read_command_line  # noqa: E402
from specoffload.config.environment import read_host  # noqa: E402
from specoffload.config.resolution import (  # noqa: E402
    Config,
    demo_file,
    demo_prompts,
    resolve,
)
from specoffload.generation.generation import GenerateOptions  # noqa: E402
from specoffload.kept import today  # noqa: E402
from specoffload.opening.draft import draft_bytes, faster_engine, open_draft  # noqa: E402
from specoffload.opening.start import open_target, session_start  # noqa: E402
from specoffload.session.session import Session  # noqa: E402

pytestmark = pytest.mark.extra("torch")

PROMPT = "import os\n\ndef main(argv):\n    "
GREEDY = GenerateOptions(n_predict=40, ignore_eos=True)
EXACT_WORDS = "--flash-attn off --cache-type-k f32 --cache-type-v f32"  # as EXACT of lossless_parts


def config_of(words: str, **changes: Any) -> Config:
    """The embedded pair on the CPU, with these flags and changed options."""
    line = read_command_line("run", ["--device", "cpu", "-t", "1", "-c", "512", *words.split()])
    return resolve(replace(line.options, **changes), read_host())


def text_of(session: Session, options: GenerateOptions) -> str:
    return "".join(piece.text for piece in session.generate(PROMPT, options))


@pytest.fixture(scope="module")
def plain() -> str:
    with Session(config_of("--no-spec")) as session:
        return text_of(session, GREEDY)


@pytest.mark.parametrize(
    "words",
    [
        "--spec-policy fixed --draft-max 6",
        "--spec-policy p-min --spec ngram-mod,draft",
        "--spec-accept reject --spec-policy fixed --ctx-size-draft 40",
        "--spec-policy fixed --spec-replace <a>=<b>",
        "--spec-policy fixed --draft-vocab KEPT",
    ],
)
def test_the_text_is_plain_decodings(words: str, plain: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept.txt"
    kept.write_text("# a third\n" + "".join(f"{token}\n" for token in range(0, 4096, 3)))
    words = words.replace("KEPT", str(kept))
    with Session(config_of(f"--draft-engine torch {words}")) as session:
        assert text_of(session, GREEDY) == plain
        assert session.draft is not None
        sequences = session.draft.sequences
        assert sequences.counters.n_steps > 0  # type: ignore[union-attr]
        assert any("draft engine: torch on cpu" in note for note in session.notes)
        if "--draft-vocab" in words:
            assert sequences.layout.pieces["output"].shape[0] == 1366  # type: ignore[union-attr]


@pytest.mark.parametrize("spec", ["", "--spec ngram-mod,draft"])
def test_it_drafts_for_several_requests_at_once_and_changes_no_answer(
    spec: str, exact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests run twice. The second time, target and draft still hold the prompts."""
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path))
    let_batches_be_cheap(monkeypatch)
    options = GenerateOptions(n_predict=24, ignore_eos=True)
    words = f"-m {exact} -c 2048 {EXACT_WORDS}"
    with Session(config_of(f"{words} --no-spec")) as alone:
        texts = [
            alone.tokenize(t, add_special=True, parse_special=False) for t in demo_prompts("code")
        ]
        texts = [text[: 20 + 31 * i] for i, text in enumerate(texts[:4])]
        wanted = [answer.tokens for answer in in_turn(alone, texts, options)]
    draft = f"--draft {demo_file('draft.gguf')} --draft-engine torch"
    config = replace(config_of(f"{words} {draft} {spec}"), parallel=4)
    with Session(config) as session:
        for _ in range(2):
            got = together(session, texts, options)
            for text, answer, tokens in zip(texts, got, wanted, strict=True):
                Plain(exact).check(text, answer.tokens, tokens)
        assert session.counters()["draft_batches"] > 0
        assert session.draft is not None
        assert session.draft.sequences.counters.n_steps > 0  # type: ignore[union-attr]
    assert sum(answer.stats.n_cached_tokens for answer in got) > 0
    assert sum(answer.stats.n_accepted for answer in got) > 10


def drafts_of(words: str, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], Draft]:
    """The draft model's drafts in a generation, by the tokens of the text before the draft."""
    found: dict[tuple[int, ...], Draft] = {}
    propose = ModelDrafter.propose

    def noted(drafter: ModelDrafter, requests: Sequence[DraftRequest]) -> list[Draft]:
        assert drafter.name == "draft"
        drafter.n_candidates = 2
        texts = [tuple(request.history) for request in requests]
        drafts = propose(drafter, requests)
        found.update(zip(texts, drafts, strict=True))
        return drafts

    with monkeypatch.context() as patch, Session(config_of(words)) as session:
        patch.setattr(ModelDrafter, "propose", noted)
        text_of(session, replace(GREEDY, n_predict=80))
    return found


def test_both_engines_draft_the_same_but_for_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are equal up to a near-tie, and their probabilities are alike."""
    words = "--spec draft --spec-policy fixed --draft-max 5 --draft-engine"
    in_llama, in_torch = (drafts_of(f"{words} {it}", monkeypatch) for it in ("llama", "torch"))
    texts = in_llama.keys() & in_torch.keys()
    assert len(texts) >= 0.7 * max(len(in_llama), len(in_torch)) >= 7
    n_equal = 0
    for text in texts:
        mine, its = in_torch[text], in_llama[text]
        assert len(mine.tokens) == len(its.tokens) == 5
        n = next((i for i in range(5) if mine.tokens[i] != its.tokens[i]), 5)
        assert mine.probs[:n] == pytest.approx(its.probs[:n], abs=0.05)
        if n < 5:
            (_, first), (_, second) = its.candidates[n]
            assert first - second < 0.05, "the engines disagree on a clear choice"
        n_equal += n
    assert n_equal >= 0.9 * 5 * len(texts)


def test_a_seed_repeats_a_sampled_text_where_lengths_are_fixed() -> None:
    options = GenerateOptions(n_predict=30, ignore_eos=True, temperature=0.9, seed=7)
    words = "--draft-engine torch --spec-accept reject --spec-policy fixed --draft-max 4"
    with Session(config_of(words)) as session:
        first = text_of(session, options)
        session.forget()
        assert text_of(session, options) == first


def test_a_profile_measures_torchs_own_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path))
    with Session(config_of("--draft-engine torch")) as session:
        assert session.speculation is not None
        assert session.speculation.costs.draft_step_s > 0
    (kept,) = [json.loads(path.read_text()) for path in tmp_path.glob("target-*.json")]
    drafts = {
        words: draft["step_s"] for run in kept["runs"] for words, draft in run["drafts"].items()
    }
    assert any("torch cpu" in words and step_s > 0 for words, step_s in drafts.items())


# -- choosing -------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path))
    let_batches_be_cheap(monkeypatch)
    return tmp_path


def chosen(config: Config) -> tuple[str, str]:
    """The class of the draft engine that `auto` chooses, and the line on it."""
    options = TorchDraftOptions(n_ctx=512, n_threads=1)
    draft = demo_file("draft.gguf")
    with open_target(session_start(config)) as target:
        opened = faster_engine(config, config.spec, draft, target, options)
        opened.model.close()
    assert opened.choice is not None
    return type(opened.model).__name__, opened.choice.words


def test_both_engines_are_measured_and_the_faster_is_taken(folder: Path) -> None:
    config = config_of("--draft-engine auto")
    _, line = chosen(config)
    assert "measured now" in line
    assert "ms in torch and" in line
    (file,) = folder.glob("*.json")
    data = json.loads(file.read_text())
    ((key, kept),) = data["engines"].items()
    assert {name: len(its["values"]) for name, its in kept["seconds"].items()} == {
        "torch": 1,
        "libllama": 1,
    }
    for faster, name in (("torch", "TorchEngine"), ("libllama", "Engine")):
        other = {"torch": "libllama", "libllama": "torch"}[faster]
        times, day = {faster: {"values": [0.001] * 3}, other: {"values": [0.002] * 3}}, today()
        engines = {key: {"seconds": times, "date": day}}
        file.write_text(json.dumps(data | {"engines": engines}))
        kind, line = chosen(config)
        assert kind == name
        assert f"draft engine: {faster}" in line
        assert f"measured on {day}" in line
    old = (datetime.now(UTC).date() - timedelta(30)).isoformat()
    engines = {key: {"seconds": times, "date": old}}
    file.write_text(json.dumps(data | {"engines": engines}))
    assert "measured now" in chosen(config)[1]
    assert json.loads(file.read_text())["engines"][key]["date"] == today()


def test_a_bad_file_is_measured_anew(folder: Path) -> None:
    config = config_of("--draft-engine auto")
    chosen(config)
    (file,) = folder.glob("*.json")
    data = json.loads(file.read_text())
    file.write_text(json.dumps(data | {"engines": {"x": {"seconds": {"torch": "fast"}}}}))
    _, line = chosen(config)
    assert "measured now" in line
    assert json.loads(file.read_text())["engines"].keys() == data["engines"].keys()


def test_without_a_profile_nothing_is_measured(folder: Path) -> None:
    kind, line = chosen(config_of("--draft-engine auto", use_profile=False))
    assert kind == "Engine"
    assert "--draft-engine torch takes torch unmeasured" in line
    assert not list(folder.glob("*.json"))


# -- why not --------------------------------------------------------------------------------------


def notes_of(words: str) -> str:
    with Session(config_of(words)) as session:
        return "\n".join(session.notes)


def test_without_a_gpu_auto_is_libllama_with_the_reason() -> None:
    assert "draft engine: libllama (the draft is on no GPU)" in notes_of("--spec-policy fixed")


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the draft's device look like CUDA, although libllama computes on the CPU."""
    place = replace(choose_device("cpu"), name="CUDA0", on_gpu=True)
    monkeypatch.setattr("specoffload.opening.draft._place", lambda *_: place)


@pytest.mark.usefixtures("as_on_cuda")
def test_a_torch_without_cuda_is_the_reason(folder: Path) -> None:
    assert "libllama (torch 2" in notes_of("--spec-policy fixed")
    with pytest.raises(DeviceUnavailable, match="finds no CUDA device; install its CUDA build"):
        Session(config_of("--draft-engine torch --spec-policy fixed"))


@pytest.mark.usefixtures("as_on_cuda")
def test_without_torch_auto_says_so_and_torch_by_name_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    said = "libllama (the draft cannot be computed in torch: torch is not installed"
    assert said in notes_of("--spec-policy fixed")
    with pytest.raises(DeviceUnavailable, match="not installed"):
        Session(config_of("--draft-engine torch --spec-policy fixed"))


@pytest.mark.usefixtures("as_on_cuda")
def test_a_draft_that_torch_cannot_compute_is_libllamas(tiny_moe: Path) -> None:
    words = f"-m {tiny_moe} --draft {tiny_moe} --spec-policy fixed"
    with pytest.raises(BadModel, match="not deepseek2"):
        Session(config_of(f"{words} --draft-engine torch"))
    assert "draft engine: libllama (tiny_moe.gguf: the torch draft knows" in notes_of(words)


def test_memory_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    layout = lay_out(read_shape(read_facts(demo_file("draft.gguf"))), TorchDraftOptions(n_ctx=512))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 20, 1 << 30))
    device = SimpleNamespace(type="cuda")
    with pytest.raises(DoesNotFit, match=r"needs 5\d MiB .* and 1 MiB are free; lower --vram"):
        allocate(layout, device, "draft.gguf")  # type: ignore[arg-type]
    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(DoesNotFit, match="cannot be had on cpu"):
        allocate(layout, torch.device("cpu"), "draft.gguf")


def test_the_target_leaves_room_for_the_engine_that_needs_more() -> None:
    sizes = {}
    for engine in ("llama", "torch", "auto"):
        config = config_of(f"--draft-engine {engine}")
        sizes[engine] = draft_bytes(config, config.spec, config.ctx_size)
    assert sizes["torch"] == sizes["auto"] >= sizes["llama"] > 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no token id"),
        ("1\nx\n", "line 2 is 'x', no token id"),
        ("5000\n", "5000 is not"),
    ],
)
def test_a_bad_list_of_kept_tokens_is_one_sentence(text: str, words: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept.txt"
    kept.write_text(text)
    config = config_of(f"--draft-engine torch --spec-policy fixed --draft-vocab {kept}")
    with (
        open_target(session_start(config)) as target,
        pytest.raises(Exception, match=words) as raised,
    ):
        open_draft(config, config.spec, target)
    assert "\n" not in str(raised.value)
