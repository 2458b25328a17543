"""Every flag of the program, declared once.

These modules read the table:
- `typer_commands` makes the commands,
- `command_line` reads the command line and llama.cpp's variables,
- `specoffload.server` names and limits the fields of requests,
- `speculation` finds flags without effect,
- `scripts/gen-flags` writes docs/flags.md and the manual page.
"""

from __future__ import annotations

from functools import partial

from numa.place import Strategy
from offload.times.context_memory import CACHE_TYPES, ROPE_SCALINGS
from specdec.options import (
    BY_P,
    MOST_DRAFTED,
    AcceptRule,
    DrafterName,
    PolicyName,
    SpecOptions,
)
from specoffload.config.command_flags import COMMANDS
from specoffload.config.flag import (
    FLOAT,
    INT,
    OPENS,
    PATH,
    SECRET,
    SWITCH,
    TEXT,
    Flag,
    Need,
    Panel,
    choice,
    flag,
)
from specoffload.config.options import (
    DraftEngine,
    DraftOptions,
    Options,
    Toggle,
)
from specoffload.config.sampling_flags import SAMPLING
from specoffload.config.values import (
    ADDRESSES,
    AUTO_INT,
    CPU_MASK,
    CPU_MOE,
    CPU_RANGE,
    DRAFTERS,
    KV_OVERRIDES,
    LAYERS,
    MIN_BATCH,
    ON_OFF,
    RAM_SIZE,
    RATES,
    REPLACEMENTS,
    SHARES,
    SIZES,
    SPLIT_MODE,
    THREADS,
    TOGGLE,
    TOKEN_MIX,
    WORDS,
)

_AND_WORKER = OPENS | {"worker"}
_AND_TUNE = _AND_WORKER | {"tune numa"}

_model = partial(flag, Options, panel=Panel.MODEL)

_FILES = "the model file's"

