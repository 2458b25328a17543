"""Hits that were counted of a model's routing, and tokens of its runs, kept beside the profiles.

The file is true of a model, on whatever machine and by whatever plan: its name and its key are the
model's bytes. One that is damaged or of another model is not used, and why is said.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from glob import escape
from pathlib import Path
from typing import Any

from offload.model import ModelFacts
from offload.plan.sharing import TokenMix
from offload.routing import LEAST_TOKENS, N_KEPT, SHARES, CountedHits, RoutingRecorder, counted_hits
from specdec.whole_file import read_text, write_json
from specoffload.speculation.profile_store import model_hash

_FORMAT = 1
_MOST_BYTES = 1 << 20
_MOST_LAYERS = 4096
_MOST_TOKENS = 1e9
_OFTEN = 4 * N_KEPT  # tokens after which a long session keeps what it counted
_OFTEN_MIX = 1 << 16  # the same of tokens that runs had
LEAST_MIX_TOKENS = 4096  # tokens counted over all runs before plans use their mix
MIX_HALF_LIFE_TOKENS = float(1 << 18)  # counted later: what was counted before then weighs half


@dataclass(frozen=True)
class Kept:
    """Counts that were kept of a model: hits, None where too little was recorded, and tokens of
    its runs, those of long ago for less."""

    hits: CountedHits | None = None
    mix: TokenMix = TokenMix(0, 0)

    @property
    def mix_for_plan(self) -> TokenMix | None:
        """The proportion that a plan is made for; None where the runs had too few tokens."""
        if self.mix.n_prompt + self.mix.n_generated < LEAST_MIX_TOKENS:
            return None
        return TokenMix(max(1, self.mix.n_prompt), max(1, self.mix.n_generated)).rounded

    def merged(self, newer: Kept) -> Kept:
        """Both, this one for less the more was counted since."""
        hits = newer.hits
        if self.hits is not None and (hits is None or hits.n_used == self.hits.n_used):
            hits = self.hits if hits is None else self.hits.merged(hits)
        weight = 0.5 ** ((newer.mix.n_prompt + newer.mix.n_generated) / MIX_HALF_LIFE_TOKENS)
        mix = TokenMix(
            weight * self.mix.n_prompt + newer.mix.n_prompt,
            weight * self.mix.n_generated + newer.mix.n_generated,
        )
        return Kept(hits, mix)


def hits_path(folder: Path, facts: ModelFacts, model: str) -> Path:
    """The file of the model of that hash."""
    return folder / f"{facts.path.stem}-{model[:12]}-hits.json"


def may_be_kept(folder: Path, model_file: Path) -> bool:
    """False if no hits were kept of a file of that name: its header need not be read to know."""
    return folder.is_dir() and any(folder.glob(f"{escape(model_file.stem)}-*-hits.json"))


def load_kept(folder: Path, facts: ModelFacts) -> tuple[Kept, str]:
    """The counts that were kept of a model, and a complaint where its file cannot be used."""
    model = model_hash(facts)
    path = hits_path(folder, facts, model)
    try:
        data = json.loads(read_text(path, _MOST_BYTES))
    except FileNotFoundError:
        return Kept(), ""
    except (OSError, ValueError, RecursionError) as e:
        return Kept(), f"counted hits are not used: {path} cannot be read: {e}"
    try:
        if data["format"] != _FORMAT:
            return Kept(), (
                f"counted hits are not used: {path} is of another version: its format is "
                f"{data['format']!r:.40}"
            )
        if data["model"] != model or data["n_experts"] != facts.n_experts:
            return Kept(), f"counted hits are not used: {path} is of another model"
        mix = TokenMix(
            *(_n_tokens(data.get(name, 0)) for name in ("prompt_tokens", "generated_tokens"))
        )
        return Kept(_hits_from(data) if "layers" in data else None, mix), ""
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as e:
        return Kept(), f"counted hits are not used: {path} is damaged: {e!r:.200}"


def store_kept(folder: Path, facts: ModelFacts, newer: Kept) -> str | None:
    """Write them, with those kept before; None when done, else why not. A run does not fail for
    a folder it cannot write."""
    kept = load_kept(folder, facts)[0].merged(newer)
    model = model_hash(facts)
    data: dict[str, Any] = {
        "format": _FORMAT,
        "model": model,
        "n_experts": facts.n_experts,
        "prompt_tokens": round(kept.mix.n_prompt, 1),
        "generated_tokens": round(kept.mix.n_generated, 1),
    }
    hits = kept.hits
    if hits is not None:
        data |= {
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


def _hits_from(data: Mapping[str, Any]) -> CountedHits:
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


def _n_tokens(value: Any) -> float:
    n = float(value)
    if not 0.0 <= n <= _MOST_TOKENS:
        raise ValueError(f"{value!r:.40} is no number of tokens")
    return n


def _hit(value: Any) -> float:
    hit = float(value)
    if not 0.0 <= hit <= 1.0:
        raise ValueError(f"{value!r:.40} is no share of uses")
    return hit


class HitKeeper:
    """Keeps what a session's recorder has and its runs' tokens, at its end and after long use."""

    def __init__(
        self,
        folder: Path,
        facts: ModelFacts,
        recorder: RoutingRecorder,
        tokens: Callable[[], TokenMix],
    ) -> None:
        """`tokens` tells what the session has evaluated and generated so far."""
        self._folder, self._facts, self._recorder = folder, facts, recorder
        self._tokens, self._kept_mix = tokens, TokenMix(0, 0)
        self._n_kept = 0
        self.failed: str | None = None  # why nothing could be kept, the last time

    @property
    def is_due(self) -> bool:
        """True if a session that goes on has much that was not kept."""
        new = self._new_tokens()
        return (
            self._recorder.n_tokens - self._n_kept >= _OFTEN
            or new.n_prompt + new.n_generated >= _OFTEN_MIX
        )

    def _new_tokens(self) -> TokenMix:
        now, kept = self._tokens(), self._kept_mix
        return TokenMix(now.n_prompt - kept.n_prompt, now.n_generated - kept.n_generated)

    def keep(self) -> None:
        """Count what was recorded since the last time, and keep it if it is enough."""
        mix = self._new_tokens()
        n_new = min(self._recorder.n_tokens - self._n_kept, N_KEPT)
        hits = None
        if n_new >= LEAST_TOKENS:
            recorded = {layer: ids[-n_new:] for layer, ids in self._recorder.recorded().items()}
            today = datetime.now(UTC).date()
            hits = counted_hits(recorded, self._facts.n_experts, today)
            self._n_kept = self._recorder.n_tokens
        if hits is not None or mix.n_prompt + mix.n_generated >= LEAST_TOKENS:
            self._kept_mix = self._tokens()
            self.failed = store_kept(self._folder, self._facts, Kept(hits, mix))
