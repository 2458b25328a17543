"""Measures the exported pair on held-out text through llama.cpp, and writes its model card."""

from __future__ import annotations

import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from rich.console import Console
from rich.progress import track

from lab.options import engine_options
from lab.train.card import render_card
from lab.train.corpus import (
    HELD_OUT_EVERY,
    Prompt,
    SourceFile,
    Split,
    python_version,
    read_prompts,
)
from lab.train.evaluate import (
    N_AGREED,
    N_PROMPT,
    LlamaModel,
    agreement,
    likelihood,
    own_agreement,
)
from lab.train.export import export_one, shape_of
from lab.train.model import LanguageModel
from lab.train.shapes import EOS_ID, N_CTX, SEED
from lab.train.tokenizer import load_tokenizer
from lab.train.train import BATCH_TOKENS
from offload.engine import open_engine
from offload.model import layer_of
from offload.model_file import read_facts
from specoffload.commands.bench import machine

N_LINES = 1000
N_LOGIT_TOKENS = 512
N_CHECK_FILES = 3
N_CHECK_PROMPTS = 10


def bits_per_byte(model: LlamaModel, sources: tuple[SourceFile, ...], console: Console) -> float:
    parts = [likelihood(model, s.text) for s in track(sources, "bits per byte", console=console)]
    n_bytes = sum(part.n_bytes for part in parts)
    return float(sum(part.nats for part in parts) / np.log(2.0) / n_bytes)


def logit_difference(work: Path, name: str, text: str) -> float:
    """Largest |llama.cpp - torch| over held-out logits, float32 weights and float32 cache."""
    path = work / f"{name}-f32.gguf"
    export_one(work, name, path, Kind.F32)
    opened = LlamaModel(path, exact_cache=True)
    ids = [EOS_ID, *opened.tokenize(text)][:N_LOGIT_TOKENS]
    theirs = opened.logits(ids)
    opened.close()
    saved = torch.load(work / f"{name}.pt", map_location="cpu", weights_only=True)
    model = LanguageModel(shape_of(saved)).eval()
    model.load_state_dict(saved["model"])
    with torch.no_grad():
        ours = model.logits(torch.tensor([ids]))[0].numpy()
    return float(np.abs(theirs - ours).max())


def tokenizer_matches(work: Path, model: LlamaModel, sources: tuple[SourceFile, ...]) -> int:
    """Number of `N_LINES` held-out lines that llama.cpp and `tokenizers` tokenise alike."""
    tokenizer = load_tokenizer(work / "tokenizer.json")
    lines = [line for s in sources for line in s.text.splitlines() if line.strip()]
    chosen = random.Random(SEED).sample(lines, N_LINES)
    return sum(model.tokenize(x) == tokenizer.encode(x).ids for x in chosen)


def _run_facts(checkpoint: Path) -> dict[str, Any]:
    saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
    done = saved["counters"]
    n_parameters = sum(v.numel() for k, v in saved["model"].items() if not k.endswith(".bias"))
    return {
        "parameters": n_parameters,
        "shape": saved["shape"],
        "steps": done["step"],
        "tokens": done["n_tokens"],
        "seconds": round(done["elapsed_s"]),
        "distill_from": saved.get("distill_from", 1.0),
    }


def _continuation_facts(work: Path) -> dict[str, int]:
    path = work / "continuations.npy"
    if not path.exists():
        return {"sequences": 0, "n_new": 0}
    n_sequences, length = np.load(path, mmap_mode="r").shape
    return {"sequences": n_sequences, "n_new": length - N_PROMPT}


def _notes(work: Path) -> str:
    """Remarks for the card by the person who trained, such as a changed deadline."""
    path = work / "notes.txt"
    return path.read_text().strip() if path.exists() else ""


def _check_files(
    target: LlamaModel, draft: LlamaModel, sources: tuple[SourceFile, ...]
) -> list[dict[str, Any]]:
    """Figures for a test to measure again: bits per byte of 1024 tokens of a few held-out files."""
    big_enough = [s for s in sources if s.n_bytes > 8000][:N_CHECK_FILES]
    return [
        {
            "path": s.path,
            "sha256": hashlib.sha256(s.text.encode()).hexdigest(),
            "n_tokens": 1024,
            "target_bits_per_byte": likelihood(target, s.text, 1024).bits_per_byte,
            "draft_bits_per_byte": likelihood(draft, s.text, 1024).bits_per_byte,
        }
        for s in big_enough
    ]


