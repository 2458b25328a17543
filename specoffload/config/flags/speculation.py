"""Flags of the draft model, the drafters, the policies and acceptance."""

from __future__ import annotations

from offload.plan.cache_types import CACHE_TYPES
from specdec.options import (
    MOST_DRAFTED,
    AcceptRule,
    CheckpointPlace,
    DrafterName,
    PolicyName,
    SpecOptions,
)
from specoffload.config.flags.flag import FLOAT, INT, PATH, SWITCH, TEXT, Flag, Need, Panel, choice
from specoffload.config.flags.reading import DRAFTERS, RATES, REPLACEMENTS, THREADS, TOGGLE, WORDS
from specoffload.config.options import DraftEngine, DraftOptions, DraftType, Options

_P = Panel.SPECULATION
_SIMPLE, _MAP_K, _MAP_K4V = (
    (DrafterName.NGRAM_SIMPLE,),
    (DrafterName.NGRAM_MAP_K,),
    (DrafterName.NGRAM_MAP_K4V,),
)
_MOD, _CACHE, _SUFFIX, _SYNTHETIC = (
    (DrafterName.NGRAM_MOD,),
    (DrafterName.NGRAM_CACHE,),
    (DrafterName.SUFFIX,),
    (DrafterName.SYNTHETIC,),
)
_DRAFT = (Need.DRAFT_MODEL,)
_DRAFTS = (Need.DRAFTS,)

MODEL = (
    Flag(
        Options, "draft", ("--draft", "-md", "--model-draft", "--spec-draft-model"), PATH,
        "Draft model, resident on the device.", _P, variables=("LLAMA_ARG_SPEC_DRAFT_MODEL",),
        digits_mean="--draft-max", first=True,
    ),
    Flag(
        Options, "hf_repo_draft",
        ("--spec-draft-hf", "-hfd", "-hfrd", "--hf-repo-draft"), TEXT,
        "Repository user/repo[:quant] of the draft.", _P,
        variables=("LLAMA_ARG_SPEC_DRAFT_HF_REPO",),
    ),
    Flag(
        DraftOptions, "threads", ("--threads-draft", "-td", "--spec-draft-threads"), THREADS,
        "The draft's threads.", _P, needs=_DRAFT, default_words="the target's",
    ),
    Flag(
        DraftOptions, "threads_batch",
        ("--threads-batch-draft", "-tbd", "--spec-draft-threads-batch"), THREADS,
        "The draft's threads of prefill.", _P, needs=_DRAFT, default_words="the target's",
    ),
    Flag(
        DraftOptions, "ctx_size", ("--ctx-size-draft", "-cd"), INT,
        "The draft's context; 0: its own.", _P, least=0, needs=_DRAFT, default_words="the target's",
    ),
    Flag(
        DraftOptions, "device", ("--device-draft", "-devd", "--spec-draft-device"), TEXT,
        "The draft's device.", _P, needs=_DRAFT, default_words="the target's",
    ),
    Flag(
        DraftOptions, "batch_size", ("--batch-size-draft",), INT, "The draft's largest decode.", _P,
        least=1, needs=_DRAFT, default_words="the target's",
    ),
    Flag(
        DraftOptions, "ubatch_size", ("--ubatch-size-draft",), INT,
        "Tokens the draft computes at once in prefill.", _P, least=1, needs=_DRAFT,
        default_words="the target's",
    ),
    Flag(
        DraftOptions, "flash_attn", ("--flash-attn-draft",), TOGGLE, "The draft's flash attention.",
        _P, needs=_DRAFT, default_words="the target's", bare="on",
    ),
)  # fmt: skip

_TYPES = choice(CACHE_TYPES)
TYPES = (
    Flag(
        DraftOptions, "type_k", ("--cache-type-k-draft", "-ctkd", "--spec-draft-type-k"), _TYPES,
        "Type of the draft's keys.", _P, needs=_DRAFT, default_words="f16",
        variables=("LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K",),
    ),
    Flag(
        DraftOptions, "type_v", ("--cache-type-v-draft", "-ctvd", "--spec-draft-type-v"), _TYPES,
        "Type of the draft's values.", _P, needs=_DRAFT, default_words="f16",
        variables=("LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V",),
    ),
)  # fmt: skip

