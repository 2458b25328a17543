"""Where profiles are kept, what they are true of, and how they go in and out as text.

One file per (model file, draft file, plan, threads, device). Its key says which bytes and which
build it was measured with; a file whose key differs is refused with the difference.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from offload.engine import Engine
from offload.model import ModelFacts
from offload.native_build import library_build
from offload.split.choosing import ranges
from specdec.costs.calibration import Calibration
from specdec.costs.profile import CostProfile, ProfileKey
from specdec.costs.profile_io import (
    MOST_PROFILE_BYTES,
    StoredProfile,
    format_batch_costs,
    format_batched_bench,
    load,
    parse_batch_costs,
    parse_batched_bench,
    save,
)
from specdec.errors import BadProfile
from specdec.whole_file import read_text, write_text
from specoffload.speculation.draft_model import DraftModel

_HEADER_BYTES = 1 << 20
_N_SAMPLES = 64
_SAMPLE_BYTES = 4096


def model_hash(facts: ModelFacts) -> str:
    """Of the header, the sizes and sampled bytes of every part: a model of 600 GB is not read."""
    digest = hashlib.sha256()
    for path in sorted({facts.path, *(place.file for place in facts.weights.values())}):
        size = path.stat().st_size
        digest.update(str(size).encode())
        with path.open("rb") as f:
            digest.update(f.read(_HEADER_BYTES))
            for i in range(1, _N_SAMPLES + 1):
                f.seek(max(0, size * i // _N_SAMPLES - _SAMPLE_BYTES))
                digest.update(f.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:24]


def key_of(target: Engine, draft: DraftModel | None, *, with_split: bool = True) -> ProfileKey:
    """The key of a profile that is measured on these engines now. Without `with_split` it is of
    times that come before the choice of layers to split."""
    o, plan, device = target.options, target.plan, target.choice.name
    parts = [f"flash-attn {o.flash_attn}", f"ubatch {o.n_ubatch}"]
    if plan is not None:
        n, s = target.min_batch, o.streaming
        parts += [
            f"streamed {plan.streamed_bytes}",
            f"slots {plan.slot_bytes}",
            f"min-batch {n.experts}/{n.dense}",
            f"depth {s.depth} prefetch {s.prefetch}",
        ]
    if with_split and target.hybrid is not None and (sizes := target.hybrid.switch.sizes):
        parts.append(f"split {ranges(sizes)}")
    if draft is not None:
        place, settings = _of_draft(draft)
        device += f" draft {place}"
        parts.append(settings)
    return ProfileKey(
        model=model_hash(target.facts),
        draft="" if draft is None else model_hash(draft.facts),
        plan=", ".join(parts),
        threads=thread_words(o.n_threads, o.n_threads_batch),
        device=device,
        build=library_build(),
    )


def thread_words(n_threads: int, n_threads_batch: int) -> str:
    """Both teams' numbers of threads, as they stand in a key."""
    return f"{n_threads}/{n_threads_batch}"


def _of_draft(draft: DraftModel) -> tuple[str, str]:
    """Where the draft is computed, and the settings that its step depends on."""
    if isinstance(draft, Engine):
        o = draft.options
        return draft.choice.name, (
            f"draft threads {o.n_threads}/{o.n_threads_batch} ubatch {o.n_ubatch}"
        )
    t = draft.options
    return f"torch {t.device}", (
        f"draft {t.dtype} threads {t.n_threads} graphs {t.graphs} kept {len(t.kept)}"
    )


def profile_path(folder: Path, target: Engine, draft: DraftModel | None, key: ProfileKey) -> Path:
    """The file of this run: one per paths and settings, whatever the files' bytes are."""
    draft_path = "" if draft is None else str(draft.facts.path.resolve())
    names = (str(target.facts.path.resolve()), draft_path, key.plan, key.threads, key.device)
    digest = hashlib.sha256("\0".join(names).encode()).hexdigest()[:12]
    return folder / f"{target.facts.path.stem}-{digest}.json"


def load_stored(path: Path, key: ProfileKey) -> tuple[StoredProfile | None, str]:
    """The stored profile, or None and why there is none that fits."""
    if not path.exists():
        return None, "no profile of this model and plan is stored yet"
    try:
        return load(path, key), f"of an earlier run, {path}"
    except BadProfile as e:
        return None, f"{e}; it is not used"


def fuller(path: Path, costs: CostProfile) -> str:
    """A sentence on the stored profile of the same run where that is fuller than `costs`, and so
    stays; else nothing."""
    stored = load_stored(path, costs.key)[0]
    more = "" if stored is None else stored.costs.fuller_than(costs)
    return more and f"the stored profile is fuller and stays: it has {more}"


def store(path: Path, costs: CostProfile, calibration: Calibration | None) -> str | None:
    """Write it; None when done, else why not. A run does not fail for a folder it cannot write."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save(path, costs, calibration)
    except OSError as e:
        return f"the profile was not stored: {e}; SPECOFFLOAD_PROFILE_DIR names another folder"
    return None


def import_profile(path: Path, key: ProfileKey) -> StoredProfile:
    """A profile from our JSON, llama-batched-bench's JSONL or GGML_BATCH_COSTS text.

    JSON must be of this run; the other two have no key and take this run's. Raises BadProfile.
    """
    found = _parsed("--import", path, key)
    return replace(found, costs=replace(found.costs, key=key))


def read_any(flag: str, path: Path) -> CostProfile:
    """The costs in a file of those formats, of whatever run. Raises BadProfile naming `flag`."""
    return _parsed(flag, path, None).costs


def _parsed(flag: str, path: Path, key: ProfileKey | None) -> StoredProfile:
    try:
        text = read_text(path, MOST_PROFILE_BYTES)
    except (OSError, UnicodeDecodeError) as e:
        raise BadProfile(f"{flag} {path}: cannot be read as UTF-8 text ({e})".lstrip()) from e
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise BadProfile(f"{flag} {path}: the file is empty".lstrip())
    if any('"speed_tg"' in line for line in lines):
        return StoredProfile(parse_batched_bench(text), Calibration())
    if text.lstrip().startswith(("{", "[")):
        return load(path, key)
    costs = lines[-1].partition("=")[2] or lines[-1]
    return StoredProfile(parse_batch_costs(costs.strip("\"' ")), Calibration())


def export_profile(path: Path, costs: CostProfile, calibration: Calibration) -> str:
    """Write `.json` (ours), `.jsonl` (llama-batched-bench) or else GGML_BATCH_COSTS text.

    Returns which it was. Raises BadProfile when the file cannot be written.
    """
    try:
        if path.suffix == ".json":
            save(path, costs, calibration)
            return "a profile of specoffload"
        if path.suffix == ".jsonl":
            write_text(path, format_batched_bench(costs))
            return "llama-batched-bench's JSONL"
        write_text(path, f"GGML_BATCH_COSTS={format_batch_costs(costs)}\n")
    except OSError as e:
        raise BadProfile(f"--export {path}: {e}") from e
    return "GGML_BATCH_COSTS"
