"""Times the cases of docs/gpu.md's virtual table on a card, beside the virtual and planned times.

lab.gpu_cases has the cases, which `scripts/lab/run virtual-gpu` times in virtual time. The plan's
times are for this card: they use the measured rate of the link, and the hits that were counted.
"""

from __future__ import annotations

import re
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from link import measure_link
from setting import Setting
from timed_parts import LeftOut

from lab.gpu_cases import MODEL, SETUPS, SMALL, Setup, Timed, options_of, predicted_s
from lab.virtual_gpu import kept_steps_s
from offload.device import devices
from offload.engine import open_engine
from offload.errors import OffloadError
from offload.model import ModelFacts
from offload.model_file import read_facts
from offload.times.machine import TYPICAL, Machine, vram_seen
from specoffload.config.hardware_parts import CARDS

_LEAST_S = 45.0  # to write the model and time one setup
_OTHERS = "Ti|SUPER|Laptop|D|NVL|PCIe"  # words after a card's name that make it another card


def measure(setting: Setting) -> bool:
    """Fill `steps_table` of the report with a row per case. Raises LeftOut if no case was timed."""
    setting.least_s(_LEAST_S)
    args, report = setting.args, setting.report
    report["link"] = report["link"] or measure_link(
        setting.choice, (4 if args.small else 256) << 20
    )
    sim = setting.choice.sim
    rate = (sim.bandwidth_bytes_per_s if sim else None) or report["link"]["pinned_bytes_per_s"]
    card = card_named(setting.choice.description) if sim is None else None
    machine = machine_of(card, rate)
    rows: list[dict[str, Any]] = []
    report["steps_table"] = {"card": card, "machine": asdict(machine), "rows": rows}
    if card is None:
        setting.say("this card's rates are not known; the plan's times are for a typical card")
    path = setting.model("steps-table-small" if args.small else "steps-table", "qwen3-30b-a3b", 3,
                         routing="drifting", **(SMALL if args.small else MODEL))  # fmt: skip
    try:
        _measure_setups(setting, path, machine, rows)
    finally:
        if args.model_dir is None:
            path.unlink()  # later parts need the disk
    setting.show("steps; vs plan = step / plan, vs virtual = step / virtual", rows)
    if not any("step_s" in row for row in rows):
        raise LeftOut("no case was timed: " + rows[-1]["left_out"])
    return True


def _measure_setups(
    setting: Setting, path: Path, machine: Machine, rows: list[dict[str, Any]]
) -> None:
    """Add the rows of each setup for which there are devices and time, and save them."""
    facts, names, longest_s = read_facts(path), device_names(setting), 0.0
    card = setting.report["steps_table"]["card"]
    virtual_s = {} if setting.args.small else kept_steps_s(card)  # of another model
    for setup in SETUPS:
        began_s, why = time.monotonic(), ""
        if setup.n_devices > len(names):
            why = f"it needs {setup.n_devices} GPUs"
        elif not setting.args.small and setting.left_s() < longest_s:
            why = f"{setting.left_s():.0f} s are left"
        if not why:
            try:
                _measure_setup(setting, path, facts, setup, names, machine, virtual_s, rows)
            except OffloadError as e:
                why = str(e)
        if why:
            rows.append({"setup": setup.name, "left_out": why})
            setting.say(f"{setup.name} is left out: {why}")
        setting.save()
        longest_s = max(longest_s, time.monotonic() - began_s)


def _measure_setup(
    setting: Setting, path: Path, facts: ModelFacts, setup: Setup, names: list[str],
    machine: Machine, virtual_s: dict[tuple[str, str], float], rows: list[dict[str, Any]],
) -> None:  # fmt: skip
    if setting.args.small:
        n_prompts = {512: 32, 4096: 128}
        setup = replace(setup, prompts=tuple(n_prompts[n] for n in setup.prompts), n_ubatch=64)
    with open_engine(path, options_of(facts, setup, names, setting.args.threads)) as engine:
        timed = Timed(setup, engine)
        list(timed.rows(0))  # for warm-up: captures graphs, and fills slots
        for found in timed.rows(1):
            plan_s = predicted_s(machine, facts, setup, found.case, found.shares, found.hit_share)
            row: dict[str, Any] = {
                "setup": setup.name, "case": found.case, "step_s": found.step_s, "plan_s": plan_s,
                "vs_plan": found.step_s / plan_s, "virtual_s": None, "vs_virtual": None,
                "hit_share": found.hit_share, "streamed_bytes": found.copied_bytes,
                "router_reads": found.router_reads,
            }  # fmt: skip
            if (seconds := virtual_s.get((setup.name, found.case))) is not None:
                row |= {"virtual_s": seconds, "vs_virtual": found.step_s / seconds}
            rows.append(row)
            setting.save()
            setting.say(f"{setup.name}, {found.case}: {1e3 * found.step_s:.3g} ms")


def device_names(setting: Setting) -> list[str]:
    """The chosen device, then a second one if there is one: another GPU, or a second `sim`."""
    first = setting.choice
    if first.sim is not None:
        return [first.name, first.name]
    return [first.name, *(d.name for d in devices() if d.on_gpu and d.name != first.name)]


def card_named(description: str) -> str | None:
    """The name in `CARDS` of the card that a driver describes, or None if it is not there."""
    for name in sorted(CARDS, key=len, reverse=True):
        if re.search(rf"\b{re.escape(name)}\b(?! ({_OTHERS})\b)", description, re.IGNORECASE):
            return name
    return None


def machine_of(card: str | None, link_bytes_per_s: float) -> Machine:
    """The plan's machine with a card of `CARDS` (None: a typical one) behind a measured link."""
    machine = replace(TYPICAL, link_bytes_per_s=link_bytes_per_s)
    if card is None:
        return machine
    _, vram_gbs, tflops = CARDS[card]
    return replace(machine, vram_bytes_per_s=vram_seen(vram_gbs * 1e9), gpu_flops=tflops * 1e12)
