"""Reads names of models, and chooses the files of a repository or folder that they mean.

All functions are pure, except `model_in` and `may_name_model`. The rules follow llama.cpp's
(common/download.cpp). A quantisation may be anywhere in a file's path, in any case, as whole words
between dashes, dots and slashes. A name without one means Q4_K_M, else Q8_0, else the first model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from urllib.parse import quote, unquote

from specdec.user_path import user_path
from specoffload.errors import UsageError

_WORD = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"({_WORD}/{_WORD})(?::({_WORD}))?/?")
# An address may have lost a slash: `Path` reads two of them as one.
_SCHEME = re.compile(r"(?:https?|hf):/{1,2}(?=[^/])", re.I)
_HOST = re.compile(r"(?:www\.)?(?:hf|huggingface)\.co/", re.I)
# What follows a repository's address: a kind of page, a revision, and a path.
_PAGE = re.compile(rf"({_WORD}/{_WORD})/(?:tree|blob|resolve|raw)/([^/]+)(?:/(.*))?")
_REVISION = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)*")
_MAIN = "main"
_OLLAMA = re.compile(rf"ollama:((?:{_WORD}/)*{_WORD})(?::({_WORD}))?")
OLLAMA_TAG = "latest"


@dataclass(frozen=True)
class HubName:
    """A repository of the Hugging Face hub, and the quantisation or the file in it.

    `revision` is a branch, a tag or a commit; "" is the branch main.
    """

    repo: str  # user/name
    quant: str = ""
    file: str = ""
    revision: str = ""

    def __str__(self) -> str:
        revision = quote(self.revision or _MAIN, safe="")
        if self.file:
            file = quote(self.file, safe="/+=@,()")
            return f"https://huggingface.co/{self.repo}/blob/{revision}/{file}"
        if self.revision:
            page = f"https://huggingface.co/{self.repo}/tree/{revision}"
            return f"{page}/{self.quant}" if self.quant else page
        return f"{self.repo}:{self.quant}" if self.quant else self.repo


@dataclass(frozen=True)
class OllamaName:
    """A model that ollama has fetched; `name` may have a namespace and a host in front."""

    name: str
    tag: str = OLLAMA_TAG

    def __str__(self) -> str:
        return f"ollama:{self.name}:{self.tag}"


def read_hub_name(text: str, file: str = "") -> HubName | None:
    """Read `user/repo[:quant]`, or an address of the hub. None for other text.

    The address may be that of a repository, of a folder whose name is a quantisation, or of a file,
    at any revision. `file` is another name of the file in it.
    """
    is_address = bool(_SCHEME.match(text) or _HOST.match(text))
    rest = _HOST.sub("", _SCHEME.sub("", text, count=1), count=1)
    if text.lower().startswith("http") and len(rest) == len(_SCHEME.sub("", text, count=1)):
        return None  # another site
    if is_address:
        rest = re.split("[?#]", rest, maxsplit=1)[0].rstrip("/")
    if page := _PAGE.fullmatch(rest):
        return _read_page(page, file) if is_address else None
    if match := _NAME.fullmatch(rest):
        return HubName(match[1], match[2] or "", file)
    return None


def _read_page(page: re.Match[str], file: str) -> HubName | None:
    repo, revision, path = page[1], unquote(page[2]), unquote(page[3] or "")
    if not _REVISION.fullmatch(revision):
        return None
    revision = "" if revision == _MAIN else revision
    if file or path.endswith(".gguf"):
        return HubName(repo, file=file or path, revision=revision)
    folder = path.rpartition("/")[2]
    if folder and not re.fullmatch(_WORD, folder):
        return None
    return HubName(repo, folder, revision=revision)


def is_address(text: str) -> bool:
    """True for an address on the net, also for one that has lost a slash."""
    return bool(_SCHEME.match(text))


def read_name(text: str) -> HubName | OllamaName | None:
    """The model that `text` names; None if it can only be a path or a prompt.

    A file's address on the hub names this file.
    """
    ollama = _OLLAMA.fullmatch(text)
    if ollama:
        return OllamaName(ollama[1], ollama[2] or OLLAMA_TAG)
    hub_name = read_hub_name(text)
    if hub_name is not None and not hub_name.file and text.endswith(".gguf"):
        return None
    return hub_name


def may_name_model(word: str) -> bool:
    """True for a word that `run` takes for a model: a file, a folder, or a model's name."""
    try:
        exists = user_path(word).exists()
    except (OSError, ValueError):  # raised for names that are too long or contain a NUL
        exists = False
    return exists or word.endswith(".gguf") or read_name(word) is not None


