"""Text files that begin with a byte order mark, as editors of Windows write them."""

from __future__ import annotations

import codecs
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.costs.profile_io import load as load_costs
from specdec.errors import SpecDecError
from specoffload.commands.run import piped_text
from specoffload.config.command_line import read_command_line
from specoffload.config.hardware import hardware_of
from specoffload.config.options import ChatOptions, RunOptions
from specoffload.config.presets import read_preset_file
from specoffload.config.resolution import chat_settings
from specoffload.config.rpc_secret import read_secret
from specoffload.errors import SpecOffloadError
from specoffload.generation.generation import AskedOptions
from specoffload.opening.draft_model import read_kept
from specoffload.server.access import read_keys


def _flag(name: str, section: type, field: str, command: str = "run") -> Callable[[Path], object]:
    def read(file: Path) -> object:
        return getattr(read_command_line(command, [name, str(file)]).of(section), field)

    return read


HARDWARE = json.dumps(
    {"vram": "24GiB", "ram": "64GiB", "link_rate": "25GB/s", "ram_rate": "60GB/s",
     "vram_rate": "900GB/s"}
)  # fmt: skip
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "-f": ("class A:", _flag("-f", RunOptions, "prompt")),
    "-sysf": ("Be brief.", _flag("-sysf", ChatOptions, "system", "chat")),
    "--grammar-file": ('root ::= "a"', _flag("--grammar-file", AskedOptions, "grammar")),
    "-jf": ('{"type": "integer"}', _flag("-jf", AskedOptions, "json_schema")),
    "--chat-template-file": (
        "{{ messages }}",
        lambda file: chat_settings(ChatOptions(template=str(file))).template,
    ),
    "--models-preset": ("[m]\nmodel = a.gguf\n", read_preset_file),
    "--api-key-file": ("first\nsecond\n", lambda file: read_keys(None, file, lambda _: None)),
    "--rpc-secret-file": (
        "a secret that is long enough\n",
        lambda file: read_secret(file, "")[0],
    ),
    "--draft-vocab": ("5\n7\n", read_kept),
    "--import": ("GGML_BATCH_COSTS=1,2,3", load_costs),
    "--hardware": (HARDWARE, lambda file: hardware_of(str(file))),
}


@pytest.mark.parametrize("flag", READERS)
def test_a_mark_is_no_part_of_the_text(flag: str, tmp_path: Path) -> None:
    text, read = READERS[flag]
    plain, marked = tmp_path / "plain.txt", tmp_path / "marked.txt"
    plain.write_bytes(text.encode())
    marked.write_bytes(codecs.BOM_UTF8 + text.encode())
    expected = read(plain)
    assert expected
    assert read(marked) == expected


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("flag", READERS)
def test_a_mark_of_another_encoding_is_refused_by_name(
    flag: str, encoding: str, tmp_path: Path
) -> None:
    text, read = READERS[flag]
    file = tmp_path / "wide.txt"
    mark = codecs.BOM_UTF16_BE if encoding == "utf-16-be" else b""
    file.write_bytes(mark + text.encode(encoding))
    with pytest.raises((SpecOffloadError, SpecDecError)) as raised:
        read(file)
    said = str(raised.value)
    assert "wide.txt" in said
    assert f"{encoding[:6].upper()} text; save it as UTF-8" in said
    assert "\n" not in said


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
def test_standard_input_is_read_as_a_file_is(mark: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    content = io.TextIOWrapper(io.BytesIO(mark + "é\r\nb\n".encode()), encoding="ascii")
    monkeypatch.setattr(sys, "stdin", content)
    assert piped_text() == "é\nb"


def test_standard_input_of_another_encoding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for content, words in (("a".encode("utf-16"), "UTF-16 text; save it"), (b"\xe9", "as UTF-8")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        with pytest.raises(SpecOffloadError, match=words):
            piped_text()
