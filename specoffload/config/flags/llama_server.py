"""llama-server's flags, and those of logs and benches, that are none of ours."""

from __future__ import annotations

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

_OWN_PAGE = NoEffect("the page at / is the program's own")
_NO_TOOLS = NoEffect("there are no tools of the server's own")
_ONE_MODEL = Refused("one model is served: give it with --model")
_BROWSERS = NoEffect("pages of --cors-origins may use every method and header, without cookies")
_PROXY = Refused("this server speaks plain HTTP: put a proxy before it that does")
_LOG = NoEffect("the log goes to standard error as it is")
_NO_RANKS = Refused("this server ranks nothing: leave it out")
_BENCH = NoEffect("all sequences write one token a decode")
_DEBUG_LEVEL = 4  # llama.cpp's, of 5


def _verbosity(value: str) -> Answer:
    try:
        level = int(value)
    except ValueError:
        raise ValueError("must be a whole number") from None
    return Becomes(("--library-log",)) if level >= _DEBUG_LEVEL else ALREADY


def _norm(value: str) -> Answer:
    return ALREADY if value == "2" else NoEffect("embeddings of texts have length 1")


SERVER = (
    foreign(
        "-cb --cont-batching !-nocb !--no-cont-batching LLAMA_ARG_CONT_BATCHING", ALREADY
    ),
    foreign(
        "--cache-prompt !--no-cache-prompt LLAMA_ARG_CACHE_PROMPT", ALREADY,
        off=NoEffect("a prompt's known beginning is not evaluated again; answers are the same"),
    ),
    *valued(
        NoEffect("a prompt's known beginning is not evaluated again, its later parts are"),
        "--cache-reuse LLAMA_ARG_CACHE_REUSE",
    ),
    *switches(
        NoEffect("/props is there, and cannot be written"), "--props LLAMA_ARG_ENDPOINT_PROPS",
    ),
    foreign(
        "--slots !--no-slots LLAMA_ARG_ENDPOINT_SLOTS", ALREADY,
        off=NoEffect("GET /slots tells what each slot holds, and no text of it"),
    ),
    *valued(NoEffect("this program reads text only"), "--media-path"),
    *valued(
        NoEffect("the limits of connections are fixed: 30 s idle, 60 s without reading an answer"),
        "-to --timeout LLAMA_ARG_TIMEOUT",
    ),
    *valued(
        NoEffect("interim answers find out whether a client has gone"),
        "--sse-ping-interval LLAMA_ARG_SSE_PING_INTERVAL",
    ),
    *valued(NoEffect("one process serves HTTP"), "--threads-http LLAMA_ARG_THREADS_HTTP"),
    *switches(NoEffect("the address is taken alone"), "--reuse-port LLAMA_ARG_REUSE_PORT"),
    foreign("--sleep-idle-seconds", off_at(
        lambda x: x < 0, NoEffect("the model stays in memory while the server runs")
    ), n_values=1),
    *valued(
        _ONE_MODEL, "--models-dir LLAMA_ARG_MODELS_DIR", "--models-preset LLAMA_ARG_MODELS_PRESET",
    ),
    *valued(NoEffect("one model is served"), "--models-max LLAMA_ARG_MODELS_MAX",
            "--tags LLAMA_ARG_TAGS"),
    *switches(
        NoEffect("one model is served"),
        "--models-autoload !--no-models-autoload LLAMA_ARG_MODELS_AUTOLOAD",
    ),
    *valued(
        _PROXY, "--ssl-key-file LLAMA_ARG_SSL_KEY_FILE", "--ssl-cert-file LLAMA_ARG_SSL_CERT_FILE",
    ),
    *valued(
        Refused("paths begin at the root: put a proxy before the server that moves them"),
        "--api-prefix LLAMA_ARG_API_PREFIX",
    ),
    *valued(
        _BROWSERS, "--cors-methods LLAMA_ARG_CORS_METHODS",
        "--cors-headers LLAMA_ARG_CORS_HEADERS",
    ),
    *switches(
        _BROWSERS, "--cors-credentials !--no-cors-credentials LLAMA_ARG_CORS_CREDENTIALS"
    ),
    *valued(
        _OWN_PAGE, "--path LLAMA_ARG_STATIC_PATH", "--ui-config --webui-config LLAMA_ARG_UI_CONFIG",
        "--ui-config-file --webui-config-file LLAMA_ARG_UI_CONFIG_FILE",
    ),
    *switches(
        _OWN_PAGE,
        "--ui-mcp-proxy --webui-mcp-proxy !--no-ui-mcp-proxy !--no-webui-mcp-proxy "
        "LLAMA_ARG_UI_MCP_PROXY",
    ),
    *valued(
        _NO_TOOLS, "--tools LLAMA_ARG_TOOLS", "--tools-runtime LLAMA_ARG_TOOLS_RUNTIME",
        "--mcp-servers-config LLAMA_ARG_MCP_SERVERS_CONFIG",
        "--mcp-servers-json LLAMA_ARG_MCP_SERVERS_JSON",
    ),
    foreign("-ag --agent !-no-ag !--no-agent LLAMA_ARG_AGENT", _NO_TOOLS),
    *switches(_NO_RANKS, "--rerank --reranking LLAMA_ARG_RERANKING"),
    foreign("--embd-normalize", _norm, n_values=1),
)  # fmt: skip

CHAT = (
    foreign(
        "--jinja !--no-jinja LLAMA_ARG_JINJA", ALREADY,
        off=NoEffect("chat templates are always rendered as Jinja"),
    ),
    *switches(
        NoEffect("which reasoning stays in a conversation, its template says"),
        "--reasoning-preserve !--no-reasoning-preserve LLAMA_ARG_REASONING_PRESERVE",
    ),
    foreign(
        "!--skip-chat-parsing --no-skip-chat-parsing LLAMA_ARG_SKIP_CHAT_PARSING", ALREADY,
        off=NoEffect("--reasoning-format none leaves reasoning in the text; calls are read always"),
    ),
)  # fmt: skip

LOGS = (
    foreign("-lv --verbosity --log-verbosity LLAMA_ARG_LOG_VERBOSITY", _verbosity, n_values=1),
    *switches(
        _LOG, "--log-disable", "--log-jsonl !--no-log-jsonl LLAMA_ARG_LOG_JSONL",
        "--log-prefix !--no-log-prefix LLAMA_ARG_LOG_PREFIX",
        "--log-timestamps !--no-log-timestamps LLAMA_ARG_LOG_TIMESTAMPS",
        "--log-enable", "--log-new", "--log-append", "--log-test",
    ),
    *valued(_LOG, "--log-file LLAMA_ARG_LOG_FILE", "--log-prompts-dir", "--log-format"),
    foreign("--log-colors LLAMA_ARG_LOG_COLORS", _LOG, n_values=1,
            optional=("on", "off", "auto", "0", "1")),
)  # fmt: skip

BENCH = switches(_BENCH, "-tgs")

FOREIGN = (*SERVER, *CHAT, *LOGS, *BENCH)
