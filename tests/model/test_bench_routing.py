"""`bench --route-cached`: what a strength costs and brings on one text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from resolved import config_of, line_of
from splits import at_random

from specoffload import cli
from specoffload.bench.routing import RoutingRow, plot_routing, routing_figure
from specoffload.commands import bench_routing as bench
from specoffload.config.options import BenchOptions, Toggle
from specoffload.config.resolution import Config
from specoffload.errors import UsageError

N = 40


def config_with_splits() -> Config:
    config = config_of(
        device="sim:vram=8MiB", ctx_size=512, threads=1, hybrid=Toggle.ON,
        without=frozenset({"lend", "profile"}), spec_given={"--spec-type": "none"},
    )  # fmt: skip
    return replace(config, streaming=replace(config.streaming, splitter=at_random(1)))


def test_a_stronger_preference_keeps_fewer_choices_and_diverges(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench.bench_routing(config_with_splits(), BenchOptions(n_predict=N, strengths=(1.0,)))
    shown = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "│" in line]
    exact, strong = ([cell.strip() for cell in row] for row in shown)
    assert exact[:4] == ["0", "", "", ""]
    assert exact[5:7] == ["0.0000", "0.000"]
    assert 50 < float(strong[1].rstrip("%")) < 100
    assert float(strong[2].rstrip("%")) > float(strong[3].rstrip("%")), "more hits than without"
    assert float(strong[5]) > 0
    assert float(strong[7]) != float(exact[7])


def test_a_bench_in_which_every_choice_is_the_routers_own_is_refused() -> None:
    own = BenchOptions(n_predict=8, strengths=(1.0,), n_kept=4)
    with pytest.raises(UsageError, match="change nothing: --route-keep 4 leaves all 4 experts"):
        bench.bench_routing(config_with_splits(), own)


ROWS = (
    RoutingRow(1.0, 0.8, 0.9, 0.5, 12.0, 0.2, 0.9, 9.0),
    RoutingRow(0.0, None, None, None, 10.0, 0.0, 0.0, 6.0),
    RoutingRow(0.25, 0.9, 0.7, 0.5, 11.0, 0.1, 0.4, 7.5),
)


def test_a_plot_has_each_figure_of_the_rows_by_strength(tmp_path: Path) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figure = routing_figure(ROWS, "a text")
    lines = {
        line.get_label(): [(float(x), float(y)) for x, y in line.get_xydata()]
        for axes in figure.axes
        for line in axes.lines
    }
    pyplot.close(figure)
    assert lines == {
        "choices kept": [(0.25, 0.9), (1.0, 0.8)],
        "chosen experts in slots": [(0.25, 0.7), (1.0, 0.9)],
        "the router's own in slots": [(0.25, 0.5), (1.0, 0.5)],
        "mean": [(0.0, 0.0), (0.25, 0.1), (1.0, 0.2)],
        "99th percentile": [(0.0, 0.0), (0.25, 0.4), (1.0, 0.9)],
        "tokens/s": [(0.0, 1.0), (0.25, 1.1), (1.0, 1.2)],
        "perplexity": [(0.0, 1.0), (0.25, 1.25), (1.0, 1.5)],
    }
    plot_routing(ROWS, "a text", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_cannot_be_written_is_refused_before_the_model_is_opened() -> None:
    own = BenchOptions(strengths=(0.5,), plot=Path("plot.jpeg"))
    with pytest.raises(UsageError, match=r"--plot plot.jpeg: must end in .png or .svg or .pdf"):
        bench.bench_routing(config_with_splits(), own)


def noted(*words: str, bench_of: str) -> tuple[str, ...]:
    """The notes of a command line of `bench`, of which nothing is run."""
    seen = []
    with patch.object(cli, "config_of", lambda line, options, **_: seen.append(options)), \
            patch(bench_of):  # fmt: skip
        cli.bench(line_of(*words, "m.gguf", command="bench"))
    (options,) = seen
    notes: tuple[str, ...] = options.notes
    return notes


def test_flags_without_effect_are_named(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def read(path):\n", encoding="utf-8")
    of_routing = "specoffload.commands.bench_routing.bench_routing"
    of_bench = "specoffload.commands.bench.bench_config"
    routing = ("--route-cached", "0,0.5", "--route-keep", "1", "--plot", "a.png", "-f", str(text))
    assert not [note for note in noted(*routing, bench_of=of_routing) if "ignored" in note]
    (note,) = noted("--route-cached", "0.5", "-p", "9", bench_of=of_routing)
    assert "ignored" in note
    assert "decodes each token of its text once" in note
    for words in (("--route-keep", "1"), ("--plot", "a.png"), ("-f", str(text))):
        (note,) = noted(*words, bench_of=of_bench)
        assert "ignored" in note
        assert "no --route-cached" in note


@pytest.mark.parametrize(
    "others",
    [("--drafters",), ("--policies",), ("--vs", "llama-server=x"), ("-npl", "2"),
     ("--texts", "http://x"), ("-p", "1,2")],
)  # fmt: skip
def test_comparisons_exclude_each_other(others: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="--route-cached compares our routing alone"):
        cli.bench(line_of("--route-cached", "0.5", *others, command="bench"))
    with pytest.raises(UsageError, match="--agent plays tasks alone"):
        cli.bench(line_of("--route-cached", "0.5", "--agent", command="bench"))


def test_divergences_are_those_of_a_sum_over_tokens() -> None:
    rng = np.random.default_rng(1)
    p, q = (rng.dirichlet(np.ones(9), 4) for _ in range(2))
    found = bench.divergences(np.log(p).astype(np.float32), np.log(q).astype(np.float32))
    assert found == pytest.approx((p * np.log(p / q)).sum(axis=1), rel=1e-4)
    assert bench.divergences(np.log(p).astype(np.float32), np.log(p).astype(np.float32)).max() == 0


def test_strengths_and_lengths_are_checked() -> None:
    with pytest.raises(UsageError, match="between 0 and 1"):
        bench.bench_routing(config_with_splits(), BenchOptions(strengths=(0.5, 1.5)))
    with pytest.raises(UsageError, match=r"-n 900: .* the context 512"):
        bench.bench_routing(config_with_splits(), BenchOptions(n_predict=900, strengths=(0.5,)))
