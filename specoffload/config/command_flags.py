"""Flags of output and of single commands. `table` joins them with all others."""

from __future__ import annotations

from functools import partial
from typing import get_args

from offload.times.context_memory import POOLINGS
from specoffload.chat.conversation import ReasoningFormat
from specoffload.config.draft_making_flags import DRAFT_MAKING, DRAFT_MAKING_WORDS
from specoffload.config.flag import (
    FALSE,
    FLOAT,
    INT,
    MODEL_TEXT,
    OPENS,
    PATH,
    SWITCH,
    TEXT,
    TRUE,
    Panel,
    Positional,
    ValueKind,
    choice,
    flag,
)
from specoffload.config.hardware_parts import NAMES as MACHINE_NAMES
from specoffload.config.options import (
    BENCH_FORMATS,
    BenchOptions,
    ChatOptions,
    CommandOptions,
    Options,
    PlanOptions,
    ProfileOptions,
    RunOptions,
    ServeOptions,
    SweepOptions,
    Toggle,
    WorkerFlags,
    WorkloadName,
)
from specoffload.config.sampling_flags import ANSWERS
from specoffload.config.values import (
    ADDRESS,
    ANY_TEXT,
    CONTENTS,
    CONVERSATIONS,
    COUNTS,
    DISK_ROOM,
    JSON_OBJECT,
    KEYS,
    LINKS,
    N_PREDICT,
    NETWORK,
    PAIR_OF_COUNTS,
    PARALLEL,
    POLICIES,
    RAM,
    RATE,
    RATES,
    RUNS,
    VERBOSITY,
    WORKLOADS,
)
from specoffload.generation.generation import AskedOptions


def _only(*names: str) -> frozenset[str]:
    return frozenset(names)


_RUN, _SERVE, _PLAN = _only("run"), _only("serve"), _only("plan")
_BENCH, _PROFILE = _only("bench"), _only("profile")
_MEASURES = _only("bench", "report")
_CHATS = _only("run", "chat")
_RESULTS = _only(
    "run",
    "bench",
    "profile",
    "report",
    "plan",
    "models",
    "trace",
    "doctor",
    "draft prune",
    "draft judge",
    "draft distil",
)


_run = partial(flag, RunOptions, panel=Panel.COMMAND, commands=_RUN)
_PROMPT_FILE = (
    "only run keeps a prompt in a file that it names; serve has --cache-disk and --slot-save-path"
)

_RUN_FLAGS = (
    _run("prompt", "--prompt -p", MODEL_TEXT, "Text to answer, or to continue.", first=True),
    _run(
        "prompt", "--file -f", CONTENTS, "File with the text, as for --prompt.",
        more="`-` is standard input, and `<(command)` is a command's output.",
    ),
    _run(
        "conversation", "--conversation -cnv !-no-cnv !--no-conversation", SWITCH,
        "On: answer by the chat template. Off: continue the text.",
        default_words="on for a model with a template, off for the embedded pair",
        more="With -cnv a model without a template gets ChatML's.",
        elsewhere="only run distinguishes answers from text that is continued",
    ),
    _run(
        "escape", "--escape -e !--no-escape", SWITCH,
        "Read \\n, \\t, \\\\ and the like in the prompt as escapes.", rare=True,
    ),
    _run(
        "n_predict", "--n-predict -n --predict LLAMA_ARG_N_PREDICT", N_PREDICT,
        "Most tokens to write.", first=True, more="-1 writes to the end of the context.",
        default_words="to an answer's own end, or 128 if a text is continued",
    ),
    _run(
        "prompt_cache", "--prompt-cache", PATH,
        "File that keeps the evaluated prompt for the next run.", rare=True,
        more="The next prompt is evaluated from the first token that differs.",
        elsewhere=_PROMPT_FILE,
    ),
    _run(
        "prompt_cache_all", "--prompt-cache-all", SWITCH,
        "Keep the text that was written after the prompt, too.", rare=True, elsewhere=_PROMPT_FILE,
    ),
    _run(
        "prompt_cache_ro", "--prompt-cache-ro", SWITCH,
        "Read the file of --prompt-cache, and do not write it.",
        rare=True, elsewhere=_PROMPT_FILE,
    ),
)  # fmt: skip

_chat = partial(flag, ChatOptions, panel=Panel.COMMAND, commands=ANSWERS)

