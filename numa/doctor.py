"""The obstacles to local memory on this machine, as plain findings. Prints nothing.

`read_facts` looks, `diagnose` judges (pure), `strategy_shares` places a trial memory per strategy
and asks the kernel where its pages lie. "bad" costs a large factor, "warn" some, "info" is to know.
"""

import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from numa.cgroup import read_limits
from numa.errors import NumaError
from numa.memory import PlacedMemory
from numa.pinning import Team, ThreadPlan
from numa.place import NodeRead, Placement, locality, sampled_locality
from numa.sysfs import numbered, parse_size, read, read_int
from numa.topology import ONE_NODE, Topology, format_list

Severity = Literal["bad", "warn", "info"]

_GIB = 1 << 30
_STALE_CACHE_SHARE = 0.10


@dataclass(frozen=True)
class Finding:
    """One sentence on what is so, one on what to do; `code` is stable for scripts."""

    code: str
    severity: Severity
    sentence: str
    advice: str


@dataclass(frozen=True)
class Facts:
    """The kernel's answers besides the topology; None where it gives none.

    `cache_bytes` is the page cache per node, `map_cache_bytes` the pages per node of one model
    file mapped into this process. `lock_limit_bytes` None means unlimited.
    """

    numa_balancing: int | None
    cache_bytes: Mapping[int, int]
    lock_limit_bytes: int | None
    cpuset_cpus: tuple[int, ...] | None
    map_cache_bytes: Mapping[int, int]
    zone_reclaim: int | None = None


def read_facts(root: Path | str = "/", model_path: str | None = None) -> Facts:
    """Read /proc and /sys below `root`; the lock limit is this process's own.

    `model_path` is a model file that this process has mapped, to see where its pages lie.
    Raises BadTopology for a file that is not what it should be.
    """
    base = Path(root)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Facts(
        numa_balancing=read_int(base, "proc/sys/kernel/numa_balancing"),
        cache_bytes=_page_cache(base),
        lock_limit_bytes=None if soft == resource.RLIM_INFINITY else soft,
        cpuset_cpus=read_limits(base).cpuset_cpus,
        map_cache_bytes=mapped_bytes(base, model_path) if model_path else {},
        zone_reclaim=read_int(base, "proc/sys/vm/zone_reclaim_mode"),
    )


def _page_cache(base: Path) -> dict[int, int]:
    found: dict[int, int] = {}
    for node in numbered(base, "sys/devices/system/node", "node"):
        name = f"sys/devices/system/node/node{node}/meminfo"
        for line in (read(base, name) or "").splitlines():
            words = line.split()
            if len(words) == 5 and words[2] == "FilePages:":
                found[node] = parse_size(f"{words[3]} {words[4]}", name)
    return found


def mapped_bytes(root: Path, path: str) -> dict[int, int]:
    """Bytes per node of a file's pages that this process has mapped, from /proc/self/numa_maps."""
    totals: dict[int, int] = {}
    for line in (read(root, "proc/self/numa_maps") or "").splitlines():
        words = line.split()
        if f"file={path}" not in words:
            continue
        fields = dict(w.split("=", 1) for w in words if "=" in w)
        page = int(fields.get("kernelpagesize_kB", "4")) << 10
        for key, value in fields.items():
            if key[:1] == "N" and key[1:].isdigit():
                totals[int(key[1:])] = totals.get(int(key[1:]), 0) + int(value) * page
    return totals


def diagnose(
    topology: Topology, facts: Facts, plan: ThreadPlan, needed_bytes: int = 0
) -> list[Finding]:
    """Findings, worst first. `needed_bytes` is what the weights will take and pin, 0 if unknown."""
    found = [
        *_about_nodes(topology),
        *_about_threads(topology, facts, plan),
        *_about_memory(topology, facts, needed_bytes),
        *_about_gpus(topology, plan),
    ]
    rank = {"bad": 0, "warn": 1, "info": 2}
    return sorted(found, key=lambda f: rank[f.severity])


