"""Models fetched from a server that speaks the hub's API, by processes as a user starts them."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hub_server import COMMIT, Hub, Refusal, serving

from lab.synth import plan_preset, plan_shape, write_header_only
from lab.synth.shape import resolve
from specoffload.errors import FetchFailed
from specoffload.models.hub_errors import in_one_sentence
from specoffload.models.names import HubName

ROOT = Path(__file__).parents[2]
FETCH = """
import os, sys, urllib.request
from specoffload.errors import SpecOffloadError
from specoffload.models.hub import fetch
from specoffload.models.names import read_hub_name
for words in sys.argv[1:]:
    if words.startswith("set"):
        urllib.request.urlopen(f"{os.environ['HF_ENDPOINT']}/{words.replace(' ', '/')}").read()
        continue
    offline, text = words.startswith("offline "), words.removeprefix("offline ")
    repo, _, file = text.partition(" ")
    try:
        print(fetch(read_hub_name(repo, file), offline=offline))
    except SpecOffloadError as e:
        print(type(e).__name__, str(e))
"""
LOCATED = """
import sys
from pathlib import Path
from specoffload.config.command_line import read_command_line
from specoffload.config.environment import Environment
from specoffload.errors import SpecOffloadError
from specoffload.models.local import located
try:
    options = located(read_command_line("serve", sys.argv[1:], Environment(variables={})).options,
                      Environment(variables={}))
    print(options.mmproj, *options.notes, sep="\\n")
    print("draft", options.draft, file=sys.stderr)
except SpecOffloadError as e:
    print(type(e).__name__, str(e))