_CHAT_FLAGS = (
    flag(
        AskedOptions, "n_predict", "--n-predict -n --predict LLAMA_ARG_N_PREDICT", N_PREDICT,
        "Most tokens of an answer. -1 allows all of the context.", Panel.COMMAND,
        commands=_only("chat"), default_words="-1",
    ),
    _chat(
        "system", "--system-prompt -sys", ANY_TEXT, "Instructions before the conversation.",
        commands=_CHATS,
    ),
    _chat(
        "system", "--system-prompt-file -sysf", CONTENTS,
        "File with the instructions, as for --system-prompt.",
        commands=_CHATS, rare=True,
    ),
    _chat(
        "template",
        "--chat-template --chat-template-file LLAMA_ARG_CHAT_TEMPLATE "
        "LLAMA_ARG_CHAT_TEMPLATE_FILE", TEXT,
        "Chat template: llama.cpp's name for it, a file, or Jinja.", rare=True,
        default_words="the model's, else chatml", more="docs/chat-formats.md lists the names.",
    ),
    _chat(
        "template_kwargs", "--chat-template-kwargs LLAMA_ARG_CHAT_TEMPLATE_KWARGS", JSON_OBJECT,
        "Variables for the template, as a JSON object.", rare=True,
    ),
    _chat(
        "reasoning_format", "--reasoning-format LLAMA_ARG_THINK",
        choice(tuple(name for name in get_args(ReasoningFormat) if name != "hidden")),
        "auto and deepseek report reasoning apart from the answer, none leaves it in the answer.",
        rare=True,
    ),
    _chat(
        "reasoning", "--reasoning -rea LLAMA_ARG_REASONING", choice(Toggle),
        "Whether the model reasons.", more="With auto the template decides.",
    ),
    _chat(
        "reasoning_effort", "--reasoning-effort LLAMA_ARG_REASONING_EFFORT", TEXT,
        "How much the model reasons, in the template's words, e.g. low, medium, high.", rare=True,
    ),
    _chat(
        "prefill",
        "--prefill-assistant !--no-prefill-assistant LLAMA_ARG_PREFILL_ASSISTANT", SWITCH,
        "Continue the last message of a conversation if it is an answer.", commands=_SERVE,
        rare=True,
    ),
)  # fmt: skip

_serve = partial(flag, ServeOptions, panel=Panel.SERVER, commands=_SERVE)
_ONE_SLOT = "there is one slot"
_NO_LOG = "only serve writes a log; results go to standard output, notes to standard error"
# Values of ik_llama.cpp's flag, and of llama.cpp's environment variable.
_UI = choice(
    ("auto", "none"),
    {"llamacpp": "auto", **dict.fromkeys(TRUE, "auto"), **dict.fromkeys(FALSE, "none")},
)

_MEDIA_URLS = choice(("none", "public", "all"))

