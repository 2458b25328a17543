"""The model card's words around the measured numbers."""

from __future__ import annotations

from typing import Any

TEMPLATE = """\
# Demo pair: target.gguf and draft.gguf

A small trained pair that ships with the package, so that every feature works on a fresh machine
without a download and acceptance rates are real. It continues Python source and nothing else:
it answers no questions and its code is not meant to be used. All numbers below were written by
`scripts/lab/run train measure` and are also in card.json.
Held-out files resemble trained ones (code page tables, test boilerplate, licence headers), so the
figures say little about Python code from elsewhere.

| | target | draft |
|---|---|---|
| GGUF architecture | deepseek2 (DeepSeek-V3 shape) | llama |
| parameters | {target_m:.2f}M | {draft_m:.2f}M |
| stored as | Q8_0, {target_mb:.1f} MB | Q8_0, {draft_mb:.1f} MB |
| layers, width | {t[n_layer]}, {t[embd]} | {d[n_layer]}, {d[embd]} |
| trained | {ts[steps]:,} steps, {tt:.1f}M tokens, {tmin:.0f} min | {ds[steps]:,} steps, \
{dt:.1f}M tokens, {dmin:.0f} min |
| bits per byte, held out | **{tb:.3f}** | **{db:.3f}** |
| largest logit difference, llama.cpp to torch, float32 | {tl:.1e} | {dl:.1e} |

- Target: multi-head latent attention (queries through rank {t[q_lora]}, keys and values through
  rank {t[kv_lora]}), the first layer dense, then {routed} layers of {t[n_exp]} routed experts of
  width {t[ff_exp]}, {t[n_used]} used, {t[n_shared]} shared, sigmoid gate with a balancing bias.
- Draft: {d[n_head]} heads of {d[head_dim]}, tied embeddings, {followed}.
- One tokeniser: byte-level BPE, GPT-2 pre-tokeniser, {t[n_vocab]:,} tokens, four of them special
  (`<|endoftext|>`, `<|im_start|>`, `<|im_end|>`, `<|pad|>`), chat template inside. llama.cpp and
  `tokenizers` cut {matches:,} of {lines:,} held-out lines alike.

## Agreement

The target continues {n_prompts} held-out prompts (prompts.json) greedily by {n_new} tokens each;
the draft's first choice, given the same text, is the target's token in
**{all:.1%}** of places ({code:.1%} on code, {prose:.1%} on prose).

## Data and licence

The .py files of CPython {python}'s standard library, tests included, of 200 bytes to 400 kB and
valid UTF-8, each content once: {train_files:,} files, {train_mb:.1f} MB. One path in {every}
(SHA-256 of the path relative to the library, modulo {every}, is 0) is held out: {held_files} files,
{held_mb:.2f} MB, none of them seen by the tokeniser or either model. CPython is under the Python
Software Foundation License 2.0 (PSF-2.0); the prompts quote it, and the weights are derived from
it and offered under the same terms.

## How trained

`scripts/lab/run train all`, torch {torch}, on {machine}, bfloat16 autocast.
{batch:,} tokens per step; sequences of 256, then 512, 1,024 and 2,048 tokens (the declared
context). Muon for hidden matrices, AdamW for the rest, linear warm-up, then linear decay to zero
over the time given. Seeds are fixed, but the length is wall-clock time, so a rerun gives another
pair of about this quality. Bits per byte are of the Q8_0 files, through llama.cpp, whole held-out
files in windows of 2,048 tokens moved by 1,536. The draft saw {n_continuations:,} continuations
of {n_continued} tokens, made by the target from training text.
{notes}

The aim was at most 1.30 bits per byte for the target and an agreement of at least 60 %:
{verdict}
"""


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
    return TEMPLATE.format(
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