"""
SMALL = b"GGUF" + bytes(range(256)) * 4096  # a mebibyte


@pytest.fixture
def hub() -> Iterator[Hub]:
    files = {
        "README.md": b"about",
        "mmproj-F16.gguf": b"GGUF projector",
        "m-Q8_0.gguf": SMALL + b"8",
        "m-Q4_K_M.gguf": SMALL + b"4",
        "IQ1_S/m-IQ1_S-00001-of-00002.gguf": b"GGUF first",
        "IQ1_S/m-IQ1_S-00002-of-00002.gguf": b"GGUF second",
        "m-Q2_K-00001-of-00002.gguf": b"GGUF lonely",
    }
    repos = {
        "maker/model-GGUF": files,
        "maker/other-GGUF": {"o-F16.gguf": b"GGUF o"},
        "maker/weights": {"model.safetensors": b"x"},
    }
    with serving(Hub(repos)) as made:
        yield made


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "hf"


def environment(hub: Hub, home: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "LLAMA_"))}
    return {
        **kept,
        "PYTHONPATH": path,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "XDG_CACHE_HOME": str(home / "xdg"),
        "OLLAMA_MODELS": str(home / "ollama"),
    }


def fetching(
    hub: Hub, home: Path, *names: str, most_bytes: int | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run FETCH. `most_bytes` limits the size of files it may write."""

    def limit() -> None:
        if most_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))

    done = subprocess.run(
        [sys.executable, "-c", FETCH, *names],
        env=environment(hub, home) | variables,
        capture_output=True,
        text=True,
        timeout=100,
        preexec_fn=limit,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done


def fetched(
    hub: Hub, home: Path, *names: str, most_bytes: int | None = None, token: str | None = None
) -> list[str]:
    """Run FETCH, with `token` in HF_TOKEN, and return its lines."""
    variables = {} if token is None else {"HF_TOKEN": token}
    return fetching(hub, home, *names, most_bytes=most_bytes, **variables).stdout.splitlines()


def test_llama_cpps_rules_choose_the_file(hub: Hub, home: Path) -> None:
    paths = fetched(
        hub, home, "maker/model-GGUF", "maker/model-GGUF:q8_0", "maker/model-GGUF:IQ1_S",
        "maker/other-GGUF", "maker/model-GGUF m-Q8_0.gguf",
    )  # fmt: skip
    names = [Path(path).name for path in paths]
    parts = "m-IQ1_S-00001-of-00002.gguf"
    assert names == ["m-Q4_K_M.gguf", "m-Q8_0.gguf", parts, "o-F16.gguf", "m-Q8_0.gguf"]
    assert Path(paths[0]).read_bytes() == SMALL + b"4"
    assert Path(paths[2]).with_name("m-IQ1_S-00002-of-00002.gguf").read_bytes() == b"GGUF second"
    assert hub.n_downloads == 5, "what is there is not fetched twice, and no projector is"


def test_what_is_wrong_with_a_name_is_one_sentence(hub: Hub, home: Path) -> None:
    hub.gated.add("maker/gated")
    said = fetched(
        hub, home, "maker/modell-GGUF", "maker/model-GGUF:Q5_K_M", "maker/weights",
        "maker/gated", "maker/model-GGUF:Q2_K", "maker/model-GGUF nothing.gguf",
    )  # fmt: skip
    assert said[0].startswith("UsageError")
    assert "has no repository maker/modell-GGUF; did you mean maker/model-GGUF?" in said[0]
    assert "has no Q5_K_M; it has IQ1_S, Q2_K, Q4_K_M, Q8_0" in said[1]
    assert "maker/weights has no GGUF model" in said[2]
    assert said[3].startswith("FetchFailed maker/gated is gated: accept its terms at http")
    assert "HF_TOKEN" in said[3]
    assert "lacks 1 of 2 parts, the first m-Q2_K-00002-of-00002.gguf" in said[4]
    assert "has no file nothing.gguf; it has " in said[5]


def test_a_download_that_breaks_off_goes_on_where_it_was(hub: Hub, home: Path) -> None:
    hub.breaks = 1
    large = b"GGUF" + bytes(range(256)) * (24 << 12)  # half of it is more than one chunk of 10 MB
    hub.repos["maker/model-GGUF"]["m-Q4_K_M.gguf"] = large
    (path,) = fetched(hub, home, "maker/model-GGUF")
    assert Path(path).read_bytes() == large
    assert len(hub.ranges) == 1
    assert int(hub.ranges[0].removeprefix("bytes=").rstrip("-")) > 0


def large_model(hub: Hub) -> bytes:
    """Replace the repository's model by one that takes three pieces of the hub's 10 MB."""
    large = b"GGUF" + bytes(range(256)) * (100 << 10)
    hub.repos["maker/model-GGUF"]["m-Q4_K_M.gguf"] = large
    return large


def left_over(home: Path) -> list[Path]:
    return sorted((home / "hub/models--maker--model-GGUF/blobs").glob("*.incomplete"))


def end_in_the_middle(hub: Hub, home: Path) -> int:
    """Kill a fetching process after its first bytes arrived. Returns the number of bytes it
    left."""
    hub.stalls_after = 11_000_000
    begun = subprocess.Popen(
        [sys.executable, "-c", FETCH, "maker/model-GGUF"], env=environment(hub, home),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert hub.is_stalled.wait(60)
        deadline_s = time.monotonic() + 30
        while not (left := left_over(home)) or left[0].stat().st_size == 0:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
    finally:
        begun.kill()
        begun.wait()
        hub.stalls_after = None
        hub.goes_on.set()
    (partial,) = left_over(home)
    return partial.stat().st_size


def test_a_program_that_is_ended_leaves_what_the_next_goes_on_with(hub: Hub, home: Path) -> None:
    large = large_model(hub)
    n_left = end_in_the_middle(hub, home)
    assert 0 < n_left < len(large)
    (offline,) = fetched(hub, home, "offline maker/model-GGUF")
    assert offline.startswith("FetchFailed maker/model-GGUF is not in "), "half is no model"
    (path,) = fetched(hub, home, "maker/model-GGUF")
    assert hub.ranges == [f"bytes={n_left}-"]
    assert Path(path).read_bytes() == large
    assert left_over(home) == []


def test_what_was_left_and_is_not_the_hubs_is_thrown_away(hub: Hub, home: Path) -> None:
    large = large_model(hub)
    end_in_the_middle(hub, home)
    (partial,) = left_over(home)
    with partial.open("r+b") as file:
        file.write(b"what a broken disk left")
    said, path = fetched(hub, home, "maker/model-GGUF", "maker/model-GGUF")
    assert said.startswith("FetchFailed the download of m-Q4_K_M.gguf is damaged")
    assert Path(path).read_bytes() == large


def test_a_limit_met_in_the_middle_is_one_sentence_and_nothing_is_taken_for_whole(
    hub: Hub, home: Path
) -> None:
    large = large_model(hub)
    (said,) = fetched(hub, home, "maker/model-GGUF", most_bytes=15_000_000)
    assert said.startswith("FetchFailed files may not be as large (ulimit -f")
    assert "the next start resumes the download" in said
    assert fetched(hub, home, "offline maker/model-GGUF")[0].startswith("FetchFailed")
    (path,) = fetched(hub, home, "maker/model-GGUF")
    assert Path(path).read_bytes() == large
    assert len(hub.ranges) == 1


def test_a_disk_without_room_is_noticed_before_anything_is_fetched(hub: Hub, home: Path) -> None:
    hub.claimed["m-Q4_K_M.gguf"] = 1 << 60
    (said,) = fetched(hub, home, "maker/model-GGUF")
    assert said.startswith("FetchFailed maker/model-GGUF needs 1073741824.0 GiB more in ")
    assert "HF_HOME" in said
    assert hub.n_downloads == 0


def test_without_a_network_what_was_fetched_is_used(hub: Hub, home: Path) -> None:
    (path,) = fetched(hub, home, "maker/model-GGUF")
    hub.down = True
    again, offline, missing, unfetched = fetched(
        hub, home, "maker/model-GGUF", "offline maker/model-GGUF", "offline maker/other-GGUF",
        "maker/other-GGUF",
    )  # fmt: skip
    assert again == offline == path
    assert missing.startswith("FetchFailed maker/other-GGUF is not in ")
    assert "answered 503" in unfetched
    hub.url = "http://127.0.0.1:1"
    again, unfetched = fetched(hub, home, "maker/model-GGUF", "maker/other-GGUF")
    assert again == path
    assert "http://127.0.0.1:1 cannot be reached" in unfetched


HTML = (("Content-Type", "text/html"),)
REFUSALS = {
    "429": (Refusal(429, b"<html>Too Many Requests</html>", HTML), "answered 429 (too many"),
    "403": (Refusal(403, b"blocked by policy"), "answered 403: your network blocks it"),
    "404": (Refusal(404, b"<html>nothing here</html>", HTML), "answered 404"),
    "gone": (Refusal(401, headers=(("X-Error-Code", "RepoNotFound"),)), "has no repository"),
    "gated": (Refusal(403, headers=(("X-Error-Code", "GatedRepo"),)), "maker/model-GGUF is gated"),
    "500": (Refusal(500), "answered 500 (a fault of its own)"),
    "407": (Refusal(407), "answered 407: the proxy asks for a password"),
    "418": (Refusal(418), "answered 418"),
    "page": (Refusal(200, b"<html>Log in to the WiFi</html>", HTML), "with no list of files"),
    "json": (Refusal(200, b'{"error": "no"}'), "with no list of files: a login page"),
    "list": (Refusal(200, b"[]"), "with no list of files: a login page"),
    "other": (Refusal(200, b'{"id": "x", "sha": "../..", "siblings": []}'), "not a SHA-1"),
    "empty": (
        Refusal(200, b'{"id": "x", "sha": "%s", "siblings": []}' % COMMIT.encode()),
        "has no GGUF model",
    ),
}  # fmt: skip


def test_a_hub_that_refuses_stops_no_model_that_was_fetched(hub: Hub, home: Path) -> None:
    hub.refusals = {name: refusal for name, (refusal, _) in REFUSALS.items()}
    names = ["maker/model-GGUF", "maker/model-GGUF:Q8_0", "maker/model-GGUF m-Q8_0.gguf"]
    before = fetched(hub, home, *names)
    asked = [word for refused in REFUSALS for word in (f"set {refused}", *names)]
    done = fetching(hub, home, *asked)
    assert done.stdout.splitlines() == before * len(REFUSALS)
    whole = " ".join(done.stderr.split())
    for _, words in REFUSALS.values():
        assert words in whole
    assert whole.count("is used as it was fetched before") == 3 * len(REFUSALS)


def test_a_hub_that_refuses_is_one_sentence_without_a_model(hub: Hub, home: Path) -> None:
    hub.refusals = {name: refusal for name, (refusal, _) in REFUSALS.items()}
    asked = [word for name in REFUSALS for word in (f"set {name}", "maker/model-GGUF")]
    said = fetched(hub, home, *asked)
    assert len(said) == len(REFUSALS)
    for line, (_, words) in zip(said, REFUSALS.values(), strict=True):
        assert words in line


def test_files_that_a_page_replaces_are_not_taken_for_models(hub: Hub, home: Path) -> None:
    page = b"<html>" + b" " * (2 * len(SMALL))  # longer than the file
    hub.refusals = {
        "page": Refusal(200, page, HTML, only_files=True),
        "bytes": Refusal(200, page, only_files=True),
    }
    said = fetched(hub, home, "set page", "maker/model-GGUF", "set bytes", "maker/model-GGUF")
    assert len(said) == 2
    assert all(line.startswith("FetchFailed") for line in said), said
    assert fetched(hub, home, "offline maker/model-GGUF")[0].startswith("FetchFailed")
    (path,) = fetched(hub, home, "set", "maker/model-GGUF")
    assert Path(path).read_bytes() == SMALL + b"4"


def test_an_expired_token_is_named_with_what_to_do(hub: Hub, home: Path) -> None:
    said = (("X-Error-Message", "Invalid credentials in Authorization header"),)
    hub.refusals = {
        "expired": Refusal(401, headers=said, only_with_token=True),
        "no-repository": Refusal(
            401, headers=(("X-Error-Code", "RepoNotFound"),), only_with_token=True
        ),
    }
    both = ("set expired", "maker/model-GGUF", "set no-repository", "maker/model-GGUF")
    for line in fetched(hub, home, *both, token="hf_expired"):
        assert "the token in HF_TOKEN is expired or" in line
        assert "hf_expired" not in line
    (line,) = fetched(hub, home, "maker/model-GGUF", token="hf_“quoted”")
    assert line == (
        "FetchFailed the token in HF_TOKEN has letters that no token has: copy it again"
    )
    home.mkdir(exist_ok=True)
    (home / "token").write_text("hf_stored", encoding="utf-8")
    (line,) = fetched(hub, home, "set expired", "maker/model-GGUF")
    assert f"the token in {home}/token is expired or invalid: replace it, or remove it" in line
    (path,) = fetched(hub, home, "set", "maker/model-GGUF")
    assert path.endswith("m-Q4_K_M.gguf")
    assert fetched(hub, home, "set expired", "maker/model-GGUF") == [path]


@pytest.mark.parametrize("endpoint", ["nonsense", "http://[", "http://nowhere.invalid", "ftp://x"])
def test_an_address_of_no_hub_is_one_sentence(hub: Hub, home: Path, endpoint: str) -> None:
    (path,) = fetched(hub, home, "maker/model-GGUF")
    hub.url = endpoint
    again, missing = fetched(hub, home, "maker/model-GGUF", "maker/other-GGUF")
    if endpoint == "http://[":  # huggingface_hub cannot be imported
        assert again == missing
        assert again.startswith("UsageError HF_ENDPOINT or another variable of huggingface_hub")
    else:
        assert again == path
        assert missing.startswith("FetchFailed")


def test_a_hub_that_never_answers_is_left_in_time(hub: Hub, home: Path) -> None:
    (path,) = fetched(hub, home, "maker/model-GGUF")
    hub.refusal = Refusal(200, stalls=True)
    done = fetching(hub, home, "maker/model-GGUF", HF_HUB_ETAG_TIMEOUT="1")
    assert done.stdout.splitlines() == [path]
    assert "cannot be reached" in " ".join(done.stderr.split())


def test_a_proxy_that_fails_stops_no_model_that_was_fetched(hub: Hub, home: Path) -> None:
    (path,) = fetched(hub, home, "maker/model-GGUF")
    for proxy in ("http://127.0.0.1:1", "nonsense://x", "socks5://127.0.0.1:1"):
        done = fetching(hub, home, "maker/model-GGUF", HTTP_PROXY=proxy, NO_PROXY="")
        assert done.stdout.splitlines() == [path], proxy


def test_a_cache_that_cannot_be_written_says_so(hub: Hub, home: Path, tmp_path: Path) -> None:
    where = str(tmp_path / "file")
    Path(where).write_text("no folder", encoding="utf-8")
    (line,) = fetching(hub, home, "maker/model-GGUF", HF_HUB_CACHE=where).stdout.splitlines()
    assert line.startswith(f"FetchFailed {where}, where models are kept, cannot be written (")
    assert "HF_HOME" in line
    for number, why in (
        (errno.EROFS, "Read-only file system"),
        (errno.EACCES, "Permission denied"),
        (errno.ENOLCK, "No locks available"),
        (errno.ENOTSUP, "Operation not supported"),
    ):
        with (
            pytest.raises(FetchFailed, match=rf"kept, .* \({why}\): have HF_HOME name a folder"),
            in_one_sentence(HubName("u/r"), None, suggests=False),
        ):
            raise OSError(number, why, "/elsewhere")


def test_a_model_in_a_cache_that_is_only_read_is_used(hub: Hub, home: Path) -> None:
    (path,) = fetched(hub, home, "maker/model-GGUF")
    ref = home / "hub/models--maker--model-GGUF/refs/main"
    ref.unlink()
    ref.mkdir()  # cannot be read or written as a file
    (said,) = fetched(hub, home, "maker/model-GGUF")
    assert said.startswith(f"FetchFailed {home}/hub, where models are kept, cannot be written")
    ref.rmdir()
    ref.write_text(COMMIT, encoding="utf-8")
    ref.chmod(0o400)
    done = fetching(hub, home, "maker/model-GGUF")
    assert (done.stdout.splitlines(), done.stderr) == ([path], ""), "nothing has to be written"


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP])
def test_a_cache_on_a_file_system_without_locks(
    hub: Hub, home: Path, tmp_path: Path, number: int
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"import fcntl\ndef flock(fd, how):\n    raise OSError({number}, 'no locks here')\n"
        "fcntl.flock = flock\n",
        encoding="utf-8",
    )
    path = f"{tmp_path}{os.pathsep}{environment(hub, home)['PYTHONPATH']}"
    (said,) = fetching(hub, home, "maker/model-GGUF", PYTHONPATH=path).stdout.splitlines()
    if number == errno.ENOSYS:  # other programs are kept out by a file's existence then
        assert Path(said).read_bytes() == SMALL + b"4"
    else:
        assert said.startswith(f"FetchFailed {home}/hub, where models are kept, lies on a file")
        assert "HF_HOME" in said