_SERVE_FLAGS = (
    _serve(
        "host", "--host LLAMA_ARG_HOST", TEXT,
        "Address to listen on.", first=True, more="Or the path of a Unix socket.",
    ),
    _serve(
        "port", "--port LLAMA_ARG_PORT", INT, "Port. 0 takes a free one.", least=0, most=65535,
        first=True,
    ),
    _serve(
        "api_key", "--api-key LLAMA_API_KEY", KEYS,
        "Bearer token that requests need. Commas separate several.",
    ),
    _serve(
        "api_key_file", "--api-key-file LLAMA_ARG_API_KEY_FILE", PATH,
        "File with tokens as for --api-key, one per line.", rare=True,
        more="Lines that begin with # are comments.",
    ),
    _serve(
        "cors_origins", "--cors-origins LLAMA_ARG_CORS_ORIGINS", TEXT,
        "Origins of web pages that may use the server, separated by commas.", rare=True,
        more="`*` allows every page, `moz-extension://*` every page of that scheme. A proxy's "
        "public origin belongs here too, because a server on loopback otherwise answers only "
        "requests to 127.0.0.1, ::1 and localhost.",
    ),
    _serve(
        "ssl_key_file", "--ssl-key-file LLAMA_ARG_SSL_KEY_FILE", PATH,
        "File with the private key for HTTPS, in PEM and not encrypted.", rare=True,
        more="Needs --ssl-cert-file.",
    ),
    _serve(
        "ssl_cert_file", "--ssl-cert-file LLAMA_ARG_SSL_CERT_FILE", PATH,
        "File with the certificate for HTTPS, and those of its issuers, in PEM.", rare=True,
        more="Needs --ssl-key-file.",
    ),
    _serve(
        "api_prefix", "--api-prefix LLAMA_ARG_API_PREFIX", TEXT,
        "Path that all paths of the server begin with, e.g. /llm.", rare=True,
    ),
    _serve(
        "metrics", "--metrics LLAMA_ARG_ENDPOINT_METRICS", SWITCH,
        "Serve counters at /metrics, for Prometheus.",
    ),
    _serve(
        "max_queue", "--max-queue", INT, "Most requests that may wait.", least=0,
        more="Further ones get a 503.",
    ),
    _serve(
        "strict_model", "--strict-model", SWITCH,
        "Answer 404 to requests that name another model.", rare=True,
        more="Without this flag they are answered by the model that is served, and each such name "
        "is logged once.",
    ),
    _serve(
        "media_path", "--media-path", PATH,
        "Folder of images that requests may name as file://NAME.", rare=True,
        more="Without it, images have to be in the requests themselves, or at addresses that "
        "--allow-media-urls allows.",
    ),
    _serve(
        "allow_media_urls", "--allow-media-urls !--no-allow-media-urls", _MEDIA_URLS,
        "Fetch images at http and https addresses of requests.", off_value="none", bare="public",
        rare=True,
        more="`public` refuses addresses of this machine and of private networks. `all` fetches "
        "them, too, so clients reach what this machine reaches. llama-server fetches all without a "
        "flag.",
    ),
    _serve(
        "media_marker", "--media-marker LLAMA_MEDIA_MARKER", TEXT,
        "Text that stands for an image in the prompts of /completion.", rare=True,
        more="Without it, each start makes a random one, which /props shows as `media_marker`.",
    ),
    _serve(
        "shutdown_timeout_s", "--shutdown-timeout", FLOAT,
        "Seconds that running requests have to end after SIGTERM or Ctrl-C.", least=0, rare=True,
        more="New requests get a 503 meanwhile. A second Ctrl-C ends at once.",
    ),
    _serve(
        "ui", "--ui --webui !--no-ui !--no-webui LLAMA_ARG_UI", _UI,
        "Serve a page to chat with at /.", off_value="none", bare="auto", rare=True,
    ),
    _serve(
        "parallel", "--parallel -np LLAMA_ARG_N_PARALLEL", PARALLEL,
        "Most requests that run at once. -1 takes the default.", least=1, most=64,
        default_words="4, fewer in a small context",
        more="They share the context, and each may use all that the others leave. When it is full, "
        "the latest request waits until there is room again.",
    ),
    _serve(
        "cache_ram_mib", "--cache-ram -cram LLAMA_ARG_CACHE_RAM", INT,
        "MiB of RAM for prompts of earlier requests. -1 sets no limit, and 0 keeps none.", least=-1,
        more="If experts are read from the disk, prompts get at most a sixteenth of the memory for "
        "experts.",
    ),
    _serve(
        "cache_idle_slots",
        "--cache-idle-slots !--no-cache-idle-slots LLAMA_ARG_CACHE_IDLE_SLOTS", SWITCH,
        "Move idle conversations from the KV cache to --cache-ram while other requests run.",
        rare=True,
        more="A request that runs alone without drafts moves them first. Beside others and with "
        "drafts, each moves once its cells have cost as much time as moving it out and back.",
    ),
    _serve(
        "kv_unified", "--kv-unified -kvu !--no-kv-unified !-no-kvu LLAMA_ARG_KV_UNIFIED", SWITCH,
        "Let all slots share the cells of one KV cache.", rare=True, elsewhere=_ONE_SLOT,
        more="With --no-kv-unified each slot has cells of its own, --ctx-size ÷ --parallel. This "
        "is then the context of each request. No conversation slows down another by its length, "
        "and none can use what the others leave. llama-server separates the slots unless "
        "--parallel is left out. Here they share the cells unless this flag separates them.",
    ),
    _serve(
        "kv_unified_per_slot", "--kv-unified-per-slot LLAMA_ARG_KV_UNIFIED_PER_SLOT", INT,
        "Most tokens of one slot. 0 sets no limit.", least=0, rare=True, elsewhere=_ONE_SLOT,
        more="Without --ctx-size, the context has this many tokens for each slot.",
    ),
    _serve(
        "cache_disk", "--cache-disk", DISK_ROOM,
        "Keep prompts in files, which the next start finds. They may take up to SIZE, e.g. 50GiB.",
        default_words="off", rare=True,
        more="What leaves --cache-ram goes there, and all long prompts when the server stops. The "
        "files have your texts in them, and only their owner can read them. The usual folder is "
        "~/.cache/specoffload/prompts. The prompts that were used longest ago are deleted first.",
    ),
    _serve(
        "embeddings", "--embeddings --embedding LLAMA_ARG_EMBEDDINGS", SWITCH,
        "Make embeddings. A model whose file names no pooling also needs --pooling.", rare=True,
        more="Embeddings take a second context of --ubatch-size tokens. Longer texts cannot be "
        "embedded.",
    ),
    _serve(
        "pooling", "--pooling LLAMA_ARG_POOLING", choice(POOLINGS),
        "How the vectors of a text's tokens are combined.", default_words="the model file's",
        rare=True, more="This flag implies --embeddings.",
    ),
    _serve(
        "slot_save_path", "--slot-save-path", PATH,
        "Folder of the files that POST /slots/ID?action=save writes.",
        rare=True,
    ),
    _serve(
        "slot_similarity", "--slot-prompt-similarity -sps", FLOAT,
        "Share of a prompt that an idle slot must hold to be chosen for it. With 0 none is chosen.",
        least=0, most=1, rare=True, elsewhere=_ONE_SLOT,
    ),
    _serve(
        "models_dir", "--models-dir LLAMA_ARG_MODELS_DIR", PATH,
        "Folder of models. The field `model` of a request chooses one ([several models]"
        "(server.md#several-models)).", rare=True,
        more="Its .gguf files are models, and so are its folders, which may have split models and "
        "draft models.",
    ),
    _serve(
        "models_preset", "--models-preset LLAMA_ARG_MODELS_PRESET", PATH,
        "File with a section of flags for each model, in llama-server's format.", rare=True,
    ),
    _serve(
        "models_max", "--models-max LLAMA_ARG_MODELS_MAX", INT,
        "Most models of --models-dir, --models-preset or several names that are open at once. 0 "
        "sets no limit.", least=0, rare=True,
        more="Fewer are open if they do not fit together.",
    ),
    _serve(
        "models_autoload",
        "--models-autoload !--no-models-autoload LLAMA_ARG_MODELS_AUTOLOAD", SWITCH,
        "Open a model for the first request that names it. Off: only POST /models/load does.",
        rare=True, default_words="on",
    ),
    _serve(
        "idle_s", "--sleep-idle-seconds", INT,
        "Seconds without a request after which one of several models is closed. -1 keeps it open.",
        least=-1, rare=True,
        more="The next request opens it again. A server of one model always keeps it open.",
    ),
    _serve(
        "tags", "--tags LLAMA_ARG_TAGS", TEXT,
        "Words on the model for /models, separated by commas.", rare=True,
        default_words="none",
    ),
    _serve(
        "log_file", "--log-file LLAMA_ARG_LOG_FILE", PATH,
        "File to which all that the server says is appended.", rare=True,
        more="It has the lines of standard output, and the notes and warnings of standard error. "
        "SIGHUP opens it again, for log rotation.",
        elsewhere=_NO_LOG,
    ),
    _serve(
        "log_timestamps",
        "--log-timestamps !--no-log-timestamps LLAMA_ARG_LOG_TIMESTAMPS", SWITCH,
        "Begin each line of the log with date and time.", rare=True, elsewhere=_NO_LOG,
        default_words="on",
    ),
    _serve(
        "log_prefix", "--log-prefix !--no-log-prefix LLAMA_ARG_LOG_PREFIX", SWITCH,
        "Begin each line of the log with the letter of its level: D, I, W or E.", rare=True,
        elsewhere=_NO_LOG,
    ),
    flag(
        AskedOptions, "time_limit_s", "--time-limit", FLOAT,
        "Seconds after which an answer ends, even if it is not complete.", Panel.SERVER, above=0,
        commands=_SERVE,
        default_words="none", request="time_limit_s", rare=True,
    ),
    flag(
        AskedOptions, "cache_prompt", "--cache-prompt !--no-cache-prompt LLAMA_ARG_CACHE_PROMPT",
        SWITCH,
        "Evaluate only what a prompt adds to kept text, unless the request says otherwise.",
        Panel.SERVER, commands=_SERVE, request="cache_prompt", rare=True,
        elsewhere="only serve keeps prompts of other requests",
    ),
    flag(
        AskedOptions, "n_predict", "--n-predict -n --predict LLAMA_ARG_N_PREDICT", N_PREDICT,
        "Most tokens of an answer, if its request does not say.",
        Panel.SERVER, commands=_SERVE, default_words="-1", request="max_tokens",
        more="-1 allows all of the context.",
    ),
)  # fmt: skip

