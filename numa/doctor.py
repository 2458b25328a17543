"""Finds what keeps memory reads from being local on this machine. Prints nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from numa.machine import read_setting
from numa.threads import ThreadPlan
from numa.topology import ONE_NODE, Topology, format_list


@dataclass(frozen=True)
class Finding:
    """A finding on this machine. `sentence` describes it, and `advice` says what to do.

    `code` identifies the kind of finding for scripts, and does not change. `severity` is
    "bad" if decodes slow down by a large factor, "warn" if somewhat, "info" if not at all.
    """

    code: str
    severity: Literal["bad", "warn", "info"]
    sentence: str
    advice: str


def diagnose(
    topology: Topology,
    plan: ThreadPlan,
    setting: Callable[[str], int | None] = read_setting,
) -> list[Finding]:
    """All findings, worst first.

    `setting` returns the number in a file below /proc/sys, or None if there is none.
    """
    findings: list[Finding] = []

    def find(code: str, severity: Literal["bad", "warn"], sentence: str, advice: str) -> None:
        findings.append(Finding(code, severity, sentence, advice))

    if not topology.from_kernel:
        find(
            "no-node-files",
            "warn",
            "the kernel describes no memory nodes here (a container hides them), so the machine is"
            " taken for one node",
            "mount /sys/devices/system/node into the container if the host has several",
        )
        return findings
    if not topology.is_numa:
        return [Finding("one-node", "info", ONE_NODE, "nothing to do")]
    if not topology.ggml_is_numa:
        find(
            "ggml-blind",
            "bad",
            "node numbers have a gap, so ggml counts one node and lets threads steal rows from each"
            " other",
            "use --numa interleave, which does not depend on who reads what",
        )
    if setting("kernel/numa_balancing"):
        find(
            "numa-balancing",
            "warn",
            "kernel.numa_balancing is on: the kernel unmaps pages to see who reads them and moves"
            " them about (our memory is exempt where mbind works)",
            "sysctl kernel.numa_balancing=0",
        )
    if setting("vm/zone_reclaim_mode"):
        find(
            "zone-reclaim",
            "warn",
            "vm.zone_reclaim_mode is on: a full node throws out page cache before it uses the other"
            " node's free memory",
            "sysctl vm.zone_reclaim_mode=0",
        )
    nodes = set(plan.decode.nodes)
    for gpu in topology.gpus:
        if gpu.node is not None and gpu.node not in nodes:
            find(
                "gpu-far",
                "warn",
                f"the GPU {gpu.address} hangs on node {gpu.node} and all threads run on"
                f" {format_list(tuple(nodes))}: each copy crosses the link between nodes",
                "use --numa single, which takes the GPU's node",
            )
    return findings
