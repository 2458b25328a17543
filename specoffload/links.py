"""The speeds of links from RAM to several devices, measured once and kept for later starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from offload.device import DeviceChoice
from offload.streaming.link_speed import link_speeds
from specoffload.kept import KeptFile, KeptLinks, today


def links_of(choices: Sequence[DeviceChoice], folder: Path | None, *, keep: bool) -> KeptLinks:
    """Return the speeds of these devices' links as kept in `folder`, or measure them.

    With `keep`, a new measurement is kept in `folder`. Raises DoesNotFit or DeviceFailed.
    """
    kept = kept_links(choices, folder)
    if kept is not None:
        return kept
    speeds = link_speeds(choices)
    new = KeptLinks([*speeds.alone], [*speeds.together], today())
    if folder is not None and keep:
        KeptFile(folder).update(lambda kept: kept.links.update({link_key(choices): new}))
    return new


def kept_links(choices: Sequence[DeviceChoice], folder: Path | None) -> KeptLinks | None:
    """Return the speeds of these devices' links as kept in `folder`, or None if none are kept."""
    return None if folder is None else KeptFile(folder).load()[0].links.get(link_key(choices))


def link_key(choices: Sequence[DeviceChoice]) -> str:
    """Return the name of these devices among the kept links."""
    return ", ".join(f"{c.name}: {c.description}{c.sim or ''}" for c in choices)


def link_lines(choices: Sequence[DeviceChoice], links: KeptLinks) -> list[str]:
    """Return a line for each device with the speed of its link."""
    others = " while the others copy, too" if len(choices) > 2 else " while the other copies, too"
    found = []
    for choice, alone, together in zip(choices, links.alone, links.together, strict=True):
        line = f"link to {choice.name}: {alone / 1e9:.1f} GB/s from RAM"
        if len(choices) > 1:
            line += f", {together / 1e9:.1f} GB/s{others}"
        found.append(f"{line} (measured on {links.date})")
    return found
