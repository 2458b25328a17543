"""A draft model as a session holds it, by whichever engine. Imports torch for nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from offload.engine import Engine

if TYPE_CHECKING:
    from offload.torch_draft.draft import TorchEngine

DraftModel: TypeAlias = "Engine | TorchEngine"