@pytest.mark.parametrize("n_bytes", [0, 4, len(SMALL), len(SMALL) + 7])
def test_a_fetched_file_of_another_size_is_fetched_again(
    hub: Hub, home: Path, n_bytes: int
) -> None:
    (path,) = fetched(hub, home, "maker/model-GGUF")
    whole = Path(path).read_bytes()
    blob = Path(path).resolve()
    blob.write_bytes((whole + b"and more")[:n_bytes])
    done = fetching(hub, home, "maker/model-GGUF")
    assert done.stdout.splitlines() == [path]
    assert Path(path).read_bytes() == whole
    words = f"has {n_bytes} bytes, and the hub's has {len(whole)}: it is fetched again"
    assert words in " ".join(done.stderr.split())
    assert fetching(hub, home, "maker/model-GGUF").stderr == "", "said once"


def test_a_truncated_model_is_not_used_and_the_rest_is_fetched(hub: Hub, home: Path) -> None:
    whole = (ROOT / "specoffload/demo/draft.gguf").read_bytes()
    hub.repos["maker/real-GGUF"] = {"r-Q8_0.gguf": whole}
    (path,) = fetched(hub, home, "maker/real-GGUF")
    Path(path).resolve().write_bytes(whole[:1_500_000])
    hub.down = True
    for said in fetched(hub, home, "offline maker/real-GGUF", "maker/real-GGUF"):
        assert said.startswith(f"FetchFailed {path}: the file ends at byte 1500000 but tensor ")
        assert said.endswith(": start once with the hub in reach, and the rest is fetched")
    hub.down = False
    hub.ranges.clear()
    assert fetched(hub, home, "maker/real-GGUF") == [path]
    assert Path(path).read_bytes() == whole
    assert hub.ranges == ["bytes=1500000-"], "the rest alone"


