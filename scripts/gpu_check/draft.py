"""Compares the draft in torch with libllama's.

First it checks equal results on tiny models of every architecture. Then it measures tokens per
second on a file of Qwen2.5-0.5B's shape, beside the rate that the device's bandwidth allows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from setting import Setting

from lab.options import engine_options
from lab.synth import write_preset
from offload.engine import open_engine
from offload.model_file import read_facts
from offload.times.steadiness import if_steady
from offload.times.table import entry_of
from offload.torch_draft.draft import Drafted, TorchDraft
from offload.torch_draft.plan import TorchDraftOptions
from specdec.drafters.model import ModelDrafter
from specdec.policies.rules import Fixed
from specdec.types import Drafter, DraftRequest

PRESETS = {"llama": "llama-3.3-70b", "qwen2": "qwen2.5-0.5b", "qwen3": "qwen3-0.6b"}
N_PROMPTS, N_STEPS, N_CTX = 40, 8, 512
# Largest allowed differences of probabilities: with f32, with bf16, and with captured steps.
ALLOWED = {"f32": 1e-3, "bf16": 2e-2, "graphs": 1e-5}
AIM_VS_LLAMA, AIM_SHARE, AIM_K = 2.0, 0.5, 8
_N_WARM = 16  # untimed drafts: read the prompt, capture steps, reach the usual block length
_BANDWIDTH_BYTES = 512 << 20
_NOT_READ = ("turns", "inputs", "out", "rows", "draws", "kept", "kv")


def measure(setting: Setting, device: str) -> bool:
    """Fill `draft` of the report. True if torch computes what libllama computes."""
    args, found = setting.args, setting.report["draft"]
    equality = found["equality"] = list(equality_of(device, setting.folder))
    setting.show("drafts are equal; worst = largest difference of a probability", equality)
    size = "tiny" if args.small else "full"
    name = f"draft-{size}-{args.quant}"
    path = setting.model(name, "qwen2.5-0.5b", 7, size=size, quant=args.quant)
    found |= measure_speeds(
        path, setting.choice.name if setting.choice.on_gpu else "cpu",
        TorchDraftOptions(device, dtype=args.type, n_threads=args.threads),
        [int(n) for n in args.k.split(",")],
        depth=args.depth, repetitions=args.repetitions, n_kept=args.kept,
    )  # fmt: skip
    rate = found["bandwidth_bytes_per_s"]
    setting.show(f"drafting; ceiling = {rate / 1e9:.1f} GB/s / bytes read", found["rows"])
    setting.show("engines", found["speeds"])
    if not args.small:
        setting.report["aims"] |= aims(found)
    return all(row["passed"] for row in equality)


def equality_of(device: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yields a row for each comparison of drafts on tiny models.

    f32 and bf16 on the device are compared with f32 on the CPU. On a GPU, captured steps are
    also compared with the same steps run kernel by kernel.
    """
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 512, n).tolist() for n in rng.integers(1, 60, N_PROMPTS)]
    for name, preset in PRESETS.items():
        path = write_preset(preset, folder / f"{name}.gguf", quant="bf16", seed=4)

        def drafts(options: TorchDraftOptions, path: Path = path) -> list[Drafted]:
            found = []
            with TorchDraft(path, options) as draft:
                for prompt in prompts:
                    draft.rewind(0, 0)
                    found.append(draft.draft([(0, prompt)], N_STEPS))
            return found

        exact = drafts(TorchDraftOptions("cpu", N_CTX, dtype="f32"))
        for dtype in ("f32", "bf16"):
            chosen = TorchDraftOptions(device, N_CTX, dtype=dtype)  # type: ignore[arg-type]
            fast = drafts(chosen)
            if (dtype, device) != ("f32", "cpu"):
                yield compare(f"{dtype} = CPU in f32", name, fast, exact, ALLOWED[dtype])
            if device != "cpu":
                slow = drafts(replace(chosen, graphs=False))
                yield compare(f"{dtype} graphs = eager", name, fast, slow, ALLOWED["graphs"])


def compare(
    what: str, model: str, got: Sequence[Drafted], expected: Sequence[Drafted], allowed: float
) -> dict[str, Any]:
    """A row that compares each draft up to its first different token, which must be a near-tie."""
    worst, n_tokens, n_other, near_ties = 0.0, 0, 0, 0
    for a, b in zip(got, expected, strict=True):
        for step in range(len(b.tokens)):
            n_tokens += 1
            if a.tokens[step, 0] != b.tokens[step, 0]:
                n_other += 1
                near_ties += bool(b.gap[step, 0] <= 2 * allowed)
                break
            worst = max(worst, abs(float(a.p[step, 0] - b.p[step, 0])))
    finite = all(np.isfinite(a.p).all() for a in got)
    passed = bool(finite and worst <= allowed and n_other == near_ties)
    return {"what": what, "model": model, "worst": worst, "allowed": allowed,
            "n_tokens": n_tokens, "n_other": n_other, "near_ties": near_ties,
            "passed": passed}  # fmt: skip


