"""The steps of scripts/train-demo: each reads the work folder, does one thing, writes there."""

from __future__ import annotations

import argparse
import json

import numpy as np
import torch
from rich.console import Console

from train_demo.batches import Cursor, Replay, Stream
from train_demo.continuations import N_NEW, make_continuations
from train_demo.data import load_split, python_version
from train_demo.distill import distilling_loss
from train_demo.draft import Draft
from train_demo.export import export_pair
from train_demo.measure import measure_pair
from train_demo.prompts import pick_prompts, write_prompts
from train_demo.shapes import SEED, DraftShape, TargetShape
from train_demo.target import Target
from train_demo.tokenizer import encode_plain, encode_stream, load_tokenizer, train_tokenizer
from train_demo.train import FollowingFeed, Plan, TextFeed, pick_device, plain_loss, train

console = Console()
NEWLINE = "Ċ"  # as GPT-2's byte alphabet writes it


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


def run_prompts(arguments: argparse.Namespace) -> None:
    tokenizer = load_tokenizer(arguments.work / "tokenizer.json")
    split = load_split(arguments.stdlib)
    prompts = pick_prompts(split.held_out, lambda text: len(encode_plain(tokenizer, text)))
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_prompts(arguments.out / "prompts.json", prompts)
    kinds = [prompt.kind for prompt in prompts]
    console.print(f"prompts: {kinds.count('code')} code, {kinds.count('prose')} prose")


def run_target(arguments: argparse.Namespace) -> None:
    _prepare(arguments)
    device, dtype = pick_device()
    torch.manual_seed(SEED)
    plan = Plan(
        deadline_s=arguments.target_deadline_s,
        micro_tokens=arguments.micro_tokens,
        checkpoint=arguments.work / "target.pt",
        device=device,
        dtype=dtype,
    )
    tokens = np.load(arguments.work / "train.npy")
    feed = TextFeed(Stream(tokens, Cursor()), plain_loss(dtype))
    done = train(Target(TargetShape()), feed, plan)
    console.print(f"target: {done}")


def run_continuations(arguments: argparse.Namespace) -> None:
    """Lets the exported target continue training text; held-out text takes no part."""
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
    _prepare(arguments)
    device, dtype = pick_device()
    torch.manual_seed(SEED + 1)
    plan = Plan(
        deadline_s=arguments.draft_deadline_s,
        micro_tokens=arguments.micro_tokens,
        checkpoint=arguments.work / "draft.pt",
        device=device,
        dtype=dtype,
        distill_from=arguments.distill_from,
    )
    tokens = np.load(arguments.work / "train.npy")
    feed = TextFeed(Stream(tokens, Cursor()), plain_loss(dtype))
    if arguments.distill_from < 1.0:
        teacher = Target(TargetShape())
        saved = torch.load(arguments.work / "target.pt", map_location="cpu", weights_only=True)
        teacher.load_state_dict(saved["model"])
        replay = Replay(np.load(arguments.work / "continuations.npy"), seed=len(tokens))
        distilling = distilling_loss(teacher.to(device), dtype)
        feed = FollowingFeed(feed.stream, feed.loss, arguments.distill_from, distilling, replay)
    done = train(Draft(DraftShape()), feed, plan)
    console.print(f"draft: {done}")


def run_export(arguments: argparse.Namespace) -> None:
    for path in export_pair(arguments.work, arguments.out):
        console.print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB")


def run_measure(arguments: argparse.Namespace) -> None:
    _prepare(arguments)
    measure_pair(arguments.work, arguments.out, load_split(arguments.stdlib), console)


def _prepare(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.threads)
    load_tokenizer(arguments.work / "tokenizer.json")
