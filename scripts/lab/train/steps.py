"""The steps of scripts/lab/run train. Each reads files of the work folder and writes others."""

from __future__ import annotations

import argparse
import json

import numpy as np
import torch
from rich.console import Console

from lab.train.corpus import load_split, pick_prompts, python_version, write_prompts
from lab.train.evaluate import make_continuations
from lab.train.export import Vocabulary, export_pair
from lab.train.measure import measure_mtp, measure_pair
from lab.train.model import LanguageModel
from lab.train.mtp import MtpLayer, Pool, PoolFeed, mtp_loss, read_target, write_with_layer
from lab.train.shapes import SEED, DraftShape, TargetShape
from lab.train.tokenizer import (
    encode_plain,
    encode_stream,
    load_tokenizer,
    tokenizer_of,
    train_tokenizer,
)
from lab.train.train import (
    Cursor,
    FollowingFeed,
    Plan,
    Replay,
    Stream,
    TextFeed,
    distilling_loss,
    pick_device,
    plain_loss,
    train,
)
from specoffload.draft_making.continuations import N_NEW

console = Console()
N_MTP_TEXTS = 500  # texts of 512 tokens that the layer for multi-token prediction learns from
NEWLINE = "Ċ"  # a newline in GPT-2's byte alphabet


def run_data(arguments: argparse.Namespace) -> None:
    split = load_split(arguments.stdlib)
    facts = {
        "python": python_version(),
        "train_files": len(split.train),
        "train_bytes": sum(source.n_bytes for source in split.train),
        "held_out_files": len(split.held_out),
        "held_out_bytes": sum(source.n_bytes for source in split.held_out),
    }
    arguments.work.mkdir(parents=True, exist_ok=True)
    (arguments.work / "data.json").write_text(json.dumps(facts, indent=1) + "\n")
    console.print(facts)


def run_tokenizer(arguments: argparse.Namespace) -> None:
    split = load_split(arguments.stdlib)
    tokenizer = train_tokenizer(split.train)
    tokenizer.save(str(arguments.work / "tokenizer.json"))
    stream = encode_stream(tokenizer, split.train)
    np.save(arguments.work / "train.npy", stream)
    n_bytes = sum(source.n_bytes for source in split.train)
    console.print(f"{len(stream)} training tokens, {n_bytes / len(stream):.2f} bytes each")


def run_reread(arguments: argparse.Namespace) -> None:
    """Restore the tokeniser and the training text of the exported target, without training."""
    vocabulary = Vocabulary.from_gguf(arguments.out / "target.gguf")
    arguments.work.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_of(vocabulary.tokens, vocabulary.merges)
    tokenizer.save(str(arguments.work / "tokenizer.json"))
    stream = encode_stream(tokenizer, load_split(arguments.stdlib).train)
    np.save(arguments.work / "train.npy", stream)
    console.print(f"{len(stream)} training tokens")


def run_prompts(arguments: argparse.Namespace) -> None:
    tokenizer = load_tokenizer(arguments.work / "tokenizer.json")
    split = load_split(arguments.stdlib)
    prompts = pick_prompts(split.held_out, lambda text: len(encode_plain(tokenizer, text)))
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_prompts(arguments.out / "prompts.json", prompts)
    kinds = [prompt.kind for prompt in prompts]
    console.print(f"prompts: {kinds.count('code')} code, {kinds.count('prose')} prose")


def run_target(arguments: argparse.Namespace) -> None:
    plan = _plan(arguments, "target", arguments.target_deadline_s, SEED)
    done = train(LanguageModel(TargetShape()), _text(arguments, plan), plan)
    console.print(f"target: {done}")


def run_continuations(arguments: argparse.Namespace) -> None:
    """Let the exported target continue training text. No held-out text is used."""
    export_pair(arguments.work, arguments.out)
    tokenizer = load_tokenizer(arguments.work / "tokenizer.json")
    newlines = [i for t, i in tokenizer.get_vocab().items() if t.endswith(NEWLINE)]
    rows = make_continuations(
        arguments.out / "target.gguf",
        np.load(arguments.work / "train.npy"),
        np.array(newlines),
        arguments.continuations_deadline_s,
        arguments.threads,
    )
    np.save(arguments.work / "continuations.npy", rows)
    console.print(f"continuations: {len(rows)} of {N_NEW} tokens")


def run_draft(arguments: argparse.Namespace) -> None:
    plan = _plan(arguments, "draft", arguments.draft_deadline_s, SEED + 1)
    feed = _text(arguments, plan)
    if plan.distill_from < 1.0:
        teacher = LanguageModel(TargetShape())
        saved = torch.load(arguments.work / "target.pt", map_location="cpu", weights_only=True)
        teacher.load_state_dict(saved["model"])
        replay = Replay(np.load(arguments.work / "continuations.npy"), seed=len(feed.stream.tokens))
        distilling = distilling_loss(teacher.to(plan.device), plan.dtype)
        feed = FollowingFeed(feed.stream, feed.loss, plan.distill_from, distilling, replay)
    done = train(LanguageModel(DraftShape()), feed, plan)
    console.print(f"draft: {done}")


def run_mtp(arguments: argparse.Namespace) -> None:
    """Train a layer for multi-token prediction on the exported target, and add it to the file."""
    plan = _plan(arguments, "mtp", arguments.mtp_deadline_s, SEED + 2)
    target, arrays = read_target(arguments.out / "target.gguf")
    layer = MtpLayer(TargetShape())
    layer.begin_like(target)
    stream = _text(arguments, plan).stream
    texts = stream.batch(N_MTP_TEXTS * 512, 512)[:, :-1]
    pools = [Pool(target, t, plan.dtype)
             for t in (np.load(arguments.work / "continuations.npy"), texts)]  # fmt: skip
    alone, both = (mtp_loss(target, pools, plan.dtype, with_own=own) for own in (False, True))
    feed = PoolFeed(stream, alone, both, tuple(pools), np.random.default_rng(SEED))
    done = train(layer, feed, plan)
    write_with_layer(arguments.out / "target.gguf", arrays, plan.checkpoint)
    console.print(f"mtp: {done}")
    if (arguments.out / "card.json").exists():
        measure_mtp(arguments.work, arguments.out, console)


def run_export(arguments: argparse.Namespace) -> None:
    for path in export_pair(arguments.work, arguments.out):
        console.print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB")


def run_measure(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.threads)
    measure_pair(arguments.work, arguments.out, load_split(arguments.stdlib), console)


def _plan(arguments: argparse.Namespace, name: str, deadline_s: float, seed: int) -> Plan:
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(seed)
    device, dtype = pick_device()
    return Plan(
        deadline_s=deadline_s,
        micro_tokens=arguments.micro_tokens,
        checkpoint=arguments.work / f"{name}.pt",
        device=device,
        dtype=dtype,
        peak=arguments.peak,
        distill_from=arguments.distill_from if name == "draft" else 1.0,
    )


def _text(arguments: argparse.Namespace, plan: Plan) -> TextFeed:
    """A new feed of the training text, from the beginning of the text."""
    tokens = np.load(arguments.work / "train.npy")
    return TextFeed(Stream(tokens, Cursor()), plain_loss(plan.dtype))
