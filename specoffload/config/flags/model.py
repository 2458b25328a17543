"""Flags of the model and its memory."""

from __future__ import annotations

from offload.plan.cache_types import CACHE_TYPES
from specoffload.config.flags.flag import INT, PATH, SWITCH, TEXT, Flag, Panel, choice
from specoffload.config.flags.reading import AUTO_INT, TOGGLE
from specoffload.config.options import Options

_P = Panel.MODEL

FLAGS = (
    Flag(
        Options, "alias", ("--alias", "-a"), TEXT, "Name of the model in answers.", _P,
        variables=("LLAMA_ARG_ALIAS",), default_words="the file's",
    ),
    Flag(
        Options, "model", ("--model", "-m"), PATH,
        "Target: a .gguf file or its folder, user/repo[:quant], or ollama:name.", _P,
        variables=("LLAMA_ARG_MODEL",), default_words="the embedded pair", first=True,
    ),
    Flag(
        Options, "hf_repo", ("--hf-repo", "-hf", "-hfr"), TEXT,
        "Repository user/repo[:quant] of the Hugging Face hub, fetched if need be.", _P,
        variables=("LLAMA_ARG_HF_REPO",),
        more="Without a quantisation Q4_K_M, then Q8_0, then the first (docs/models.md).",
    ),
    Flag(
        Options, "hf_file", ("--hf-file", "-hff"), TEXT, "The file of that repository.", _P,
        variables=("LLAMA_ARG_HF_FILE",), rare=True,
    ),
    Flag(
        Options, "hf_token", ("--hf-token", "-hft"), TEXT,
        "Token for private and gated repositories, as HF_TOKEN.", _P, rare=True,
    ),
    Flag(
        Options, "offline", ("--offline",), SWITCH, "Fetch nothing: what was fetched is used.", _P,
        variables=("LLAMA_ARG_OFFLINE",), rare=True,
    ),
    Flag(
        Options, "ctx_size", ("--ctx-size", "-c"), INT, "Context in tokens; 0: the model's own.",
        _P, variables=("LLAMA_ARG_CTX_SIZE",), least=0, first=True,
    ),
    Flag(
        Options, "batch_size", ("--batch-size", "-b"), INT, "Largest decode in tokens.", _P,
        variables=("LLAMA_ARG_BATCH",), least=1,
    ),
    Flag(
        Options, "ubatch_size", ("--ubatch-size", "-ub"), AUTO_INT,
        "Tokens computed at once in prefill: N or auto.", _P,
        more="What streams is copied once for each, so that auto takes as many as prompts need "
        "and memory holds beside the slots, 512 to 8192; 512 where nothing streams.",
        variables=("LLAMA_ARG_UBATCH",), least=1, default_words="auto",
    ),
    Flag(
        Options, "flash_attn", ("--flash-attn", "-fa"), TOGGLE, "Flash attention.", _P,
        variables=("LLAMA_ARG_FLASH_ATTN",), bare="on",
    ),
    Flag(
        Options, "type_k", ("--cache-type-k", "-ctk"), choice(CACHE_TYPES),
        "Type of the KV cache's keys.", _P, variables=("LLAMA_ARG_CACHE_TYPE_K",),
        more=f"{', '.join(CACHE_TYPES)}. Quantised types need flash attention.",
    ),
    Flag(
        Options, "type_v", ("--cache-type-v", "-ctv"), choice(CACHE_TYPES),
        "Type of the KV cache's values.", _P, variables=("LLAMA_ARG_CACHE_TYPE_V",),
        default_words="f16, with MLA the keys'", rare=True,
    ),
    Flag(
        Options, "swa_full", ("--swa-full",), SWITCH,
        "Keep all that sliding windows have passed, so that it can be cut anywhere.", _P,
        variables=("LLAMA_ARG_SWA_FULL",), rare=True,
    ),
    Flag(
        Options, "ctx_checkpoints", ("--ctx-checkpoints", "-ctxcp", "--swa-checkpoints"), INT,
        "Prompts that a recurrent model can go back to.", _P,
        more="Of a conversation, kept in host memory, so that an edited prompt is evaluated from "
        "the last one it shares.",
        variables=("LLAMA_ARG_CTX_CHECKPOINTS",), least=0, rare=True,
    ),
)  # fmt: skip