def _agreements(
    target: LlamaModel, draft: LlamaModel, prompts: list[Prompt], console: Console
) -> dict[str, Any]:
    shares = [
        agreement(target, draft, p.text) for p in track(prompts, "agreement", console=console)
    ]
    code = [share for share, p in zip(shares, prompts, strict=True) if p.kind == "code"]
    prose = [share for share, p in zip(shares, prompts, strict=True) if p.kind == "prose"]
    return {
        "n_prompts": len(prompts),
        "n_new": N_AGREED,
        "all": float(np.mean(shares)),
        "code": float(np.mean(code)),
        "prose": float(np.mean(prose)),
        "check_prompts": N_CHECK_PROMPTS,
        "check": float(np.mean(shares[:N_CHECK_PROMPTS])),
    }


def measure_mtp(work: Path, out: Path, console: Console) -> None:
    """Measure the target's own layer, and add its figures to OUT/card.json and OUT/CARD.md."""
    path = out / "card.json"
    card = json.loads(path.read_text())
    card["mtp"] = _mtp_facts(work, out, read_prompts(out / "prompts.json"), console)
    card["file_bytes"]["target"] = (out / "target.gguf").stat().st_size
    path.write_text(json.dumps(card, indent=1) + "\n")
    (out / "CARD.md").write_text(render_card(card))
    console.print(card["mtp"])


def _mtp_facts(
    work: Path, out: Path, prompts: list[Prompt], console: Console
) -> dict[str, Any] | None:
    """The layer's training figures, and how often its first token is the target's choice. None if
    no layer was trained."""
    if not (work / "mtp.pt").exists():
        return None
    options = engine_options(device="cpu", n_ctx=N_CTX, mtp=True)
    with open_engine(out / "target.gguf", options) as engine:
        shares = [
            own_agreement(engine, p.text) for p in track(prompts, "own layer", console=console)
        ]
    kinds = np.array([prompt.kind for prompt in prompts])
    facts = _run_facts(work / "mtp.pt")
    del facts["shape"], facts["distill_from"]
    return facts | {
        "file_bytes": _layer_bytes(out / "target.gguf"),
        "agreement": {
            "all": float(np.mean(shares)),
            **{kind: float(np.mean(np.array(shares)[kinds == kind])) for kind in ("code", "prose")},
            "check_prompts": N_CHECK_PROMPTS,
            "check": float(np.mean(shares[:N_CHECK_PROMPTS])),
        },
    }


def _layer_bytes(path: Path) -> int:
    facts = read_facts(path)
    places = facts.weights.values()
    return sum(p.entry.size_bytes for p in places if layer_of(p.entry.name) >= facts.n_layers)


def measure_pair(work: Path, out: Path, split: Split, console: Console) -> None:
    """Write OUT/card.json and OUT/CARD.md. Raises FileNotFoundError if `export` has not run."""
    target, draft = LlamaModel(out / "target.gguf"), LlamaModel(out / "draft.gguf")
    text = split.held_out[0].text
    card: dict[str, Any] = {
        "python": python_version(),
        "torch": torch.__version__.split("+")[0],
        "machine": f"{os.cpu_count()} cores ({machine()['cpu']})",
        "batch_tokens": BATCH_TOKENS,
        "data": json.loads((work / "data.json").read_text()) | {"held_out_every": HELD_OUT_EVERY},
        "target": _run_facts(work / "target.pt"),
        "draft": _run_facts(work / "draft.pt"),
        "continuations": _continuation_facts(work),
        "mtp": _mtp_facts(work, out, read_prompts(out / "prompts.json"), console),
        "notes": _notes(work),
        "file_bytes": {n: (out / f"{n}.gguf").stat().st_size for n in ("target", "draft")},
        "tokenizer": {
            "lines": N_LINES,
            "matches": tokenizer_matches(work, target, split.held_out),
        },
        "logit_difference": {n: logit_difference(work, n, text) for n in ("target", "draft")},
        "agreement": _agreements(target, draft, read_prompts(out / "prompts.json"), console),
        "check_files": _check_files(target, draft, split.held_out),
        "bits_per_byte": {
            "target": bits_per_byte(target, split.held_out, console),
            "draft": bits_per_byte(draft, split.held_out, console),
        },
    }
    (out / "card.json").write_text(json.dumps(card, indent=1) + "\n")
    (out / "CARD.md").write_text(render_card(card))
    target.close()
    draft.close()
    console.print({k: card[k] for k in ("bits_per_byte", "agreement", "logit_difference")})
