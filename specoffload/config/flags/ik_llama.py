"""ik_llama.cpp's own flags; those that it shares with llama.cpp are in the other tables."""

from __future__ import annotations

from specoffload.config.flags.foreign import (
    ALREADY,
    Becomes,
    NoEffect,
    Refused,
    foreign,
    off_at,
    switches,
    valued,
)

_KERNELS = NoEffect("llama.cpp's kernels compute, which decide that by themselves")
_MLA = NoEffect("MLA is always used where the model has it, see --mla-crossover")
_ONE_GPU = NoEffect("one GPU is used: --device names it")
_TEXT_RULES = Refused("there are no such rules for an answer's text: leave it out")
_CHECKPOINTS = NoEffect("recurrent models keep prompts as --ctx-checkpoints says")
_STORED = NoEffect("what slots give up goes to host memory, see --cache-ram")
_HADAMARD = NoEffect("the KV cache is kept without a Hadamard transform")

FOREIGN = (
    *switches(
        _KERNELS, "-fmoe --fused-moe !-no-fmoe !--no-fmoe !--no-fused-moe",
        "-fug --fused-up-gate !-no-fug !--no-fug !--no-fused-up-gate",
        "-mmad --fused-mul-multiadd !-no-mmad !--no-mmad !--no-fused-mul-multiadd",
        "-rtr --run-time-repack", "-mqkv --merge-qkv", "-muge --merge-up-gate-experts",
        "-gr --graph-reuse !-no-gr !--no-gr !--no-graph-reuse", "-rcache --rope-cache",
        "-ger --grouped-expert-routing", "-sas --scheduler-async --scheduler_async",
    ),
    foreign(
        "-ooae --offload-only-active-experts !-no-ooae !--no-offload-only-active-experts", ALREADY,
        off=NoEffect("of a small batch only the experts that it uses are copied"),
    ),
    *valued(
        _KERNELS, "-cuda --cuda-params", "-fdn --fused-delta-net", "-op --offload-policy",
        "-wgt --worst-graph-tokens", "-mea --max-extra-alloc", "-mtprot "
        "--mtp-requantize-output-tensor",
    ),
    foreign("-mla --mla-use", off_at(lambda x: x > 0, _MLA), n_values=1),
    *valued(NoEffect("attention is computed in ubatches, see --ubatch-size"),
            "-amb --attention-max-batch"),
    *switches(_HADAMARD, "-khad --k-cache-hadamard", "-vhad --v-cache-hadamard"),
    *valued(
        NoEffect("all layers' caches have the types of --cache-type-k and --cache-type-v"),
        "-ctk-first --cache-type-k-first", "-ctk-last --cache-type-k-last",
        "-ctv-first --cache-type-v-first", "-ctv-last --cache-type-v-last",
    ),
    foreign("-no-fa --no-fa --no-flash-attn", Becomes(("--flash-attn", "off"))),
    *valued(
        Refused("every token uses as many experts as the model says: leave it out"),
        "-ser --smart-expert-reduction",
    ),
    *switches(
        NoEffect("huge pages are used where the system has them"),
        "-thp --transparent-huge-pages",
    ),
    *switches(NoEffect("the values of weights are not checked"), "-vq --validate-quants"),
    *switches(NoEffect("streamed weights are read while the model is opened"), "--defer-experts"),
    *valued(NoEffect("--vram is the budget of weights and slots"), "--fit-margin",
            "-gfm --gpu-fit-margin"),
    *valued(_ONE_GPU, "--max-gpu", "-grt --graph-reduce-type", "-gap --graph-attn-precision"),
    *switches(
        _ONE_GPU, "-smgs --split-mode-graph-scheduling", "-smf16 --split-mode-f16",
        "-smf32 --split-mode-f32",
    ),
    *switches(
        NoEffect("a token warms up, and on a GPU a whole ubatch, see --warmup"),
        "-wb --warmup-batch",
    ),
    *valued(
        _CHECKPOINTS, "--ctx-checkpoints-interval", "--ctx-checkpoints-tolerance",
    ),
    *valued(_STORED, "-crs --cache-ram-similarity", "-cram-n-min --cache-ram-n-min"),
    *valued(
        NoEffect("recurrent memories roll back as --spec-rs-snapshots and --spec-checkpoints say"),
        "--recurrent-ckpt-mode",
    ),
    *switches(NoEffect("draft lengths follow measured costs by themselves"), "--spec-autotune"),
    *valued(
        Refused("name drafters with --spec-type, and their sizes with flags of their own"),
        "--spec-stage",
    ),
    *switches(
        Refused("heads of several tokens do not draft here: name another drafter with --spec-type"),
        "-mtp --multi-token-prediction",
    ),
    foreign("-no-mtp --no-multi-token-prediction", ALREADY),
    foreign("-ps --p-split", lambda value: Becomes(("--draft-p-split", value)), n_values=1),
    foreign(
        "--suffix-pattern-len", lambda value: Becomes(("--spec-suffix-min-match", value)),
        n_values=1,
    ),
    *valued(NoEffect("matches may be of any depth"), "--suffix-max-depth"),
    foreign("--suffix-corpus", lambda value: Becomes(("--spec-suffix-corpus", value)), n_values=1),
    foreign("--tfs", off_at(lambda x: x >= 1, Refused("there is no such sampler here")),
            n_values=1),
    foreign("--cfg-scale", off_at(lambda x: x == 1, Refused("there is no guidance here")),
            n_values=1),
    *valued(NoEffect("there is no guidance here"), "--cfg-negative-prompt",
            "--cfg-negative-prompt-file"),
    *switches(NoEffect("penalties look at all tokens alike"), "--penalize-nl !--no-penalize-nl"),
    *switches(NoEffect("there is no such sampler here"), "--adaptive-updt-w-cur"),
    *valued(
        _TEXT_RULES, "--banned-string-file", "--allowlist-unicode-rule", "--allowlist-pieces",
        "--allowlist-keyword", "--expiring-logit-bias-file",
    ),
    *valued(NoEffect("there are no such rules for an answer's text"), "--banned-n",
            "--allowlist-keyword-delay"),
    *switches(
        NoEffect("the log goes to standard error as it is"), "--minilog", "-dkvc --dump-kv-cache",
    ),
    *valued(NoEffect("the log goes to standard error as it is"), "-ld --logdir"),
    *switches(NoEffect("a stream ends with [DONE]"), "--send-done"),
    *switches(NoEffect("chat templates are rendered as Jinja"), "--peg"),
    *switches(ALREADY, "--parallel-tool-calls"),
    *valued(NoEffect("slots are compared by all of their tokens"), "--reasoning-tokens"),
    *valued(
        Refused("messages bring their own; run and chat have --system-prompt-file"), "-spf",
    ),
    *valued(NoEffect("nothing is kept in a database"), "--sql-save-file",
            "--sqlite-zstd-ext-file"),
    *valued(NoEffect("this program reads text only"), "-tm --threads-mtmd", "--mtmd-kq-type"),
    *switches(ALREADY, "--infill"),
    *switches(
        Refused("`specoffload plan` says what a model needs"),
        "--dry-run",
    ),
    *valued(NoEffect("bench has repetitions of its own"), "-nrep --n-repetitions"),
    *valued(NoEffect("nothing is written to a file"), "--output-tensor-name",
            "--output-draft --draft-output --draft-output-file"),
    *switches(Refused("llama-perplexity measures that"), "--perplexity --all-logits"),
)  # fmt: skip
