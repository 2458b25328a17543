"""Flags of one command each, and those about what the program shows."""

from __future__ import annotations

import json
from typing import get_args

from offload.plan.pooling import POOLINGS
from specoffload.bench.llama_bench import FORMATS
from specoffload.chat.conversation import ReasoningFormat
from specoffload.config.flags.flag import (
    FALSE,
    FLOAT,
    INT,
    OPENS,
    PATH,
    SWITCH,
    TEXT,
    TRUE,
    Flag,
    Kind,
    Panel,
    Positional,
    choice,
)
from specoffload.config.flags.reading import (
    COUNTS,
    KEYS,
    N_PREDICT,
    PARALLEL,
    RAM,
    RATE,
)
from specoffload.config.options import (
    BenchOptions,
    ChatOptions,
    DoctorOptions,
    Options,
    OutputOptions,
    PlanOptions,
    ProfileOptions,
    RunOptions,
    ServeOptions,
    Toggle,
    TraceOptions,
    TuneOptions,
)
from specoffload.session.generation import AskedOptions

_P = Panel.COMMAND
_PLAN = frozenset({"plan"})
_MOST_PARALLEL = 64
_RUN, _SERVE = frozenset({"run"}), frozenset({"serve"})
_BENCH, _PROFILE = frozenset({"bench"}), frozenset({"profile"})

_PROMPT_FILE = "run keeps prompts in files, and serve slots, see --slot-save-path"

# ik_llama.cpp's values, and llama.cpp's of its variable.
_UI_WORDS: dict[str, object] = {"llamacpp": "auto"}
_UI_WORDS |= dict.fromkeys(TRUE, "auto") | dict.fromkeys(FALSE, "none")
_UI = choice(("auto", "none"), _UI_WORDS)

RUN = (
    Flag(
        RunOptions, "prompt", ("--prompt", "-p"), TEXT, "Text to answer, or to continue.", _P,
        commands=_RUN, first=True,
    ),
    Flag(
        RunOptions, "file", ("--file", "-f"), PATH, "File with that text.", _P, commands=_RUN,
    ),
    Flag(
        RunOptions, "conversation", ("--conversation", "-cnv"), SWITCH,
        "Answer by the chat template; off: continue the text as it stands.", _P, commands=_RUN,
        off=("-no-cnv", "--no-conversation"),
        default_words="on for a model with a template, off for the embedded pair",
        more="A model without a template gets ChatML's with -cnv.",
        elsewhere="run alone tells answers from text that is continued",
    ),
    Flag(
        RunOptions, "escape", ("--escape", "-e"), SWITCH,
        "Read \\n, \\t, \\\\ and the like in the prompt as what they stand for.", _P, commands=_RUN,
        off=("--no-escape",), rare=True,
    ),
    Flag(
        RunOptions, "n_predict", ("--n-predict", "-n", "--predict"), N_PREDICT,
        "Most tokens to write; -1: to the end of the context.", _P, commands=_RUN,
        variables=("LLAMA_ARG_N_PREDICT",), first=True,
        default_words="an answer's own end; 128 of a text that is continued",
    ),
    Flag(
        RunOptions, "prompt_cache", ("--prompt-cache",), PATH,
        "File that keeps the evaluated prompt for the next run.", _P, commands=_RUN, rare=True,
        more="A prompt that begins as the last one did is evaluated from where they differ.",
        elsewhere=_PROMPT_FILE,
    ),
    Flag(
        RunOptions, "prompt_cache_all", ("--prompt-cache-all",), SWITCH,
        "Keep what was written after the prompt too.", _P, commands=_RUN, rare=True,
        elsewhere=_PROMPT_FILE,
    ),
    Flag(
        RunOptions, "prompt_cache_ro", ("--prompt-cache-ro",), SWITCH,
        "Use the file and do not write it.", _P, commands=_RUN, rare=True,
        elsewhere=_PROMPT_FILE,
    ),
)  # fmt: skip

_RESULTS = frozenset({"run", "bench", "profile", "plan", "models", "trace", "doctor"})
_CHATS = frozenset({"run", "chat"})
_ANSWERS = frozenset({"run", "chat", "serve"})


def _json_object(text: str) -> object:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("must be a JSON object") from None
    if not isinstance(found, dict):
        raise ValueError("must be a JSON object")
    return found


JSON_OBJECT = Kind("JSON", _json_object)

