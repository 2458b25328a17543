"""`specoffload bench --route-cached 0,0.5,1`: what routing that prefers cached experts costs."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import asdict, replace

import numpy as np
from numpy.typing import NDArray

from specoffload import report
from specoffload.bench.load import warn_of_load
from specoffload.bench.routing import RoutingRow, plot_routing
from specoffload.commands.bench import machine, on_some_device, with_bench_context
from specoffload.commands.profile import check_plot
from specoffload.config.options import BenchOptions
from specoffload.config.resolution import Config
from specoffload.config.speculation import NO_DRAFTS
from specoffload.errors import UsageError
from specoffload.opening.draft_model import real_text
from specoffload.opening.header import target_facts
from specoffload.session.session import Session
from specoffload.session.startup_lines import show_always_shown

Rows = NDArray[np.float32]
_SEQUENCE = 0
_HEADS = ("S", "kept", "in slots", "without", "tokens/s", "KL mean", "KL p99", "perplexity")


def bench_routing(config: Config, own: BenchOptions) -> None:
    """Decode one text token by token with each strength, and print what changes.

    Raises UsageError for strengths outside 0 to 1, or a text that is too short.
    """
    if not all(0.0 <= strength <= 1.0 for strength in own.strengths):
        raise UsageError("--route-cached: strengths must lie between 0 and 1, as in 0,0.5,1")
    if own.plot is not None:
        check_plot(own.plot, 1, ())
    warn_of_load()
    config = on_some_device(with_bench_context(config))
    options = replace(config.spec.options, drafters=NO_DRAFTS.drafters)
    route = replace(config.streaming.route, n_kept=own.n_kept)
    if reason := route.no_effect_reason(target_facts(config).n_experts_used):
        raise UsageError(f"--route-cached would change nothing: {reason}")
    streaming = replace(config.streaming, route=route)
    config = replace(config, spec=replace(config.spec, options=options), streaming=streaming)
    strengths = tuple(dict.fromkeys((0.0, *own.strengths)))
    text = "\n".join(itertools.chain.from_iterable(own.conversations))
    rows: list[RoutingRow] = []
    exact: Rows | None = None
    with report.progress("decoding the text") as show:
        for nth, strength in enumerate(strengths):
            row, logs = _measured(config, strength, text, own.n_predict, exact, is_first=not nth)
            exact = logs if exact is None else exact
            rows.append(row)
            show((nth + 1) / len(strengths))
    title = f"{config.model.name}: {own.n_predict} tokens of a text, one by one"
    report.table(title, _HEADS, [_cells(row) for row in rows])
    if all(row.kept is None for row in rows):
        report.note(
            "no layer of one token streams or is split here, so nothing can be preferred: give "
            "less --vram, or --min-batch 1"
        )
    report.paragraph(
        "S: strength. kept: share of the router's own choices. in slots: share of the chosen "
        "experts that were on the GPU before, and without the preference. KL: divergence of the "
        "next token's distribution from the model's own, in nats. Perplexity is that of this text: "
        "one with your own (-f FILE) says more"
    )
    report.data({"routing": [asdict(row) for row in rows], "machine": machine()})
    if own.plot is not None:
        plot_routing(rows, title, own.plot)
        report.note(f"plotted {own.plot}")


def _measured(
    config: Config, strength: float, text: str, n: int, exact: Rows | None, *, is_first: bool
) -> tuple[RoutingRow, Rows]:
    """Return the row of a strength, and the log-probabilities [n, n_vocab] after each token.

    `exact`: those of the model's own routing; None: this is it.
    """
    route = replace(config.streaming.route, strength=strength)
    config = replace(config, streaming=replace(config.streaming, route=route))
    with Session(config, keeps_hits=False) as session:
        if is_first:
            show_always_shown(session.notes)
        tokens = _tokens(session, text, n)
        before = session.counters()
        seconds, rows = [], list[Rows]()
        for token in tokens[:-1]:
            began = time.perf_counter()
            logits = session.target.sequences.extend(_SEQUENCE, [token], 1)[-1]
            seconds.append(time.perf_counter() - began)
            rows.append(_log_probabilities(logits))
        after = session.counters()
    logs = np.stack(rows)
    kl = divergences(logs if exact is None else exact, logs)
    n_choices, n_kept, n_hits, n_own = (
        after[name] - before[name]
        for name in ("routed_choices", "routed_kept", "routed_hits", "routed_own_hits")
    )
    kept, hits, hits_without = (
        count / n_choices if n_choices else None for count in (n_kept, n_hits, n_own)
    )
    nll = -float(np.mean(logs[np.arange(len(logs)), tokens[1:]]))
    row = RoutingRow(
        strength, kept, hits, hits_without, 1 / float(np.median(seconds)), float(kl.mean()),
        float(np.percentile(kl, 99)), math.exp(nll),
    )  # fmt: skip
    return row, logs


def _tokens(session: Session, text: str, n: int) -> list[int]:
    """Return the first `n + 1` tokens of the text, or of the built-in one if it is "".

    Raises UsageError if it is shorter, or longer than the context.
    """
    target = session.target
    tokens = (
        target.tokenize(text, add_special=True, parse_special=False) if text else real_text(target)
    )
    if not 2 <= n + 1 <= min(len(tokens), target.n_ctx):
        raise UsageError(
            f"-n {n}: the text has {len(tokens)} tokens, and the context {target.n_ctx}; -n must "
            f"be from 1 to {min(len(tokens), target.n_ctx) - 1}"
        )
    return tokens[: n + 1]


def _log_probabilities(logits: Rows) -> Rows:
    shifted = logits.astype(np.float64) - float(logits.max())
    return (shifted - math.log(float(np.exp(shifted).sum()))).astype(np.float32)


def divergences(exact: Rows, other: Rows) -> NDArray[np.float64]:
    """Return the Kullback-Leibler divergence of each row of log-probabilities, in nats."""
    p = np.exp(exact.astype(np.float64))
    row_divergences: NDArray[np.float64] = (p * (exact.astype(np.float64) - other)).sum(axis=1)
    return np.maximum(0.0, row_divergences)


def _cells(row: RoutingRow) -> tuple[str, ...]:
    def share(value: float | None) -> str:
        return "" if value is None else f"{value:.1%}"

    return (
        f"{row.strength:g}", share(row.kept), share(row.hits), share(row.hits_without),
        f"{row.tokens_per_s:.1f}", f"{row.kl_mean:.4f}", f"{row.kl_p99:.3f}",
        f"{row.perplexity:.2f}",
    )  # fmt: skip