_MODEL = (
    _model(
        "alias", "--alias -a LLAMA_ARG_ALIAS", TEXT, "Name of the model in answers.",
        default_words="the file's",
    ),
    _model(
        "model", "--model -m LLAMA_ARG_MODEL", PATH,
        "Model: a .gguf file or its folder, user/repo[:quant], or ollama:name.",
        default_words="the embedded pair", first=True,
    ),
    _model(
        "hf_repo", "--hf-repo -hf -hfr LLAMA_ARG_HF_REPO", TEXT,
        "Repository user/repo[:quant] of the Hugging Face hub.",
        more="Its file is fetched if it is not here yet. Without :quant, Q4_K_M is taken, else "
        "Q8_0, else the first file (docs/models.md).",
    ),
    _model(
        "hf_file", "--hf-file -hff LLAMA_ARG_HF_FILE", TEXT, "File of that repository.", rare=True,
    ),
    _model(
        "hf_token", "--hf-token -hft", SECRET,
        "Token for private and gated repositories, like HF_TOKEN.", rare=True,
    ),
    _model(
        "offline", "--offline LLAMA_ARG_OFFLINE", SWITCH,
        "Fetch nothing; use what was fetched before.", rare=True,
    ),
    _model(
        "mmproj", "--mmproj -mm LLAMA_ARG_MMPROJ", PATH,
        "Projector of the model: a .gguf file with which it reads images.",
        more="libmtmd is compiled at the first start with it, which takes a minute "
        "([server.md](server.md#images)). A draft model drafts nothing in chats with images.",
    ),
    _model(
        "mmproj_url", "--mmproj-url -mmu LLAMA_ARG_MMPROJ_URL", TEXT,
        "Address of a projector's file on the Hugging Face hub, which is fetched.", rare=True,
        more="Files at other addresses are not fetched: fetch them, and name them with --mmproj.",
    ),
    _model(
        "mmproj_auto", "--mmproj-auto !--no-mmproj !--no-mmproj-auto LLAMA_ARG_MMPROJ_AUTO", SWITCH,
        "Use the projector that lies beside the model in its repository or folder.",
        more="It is fetched if it is not here yet. llama.cpp does this for -hf without a flag. "
        "Here a projector takes memory from experts, so text would become slower.",
    ),
    _model(
        "mmproj_offload", "--mmproj-offload !--no-mmproj-offload LLAMA_ARG_MMPROJ_OFFLOAD", SWITCH,
        "Compute the projector on the GPU.", rare=True,
        more="The CPU computes it if it takes more than an eighth of the GPU's memory, and with "
        "several GPUs.",
    ),
    _model(
        "image_min_tokens", "--image-min-tokens LLAMA_ARG_IMAGE_MIN_TOKENS", INT,
        "Fewest tokens of an image, if its size decides them.", least=1, rare=True,
        default_words="the projector's",
    ),
    _model(
        "image_max_tokens", "--image-max-tokens LLAMA_ARG_IMAGE_MAX_TOKENS", INT,
        "Most tokens of an image, if its size decides them.", least=1, rare=True,
        default_words="the projector's",
    ),
    _model(
        "ctx_size", "--ctx-size -c LLAMA_ARG_CTX_SIZE", INT,
        "Context in tokens. 0 takes the model's own.", least=0, first=True,
        default_words="chosen",
        more="The default is the largest context that fits memory and costs little of the speed "
        "of requests, but not more than the model's own ([server.md](server.md#slots)). "
        "A line at start says it. bench takes 4096.",
    ),
    _model(
        "kv_overrides", "--override-kv", KV_OVERRIDES,
        "Value in place of one in the model file's metadata. TYPE is int, float, bool or str.",
        more="An example is qwen3moe.expert_used_count=int:4, with which each token uses 4 "
        "experts. Several values are separated by commas, or have a flag each. Texts may become "
        "worse, and nothing measures by how much. Measurements, saved slots and kept prompts of "
        "other values are not used. A draft model keeps its file's values.",
        joins=True, rare=True,
    ),
    _model(
        "batch_size", "--batch-size -b LLAMA_ARG_BATCH", INT, "Most tokens in one decode.", least=1,
        more="If neither this flag nor --ubatch-size is given, a decode on several devices may "
        "have four ubatches.",
        swept=True,
    ),
    _model(
        "ubatch_size", "--ubatch-size -ub LLAMA_ARG_UBATCH", AUTO_INT,
        "Prompt tokens that are computed at once: N or auto.", least=1, default_words="auto",
        more="Streamed weights are copied once for each such batch. So auto takes as many tokens "
        "as prompts need and GPU memory allows, between 128 and 16384. It takes over 8192 only if "
        "longer prompts gain at least 5 %, and others lose little. If nothing streams, it takes "
        "512.", swept=True,
    ),
    _model(
        "flash_attn", "--flash-attn -fa LLAMA_ARG_FLASH_ATTN", TOGGLE, "Flash attention.",
        bare="on", swept=True,
    ),
    _model(
        "type_k", "--cache-type-k -ctk LLAMA_ARG_CACHE_TYPE_K", choice(CACHE_TYPES),
        "Type of the keys in the KV cache.",
        more=f"Types: {', '.join(CACHE_TYPES)}. Quantised types need flash attention.", swept=True,
    ),
    _model(
        "type_v", "--cache-type-v -ctv LLAMA_ARG_CACHE_TYPE_V", choice(CACHE_TYPES),
        "Type of the values in the KV cache.", default_words="f16, with MLA the keys'", rare=True,
        swept=True,
    ),
    _model(
        "kv_offload", "--kv-offload -kvo !--no-kv-offload !-nkvo LLAMA_ARG_KV_OFFLOAD", SWITCH,
        "Keep the KV cache in GPU memory; --no-kv-offload keeps it in RAM.",
        more="A cache in RAM leaves GPU memory to weights. The CPU then computes attention of "
        "small batches, and larger ones copy the cache to the GPU, layer by layer. Without a "
        "flag, a context that --ctx-size asks for is in RAM if it does not fit the GPU, or if "
        "requests at its end are then faster ([plans.md](plans.md#the-kv-cache-in-ram)).",
        default_words="where it is faster",
    ),
    _model(
        "swa_full", "--swa-full LLAMA_ARG_SWA_FULL", SWITCH,
        "Keep all tokens in layers with a sliding window, so that a text can be cut anywhere.",
        rare=True,
    ),
    _model(
        "rope_scaling", "--rope-scaling LLAMA_ARG_ROPE_SCALING_TYPE", choice(ROPE_SCALINGS),
        "How rotary positions beyond the trained context are computed.", rare=True,
        default_words=_FILES,
        more="With --rope-scale N the default context is N times as long too. A draft model keeps "
        "its file's settings.",
    ),
    _model(
        "rope_scale", "--rope-scale LLAMA_ARG_ROPE_SCALE", FLOAT,
        "Factor by which the context grows.", above=0, rare=True, default_words=_FILES,
    ),
    _model(
        "rope_freq_base", "--rope-freq-base LLAMA_ARG_ROPE_FREQ_BASE", FLOAT,
        "Base of the rotations' frequencies. 0 takes the file's.", least=0, rare=True,
        default_words=_FILES,
    ),
    _model(
        "rope_freq_scale", "--rope-freq-scale LLAMA_ARG_ROPE_FREQ_SCALE", FLOAT,
        "1 divided by the factor of --rope-scale, in place of that flag. 0 takes the file's.",
        least=0, rare=True,
        default_words=_FILES,
    ),
    _model(
        "yarn_orig_ctx", "--yarn-orig-ctx LLAMA_ARG_YARN_ORIG_CTX", INT,
        "YaRN: context in tokens before it was extended. 0 takes the file's.", least=0, rare=True,
        default_words=_FILES,
    ),
    _model(
        "yarn_ext_factor", "--yarn-ext-factor LLAMA_ARG_YARN_EXT_FACTOR", FLOAT,
        "YaRN: share of extrapolation. 0 only interpolates, and -1 takes the file's.", least=-1,
        rare=True, default_words=_FILES,
    ),
    _model(
        "yarn_attn_factor", "--yarn-attn-factor LLAMA_ARG_YARN_ATTN_FACTOR", FLOAT,
        "YaRN: factor of the attention's magnitude. -1 takes the file's.", least=-1, rare=True,
        default_words=_FILES,
    ),
    _model(
        "yarn_beta_slow", "--yarn-beta-slow LLAMA_ARG_YARN_BETA_SLOW", FLOAT,
        "YaRN: a dimension with fewer rotations in the context than this is interpolated.",
        least=-1, rare=True, default_words=_FILES, more="-1 takes the file's.",
    ),
    _model(
        "yarn_beta_fast", "--yarn-beta-fast LLAMA_ARG_YARN_BETA_FAST", FLOAT,
        "YaRN: a dimension with more rotations in the context than this is extrapolated.",
        least=-1, rare=True, default_words=_FILES, more="-1 takes the file's.",
    ),
    _model(
        "ctx_checkpoints", "--ctx-checkpoints -ctxcp --swa-checkpoints LLAMA_ARG_CTX_CHECKPOINTS",
        INT, "Earlier states of a conversation that are kept for a model that is recurrent or has "
        "sliding windows.", least=0,
        more="They are in RAM. An edited prompt is then evaluated from the last state that still "
        "fits it, not from its beginning.", rare=True,
    ),
)  # fmt: skip

