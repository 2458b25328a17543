"""The steps of scripts/lab/run train: each reads the work folder, does one thing, writes there."""

from __future__ import annotations

import argparse
import json

import numpy as np
import torch
from rich.console import Console

from lab.train.batches import BLOCK, LONG_FROM, POOL_BLOCKS, Cursor, Replay, Stream
from lab.train.continuations import N_NEW, make_continuations
from lab.train.data import load_split, python_version
from lab.train.distill import distilling_loss
from lab.train.draft import Draft
from lab.train.export import export_pair
from lab.train.measure import measure_pair
from lab.train.prompts import pick_prompts, write_prompts
from lab.train.restore import DemoGGUF, torch_model
from lab.train.shapes import SEED, DraftShape, TargetShape
from lab.train.target import Target
from lab.train.tokenizer import encode_plain, encode_stream, load_tokenizer, train_tokenizer
from lab.train.train import FollowingFeed, Plan, TextFeed, pick_device, plain_loss, train

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
        peak=arguments.peak,
        earlier=_earlier(arguments, "target"),
    )
    feed = _text(arguments, plan)
    model = _pair_model(arguments, "target") if plan.earlier else Target(TargetShape())
    done = train(model, feed, plan)
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
        peak=arguments.peak,
        earlier=_earlier(arguments, "draft"),
        distill_from=arguments.distill_from,
    )
    feed = _text(arguments, plan)
    if arguments.distill_from < 1.0:
        teacher = Target(TargetShape())
        saved = torch.load(arguments.work / "target.pt", map_location="cpu", weights_only=True)
        teacher.load_state_dict(saved["model"])
        replay = Replay(np.load(arguments.work / "continuations.npy"), seed=len(feed.stream.tokens))
        distilling = distilling_loss(teacher.to(device), dtype)
        feed = FollowingFeed(
            feed.stream, feed.loss, feed.begins_at, arguments.distill_from, distilling, replay
        )
    model = _pair_model(arguments, "draft") if plan.earlier else Draft(DraftShape())
    done = train(model, feed, plan)
    console.print(f"draft: {done}")


def run_export(arguments: argparse.Namespace) -> None:
    for path in export_pair(arguments.work, arguments.out):
        console.print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB")


def run_measure(arguments: argparse.Namespace) -> None:
    _prepare(arguments)
    measure_pair(arguments.work, arguments.out, load_split(arguments.stdlib), console)


def _earlier(arguments: argparse.Namespace, name: str) -> dict[str, float]:
    """What the pair's card says was spent on its weights; empty for a run with new ones."""
    if not arguments.from_pair:
        return {}
    facts = json.loads((arguments.out / "card.json").read_text())[name]
    return {"step": facts["steps"], "n_tokens": facts["tokens"], "elapsed_s": facts["seconds"]}


def _pair_model(arguments: argparse.Namespace, name: str) -> Target | Draft:
    """The exported weights, whose tokens must be those of the training text."""
    read = DemoGGUF(arguments.out / f"{name}.gguf")
    ids = load_tokenizer(arguments.work / "tokenizer.json").get_vocab()
    if sorted(ids, key=ids.__getitem__) != list(read.vocabulary().tokens):
        raise SystemExit(f"{name}.gguf has other tokens than {arguments.work}: run `tokenizer`")
    return torch_model(read)


def _text(arguments: argparse.Namespace, plan: Plan) -> TextFeed:
    """Training text from its beginning, or from where an earlier run left it."""
    seen_pools = int(plan.earlier.get("n_tokens", 0)) // (POOL_BLOCKS * BLOCK)
    tokens = np.load(arguments.work / "train.npy")
    n_pools = -(-(len(tokens) // BLOCK) // POOL_BLOCKS)
    cursor = Cursor(*divmod(seen_pools, n_pools))
    begins_at = LONG_FROM if plan.earlier else 0.0
    return TextFeed(Stream(tokens, cursor), plain_loss(plan.dtype), begins_at)


def _prepare(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.threads)
    load_tokenizer(arguments.work / "tokenizer.json")
