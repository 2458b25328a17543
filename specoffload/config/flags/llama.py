"""llama.cpp's flags of models, memory, threads, sampling and speculation that are none of ours."""

from __future__ import annotations

import re
from collections.abc import Callable

from offload.errors import BadRequest
from offload.sampling.options import sampler_letters
from specoffload.config.flags.flag import FALSE, TRUE
from specoffload.config.flags.foreign import (
    ALREADY,
    Answer,
    Becomes,
    NoEffect,
    Refused,
    foreign,
    off_at,
    switches,
    valued,
)
from specoffload.config.flags.reading import ALL_LAYERS

_ON_OFF = (*TRUE, *FALSE, "auto")
_MOST_LAYERS = 512  # of which an override is tried
_EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_ONE_GPU = NoEffect("one GPU is used: --device names it")
_THREADS = NoEffect("threads are pinned where there are several memory nodes, see --numa")
_FETCH = Refused(
    "only the Hugging Face hub is fetched from (-hf): download the file and give it with --model"
)
_ROPE = Refused("the file's own rotary settings are used: leave it out")
_IMAGES = Refused("this program reads text only: leave it out")
_NO_IMAGES = NoEffect("this program reads text only")
_ADAPTERS = Refused("adapters are not applied here: merge them into the model")
_DRAFT_IS_RESIDENT = NoEffect("the draft lies on its device whole")
_LINES = NoEffect("`specoffload chat` converses; run does where it is given no text")
_PRESET = Refused("no model has a flag of its own: name it with -hf user/repo")


def _sampler_letters(value: str) -> Answer:
    try:
        return Becomes(("--samplers", ";".join(sampler_letters(value))))
    except BadRequest as e:
        raise ValueError(str(e)) from None


def _override(value: str) -> Answer:
    """`-ot REGEX=BUFFER,...`: where the experts of each layer go, by the first pattern that fits.

    With all of them on the CPU they all stream; where some lie on a GPU, which layers' experts
    are resident is left to what fits. Other weights stream as --n-gpu-layers says.
    """
    patterns = []
    for part in filter(None, value.split(",")):
        pattern, equals, buffer = part.rpartition("=")
        if not equals:
            raise ValueError(f"{part!r} is not PATTERN=BUFFER")
        try:
            patterns.append((re.compile(pattern), buffer.upper()))
        except re.error as e:
            raise ValueError(f"{pattern!r} is no regular expression: {e}") from None
    places = {
        next((b for p, b in patterns if p.search(f"blk.{layer}.{part}.weight")), "")
        for layer in range(_MOST_LAYERS)
        for part in _EXPERTS
    }
    if places == {"CPU"}:
        return Becomes(("--n-cpu-moe", str(ALL_LAYERS)))
    if places == {""}:
        return NoEffect("it names no experts; dense weights stream as --n-gpu-layers says")
    return NoEffect("which layers' experts are resident follows from what fits, or --n-cpu-moe")


def _load_mode(value: str) -> Answer:
    modes: dict[str, Answer] = {
        "auto": ALREADY,
        "none": Becomes(("--no-mmap",)),
        "dio": Becomes(("--no-mmap",)),
        "mmap": Becomes(("--mmap",)),
        "mmap+mlock": Becomes(("--mmap",)),
        "mlock": Becomes(("--no-mmap",)),
    }
    if value not in modes:
        raise ValueError(f"must be one of {', '.join(modes)}")
    return modes[value]


def _draft_layers(value: str) -> Answer:
    return Becomes(("--device-draft", "cpu")) if value == "0" else _DRAFT_IS_RESIDENT


def _sizes(part: str) -> Callable[[str], Answer]:
    """A size that once was of every n-gram drafter."""
    drafters = ["ngram-simple", "ngram-map-k", "ngram-map-k4v"]
    if part == "min-hits":
        drafters = drafters[1:]

    def of(value: str) -> Answer:
        words = [word for d in drafters for word in (f"--spec-{d}-{part}", value)]
        return Becomes(tuple(words))

    return of


