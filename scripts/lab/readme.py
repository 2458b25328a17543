"""Measures the figures of README's table of measurements, keeps them, and writes the table.

    scripts/lab/run readme                            write the tables from the kept figures
    scripts/lab/run readme --measure overlap,wrapped  measure these rows on this machine before that
    scripts/lab/run readme --measure all              every row: about 40 minutes on 2 cores

Each row comes from one command that anybody can run. `scripts/lab/readme.json` keeps its figures
with the command, the machine, the date and the commit. README's table and both tables in
docs/results.md are made from this file, and a test compares them. Measure while nothing else runs.
The row `disk` needs root and control groups, `disk` and `server` need the llama-server that
`scripts/build-llama-server` builds. A row whose command fails keeps its old figures, and is named.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from lab import ROOT
from lab.tables import filled
from specoffload.commands.bench import commit, machine
from specoffload.cpu_load import Load, Watch

KEPT = ROOT / "scripts" / "lab" / "readme.json"
README = ROOT / "README.md"
RESULTS = ROOT / "docs" / "results.md"
GPU = ROOT / "docs" / "gpu.md"

Figures = dict[str, float]

# README's row without figures.
TEXTS = (
    "| Does speculation change texts? | not in the [exact "
    "setting](docs/speculation.md#losslessness). In others, batches round differently, so nearly "
    "equal tokens may swap |"
)


@dataclass(frozen=True)
class Row:
    """A row of README's table, and of the longer one in docs/results.md.

    `commands` print what `figures` reads, one after the other; {folder} is an empty folder that
    they share. `brief` writes the answer in README, `answer` the longer one in docs/results.md.
    """

    question: str
    commands: tuple[str, ...]
    figures: Callable[[list[str]], Figures]
    brief: Callable[[Figures], str]
    answer: Callable[[Figures], str]


def json_in(text: str) -> dict[str, Any]:
    """The last JSON object in a command's output."""
    start = text.index("{")
    found: dict[str, Any] = json.loads(text[start : text.rindex("}") + 1])
    return found