CHAT = (
    Flag(
        AskedOptions, "n_predict", ("--n-predict", "-n", "--predict"), N_PREDICT,
        "Most tokens of an answer; -1: to the end of the context.", _P,
        variables=("LLAMA_ARG_N_PREDICT",), commands=frozenset({"chat"}), default_words="-1",
    ),
    Flag(
        ChatOptions, "system", ("--system-prompt", "-sys"), TEXT,
        "Instructions that stand before a conversation.", _P, commands=_CHATS,
    ),
    Flag(
        ChatOptions, "system_file", ("--system-prompt-file", "-sysf"), PATH,
        "File of such instructions.", _P, commands=_CHATS, rare=True,
    ),
    Flag(
        ChatOptions, "template", ("--chat-template", "--chat-template-file"), TEXT,
        "Template of a conversation: llama.cpp's name for it, a file, or Jinja.", _P,
        variables=("LLAMA_ARG_CHAT_TEMPLATE", "LLAMA_ARG_CHAT_TEMPLATE_FILE"), commands=_ANSWERS,
        default_words="the model's, else chatml", rare=True,
        more="The names are in docs/chat-formats.md.",
    ),
    Flag(
        ChatOptions, "template_kwargs", ("--chat-template-kwargs",), JSON_OBJECT,
        "Variables for the template, as a JSON object.", _P,
        variables=("LLAMA_ARG_CHAT_TEMPLATE_KWARGS",), commands=_ANSWERS, rare=True,
    ),
    Flag(
        ChatOptions, "reasoning_format", ("--reasoning-format",), choice(get_args(ReasoningFormat)),
        "How reasoning is given: auto and deepseek apart from the answer, none within it.", _P,
        variables=("LLAMA_ARG_THINK",), commands=_ANSWERS, rare=True,
    ),
    Flag(
        ChatOptions, "reasoning", ("--reasoning", "-rea"), choice(Toggle),
        "Whether the model is to reason; auto: as its template has it.", _P,
        variables=("LLAMA_ARG_REASONING",), commands=_ANSWERS,
    ),
    Flag(
        ChatOptions, "reasoning_effort", ("--reasoning-effort",), TEXT,
        "How much, in the words of the template: low, medium, high.", _P,
        variables=("LLAMA_ARG_REASONING_EFFORT",), commands=_ANSWERS, rare=True,
    ),
    Flag(
        ChatOptions, "prefill", ("--prefill-assistant",), SWITCH,
        "An answer that a conversation ends with is continued.", _P,
        variables=("LLAMA_ARG_PREFILL_ASSISTANT",), commands=_SERVE, rare=True,
        off=("--no-prefill-assistant",), off_value=False,
    ),
)  # fmt: skip

