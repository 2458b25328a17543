"""What one can combine. This file is the tables: it runs nothing.

An *axis* is a choice that a user makes, and a *value* is one of its options. A *case* has one value
of each axis of a table. Every pair of values of two axes is either run in some case, or stands in
the table's `refused` with the sentence that the program must say.

The words of a value are flags of the command line. Words in braces are filled in for each case:
`{half}` is device memory for half of the streamed experts, `{ram}` is RAM for a part of the
experts, `{draft}` is the file that drafts, `{folder}` is an empty folder, and `{worker}` is the
address of a `specoffload worker` with the same model. `{layers}` is a part of the model's layers,
and `{minutes}` is the time that `tune` measures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Value:
    """One option of an axis. A larger `weight` lets more cases have it."""

    name: str
    meaning: str
    words: tuple[str, ...] = ()
    weight: int = 1


@dataclass(frozen=True)
class Refused:
    """A pair of values that is refused, by a start or with status 400.

    `says` is a pattern of the sentence. `remedy` is the value of the second axis that the sentence
    names: with it in place of the second value, the case is not refused.
    """

    first: tuple[str, str]  # axis, value
    second: tuple[str, str]
    says: str
    remedy: str


@dataclass(frozen=True)
class Table:
    """The axes of one kind of case, and the pairs that are refused."""

    axes: Mapping[str, tuple[Value, ...]]
    refused: tuple[Refused, ...] = ()

    def value(self, axis: str, name: str) -> Value:
        """The value `name` of an axis. Raises KeyError if there is none."""
        for value in self.axes[axis]:
            if value.name == name:
                return value
        raise KeyError(f"{axis} has no value {name!r}")


def _value(name: str, meaning: str, *words: str, weight: int = 1) -> Value:
    return Value(name, meaning, words, weight)


# What a session is opened with, and what its requests do.
SESSION = Table({
    "memory": (  # the model: what it remembers of a text
        _value("full", "every layer attends to the whole text (GLM-4.5)", weight=4),
        _value("windows", "some layers attend to the last tokens only (Step 3.5)", weight=3),
        _value("sinks", "windows and attention sinks (gpt-oss)", weight=3),
        _value("recurrent", "no layer attends (Mamba 2)"),
        _value("hybrid", "most layers are recurrent (Qwen3.5)", weight=3),
        _value("mla", "keys and values are compressed (DeepSeek-V3)", weight=3),
        _value("indexer", "an indexer chooses what is attended to (DeepSeek-V3.2)"),
        _value("tables", "tables of embeddings for each layer, and windows (Gemma 3n)"),
        _value("dense", "no experts (Mistral-Large)", weight=2),
    ),
    "weights": (  # the experts' type. A model without experts has it in all matrices
        _value("f32", "texts are exact", weight=8),
        _value("f16", "half precision"),
        _value("q8_0", "blocks of 32", weight=2),
        _value("q4_0", "blocks of 32, which the CPU has another layout for", weight=2),
        _value("q4_K", "blocks of 256", weight=3),
        _value("q2_K", "two bits"),
        _value("iq4_xs", "a table of values"),
        _value("mxfp4", "as gpt-oss is published", weight=2),
    ),
    "device": (
        _value("cpu", "no GPU", "--device", "cpu", weight=2),
        _value("sim", "a simulated GPU", "--device", "sim", weight=4),
        _value("two", "two simulated GPUs", "--device", "sim,sim", "--tensor-split", "1,1"),
        _value("worker", "a simulated GPU, and a worker with its own copy of the model",
               "--device", "sim", "--rpc", "{worker}"),
        _value("stand-in", "ggml-cuda on a stand-in for the CUDA runtime", "--device", "CUDA0"),
        _value("vulkan", "a Vulkan driver in software", "--device", "Vulkan0"),
    ),
    "experts": (  # where they are computed
        _value("chosen", "as the plan chooses", weight=2),
        _value("split", "by slots and CPU", "--hybrid", "on", "--vram", "{half}", weight=3),
        _value(
            "streamed", "copied for each batch", "--min-batch", "1", "--vram", "{half}",
            "--n-gpu-layers", "999", weight=2,
        ),
        _value("in RAM", "those of two layers stay in RAM", "--n-cpu-moe", "2", weight=2),
        _value("disk", "read from the disk", "--ram", "{ram}"),
    ),
    "drafter": (
        _value("none", "every token alone", "--spec-type", "none", weight=2),
        _value("default", "what drafts by default", weight=3),
        _value("suffix", "earlier text", "--spec-type", "suffix"),
        _value("ngram-simple", "the last tokens' last place", "--spec-type", "ngram-simple",
               "--spec-ngram-simple-size-n", "3"),
        _value("ngram-map-k", "tokens that followed before", "--spec-type", "ngram-map-k",
               "--spec-ngram-map-k-size-n", "3"),
        _value("ngram-map-k4v", "the likeliest of them", "--spec-type", "ngram-map-k4v",
               "--spec-ngram-map-k4v-size-n", "3", "--spec-ngram-map-k4v-min-hits", "1"),
        _value("ngram-mod", "hashes of earlier text", "--spec-type", "ngram-mod",
               "--spec-ngram-mod-n-match", "3"),
        _value("ngram-cache", "counts of earlier text", "--spec-type", "ngram-cache"),
        _value("draft", "a draft model", "--draft", "{draft}", weight=2),
        _value("mtp", "the model's own layers", "--spec-type", "draft-mtp", weight=2),
        _value("eagle3", "an EAGLE-3 file", "--draft", "{draft}"),
        _value("dflash2", "blocks of several candidates, of which trees grow", "--draft",
               "{draft}"),
        _value("dspark", "blocks with a confidence in each token", "--draft", "{draft}"),
    ),
    "policy": (
        _value("default", "by measured costs", weight=2),
        _value("fixed", "always five tokens", "--spec-policy", "fixed", "--draft-max", "5",
               weight=2),
        _value("p-min", "up to an unlikely token", "--spec-policy", "p-min"),
    ),
    "cache": (  # of keys and values
        _value("exact", "f32 and no flash attention: texts are exact",
               "-fa", "off", "-ctk", "f32", "-ctv", "f32", weight=6),
        _value("f16", "the default", weight=2),
        _value("q8_0", "quantised", "-ctk", "q8_0", "-ctv", "q8_0"),
        _value("RAM", "not in device memory", "--no-kv-offload"),
        _value("whole windows", "windows keep all tokens", "--swa-full"),
    ),
    "cells": (  # of the cache
        _value("shared", "all requests share them", weight=3),
        _value("unified", "a flag asks for that", "--kv-unified"),
        _value("own", "a flag asks for the opposite, which has no effect", "--no-kv-unified"),
    ),
    "kept": (  # prompts of earlier requests
        _value("RAM", "in RAM, which is the default", weight=3),
        _value("disk", "also in files", "--cache-disk", "64MiB,{folder}", weight=2),
        _value("nowhere", "none is kept outside the slots", "--cache-ram", "0"),
    ),
    "streams": (
        _value("1", "one request at a time", "--parallel", "1", weight=2),
        _value("2", "two at once", "--parallel", "2"),
        _value("8", "eight at once", "--parallel", "8"),
    ),
    "ubatch": (
        _value("default", "as the plan chooses", weight=2),
        _value("32", "prompts have several ubatches", "--ubatch-size", "32"),
    ),
    "sampling": (  # of each request
        _value("greedy", "the likeliest token", weight=4),
        _value("seeded", "temperature, top-k and a seed", weight=2),
        _value("penalties", "repeated tokens are less likely"),
        _value("bias", "a token that is never chosen"),
        _value("grammar", "a GBNF grammar"),
        _value("schema", "a JSON schema", weight=2),
    ),
    "event": (  # what happens to the text
        _value("fresh", "a prompt that nothing is known of", weight=2),
        _value("continued", "the next turn of a conversation", weight=3),
        _value("edited", "an earlier message is changed", weight=2),
        _value("branched", "another answer to an earlier prompt"),
        _value("moved", "other conversations took its slots meanwhile", weight=2),
        _value("restored", "its slot was saved to a file and restored"),
        _value("reopened", "the program was ended and started again"),
        _value("cancelled", "another client left in the middle of an answer"),
        _value("full", "the context fills up"),
    ),
    "machine": (
        _value("idle", "nothing else runs", weight=2),
        _value("busy", "another program computes on each processor"),
        _value("two threads", "the CPU computes with two threads", "--threads", "2"),
        _value("one processor", "all threads share one processor", "--threads", "2"),
        _value("wrong clock", "kept files come from the future"),
    ),
})  # fmt: skip

# What a request to a server asks for. The model is the embedded one, with a family's template.
REQUEST = Table({
    "family": (
        _value("openai-gpt-oss-120b", "channels", weight=3),
        _value("Qwen-Qwen3-0.6B", "JSON calls between tags", weight=2),
        _value("Qwen3-Coder", "arguments between tags", weight=2),
        _value("Qwen3.5-4B", "arguments between tags, after reasoning", weight=2),
        _value("GLM-4.6", "keys and values between tags", weight=2),
        _value("deepseek-ai-DeepSeek-V3.1", "calls between markers", weight=2),
        _value("deepseek-ai-DeepSeek-V3.2", "calls in a markup of its own"),
        _value("Kimi-K2-Thinking", "numbered calls", weight=2),
        _value("MiniMax-M2", "calls in XML"),
        _value("meta-llama-Llama-3.3-70B-Instruct", "JSON without a marker"),
        _value("mistralai-Mistral-Nemo-Instruct-2407", "a list of calls"),
        _value("google-gemma-2-2b-it", "no calls, no system message"),
    ),
    "api": (
        _value("chat", "/v1/chat/completions", weight=3),
        _value("responses", "/v1/responses", weight=2),
        _value("messages", "/v1/messages", weight=2),
        _value("completions", "/v1/completions, with the prompt that the template renders"),
        _value("native", "/completion of llama-server, with that prompt"),
    ),
    "eyes": (  # of the server
        _value("none", "the model reads text only", weight=3),
        _value("projector", "the model has a projector for images", "--mmproj", "{projector}"),
    ),
    "media": (  # of the last message
        _value("none", "text", weight=3),
        _value("image", "an image before the text"),
    ),
    "sampling": (
        _value("greedy", "the likeliest token", weight=2),
        _value("seeded", "temperature 1 and a seed"),
    ),
    "constraint": (
        _value("none", "any answer", weight=2),
        _value("schema", "the answer is JSON of a schema"),
        _value("auto", "tools that may be called", weight=2),
        _value("required", "a tool has to be called", weight=2),
        _value("named", "this tool has to be called"),
        _value("strict", "a tool whose schema is held strictly has to be called"),
    ),
    "reasoning": (
        _value("default", "as the template says", weight=2),
        _value("off", "no reasoning"),
        _value("on", "reasoning"),
        _value("limit 0", "no token of reasoning"),
        _value("limit 8", "at most eight tokens of reasoning"),
    ),
    "history": (
        _value("one turn", "a question", weight=2),
        _value("its own answer", "the answer is sent back with a new question", weight=2),
        _value("tool result", "a tool was called, and answered", weight=2),
        _value("image in a result", "a tool answered with an image"),
        _value("image in an earlier result", "it was answered, and a question follows"),
        _value("unanswered image", "a question with an image was refused, and another follows"),
        _value("edited", "an earlier question is changed"),
        _value("too long", "a prompt over the context is refused, and a short one follows"),
    ),
    "stop": (
        _value("none", "no stop text", weight=2),
        _value("text", "a text at which the answer ends"),
    ),
    "length": (
        _value("long", "room for a whole answer", weight=2),
        _value("short", "eight tokens"),
    ),
    "prefill": (
        _value("none", "the model begins its answer", weight=2),
        _value("begun", "the last message is the beginning of the answer"),
    ),
    "cache": (
        _value("kept", "the prompt's beginning is cached", weight=2),
        _value("not kept", "nothing is read from the cache"),
        _value("marked", "the system message ends at a cache point"),
    ),
}, (
    # A raw prompt has no place for tools, and a raw answer none for calls.
    *(
        Refused(("api", api), ("constraint", name), "/v1/chat/completions", "none")
        for api in ("completions", "native")
        for name in ("auto", "required", "named", "strict")
    ),
    Refused(("media", "image"), ("eyes", "none"), "mmproj", "projector"),
))  # fmt: skip

# What a command is run with. Models and their words are those of SESSION.
COMMAND = Table({
    "command": (
        _value("run", "one answer", "run", "-no-cnv", "-p", "def f", "-n", "8", weight=3),
        _value("chat", "a conversation of one question", "chat", "-n", "8", weight=2),
        _value("serve", "a start, one request, and SIGTERM", "serve", weight=3),
        _value("bench", "speeds", "bench", "-p", "64", "-n", "8", "-r", "1", weight=2),
        _value("tune", "threads, ubatch and batch costs", "tune", "--minutes", "{minutes}",
               weight=2),
        _value("tune numa", "placement", "tune", "numa", "--time-limit", "2"),
        _value("profile", "the time of each batch size", "profile"),
        _value("plan", "what goes where", "plan", weight=2),
        _value("plan as JSON", "for programs", "plan", "--json"),
        _value("plan elsewhere", "a large model of the same kind on another machine",
               "plan", "--hardware", "rtx-4090-ddr5", weight=2),
    ),
    "memory": SESSION.axes["memory"],
    "device": SESSION.axes["device"][:3],
    "experts": (
        _value("chosen", "as the plan chooses", weight=2),
        _value("split", "by slots and CPU", "--hybrid", "on", weight=2),
        _value("streamed", "copied for each batch", "--min-batch", "1"),
        _value("in RAM", "those of most layers stay in RAM", "--n-cpu-moe", "{layers}", weight=2),
        _value("disk", "read from the disk", "--ram", "{ram}"),
    ),
    "cache": tuple(sorted(SESSION.axes["cache"], key=lambda value: value.name != "f16")),
    "start": (
        _value("first", "nothing is known of the model", weight=2),
        _value("second", "an earlier start has kept its measurements", weight=2),
        _value("disturbed", "a kept time is much too long, as if another program had run"),
        _value("damaged", "the kept file is cut in the middle"),
        _value("read-only", "measurements cannot be kept"),
    ),
    "measures": (
        _value("briefly", "some batch sizes are timed"),
        _value("at length", "more tokens are decoded than windows of small ubatches hold",
               "--ubatch-size", "32", weight=2),
    ),
    "machine": (
        _value("idle", "one thread computes, and nothing else runs", weight=2),
        _value("busy", "another program computes on each processor"),
        _value("two threads", "the CPU computes with two threads", "--threads", "2"),
        _value("one processor", "the program may use one processor only"),
        _value("wrong clock", "the clock says 1971, and kept files are from the future"),
    ),
}, (
    # `tune numa` places weights and binds threads. What it measures has no cache.
    *(
        Refused(("command", "tune numa"), ("cache", name), "is not a flag of tune numa", "f16")
        for name in ("exact", "q8_0", "RAM", "whole windows")
    ),
    *(
        Refused(("command", "tune numa"), ("experts", name), "is not a flag of tune numa", "chosen")
        for name in ("split", "in RAM", "disk")
    ),
    Refused(
        ("command", "tune numa"), ("measures", "at length"), "is not a flag of tune numa", "briefly"
    ),
    Refused(
        ("command", "tune numa"), ("machine", "two threads"), "is not a flag of tune numa", "idle"
    ),
    # `bench` compares both sides of a split itself.
    Refused(("command", "bench"), ("experts", "split"), "is not a flag of bench", "chosen"),
))  # fmt: skip

# Sizes of what every case of SESSION computes. Contexts are small, so that they fill up.
N_CTX = 512
N_PREDICT = 12
