"""Values of flags that users of a server may see."""

from __future__ import annotations

from pathlib import Path

import pytest

from specoffload.commands.serve_models import _Catalogue
from specoffload.config.command_line import flags_of, read_command_line
from specoffload.config.environment import Environment
from specoffload.config.flag import HIDDEN, Flag
from specoffload.config.presets import read_presets

SECRET = "s3cret"
# A value with the secret, where the kind of value needs a form of its own.
FORMS = {
    "--rpc": f"{SECRET}:50052",
    "--cache-disk": f"1GiB,/{SECRET}",
    "--chat-template-kwargs": f'{{"a": "{SECRET}"}}',
    "--spec-replace": f"{SECRET}={SECRET}",
}


@pytest.mark.parametrize("flag", flags_of("serve"), ids=lambda flag: str(flag.names[0]))
def test_a_value_that_may_be_any_text_is_hidden(flag: Flag) -> None:
    text = FORMS.get(flag.names[0], SECRET)
    try:
        flag.read(text)
    except (ValueError, OSError):
        return  # a preset with this value is refused
    if not flag.is_switch:
        assert flag.shown(text) == HIDDEN, flag.names


def test_numbers_and_known_names_are_shown() -> None:
    preset = read_presets(
        "[a]\nctx-size = 1024\nno-mmap = 1\nn-cpu-moe = 3\ncache-type-k = q8_0\n", "x"
    )["a"]
    assert preset.shown["ctx-size"] == "1024"
    assert "--ctx-size=1024" in preset.shown_words
    assert "--cache-type-k=q8_0" in preset.shown_words


def test_an_entry_of_a_preset_shows_no_secret(tmp_path: Path) -> None:
    file = tmp_path / "models.ini"
    lines = (
        f"[a]\nmodel = /home/{SECRET}/a.gguf\nhf-token = {SECRET}\nLLAMA_API_KEY = {SECRET}",
        f"LLAMA_ARG_SSL_KEY_FILE = /{SECRET}\nssl-cert-file = /{SECRET}",
        f"draft-params = --lookup-cache-static /{SECRET}\nmmproj-url = https://x/?t={SECRET}",
        f"chat-template-kwargs = {FORMS['--chat-template-kwargs']}",
        "ctx-size = 64\n",
    )
    file.write_text("\n".join(lines))
    words = ["--models-preset", str(file)]
    (entry,) = _Catalogue(read_command_line("serve", words, Environment(variables={}))).entries()
    assert SECRET not in f"{entry.words}{entry.preset}{entry!r}"
    assert "ctx-size = 64" in entry.preset
    assert f"hf-token = {HIDDEN}" in entry.preset