SERVE = (
    Flag(
        ServeOptions, "host", ("--host",), TEXT, "Address to listen on.", Panel.SERVER,
        variables=("LLAMA_ARG_HOST",), commands=_SERVE, first=True,
    ),
    Flag(
        ServeOptions, "port", ("--port",), INT, "0 takes a free one.", Panel.SERVER,
        variables=("LLAMA_ARG_PORT",), least=0, most=65535, commands=_SERVE, first=True,
    ),
    Flag(
        ServeOptions, "api_key", ("--api-key",), KEYS,
        "Bearer token to ask for; commas separate several.", Panel.SERVER,
        variables=("LLAMA_API_KEY",), commands=_SERVE,
    ),
    Flag(
        ServeOptions, "api_key_file", ("--api-key-file",), PATH, "File of such tokens, one a line.",
        Panel.SERVER, variables=("LLAMA_ARG_API_KEY_FILE",), commands=_SERVE, rare=True,
        more="Lines that begin with # are comments.",
    ),
    Flag(
        ServeOptions, "cors_origins", ("--cors-origins",), TEXT,
        "Origins of pages that may use the server from a browser, commas between them.",
        Panel.SERVER, variables=("LLAMA_ARG_CORS_ORIGINS",), commands=_SERVE, rare=True,
        more="`*` is any. A proxy's public origin goes here too: without it, a server on loopback "
        "answers only requests to 127.0.0.1, ::1 and localhost.",
    ),
    Flag(
        ServeOptions, "metrics", ("--metrics",), SWITCH,
        "Counters at /metrics, for Prometheus.", Panel.SERVER, commands=_SERVE,
        variables=("LLAMA_ARG_ENDPOINT_METRICS",),
    ),
    Flag(
        ServeOptions, "strict_params", ("--strict-params",), SWITCH,
        "A parameter of a request that has no effect is a 400, and not a header of its answer.",
        Panel.SERVER, commands=_SERVE, rare=True,
    ),
    Flag(
        ServeOptions, "max_queue", ("--max-queue",), INT,
        "Requests that may wait; more get a 503.", Panel.SERVER, least=0, commands=_SERVE,
    ),
    Flag(
        ServeOptions, "watchdog_s", ("--watchdog",), FLOAT,
        "Seconds of silence after which the engine process is taken to hang, and another is "
        "started; 0: never.", Panel.SERVER, least=0, commands=_SERVE, rare=True,
        more="While a prompt is read, ten times as many.",
    ),
    Flag(
        ServeOptions, "ui", ("--ui", "--webui"), _UI, "A page to chat with, at /.", Panel.SERVER,
        off=("--no-ui", "--no-webui"), off_value="none", variables=("LLAMA_ARG_UI",),
        commands=_SERVE, bare="auto", rare=True,
    ),
    Flag(
        ServeOptions, "parallel", ("--parallel", "-np"), PARALLEL,
        "Requests that run at once; -1: chosen.",
        Panel.SERVER, variables=("LLAMA_ARG_N_PARALLEL",), least=1, most=_MOST_PARALLEL,
        default_words="4, fewer in a small context", commands=_SERVE,
        more="They share the context: each may take all of it that the others leave. When it is "
        "full, the one that came last waits until there is room again.",
    ),
    Flag(
        ServeOptions, "cache_ram_mib", ("--cache-ram", "-cram"), INT,
        "MiB of host memory for prompts whose slots others needed; -1: no limit, 0: none.",
        Panel.SERVER, variables=("LLAMA_ARG_CACHE_RAM",), least=-1, commands=_SERVE,
    ),
    Flag(
        ServeOptions, "embeddings", ("--embeddings", "--embedding"), SWITCH,
        "Make embeddings, also of a model whose file names no pooling.", Panel.SERVER,
        variables=("LLAMA_ARG_EMBEDDINGS",), commands=_SERVE, rare=True,
        more="They take a second context of --ubatch-size tokens, the longest text that can be "
        "embedded. Text is generated as without it.",
    ),
    Flag(
        ServeOptions, "pooling", ("--pooling",), choice(POOLINGS),
        "How the vectors of a text's tokens become one.", Panel.SERVER,
        variables=("LLAMA_ARG_POOLING",), default_words="the model file's", commands=_SERVE,
        rare=True, more="It implies --embeddings.",
    ),
    Flag(
        ServeOptions, "slot_save_path", ("--slot-save-path",), PATH,
        "Folder for what POST /slots/ID?action=save keeps.", Panel.SERVER, commands=_SERVE,
        rare=True,
    ),
    Flag(
        ServeOptions, "slot_similarity", ("--slot-prompt-similarity", "-sps"), FLOAT,
        "Share of a prompt that an idle slot must hold to be chosen for it; 0: none is.",
        Panel.SERVER, least=0, most=1, commands=_SERVE, rare=True,
        elsewhere="one request runs, in the one slot",
    ),
    Flag(
        AskedOptions, "time_limit_s", ("--time-limit",), FLOAT,
        "Seconds after which an answer ends as it is.", Panel.SERVER, above=0, commands=_SERVE,
        default_words="none", request="time_limit_s", rare=True,
    ),
    Flag(
        AskedOptions, "n_predict", ("--n-predict", "-n", "--predict"), N_PREDICT,
        "Most tokens of an answer whose request does not say; -1: to the end of the context.",
        Panel.SERVER, commands=_SERVE, variables=("LLAMA_ARG_N_PREDICT",),
        default_words="-1", request="max_tokens",
    ),
)  # fmt: skip

BENCH = (
    Flag(
        BenchOptions, "n_predict", ("--n-predict", "-n"), INT, "Tokens per prompt.", _P, least=1,
        commands=_BENCH,
    ),
    Flag(
        BenchOptions, "repetitions", ("--repetitions", "-r"), INT, "Timed sets.", _P, least=1,
        commands=_BENCH,
    ),
    Flag(
        BenchOptions, "vs", ("--vs",), TEXT,
        "llama-server=PATH: compare with this program too, its draft flags swept.", _P,
        commands=_BENCH,
    ),
    Flag(
        BenchOptions, "n_prompt", ("--n-prompt", "-p"), INT, "Tokens of the long prompt.", _P,
        least=1, commands=_BENCH,
    ),
    Flag(
        BenchOptions, "output", ("--output", "-o", "--output-format", "--output-file"),
        choice(FORMATS), "Write what llama-bench writes, under its names, and nothing else.", _P,
        commands=_BENCH, more="With -npl what llama-batched-bench writes: md or jsonl.",
    ),
    Flag(
        BenchOptions, "n_pl", ("-npl",), COUNTS,
        "Measure so many sequences at once instead, as llama-batched-bench does.", _P,
        commands=_BENCH, rare=True, default_words="1",
    ),
    Flag(
        BenchOptions, "n_pp", ("-npp",), COUNTS, "Prompt tokens of each sequence.", _P,
        commands=_BENCH, rare=True, default_words="512",
    ),
    Flag(
        BenchOptions, "n_tg", ("-ntg",), COUNTS, "Tokens that each sequence writes.", _P,
        commands=_BENCH, rare=True, default_words="128",
    ),
    Flag(
        BenchOptions, "is_pp_shared", ("-pps",), SWITCH, "The sequences share one prompt.", _P,
        commands=_BENCH, rare=True,
    ),
)  # fmt: skip