def test_a_name_in_another_case_means_what_was_fetched(hub: Hub, home: Path) -> None:
    (path,) = fetched(hub, home, "maker/model-GGUF")
    hub.down = True
    names = ("maker/Model-gguf", "offline Maker/MODEL-gguf", "maker/model-gguf:q4_k_m")
    assert fetched(hub, home, *names) == [path] * 3
    assert [folder.name for folder in (home / "hub").glob("models--*")] == [
        "models--maker--model-GGUF"
    ]


@pytest.mark.parametrize("commit", ["", "../../../..", "0123", "\0"])
def test_a_damaged_note_of_a_commit_names_no_file(hub: Hub, home: Path, commit: str) -> None:
    (path,) = fetched(hub, home, "maker/model-GGUF")
    (home / "hub/models--maker--model-GGUF/refs/main").write_text(commit, encoding="utf-8")
    offline, again = fetched(hub, home, "offline maker/model-GGUF", "maker/model-GGUF")
    assert offline.startswith("FetchFailed maker/model-GGUF is not in ")
    assert again == path


def test_a_token_is_never_shown(hub: Hub, home: Path) -> None:
    code = (
        "import sys; from specoffload.errors import SpecOffloadError\n"
        "from specoffload.models.hub import fetch; from specoffload.models.names import HubName\n"
        "try: fetch(HubName('maker/model-GGUF'), token='hf_sec\\nret')\n"
        "except SpecOffloadError as e: print(e)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(hub, home),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout == "the token of --hf-token has letters that no token has: copy it again\n"
    assert "hf_sec" not in done.stdout + done.stderr


def test_an_address_with_a_revision_names_that_revision(hub: Hub, home: Path) -> None:
    older = "89abcdef" * 5
    (path,) = fetched(hub, home, f"https://huggingface.co/maker/model-GGUF/tree/{COMMIT}/Q8_0")
    assert path.endswith(f"snapshots/{COMMIT}/m-Q8_0.gguf")
    hub.commit = older
    address = "https://hf.co/maker/model-GGUF/resolve/refs%2Fpr%2F1/m-Q4_K_M.gguf?download=true"
    (path,) = fetched(hub, home, address)
    assert path.endswith(f"snapshots/{older}/m-Q4_K_M.gguf")
    assert hub.revisions == [COMMIT, "refs%2Fpr%2F1"]
    offline = fetched(hub, home, f"offline {address}", "offline maker/model-GGUF")
    assert offline[0] == path
    assert offline[1].startswith("FetchFailed"), "the branch main was never fetched"


def program(hub: Hub, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "specoffload", *words],
        env=environment(hub, home),
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_the_program_runs_and_lists_what_it_fetched(hub: Hub, home: Path, tiny_dense: Path) -> None:
    hub.repos["maker/real-GGUF"] = {"real-F16.gguf": tiny_dense.read_bytes()}
    done = program(hub, home, "run", "maker/real-GGUF", "-p", "hello", "-n", "1")
    assert done.returncode == 0, done.stderr
    ollama = home / "ollama"
    manifest = ollama / "manifests/registry.ollama.ai/library/tiny/1b"
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:abc"}
    manifest.write_text(json.dumps({"layers": [layer]}))
    (ollama / "blobs").mkdir()
    shutil.copy(tiny_dense, ollama / "blobs/sha256-abc")
    (home / "xdg/llama.cpp").mkdir(parents=True)
    shutil.copy(tiny_dense, home / "xdg/llama.cpp/user_repo_x-Q4_0.gguf")
    listed = json.loads(program(hub, home, "models", "--json").stdout)
    assert [row["name"].rpartition("/")[2] for row in listed] == [
        "real-GGUF:F16", "user_repo_x-Q4_0.gguf", "ollama:tiny:1b",
    ]  # fmt: skip
    assert {row["architecture"] for row in listed} == {"llama"}
    assert all(row["fits"] and row["size_bytes"] > 0 for row in listed)
    done = program(hub, home, "plan", "ollama:tiny:1b", "--json")
    assert done.returncode == 0, done.stderr
    done = program(hub, home, "plan", "ollama:tinny", "--json")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "specoffload: ollama has not fetched ollama:tinny:latest; the nearest that it has is "
        "ollama:tiny:1b"
    ]