_ASKS = OPENS - {"plan", "worker"}
_ANYWHERE = "all, or the performance cores"
_ANSWERS = frozenset({"run", "chat", "serve"})
_NO_WORKERS = "it is for one machine"
_offload = partial(flag, Options, panel=Panel.OFFLOAD)

_OFFLOAD = (
    _offload(
        "device", "--device -dev LLAMA_ARG_DEVICE", TEXT,
        "auto, cpu, sim, or names that ggml gives, such as CUDA0 or CUDA0,CUDA1.",
        commands=_AND_TUNE, first=True,
        more="auto takes all GPUs that save time, and the plain CPU if there is none. cpu is "
        "libllama without our streaming. With sim, the CPU takes the place of a GPU, and the "
        "name may have limits, as in sim:vram=64MiB,bw=2GB/s,latency=20us,disk=1GB/s. Several "
        "devices share the model's layers ([devices.md](devices.md)).",
        reads_as=(("none", "cpu"),),
    ),
    _offload(
        "tensor_split", "--tensor-split -ts LLAMA_ARG_TENSOR_SPLIT", SHARES,
        "Share of the model's layers for each device, e.g. 3,1.", commands=OPENS | {"tune numa"},
        more="With --device auto, all GPUs that have their own memory are used then.",
        default_words="planned",
    ),
    _offload(
        "split_mode", "--split-mode -sm LLAMA_ARG_SPLIT_MODE", SPLIT_MODE,
        "With layer, devices share the layers. With none, --main-gpu has all layers.",
        commands=_AND_TUNE, rare=True,
    ),
    _offload(
        "main_gpu", "--main-gpu -mg LLAMA_ARG_MAIN_GPU", INT,
        "Number of the GPU to use with --split-mode none.", least=0, commands=_AND_TUNE, rare=True,
    ),
    _offload(
        "workers", "--rpc LLAMA_ARG_RPC", ADDRESSES,
        "Workers on other machines, whose devices RPC0, RPC1, ... hold layers.",
        more="Without --device all of them are used, and their layers come before the GPU's. "
        "--device and --device-draft may name them ([rpc.md](rpc.md)).", commands=_ASKS | {"plan"},
        elsewhere=_NO_WORKERS,
    ),
    _offload(
        "rpc_secret_file", "--rpc-secret-file", PATH,
        "File with the secret that the workers of --rpc ask for ([defence.md](defence.md)).",
        more="Without it, the variable `SPECOFFLOAD_RPC_SECRET` may have the secret itself.",
        commands=_ASKS | {"plan"}, elsewhere=_NO_WORKERS, rare=True,
    ),
    _offload(
        "rpc_timeout_s", "--rpc-timeout", FLOAT,
        "Seconds without an answer after which a worker counts as lost.", above=0, most=3600,
        commands=_ASKS, elsewhere=_NO_WORKERS, rare=True,
    ),
    _offload(
        "vram_bytes", "--vram", SIZES,
        "GPU memory to use, e.g. 12GiB, or 24GiB,12GiB for two GPUs.",
        commands=_AND_TUNE,
        more="It holds weights, cached experts, the context with its buffers, and a draft model. "
        "On sim it holds only weights and cached experts. Weights that do not fit are streamed. "
        "A size with which the model cannot run is an error. At least 512 MiB of a GPU stay free "
        "for its driver.",
        default_words="what is free, less 1 GiB", first=True,
    ),
    _offload(
        "min_batch", "--min-batch GGML_OP_OFFLOAD_MIN_BATCH GGML_OFFLOAD_OP_MIN_BATCH_SIZE",
        MIN_BATCH, "Batch size from which the GPU computes with streamed weights.",
        more="The CPU computes smaller batches in place. The value is N, off, auto, or "
        "dense=N,experts=N with a number for each kind of weight. With auto, both ways are timed "
        "once per machine and model. With a number, larger batches stream even if that is slower. "
        "Experts that do not fit the slots at once then stream in groups.",
        default_words="auto", commands=_AND_TUNE, first=True,
    ),
    _offload(
        "n_cpu_moe", "--n-cpu-moe -ncmoe LLAMA_ARG_N_CPU_MOE", CPU_MOE,
        "Number of layers whose experts stay in RAM.", commands=_AND_WORKER,
        more="They are streamed. The experts of the other layers stay on the GPU. not:LAYER,... "
        "means all layers but these, whose numbers begin with 0. Without a limit "
        "on GPU memory all are streamed.", default_words="as few as possible", first=True,
        swept=True,
    ),
    _offload(
        "plan_for", "--plan-for", TOKEN_MIX,
        "Prompt tokens and generated tokens for which GPU memory is shared out, e.g. 4000:500.",
        more="decode means 0:1, and may make prompts slow. auto takes what earlier runs of the "
        "model evaluated and generated ([plans.md](plans.md)).", default_words="auto",
        rare=True,
    ),
    _offload(
        "n_gpu_layers", "--n-gpu-layers -ngl --gpu-layers LLAMA_ARG_N_GPU_LAYERS", LAYERS,
        "Number of layers whose dense weights stay on the GPU. Those of the others are streamed.",
        default_words="what fits", swept=True,
    ),
    _offload(
        "hybrid", "--hybrid", choice(Toggle),
        "Split a layer's experts between GPU and CPU: on, off or auto.",
        more="Of each layer, the GPU computes the experts that it has, and others that are copied "
        "in time. The CPU computes the rest meanwhile, whatever --min-batch says. Of batches "
        "of up to 64 tokens, auto splits those sizes at which this was measured to be faster. "
        "Prompts are split once both sides were measured ([hybrid.md](hybrid.md)).",
        default_words="auto; off with --min-batch N", commands=_AND_WORKER - {"bench"}, rare=True,
    ),
    _offload(
        "route_cached", "--route-cached", FLOAT,
        "Let routers prefer experts that are on the GPU, with this strength. 0 is off.",
        least=0, most=1, commands=_ANSWERS | {"plan"}, rare=True,
        more="Answers are faster, and **texts differ** from the model's own, and depend on what "
        "was asked before ([hybrid.md](hybrid.md#cached-routing)). Prompts of over 64 tokens are "
        "computed as before.",
    ),
    _offload(
        "route_keep", "--route-keep", INT,
        "Best experts of each token that --route-cached leaves to the router.", least=0,
        commands=_ANSWERS | {"plan"}, rare=True,
    ),
    _offload(
        "warmup", "--warmup !--no-warmup", SWITCH,
        "Try the model at start, and give cached experts the GPU memory that a whole batch leaves.",
        more="Without this test, the memory for buffers is estimated from the file's header, and a "
        "broken file fails at the first request.", rare=True,
    ),
    _offload(
        "mmap", "--mmap !--no-mmap LLAMA_ARG_MMAP", SWITCH,
        "Leave streamed weights in the page cache, and do not read them into memory of our own.",
        commands=_AND_WORKER,
        more="They are then neither page-locked nor placed by NUMA node. The kernel decides which "
        "of them stay in memory, which is slow for models larger than RAM.",
    ),
    _offload(
        "repack", "--repack !--no-repack !-nr LLAMA_ARG_REPACK", SWITCH,
        "Store weights with which the CPU computes in ggml's own layout.",
        commands=_AND_WORKER - {"plan"},
        more="Without a flag, the CPU device uses the layout that a first start measured to be "
        "faster for the planned prompts and answers (--plan-for, [hybrid.md](hybrid.md)). Weights "
        "beside a GPU always keep the file's layout, because they are copied to it.",
        default_words="measured by kind of weight", rare=True,
    ),
    _offload(
        "ram_bytes", "--ram", RAM_SIZE, "RAM for streamed weights, e.g. 48GiB.",
        commands=_AND_WORKER - {"plan"},
        more="Experts that do not fit are read from the disk when a layer needs them "
        "([disk.md](disk.md)). Tables of embeddings count too, and are the first to be left on "
        "the disk. Caches and buffers of the program come on top. A speed after the size, as in "
        "48GiB,70GB/s, has an effect in plan only.",
        default_words="what is free, less a margin",
    ),
    _offload(
        "threads", "--threads -t LLAMA_ARG_THREADS", THREADS, "CPU threads for a decode.",
        default_words="physical or performance cores", first=True, commands=_AND_WORKER,
        swept=True,
    ),
    _offload(
        "threads_batch", "--threads-batch -tb LLAMA_ARG_THREADS_BATCH", THREADS,
        "CPU threads for prompts.", default_words="as --threads", rare=True,
    ),
    _offload(
        "cpu_mask", "--cpu-mask -C", CPU_MASK,
        "Processors that threads run on, as a mask in hexadecimal.", rare=True,
        commands=_AND_WORKER, repeats=True, default_words=_ANYWHERE,
        more="The lowest bit is processor 0. --cpu-range adds to it, and so does a second mask. "
        "Without --threads, each physical core of the mask has one thread "
        "([numa.md](numa.md#chosen-processors)).",
    ),
    _offload(
        "cpu_range", "--cpu-range -Cr", CPU_RANGE,
        "Processors that threads run on, such as 0-7. Adds to --cpu-mask.", rare=True,
        commands=_AND_WORKER, repeats=True, default_words=_ANYWHERE,
    ),
    _offload(
        "cpu_strict", "--cpu-strict", ON_OFF, "Bind each thread to a processor of its own.",
        rare=True, commands=_AND_WORKER, default_words="0",
        more="Each core gets one thread before any core gets a second one. On a machine with "
        "several memory nodes threads are always bound, unless --numa is none.",
    ),
    _offload(
        "cpu_mask_batch", "--cpu-mask-batch -Cb", CPU_MASK,
        "Processors for prompts and other batches, as a mask in hexadecimal.", rare=True,
        repeats=True, default_words="as --cpu-mask",
    ),
    _offload(
        "cpu_range_batch", "--cpu-range-batch -Crb", CPU_RANGE,
        "Processors for prompts and other batches. Adds to --cpu-mask-batch.", rare=True,
        repeats=True, default_words="as --cpu-range",
    ),
    _offload(
        "cpu_strict_batch", "--cpu-strict-batch", ON_OFF,
        "Bind each thread to a processor of its own in prompts and other batches.", rare=True,
        default_words="as --cpu-strict",
    ),
    _offload(
        "numa", "--numa LLAMA_ARG_NUMA", choice(("auto", "none", *Strategy)),
        "Where threads and weights go on a machine with several NUMA nodes.",
        more="auto takes what `specoffload tune numa` measured, else rows. none leaves both to the "
        "kernel. single keeps both on the GPU's node (numactl --cpunodebind=N chooses another). "
        "On a machine with one node nothing changes ([numa.md](numa.md)).",
        reads_as=(("isolate", "single"), ("numactl", "none")),
    ),
)  # fmt: skip