MEMORY = (
    foreign("-ot --override-tensor LLAMA_ARG_OVERRIDE_TENSOR", _override, n_values=1),
    foreign("-cmoe --cpu-moe LLAMA_ARG_CPU_MOE", Becomes(("--n-cpu-moe", str(ALL_LAYERS)))),
    foreign(
        "--op-offload !--no-op-offload !-nopo", ALREADY, off=Becomes(("--min-batch", "off"))
    ),
    foreign("-lm --load-mode LLAMA_ARG_LOAD_MODE", _load_mode, n_values=1),
    foreign(
        "--mlock LLAMA_ARG_MLOCK",
        NoEffect("streamed weights lie in memory of our own, which a GPU locks"),
    ),
    *valued(
        NoEffect("dense weights stream as --n-gpu-layers says"),
        "-ncffn --n-cpu-ffn LLAMA_ARG_N_CPU_FFN",
    ),
    *valued(
        _ONE_GPU,
        "-sm --split-mode LLAMA_ARG_SPLIT_MODE",
        "-ts --tensor-split LLAMA_ARG_TENSOR_SPLIT",
        "-mg --main-gpu LLAMA_ARG_MAIN_GPU",
    ),
    foreign("-fit --fit LLAMA_ARG_FIT", lambda value: (
        NoEffect("what is not named is chosen to fit") if value in FALSE else ALREADY
    ), n_values=1, optional=_ON_OFF),
    *valued(
        NoEffect("--vram is the budget of weights and slots"),
        "-fitt --fit-target LLAMA_ARG_FIT_TARGET",
        "-fitc --fit-ctx LLAMA_ARG_FIT_CTX",
        "-fitp --fit-print LLAMA_ARG_FIT_ESTIMATE",
    ),
    *switches(
        NoEffect("the KV cache lies where attention is computed"),
        "-kvo --kv-offload !-nkvo !--no-kv-offload LLAMA_ARG_KV_OFFLOAD",
    ),
    *switches(
        NoEffect("weights are repacked where that is known to work"),
        "--repack !-nr !--no-repack LLAMA_ARG_REPACK",
        "--no-host LLAMA_ARG_NO_HOST",
    ),
    *valued(NoEffect("streamed weights are read whole"), "-lzm --lazy-mode LLAMA_ARG_LAZY_MODE"),
    *switches(NoEffect("the values of weights are not checked"), "--check-tensors"),
    *valued(Refused("the file's own metadata are used: leave it out"), "--override-kv"),
    *valued(Refused("other machines' GPUs are not used: leave it out"), "--rpc LLAMA_ARG_RPC"),
    *valued(
        _THREADS,
        "-C --cpu-mask", "-Cr --cpu-range", "--cpu-strict", "--prio", "--poll",
        "-Cb --cpu-mask-batch", "-Crb --cpu-range-batch", "--cpu-strict-batch", "--prio-batch",
        "--poll-batch",
    ),
)  # fmt: skip

CONTEXT = (
    *valued(
        NoEffect("nothing is dropped from a full context: an answer ends there"), "--keep",
    ),
    foreign(
        "--context-shift !--no-context-shift LLAMA_ARG_CONTEXT_SHIFT",
        lambda value: ALREADY if value in FALSE else NoEffect(
            "an answer ends where the context is full"
        ),
        n_values=1, optional=_ON_OFF,
    ),
    *valued(
        NoEffect("a conversation's prompts are kept as --ctx-checkpoints says"),
        "-cms --checkpoint-min-step LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT",
    ),
    foreign(
        "-kvu --kv-unified !-no-kvu !--no-kv-unified LLAMA_ARG_KV_UNIFIED", ALREADY,
        off=NoEffect("the slots share one KV cache"),
    ),
    *switches(
        NoEffect("idle slots go to host memory when their room is needed, see --cache-ram"),
        "--cache-idle-slots !--no-cache-idle-slots LLAMA_ARG_CACHE_IDLE_SLOTS",
    ),
    *valued(
        NoEffect("the slots share one KV cache"),
        "--kv-unified-per-slot LLAMA_ARG_KV_UNIFIED_PER_SLOT",
    ),
    *valued(
        NoEffect("the cache needs no defragmenting"), "-dt --defrag-thold LLAMA_ARG_DEFRAG_THOLD",
    ),
    foreign("-gan --grp-attn-n LLAMA_ARG_GRP_ATTN_N", off_at(lambda n: n <= 1, _ROPE), n_values=1),
    *valued(NoEffect("there is no grouped attention"), "-gaw --grp-attn-w LLAMA_ARG_GRP_ATTN_W"),
    *valued(
        _ROPE,
        "--rope-scaling LLAMA_ARG_ROPE_SCALING_TYPE", "--rope-scale LLAMA_ARG_ROPE_SCALE",
        "--rope-freq-base LLAMA_ARG_ROPE_FREQ_BASE", "--rope-freq-scale LLAMA_ARG_ROPE_FREQ_SCALE",
        "--yarn-orig-ctx LLAMA_ARG_YARN_ORIG_CTX", "--yarn-ext-factor LLAMA_ARG_YARN_EXT_FACTOR",
        "--yarn-attn-factor LLAMA_ARG_YARN_ATTN_FACTOR",
        "--yarn-beta-slow LLAMA_ARG_YARN_BETA_SLOW", "--yarn-beta-fast LLAMA_ARG_YARN_BETA_FAST",
    ),
    *valued(Refused("attention is the model's own: leave it out"), "--attention"),
)  # fmt: skip

