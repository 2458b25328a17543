"""Models by name: parsing the name, choosing the model's files, and finding them on disk."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from offload.errors import BadModel
from offload.model_file import first_part
from specoffload import report
from specoffload.commands.models import show_models
from specoffload.config.environment import Environment
from specoffload.config.options import Options
from specoffload.config.resolution import Config, demo_file
from specoffload.errors import UsageError
from specoffload.models.local import (
    cached_models,
    find_ollama,
    installed_ollama,
    located,
    name_hint,
)
from specoffload.models.names import (
    HubName,
    OllamaName,
    choose,
    choose_file,
    choose_row_file,
    is_model,
    model_in,
    name_of,
    quants,
    read_hub_name,
    read_name,
)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("user/repo", HubName("user/repo")),
        ("unsloth/DeepSeek-R1-GGUF:UD-Q2_K_XL", HubName("unsloth/DeepSeek-R1-GGUF", "UD-Q2_K_XL")),
        ("hf.co/user/repo:Q4_0", HubName("user/repo", "Q4_0")),
        ("https://huggingface.co/user/repo", HubName("user/repo")),
        ("https:/huggingface.co/user/repo", HubName("user/repo")),  # as `Path` folds it
        (str(Path("https://huggingface.co/user/repo:Q4_0")), HubName("user/repo", "Q4_0")),
        (
            "https://huggingface.co/user/repo/blob/main/MTP/x-Q8_0-MTP.gguf",
            HubName("user/repo", file="MTP/x-Q8_0-MTP.gguf"),
        ),
        ("huggingface.co/user/repo/", HubName("user/repo")),
        ("https://hf.co/user/repo/?library=gguf", HubName("user/repo")),
        ("https://huggingface.co/user/repo#files", HubName("user/repo")),
        ("https://huggingface.co/user/repo/tree/main", HubName("user/repo")),
        ("https://huggingface.co/user/repo/tree/main/", HubName("user/repo")),
        (
            "https://huggingface.co/user/repo/tree/main/UD-Q4_K_XL",
            HubName("user/repo", "UD-Q4_K_XL"),
        ),
        ("hf.co/user/repo/tree/v1.0", HubName("user/repo", revision="v1.0")),
        ("hf://user/repo", HubName("user/repo")),
        (
            "https://huggingface.co/user/repo/tree/refs%2Fpr%2F1/Q4_0",
            HubName("user/repo", "Q4_0", revision="refs/pr/1"),
        ),
        (
            "https://huggingface.co/user/repo/resolve/main/x%20y-Q8_0.gguf?download=true",
            HubName("user/repo", file="x y-Q8_0.gguf"),
        ),
        (
            f"www.huggingface.co/user/repo/blob/{'0a' * 20}/Q8/x.gguf#L1",
            HubName("user/repo", file="Q8/x.gguf", revision="0a" * 20),
        ),
        (
            str(Path("https://huggingface.co/user/repo/resolve/main/x.gguf?download=true")),
            HubName("user/repo", file="x.gguf"),
        ),
        ("https://example.com/user/repo", None),
        ("https://example.com/huggingface.co/user/repo", None),
        ("https://huggingface.co/user/repo/tree/../x", None),
        ("https://huggingface.co/user/repo/discussions/1", None),
        ("https://huggingface.co/user", None),
        ("user/repo/tree/main", None),
        ("ollama:gemma3", OllamaName("gemma3", "latest")),
        ("ollama:user/model:1b", OllamaName("user/model", "1b")),
        ("ollama:hf.co/user/model:Q4_0", OllamaName("hf.co/user/model", "Q4_0")),
        ("models/x.gguf", None),
        ("/models/x", None),
        ("./x", None),
        ("a/b/c", None),
        ("word", None),
        ("def f(n):", None),
        ("user/", None),
    ],
)
def test_a_name_is_read_or_is_none(text: str, name: HubName | OllamaName | None) -> None:
    assert read_name(text) == name
    if name is not None:
        assert read_name(str(name)) == name, "it is written as it is read"


FILES = ["README.md", "mmproj-F16.gguf", "imatrix.gguf", "m-Q8_0.gguf", "m-Q4_K_M.gguf"]
SPLIT = [f"IQ2_M/m-IQ2_M-0000{n}-of-00003.gguf" for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("files", "quant", "chosen"),
    [
        (FILES, "", ("m-Q4_K_M.gguf",)),
        (FILES[:4], "", ("m-Q8_0.gguf",)),
        (["z-Q5_0.gguf", "a-Q6_K.gguf"], "", ("z-Q5_0.gguf",)),
        (FILES, "q8_0", ("m-Q8_0.gguf",)),
        ([*FILES, *SPLIT], "IQ2_M", tuple(SPLIT)),
        ([*reversed(SPLIT)], "", tuple(SPLIT)),
        (["m.Q4_K_M.gguf", "m.Q4_K_S.gguf"], "Q4_K_S", ("m.Q4_K_S.gguf",)),
        (["m-BF16.gguf", "m-F16.gguf"], "F16", ("m-F16.gguf",)),
        (["m-I-Quality.gguf", "m-Quality.gguf"], "Quality", ("m-Quality.gguf",)),
        (["m-I-Quality.gguf", "m-Quality.gguf"], "I-Quality", ("m-I-Quality.gguf",)),
        (["m-UD-Q4_K_M.gguf", "m-Q4_K_M.gguf"], "Q4_K_M", ("m-Q4_K_M.gguf",)),
        (["UD-Q4_K_M/m-UD-Q4_K_M.gguf"], "Q4_K_M", ("UD-Q4_K_M/m-UD-Q4_K_M.gguf",)),
        (["MTP/g-Q8_0-MTP.gguf", "g-Q8_0.gguf"], "Q8_0", ("g-Q8_0.gguf",)),
        (["a-base-Q8_0.gguf", "b-chat-Q8_0.gguf"], "", ("a-base-Q8_0.gguf",)),
    ],
)
def test_llama_cpps_rules(files: list[str], quant: str, chosen: tuple[str, ...]) -> None:
    assert choose(files, quant, "it") == chosen


ROW_FILES = [
    "m-Q4_K_M.gguf", "dflash-m-Q8_0.gguf", "dflash-m-BF16.gguf", "dspark-m-Q4_K_M.gguf",
    "m-EAGLE-3.gguf", "dflashy-m.gguf", "README-dflash.md",
]  # fmt: skip


@pytest.mark.parametrize(
    ("quant", "kinds", "chosen"),
    [
        ("", ["dflash"], "dflash-m-Q8_0.gguf"),  # whose bits are nearest to the model's
        ("BF16", ["dflash"], "dflash-m-BF16.gguf"),
        ("", ["eagle3", "dflash", "dspark"], "dspark-m-Q4_K_M.gguf"),
        ("", ["eagle3"], "m-EAGLE-3.gguf"),
        ("", [], None),
    ],
)
def test_a_draft_is_found_by_its_kind(quant: str, kinds: list[str], chosen: str | None) -> None:
    assert choose_row_file(ROW_FILES, ROW_FILES[0], quant, kinds) == chosen
    assert choose_row_file(ROW_FILES[:1], "", quant, kinds) is None


def test_what_there_is_not_is_said_with_what_there_is() -> None:
    with pytest.raises(UsageError, match="it has no Q9; it has IQ2_M, Q4_K_M, Q8_0"):
        choose([*FILES, *SPLIT], "Q9", "it")
    with pytest.raises(UsageError, match="it has no GGUF model, only safetensors files"):
        choose(["model.safetensors"], "", "it")
    with pytest.raises(UsageError, match="lacks 1 of 3 parts, the first .*-00002-of-00003"):
        choose([SPLIT[0], SPLIT[2]], "", "it")
    with pytest.raises(UsageError, match="lacks the first part"):
        choose(SPLIT[1:], "", "it")
    with pytest.raises(UsageError, match="it has no file x.gguf; it has imatrix.gguf"):
        choose_file(FILES, "x.gguf", "it")
    assert choose_file(SPLIT, SPLIT[1], "it") == tuple(SPLIT), "any part stands for all"
    assert quants(["a-UD-Q2_K_XL.gguf", "name.gguf"]) == ["UD-Q2_K_XL", "name"]


@pytest.mark.parametrize(
    ("files", "quant"),
    [
        (["m-BF16.gguf", "m-Q4_0.gguf"], "F16"),
        (["m-I-Quality.gguf", "m-I-Balanced.gguf"], "Quality"),
        (["m-Q4_K_M.gguf"], "Q4_K"),
    ],
)
def test_a_part_of_a_word_is_no_name(files: list[str], quant: str) -> None:
    with pytest.raises(UsageError, match=f"it has no {quant}; it has "):
        choose(files, quant, "it")


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("x-MTP-Q4_K_M.gguf", True),  # a model with such layers
        ("mtp/x-Q8_0.gguf", False),
        ("x-Q8_0-MTP.gguf", False),
        ("mtp-x.gguf", False),
        ("MTP/g-Q8_0-MTP.gguf", False),
        ("X.Eagle-3.Q8_0.gguf", False),
        ("x-EAGLE3-f16.gguf", False),
        ("x_dflash.gguf", False),
        ("x-draft.gguf", False),
        ("MMPROJ-F16.gguf", False),
        ("x.imatrix.gguf", False),
        ("Draftsman-7B-Q8_0.gguf", True),
    ],
)
def test_drafters_in_any_spelling_are_no_models(file: str, expected: bool) -> None:
    assert is_model(file) == expected


@pytest.mark.parametrize(
    "files",
    [
        ["m-Q4_0.gguf", "m-UD-Q4_0.gguf", "m-BF16.gguf", "m-F16.gguf"],
        ["Q4_0/m.gguf", "a/b/x.y-I-Quality.gguf", "a/b/x.y-Quality.gguf", *SPLIT],
    ],
)
def test_a_printed_name_means_its_file(files: list[str]) -> None:
    firsts = [file for file in files if file not in SPLIT[1:]]
    names = [name_of("user/repo", file, files) for file in firsts]
    for file, name in zip(firsts, names, strict=True):
        assert name is not None
        read = read_hub_name(name)
        assert read is not None
        assert choose(files, read.quant, "it")[0] == file


WORDS = ("m", "x", "Q4_0", "q8_0", "F16", "BF16", "UD", "I", "IQ2_M", "Quality", "MTP", "3", "gguf")
NAMES = st.builds(
    lambda words, separators: "".join(f"{w}{s}" for w, s in zip(words, separators, strict=False)),
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=6),
    st.lists(st.sampled_from("-._/"), min_size=6, max_size=6),
).map(lambda name: f"{name}Q.gguf")


@given(st.lists(NAMES, min_size=1, max_size=8, unique=True))
def test_any_printed_name_means_its_file(files: list[str]) -> None:
    for file in filter(is_model, files):
        if name := name_of("user/repo", file, files):
            read = read_hub_name(name)
            assert read is not None
            assert choose(files, read.quant, "it") == (file,)


def test_a_name_that_claims_many_parts_is_soon_refused() -> None:
    files = [f"m-{n:05d}-of-99999.gguf" for n in range(1, 3000)]
    with pytest.raises(UsageError, match="lacks 97000 of 99999 parts, the first m-03000-of-99999"):
        choose(files, "", "it")


@given(st.permutations([*FILES, *SPLIT]), st.sampled_from(["", "Q8_0", "iq2_m"]))
def test_what_is_chosen_is_there_and_is_a_model(files: list[str], quant: str) -> None:
    chosen = choose(files, quant, "it")
    assert set(chosen) <= set(files)
    assert all(quant.lower() in file.lower() for file in chosen)
    assert "mmproj" not in chosen[0]


def test_a_folder_is_the_one_model_in_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no .gguf model lies"):
        model_in(tmp_path)
    for name in ("mmproj-F16.gguf", "m-00001-of-00002.gguf", "m-00002-of-00002.gguf"):
        (tmp_path / name).touch()
    assert model_in(tmp_path) == tmp_path / "m-00001-of-00002.gguf"
    (tmp_path / "other.gguf").touch()
    with pytest.raises(UsageError, match=r"name one: m-00001-of-00002.gguf, other.gguf"):
        model_in(tmp_path)


def test_any_part_stands_for_the_model(tmp_path: Path) -> None:
    second = tmp_path / "m-00002-of-00002.gguf"
    second.touch()
    with pytest.raises(BadModel, match="its first part is missing: .*m-00001-of-00002.gguf"):
        first_part(second)
    first = tmp_path / "m-00001-of-00002.gguf"
    first.touch()
    assert first_part(second) == first_part(first) == first
    assert first_part(tmp_path / "whole.gguf") == tmp_path / "whole.gguf"


def put_ollama(folder: Path, name: str, digest: str, *, host: str = "registry.ollama.ai") -> Path:
    manifest = folder / "manifests" / host / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    layers = [
        {"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:0"},
        {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"},
    ]
    manifest.write_text(json.dumps({"layers": layers}))
    blob = folder / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(exist_ok=True)
    blob.touch()
    return blob


def test_ollamas_models_are_found_by_their_manifests(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ollama has no models in .*OLLAMA_MODELS"):
        find_ollama(OllamaName("gemma3"), [tmp_path])
    official = put_ollama(tmp_path, "library/gemma3/270m", "a")
    users = put_ollama(tmp_path, "user/model/latest", "b")
    from_hub = put_ollama(tmp_path, "user/model/Q4_0", "c", host="hf.co")
    (tmp_path / "manifests/registry.ollama.ai/library/gemma3/broken").write_text("{")
    put_ollama(tmp_path, "library/gone/latest", "d").unlink()
    assert find_ollama(OllamaName("gemma3", "270m"), [tmp_path]) == official
    assert find_ollama(OllamaName("user/model"), [tmp_path]) == users
    assert find_ollama(OllamaName("hf.co/user/model", "Q4_0"), [tmp_path]) == from_hub
    with pytest.raises(UsageError, match="the nearest that it has is ollama:gemma3:270m"):
        find_ollama(OllamaName("gemma", "270m"), [tmp_path])
    assert len(list(installed_ollama([tmp_path]))) == 3


def put_hub(folder: Path, repo: str, *names: str) -> None:
    home = folder / f"models--{repo.replace('/', '--')}"
    (home / "refs").mkdir(parents=True)
    commit = "abcd" * 10
    (home / "refs" / "main").write_text(commit)
    for name in names:
        file = home / "snapshots" / commit / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def test_what_lies_in_the_caches_is_listed(tmp_path: Path) -> None:
    hub, llama = tmp_path / "hub", tmp_path / "llama"
    put_hub(hub, "a/b", "m-Q4_K_M.gguf", *SPLIT[:2], "mmproj.gguf")
    (hub / "models--no--ref").mkdir()
    llama.mkdir()
    (llama / "x_y-Q8_0.gguf").touch()
    put_ollama(tmp_path / "ollama", "library/gemma3/270m", "a")
    found = list(cached_models(hub, llama, [tmp_path / "ollama"]))
    assert [model.name for model in found] == [
        "a/b:IQ2_M", "a/b:Q4_K_M", str(llama / "x_y-Q8_0.gguf"), "ollama:gemma3:270m",
    ]  # fmt: skip
    assert [model.cache for model in found] == ["hub", "hub", "llama.cpp", "ollama"]
    assert [bool(model.missing) for model in found] == [True, False, False, False]
    assert list(cached_models(tmp_path / "none", tmp_path / "none", [])) == []


def test_a_model_is_named_once_and_as_a_name(tmp_path: Path) -> None:
    def found(**said: object) -> Options:
        return located(Options(given={k: f"--{k}" for k in said}, **said), environment)  # type: ignore[arg-type]

    environment = Environment(ollama_folders=(tmp_path,))
    blob = put_ollama(tmp_path, "library/gemma3/270m", "a")
    named = found(model=Path("ollama:gemma3:270m"))
    assert (named.model, named.alias) == (blob, "ollama:gemma3:270m")
    assert found(model=Path("ollama:gemma3:270m"), alias="mine").alias == "mine"
    assert found(draft=Path("ollama:gemma3:270m")).draft == blob
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "m.gguf").touch()
    assert found(model=tmp_path / "folder").model == tmp_path / "folder" / "m.gguf"
    with pytest.raises(UsageError, match="--hf_repo a/b and --model m.gguf name two"):
        found(hf_repo="a/b", model=Path("m.gguf"))
    with pytest.raises(UsageError, match="--hf_repo word: expected user/repo"):
        found(hf_repo="word")
    with pytest.raises(UsageError, match="--hf_file x.gguf needs -hf"):
        found(hf_file="x.gguf")
    assert read_hub_name("a/b", "x.gguf") == HubName("a/b", "", "x.gguf")


def test_names_are_shown_whole_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Console(file=io.StringIO(), width=40, force_terminal=True, color_system=None)
    monkeypatch.setattr(report, "_out", shown)
    name = "a-long-makers-name/Coder-480B-A35B-Instruct-1M-GGUF:UD-Q4_K_XL"
    report.entry(name, "llama · Q4_K_M · " + "more words " * 5)
    first, *about = shown.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert first == name
    assert all(line.startswith("    ") and len(line) <= 40 for line in about)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("qwen3:30b", "; ollama has a model of this name: ollama:qwen3:30b"),
        ("gemma3", "; ollama has a model of this name: ollama:gemma3:latest"),
        ("qwen3:30", "; ollama has ollama:qwen3:30b"),
        (
            "llama4:16x17b",
            "; ollama:llama4:16x17b is a model of ollama, which has to fetch it first: "
            "ollama pull llama4:16x17b",
        ),
        ("word", ""),
        ("qwen3.gguf", ""),
        ("./none", ""),
    ],
)
def test_a_name_without_ollama_before_it_is_recognised(text: str, hint: str) -> None:
    assert name_hint(text, ["ollama:qwen3:30b", "ollama:gemma3:latest"]) == hint


def test_a_missing_file_is_said_before_anything_is_opened(tmp_path: Path) -> None:
    for field in ("model", "draft"):
        options = Options(**{field: tmp_path / "none.gguf"})
        with pytest.raises(BadModel, match=r"none\.gguf: no such file$"):
            located(options, Environment())


def test_a_missing_draft_is_said_before_a_model_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specoffload.models.local.fetch", pytest.fail)
    options = Options(hf_repo="maker/large-GGUF", draft=tmp_path / "none.gguf")
    with pytest.raises(BadModel, match=r"none\.gguf: no such file$"):
        located(options, Environment())


def test_each_model_is_named_before_its_plan_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(report, "_out", Console(file=out, width=200))
    seen = []

    def config_for(path: Path) -> Config:
        seen.append(out.getvalue().splitlines())
        raise BadModel("nothing to plan")

    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(demo_file("target.gguf").read_bytes())
    show_models(config_for, Environment(), tmp_path)
    assert [len(lines) for lines in seen] == [1, 3]
    assert seen[1][2].endswith("b.gguf")