_bench = partial(flag, BenchOptions, panel=Panel.COMMAND, commands=_BENCH)

_REPORT_FLAGS = (
    flag(
        CommandOptions, "report_file", "--output -o", PATH,
        "File to write. It must not exist.", Panel.COMMAND, commands=_only("report"), first=True,
    ),
)  # fmt: skip

_swept = partial(flag, SweepOptions, panel=Panel.COMMAND, commands=_BENCH)

_BENCH_FLAGS = (
    _bench(
        "n_predict", "--n-predict -n --n-gen", INT, "Tokens to write after each prompt.", least=0,
        swept=True, commands=_MEASURES,
    ),
    _bench(
        "repetitions", "--repetitions -r", INT, "Timed repetitions.", least=1, commands=_MEASURES,
    ),
    _bench(
        "vs", "--vs", TEXT,
        "llama-server=PATH: compare with this program too, with several of its draft flags.",
        commands=_MEASURES,
    ),
    _bench(
        "n_prompt", "--n-prompt -p", INT, "Tokens of the long prompt.", least=0, swept=True,
        commands=_MEASURES,
        more="Like -n, -b, -ub, -fa, -ctk, -ctv, -t, -ngl and -ncmoe, it takes lists and ranges "
        "(64,512 or 64-512*2). Then every combination is measured, as by llama-bench, whose "
        "defaults `-p 512 -n 128` apply. 0 leaves a test out.",
    ),
    _swept(
        "n_pg", "-pg", PAIR_OF_COUNTS,
        "Also time a prompt and an answer together, as in 512,128. May be repeated.", rare=True,
        repeats=True,
    ),
    _swept(
        "n_depth", "-d --n-depth", INT,
        "Tokens of context before each test. It takes lists and ranges.", least=0, rare=True,
        default_words="0", swept=True,
    ),
    _bench(
        "output", "--output -o --output-format --output-file", choice(BENCH_FORMATS),
        "Write only rows in a format of llama-bench, with its keys.",
        more="They also have `path`, and with --policies what was drafted. With -npl the rows are "
        "those of llama-batched-bench, as md or jsonl.",
    ),
    _bench(
        "n_pl", "-npl", COUNTS,
        "Time this many sequences at once, like llama-batched-bench, in place of other tests.",
        rare=True,
        default_words="1",
    ),
    _bench(
        "n_pp", "-npp", COUNTS, "Prompt tokens of each sequence.", rare=True, default_words="512",
    ),
    _bench(
        "n_tg", "-ntg", COUNTS, "Tokens that each sequence writes.", rare=True,
        default_words="128",
    ),
    _bench("is_pp_shared", "-pps", SWITCH, "All sequences share one prompt.", rare=True),
    _bench(
        "by_drafter", "--drafters", SWITCH,
        "Compare only drafters: none, each alone, and all together.",
        more="They are those of --spec-type, or ngram-mod and all that the model has.",
    ),
    _bench(
        "by_policy", "--policies", SWITCH,
        "Compare only draft lengths: none, blocks, every policy, and the default.",
        more="Each continues texts of several kinds, in turns "
        "([bench.md](bench.md#what-drafting-brings-here)).",
    ),
    _bench(
        "strengths", "--route-cached", RATES,
        "Compare only strengths of --route-cached on a text of -n tokens, e.g. 0.02,0.05,0.25.",
        more="The text is that of -f, or a built-in one ([bench.md](bench.md#cached-routing)).",
    ),
    _bench(
        "n_kept", "--route-keep", INT,
        "Best experts of each token that --route-cached leaves to the router.", least=0, rare=True,
    ),
    _bench(
        "plot", "--plot", PATH, "Write a plot of --route-cached (.png, .svg, .pdf).", rare=True,
    ),
    _bench(
        "texts", "--texts", TEXT,
        "http://HOST:PORT: compare only the texts of a running OpenAI server.",
        more="Conversations are played in sequence twice, and all at once "
        "([bench.md](bench.md#texts-of-a-server)).",
    ),
    _bench(
        "conversations", "--file -f", CONVERSATIONS,
        "File with questions for --texts, or with a text for --route-cached.",
        rare=True,
        default_words="the built-in ones",
        more="Each line is a question. In a .jsonl file a line is a JSON string, or a list with "
        "the questions of one conversation.",
    ),
    _bench(
        "runs", "--runs", RUNS, "Runs of --texts. Each later one is compared with the first.",
        rare=True, default_words="seq,seq,par",
        more="seq holds the conversations one after the other, par all at once.",
    ),
    _bench(
        "n_responses", "--responses", INT,
        "With --texts: send one question N times to /v1/responses, and count equal answers.",
        least=1, rare=True, default_words="none",
        more="With --file, each conversation's first question is sent.",
    ),
    _bench(
        "by_agent", "--agent", SWITCH,
        "Compare only an agent's work: 20 tasks with tools, without drafts and with each drafter.",
        more="Each way is a server of its own. Valid calls and solved tasks are counted "
        "([bench.md](bench.md#an-agents-tasks)).",
    ),
    _bench(
        "agent_urls", "--agent-url", TEXT,
        "http://HOST:PORT: a running server for --agent. May be repeated.", rare=True, repeats=True,
        more="No model is opened then. The first server is what the others are compared with.",
    ),
    _bench(
        "tool_choice", "--tool-choice", choice(("auto", "required")),
        "Whether answers in --agent may call tools, or have to.", rare=True,
        more="`required` forces calls with valid arguments, also from a model that knows no tools.",
    ),
    _bench(
        "workloads", "--workloads", WORKLOADS, "Kinds of text for --policies.", rare=True,
        default_words="all",
        more=f"They are {', '.join(WorkloadName)} (all others in one session).",
    ),
    _bench(
        "only_policies", "--only-policies", POLICIES,
        "Policies that --policies compares, besides no drafts and the default.", rare=True,
        default_words="all",
    ),
    _bench(
        "blocks", "--blocks", COUNTS, "Block lengths that --policies compares.", rare=True,
        default_words=",".join(map(str, BenchOptions.blocks)),
    ),
)  # fmt: skip