def measure_speeds(
    path: Path,
    ggml_device: str,
    options: TorchDraftOptions,
    k: Sequence[int],
    *,
    depth: int,
    repetitions: int,
    n_kept: int,
) -> dict[str, Any]:
    """Measure tokens per second of drafts of each length in `k` after `depth` tokens, by engine.
    Returns the speeds and the tables' rows.

    `options` are the torch draft's. It is also measured with a vocabulary of `n_kept` tokens.
    """
    n_ctx = -(-(depth + (repetitions + 3) * (max(k) + 4)) // 256) * 256
    options = replace(options, n_ctx=n_ctx)
    llama = engine_options(
        device=ggml_device, wrapped=False, stream_experts=False, n_ctx=n_ctx,
        n_threads=options.n_threads, n_threads_batch=options.n_threads,
    )  # fmt: skip
    with open_engine(path, llama) as engine:
        tokens_per_s, spreads = {}, {}
        for n in k:
            drafter: Drafter = ModelDrafter(engine.sequences)
            tokens_per_s[n], spreads[n] = _timed(drafter, engine.n_vocab, n, depth, repetitions)
            engine.sequences.rewind(0, 0)
    speeds: list[dict[str, Any]] = [
        {
            "name": "libllama",
            "tokens_per_s": tokens_per_s,
            "spread": spreads,
            "step_bytes": read_facts(path).size_bytes,
        }
    ]
    variants = {"torch": options}
    if options.device != "cpu":
        variants["torch, no graphs"] = replace(options, graphs=False)
    variants[f"torch, {n_kept} kept"] = replace(options, kept=tuple(range(n_kept)))
    for name, chosen in variants.items():
        speeds.append({"name": name, **_torch_speed(path, chosen, k, depth, repetitions)})
    bytes_per_s = bandwidth(options.device)
    rows = []
    for n in k:
        for speed in speeds:
            ceiling, reached = bytes_per_s / speed["step_bytes"], speed["tokens_per_s"][n]
            rows.append({
                "k": n, "engine": speed["name"], "tokens_per_s": reached,
                "ceiling_tokens_per_s": ceiling, "share_of_ceiling": reached / ceiling,
                "vs_llama": if_steady(
                    reached / speeds[0]["tokens_per_s"][n],
                    speed["spread"][n], speeds[0]["spread"][n],
                ),
            })  # fmt: skip
    return {"bandwidth_bytes_per_s": bytes_per_s, "speeds": speeds, "rows": rows}


def _torch_speed(
    path: Path, options: TorchDraftOptions, k: Sequence[int], depth: int, repetitions: int
) -> dict[str, Any]:
    on_gpu = options.device != "cpu"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(options.device)
    tokens_per_s, spreads = {}, {}
    with TorchDraft(path, options) as draft:
        layout = draft.layout
        # Bytes that a step of one sequence must read: matrices, and the KV of `depth` tokens.
        tied = draft.shape.tied and "output" not in layout.pieces
        not_read = (*_NOT_READ, *(() if tied else ("token_embd",)))
        weights = sum(p.size_bytes for name, p in layout.pieces.items() if name not in not_read)
        for n in k:
            drafter = ModelDrafter(draft)
            tokens_per_s[n], spreads[n] = _timed(drafter, draft.n_vocab, n, depth, repetitions)
            draft.rewind(0, 0)
        speed = {
            "tokens_per_s": tokens_per_s,
            "spread": spreads,
            "step_bytes": weights + layout.kv_bytes * depth // (draft.n_ctx + 1),
            "planned_bytes": layout.total_bytes,
            "counters": dict(vars(draft.counters)),
        }
    if on_gpu:
        speed["taken_bytes"] = torch.cuda.max_memory_reserved(options.device)
        speed["left_bytes"] = torch.cuda.memory_reserved(options.device)
    return speed


def _timed(
    drafter: Drafter, n_vocab: int, k: int, depth: int, repetitions: int
) -> tuple[float, float]:
    """Tokens per second of drafts of `k` tokens, each after one or two new tokens; their spread."""
    rng = np.random.default_rng(k)
    history = rng.integers(0, n_vocab, depth).tolist()
    policy, times = Fixed(k), []
    for repetition in range(repetitions + _N_WARM):
        began = time.perf_counter()
        draft = drafter.propose([DraftRequest(0, history, policy, k)])[0]
        took = time.perf_counter() - began
        if repetition >= _N_WARM:
            times.append(took)
        history += [*draft.tokens[: (k - 1) * (repetition % 2)], int(rng.integers(n_vocab))]
    return k / statistics.median(times), entry_of(times).spread


def bandwidth(device: str) -> float:
    """Bytes per second of device memory: the best of a few copies, counting reads and writes."""
    source = torch.zeros(_BANDWIDTH_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(9):
        began = time.perf_counter()
        target.copy_(source)
        if device != "cpu":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return 2 * _BANDWIDTH_BYTES / min(times)


def aims(found: dict[str, Any]) -> dict[str, bool]:
    """Whether each speed aim was reached. A missed aim does not fail the check."""
    reached = {}
    for row in found["rows"]:
        if (row["k"], row["engine"]) == (AIM_K, "torch"):
            ratio, share = row["vs_llama"], row["share_of_ceiling"] >= AIM_SHARE
            faster = ratio is not None and ratio >= AIM_VS_LLAMA
            reached[f"draft: at least {AIM_VS_LLAMA:g} x libllama at k = {AIM_K}"] = faster
            reached[f"draft: at least {AIM_SHARE:.0%} of the ceiling at k = {AIM_K}"] = share
    speed = found["speeds"][1]
    if "taken_bytes" in speed:
        reached["draft: no more memory than planned"] = (
            speed["taken_bytes"] <= speed["planned_bytes"]
        )
        reached["draft: all memory given back on close"] = speed["left_bytes"] == 0
    return reached
