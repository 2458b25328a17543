"""Finds models in a folder, and nothing else."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

import pytest

from specoffload.commands.serve_models import _Catalogue
from specoffload.config.command_line import CommandLine, read_command_line
from specoffload.config.environment import Environment
from specoffload.errors import UsageError
from specoffload.models.folder import FolderModel, models_of, projector_beside
from specoffload.server.router.model import Entry

FILES = (
    "llama-1b-Q4_K_M.gguf",
    "mmproj-llama.gguf",
    "mtp-llama.gguf",
    "half-00002-of-00002.gguf",
    "notes.txt",
    "gemma/gemma-Q8_0.gguf",
    "gemma/mmproj-F16.gguf",
    "kimi/kimi-00001-of-00003.gguf",
    "kimi/kimi-00002-of-00003.gguf",
    "kimi/kimi-00003-of-00003.gguf",
    "glm/glm.gguf",
    "glm/mtp-glm.gguf",
    "empty/readme.md",
)


def text(words: str) -> bytes:
    return struct.pack("<Q", len(words)) + words.encode()


def header(n_tensors: int = 5, **entries: str) -> bytes:
    """A GGUF header with text entries. `__` in a key stands for a dot."""
    found = b"".join(
        text(key.replace("__", ".")) + struct.pack("<I", 8) + text(value)
        for key, value in entries.items()
    )
    tags = text("general.tags") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b")
    number = text("general.file_type") + struct.pack("<II", 4, 7)
    start = b"GGUF" + struct.pack("<IQQ", 3, n_tensors, len(entries) + 2)
    return start + number + tags + found


def put(folder: Path, *names: str, data: bytes = b"") -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data or header(general__architecture="llama"))


def names(folder: Path) -> list[str]:
    return [model.name for model in models_of(folder).models]


def test_files_and_folders_are_models(tmp_path: Path) -> None:
    put(tmp_path, *FILES)
    found = models_of(tmp_path)
    assert found.models == [
        FolderModel("gemma", tmp_path / FILES[5], projector=tmp_path / FILES[6]),
        FolderModel("glm", tmp_path / FILES[10], draft=tmp_path / FILES[11]),
        FolderModel("kimi", tmp_path / FILES[7]),
        FolderModel("llama-1b-Q4_K_M", tmp_path / FILES[0]),
    ]
    assert found.left_out["half-00002-of-00002.gguf"] == "a part whose first one is missing"
    assert not [name for name in found.left_out if "kimi" in name]
    assert "gemma/mmproj-F16.gguf" not in found.left_out, "it is used"
    assert "mmproj-llama.gguf" in found.left_out


def test_all_models_of_a_folder_are_offered_and_its_name_means_the_usual_one(
    tmp_path: Path,
) -> None:
    put(tmp_path, "Qwen/Qwen-Q8_0.gguf", "Qwen/Qwen-Q4_K_M.gguf", "Qwen/Qwen-DFlash-BF16.gguf")
    put(tmp_path, "Mix/one.gguf", "Mix/two.gguf")
    found = models_of(tmp_path)
    assert [(model.name, model.aliases) for model in found.models] == [
        ("Mix/one", ("Mix",)),
        ("Mix/two", ()),
        ("Qwen:Q4_K_M", ("Qwen",)),
        ("Qwen:Q8_0", ()),
    ]
    assert "Qwen/Qwen-DFlash-BF16.gguf" in found.left_out


def test_split_models_lie_anywhere(tmp_path: Path) -> None:
    put(tmp_path, "big-Q4_K_M-00001-of-00002.gguf", "big-Q4_K_M-00002-of-00002.gguf")
    put(tmp_path, "two/a-Q2_K-00001-of-00002.gguf", "two/a-Q2_K-00002-of-00002.gguf")
    put(tmp_path, "two/a-Q8_0-00001-of-00002.gguf")  # not whole: its start says what is missing
    assert names(tmp_path) == ["big-Q4_K_M", "two:Q2_K", "two:Q8_0"]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (header(general__type="adapter", general__architecture="llama"), "an adapter (LoRA)"),
        (header(general__architecture="clip"), "a projector"),
        (header(general__name="x", general__type="imatrix"), "an importance matrix"),
        (header(general__architecture="eagle3"), "a draft model"),
        (header(0, general__architecture="llama"), "a vocabulary without weights"),
    ],
)
def test_a_header_tells_what_a_name_does_not(tmp_path: Path, data: bytes, why: str) -> None:
    put(tmp_path, "model.gguf")
    put(tmp_path, "plain-name.gguf", data=data)
    found = models_of(tmp_path)
    assert ([m.name for m in found.models], found.left_out) == (["model"], {"plain-name.gguf": why})


@pytest.mark.parametrize("length", [0, 3, 20, 24, 30, 60])
def test_a_cut_header_is_left_to_the_start_which_says_what_is_wrong(
    tmp_path: Path, length: int
) -> None:
    put(tmp_path, "cut.gguf", data=header(general__architecture="clip")[:length] or b"\0")
    assert names(tmp_path) == ["cut"]


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    put(tmp_path, "model.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "nowhere.gguf").symlink_to("none")
    (tmp_path / "null.gguf").symlink_to("/dev/zero")
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    (tmp_path / "folder.gguf").mkdir()
    os.mkfifo(tmp_path / "folder.gguf" / "inner.gguf")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket.gguf"))
        found = models_of(tmp_path)
    assert [model.name for model in found.models] == ["model"]
    inner = {"folder.gguf/inner.gguf", "folder.gguf"}
    assert found.left_out.keys() == inner | {
        f"{name}.gguf" for name in ("pipe", "nowhere", "null", "loop", "socket")
    }


def test_equal_names_become_paths(tmp_path: Path) -> None:
    put(tmp_path, "x.gguf", "x/y.gguf", "z/a-Q8_0.gguf", "z/a-Q4_K_M.gguf", "z.gguf")
    assert names(tmp_path) == ["x", "x/y", "z", "z:Q4_K_M", "z:Q8_0"]


def test_a_section_may_name_a_folder(tmp_path: Path) -> None:
    put(tmp_path, "Qwen/Qwen-Q8_0.gguf", "Qwen/Qwen-Q4_K_M.gguf")
    presets = tmp_path / "models.ini"
    presets.write_text("[Qwen]\nctx-size = 64\n")
    words = ["--models-dir", str(tmp_path), "--models-preset", str(presets)]
    line = read_command_line("serve", words, Environment(variables={}))
    four, eight = _Catalogue(line).entries()
    assert (four.name, four.aliases, "ctx-size = 64" in four.preset) == (
        "Qwen:Q4_K_M",
        ("Qwen",),
        True,
    )
    assert (eight.name, eight.aliases, eight.preset) == ("Qwen:Q8_0", (), "")


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--models-dir .*: no such folder"):
        models_of(tmp_path / "none")


# -- projectors ------------------------------------------------------------------------------------

SHARED = ("q/q-Q8_0.gguf", "q/q-UD-Q4_K_XL.gguf", "q/mmproj-F16.gguf", "q/lora.gguf")
OF_OTHERS = ("mix/one-Q8_0.gguf", "mix/two-Q8_0.gguf", "mix/mmproj-two-F16.gguf")


def listed(folder: Path, *words: str, **variables: str) -> dict[str, Entry]:
    """The models of `serve --models-dir FOLDER` by name."""
    line = read_command_line(
        "serve", ["--models-dir", str(folder), *words], Environment(variables=variables)
    )
    return {entry.name: entry for entry in _Catalogue(line).entries()}


def projector_of(entry: Entry) -> Path | None:
    assert isinstance(entry.line, CommandLine)
    return entry.line.options.mmproj


def test_quantisations_of_one_model_share_a_projector_and_other_models_do_not(
    tmp_path: Path,
) -> None:
    """A router's folder and the flag --mmproj-auto for a single file follow the same rule."""
    put(tmp_path, *SHARED[:3], *OF_OTHERS, "alone/alone.gguf")
    put(tmp_path, SHARED[3], data=header(general__architecture="llama", general__type="adapter"))
    found = models_of(tmp_path)
    shared = tmp_path / SHARED[2]
    of_folder = {model.model: model.projector for model in found.models}
    for name in (*SHARED[:2], *OF_OTHERS[:2], "alone/alone.gguf"):
        expected = shared if name in SHARED else None
        assert of_folder[tmp_path / name] == expected
        beside = projector_beside(tmp_path / name)
        assert beside.projector == expected
        assert (beside.reason == "") == (expected is not None)
    assert OF_OTHERS[2] in found.left_out
    words = projector_beside(tmp_path / OF_OTHERS[0]).reason
    assert words == (
        "mmproj-two-F16.gguf may belong to another model of its folder; name it with --mmproj"
    )
    words = projector_beside(tmp_path / "alone" / "alone.gguf").reason
    assert words == "no file with mmproj in its name lies beside alone.gguf"