def test_plan_reads_only_the_header_of_a_model_that_is_not_here(
    hub: Hub, home: Path, tmp_path: Path
) -> None:
    planned = plan_preset("qwen3-30b-a3b", size="full", n_layer=4)
    header = write_header_only(planned, tmp_path / "header.gguf")
    size_bytes = header.stat().st_size
    with header.open("rb") as file:
        beginning = file.read(24 << 20)
    # The server holds the beginning alone, and says that the file is as large as its weights.
    hub.repos["maker/large-GGUF"] = {"large-Q4_K_M.gguf": beginning}
    hub.sizes["large-Q4_K_M.gguf"] = size_bytes
    asked = (
        "plan",
        "maker/large-GGUF",
        "--device",
        "sim",
        "--vram",
        "4GiB",
        "--ram",
        "64GiB",
        "--json",
    )
    found = json.loads(program(hub, home, *asked).stdout)
    by_path = json.loads(program(hub, home, *(*asked[:1], str(header), *asked[2:])).stdout)
    assert {**found, "model": ""} == {**by_path, "model": ""}
    assert found["model"] == "large-Q4_K_M.gguf"
    assert hub.ranges[0] == f"bytes=0-{(4 << 20) - 1}"
    assert len(hub.ranges) <= 3, "in growing pieces"
    n_ranges = len(hub.ranges)
    assert program(hub, home, *asked).returncode == 0
    assert len(hub.ranges) == n_ranges, "the header is kept"
    assert json.loads(program(hub, home, "models", "--json").stdout) == []
    hub.repos["maker/large-GGUF"]["large-Q4_K_M.gguf"] = b"GGUF but no model" + bytes(5 << 20)
    refused = program(hub, home / "again", *asked)
    assert refused.returncode == 2
    assert "cannot be read as GGUF" in refused.stderr