ENGINE = (
    Flag(
        DraftOptions, "engine", ("--draft-engine",), choice(tuple(DraftEngine)),
        "What computes the draft model: torch, libllama, or the faster.", _P, needs=_DRAFT,
        more="auto measures both once on a CUDA device, keeps the result beside the profiles, and "
        "takes libllama elsewhere ([draft.md](draft.md)).",
    ),
    Flag(
        DraftOptions, "matrices", ("--draft-type",), choice(tuple(DraftType)),
        "Type of the torch draft's matrices.", _P, needs=_DRAFT,
    ),
    Flag(
        DraftOptions, "vocab", ("--draft-vocab",), PATH,
        "Token ids that the torch draft may draft.", _P, needs=_DRAFT, default_words="all",
        more="One per line, as `scripts/lab/run prune-vocab` writes them.",
    ),
    Flag(
        DraftOptions, "graphs", (), SWITCH,
        "Run the torch draft's steps one kernel at a time, not as CUDA graphs.", _P, needs=_DRAFT,
        off=("--no-draft-graphs",),
    ),
)  # fmt: skip

DRAFT_PARAMS = Flag(
    Options, "draft_params", ("--draft-params",), WORDS,
    'The draft\'s own command line, e.g. "-t 2 -c 2048 -dev cpu".', _P,
)  # fmt: skip

DRAFTING = (
    Flag(
        SpecOptions, "drafters", ("--spec-type", "--spec"), DRAFTERS,
        "Drafters, comma separated.", _P,
        more=f"{', '.join(DrafterName)} ([speculation.md](speculation.md)).",
        variables=("LLAMA_ARG_SPEC_TYPE",), default_words="draft with a draft model, else nothing",
        off=("--no-spec",), off_value=(DrafterName.NONE,),
    ),
    Flag(
        SpecOptions, "policy", ("--spec-policy", "--policy"), choice(tuple(PolicyName)),
        "Decides how long drafts are.", _P, needs=_DRAFTS,
        more=f"{', '.join(PolicyName)} ([speculation.md](speculation.md)).",
    ),
    Flag(
        SpecOptions, "n_max", ("--draft-max", "--spec-draft-n-max", "--draft-n"), INT,
        "Most tokens drafted each round.", _P, needs=_DRAFTS, default_words="by policy",
        variables=("LLAMA_ARG_SPEC_DRAFT_N_MAX", "LLAMA_ARG_DRAFT_MAX"), least=0, most=MOST_DRAFTED,
        capped=True,
    ),
    Flag(
        SpecOptions, "n_min", ("--draft-min", "--spec-draft-n-min", "--draft-n-min"), INT,
        "Shorter drafts are dropped.", _P, needs=(PolicyName.P_MIN,), least=0,
        variables=("LLAMA_ARG_SPEC_DRAFT_N_MIN", "LLAMA_ARG_DRAFT_MIN"), rare=True,
    ),
    Flag(
        SpecOptions, "p_min", ("--draft-p-min", "--spec-draft-p-min"), FLOAT,
        "Least probability of a drafted token.", _P, needs=(PolicyName.P_MIN,), least=0, most=1,
        variables=("LLAMA_ARG_SPEC_DRAFT_P_MIN",),
    ),
    Flag(
        SpecOptions, "tree", ("--spec-tree",), SWITCH,
        "Draft trees (throughput and the draft model alone).", _P, needs=(DrafterName.DRAFT,),
        rare=True,
    ),
    Flag(
        SpecOptions, "p_split", ("--draft-p-split", "--spec-draft-p-split"), FLOAT,
        "Least probability of a second branch.", _P, needs=(Need.TREE,), least=0, most=1,
        variables=("LLAMA_ARG_SPEC_DRAFT_P_SPLIT",), rare=True,
    ),
    Flag(
        SpecOptions, "accept", ("--spec-accept",), choice(tuple(AcceptRule)),
        "When a drafted token is kept.", _P, needs=_DRAFTS,
        more="match: the sampler chooses it too. reject: by rejection sampling, with the residual "
        "distribution.",
    ),
    Flag(
        SpecOptions, "rs_snapshots", ("--spec-rs-snapshots",), INT,
        "Recurrent models: drafted tokens taken back by snapshots.", _P, needs=_DRAFTS, least=0,
        most=MOST_DRAFTED, more="Where the library has them for the architecture. Each takes the "
        "memory of one state; 0 uses checkpoints only.", rare=True,
    ),
    Flag(
        SpecOptions, "checkpoints", ("--spec-checkpoints",), choice(tuple(CheckpointPlace)),
        "Recurrent models: where the checkpoint before a verification lies.", _P,
        needs=_DRAFTS, rare=True,
    ),
    Flag(
        SpecOptions, "replacements", ("--spec-replace",), REPLACEMENTS,
        "Translate the text of a draft of another vocabulary.", _P, needs=(DrafterName.DRAFT,),
        more="With these replacements, which may be none.", rare=True,
    ),
    Flag(
        Options, "use_profile", (), SWITCH,
        "Keep nothing that is measured or counted, and read nothing: drafts are blocks of 4.", _P,
        off=("--no-profile",),
    ),
    Flag(
        Options, "record_trace", ("--record-trace",), PATH,
        "Write each drafted token's probability, and whether it was accepted.", _P,
        needs=_DRAFTS,
        more="Best with --spec-policy fixed --draft-max 16: what nobody drafted is unknown.",
        rare=True,
    ),
)  # fmt: skip