MODELS = (
    *valued(
        _FETCH,
        "-mu --model-url LLAMA_ARG_MODEL_URL", "-dr --docker-repo LLAMA_ARG_DOCKER_REPO",
        "-hfv -hfrv --hf-repo-v LLAMA_ARG_HF_REPO_V", "-hffv --hf-file-v LLAMA_ARG_HF_FILE_V",
    ),
    foreign("-cl --cache-list", Refused("`specoffload models` lists them")),
    foreign("--list-devices", Refused("`specoffload doctor` shows the devices")),
    *switches(
        _PRESET,
        "--embd-gemma-default", "--fim-qwen-1.5b-default", "--fim-qwen-3b-default",
        "--fim-qwen-7b-default", "--fim-qwen-7b-spec", "--fim-qwen-14b-spec",
        "--fim-qwen-30b-default", "--gpt-oss-20b-default", "--gpt-oss-120b-default",
        "--vision-gemma-4b-default", "--vision-gemma-12b-default",
    ),
    *valued(
        _ADAPTERS,
        "--lora", "--lora-scaled", "--control-vector", "--control-vector-scaled",
    ),
    foreign("--control-vector-layer-range", _ADAPTERS, n_values=2),
    *switches(NoEffect("adapters are not applied here"), "--lora-init-without-apply"),
    *valued(
        _IMAGES, "-mm --mmproj LLAMA_ARG_MMPROJ", "-mmu --mmproj-url LLAMA_ARG_MMPROJ_URL",
        "--image --audio --video",
    ),
    foreign(
        "--mmproj-auto !--no-mmproj !--no-mmproj-auto LLAMA_ARG_MMPROJ_AUTO", _NO_IMAGES
    ),
    *switches(_NO_IMAGES, "--mmproj-offload !--no-mmproj-offload LLAMA_ARG_MMPROJ_OFFLOAD"),
    *valued(
        _NO_IMAGES,
        "--image-min-tokens LLAMA_ARG_IMAGE_MIN_TOKENS",
        "--image-max-tokens LLAMA_ARG_IMAGE_MAX_TOKENS",
        "--mtmd-batch-max-tokens LLAMA_ARG_MTMD_BATCH_MAX_TOKENS",
        "--video-fps LLAMA_ARG_VIDEO_FPS",
        "--video-timestamp-interval LLAMA_ARG_VIDEO_TIMESTAMP_INTERVAL",
        "--video-ffmpeg-dir LLAMA_ARG_VIDEO_FFMPEG_DIR",
        "MTMD_BACKEND_DEVICE",
    ),
)  # fmt: skip

SAMPLING = (
    foreign("--sampler-seq --sampling-seq", _sampler_letters, n_values=1),
    *switches(
        NoEffect("sampling is done by the library's samplers on the CPU"),
        "-bs --backend-sampling LLAMA_ARG_BACKEND_SAMPLING",
    ),
)  # fmt: skip

