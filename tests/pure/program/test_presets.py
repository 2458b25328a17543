"""Presets of several models: llama-server's grammar, and the arguments that they become."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specoffload.config.command_line import read_command_line
from specoffload.config.options import Options, ServeOptions
from specoffload.config.presets import EVERY, canonical, notes_on, read_preset_file, read_presets
from specoffload.errors import UsageError
from specoffload.generation.generation import AskedOptions

# The example of tools/server/README.md in llama.cpp, with a model's path for the last section.
EXAMPLE = """
version = 1

; (Optional) This section provides global settings shared across all presets.
[*]
c = 8192
n-gpu-layers = 8

[ggml-org/MY-MODEL-GGUF:q8_0]
; string value
chat-template = chatml
n-gpu-layers = 123
jinja = true
c = 4096   # behind a value
LLAMA_ARG_CACHE_RAM = 0
model-draft = /models/draft.gguf

[custom_model]
model = /models/my-awesome-model-Q4_K_M.gguf
load-on-startup = true
stop-timeout = 3
alias = fast, faster
tags = a,b
mmap = off
no-kv-unified = 1
port = 9
"""


def test_keys_may_have_underscores() -> None:
    found = read_presets("[q]\ntop_p = 0.9\nload_on_startup = 1\nLLAMA_ARG_TOP_K = 7\n", "x")["q"]
    asked = read_command_line("serve", found.words).of(AskedOptions)
    assert (asked.top_p, asked.top_k) == (0.9, 7)
    assert found.loads_on_startup
    with pytest.raises(UsageError, match="'top-p' is in this section twice"):
        read_presets("[q]\ntop_p = 0.9\ntop-p = 0.8\n", "x")


def test_a_model_is_also_called_as_its_section_is_written() -> None:
    found = read_presets("[u/m:Q4_K_XL-thinking]\nc = 8\n[u/m:q4_0]\nc = 9\n[*]\nc = 7\n", "x")
    assert {name: preset.aliases for name, preset in found.items()} == {
        "u/m:THINKING": ("u/m:Q4_K_XL-thinking",), "u/m:Q4_0": (), EVERY: (),
    }  # fmt: skip


def test_the_example_of_llama_server_is_read() -> None:
    found = read_presets(EXAMPLE, "x.ini")
    assert set(found) == {EVERY, "ggml-org/MY-MODEL-GGUF:Q8_0", "custom_model"}
    own = found["ggml-org/MY-MODEL-GGUF:Q8_0"].over(found[EVERY])
    line = read_command_line("serve", own.words)
    options = line.of(Options)
    assert (options.ctx_size, options.n_gpu_layers) == (4096, 123)
    assert str(options.draft) == "/models/draft.gguf"
    assert line.of(ServeOptions).cache_ram_mib == 0
    custom = found["custom_model"].over(found[EVERY])
    assert custom.loads_on_startup
    assert custom.stop_timeout_s == 3
    assert custom.aliases == ("fast", "faster")
    assert custom.tags == ("a", "b")
    assert custom.left_out == ("port",)
    options = read_command_line("serve", custom.words).of(Options)
    assert (options.ctx_size, options.mmap) == (8192, False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[a]\nnonsense = 1", "option 'nonsense' not recognized in preset 'a'"),
        ("[a]\n c = 1", "line 2"),
        ("[a", "line 1"),
        ("[a]\nstop-timeout = soon", "stop-timeout = soon in preset 'a'"),
        ("[a]\nstop-timeout = -1", "stop-timeout = -1 in preset 'a'"),
        ("[a]\nstop-timeout = nan", "stop-timeout = nan in preset 'a'"),
    ],
)
def test_a_faulty_preset_is_named(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as raised:
        read_presets(text, "x.ini")
    assert "x.ini" in str(raised.value)


def test_a_switch_is_on_or_off_whatever_its_name() -> None:
    for text, expected in (
        ("mmap = true", True),
        ("mmap = 0", False),
        ("no-mmap = true", False),
        ("no-mmap = off", True),
        ("LLAMA_ARG_MMAP = on", True),
    ):
        preset = read_presets(f"[a]\n{text}", "x")["a"]
        assert read_command_line("serve", preset.words).of(Options).mmap is expected, text


def test_tags_of_quantisations_are_written_in_capitals() -> None:
    assert canonical("u/r:q4_k_m") == "u/r:Q4_K_M"
    assert canonical("u/r:model-q4_0") == "u/r:Q4_0"
    assert canonical("my model") == "my model"


NAMES = st.from_regex(r"[a-zA-Z0-9_./]{1,12}", fullmatch=True)
VALUES = st.integers(1, 4096)
BLANKS = st.sampled_from(["", " ", "\t", " \t "])
ENDS = st.sampled_from(["\n", "\r\n", "\r"])
COMMENTS = st.sampled_from(["", "; a [b] = c", "# x = 1"])


@given(st.dictionaries(NAMES, VALUES, max_size=4), BLANKS, ENDS, COMMENTS)
def test_blanks_comments_and_ends_of_lines_change_nothing(
    sections: dict[str, int], blank: str, end: str, comment: str
) -> None:
    lines = []
    for name, value in sections.items():
        lines.append(f"[{blank}{name}{blank}]{blank}{comment}")
        lines += [comment, f"{blank}{comment}", f"c{blank}={blank}{value}{blank}{comment}", ""]
    found = read_presets(end.join(lines), "x")
    read = {
        name: read_command_line("serve", preset.words).of(Options).ctx_size
        for name, preset in found.items()
    }
    assert read == {name: value for name, value in sections.items() if name != "default"} | {
        name: value for name, value in sections.items() if name == "default"
    }


@given(st.text(alphabet="[]=;# \tab\n\r*:-cv1\\\"'\0é", max_size=60))
def test_any_text_is_read_or_refused_with_a_sentence(text: str) -> None:
    found, refused = {}, ""
    try:
        found = read_presets(text, "x.ini")
    except UsageError as e:
        refused = str(e)
    assert all(found)
    assert not refused or refused.startswith("x.ini")


def test_a_key_without_effect_is_said_once() -> None:
    text = "[*]\ndedup-cache-models = 1\n[a]\nc = 9\n[b]\ndedup-cache-models = 0\n"
    found = read_presets(text, "x.ini")
    (words,) = notes_on(found)
    assert words.startswith("dedup-cache-models: no effect")
    assert found["a"].over(found[EVERY]).words == ("--ctx-size=9",)
    assert notes_on(read_presets(EXAMPLE, "x.ini")) == []


@pytest.mark.parametrize(
    ("line", "value", "n_notes"),
    [
        ("alias = a;b", "a;b", 0),
        ("model = /models/C#/a.gguf", "/models/C#/a.gguf", 0),
        ("model = /models/C #2.gguf", "/models/C", 1),
        ('model = "/models/C #2.gguf"', "/models/C #2.gguf", 1),
        ("model = '/models/C ;2.gguf' # why", "/models/C ;2.gguf", 1),
        ("model = /models/it's ; here's why", "/models/it's", 0),
        ("model = /models/a.gguf   ; or another", "/models/a.gguf", 0),
        ("model = #2.gguf", "", 1),
        ('model = /models/5" and 6"', '/models/5" and 6"', 0),
        ('model = "a" or "b"', '"a" or "b"', 0),
        ('model = "', '"', 0),
        ("model = -1 x", "-1 x", 0),
        ("model = a = b : c", "a = b : c", 0),
        ("model = %(home)s ${x}", "%(home)s ${x}", 0),
        ("chat-template-kwargs = {\"note\": \"a ; b # c\"}", '{"note": "a ; b # c"}', 0),
        ("samplers = top_k;top_p ; temperature", "top_k;top_p ; temperature", 0),
        ("samplers = top_k;top_p # few", "top_k;top_p", 0),
        ("n-gpu-layers = 9;few", "9", 0),
        ("mmap = on#x", "on", 0),
    ],
)  # fmt: skip
def test_a_value_is_whole_or_a_line_says_what_is_left_out(
    line: str, value: str, n_notes: int
) -> None:
    found = read_presets(f"[a]\n{line}\n", "x.ini")
    assert len(notes_on(found)) == n_notes
    name = "--" + line.partition(" =")[0]
    words = (name,) if name == "--mmap" else (f"{name}={value}",)
    assert (found["a"].words, found["a"].aliases) == (
        (words, ()) if name != "--alias" else ((), (value,))
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[a]\nc = 1\nc = 2", "line 3: 'c' is in this section twice"),
        ("[a]\nc = 1\nctx-size = 2", "'c' and 'ctx-size' in preset 'a' set the same option"),
        ("[a]\nmmap = 1\nno-mmap = 1", "'mmap' and 'no-mmap' in preset 'a' set the same option"),
        ("[a]\nc = 1\n[b]\n[a]", r"line 4: there are two sections \[a\]"),
        ("[a:q4_0]\n[ a:Q4_0 ]", r"two sections have the name \[a:Q4_0\]"),
        ("[a]\nmodel = x\n  y", "line 3: neither"),
        ("[a]\nc : 1", "line 2: neither"),
        ("[a]\nc", "line 2: neither"),
        ("[a]\n= 1", "line 2: neither"),
        ("[]\nc = 1", "line 1: neither"),
        ("[a]\nmmap = yes", "mmap = yes in preset 'a': must be one of 1, true"),
        ("[a]\nmmap =", "mmap =  in preset 'a': must be one of 1, true"),
        ("[a]\nload-on-startup = yes", "load-on-startup = yes in preset 'a': must be one of"),
        ("[a]\nlora-init-without-apply = maybe", "must be one of|refused"),
    ],
)
def test_what_llama_server_would_decide_silently_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_presets(text, "x.ini")


def test_names_of_other_ini_files_mean_nothing_special() -> None:
    """[DEFAULT] is inherited in Python's own ini files, and `%` interpolates there."""
    found = read_presets("[DEFAULT]\nc = 5\n[a b]\nn-gpu-layers = 1\n[default]\nc = 7\n", "x.ini")
    assert {name: preset.words for name, preset in found.items()} == {
        "DEFAULT": ("--ctx-size=5",), "a b": ("--n-gpu-layers=1",), "default": ("--ctx-size=7",),
    }  # fmt: skip


