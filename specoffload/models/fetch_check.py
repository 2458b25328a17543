"""Checks a model of the hub by its headers before its files are fetched.

Without this, a start would refuse some models only after a download of hundreds of GB. Headers are
read by the native library, which the server's first process must not load. So another process
fetches the headers, as `plan` does, and checks them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict

from offload.errors import BadModel, OffloadError
from offload.load_check import calling
from offload.model_file import read_facts
from offload.open_check import check_opens
from specoffload import report
from specoffload.errors import SpecOffloadError
from specoffload.models.hub import fetch
from specoffload.models.names import HubName


def check_before_fetch(name: HubName, token: str | None, *, is_draft: bool) -> None:
    """Raise BadModel if a start would refuse the model. Takes a few seconds.

    If the check itself fails, for example because the network does, a note says so.
    """
    asked = {"name": asdict(name), "token": token, "is_draft": is_draft}
    done = subprocess.run(
        calling(__name__, answer_question.__name__),
        input=json.dumps(asked),
        capture_output=True,
        text=True,
    )
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        said = done.stderr.strip().rpartition("\n")[2] or f"status {done.returncode}"
        answer = {"failed": said}
    if reason := answer.get("failed"):
        report.note(f"{name} is fetched without a look at its header before ({reason})")
    if reason := answer.get("refused"):
        raise BadModel(f"{name} was not fetched, because a start would refuse it: {reason}")


_TO_ASKER = 1  # standard output of the other process


def answer_question() -> None:
    """Answer one question of `check_before_fetch`, which is on standard input, as JSON."""
    asked = json.load(sys.stdin)
    key, words = "refused", ""
    folder = ""
    try:
        path = fetch(HubName(**asked["name"]), token=asked["token"], header_only=True)
        folder = f"{path.parent}{os.sep}"
        check_opens(read_facts(path), is_draft=asked["is_draft"])
    except OffloadError as e:
        words = str(e).replace(folder, "")
    except SpecOffloadError as e:
        key, words = "failed", str(e)
    os.write(_TO_ASKER, json.dumps({key: words}).encode())
