"""Every flag of the pinned llama.cpp and of ik_llama.cpp is known.

A flag is the same here, is translated, asks for what is so already, or is refused with advice.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from resolved import line_of

from offload.remote.address import Address
from offload.sampling.options import SAMPLERS
from offload.times.min_batch import MinBatch
from specdec.options import DrafterName
from specoffload.config.command_line import HELP, flags_of, names_of
from specoffload.config.flag import FALSE, OPENS, TRUE, Flag
from specoffload.config.foreign import FOREIGN, Becomes, Foreign, NoEffect, Refused
from specoffload.config.options import DraftOptions, ServeOptions
from specoffload.config.table import TABLE
from specoffload.config.values import ALL_LAYERS, NEVER
from specoffload.errors import UsageError
from specoffload.generation.generation import AskedOptions

FIXTURES = Path(__file__).parents[2] / "fixtures"
LLAMA = json.loads((FIXTURES / "llama_flags.json").read_text(encoding="utf-8"))["flags"]
# bench compares an agent's work; in llama-server it is a kind of server. `draft` makes files, which
# no program of llama.cpp's with these flags does.
OF_BENCH = {"--agent"}
OWN: dict[str, Flag] = {
    name: f
    for c in sorted(OPENS)
    if not c.startswith("draft ") and c != "report"  # their --output is a file
    for name, f in names_of(flags_of(c)).items()
    if name not in OF_BENCH
}
THEIRS: dict[str, Foreign] = {name: f for f in FOREIGN for name in (*f.names, *f.off)}
OF_PROGRAM = {*HELP, "--version"}
OPTIONAL = {"-fit", "-co", "--color", "--fit", "--context-shift", "--log-colors", "--webui", "--ui"}


def class_of(name: str) -> str:
    """The class of a flag: "same", "translated", "already" or "refused".

    Returns "unknown", which fails the tests, if the table lacks the flag.
    """
    if name in OWN or name in OF_PROGRAM:
        return "same"
    theirs = THEIRS.get(name)
    if theirs is None:
        return "unknown"
    kind = theirs.words.partition(":")[0].split()[0]
    return kind if kind in ("already", "refused") else "translated"


def ik_flags() -> list[tuple[list[str], int]]:
    text = (FIXTURES / "ik_llama_flags.txt").read_text(encoding="utf-8")
    rows = [line.split() for line in text.splitlines() if not line.startswith("#")]
    return [(row[:-1], int(row[-1])) for row in rows]


def test_every_flag_of_the_pinned_llama_cpp_is_in_one_of_the_four_classes() -> None:
    names = [name for flag in LLAMA for name in (*flag["names"], *flag["off"])]
    classes = {name: class_of(name) for name in names}
    assert [name for name, found in classes.items() if found == "unknown"] == []
    counted = Counter(classes.values())
    assert sum(counted.values()) == len(set(names)) > 500
    assert set(counted) == {"same", "translated", "already", "refused"}


def test_the_page_says_what_each_flag_of_speculation_does_here() -> None:
    page = (Path(__file__).parents[3] / "docs/flags.md").read_text(encoding="utf-8")
    n_checked = 0
    for flag in LLAMA:
        names = (*flag["names"], *flag["off"])
        if any(name.startswith(("--spec-", "--draft")) for name in names):
            assert any(f"`{name}`" in page for name in names), names
            n_checked += 1
    assert n_checked > 40


def test_the_names_of_one_flag_mean_the_same_here() -> None:
    for flag in LLAMA:
        for group in (flag["names"], flag["off"]):
            # --draft is the draft model here, unless a number follows.
            group = [name for name in group if name != "--draft"]
            homes = {id(OWN.get(name) or THEIRS.get(name)) for name in group}
            assert len(homes) <= 1, group


def test_every_variable_of_the_pinned_llama_cpp_is_known() -> None:
    ours = {name for flag in TABLE for name in flag.variables}
    theirs = {name for flag in FOREIGN for name in flag.variables}
    wanted = {flag["variable"] for flag in LLAMA if flag["variable"]}
    assert wanted - ours - theirs - {"HF_TOKEN"} == set()
    assert ours & theirs == set()


def test_as_many_values_follow_as_in_llama_cpp() -> None:
    for flag in LLAMA:
        for name in flag["names"]:
            if name in OF_PROGRAM or name in OPTIONAL:
                continue
            own = OWN.get(name)
            n_values = int(not own.is_switch) if own is not None else THEIRS[name].n_values
            assert n_values == flag["n_values"], name


def test_every_flag_of_ik_llama_cpp_is_known_and_takes_as_many_values() -> None:
    flags = ik_flags()
    assert len(flags) > 200
    for names, n_values in flags:
        for name in names:
            assert class_of(name) != "unknown", name
            if name in OF_PROGRAM or name in OPTIONAL:
                continue
            own, theirs = OWN.get(name), THEIRS.get(name)
            if own is not None:
                taken = int(not own.is_switch and name not in own.off)
            else:
                assert theirs is not None
                taken = 0 if name in theirs.off else theirs.n_values
            assert taken == n_values, name


def test_a_name_is_declared_once_and_is_ours_or_theirs() -> None:
    names = [name for flag in FOREIGN for name in (*flag.names, *flag.off)]
    assert [name for name, n in Counter(names).items() if n > 1] == []
    assert set(names) & set(OWN) == set()
    assert set(names) >= OF_BENCH


_NAME = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w*-])")


def test_an_answer_names_flags_of_ours_alone() -> None:
    samples = ("1", "on", "off", "none", "4", "top_k", "k", "exps=CPU", "blk.1=CUDA0", "mmap")
    n_checked = 0
    for flag in FOREIGN:
        answers = [flag.off_answer]
        for sample in samples:
            try:
                answers.append(flag.answered(sample))
            except ValueError:
                continue
        for answer in answers:
            if isinstance(answer, NoEffect | Refused):
                n_checked += 1
                assert set(_NAME.findall(answer.reason)) <= {*OWN, "--dry-run"}, answer.reason
            elif isinstance(answer, Becomes):
                n_checked += 1
                assert {word for word in answer.words if word.startswith("--")} <= set(OWN)
    assert n_checked > len(FOREIGN)


# -- results of the flags

THREE = frozenset({3, 4, 5})


def test_a_flag_that_is_so_already_is_taken_without_a_word() -> None:
    line = line_of("--jinja", "-cb", "--no-context-shift", "--op-offload")
    assert (line.given, line.notes, line.ignored) == ({}, (), ())


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (("-cmoe",), "n_cpu_moe", ALL_LAYERS),
        (("-ot", "exps=CPU"), "n_cpu_moe", ALL_LAYERS),
        (("-ot", r"\.ffn_.*_exps\.=CPU"), "n_cpu_moe", ALL_LAYERS),
        (("-ot", r"blk\.(3|4|5)\.ffn_.*_exps=CUDA0,exps=CPU"), "n_cpu_moe", THREE),
        (("-ot", r"blk\.([1-9]|[1-9]\d+)\.ffn_.*_exps=CPU"), "n_cpu_moe", frozenset({0})),
        (("-ot", r"blk\.3\.ffn_(up|down)_exps=CUDA0,exps=CPU"), "n_cpu_moe", ALL_LAYERS),
        (("-ot", r"exps=CPU,blk\.3\.ffn_.*_exps=CUDA0"), "n_cpu_moe", ALL_LAYERS),
        (("-ot", r"ffn_(gate_up|down)_exps=CPU"), "n_cpu_moe", ALL_LAYERS),
        (("-ot", r"blk\.[[:digit:]]+\.ffn_.*_exps=CPU"), "n_cpu_moe", ALL_LAYERS),
        (("-ot", r"blk\.\d+\.ffn_(up|down|gate)_exps=CPU"), "n_cpu_moe", ALL_LAYERS),
        (("--no-op-offload",), "min_batch", MinBatch(NEVER, NEVER)),
        (("--no-flash-attn",), "flash_attn", "off"),
        (("-lm", "mmap"), "mmap", True),
        (("-lm", "none"), "mmap", False),
        (("--numa", "isolate"), "numa", "single"),
        (("--numa", "numactl"), "numa", "none"),
        (("-dev", "none"), "device", "cpu"),
    ],
)
def test_a_flag_that_is_translated_says_so_in_one_line(
    words: tuple[str, ...], field: str, value: object
) -> None:
    options = line_of(*words).options
    assert getattr(options, field) == value
    assert options.given[field] == words[0]
    (note,) = options.notes
    assert note.startswith(f"{' '.join(words)} is read as ")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("-ot", r"blk\.(3|4|5)\.ffn_.*=CPU"), "chosen to fit"),
        (("-ot", r"exps=CUDA0,exps=CPU"), "chosen to fit"),
        (("-ot", r"attn=CPU"), "it names no experts"),
        (("--mlock",), "page-locked for the GPU"),
        (("-smf16",), "whole layers"),
        (("-amb", "512"), "--ubatch-size"),
        (("-mla", "3"), None),
        (("-mla", "0"), "MLA is always used"),
        (("-ngld", "99"), "the whole draft model stays"),
        (("-fit", "on"), None),
        (("-fit", "off"), "always fitted"),
        (("-fit",), None),
        (("--keep", "4"), "the answer ends there"),
        (("--parallel-tool-calls",), None),
        (("--infill",), None),
        (("--show-timings",), None),
        (("--no-perf",), "two lines of statistics"),
        (("--no-cont-batching",), "requests always share decodes"),
        (("-nocb",), "requests always share decodes"),
        (("--skip-chat-parsing",), "tool calls are always parsed"),
        (("--no-skip-chat-parsing",), None),
        (("-to", "600"), "timeouts are fixed"),
        (("-crs", "0.5"), "--cache-ram"),
        (("-wb",), "--warmup"),
        (("-ooae",), None),
        (("--reasoning-tokens", "auto"), "prompts are compared by all of their tokens"),
    ],
)
def test_a_flag_that_changes_nothing_is_said_once_or_is_so_already(
    words: tuple[str, ...], why: str | None
) -> None:
    line = line_of(*words, command="serve")
    assert line.given == {}
    assert [name for name, _ in line.ignored] == ([] if why is None else [" ".join(words)])
    assert all(why is not None and why in said for _, said in line.ignored)


@pytest.mark.parametrize("command", sorted(OPENS - {"run"}))
def test_a_flag_of_run_that_published_lines_give_to_others_changes_nothing_there(
    command: str,
) -> None:
    line = line_of("--prompt-cache", "x.bin", "--prompt-cache-all", "-no-cnv", command=command)
    assert line.given == {}
    said = ["--prompt-cache x.bin", "--prompt-cache-all", "-no-cnv"]
    assert [name for name, _ in line.ignored] == said
    if command not in ("serve", "plan"):  # plan reads the lines of a server
        assert [name for name, _ in line_of("-sps", "0.5", command=command).ignored] == ["-sps 0.5"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rpc", "h"), "--rpc h: 'h' is not HOST:PORT"),
        (("--rpc", "h:0"), "--rpc h:0: port 0 of 'h:0' is not between 1 and 65535"),
        (("--rpc", "h:1,h:1"), "--rpc h:1,h:1: h:1 is given twice"),
        (
            ("-mu", "http://x"),
            "-mu http://x: models are fetched from the Hugging Face hub only (-hf)",
        ),
        (("--mirostat", "3"), "--mirostat 3: must be between 0 and 2"),
        (("--sampling-seq", "kz"), "--sampling-seq kz: 'z' is no sampler's letter"),
        (("-l", "5*3"), "-l 5*3: must be a token's id and its bias"),
        (("--hellaswag",), "--hellaswag: it is a flag of llama.cpp's llama-perplexity"),
        (("-ot", "exps"), "-ot exps: 'exps' is not PATTERN=BUFFER"),
        (("-ot", "(=CPU"), "is no regular expression"),
        (("--samplers", "magic"), "--samplers magic: 'magic' is no sampler"),
        (("--top-nsigma", "much"), "--top-nsigma much: must be a number"),
        (("-ts",), "-ts needs a value"),
        (("--dry-run",), "--dry-run: use `specoffload plan`"),
        (("-spf", "x"), "run and chat have --system-prompt-file"),
        (("--control-vector-layer-range", "1"), "--control-vector-layer-range needs a value"),
    ],
)
def test_a_flag_that_is_refused_says_what_to_do(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        line_of(*words, command="serve")
    assert message in str(caught.value)


def test_the_librarys_whole_log_is_for_its_debug_level() -> None:
    assert line_of("-lv", "4").options.library_log
    assert not line_of("--verbosity", "3").options.library_log
    assert line_of("-lv", "5").options.library_log == 5, "logits of verified rows too"


def test_the_last_of_several_wins_among_theirs_and_ours() -> None:
    assert line_of("-ot", "exps=CPU", "--n-cpu-moe", "3").options.n_cpu_moe == 3
    assert line_of("--n-cpu-moe", "3", "-cmoe").options.n_cpu_moe == ALL_LAYERS


def test_samplers_are_read_by_every_name_of_theirs() -> None:
    def samplers(*words: str) -> tuple[str, ...]:
        return line_of(*words, command="serve").of(AskedOptions).samplers

    assert samplers("--samplers", "top-k;typical-p;Nucleus;temp") == (
        "top_k", "typ_p", "top_p", "temperature",
    )  # fmt: skip
    assert samplers("--sampler-seq", "edskypmxt") == SAMPLERS
    assert samplers("--sampling-seq", "kta") == ("top_k", "temperature", "adaptive_p")
    assert samplers("--samplers", "") == ()


def test_flags_of_samplers_mean_what_they_mean_there() -> None:
    words = (
        *("--mirostat", "2", "--mirostat-lr", "0.2", "--mirostat-ent", "4", "--typical", "0.9"),
        *("--top-nsigma", "1.5", "--xtc-probability", "0.5", "--xtc-threshold", "0.2"),
        *("--dynatemp-range", "0.5", "--dynatemp-exp", "2", "--dry-multiplier", "0.8"),
        *("--dry-base", "2", "--dry-allowed-length", "3", "--dry-penalty-last-n", "-1"),
        *("--dry-sequence-breaker", "\\n", "--dry-sequence-breaker", "none", "-l", "7+1.5"),
        *("--logit-bias", "8-inf", "--adaptive-target", "0.4", "--adaptive-decay", "0.8"),
    )
    assert line_of(*words).of(AskedOptions) == AskedOptions(
        mirostat=2, mirostat_eta=0.2, mirostat_tau=4, typical_p=0.9, top_n_sigma=1.5,
        xtc_probability=0.5, xtc_threshold=0.2, dynatemp_range=0.5, dynatemp_exponent=2,
        dry_multiplier=0.8, dry_base=2, dry_allowed_length=3, dry_penalty_last_n=-1,
        dry_sequence_breakers=("\n", ""), logit_bias=((7, 1.5), (8, -math.inf)),
        adaptive_target=0.4, adaptive_decay=0.8,
    )  # fmt: skip


def test_a_size_that_was_of_all_n_gram_drafters_is_one_flag_still() -> None:
    words = ("--spec-type", "ngram-map-k", "--spec-ngram-size-n", "7", "--spec-ngram-min-hits", "2")
    spec = line_of(*words).options.spec
    assert spec.drafters == (DrafterName.NGRAM_MAP_K,)
    assert (spec.ngram_map_k_size_n, spec.ngram_map_k_min_hits) == (7, 2)
    assert {spec.name(f"ngram_{k}_size_n") for k in ("simple", "map_k", "map_k4v")} == {
        "--spec-ngram-size-n"
    }


def test_the_draft_s_command_line_knows_them_too() -> None:
    text = "--seed 3 -sm layer -ngl 99 -ctk q4_0 -ctv q4_0 -khad -cuda fusion=1 --no-flash-attn"
    line = line_of("--draft-params", text)
    assert line.options.of_draft == DraftOptions(type_k="q4_0", type_v="q4_0", flash_attn="off")  # type: ignore[arg-type]
    assert [name for name, _ in line.ignored] == [
        "--draft-params: --seed",
        "--draft-params: -sm",
        "--draft-params: -ngl",
        "--draft-params: -khad",
        "--draft-params: -cuda fusion=1",
    ]


# -- their variables


def test_their_variables_are_answered_as_their_flags_and_refuse_nothing() -> None:
    line = line_of(
        command="serve",
        LLAMA_ARG_JINJA="1",
        LLAMA_ARG_CPU_MOE="on",
        LLAMA_ARG_RPC="h:1",
        LLAMA_ARG_N_PARALLEL="4",
    )
    assert line.options.n_cpu_moe == ALL_LAYERS
    assert line.options.workers == (Address("h", 1),)
    assert not line.ignored
    assert line.of(ServeOptions).parallel == 4
    assert line_of("-ncmoe", "2", LLAMA_ARG_CPU_MOE="1").options.n_cpu_moe == 2


SAMPLES = ("1", "on", "0.5", "q8_0", "layer", "yarn", "mean", "none", "mtp", "deepseek", "{}",
           "x=CPU", "h:1", "u/r", "exps=CPU")  # fmt: skip


def _outcome(*words: str, **variables: str) -> tuple[dict[object, object], list[str]] | str:
    """What a command line sets, and why it ignores flags; "refused" if it is refused."""
    try:
        line = line_of(*words, command="serve", **variables)
    except UsageError:
        return "refused"
    return {place: g.value for place, g in line.given.items()}, [why for _, why in line.ignored]


@pytest.mark.parametrize("flag", [f for f in LLAMA if f["variable"]], ids=lambda f: f["variable"])
def test_a_variable_means_what_its_flag_means(flag: dict[str, Any]) -> None:
    variable, name = flag["variable"], flag["names"][-1]
    if variable == "HF_TOKEN":  # huggingface_hub reads it
        return
    if name in ("--media-path", "--draft-max"):  # their variables have another flag, or other names
        return
    theirs = THEIRS.get(name)
    if flag["n_values"] == 0 and name not in OPTIONAL:
        typed, by_variable = _outcome(name), _outcome(**{variable: "1"})
        assert by_variable == typed or (typed == "refused" and by_variable[1])
        return
    tried = 0
    for value in SAMPLES:
        typed, by_variable = _outcome(f"{name}={value}"), _outcome(**{variable: value})
        if typed == "refused":
            # A refused variable may be meant for llama-server, so it may be ignored with a reason.
            assert by_variable == "refused" or by_variable[1], (variable, value)
            continue
        tried += 1
        assert by_variable == typed, (variable, value)
    assert tried or (theirs is not None and theirs.words.startswith("refused")), variable


@pytest.mark.parametrize(
    "flag", [f for f in LLAMA if f["variable"] and f["off"]], ids=lambda f: f["variable"]
)
def test_a_negated_variable_turns_its_flag_off_whatever_its_value(flag: dict[str, Any]) -> None:
    off = _outcome(flag["off"][-1])
    variable = flag["variable"].replace("LLAMA_ARG_", "LLAMA_ARG_NO_")
    for text in ("1", "true", "0", "off", "", "maybe"):
        assert _outcome(**{variable: text, flag["variable"]: "1"}) == off, text
        notes = line_of(command="serve", **{variable: text}).notes
        said = [line for line in notes if line.startswith(f"{variable}={text} turns ")]
        assert len(said) == (text not in TRUE), "a value that says the opposite is mentioned"
        assert not any("environment variables ignored" in line for line in notes)
    own = OWN.get(flag["names"][-1])
    if own is not None and own.is_switch:  # a typed flag takes precedence
        typed = line_of(flag["names"][-1], command="serve", **{variable: "1"})
        assert typed.given[own.section, own.field].value is True


def test_a_flag_takes_precedence_over_variables_for_the_same_thing() -> None:
    model, repo = {"LLAMA_ARG_MODEL": "v.gguf"}, {"LLAMA_ARG_HF_REPO": "u/v"}
    file, folder = {"LLAMA_ARG_HF_FILE": "v.gguf"}, {"LLAMA_ARG_MODELS_DIR": "/v"}
    preset = {"LLAMA_ARG_MODELS_PRESET": "/v.ini"}
    draft, of_draft = {"LLAMA_ARG_SPEC_DRAFT_MODEL": "v"}, {"LLAMA_ARG_SPEC_DRAFT_HF_REPO": "u/v"}
    projector = {"LLAMA_ARG_MMPROJ": "v", "LLAMA_ARG_MMPROJ_URL": "v", "LLAMA_ARG_MMPROJ_AUTO": "1"}
    for words, variables in (
        (("-m", "t.gguf"), model | repo | file | folder | preset),
        (("t.gguf",), model | repo | file | folder | preset),
        (("-hf", "u/t"), model | repo | file | folder | preset),
        (("--models-dir", "/t"), model | repo | file | folder),
        (("--models-preset", "/t.ini"), model | repo | file | preset),
        (("a.gguf", "b.gguf"), model | repo | file),
        (("-md", "t.gguf"), draft | of_draft),
        (("-hfd", "u/t"), draft | of_draft),
        (("--no-mmproj",), projector),
        (("-mm", "t"), projector),
        (("--rope-scale", "2"), {"LLAMA_ARG_ROPE_FREQ_SCALE": "0.1", "LLAMA_ARG_ROPE_SCALE": "3"}),
        (("--cpu-moe",), {"LLAMA_ARG_N_CPU_MOE": "2", "LLAMA_ARG_OVERRIDE_TENSOR": "exps=CPU"}),
        (("-c", "5"), {"LLAMA_ARG_CTX_SIZE": "not read, so not refused"}),
    ):
        typed = line_of(*words, command="serve")
        assert line_of(*words, command="serve", **variables).given == typed.given, words
    both = line_of(command="serve", **repo, **file).options
    assert (both.hf_repo, both.hf_file) == ("u/v", "v.gguf")
    kept = line_of("-hf", "u/t", command="serve", **file).options
    assert (kept.hf_repo, kept.hf_file) == ("u/t", "v.gguf"), "one chooses from the other"
    several = line_of("--models-dir", "/t", command="serve", **preset).of(ServeOptions)
    assert (several.models_dir, several.models_preset) == (Path("/t"), Path("/v.ini"))


def test_a_draft_s_command_line_without_gpu_layers_puts_it_on_the_cpu() -> None:
    def device(text: str, *words: str) -> tuple[str | None, list[str]]:
        line = line_of("--draft-params", text, *words)
        return line.options.of_draft.device, [name for name, _ in line.ignored]

    assert device("-ngl 0") == ("cpu", [])
    assert device("-ngl 0 -dev sim") == ("sim", [])
    assert device("-ngl 0", "-devd", "sim") == ("sim", [])
    assert device("-ngl 99") == (None, ["--draft-params: -ngl"])


def test_serve_keeps_no_prompts_by_default_if_asked() -> None:
    assert line_of(command="serve").of(AskedOptions).cache_prompt
    assert not line_of("--no-cache-prompt", command="serve").of(AskedOptions).cache_prompt
    assert not line_of(command="serve", LLAMA_ARG_CACHE_PROMPT="0").of(AskedOptions).cache_prompt
    (said,) = line_of("--no-cache-prompt", command="run").ignored
    assert said == ("--no-cache-prompt", "only serve keeps prompts of other requests")


def test_the_page_lists_no_flag_as_already_so_that_is_answered_otherwise() -> None:
    from lab.flag_pages import flags_page

    (row,) = [line for line in flags_page().splitlines() if line.startswith("| already so |")]
    names = re.findall(r"`([^`]+)`", row)
    assert len(names) > 12
    for name in names:
        theirs = THEIRS[name]
        answer = theirs.off_answer if name in theirs.off else theirs.answered("")
        assert answer is None, name
    assert not {"--no-perf", "--no-cont-batching"} & set(names)
    assert "--no-context-shift" in names


def test_a_switch_of_theirs_that_a_variable_sets_off_is_off() -> None:
    for text in (*TRUE, *FALSE):
        idle = line_of(command="serve", LLAMA_ARG_PERF=text).ignored
        assert bool(idle) == (text in FALSE)
        idle = line_of(command="serve", LLAMA_ARG_CONT_BATCHING=text).ignored
        assert bool(idle) == (text in FALSE)
        idle = line_of(command="serve", LLAMA_ARG_SKIP_CHAT_PARSING=text).ignored
        assert bool(idle) == (text in TRUE)
    with pytest.raises(UsageError, match="LLAMA_ARG_JINJA=maybe: must be one of"):
        line_of(command="serve", LLAMA_ARG_JINJA="maybe")


def test_two_overrides_are_one_list_whose_first_match_decides() -> None:
    for first, second, n_cpu_moe in (
        (r"blk\.(3|4|5)\.ffn_.*_exps=CUDA0", "exps=CPU", THREE),
        ("exps=CUDA0", "exps=CPU", None),
    ):
        apart = line_of("-ot", first, "-ot", second)
        together = line_of("-ot", f"{first},{second}")
        assert apart.options.n_cpu_moe == together.options.n_cpu_moe == n_cpu_moe
        assert apart.options.notes == together.options.notes, "one line for both"
        assert apart.ignored == together.ignored


@pytest.mark.parametrize("text", ["-1", "not:", "not:3,x", "not:-1", "not:5000", "few"])
def test_layers_whose_experts_stay_are_numbers(text: str) -> None:
    with pytest.raises(UsageError, match=f"--n-cpu-moe {text}"):
        line_of("--n-cpu-moe", text)


def test_what_llama_cpp_chooses_by_itself_is_chosen_here_too() -> None:
    assert line_of("--n-cpu-moe", "auto").options.n_cpu_moe is None


@pytest.mark.parametrize("flag", ["--moe-cache-mib", "--moe-cache-policy", "--moe-cache-cpu-share"])
def test_the_flags_of_llama_cpps_cache_of_experts_are_known(flag: str) -> None:
    ((said, why),) = line_of(flag, "1").ignored
    assert said == f"{flag} 1"
    assert why.startswith("the cache of experts takes")
