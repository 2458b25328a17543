"""Command lines that people published for llama.cpp and ik_llama.cpp start here.

Each opens a random model of its architecture and answers some tokens, or benches it and has the log
imported as a profile. Lines for several machines get workers of this machine.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from worker import has_rpc, working

from lab.synth import write_preset
from offload.device import has_gpu
from specdec.policies.rules import Fixed
from specoffload.config.command_line import CommandLine, read_command_line
from specoffload.config.environment import read_environment, read_host
from specoffload.config.options import Toggle
from specoffload.config.resolution import Config, resolve
from specoffload.generation.generation import AskedOptions
from specoffload.session.session import Session

FILE = Path(__file__).parents[1] / "fixtures" / "launch_lines.txt"
COMMANDS = {"server": "serve", "cli": "run", "bench": "bench"}


@dataclass(frozen=True)
class Launch:
    """One line of the file."""

    preset: str
    environ: dict[str, str]
    command: str
    words: tuple[str, ...]
    source: str

    @property
    def drafts(self) -> bool:
        return bool({"--model-draft", "-md", "--spec-type"} & {*self.words})

    @property
    def has_workers(self) -> bool:
        return "--rpc" in self.words


def launches() -> list[Launch]:
    found = []
    for row in FILE.read_text(encoding="utf-8").splitlines():
        if row.startswith("#"):
            continue
        line, _, source = row.partition(" ## ")
        preset, _, line = line.partition(" | ")
        words = shlex.split(line)
        n_assigned = next(i for i, word in enumerate(words) if word in COMMANDS)
        environ = dict(word.split("=", 1) for word in words[:n_assigned])
        command = COMMANDS[words[n_assigned]]
        found.append(Launch(preset, environ, command, tuple(words[n_assigned + 1 :]), source))
    return found


LAUNCHES = launches()
BENCHES = [launch for launch in LAUNCHES if launch.command == "bench"]
STARTING = [launch for launch in LAUNCHES if not launch.has_workers and launch not in BENCHES]
assert (len(LAUNCHES), len(BENCHES), len(STARTING)) == (16, 3, 12), "every line is tried"


def files(launch: Launch, models: Path, folder: Path) -> list[str]:
    """The line's words, with tiny models of one vocabulary and paths in `folder` filled in."""
    target, draft = models / f"launch-{launch.preset}.gguf", models / "launch-draft.gguf"
    for preset, path in ((launch.preset, target), ("qwen2.5-0.5b", draft)):
        if not path.exists():
            write_preset(preset, path, size="tiny", seed=3)
    places = {"TARGET": str(target), "DRAFT": str(draft)}
    places |= {word: str(folder / word.lower()) for word in ("CACHE", "SLOTS", "LOOKUP", "LOGS")}
    (folder / "slots").mkdir()
    return [places.get(word, word) for word in launch.words]


def configured(launch: Launch, models: Path, folder: Path) -> tuple[CommandLine, Config]:
    """Read and resolve the line. Without a GPU it gets a wrapped device for each share."""
    words = files(launch, models, folder)
    line = read_command_line(launch.command, words, read_environment(launch.environ))
    options = line.options
    if options.device == "auto" and not has_gpu():
        options = replace(options, device=",".join(["sim"] * max(1, len(options.tensor_split))))
    environment = replace(line.environment, profile_folder=folder)
    return line, resolve(options, read_host(environment))


@pytest.mark.parametrize("launch", STARTING, ids=lambda launch: shlex.join(launch.words)[:70])
def test_a_published_line_starts_and_answers(launch: Launch, models: Path, tmp_path: Path) -> None:
    line, config = configured(launch, models, tmp_path)
    with Session(config) as session:
        wanted = replace(line.of(AskedOptions), n_predict=8, ignore_eos=True)
        pieces = list(session.generate("def f(n):", wanted))
        assert sum(len(piece.tokens) for piece in pieces) == 8
        notes, stats = session.notes, pieces[-1].stats
        assert stats is not None
        assert stats.n_rounds > 1
        drafts = session.choices.spec.options.is_on
        assert (session.speculation is not None) == drafts
        assert drafts or not launch.drafts
        if session.speculation is not None and launch.drafts:
            # No line names a policy, and random models give no draft a value. With a fixed length
            # the line's own drafters draft, and the target verifies.
            session.speculation.policy = Fixed(4)
            *_, last = session.generate("def f(n):" * 16, replace(wanted, draft_p_min=0.0))
            assert last.stats is not None
            assert last.stats.n_drafted > 0
    said = [name for name, _ in line.ignored]
    assert all(any(note.startswith(f"{name} ignored") for note in notes) for name in said)
    assert set(line.notes) <= set(notes)


