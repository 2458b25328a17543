"""Joins the metrics of several models: one text for a plain scrape, with a label for the model."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import ASGIApp, Message, Scope

LABEL = "model"


async def page_of(app: ASGIApp, scope: Scope) -> str:
    """Return the text with which a model's application answers GET /metrics, "" if it refuses."""
    status, body = 0, b""

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, body
        status = message.get("status", status)
        body += message.get("body", b"")

    await app({**scope, "path": "/metrics", "query_string": b""}, receive, send)
    return body.decode() if status == 200 else ""


def joined(pages: Mapping[str, str], states: Mapping[str, bool]) -> bytes:
    """Return one page with the samples of all models. `states`: whether each model is open.

    A family of all models has its help and type once, as the format demands.
    """
    is_open = GaugeMetricFamily(
        "specoffload:model_open", "1 if the model is loaded, else 0.", labels=[LABEL]
    )
    for name, value in states.items():
        is_open.add_metric([name], value)
    families: dict[str, Metric] = {is_open.name: is_open}
    for name, page in pages.items():
        for family in text_string_to_metric_families(page):
            into = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                into.samples.append(sample._replace(labels={LABEL: name, **sample.labels}))
    collected = [*families.values()]
    page_of_all: bytes = generate_latest(SimpleNamespace(collect=lambda: collected))  # type: ignore[arg-type]
    return page_of_all