DEFAULT_QUANTS = ("Q4_K_M", "Q8_0")
# Files with these letters anywhere in their names or folders are no models.
_NO_MODELS = re.compile(
    r"mmproj|imatrix|eagle[-_.]?[123]|dflash|dspark|medusa|hydra-head|drafter|speculator", re.I
)
# These words say so as the first or last word of a name, or as a folder: `X-MTP-Q4_K_M.gguf` is a
# model that has such layers, and `X-Q8_0-MTP.gguf` has the layers alone.
_DRAFT_WORDS = frozenset({"mtp", "nextn", "eagle", "draft", "drafts", "heads"})
_SEPARATORS = re.compile(r"[-._/ ]")
_PART = re.compile(r"(?P<prefix>.*)-\d{5}-of-(?P<count>\d{5})\.gguf")
_QUANT = re.compile(
    r"(?:UD-)?(?:I?Q\d[A-Z0-9_]*|TQ\d_\d|BF16|F16|F32|MXFP4[A-Z0-9_]*|NVFP4)$", re.I
)


def choose(files: Sequence[str], quant: str, whose: str) -> tuple[str, ...]:
    """The model's file, or all of its parts in order.

    `quant` may be "". Messages name the place of the files with `whose`. Raises UsageError
    if there is no such model.
    """
    models = [file for file in files if is_model(file)]
    if not models:
        raise UsageError(f"{whose} has no GGUF model{_others(files)}")
    firsts = [file for file in models if is_first_part(file)]
    if first := _with_quant(firsts, quant) if quant else usual_of(firsts):
        return parts_of(first, models, whose)
    if quant:
        raise UsageError(f"{whose} has no {quant}; it has {', '.join(quants(models))}")
    raise UsageError(f"{whose} lacks the first part of every model")


def usual_of(files: Sequence[str]) -> str | None:
    """The file that is meant if no quantisation is named. None if there are no files."""
    for quant in DEFAULT_QUANTS:
        if first := _with_quant(files, quant):
            return first
    return files[0] if files else None


def choose_file(files: Sequence[str], name: str, whose: str) -> tuple[str, ...]:
    """The file `name`, or all parts of the split model that it belongs to. Raises UsageError."""
    if name not in files:
        listed = ", ".join(sorted(file for file in files if file.endswith(".gguf"))) or "no .gguf"
        raise UsageError(f"{whose} has no file {name}; it has {listed}")
    return parts_of(name, files, whose)


_PREFIXES = frozenset({"ud", "i"})  # words that belong to the name of a quantisation behind them
_MAY_BE_LEFT_OUT = frozenset({"ud"})  # as llama.cpp's users do


def _with_quant(files: Sequence[str], quant: str) -> str | None:
    """The first file whose path has `quant` as whole words, or None.

    A file whose name differs from the others' by exactly these words comes first. `UD-` may be left
    out if no file is named without it. `I-Quality` is no `Quality`.
    """
    wanted, shared = _words(quant), _shared_words(files)
    matches = [
        (match, -index)
        for index, file in enumerate(files)
        if (match := _match(_words(stem_of(file)), wanted, shared))
    ]
    return files[-max(matches)[1]] if matches else None


def _match(words: tuple[str, ...], wanted: tuple[str, ...], shared: int) -> int:
    """How well the words of a file's path name the wanted ones: 0, not at all, to 3.

    `shared` is the number of first words that all files of the repository have.
    """
    if words[shared:] == wanted and words[shared - 1] not in _PREFIXES:
        return 3
    how_well = 0
    for at in range(len(words) - len(wanted) + 1):
        if words[at : at + len(wanted)] == wanted:
            before = words[at - 1] if at else ""
            how_well = max(
                how_well, 2 if before not in _PREFIXES else int(before in _MAY_BE_LEFT_OUT)
            )
    return how_well


def _words(text: str) -> tuple[str, ...]:
    return tuple(re.split(r"[-./]", text.lower()))


def stem_of(file: str) -> str:
    """A file's path without .gguf, and without the number of its part."""
    split = _PART.fullmatch(file)
    return split["prefix"] if split else file.removesuffix(".gguf")


def _shared_words(files: Sequence[str]) -> int:
    """The number of first words that the paths of all files have in common; 0 for one file."""
    if len(files) < 2:
        return 0
    columns = zip(*(_words(stem_of(file)) for file in files), strict=False)
    return len(list(takewhile(lambda column: len(set(column)) == 1, columns)))


def is_model(file: str) -> bool:
    """False for projectors, importance matrices and models that can only draft for another.

    `file` may be a path, whose folders are read, too.
    """
    *folders, name = file.split("/")
    if not name.endswith(".gguf") or _NO_MODELS.search(file):
        return False
    words = [word.lower() for word in _SEPARATORS.split(stem_of(name))]
    return not _DRAFT_WORDS.intersection({words[0], words[-1], *map(str.lower, folders)})


def parts_of(file: str, files: Sequence[str], whose: str) -> tuple[str, ...]:
    """All parts of the split model that `file` belongs to, or `file` itself if it is not split.

    Raises UsageError, which names the first missing part.
    """
    split = _PART.fullmatch(file)
    if split is None:
        return (file,)
    count = int(split["count"])
    parts = tuple(f"{split['prefix']}-{n:05d}-of-{count:05d}.gguf" for n in range(1, count + 1))
    present = frozenset(files)  # a name may claim 99,999 parts
    missing = [part for part in parts if part not in present]
    if missing:
        raise UsageError(f"{whose} lacks {len(missing)} of {count} parts, the first {missing[0]}")
    return parts


