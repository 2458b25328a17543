"""Flags of llama.cpp's other tools, which no server or chat is given: named, and refused."""

from __future__ import annotations

from specoffload.config.flags.foreign import Refused, switches, valued


def _of(tool: str) -> Refused:
    return Refused(f"it is a flag of llama.cpp's {tool}: leave it out")


FOREIGN = (
    *valued(
        _of("llama-imatrix"), "--in-file", "-ofreq --output-frequency", "--save-frequency",
        "--chunk --from-chunk", "--chunks",
    ),
    *switches(
        _of("llama-imatrix"), "--process-output", "--ppl !--no-ppl", "--show-statistics",
        "--parse-special",
    ),
    *switches(
        _of("llama-perplexity"), "--hellaswag", "--winogrande", "--multiple-choice",
        "--kl-divergence",
    ),
    *valued(
        _of("llama-perplexity"), "--hellaswag-tasks", "--winogrande-tasks",
        "--multiple-choice-tasks", "--save-all-logits --kl-divergence-base", "--ppl-stride",
        "--ppl-output-type",
    ),
    *valued(_of("llama-parallel"), "-ns --sequences"),
    *switches(_of("llama-download"), "--mtp", "--dflash", "--eagle3"),
    *valued(
        _of("llama-retrieval"), "--context-file", "--chunk-size", "--chunk-separator",
    ),
    *valued(_of("llama-passkey"), "--junk", "--pos"),
    *switches(
        _of("llama-tokenize"), "--ids", "--stdin", "--no-bos", "--no-parse-special", "--show-count",
    ),
    *valued(
        _of("llama-embedding"), "--embd-output-format", "--embd-separator", "--cls-separator",
    ),
    *valued(
        _of("llama-cvector-generator"), "--positive-file", "--negative-file", "--pca-batch",
        "--pca-iter", "--method",
    ),
    *valued(_of("llama-tts"), "--tts-lang", "--tts-speaker-file"),
    *valued(
        _of("llama-diffusion-cli"), "--diffusion-steps", "--diffusion-eps",
        "--diffusion-algorithm", "--diffusion-alg-temp", "--diffusion-block-length",
        "--diffusion-cfg-scale", "--diffusion-add-gumbel-noise",
    ),
    *switches(_of("llama-diffusion-cli"), "--diffusion-visual"),
    *valued(
        _of("llama-finetune"), "-lr --learning-rate", "-lr-min --learning-rate-min",
        "-decay-epochs --learning-rate-decay-epochs", "-wd --weight-decay",
        "-val-split --val-split", "-epochs --epochs", "-opt --optimizer",
    ),
    *switches(_of("llama-results"), "--check"),
    *switches(_of("llama-debug"), "--save-logits"),
    *valued(_of("llama-debug"), "--logits-output-dir", "--tensor-filter"),
)  # fmt: skip