PROFILE = (
    Flag(
        ProfileOptions, "text", ("--text",), PATH, "Text to measure on.", _P,
        default_words="the demo's", commands=_PROFILE,
    ),
    Flag(
        ProfileOptions, "n_max", ("--n-max",), INT, "Largest batch.", _P, least=1, most=64,
        default_words="64", commands=_PROFILE,
    ),
    Flag(
        ProfileOptions, "repetitions", ("--repetitions", "-r"), INT, "Timed sets.", _P, least=1,
        default_words="4", commands=_PROFILE,
    ),
    Flag(
        ProfileOptions, "plot", ("--plot",), PATH, "Write a plot (.png, .svg, .pdf).", _P,
        commands=_PROFILE,
    ),
    Flag(
        ProfileOptions, "export_to", ("--export",), PATH,
        "Write .json, .jsonl (llama-batched-bench) or costs.", _P, commands=_PROFILE,
    ),
    Flag(
        ProfileOptions, "import_from", ("--import",), PATH,
        "Read one of those instead of measuring.", _P, commands=_PROFILE,
    ),
    Flag(
        ProfileOptions, "plot_with", ("--plot-with",), PATH,
        "Profile of another run, drawn beside this one; may be repeated.", _P, commands=_PROFILE,
        repeats=True, more="In the formats of --import. With a profile (.json) in place of the "
        "model nothing is opened or measured.",
    ),
    Flag(
        ProfileOptions, "labels", ("--label",), TEXT,
        "Name of a run in the plot, this one's first; may be repeated.", _P, commands=_PROFILE,
        repeats=True, default_words="the files'",
    ),
    Flag(
        ProfileOptions, "force", ("--force",), SWITCH,
        "Store it, though the stored profile has larger batches or more repetitions.", _P,
        commands=_PROFILE,
    ),
)  # fmt: skip

PLAN = (
    Flag(
        PlanOptions, "link_bytes_per_s", ("--link",), RATE,
        "Host memory to device, e.g. 12GB/s.", _P, default_words="25GB/s", commands=_PLAN,
    ),
    Flag(
        PlanOptions, "ram", ("--ram",), RAM,
        "Free host memory and what all cores read of it, e.g. 512GiB,200GB/s; or one of both.", _P,
        default_words="what is free here,70GB/s", commands=_PLAN,
    ),
)  # fmt: skip

OUTPUT = (
    Flag(
        OutputOptions, "as_json", ("--json",), SWITCH,
        "Results as one line of JSON, and nothing else on standard output.", _P,
        commands=_RESULTS,
    ),
)  # fmt: skip

MACHINE = (
    Flag(
        DoctorOptions, "numa", ("--numa",), SWITCH,
        "Prove where pages lie, strategy by strategy.", _P, commands=frozenset({"doctor"}),
    ),
    Flag(
        TuneOptions, "time_limit_s", ("--time-limit",), FLOAT,
        "Seconds; what is left out is named.", _P, above=0, commands=frozenset({"tune numa"}),
    ),
)  # fmt: skip

SHOWN = (
    Flag(
        Options, "trace", ("--trace",), PATH,
        "Write what ran when, in Chrome's trace format (docs/trace.md).", Panel.DEBUGGING,
    ),
    Flag(
        Options, "verbose", ("--verbose", "-v", "--log-verbose"), SWITCH,
        "What was chosen and why, what each answer took, and the library's warnings.",
        Panel.DEBUGGING,
    ),
    Flag(
        Options, "library_log", ("-vv", "--library-log"), SWITCH,
        "That, and the library's whole log, its lines marked 'llama.cpp:'.", Panel.DEBUGGING,
        rare=True,
    ),
    Flag(
        Options, "strict", ("--strict-flags",), SWITCH,
        "A flag that changes nothing is an error, not a warning.", Panel.DEBUGGING,
        commands=OPENS | {"tune numa"}, rare=True,
    ),
)  # fmt: skip

FLAGS = (*RUN, *CHAT, *SERVE, *BENCH, *PROFILE, *PLAN, *OUTPUT, *MACHINE, *SHOWN)

_OPENED = (OPENS - _RUN) | {"tune numa"}

POSITIONALS = (
    Positional(
        RunOptions, "words", TEXT, "MODEL.gguf|PROMPT",
        "A model, or a prompt for the embedded pair.", _RUN,
    ),
    Positional(
        Options, "model", PATH, "MODEL.gguf", "GGUF file of the target, as with --model.",
        _OPENED,
    ),
    Positional(TraceOptions, "file", PATH, "FILE", "What --trace wrote.", frozenset({"trace"})),
)  # fmt: skip
