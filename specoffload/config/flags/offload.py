"""Flags of the device, of what streams, and of threads and memory nodes."""

from __future__ import annotations

from numa.place import Strategy
from specoffload.config.flags.flag import INT, OPENS, SWITCH, TEXT, Flag, Panel, choice
from specoffload.config.flags.reading import (
    BYTES,
    CROSSOVER,
    LAYERS,
    MIN_BATCH,
    THREADS,
    TOKEN_MIX,
)
from specoffload.config.options import Options, Toggle

_P = Panel.OFFLOAD

_AND_TUNE = OPENS | {"tune numa"}

FLAGS = (
    Flag(
        Options, "device", ("--device", "-dev"), TEXT,
        "auto, cpu, sim, or a name that ggml gives, such as CUDA0.", _P,
        more="auto is the first GPU, wrapped, else the plain CPU. cpu is libllama untouched. sim "
        "is the CPU wrapped as if it were a GPU, with limits sim:vram=64MiB,bw=2GB/s,latency=20us.",
        variables=("LLAMA_ARG_DEVICE",), commands=_AND_TUNE, first=True,
        reads_as=(("none", "cpu"),),
    ),
    Flag(
        Options, "vram_bytes", ("--vram",), BYTES,
        "Device memory to use, e.g. 12GiB.", _P,
        more="For weights, slots, the context and its buffers, and a draft; on sim for weights and "
        "slots alone, since the others are in host memory. What does not fit streams; less than "
        "the smallest working set is an error. At least 512 MiB of a GPU stay free for its driver "
        "and kernels, whatever is asked for.",
        default_words="what is free, less 1 GiB", commands=_AND_TUNE, first=True,
    ),
    Flag(
        Options, "min_batch", ("--min-batch",), MIN_BATCH,
        "Tokens from which streamed weights are computed on the device.", _P,
        more="Below it the CPU computes them in place. N, per kind dense=N,experts=N, off, or "
        "auto: both sides are timed once per machine and model.",
        variables=("GGML_OP_OFFLOAD_MIN_BATCH", "GGML_OFFLOAD_OP_MIN_BATCH_SIZE"),
        default_words="auto", commands=_AND_TUNE, first=True,
    ),
    Flag(
        Options, "n_cpu_moe", ("--n-cpu-moe", "-ncmoe"), INT,
        "Layers whose experts lie in host memory and stream.", _P,
        more="Those of the others are resident. Without a limit on device memory all stream.",
        variables=("LLAMA_ARG_N_CPU_MOE",), least=0, default_words="what must", first=True,
    ),
    Flag(
        Options, "plan_for", ("--plan-for",), TOKEN_MIX,
        "Prompt tokens and generated ones that device memory is shared out for, e.g. 4000:500.", _P,
        more="decode is 0:1, for which prompts may become slow. auto takes what earlier runs of "
        "the model evaluated and generated ([plans.md](plans.md)).", default_words="auto",
        rare=True,
    ),
    Flag(
        Options, "n_gpu_layers", ("--n-gpu-layers", "-ngl", "--gpu-layers"), LAYERS,
        "Layers whose dense weights are resident, the others stream.", _P,
        variables=("LLAMA_ARG_N_GPU_LAYERS",), default_words="what fits",
    ),
    Flag(
        Options, "expert_chunks", ("--expert-chunks",), choice(("auto", "on", "off")),
        "Compute a batch whose experts have no slots all at once in chunks of tokens.", _P,
        more="auto does where that is expected to be faster than the CPU, which computes it "
        "otherwise.", rare=True,
    ),
    Flag(
        Options, "slot_band", (), SWITCH,
        "Show kernels all slots, not those between which a batch's experts lie.", _P,
        more="For batches of 2 tokens and more.", off=("--no-slot-band",), rare=True,
    ),
    Flag(
        Options, "prefetch_depth", ("--prefetch-depth",), INT,
        "Weights that copies run ahead of the computation.", _P, least=0,
        more="0 copies when needed. A layer of experts has three weights.", rare=True,
    ),
    Flag(
        Options, "prefetch", (), SWITCH,
        "Do not guess a verification batch's experts from the batch before.", _P,
        off=("--no-prefetch",), rare=True,
    ),
    Flag(
        Options, "hybrid", ("--hybrid",), choice(Toggle),
        "Experts in slots on the device, the others on the CPU meanwhile.", _P,
        more="For batches of up to 64 tokens, whatever their --min-batch. auto: where decodes of "
        "that size are measured to be faster, at the start ([hybrid.md](hybrid.md)).",
        default_words="auto; off with --min-batch N or --no-profile", commands=OPENS - {"bench"},
        rare=True,
    ),
    Flag(
        Options, "hybrid_ahead", (), SWITCH,
        "Have a split layer's shared expert wait for the CPU's part, as the graph has it.", _P,
        off=("--no-hybrid-ahead",), commands=OPENS - {"bench"}, rare=True,
    ),
    Flag(
        Options, "bounce", (), SWITCH,
        "Let the driver stage copies from memory that could not be pinned.", _P,
        more="Otherwise a thread does, through a small ring of pinned memory.",
        off=("--no-bounce",), rare=True,
    ),
    Flag(
        Options, "native_placement", (), SWITCH,
        "Ask Python for each node of a new graph which side computes it.", _P,
        more="Otherwise the backend itself is asked, and --min-batch holds for a whole decode.",
        off=("--no-native-placement",), rare=True,
    ),
    Flag(
        Options, "warmup", ("--warmup",), SWITCH,
        "Try the model with a token; give slots what a GPU has left after a whole ubatch.", _P,
        more="Otherwise slots get what the file's header lets expect, and a file that makes the "
        "library stop does so in the first request.",
        off=("--no-warmup",), rare=True,
    ),
    Flag(
        Options, "mmap", ("--mmap",), SWITCH,
        "Streamed weights stay in the page cache: for models larger than RAM.", _P,
        more="They are then neither pinned nor placed. Otherwise they lie in memory of our own.",
        off=("--no-mmap",),
        variables=("LLAMA_ARG_MMAP",),
    ),
    Flag(
        Options, "mla_crossover", ("--mla-crossover",), CROSSOVER,
        "Tokens up to which MLA's value product is matrix-vector.", _P,
        more="heads is as many as the model has, auto measures it, 0 switches it off "
        "([mla.md](mla.md)).",
        default_words="auto on a GPU, else heads", rare=True,
    ),
    Flag(
        Options, "threads", ("--threads", "-t"), THREADS, "CPU threads of a decode.", _P,
        variables=("LLAMA_ARG_THREADS",), default_words="physical cores", first=True,
    ),
    Flag(
        Options, "threads_batch", ("--threads-batch", "-tb"), THREADS, "CPU threads of prefill.",
        _P, variables=("LLAMA_ARG_THREADS_BATCH",), default_words="as --threads", rare=True,
    ),
    Flag(
        Options, "numa", ("--numa",), choice(("auto", "none", *Strategy)),
        "Where threads and weights go on several memory nodes.", _P,
        more="auto takes what `specoffload tune numa` measured, else rows; none leaves both to the "
        "kernel; on one node nothing changes ([numa.md](numa.md)).", variables=("LLAMA_ARG_NUMA",),
        reads_as=(("isolate", "single"), ("numactl", "none")),
    ),
    Flag(
        Options, "numa_node", ("--numa-node",), INT,
        "Keep all threads and streamed weights on this node.", _P, least=0, rare=True,
    ),
)  # fmt: skip