def program(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command on one thread, and without a GPU on a wrapped device for each share.

    More threads than cores would wait for each other.
    """
    shares = words[words.index("--tensor-split") + 1] if "--tensor-split" in words else ""
    sims = ",".join("sim" for _ in str(shares).split(","))
    device = () if has_gpu() else ("--device", sims)
    said = [str(word) for word in words]
    if "--threads" in said:  # a second value would ask `bench` for both
        del said[(at := said.index("--threads")) : at + 2]
    command = [sys.executable, "-m", "specoffload", *said, "-t", "1", *device]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize("launch", BENCHES, ids=lambda launch: shlex.join(launch.words)[-60:])
def test_a_published_bench_line_benches_and_its_log_is_imported(
    launch: Launch, models: Path, tmp_path: Path
) -> None:
    model, log = write_preset("deepseek-v3", models / "bench.gguf", seed=3), tmp_path / "log.jsonl"
    words = [str(model) if word == "TARGET" else word for word in launch.words]
    n_prompts, n_sequences = (
        [int(n) for n in launch.words[launch.words.index(flag) + 1].split(",")]
        for flag in ("-npp", "-npl")
    )
    wanted = [(pp, pl) for pp in n_prompts for pl in n_sequences]
    for _ in range(3):  # disturbed times may give no profile of an empty context: retry
        done = program("bench", *words)
        assert done.returncode == 0, done.stderr
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        assert [(row["pp"], row["pl"]) for row in rows] == wanted
        log.write_text(done.stdout, encoding="utf-8")
        done = program("profile", model, "--json", "--import", log)
        if "run the bench again" not in done.stderr:
            break
    if "-ntg 0" in shlex.join(launch.words):
        assert done.returncode == 2
        assert "times of prompts alone (-ntg 0), of 128, 256 tokens" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["profile"]) == 4
    assert ("prompts of 1024 and 2048 tokens" in done.stderr) == (2048 in n_prompts)


@pytest.mark.skipif(not has_rpc(), reason="the library is compiled without ggml's RPC")
@pytest.mark.parametrize(
    "launch", [launch for launch in LAUNCHES if launch.has_workers], ids=lambda one: one.source
)
def test_a_published_line_with_two_workers_answers(
    launch: Launch, models: Path, tmp_path: Path
) -> None:
    with working() as first, working() as second:
        places = {
            "192.168.1.2:50052,192.168.1.3:50052": f"{first.address},{second.address}",
            "CUDA0,RPC0,RPC1": "sim,RPC0,RPC1",
        }
        here = replace(launch, words=tuple(places.get(word, word) for word in launch.words))
        line, config = configured(here, models, tmp_path)
        with Session(config) as session:
            wanted = replace(line.of(AskedOptions), n_predict=4, ignore_eos=True)
            pieces = list(session.generate("def f(n):", wanted))
            assert sum(len(piece.tokens) for piece in pieces) == 4
            assert session.target.opened.remote is not None
            assert session.target.opened.remote.has_head  # as in llama.cpp, the last device has it


def test_the_usual_line_for_deepseek_means_what_it_means_there(
    models: Path, tmp_path: Path
) -> None:
    launch = next(launch for launch in STARTING if "32768" in launch.words)
    line, config = configured(launch, models, tmp_path)
    assert (config.ctx_size, config.type_k, config.flash_attn) == (32768, "q8_0", Toggle.ON)
    assert config.alias == "r1"
    assert config.n_cpu_moe == line.options.n_cpu_moe != 0
    assert config.spec.options.n_max == 16
    assert not line.ignored