@pytest.fixture(scope="module")
def large_headers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[bytes, int]]:
    """The first bytes of files of some GB, and their sizes: one that opens, and one without a key.

    The library asks for the key. The header's own check does not.
    """
    folder = tmp_path_factory.mktemp("large")
    found = {}
    for name, left_out in (("good", ""), ("bad", r"^blk\.1\.attn_k_norm")):
        shape = resolve("qwen3-30b-a3b", "full", n_layer=4)
        if left_out:
            shape = replace(shape, without=(*shape.without, left_out))
        path = write_header_only(plan_shape(shape), folder / f"{name}-Q4_K_M.gguf")
        with path.open("rb") as file:
            found[name] = file.read(24 << 20), path.stat().st_size
    return found


@pytest.mark.parametrize(
    ("words", "name", "said"),
    [
        (
            ("run", "maker/large-GGUF", "-p", "hello"),
            "bad",
            "tensor 'blk.1.attn_k_norm.weight' not fou",
        ),
        (("serve", "maker/large-GGUF"), "bad", "tensor 'blk.1.attn_k_norm.weight' not found"),
        (
            ("run", "-m", "DRAFT", "-hfd", "maker/large-GGUF", "-p", "hello"),
            "bad",
            "'blk.1.attn_k_norm",
        ),
        (
            ("run", "maker/large-GGUF", "-p", "hello"),
            "good",
            "the download of maker/large-GGUF broke of",
        ),
    ],
)
def test_a_large_model_that_a_start_would_refuse_is_not_fetched(
    words: tuple[str, ...], name: str, said: str, hub: Hub, home: Path, tiny_dense: Path,
    large_headers: dict[str, tuple[bytes, int]],
) -> None:  # fmt: skip
    """The server has only the first bytes of the files, so a download of all of them breaks off."""
    beginning, size_bytes = large_headers[name]
    assert size_bytes > 1 << 30
    hub.repos["maker/large-GGUF"] = {"large-Q4_K_M.gguf": beginning}
    hub.sizes["large-Q4_K_M.gguf"] = hub.claimed["large-Q4_K_M.gguf"] = size_bytes
    done = program(hub, home, *(str(tiny_dense) if w == "DRAFT" else w for w in words))
    assert done.returncode, done.stderr
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    is_fetched = hub.n_downloads > len(hub.ranges)  # headers are read by ranges
    assert is_fetched == (name == "good")
    assert is_fetched or "maker/large-GGUF was not fetched, because a start would" in done.stderr