def _about_nodes(topology: Topology) -> list[Finding]:
    if not topology.from_kernel:
        return [
            Finding(
                "no-node-files",
                "warn",
                "the kernel describes no memory nodes here (a container hides them), so the"
                " machine is taken for one node",
                "mount /sys/devices/system/node into the container if the host has several",
            )
        ]
    if not topology.is_numa:
        return [
            Finding(
                "one-node",
                "info",
                ONE_NODE,
                "nothing to do",
            )
        ]
    if not topology.ggml_is_numa:
        return [
            Finding(
                "ggml-blind",
                "bad",
                "node numbers have a gap, so ggml counts one node and lets threads steal rows"
                " from each other",
                "use --numa interleave, which does not depend on who reads what",
            )
        ]
    return []


def _about_threads(topology: Topology, facts: Facts, plan: ThreadPlan) -> list[Finding]:
    found: list[Finding] = []
    for team in (plan.decode, plan.batch):
        n_shared = _n_oversubscribed(topology, team)
        if n_shared:
            found.append(
                Finding(
                    "smt-oversubscribed",
                    "warn",
                    f"{team.name}: {n_shared} of {team.n_threads} threads share a physical core"
                    " with another, which reads memory no faster and lengthens every barrier",
                    f"use --threads {team.n_threads - n_shared}",
                )
            )
    if facts.cpuset_cpus is not None:
        lost = sorted(
            c for c in (*plan.decode.cpus, *plan.batch.cpus) if c not in set(facts.cpuset_cpus)
        )
        if lost:
            found.append(
                Finding(
                    "cpuset-changed",
                    "bad",
                    f"the cpuset no longer contains processors {format_list(tuple(lost))} of the"
                    " thread plan; the kernel runs their threads elsewhere",
                    "restart, or give the processors back",
                )
            )
    return found


def _n_oversubscribed(topology: Topology, team: Team) -> int:
    core_of = {cpu: i for i, core in enumerate(topology.cores) for cpu in core.cpus}
    used = [core_of[cpu] for cpu in team.cpus if cpu in core_of]
    return len(used) - len(set(used))


def _about_memory(topology: Topology, facts: Facts, needed_bytes: int) -> list[Finding]:
    found: list[Finding] = []
    if topology.is_numa and facts.numa_balancing:
        found.append(
            Finding(
                "numa-balancing",
                "warn",
                f"kernel.numa_balancing is {facts.numa_balancing}: the kernel unmaps pages to see"
                " who reads them and moves them about (our memories are exempt where mbind works)",
                "sysctl kernel.numa_balancing=0",
            )
        )
    if topology.is_numa and facts.zone_reclaim:
        found.append(
            Finding(
                "zone-reclaim",
                "warn",
                f"vm.zone_reclaim_mode is {facts.zone_reclaim}: a full node throws out page cache"
                " before it uses the other node's free memory",
                "sysctl vm.zone_reclaim_mode=0",
            )
        )
    found += _about_cache(topology, facts)
    if needed_bytes and facts.lock_limit_bytes is not None:
        limit = facts.lock_limit_bytes
        if limit < needed_bytes:
            found.append(
                Finding(
                    "memlock",
                    "warn",
                    f"this process may lock {limit / _GIB:.2f} GiB and the weights take"
                    f" {needed_bytes / _GIB:.2f} GiB, so pinning them for the GPU may be refused",
                    "ulimit -l unlimited (docker: --ulimit memlock=-1)",
                )
            )
    limit_bytes = topology.memory_limit_bytes
    if needed_bytes and limit_bytes is not None and limit_bytes < needed_bytes:
        found.append(
            Finding(
                "memory-limit",
                "bad",
                f"the control group allows {limit_bytes / _GIB:.2f} GiB and the weights take"
                f" {needed_bytes / _GIB:.2f} GiB",
                "raise the memory limit of the container",
            )
        )
    return found