def _n(field: str, name: str, words: str, needs: tuple[DrafterName, ...], least: int = 1) -> Flag:
    return Flag(SpecOptions, field, (name,), INT, words, _P, needs=needs, least=least)


WITHOUT_MODEL = (
    _n("ngram_simple_size_n", "--spec-ngram-simple-size-n", "Tokens looked up.", _SIMPLE),
    _n("ngram_simple_size_m", "--spec-ngram-simple-size-m", "Tokens drafted.", _SIMPLE),
    _n("ngram_map_k_size_n", "--spec-ngram-map-k-size-n", "Tokens looked up.", _MAP_K),
    _n("ngram_map_k_size_m", "--spec-ngram-map-k-size-m", "Tokens drafted.", _MAP_K),
    _n(
        "ngram_map_k_min_hits", "--spec-ngram-map-k-min-hits",
        "Occurrences before a key drafts.", _MAP_K,
    ),
    _n("ngram_map_k4v_size_n", "--spec-ngram-map-k4v-size-n", "Tokens looked up.", _MAP_K4V),
    _n("ngram_map_k4v_size_m", "--spec-ngram-map-k4v-size-m", "Tokens drafted.", _MAP_K4V),
    _n(
        "ngram_map_k4v_min_hits", "--spec-ngram-map-k4v-min-hits",
        "Occurrences before a key drafts.", _MAP_K4V,
    ),
    _n("ngram_mod_n_match", "--spec-ngram-mod-n-match", "Tokens hashed.", _MOD),
    _n("ngram_mod_n_min", "--spec-ngram-mod-n-min", "Shorter drafts are dropped.", _MOD, 0),
    _n("ngram_mod_n_max", "--spec-ngram-mod-n-max", "Longest draft.", _MOD),
    Flag(
        SpecOptions, "lookup_static", ("--lookup-cache-static", "-lcs"), PATH,
        "llama.cpp's lookup cache, read only.", _P, needs=_CACHE,
    ),
    Flag(
        SpecOptions, "lookup_dynamic", ("--lookup-cache-dynamic", "-lcd"), PATH,
        "llama.cpp's lookup cache, updated at the end.", _P, needs=_CACHE,
        more="A million contexts at most: rare and old ones are dropped. Without it only the "
        "conversation is looked up.",
    ),
    Flag(
        SpecOptions, "suffix_corpus", ("--spec-suffix-corpus",), PATH,
        "Text file to draft from besides the conversation.", _P, needs=_SUFFIX,
    ),
    _n("suffix_min_match", "--spec-suffix-min-match", "Least match.", _SUFFIX),
    Flag(
        SpecOptions, "synth_rates", ("--spec-synth-rates",), RATES,
        "Rates of the first 1, 2, ... tokens being accepted. The text is nonsense.", _P,
        needs=_SYNTHETIC, variables=("LLAMA_ARG_SPEC_SYNTH_RATES",),
    ),
    Flag(
        SpecOptions, "synth_len", ("--spec-synth-len",), FLOAT,
        "Mean accepted length, own token included. The text is nonsense.", _P,
        needs=_SYNTHETIC, least=1, most=MOST_DRAFTED + 1, variables=("LLAMA_ARG_SPEC_SYNTH_LEN",),
    ),
)  # fmt: skip

FLAGS = (*MODEL, *TYPES, *ENGINE, DRAFT_PARAMS, *DRAFTING, *WITHOUT_MODEL)