def test_a_check_that_fails_stops_no_download(
    hub: Hub, home: Path, large_headers: dict[str, tuple[bytes, int]]
) -> None:
    beginning, size_bytes = large_headers["good"]
    hub.repos["maker/large-GGUF"] = {"large-Q4_K_M.gguf": beginning}
    hub.sizes["large-Q4_K_M.gguf"] = hub.claimed["large-Q4_K_M.gguf"] = size_bytes
    hub.refused_ranges = 1
    done = program(hub, home, "run", "maker/large-GGUF", "-p", "hello")
    assert "maker/large-GGUF is fetched without a look at its header" in " ".join(
        done.stderr.split()
    )
    assert hub.n_downloads


ESCAPE = "\x1b]0;owned\x07"


@pytest.mark.parametrize("command", ["plan", "run"])
@pytest.mark.parametrize(
    ("file", "commit", "said"),
    [
        ("../../../../escaped-Q4_K_M.gguf", COMMIT, "leads out of the repository's folder"),
        ("IQ1_S/../../../escaped-Q4_K_M.gguf", COMMIT, "leads out of the repository's folder"),
        ("/escaped-Q4_K_M.gguf", COMMIT, "leads out of the repository's folder"),
        ("..\\escaped-Q4_K_M.gguf", COMMIT, "leads out of the repository's folder"),
        (f"{ESCAPE}-Q4_K_M.gguf", COMMIT, "has no GGUF model"),
        ("m-Q4_K_M.gguf", "../../../escaped", "names the commit '../../../escaped'"),
        ("m-Q4_K_M.gguf", "/tmp", "names the commit '/tmp'"),
        ("m-Q4_K_M.gguf", f"{COMMIT}\n", "which is not a SHA-1 of 40"),
        ("m-Q4_K_M.gguf", "", "which is not a SHA-1 of 40"),
    ],
)
def test_a_hub_that_lies_writes_nothing_outside_of_its_cache(
    command: str, file: str, commit: str, said: str, hub: Hub, tmp_path: Path, tiny_dense: Path
) -> None:
    home = tmp_path / "a" / "b" / "c" / "hf"
    home.mkdir(parents=True)
    if file.startswith("/"):
        file = str(tmp_path / "absolute") + file
    hub.commit = commit
    hub.repos["maker/lies-GGUF"] = {file: tiny_dense.read_bytes()}
    words = ("plan",) if command == "plan" else ("run", "hello")
    refused = program(hub, home, *words, "-hf", "maker/lies-GGUF", "--device", "cpu")
    assert refused.returncode in (1, 2), refused.stderr
    assert "Traceback" not in refused.stderr
    assert said in " ".join(refused.stderr.split())
    assert "\x1b" not in refused.stderr
    written = [path for path in tmp_path.rglob("*") if path.is_file() and home not in path.parents]
    assert written == []
    assert not list(home.rglob("*.gguf"))