def test_a_file_of_windows_is_read(tmp_path: Path) -> None:
    file = tmp_path / "models.ini"
    file.write_bytes("\ufeff[m]\r\nmodel = a b.gguf\r\n\r\nc = 512\r\n".encode())
    assert read_preset_file(file)["m"].words == ("--model=a b.gguf", "--ctx-size=512")
    file.write_bytes("[m]\nc = 512\n".encode("utf-16"))
    with pytest.raises(UsageError, match="models.ini: it is UTF-16 text; save it as UTF-8"):
        read_preset_file(file)


@pytest.mark.parametrize(
    "line",
    ["{blanks}", "c{blanks}= 1", "c ={blanks}1", "c = 1{blanks}", "c{blanks}x = 1", "c{blanks}x",
     "{blanks}c = 1", "[a{blanks}]", "[{blanks}", "model = x{blanks}; y", "model = {quotes}",
     "model = x{comments}", "{letters} = 1", "c = {letters}"],
)  # fmt: skip
def test_the_time_of_a_line_grows_as_its_length(line: str) -> None:
    def time_s(n: int) -> float:
        text = line.format(
            blanks=" " * n, quotes='"' * n, comments=" ;" * (n // 2), letters="c" * n
        )
        best = math.inf
        for _ in range(3):
            start_s = time.process_time()
            with contextlib.suppress(UsageError):
                read_presets(f"[m]\n{text}\n", "x.ini")
            best = min(best, time.process_time() - start_s)
        return best

    assert time_s(256_000) < 10 * max(time_s(64_000), 1e-3), "4 × as long, 16 × if quadratic"


def test_a_line_on_a_value_does_not_show_a_secret() -> None:
    found = read_presets("[a]\nhf-token = 'hf_secret' ;hidden\napi-key = k\n", "x.ini")
    said = notes_on(found)
    assert len(said) == 2
    assert not any(word in line for line in said for word in ("secret", "hidden"))
    assert found["a"].words == ("--hf-token=hf_secret",)
    assert set(found["a"].shown.values()) == {"(hidden)"}