def span(values: list[float], form: str) -> str:
    """The least and the largest value, as one if they look equal."""
    low, high = (format(value, form) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def change(ratio: float) -> str:
    """A ratio of speeds as "3 % faster" or "3 % slower"."""
    return f"{abs(ratio - 1) * 100:.0f} % {'faster' if ratio >= 1 else 'slower'}"


# -- rows -----------------------------------------------------------------------------------------

_SLOW, _EQUAL = "4 ubatches, slow link", "prompt of 4 ubatches"
_WRONG = "verification, 64 experts"


def _overlap(printed: list[str]) -> Figures:
    return {row["case"]: row["ratio"] for row in json_in(printed[0])["overlap"]}


def _overlap_brief(of: Figures) -> str:
    more = [(of[case] - 1) * 100 for case in of if case not in (_SLOW, _EQUAL, _WRONG)]
    return (
        f"a decode takes {span(more, '.0f')} % longer than its copies or its computation "
        f"alone, whichever takes longer (`sim`). It takes {(of[_WRONG] - 1) * 100:.0f} % longer if "
        "a third of the guessed experts is wrong"
    )


def _overlap_words(of: Figures) -> str:
    steps = [ratio for case, ratio in of.items() if case not in (_SLOW, _EQUAL, _WRONG)]
    return (
        f"a decode takes {span(steps, '.2f')} × as long as its copies alone or its computation "
        "alone, whichever takes longer. 1 would be perfect. It takes "
        f"{of[_WRONG]:.2f} × if a third of the guessed experts is wrong. A prompt of four ubatches "
        f"takes {of[_EQUAL]:.2f} × if copies and computation take equally long, and "
        f"{of[_SLOW]:.2f} × if copies take twice as long"
    )


def _wrapped(printed: list[str]) -> Figures:
    ratio = json_in(printed[1])["wrapped_ratio"]
    if ratio is None:
        raise ValueError("the times were not steady, so there is no ratio")
    return {"decode": 1 / ratio}


def _wrapped_brief(of: Figures) -> str:
    longer = (of["decode"] - 1) * 100
    return f"a decode takes {longer:.0f} % longer than with libllama alone (`sim`)"


def _wrapped_words(of: Figures) -> str:
    return (
        f"a decode takes {of['decode']:.2f} × as long as with libllama alone (a random "
        "DeepSeek-V3 shape of 24 layers, on `sim`)"
    )


_RATES = ("1 GB/s", "400 MB/s")


def _copying_texts(printed: str) -> dict[str, Any]:
    """The texts of `bench --policies` by name, without those that copied nothing.

    Raises ValueError if none is left, or if a text's times were not steady.
    """
    texts: dict[str, Any] = json_in(printed)["workloads"]
    copying = {
        name: of for name, of in texts.items() if any(row["streamed_bytes"] for row in of["rows"])
    }
    if not copying:
        raise ValueError("nothing was copied, so the row would compare nothing")
    for name, of in copying.items():
        if None in (of["vs_no_drafts"], of["vs_best_fixed"]):
            raise ValueError(f"{name}: the times were not steady, so there is no ratio")
    return copying


def _policies(printed: list[str]) -> Figures:
    found: Figures = {}
    for rate, text in zip(_RATES, printed[:2], strict=True):
        texts = _copying_texts(text)
        for key, to in (("vs_no_drafts", "no drafts"), ("vs_best_fixed", "best fixed")):
            found[f"{rate}: default ÷ {to}"] = texts["mixed"][key]
            found[f"{rate}: default ÷ {to}, least of the texts"] = min(
                of[key] for of in texts.values()
            )
    streamed = _copying_texts(printed[2])
    found["experts stream: default ÷ no drafts"] = min(
        of["vs_no_drafts"] for of in streamed.values()
    )
    return found


def _policies_brief(of: Figures) -> str:
    gains = [f"{change(of[f'{rate}: default ÷ no drafts'])} at {rate}" for rate in _RATES]
    return (
        f"decoding is {' and '.join(gains)}, if dense weights are copied (`sim`). If experts are, "
        f"it is {change(of['experts stream: default ÷ no drafts'])} on the worst text"
    )


def _policies_words(of: Figures) -> str:
    def both(what: str) -> str:
        return " and ".join(f"{of[f'{rate}: default ÷ {what}']:.2f}" for rate in _RATES)

    gains, best = both("no drafts"), both("best fixed")
    least = ", least of the texts"
    return (
        f"yes if each decode copies dense weights: {gains} × the speed of plain decoding at "
        f"{' and '.join(_RATES)}, on texts of all kinds in one session. That is {best} × the speed "
        f"of the best fixed setting, which is known only afterwards. On the worst kind "
        f"of text alone the default is at {both('no drafts' + least)} × plain decoding, and at "
        f"{both('best fixed' + least)} × the best fixed setting. If experts "
        "stream, drafts did not pay, and the default was at "
        f"{of['experts stream: default ÷ no drafts']:.2f} × plain decoding on the worst (`sim`)"
    )


def _disk(printed: list[str]) -> Figures:
    found: Figures = {}
    for name, part in json_in(printed[0]).items():
        if name.startswith("prompts of"):
            for what, ratio in part["ratios"].items():
                found[f"{name}: {what}"] = ratio
    return found


def _disk_words(of: Figures) -> str:
    decodes = [r for what, r in of.items() if what.endswith("decode_tps") and "512" in what]
    prompts = [r for what, r in of.items() if what.endswith("prompt_tps")]
    return (
        f"decoding is {span(decodes, '.0f')} × as fast as llama-server's with mmap, prompts "
        f"{span(prompts, '.1f')} ×"
    )


def _stages(printed: list[str]) -> Figures:
    (times,) = re.findall(r"one ([\d.]+) s, two ([\d.]+) s", printed[0])[-1:]
    return {"one device, s": float(times[0]), "two devices, s": float(times[1])}


def _stages_brief(of: Figures) -> str:
    one_s, two_s = of["one device, s"], of["two devices, s"]
    return f"a prompt is read in {two_s:.2f} s instead of {one_s:.2f} s (`sim`)"


def _stages_words(of: Figures) -> str:
    faster = of["one device, s"] / of["two devices, s"]
    page = GPU.read_text(encoding="utf-8")
    row = next(x for x in page.splitlines() if x.startswith("| resident, two devices | prompt"))
    cells = [cell.strip(" *") for cell in row.strip("|").split("|")]
    each = [float(cell) for cell in cells[4::3]]
    return (
        f"a prompt of four ubatches is read {faster:.1f} × as fast as by one (`sim`, copies are "
        "the bottleneck). With ggml-cuda on a stand-in for two cards and a [virtual clock]"
        f"(gpu.md#virtual-time), a resident model's prompt takes {span(each[:2], '.2f')} × "
        f"what the plan expects, and {each[2]:.2f} × on H100s"
    )


def _server(printed: list[str]) -> Figures:
    turns = json_in(printed[0])["turns"]
    return {f"streams {n}": of["ratio"] for n, of in turns.items()}


def _server_brief(of: Figures) -> str:
    return (
        f"{change(of['streams 1'])} than llama-server with one stream, {change(of['streams 8'])} "
        "with eight (plain CPU, a 14 MB model)"
    )


def _server_words(of: Figures) -> str:
    return (
        f"{of['streams 1']:.2f} × llama-server's speed with one stream, {of['streams 8']:.2f} × "
        "with eight (plain CPU, a 14 MB model)"
    )


_POLICIES = (
    "specoffload bench --policies --device sim:bw={rate} -ngl 0 --vram 8MiB --min-batch "
    "dense=1,experts=9999 -t 1 -n 48 -r 3 --only-policies fixed,p-min --blocks 1,2,4,8 --json"
)
ROWS = {
    "overlap": Row(
        "How much copying is hidden behind computing?",
        ("scripts/lab/run overlap -r 7 --json",),
        _overlap,
        _overlap_brief,
        _overlap_words,
    ),
    "wrapped": Row(
        "What does specoffload cost while nothing is copied?",
        (
            "scripts/synth deepseek-v3 {folder}/shape.gguf --layers 24 --scale 4 --quant q4_K",
            "specoffload bench {folder}/shape.gguf --device sim -t 2 -n 48 -p 64 -r 5 --json",
        ),
        _wrapped,
        _wrapped_brief,
        _wrapped_words,
    ),
    "policies": Row(
        "Does the default draft length pay?",
        (
            _POLICIES.format(rate="1GB/s"),
            _POLICIES.format(rate="400MB/s"),
            "specoffload bench --policies --device sim:bw=300MB/s --vram 8MiB --min-batch 1 -t 1 "
            "-n 48 -r 3 --only-policies fixed,p-min --blocks 1,2,4,8 --json",
        ),
        _policies,
        _policies_brief,
        _policies_words,
    ),
    "disk": Row(
        "How fast is a model of 2.5 times its memory?",
        ("scripts/lab/run disk --threads 2",),
        _disk,
        _disk_words,
        _disk_words,
    ),
    "devices": Row(
        "What do two devices bring?",
        ("python -m pytest -q -n0 -s tests/model/test_stages.py -k twice",),
        _stages,
        _stages_brief,
        _stages_words,
    ),
    "server": Row(
        "How fast is the server?",
        ("scripts/lab/run bench-server --streams 0 --rounds 3 --tokens 128",),
        _server,
        _server_brief,
        _server_words,
    ),
}


# -- measuring ------------------------------------------------------------------------------------


def measured(row: Row) -> dict[str, Any]:
    """Run a row's commands. Returns its figures, with what is needed to judge them."""
    watch, printed = Watch(), []
    with tempfile.TemporaryDirectory() as folder:
        for command in row.commands:
            words = shlex.split(command.format(folder=folder))
            programs = {"python": [sys.executable], "specoffload": _OURS}
            done = subprocess.run(
                programs.get(words[0], [str(ROOT / words[0])]) + words[1:],
                cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
            )  # fmt: skip
            printed.append(done.stdout)
    return {
        "figures": row.figures(printed),
        "commands": [command.format(folder=".") for command in row.commands],
        "cpu": machine()["cpu"],
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "others_share": round(watch.others().others, 3),
    }


_OURS = [sys.executable, "-m", "specoffload"]


def measure(names: list[str], kept: dict[str, Any]) -> list[str]:
    """Measure these rows, and keep each as soon as it is known. Returns the names that failed."""
    failed = []
    for name in names:
        print(f"measuring {name}: {'; '.join(ROWS[name].commands)}", file=sys.stderr)
        try:
            kept[name] = measured(ROWS[name])
        except (subprocess.CalledProcessError, ValueError, KeyError, IndexError) as e:
            print(f"{name} keeps its old figures: {type(e).__name__}: {e}", file=sys.stderr)
            failed.append(name)
            continue
        KEPT.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return failed


# -- writing --------------------------------------------------------------------------------------


def load() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8"))
    return found


_DOUBT = (
    "?: other programs took 20 % or more of the processors' time during this measurement, or their "
    "share was not recorded."
)


def is_doubtful(its: Mapping[str, Any]) -> bool:
    """True if other programs disturbed a row's measurement, or if that is not known."""
    share = its["others_share"]
    return share is None or Load(share, 1).is_busy


def _rows(kept: Mapping[str, Any], answers: Mapping[str, Callable[[Figures], str]]) -> list[str]:
    """A table of questions and answers. It marks those that other programs may have disturbed."""
    rows = [
        f"| {row.question} | {answers[name](kept[name]['figures'])}"
        f"{' **?**' if is_doubtful(kept[name]) else ''} |"
        for name, row in ROWS.items()
    ]
    return ["| question | answer |", "|---|---|", *rows]


def readme(kept: Mapping[str, Any]) -> str:
    """README's text with the table made from the kept figures.

    Answers that other programs may have disturbed are marked, and a line explains the mark.
    """
    lines = [*_rows(kept, {name: row.brief for name, row in ROWS.items()}), TEXTS]
    if any(is_doubtful(its) for its in kept.values()):
        lines += ["", _DOUBT]
    return filled(README, {"measured": "\n".join(lines)})


def results(kept: Mapping[str, Any]) -> str:
    """The text of docs/results.md with README's rows: longer answers, figures and origins."""
    answers = _rows(kept, {name: row.answer for name, row in ROWS.items()})
    lines = ["| README's row | figures | command | machine, date, commit |", "|---|---|---|---|"]
    for name, row in ROWS.items():
        its = kept[name]
        figures = ", ".join(f"{what} {value:.4g}" for what, value in its["figures"].items())
        commands = "<br>".join(f"`{command}`" for command in its["commands"])
        share = its["others_share"]
        busy = "" if share is None else f", other programs {share:.0%}"
        where = f"{its['cpu']}, {its['date']}, {its['commit']}{busy}"
        lines.append(f"| {row.question} | {figures} | {commands} | {where} |")
    return filled(RESULTS, {"answers": "\n".join(answers), "readme": "\n".join(lines)})


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", default="", metavar="ROW,...", help=f"{', '.join(ROWS)}, all")
    asked = [name for name in parser.parse_args().measure.split(",") if name]
    names = list(ROWS) if asked == ["all"] else asked
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"--measure {unknown[0]}: must be some of {', '.join(ROWS)}, or all")
    kept = load()
    failed = measure(names, kept)
    README.write_text(readme(kept), encoding="utf-8")
    RESULTS.write_text(results(kept), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