_profile = partial(flag, ProfileOptions, panel=Panel.COMMAND, commands=_PROFILE)

_PROFILE_FLAGS = (
    _profile("plot", "--plot", PATH, "Write a plot (.png, .svg, .pdf)."),
    _profile(
        "export_to", "--export", PATH,
        "File to write: .json, .jsonl (llama-batched-bench), or costs.",
    ),
    _profile(
        "import_from", "--import", PATH,
        "File to read in place of measuring, in a format of --export.",
    ),
    _profile(
        "plot_with", "--plot-with", PATH,
        "Profile of another run, drawn beside this one. May be repeated.", repeats=True,
        more="It has a format of --import. If a profile (.json) takes the place of the model, "
        "nothing is opened or measured.",
    ),
    _profile(
        "labels", "--label", TEXT, "Name of a run in the plot, this one's first. May be repeated.",
        repeats=True, default_words="the files'",
    ),
)  # fmt: skip

HARDWARE = ValueKind("FILE|NAME", str, MACHINE_NAMES)
_plan = partial(flag, PlanOptions, panel=Panel.COMMAND, commands=_PLAN)
_shown = partial(flag, Options, panel=Panel.DEBUGGING)
_worker = partial(flag, WorkerFlags, panel=Panel.COMMAND, commands=_only("worker"))

