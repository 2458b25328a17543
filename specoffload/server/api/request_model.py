"""The base of all JSON bodies of requests.

The models are strict: a wrong type is refused, not converted. Keys that no model declares are kept
in `model_extra`, and `body.py` decides about them.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from specoffload.server.api.body import renamed


class RequestModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, sent: Any) -> Any:
        return renamed(sent, cls.model_fields) if isinstance(sent, dict) else sent
