"""Hits that were counted of a model's routing, kept beside the profiles.

The file is true of a model, on whatever machine and by whatever plan: its name and its key are the
model's bytes. One that is damaged or of another model is not used, and why is said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, date, datetime
from glob import escape
from pathlib import Path
from typing import Any

from offload.model import ModelFacts
from offload.routing.counted import LEAST_TOKENS, CountedHits, counted_hits
from offload.routing.hits import SHARES
from offload.routing.recording import N_KEPT, RoutingRecorder
from specdec.whole_file import read_text, write_json
from specoffload.speculation.profile_store import model_hash

_FORMAT = 1
_MOST_BYTES = 1 << 20
_MOST_LAYERS = 4096
_MOST_TOKENS = 1e9
_OFTEN = 4 * N_KEPT  # tokens after which a long session keeps what it counted


def hits_path(folder: Path, facts: ModelFacts, model: str) -> Path:
    """The file of the model of that hash."""
    return folder / f"{facts.path.stem}-{model[:12]}-hits.json"


def may_be_kept(folder: Path, model_file: Path) -> bool:
    """False if no hits were kept of a file of that name: its header need not be read to know."""
    return folder.is_dir() and any(folder.glob(f"{escape(model_file.stem)}-*-hits.json"))


def load_hits(folder: Path, facts: ModelFacts) -> tuple[CountedHits | None, str]:
    """The hits that were kept of a model, or None; and a complaint where a file cannot be used."""
    model = model_hash(facts)
    path = hits_path(folder, facts, model)
    try:
        data = json.loads(read_text(path, _MOST_BYTES))
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError, RecursionError) as e:
        return None, f"counted hits are not used: {path} cannot be read: {e}"
    try:
        if data["format"] != _FORMAT:
            return None, (
                f"counted hits are not used: {path} is of another version: its format is "
                f"{data['format']!r:.40}"
            )
        if data["model"] != model or data["n_experts"] != facts.n_experts:
            return None, f"counted hits are not used: {path} is of another model"
        return _from_data(data), ""
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as e:
        return None, f"counted hits are not used: {path} is damaged: {e!r:.200}"


def store_hits(folder: Path, facts: ModelFacts, newer: CountedHits) -> str | None:
    """Write them, with what was kept before; None when done, else why not. A run does not fail for
    a folder it cannot write."""
    kept, _ = load_hits(folder, facts)
    hits = newer if kept is None or kept.n_used != newer.n_used else kept.merged(newer)
    model = model_hash(facts)
    data = {
        "format": _FORMAT,
        "model": model,
        "n_experts": hits.n_experts,
        "n_used": hits.n_used,
        "n_tokens": round(hits.n_tokens, 1),
        "counted_on": hits.counted_on.isoformat(),
        "shares": list(SHARES),
        "layers": {
            str(layer): [round(hit, 4) for hit in rates]
            for layer, rates in sorted(hits.layers.items())
        },
        "uses": {str(layer): list(uses) for layer, uses in sorted(hits.uses.items())},
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(hits_path(folder, facts, model), data)
    except OSError as e:
        return f"counted hits are not kept: {e}"
    return None


def _from_data(data: Mapping[str, Any]) -> CountedHits:
    """Raises ValueError, KeyError, TypeError, AttributeError or OverflowError for damaged data."""
    if [float(share) for share in data["shares"]] != list(SHARES):
        raise ValueError("its shares are not those that are counted")
    n_experts, n_used, n_tokens = data["n_experts"], data["n_used"], float(data["n_tokens"])
    if type(n_used) is not int or not 0 < n_used <= n_experts:
        raise ValueError(f"{n_used!r:.40} of {n_experts} experts cannot be used")
    if not 0.0 < n_tokens <= _MOST_TOKENS:
        raise ValueError(f"{n_tokens} is no number of tokens")
    if not 0 < len(data["layers"]) <= _MOST_LAYERS:
        raise ValueError(f"it has {len(data['layers'])} layers")
    layers = {
        int(layer): tuple(_hit(hit) for hit in rates) for layer, rates in data["layers"].items()
    }
    if any(len(rates) != len(SHARES) for rates in layers.values()):
        raise ValueError(f"a layer has not the hits of {len(SHARES)} shares")
    uses = {
        int(layer): tuple(_uses(n) for n in of_layer)
        for layer, of_layer in data.get("uses", {}).items()  # earlier versions kept none
    }
    if any(len(of_layer) != n_experts for of_layer in uses.values()):
        raise ValueError(f"a layer has not the uses of {n_experts} experts")
    counted_on = date.fromisoformat(data["counted_on"])
    return CountedHits(n_experts, n_used, layers, n_tokens, counted_on, uses)


def _uses(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST_TOKENS:
        raise ValueError(f"{value!r:.40} is no number of uses")
    return value


def _hit(value: Any) -> float:
    hit = float(value)
    if not 0.0 <= hit <= 1.0:
        raise ValueError(f"{value!r:.40} is no share of uses")
    return hit


class HitKeeper:
    """Keeps what a session's recorder has, at its end and after long use."""

    def __init__(self, folder: Path, facts: ModelFacts, recorder: RoutingRecorder) -> None:
        self._folder, self._facts, self._recorder = folder, facts, recorder
        self._n_kept = 0
        self.failed: str | None = None  # why nothing could be kept, the last time

    @property
    def is_due(self) -> bool:
        """True if a session that goes on has much that was not kept."""
        return self._recorder.n_tokens - self._n_kept >= _OFTEN

    def keep(self) -> None:
        """Count what was recorded since the last time, and keep it if it is enough."""
        n_new = min(self._recorder.n_tokens - self._n_kept, N_KEPT)
        if n_new < LEAST_TOKENS:
            return
        recorded = {layer: ids[-n_new:] for layer, ids in self._recorder.recorded().items()}
        today = datetime.now(UTC).date()
        hits = counted_hits(recorded, self._facts.n_experts, today)
        self._n_kept = self._recorder.n_tokens
        if hits is not None:
            self.failed = store_hits(self._folder, self._facts, hits)