_OTHER_FLAGS = (
    _worker(
        "listen", "--listen", ADDRESS, "Address to listen on. Port 0 takes a free one.",
        more="An address that other machines reach needs --rpc-secret-file, or --insecure.",
        first=True,
    ),
    _worker(
        "rpc_secret_file", "--rpc-secret-file", PATH,
        "File with a secret that clients must know, made by `openssl rand -hex 32`.",
        more="Clients get the same flag ([defence.md](defence.md)). Without the flag, the variable "
        "`SPECOFFLOAD_RPC_SECRET` may have the secret itself.",
        first=True,
    ),
    _worker(
        "insecure", "--insecure", SWITCH,
        "Let other machines use the worker without a secret.", rare=True,
        more="Everybody who reaches it and is among --allow can then use it. "
        "[defence.md](defence.md) shows how to protect it with WireGuard or SSH.",
    ),
    _worker(
        "allow", "--allow", NETWORK,
        "Address or network that may connect, e.g. 10.0.0.0/24. May be given several times.",
        default_words="every one", repeats=True, first=True,
    ),
    _plan(
        "hardware", "--hardware", HARDWARE,
        f"Machine to plan for: a JSON or TOML file, or one of {', '.join(MACHINE_NAMES)}.",
        more="--vram, --link, --ram and --disk replace its values. Without it, they describe a "
        "card that has no name here. The file's keys are in docs/plans.md.",
    ),
    _plan(
        "link_bytes_per_s", "--link", LINKS,
        "Speed from RAM to the GPU, e.g. 12GB/s, or 25GB/s,12GB/s for two GPUs.",
        default_words="--hardware, else 25GB/s",
    ),
    _plan(
        "disk_bytes_per_s", "--disk", RATE, "Speed of large reads from the disk, e.g. 6.5GB/s.",
        default_words="--hardware, else what was measured here, else 5GB/s",
    ),
    _plan(
        "ram", "--ram", RAM,
        "Free RAM, the speed at which all cores read it, or both, e.g. 512GiB,200GB/s.",
        default_words="--hardware, else what is free here,70GB/s",
    ),
    flag(
        CommandOptions, "as_json", "--json", SWITCH,
        "Print results as one line of JSON, and nothing else on standard output.", Panel.COMMAND,
        commands=_RESULTS,
    ),
    flag(
        CommandOptions, "shows_nodes", "--numa", SWITCH,
        "Show on which NUMA node pages are placed, for each strategy.", Panel.COMMAND,
        commands=_only("doctor"),
    ),
    flag(
        CommandOptions, "minutes", "--minutes", FLOAT, "Minutes to measure for.", Panel.COMMAND,
        above=0, commands=_only("tune all"),
    ),
    flag(
        CommandOptions, "time_limit_s", "--time-limit", FLOAT,
        "Seconds to spend. Parts for which no time is left are named.", Panel.COMMAND, above=0,
        commands=_only("tune numa"),
    ),
    _shown(
        "trace", "--trace", PATH,
        "Write a timeline of the run in Chrome's trace format (docs/trace.md).",
    ),
    _shown(
        "verbose", "--verbose -v --log-verbose", SWITCH,
        "Show what was chosen and why, the time of each answer, and llama.cpp's warnings.",
        commands=OPENS | {"worker"},
    ),
    _shown(
        "library_log", "--verbosity -lv --log-verbosity LLAMA_ARG_LOG_VERBOSITY", VERBOSITY,
        "From 4 on, all that --verbose shows and llama.cpp's whole log. From 5 on, also logits.",
        rare=True, more="Lines of llama.cpp's log begin with 'llama.cpp:'. The logits are those of "
        "verified rows.",
        commands=OPENS | {"worker"},
    ),
)  # fmt: skip

COMMANDS = (
    *_RUN_FLAGS,
    *_CHAT_FLAGS,
    *_SERVE_FLAGS,
    *_REPORT_FLAGS,
    *_BENCH_FLAGS,
    *_PROFILE_FLAGS,
    *DRAFT_MAKING,
    *_OTHER_FLAGS,
)

POSITIONALS = (
    Positional(
        RunOptions, "words", TEXT, "MODEL.gguf|PROMPT",
        "A model, or a prompt for the embedded pair.", _RUN,
    ),
    Positional(
        Options, "model", PATH, "MODEL.gguf", "GGUF file of the model, as with --model.",
        (OPENS - _RUN) | {"tune numa", "worker"},
    ),
    Positional(
        CommandOptions, "models_folder", PATH, "FOLDER",
        "Folder of models to list, with its subfolders. Without it, the caches are listed.",
        _only("models"),
    ),
    *DRAFT_MAKING_WORDS,
    Positional(CommandOptions, "trace_file", PATH, "FILE", "What --trace wrote.", _only("trace")),
)  # fmt: skip