def located(hub: Hub, home: Path, *words: str) -> list[str]:
    """Run LOCATED with these words of a command line, and return its lines."""
    done = subprocess.run(
        [sys.executable, "-c", LOCATED, *words],
        env=environment(hub, home), capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


def test_a_projector_is_fetched_with_the_model_if_asked_for(hub: Hub, home: Path) -> None:
    repo, url = "maker/model-GGUF", "https://huggingface.co/maker/model-GGUF/resolve/main"
    assert located(hub, home, "-hf", repo) == ["None"]
    n_before = hub.n_downloads
    (path,) = located(hub, home, "-hf", repo, "--mmproj-auto")
    assert Path(path).read_bytes() == b"GGUF projector"
    assert hub.n_downloads == n_before + 1
    assert located(hub, home, "-hf", repo, "--mmproj-auto", "--offline") == [path]
    assert located(hub, home, "-hf", repo, "--mmproj-url", f"{url}/mmproj-F16.gguf") == [path]
    none = located(hub, home, "-hf", "maker/other-GGUF", "--mmproj-auto")
    assert none[0] == "None"
    assert "--mmproj-auto has no effect: no file with mmproj in its name was found in" in none[1]
    (refused,) = located(hub, home, "-hf", repo, "--mmproj-url", "https://example.org/a.gguf")
    assert refused.startswith("UsageError --mmproj-url https://example.org/a.gguf: only files of")


def test_a_repository_of_row_files_drafts(hub: Hub, home: Path) -> None:
    """`dspark-`, `dflash-` and `eagle3-` files, as llama.cpp finds them."""
    hub.repos["maker/drafts-GGUF"] = {"dflash-m-Q8_0.gguf": b"GGUF d", "eagle3-m.gguf": b"GGUF e"}
    hub.repos["maker/both-GGUF"] = {"b-Q8_0.gguf": b"GGUF b", "dspark-b-Q8_0.gguf": b"GGUF s"}

    def draft_of(*words: str) -> bytes | None:
        done = subprocess.run(
            [sys.executable, "-c", LOCATED, "-hf", "maker/both-GGUF", *words],
            env=environment(hub, home), capture_output=True, text=True, timeout=100, check=True,
        )  # fmt: skip
        path = done.stderr.rpartition("draft ")[2].strip()
        return None if path in ("", "None") else Path(path).read_bytes()

    assert draft_of("-hfd", "maker/drafts-GGUF") == b"GGUF d"
    assert draft_of("-hfd", "maker/drafts-GGUF", "--spec-type", "draft-eagle3") == b"GGUF e"
    assert draft_of("-hfd", "maker/drafts-GGUF", "--offline") == b"GGUF d"
    assert draft_of("-hfd", "maker/other-GGUF") == b"GGUF o"
    assert draft_of("-hfd", "maker/both-GGUF", "--spec-type", "draft") == b"GGUF b"
    assert draft_of() is None
    assert draft_of("--spec-type", "dspark") == b"GGUF s", "the model's own repository has it"


def test_a_projector_in_the_models_folder_is_found(hub: Hub, home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    for name in ("m-Q4_K_M.gguf", "mmproj-F16.gguf", "mmproj-Q8_0.gguf"):
        (folder / name).write_bytes(b"GGUF")
    model = str(folder / "m-Q4_K_M.gguf")
    assert located(hub, home, "-m", model) == ["None"]
    assert located(hub, home, "-m", model, "--mmproj-auto") == [str(folder / "mmproj-Q8_0.gguf")]
    (folder / "other.gguf").write_bytes(b"GGUF")
    other = located(hub, home, "-m", model, "--mmproj-auto")
    assert other[0] == "None"
    assert "mmproj-Q8_0.gguf may belong to another model of its folder" in other[1]
    (folder / "other.gguf").rename(folder / "m-Q8_0.gguf")
    found = located(hub, home, "-m", model, "--mmproj-auto")
    assert found == [str(folder / "mmproj-Q8_0.gguf")], "quantisations share a projector"