def quants(models: Sequence[str]) -> list[str]:
    """The names of the files' quantisations. A file that names none is listed by its own name."""
    endings = [_quant_of(stem) or stem for stem in map(stem_of, models)]
    return sorted(dict.fromkeys(endings))


def _quant_of(stem: str) -> str:
    """The quantisation that ends a name, or ""."""
    named = re.search(r"[-.]((?:UD-)?[A-Za-z0-9_]+)$", stem)
    return named[1] if named and _QUANT.search(named[1]) else ""


def are_one_model(files: Sequence[str]) -> bool:
    """True if the names of all files differ only in the quantisation at their ends."""
    stems = map(stem_of, files)
    return len({stem.removesuffix(_quant_of(stem)).rstrip("-.").lower() for stem in stems}) <= 1


def name_of(repo: str, file: str, files: Sequence[str]) -> str | None:
    """A name by which commands find this file among the repository's files; None if none does.

    `file` is a model in one file, or a first part.
    """
    firsts = [other for other in files if is_model(other) and is_first_part(other)]
    stem = stem_of(file)
    for quant in (quants([file])[0], stem.rpartition("/")[2], stem.replace("/", "-")):
        name = f"{repo}:{quant}"
        if read_hub_name(name) and _with_quant(firsts, quant) == file:
            return name
    return None


def _others(files: Sequence[str]) -> str:
    kinds = sorted({file.rpartition(".")[2] for file in files if "." in file})
    return (
        f", only {', '.join(kinds)} files; look for its name with -GGUF behind it" if kinds else ""
    )


_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")


def is_first_part(name: str) -> bool:
    """True for the first part of a split model, and for a model in one file."""
    return not _LATER_PART.search(name)


_BITS = re.compile(r"(?:BF|F|Q)(\d+)", re.I)


def choose_projector(files: Sequence[str], model: str) -> str | None:
    """The projector for the file `model` of the same repository or folder, or None.

    It is chosen as llama.cpp does (find_best_sibling in common/download.cpp).
    """
    return _nearest([file for file in files if "mmproj" in file], model, "")


# The files that draft from a target's hidden rows, in the order in which llama.cpp takes them.
_ROW_FILES = {
    "dspark": re.compile(r"(?<![a-z])dspark(?![a-z])", re.I),
    "dflash": re.compile(r"(?<![a-z])dflash(?![a-z])", re.I),
    "eagle3": re.compile(r"(?<![a-z])eagle[-_.]?3(?!\d)", re.I),
}


def choose_row_file(
    files: Sequence[str], model: str, quant: str, kinds: Collection[str]
) -> str | None:
    """The EAGLE-3, DFlash or DSpark file of a repository, by its name, or None.

    `kinds` has the values of `--spec-type` that are looked for. `model` is a model of the same
    repository, "" if it has none, and `quant` a quantisation, or "".
    """
    for kind, named in _ROW_FILES.items():
        if kind in kinds:
            fitting = [file for file in files if named.search(file) and is_first_part(file)]
            if file := _nearest(fitting, model, quant):
                return file
    return None


def _nearest(files: Sequence[str], model: str, quant: str) -> str | None:
    """The GGUF file that belongs to the file `model`, among files of one kind, or None.

    The nearest folder counts first, then whether the file's name has `quant`, and then the number
    of bits that is nearest to that of `quant`, or of the model without one.
    """
    *folders, name = model.split("/")
    bits = _bits(quant or name)
    best: tuple[int, bool, int] | None = None
    chosen = None
    for file in files:
        *own, its_name = file.split("/")
        if not file.endswith(".gguf") or own != folders[: len(own)]:
            continue
        is_exact = bool(quant) and f"-{quant.lower()}." in its_name.lower()
        rank = (len(own), is_exact, -abs(_bits(its_name) - bits))
        if best is None or rank > best:
            best, chosen = rank, file
    return chosen


def _bits(name: str) -> int:
    """The number of bits that a file's name states, 0 if it states none."""
    match = _BITS.search(name)
    return int(match[1]) if match else 0


def same_model(one: str, other: str) -> bool:
    """True if both files are parts of one split model, by their names."""
    parts = [_PART.fullmatch(name) for name in (one, other)]
    return all(parts) and len({part.group("prefix", "count") for part in parts if part}) == 1


def model_in(folder: Path) -> Path:
    """The file, or first part, of the only model in `folder`. Raises UsageError otherwise."""
    files = sorted(p for p in folder.glob("*.gguf") if is_model(p.name) and p.is_file())
    firsts = [path for path in files if is_first_part(path.name)] or files[:1]
    if not firsts:
        raise UsageError(f"{folder}: no .gguf model lies in this folder")
    if len(firsts) > 1:
        names = ", ".join(path.name for path in firsts)
        raise UsageError(f"{folder}: several models lie in this folder, name one: {names}")
    return firsts[0]
