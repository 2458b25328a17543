"""The table of flags turns words and variables into typed values, or refuses bad ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from resolved import line_of

from offload.notes import NoteKind, kind_of
from offload.times.min_batch import MinBatch
from specdec.options import PolicyName
from specoffload.commands.run import read_prompt, split_model_and_prompt
from specoffload.config.command_line import read_command_line
from specoffload.config.environment import Environment, read_environment, read_host
from specoffload.config.options import DraftOptions, RunOptions, ServeOptions, Toggle
from specoffload.config.presets import read_presets
from specoffload.config.resolution import resolve
from specoffload.config.table import TABLE
from specoffload.config.values import NEVER
from specoffload.errors import UsageError
from specoffload.generation.generation import AskedOptions
from specoffload.server.access import read_keys

# -- reading words


def test_words_become_typed_values_under_the_names_that_were_typed() -> None:
    line = line_of("-m", "m.gguf", "-t", "3", "--draft-max=5", "--spec-policy", "p-min", "-fa")
    options = line.options
    assert (options.model, options.threads) == (Path("m.gguf"), 3)
    assert options.flash_attn is Toggle.ON
    assert options.spec.policy is PolicyName.P_MIN
    assert options.spec.n_max == 5
    assert options.given == {"model": "-m", "threads": "-t", "flash_attn": "-fa"}
    assert options.spec.given == {"n_max": "--draft-max", "policy": "--spec-policy"}


def test_the_last_of_several_wins_and_underscores_are_hyphens() -> None:
    assert line_of("-c", "1", "--ctx_size", "2", "-c", "3").options.ctx_size == 3


def test_a_plan_begins_with_the_flags_that_a_start_has_too() -> None:
    words = ["m.gguf", "--hardware", "h100", "-c", "8192", "--ram=64GiB,70GB/s", "--json", "-v"]
    words += ["--link", "25GB/s", "-ot", "exps=CPU", "--no-mmap", "--vram", "12GiB"]
    line = read_command_line("plan", words)
    kept = ["m.gguf", "-c", "8192", "-ot", "exps=CPU", "--no-mmap", "--vram", "12GiB"]
    assert line.words_for("serve") == kept
    assert read_command_line("serve", kept).options.ctx_size == 8192


@pytest.mark.parametrize(
    "words",
    [("--api-key", "s3cret"), ("--api-key=s3cret",), ("--hf-token", "s3cret"), ("-hft", "s3cret")],
)
def test_a_plan_begins_without_the_keys_that_were_typed(words: tuple[str, ...]) -> None:
    line = read_command_line("plan", ["m.gguf", *words])
    kept = line.words_for("serve")
    assert "s3cret" not in " ".join(kept)
    assert len(kept) == 1 + len(words)
    with pytest.raises(UsageError, match="must be the key itself"):  # nobody serves with it
        read_command_line("serve", kept)


@pytest.mark.parametrize(
    "flag", ["-p", "-sys", "-r", "--grammar", "-j", "--reasoning-budget-message"]
)
def test_texts_for_the_model_are_utf8_whatever_the_locale(flag: str) -> None:
    """A locale without UTF-8 hands its bytes on as surrogates."""
    escaped = "é → 🦙".encode().decode("ascii", "surrogateescape")
    line = read_command_line("run", [flag, escaped])
    (given,) = line.given.values()
    assert given.value in ("é → 🦙", ("é → 🦙",))
    with pytest.raises(UsageError, match=f"^{flag} .*: must be UTF-8 text"):
        read_command_line("run", [flag, "\udcff\udcfe x"])
    with pytest.raises(UsageError, match="the prompt must be UTF-8 text"):
        read_prompt("\udcff\udcfe x")
    assert read_prompt(escaped) == "é → 🦙"


@pytest.mark.parametrize(("command", "words"), [
    ("serve", ["--api-key", "s3cret,,other"]),
    ("serve", ["--api-key=s3cret,"]),
])  # fmt: skip
def test_a_refusal_does_not_show_a_key(command: str, words: list[str]) -> None:
    with pytest.raises(UsageError, match="--api-key .*: must be a key") as e:
        read_command_line(command, words)
    assert "s3cret" not in str(e.value)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("-fa",), Toggle.ON),
        (("-fa", "off", "-c", "9"), Toggle.OFF),
        (("-fa", "1"), Toggle.ON),
        (("-fa", "-c", "9"), Toggle.ON),
        ((), Toggle.AUTO),
    ],
)
def test_a_flag_that_may_stand_bare_swallows_nothing(
    words: tuple[str, ...], expected: Toggle
) -> None:
    options = line_of(*words).options
    assert options.flash_attn is expected
    assert options.ctx_size == (9 if "-c" in words else None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-nq", "2"), "there is no flag -nq"),
        (("--draft-mx", "2"), "did you mean --draft-max?"),
        (("--thread", "2"), "did you mean --threads?"),
        (("--nosuchflag",), "there is no flag --nosuchflag; specoffload run --help"),
        (("--port", "80"), "--port is not a flag of run, only of serve"),
        (("-t",), "-t needs a value"),
        (("-t", "-c", "3"), "-t needs a value"),
        (("-t", "x"), "-t x: must be a whole number"),
        (("-c", "-1"), "-c -1: must be at least 0"),
        (("--ctx-size=x",), "--ctx-size x: must be"),
        (("--mmap=1",), "--mmap takes no value"),
        (("--draft-max", "-1"), "--draft-max -1: must be between 0 and 63"),
        (("--spec-draft-n-max", "x"), "--spec-draft-n-max x: must be"),
        (("--draft-p-min", "nan"), "--draft-p-min nan: must be a number"),
        (("--spec-policy", "p_min"), "--spec-policy p_min: must be one of throughput, "),
        (("--spec", "ngram-mod,ngram-mod"), "names a drafter twice"),
        (("--spec", "none,suffix"), "none stands alone"),
        (("--spec", "draft-medusa"), "'draft-medusa' is unknown; there are none, draft, "),
        (("--vram", "much"), "--vram much: "),
        (("--seed", "-7"), "--seed -7: must lie between"),
        (("--repeat-penalty", "0"), "--repeat-penalty 0: must be over 0"),
        (("--spec-synth-rates", "0.5,x"), "must be numbers with commas between them"),
        (("a", "b"), "Unexpected 'b'; with a model the prompt needs -p"),
    ],
)
def test_bad_words_are_answered_under_the_name_that_was_typed(
    words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        line_of(*words)
    assert message in str(caught.value)


def refusal_of(words: list[str]) -> str | None:
    """The error message for these words, or None if they are accepted."""
    try:
        line_of(*words)
    except UsageError as e:
        return str(e)
    return None


_NAMES = st.sampled_from([name for flag in TABLE for name in (*flag.names, *flag.off)])


@given(st.lists(_NAMES | st.text(max_size=8), max_size=5))
def test_any_words_are_read_or_refused_under_one_of_them(words: list[str]) -> None:
    refused = refusal_of(words)
    assert refused is None or any(
        word.partition("=")[0].replace("_", "-") in refused or repr(word) in refused
        for word in words
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", MinBatch(3, 3)),
        ("dense=8,experts=24", MinBatch(experts=24, dense=8)),
        ("experts=5", MinBatch(experts=5, dense=32)),
        ("2, dense=9", MinBatch(experts=2, dense=9)),
        ("off", MinBatch(NEVER, NEVER)),
        ("auto", "auto"),
    ],
)
def test_min_batch_is_a_number_or_one_per_kind(text: str, expected: object) -> None:
    assert line_of("--min-batch", text).options.min_batch == expected


@pytest.mark.parametrize("text", ["0", "-1", "x", "", "experts=", "attention=3", "3.5"])
def test_a_bad_min_batch_is_named(text: str) -> None:
    with pytest.raises(UsageError, match="--min-batch"):
        line_of("--min-batch", text)


@pytest.mark.parametrize(
    ("words", "seed"),
    [((), None), (("-s", "-1"), None), (("--seed", "0"), 0), (("--seed", "42"), 42)],
)
def test_a_seed_of_minus_one_is_random(words: tuple[str, ...], seed: int | None) -> None:
    assert line_of(*words).of(AskedOptions).seed == seed


def test_a_number_for_the_draft_is_read_as_its_longest_length() -> None:
    line = line_of("--draft", "16")
    assert line.options.draft is None
    assert line.options.spec.n_max == 16
    assert line.notes == ("--draft 16 is read as --draft-max 16",)
    assert line_of("--draft", "./16").options.draft == Path("./16")


def test_a_longest_draft_without_room_is_the_longest_with_room() -> None:
    line = line_of("--draft-max", "64")
    assert line.options.spec.n_max == 63
    assert line.notes == ("--draft-max 64 is read as 63, the largest possible",)
    line = line_of(LLAMA_ARG_SPEC_DRAFT_N_MAX="100")
    assert line.options.spec.n_max == 63
    assert line.notes[0].startswith("LLAMA_ARG_SPEC_DRAFT_N_MAX=100 is read as 63")
    assert line_of("--draft-max", "63").notes == ()


def test_a_value_may_begin_with_a_hyphen_unless_it_is_a_flag() -> None:
    assert line_of("-n", "-1", "-p", "- a list").of(AskedOptions) == AskedOptions()
    with pytest.raises(UsageError, match="-p needs a value"):
        line_of("-p", "-n", "3")
    assert line_of("--", "-p").given  # after --, all words are the prompt


# -- variables


def test_llama_cpps_variables_stand_for_their_flags_and_others_are_named() -> None:
    variables = {
        "LLAMA_ARG_CTX_SIZE": "300",
        "LLAMA_ARG_SPEC_DRAFT_N_MAX": "5",
        "LLAMA_ARG_NOT_KNOWN": "mean",
        "GGML_OFFLOAD_OP_MIN_BATCH_SIZE": "3",
        "LLAMA_ARG_MMAP": "1",
    }
    options = line_of("-t", "1", **variables).options
    assert (options.ctx_size, options.spec.n_max) == (300, 5)
    assert options.mmap
    assert options.min_batch == MinBatch(3, 3)
    assert options.given["ctx_size"] == "LLAMA_ARG_CTX_SIZE"
    assert any("ignored: LLAMA_ARG_NOT_KNOWN" in note for note in options.notes)
    assert line_of("-c", "400", **variables).options.ctx_size == 400


def test_the_home_folder_is_named_where_no_shell_expands_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "g").write_text("root ::= [a]", encoding="utf-8")
    model = tmp_path / "m.gguf"
    assert line_of("--model=~/m.gguf").options.model == model
    assert line_of(LLAMA_ARG_MODEL="~/m.gguf").options.model == model
    assert line_of("--draft=~/m.gguf").options.draft == model
    line = read_command_line("run", ["--grammar-file=~/g"])
    assert line.of(AskedOptions).grammar == "root ::= [a]"
    (words,) = (preset.words for preset in read_presets("[a]\nmodel = ~/m.gguf", "p").values())
    assert read_command_line("serve", list(words)).options.model == model
    line = read_command_line("serve", ["~/m.gguf", "~/n.gguf"])
    assert line.of(ServeOptions).models == (model, tmp_path / "n.gguf")
    room = read_command_line("serve", ["--cache-disk=1GiB,~/k"]).of(ServeOptions).cache_disk
    assert room is not None
    assert room.folder == tmp_path / "k"
    assert split_model_and_prompt("~/m.gguf", None, None) == (model, None)
    kept = read_environment({"LLAMA_CACHE": "~/l", "OLLAMA_MODELS": "~/o", "XDG_CACHE_HOME": "~"})
    assert (kept.llama_cache, kept.ollama_folders) == (tmp_path / "l", (tmp_path / "o",))
    assert kept.profile_folder == tmp_path / "specoffload/profiles"


@pytest.mark.parametrize("name", ["~no-such-user/m.gguf", "a~/m.gguf", "./~/m.gguf"])
def test_other_tildes_are_letters(name: str) -> None:
    assert line_of("--model", name).options.model == Path(name)


def test_a_variable_of_another_command_is_neither_read_nor_named() -> None:
    assert line_of(LLAMA_ARG_PORT="1").notes == ()
    assert line_of(command="serve", LLAMA_ARG_PORT="1").of(ServeOptions).port == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [("LLAMA_ARG_THREADS", "x"), ("LLAMA_ARG_MMAP", "maybe"), ("LLAMA_ARG_SPEC_TYPE", "medusa")],
)
def test_a_bad_variable_is_named_with_its_value(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=f"{name}={text}: "):
        line_of(**{name: text})


def test_profiles_lie_where_the_environment_says() -> None:
    assert read_environment({"SPECOFFLOAD_PROFILE_DIR": "x"}).profile_folder == Path("x")
    assert read_environment({"XDG_CACHE_HOME": "c"}).profile_folder == Path(
        "c/specoffload/profiles"
    )
    assert read_environment({}).profile_folder == Path.home() / ".cache/specoffload/profiles"


# -- the draft's own flags


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("-td", "3", "-cd", "100"), DraftOptions(threads=3, ctx_size=100)),
        (("-devd", "cpu", "--draft-params", "-tb 2"), DraftOptions(device="cpu", threads_batch=2)),
        (("-devd", "none"), DraftOptions(device="cpu")),  # llama.cpp's name of the CPU
        (("--draft-params", "-t 2 -c 0", "-td", "5"), DraftOptions(threads=5, ctx_size=0)),
        (("--draft-params", "-b 7 -ub 3 -fa"), DraftOptions(7, 3, flash_attn=Toggle.ON)),
    ],
)
def test_flags_of_the_draft_are_typed_one_by_one_or_as_its_command_line(
    words: tuple[str, ...], expected: DraftOptions
) -> None:
    line = line_of(*words)
    assert line.options.of_draft == expected
    assert resolve(line.options, read_host(Environment())).spec.of_draft == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--bogus 3", "--draft-params: there is no flag --bogus"),
        ("-c many", "--draft-params: -c many: must be a whole number"),
        ("word", "--draft-params: 'word' is not a flag"),
        ('--device "x', '--draft-params --device "x: cannot be split into words'),
    ],
)
def test_a_bad_command_line_of_the_draft_is_answered(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        line_of("--draft-params", text)
    assert message in str(caught.value)


def test_what_a_draft_does_not_have_is_said() -> None:
    (idle,) = line_of("--draft-params", "--top-k 3").ignored
    assert idle == ("--draft-params: --top-k", "not for drafts")


# -- models and prompts


def test_a_prompt_that_is_no_file_name_is_a_prompt() -> None:
    for text in ("x" * 5000, "a\0b", "def f(n):", "hi"):
        assert split_model_and_prompt(text, None, None) == (None, text)
    assert split_model_and_prompt("word", Path("m.gguf"), None) == (Path("m.gguf"), "word")


@pytest.mark.parametrize("word", ["gemma3:270m", "llama3", "a/b/c"])
def test_what_looks_like_a_models_name_is_never_a_silent_prompt(word: str) -> None:
    with pytest.raises(UsageError, match=f"there is no file .* ollama:{word}"):
        split_model_and_prompt(word, None, None)


@pytest.mark.parametrize("word", ["unsloth/DeepSeek-R1:Q4_K_M", "a/b", "ollama:gemma3:270m"])
def test_the_name_of_a_model_is_a_model(word: str) -> None:
    assert split_model_and_prompt(word, None, None) == (Path(word), None)
    assert split_model_and_prompt(word, None, "text") == (Path(word), "text")
    with pytest.raises(UsageError, match="a prompt was given already"):
        split_model_and_prompt(word, Path("m.gguf"), "text")


def test_a_model_or_a_prompt_that_is_given_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="a prompt was given already"):
        split_model_and_prompt("def f(n):", None, "text")
    with pytest.raises(UsageError, match="'a.gguf' and -m b.gguf name two"):
        line_of("-m", "b.gguf", "a.gguf", command="serve")


# -- the prompt's text


def test_escapes_of_a_prompt_are_read_where_that_is_asked_for() -> None:
    text = r"a\nb\t\"c\" \\n \x41 \d"
    assert read_prompt(text) == text
    assert read_prompt(text, escape=True) == 'a\nb\t"c" \\n A \\d'
    assert line_of("-e").of(RunOptions).escape
    assert not line_of("-e", "--no-escape").of(RunOptions).escape


# -- the server's keys


def keys_of(typed: str | None, file: Path | None = None) -> tuple[str, ...]:
    return read_keys(typed, file, lambda words: None)


def test_keys_are_typed_in_a_variable_or_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("b\n\nc\n")
    line = line_of("--api-key", " a , d", "--api-key-file", str(file), command="serve")
    own = line.of(ServeOptions)
    assert keys_of(own.api_key, own.api_key_file) == ("a", "d", "b", "c")
    assert line_of(command="serve", LLAMA_API_KEY="k").of(ServeOptions).api_key == "k"
    assert keys_of(None) == ()
    file.write_text("\n")
    with pytest.raises(UsageError, match="has no key"):
        keys_of(None, file)
    file.write_text("#b\n # of nobody: c\n\n")
    with pytest.raises(UsageError, match="has no key"):
        keys_of(None, file)
    file.write_text("# those of May\n#old\nnew#1\n")
    assert keys_of(None, file) == ("new#1",)


@pytest.mark.parametrize(
    ("mode", "said"),
    [(0o600, None), (0o640, None), (0o644, "read"), (0o606, "read"), (0o602, "change"),
     (0o660, "change")],
)  # fmt: skip
def test_a_key_file_that_others_may_use_is_warned_of(
    mode: int, said: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text("k\n")
    file.chmod(mode)
    warnings: list[str] = []
    assert read_keys(None, file, warnings.append) == ("k",)
    words = f"warning: other users may {said} {file}, which has keys: chmod 600 {file}"
    assert warnings == ([words] if said else [])
    assert all(kind_of(warning) is NoteKind.WARNING for warning in warnings)


@pytest.mark.parametrize("key", ["ключ", "two words", "a\x00b", "\ud800"])
def test_a_key_that_no_header_carries_is_refused_and_not_shown(key: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="outside Latin-1") as caught:
        keys_of(key)
    assert key not in str(caught.value)


@pytest.mark.parametrize("text", ["", " ", "a,", ",a", "a,,b"])
def test_an_empty_key_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is empty"):
        keys_of(text)
    with pytest.raises(UsageError, match="must be a key"):
        line_of("--api-key", text, command="serve")