def _about_cache(topology: Topology, facts: Facts) -> list[Finding]:
    """Page cache stays where its first reader ran, for whoever maps the file (llama.cpp #11744)."""
    if not topology.is_numa:
        return []
    mapped = {n: b for n, b in facts.map_cache_bytes.items() if b}
    total = sum(mapped.values())
    if total and max(mapped.values()) > 0.8 * total:
        node = max(mapped, key=lambda n: mapped[n])
        share = mapped[node] / total
        return [
            Finding(
                "stale-page-cache",
                "bad",
                f"{share:.0%} of the model's {total / _GIB:.2f} GiB in the page cache lie on node"
                f" {node}, so a mapped model is read remotely by the other nodes' threads",
                "use a strategy of ours (rows), or drop the cache: sysctl vm.drop_caches=3",
            )
        ]
    for owner in topology.nodes:
        cached = facts.cache_bytes.get(owner.id, 0)
        if owner.memory_bytes and cached > _STALE_CACHE_SHARE * owner.memory_bytes:
            return [
                Finding(
                    "page-cache",
                    "info",
                    f"node {owner.id} holds {cached / _GIB:.1f} GiB of page cache from earlier"
                    " reads; a file that is in it stays on that node",
                    "nothing for our own memory; for mapped models sysctl vm.drop_caches=3",
                )
            ]
    return []


def _about_gpus(topology: Topology, plan: ThreadPlan) -> list[Finding]:
    found: list[Finding] = []
    nodes = set(plan.decode.nodes)
    for gpu in topology.gpus:
        if gpu.node is None or not topology.is_numa or nodes == set(topology.memory_nodes):
            continue
        if gpu.node not in nodes:
            found.append(
                Finding(
                    "gpu-far",
                    "warn",
                    f"the GPU {gpu.address} hangs on node {gpu.node} and all threads run on"
                    f" {format_list(tuple(nodes))}: each copy crosses the link between nodes",
                    f"use --numa-node {gpu.node}",
                )
            )
    if found or not topology.is_numa:
        return found
    return [
        Finding(
            "gpu-node",
            "info",
            f"the GPU {gpu.address} hangs on node {gpu.node}; weights on other nodes reach it over"
            " the link between nodes",
            "nothing to do",
        )
        for gpu in topology.gpus
        if gpu.node is not None
    ]


@dataclass(frozen=True)
class StrategyShare:
    """Where a strategy's pages really lie: `per_node` counts sampled pages.

    `local_share` is the share of the bytes read from them that lie with their reader, None with a
    note where the kernel would not say; `computed_share` is what the placement should give.
    """

    strategy: str
    local_share: float | None
    computed_share: float
    per_node: Mapping[int, int]
    notes: tuple[str, ...]


def strategy_shares(
    trials: Sequence[tuple[Placement, Sequence[NodeRead]]],
    cpus_of_node: Mapping[int, Sequence[int]],
    progress: Callable[[str], None] = lambda _: None,
) -> list[StrategyShare]:
    """Place a trial memory for each (placement, who reads what at one token) and sample its pages.

    Takes as much memory as the largest placement, for a moment. Refusals become notes.
    """
    found: list[StrategyShare] = []
    for placement, wanted in trials:
        name = str(placement.strategy)
        progress(name)
        computed = locality(placement, wanted)
        try:
            with PlacedMemory(placement.size_bytes) as memory:
                report = memory.apply(placement, cpus_of_node)
                offsets, nodes = memory.sample()
            per_node = {n: nodes.count(n) for n in sorted(set(nodes)) if n >= 0}
            share = sampled_locality(offsets, nodes, wanted)
            found.append(StrategyShare(name, share, computed, per_node, report.notes))
        except NumaError as error:
            found.append(StrategyShare(name, None, computed, {}, (str(error),)))
    return found
