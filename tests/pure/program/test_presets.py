"""Presets of several models: llama-server's grammar, and the arguments that they become."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specoffload.config.command_line import read_command_line
from specoffload.config.options import Options, ServeOptions
from specoffload.config.presets import EVERY, canonical, idle_words, read_presets
from specoffload.errors import UsageError

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
    (words,) = idle_words(found)
    assert words.startswith("dedup-cache-models: no effect")
    assert found["a"].over(found[EVERY]).words == ("-c", "9")
    assert idle_words(read_presets(EXAMPLE, "x.ini")) == []
