"""Looking at a machine twice and deciding twice gives the same layout, also in another process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from lab.options import Streaming, engine_options
from lab.synth import write_preset
from lab.synth.mtp import write_mtp
from offload.model_file import read_facts
from offload.plan.decision import decide
from offload.plan.layout import Layout
from offload.plan.weights import device_bytes
from offload.probe import probe

KIB = 1 << 10
_FREE = re.compile(r"\bfree_bytes=\d+")  # changes with what other programs do


def layouts_of(on_one: str | Path, on_three: str | Path) -> list[Layout]:
    """Probe this machine and decide, for a file on one device and for one on three."""
    found = []
    for path, n_devices, part in ((on_one, 1, 0.7), (on_three, 3, 0.5)):
        facts = read_facts(Path(path))
        size_bytes = device_bytes(facts)
        device = f"sim:vram={int(part * size_bytes / KIB)}KiB"
        options = engine_options(
            device=",".join([device] * n_devices), n_ctx=256, n_threads=1, mtp=True,
            streaming=Streaming(hybrid=True),
            ram_bytes=int(0.7 * size_bytes),
        )  # fmt: skip
        layout = decide(facts, probe(facts, options).found, options.wanted)
        assert len(layout.local) == n_devices
        found.append(layout)
    return found


def test_probing_and_deciding_twice_give_the_same(models: Path) -> None:
    """Sets have another order in the other process."""
    paths = [
        write_mtp(models, "glm4moe"),
        write_preset("gpt-oss-120b", models / "decided.gguf", size="tiny", seed=3, n_layer=6),
    ]
    first = layouts_of(*paths)
    assert layouts_of(*paths) == first
    assert any(layout.reads_disk for layout in first)
    code = (
        "import sys; from test_deciding_twice import layouts_of; print(layouts_of(*sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, paths)], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    texts = [_FREE.sub("", text) for text in (done.stdout.strip(), str(first))]
    assert texts[0] == texts[1], done.stderr