_opens = partial(flag, Options, panel=Panel.SPECULATION)
_draft = partial(flag, DraftOptions, panel=Panel.SPECULATION, needs=(Need.DRAFT_MODEL,))
_spec = partial(flag, SpecOptions, panel=Panel.SPECULATION)
_DRAFTS = (Need.DRAFTS,)
_BY_P_MIN = (PolicyName.P_MIN,)
_BY_P_MIN_TOO = (PolicyName.P_MIN, PolicyName.P_MIN_KEPT)


def _of_drafter(
    field: str, spelling: str, about: str, drafter: DrafterName, least: int = 1
) -> Flag:
    return _spec(field, spelling, INT, about, needs=(drafter,), least=least)


_SPECULATION = (
    _opens(
        "draft",
        "--draft -md --model-draft --spec-draft-model LLAMA_ARG_SPEC_DRAFT_MODEL", PATH,
        "Draft model, kept whole on its device.", digits_mean="--draft-max", first=True,
        more="A file of EAGLE-3, DFlash or DSpark drafts from the hidden rows of the target.",
    ),
    _opens(
        "hf_repo_draft",
        "--spec-draft-hf -hfd -hfrd --hf-repo-draft LLAMA_ARG_SPEC_DRAFT_HF_REPO", TEXT,
        "Repository user/repo[:quant] of the draft model.",
    ),
    _draft(
        "threads", "--threads-draft -td --spec-draft-threads", THREADS,
        "CPU threads of the draft model.", default_words="the target's",
    ),
    _draft(
        "threads_batch", "--threads-batch-draft -tbd --spec-draft-threads-batch", THREADS,
        "CPU threads of the draft model for prompts.", default_words="the target's",
    ),
    _draft(
        "cpu_mask", "--cpu-mask-draft -Cd --spec-draft-cpu-mask", CPU_MASK,
        "Processors of the draft model's threads, as a mask in hexadecimal.", repeats=True,
        default_words="the target's",
    ),
    _draft(
        "cpu_range", "--cpu-range-draft -Crd --spec-draft-cpu-range", CPU_RANGE,
        "Processors of the draft model's threads. Adds to --cpu-mask-draft.", repeats=True,
        default_words="the target's",
    ),
    _draft(
        "cpu_strict", "--cpu-strict-draft --spec-draft-cpu-strict", ON_OFF,
        "Bind each of the draft model's threads to a processor of its own.",
        default_words="the target's",
    ),
    _draft(
        "cpu_mask_batch", "--cpu-mask-batch-draft -Cbd --spec-draft-cpu-mask-batch", CPU_MASK,
        "Processors of the draft model's threads for prompts, as a mask in hexadecimal.",
        repeats=True, default_words="as --cpu-mask-draft",
    ),
    _draft(
        "cpu_range_batch", "--cpu-range-batch-draft -Crbd --spec-draft-cpu-range-batch", CPU_RANGE,
        "Processors of the draft model's threads for prompts. Adds to --cpu-mask-batch-draft.",
        repeats=True, default_words="as --cpu-range-draft",
    ),
    _draft(
        "cpu_strict_batch", "--cpu-strict-batch-draft --spec-draft-cpu-strict-batch", ON_OFF,
        "Bind each of the draft model's threads to a processor of its own in prompts.",
        default_words="as --cpu-strict-draft",
    ),
    _draft(
        "ctx_size", "--ctx-size-draft -cd", INT,
        "Context of the draft model in tokens. 0 takes its own.", least=0,
        default_words="the target's",
    ),
    _draft(
        "device", "--device-draft -devd --spec-draft-device", TEXT, "Device of the draft model.",
        default_words="the target's", reads_as=(("none", "cpu"),),
    ),
    _draft(
        "type_k",
        "--cache-type-k-draft -ctkd --spec-draft-type-k LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K",
        choice(CACHE_TYPES), "Type of the draft model's keys.", default_words="f16",
    ),
    _draft(
        "type_v",
        "--cache-type-v-draft -ctvd --spec-draft-type-v LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V",
        choice(CACHE_TYPES), "Type of the draft model's values.", default_words="f16",
    ),
    _draft(
        "engine", "--draft-engine", choice(tuple(DraftEngine)),
        "Library that computes the draft model: torch, libllama, or the faster one.",
        more="auto measures both on a CUDA device and keeps the result for 30 days. On other "
        "devices it takes libllama ([draft.md](draft.md)).",
    ),
    _draft(
        "vocab", "--draft-vocab", PATH, "File with the token ids that a draft in torch may use.",
        more="It has one id per line, as `specoffload draft prune` writes them "
        "([draft.md](draft.md#a-pruned-vocabulary)).", default_words="all",
    ),
    _opens(
        "draft_params", "--draft-params", WORDS,
        'The draft model\'s own command line, e.g. "-t 2 -c 2048 -dev cpu".',
    ),
    _spec(
        "drafters", "--spec-type --spec !--no-spec LLAMA_ARG_SPEC_TYPE", DRAFTERS,
        "Drafters, separated by commas.",
        more=f"Names: {', '.join(DrafterName)} ([speculation.md](speculation.md)).",
        default_words="all that can draft: ngram-mod, suffix, mtp if the model has its layers, "
        "draft with a draft model, eagle3, dflash or dspark with such a file",
        off_value=(DrafterName.NONE,),
    ),
    _spec(
        "policy", "--spec-policy", choice(tuple(PolicyName)), "Rule for the length of drafts.",
        needs=_DRAFTS, more=f"Names: {', '.join(PolicyName)} ([speculation.md](speculation.md)).",
        rare=True,
    ),
    _spec(
        "n_max",
        "--draft-max --spec-draft-n-max --draft-n LLAMA_ARG_SPEC_DRAFT_N_MAX LLAMA_ARG_DRAFT_MAX",
        INT, "Most tokens drafted per round.", needs=_DRAFTS, default_words="by policy", least=0,
        most=MOST_DRAFTED, capped=True,
    ),
    _spec(
        "n_min",
        "--draft-min --spec-draft-n-min --draft-n-min LLAMA_ARG_SPEC_DRAFT_N_MIN "
        "LLAMA_ARG_DRAFT_MIN", INT, "Drafts with fewer tokens than this are dropped.",
        needs=_BY_P_MIN, least=0, rare=True,
    ),
    _spec(
        "p_min", "--draft-p-min --spec-draft-p-min LLAMA_ARG_SPEC_DRAFT_P_MIN", FLOAT,
        "A draft ends at a token that is less likely than this.", needs=_BY_P_MIN_TOO, least=0,
        most=1, rare=True,
    ),
    _spec(
        "look_ahead", "--spec-look-ahead", INT,
        "Number of larger batch sizes to try after the best one so far.",
        needs=(PolicyName.COSTS,), least=0, rare=True,
    ),
    _spec(
        "p_top_k", "--spec-p-top-k", INT,
        "For published rules, a token's probability is its share among this many likeliest tokens.",
        needs=tuple(name for name in PolicyName if name in BY_P), least=0, rare=True,
        more="The default is that of llama.cpp's draft sampler, for which the rules were tuned. 0 "
        "takes all tokens.",
    ),
    _spec(
        "accept", "--spec-accept", choice(tuple(AcceptRule)), "Rule for keeping a drafted token.",
        needs=_DRAFTS, rare=True,
        more="match keeps it if the sampler chooses it too. reject decides by rejection sampling "
        "with the draft's probabilities ([speculation.md](speculation.md#losslessness)).",
    ),
    _spec(
        "replacements", "--spec-replace", REPLACEMENTS,
        "Exchange texts when drafts of a model with another vocabulary are translated.",
        needs=(DrafterName.DRAFT,),
        more="The target's text TARGET is DRAFT for the draft model. Such drafts are translated "
        "without this flag, too ([speculation.md](speculation.md#drafters)). With it, even those "
        "of a model with the same vocabulary are.",
        rare=True,
    ),
    _of_drafter(
        "ngram_simple_size_n", "--spec-ngram-simple-size-n",
        "Last tokens of the text that are looked up.", DrafterName.NGRAM_SIMPLE,
    ),
    _of_drafter(
        "ngram_simple_size_m", "--spec-ngram-simple-size-m", "Most tokens of a draft.",
        DrafterName.NGRAM_SIMPLE,
    ),
    _of_drafter(
        "ngram_map_k_size_n", "--spec-ngram-map-k-size-n",
        "Last tokens of the text that are looked up.", DrafterName.NGRAM_MAP_K,
    ),
    _of_drafter(
        "ngram_map_k_size_m", "--spec-ngram-map-k-size-m", "Most tokens of a draft.",
        DrafterName.NGRAM_MAP_K,
    ),
    _of_drafter(
        "ngram_map_k_min_hits", "--spec-ngram-map-k-min-hits",
        "Times that the looked-up tokens must have occurred before they draft.",
        DrafterName.NGRAM_MAP_K,
    ),
    _of_drafter(
        "ngram_map_k4v_size_n", "--spec-ngram-map-k4v-size-n",
        "Last tokens of the text that are looked up.", DrafterName.NGRAM_MAP_K4V,
    ),
    _of_drafter(
        "ngram_map_k4v_size_m", "--spec-ngram-map-k4v-size-m", "Most tokens of a draft.",
        DrafterName.NGRAM_MAP_K4V,
    ),
    _of_drafter(
        "ngram_map_k4v_min_hits", "--spec-ngram-map-k4v-min-hits",
        "Times that the looked-up tokens must have occurred before they draft.",
        DrafterName.NGRAM_MAP_K4V,
    ),
    _of_drafter(
        "ngram_mod_n_match", "--spec-ngram-mod-n-match",
        "Last tokens of the text that are looked up, by a hash.", DrafterName.NGRAM_MOD,
    ),
    _of_drafter(
        "ngram_mod_n_min", "--spec-ngram-mod-n-min",
        "Drafts with fewer tokens than this are dropped.", DrafterName.NGRAM_MOD, least=0,
    ),
    _of_drafter(
        "ngram_mod_n_max", "--spec-ngram-mod-n-max", "Most tokens of a draft.",
        DrafterName.NGRAM_MOD,
    ),
    _spec(
        "lookup_static", "--lookup-cache-static -lcs", PATH,
        "File with llama.cpp's lookup cache, which is only read.", needs=(DrafterName.NGRAM_CACHE,),
    ),
    _spec(
        "lookup_dynamic", "--lookup-cache-dynamic -lcd", PATH,
        "File with llama.cpp's lookup cache, which is updated at the end.",
        needs=(DrafterName.NGRAM_CACHE,),
        more="It keeps at most a million contexts, and drops rare and old ones. Without this file "
        "drafts come only from the conversation.",
    ),
    _spec(
        "suffix_corpus", "--spec-suffix-corpus", PATH,
        "Text file to draft from, besides the conversation.", needs=(DrafterName.SUFFIX,),
    ),
    _of_drafter(
        "suffix_min_match", "--spec-suffix-min-match", "Shortest match that drafts, in tokens.",
        DrafterName.SUFFIX,
    ),
    _spec(
        "synth_rates", "--spec-synth-rates LLAMA_ARG_SPEC_SYNTH_RATES", RATES,
        "Shares of drafts whose first 1, 2, ... tokens are accepted. The text is nonsense.",
        needs=(DrafterName.SYNTHETIC,),
    ),
    _spec(
        "synth_len", "--spec-synth-len LLAMA_ARG_SPEC_SYNTH_LEN", FLOAT,
        "Mean tokens per round, with the target's own. The text is nonsense.",
        needs=(DrafterName.SYNTHETIC,), least=1, most=MOST_DRAFTED + 1,
    ),
)  # fmt: skip

TABLE: tuple[Flag, ...] = (
    *_MODEL,
    *_OFFLOAD,
    *_SPECULATION,
    *SAMPLING,
    *COMMANDS,
)