SPECULATION = (
    *valued(
        _THREADS,
        "--spec-draft-cpu-mask -Cd --cpu-mask-draft",
        "--spec-draft-cpu-range -Crd --cpu-range-draft",
        "--spec-draft-cpu-strict --cpu-strict-draft", "--spec-draft-prio --prio-draft",
        "--spec-draft-poll --poll-draft", "--spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft",
        "--spec-draft-cpu-range-batch -Crbd --cpu-range-batch-draft",
        "--spec-draft-cpu-strict-batch --cpu-strict-batch-draft",
        "--spec-draft-prio-batch --prio-batch-draft", "--spec-draft-poll-batch --poll-batch-draft",
    ),
    *valued(
        _DRAFT_IS_RESIDENT,
        "--spec-draft-override-tensor -otd --override-tensor-draft --spec-draft-override",
        "--spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft "
        "LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE",
    ),
    *switches(
        _DRAFT_IS_RESIDENT,
        "--spec-draft-cpu-moe -cmoed --cpu-moe-draft LLAMA_ARG_SPEC_DRAFT_CPU_MOE",
    ),
    foreign(
        "--spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft "
        "LLAMA_ARG_N_GPU_LAYERS_DRAFT", _draft_layers, n_values=1,
    ),
    *switches(
        NoEffect("drafts are sampled by the program"),
        "--spec-draft-backend-sampling !--no-spec-draft-backend-sampling "
        "LLAMA_ARG_SPEC_DRAFT_BACKEND_SAMPLING",
    ),
    *valued(NoEffect("it has no meaning in llama.cpp either"), "--spec-ngram-simple-min-hits"),
    foreign("--spec-ngram-size-n", _sizes("size-n"), n_values=1),
    foreign("--spec-ngram-size-m", _sizes("size-m"), n_values=1),
    foreign("--spec-ngram-min-hits", _sizes("min-hits"), n_values=1),
    *valued(
        NoEffect("a policy decides when to draft"), "--spec-ngram-check-rate",
    ),
    foreign(
        "--spec-use-checkpoints",
        lambda value: NoEffect("checkpoints are taken where a memory cannot be cut")
        if value in FALSE else ALREADY,
        n_values=1, optional=_ON_OFF,
    ),
    *valued(NoEffect("a checkpoint is restored as often as drafts are rejected"),
            "--spec-ckpt-num-tries"),
    foreign(
        "--spec-default",
        Becomes(
            (
                "--spec-type", "ngram-mod", "--spec-ngram-mod-n-match", "24",
                "--spec-ngram-mod-n-min", "48", "--spec-ngram-mod-n-max", "64",
            )
        ),
    ),
)  # fmt: skip

TEXT = (
    *switches(
        NoEffect("a prompt is shown at a terminal, before its continuation"),
        "--display-prompt !--no-display-prompt",
    ),
    *switches(
        NoEffect("neither a prompt's tokens nor special tokens are shown"),
        "--verbose-prompt", "-sp --special",
    ),
    *(
        foreign(names, ALREADY, off=NoEffect("two lines under an answer say how it went"))
        for names in (
            "--perf !--no-perf LLAMA_ARG_PERF",
            "--show-timings !--no-show-timings LLAMA_ARG_SHOW_TIMINGS",
        )
    ),
    foreign(
        "-co --color", NoEffect("answers are shown as Markdown at a terminal"), n_values=1,
        optional=_ON_OFF,
    ),
    *valued(NoEffect("two lines under an answer count its tokens"), "-ptc --print-token-count"),
    *valued(Refused("prompts are text: give the file with --file"), "-bf --binary-file"),
    foreign("-st --single-turn", ALREADY),
    *switches(
        _LINES, "-i --interactive", "-if --interactive-first", "-mli --multiline-input",
        "--in-prefix-bos", "--simple-io",
    ),
    *valued(_LINES, "--in-prefix", "--in-suffix"),
    foreign("--completion-bash", Refused("docs/install.md says how a shell learns the flags")),
    *valued(Refused("`specoffload serve` is a server, and run needs none"), "--server-base"),
)  # fmt: skip

FOREIGN = (*MEMORY, *CONTEXT, *MODELS, *SAMPLING, *SPECULATION, *TEXT)
