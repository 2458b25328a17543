"""The model card: CARD.md from card.json's contents. It rounds, it never computes a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEMPLATE = Path(__file__).with_name("card.md")


def _verdict(bits: float, agreed: float) -> str:
    first = "reached" if bits <= 1.30 else "missed"
    second = "reached" if agreed >= 0.60 else "missed"
    return f"the first is {first} ({bits:.3f}), the second {second} ({agreed:.1%})."


def _followed(distill_from: float) -> str:
    if distill_from >= 1.0:
        return "trained on the text alone"
    share = 1.0 - distill_from
    return (
        f"the last {share:.0%} of its training in turns on the\n"
        "  target's distribution over text and on its greedy continuations of training text"
    )


def render_card(card: dict[str, Any]) -> str:
    """CARD.md from card.json's contents; it rounds, it never computes a figure of its own."""
    target, draft = card["target"], card["draft"]
    data, agreed, bits = card["data"], card["agreement"], card["bits_per_byte"]
    return TEMPLATE.read_text().format(
        t=target["shape"],
        d=draft["shape"],
        ts=target,
        ds=draft,
        target_m=target["parameters"] / 1e6,
        draft_m=draft["parameters"] / 1e6,
        target_mb=card["file_bytes"]["target"] / 1e6,
        draft_mb=card["file_bytes"]["draft"] / 1e6,
        tt=target["tokens"] / 1e6,
        dt=draft["tokens"] / 1e6,
        tmin=target["seconds"] / 60,
        dmin=draft["seconds"] / 60,
        tb=bits["target"],
        db=bits["draft"],
        tl=card["logit_difference"]["target"],
        dl=card["logit_difference"]["draft"],
        routed=target["shape"]["n_layer"] - target["shape"]["n_dense"],
        matches=card["tokenizer"]["matches"],
        lines=card["tokenizer"]["lines"],
        n_prompts=agreed["n_prompts"],
        n_new=agreed["n_new"],
        all=agreed["all"],
        code=agreed["code"],
        prose=agreed["prose"],
        python=card["python"],
        torch=card["torch"],
        machine=card["machine"],
        train_files=data["train_files"],
        train_mb=data["train_bytes"] / 1e6,
        held_files=data["held_out_files"],
        held_mb=data["held_out_bytes"] / 1e6,
        every=data["held_out_every"],
        batch=card["batch_tokens"],
        followed=_followed(draft["distill_from"]),
        n_continuations=card["continuations"]["sequences"],
        n_continued=card["continuations"]["n_new"],
        notes=f"\n{card['notes']}" if card["notes"] else "",
        verdict=_verdict(bits["target"], agreed["all"]),
    )
