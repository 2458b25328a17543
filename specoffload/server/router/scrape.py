"""Joins the metrics of several models, with a label for the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

LABEL = "model"


def joined(by_model: Mapping[str, Sequence[Metric]], states: Mapping[str, bool]) -> list[Metric]:
    """Return the metrics of all models by their names. `states`: whether each model is open.

    A metric that several models have comes once, as the format demands.
    """
    is_open = GaugeMetricFamily(
        "specoffload:model_open", "1 if the model is loaded, else 0.", labels=[LABEL]
    )
    for name, value in states.items():
        is_open.add_metric([name], value)
    families: dict[str, Metric] = {is_open.name: is_open}
    for name, metrics in by_model.items():
        for metric in metrics:
            into = families.setdefault(
                metric.name, Metric(metric.name, metric.documentation, metric.type)
            )
            for sample in metric.samples:
                into.samples.append(sample._replace(labels={LABEL: name, **sample.labels}))
    return [*families.values()]