def test_a_routers_folders_give_projectors_unless_they_are_turned_off(tmp_path: Path) -> None:
    put(tmp_path, "eye/eye-Q8_0.gguf", "eye/mmproj-F16.gguf", "text/text.gguf")
    presets = tmp_path / "models.ini"
    presets.write_text("[eye]\nno-mmproj = 1\n[text]\nmmproj-url = https://hf.co/a/b.gguf\n")
    eye = tmp_path / "eye" / "mmproj-F16.gguf"
    for words, variables, projector in (
        ((), {}, eye),
        (("--mmproj-auto",), {}, eye),
        (("--no-mmproj",), {}, None),
        (("--no-mmproj-auto",), {}, None),
        ((), {"LLAMA_ARG_MMPROJ_AUTO": "0"}, None),
        (("--models-preset", str(presets)), {}, None),
    ):
        entries = listed(tmp_path, *words, **variables)
        assert projector_of(entries["eye"]) == projector
        assert entries["eye"].reads_images == (projector is not None)
        assert projector_of(entries["text"]) is None
        assert entries["text"].reads_images == ("--models-preset" in words)


def test_a_file_of_the_folder_itself_has_a_projector_only_if_asked_for(tmp_path: Path) -> None:
    put(tmp_path, "eye-Q8_0.gguf", "mmproj-eye.gguf", "eye-F16.gguf")
    for words, reads_images in (((), False), (("--mmproj-auto",), True)):
        for entry in listed(tmp_path, *words).values():
            assert entry.reads_images == reads_images
    put(tmp_path, "other.gguf")
    assert not any(e.reads_images for e in listed(tmp_path, "--mmproj-auto").values())
