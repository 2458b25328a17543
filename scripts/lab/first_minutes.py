"""Makes docs/first-minutes.md: what a newcomer types and sees in the first ten minutes.

    scripts/lab/run first-minutes [--home FOLDER] [FILE]
    scripts/lab/run first-minutes --modelled [FILE]

Types the commands into a terminal of 80 columns (tmux) in a new home folder, and writes down the
screens as they are. With `--home`, a first call clones and installs into FOLDER, and writes no
page. A second call does the rest, which takes less time, so that only that needs an idle machine.
With `--modelled` only the plan is typed again, with the program of
this environment, and the other screens stay: a busy machine does not change what is modelled.
Needs tmux, git, curl, and the package indexes that pip uses. libllama is compiled unless it was
compiled on this machine before.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lab import ROOT
from lab.synth.published import published_facts

COLUMNS, LINES = 80, 45
PATIENCE_S = 420.0
_REDRAW_S = 0.3
SOCKET = f"first-minutes-{os.getpid()}"
PAGE = ROOT / "docs" / "first-minutes.md"
URL = "http://127.0.0.1:8080"
MODEL = "DeepSeek-R1"
PLANNED = "A plan of R1 for a card of 24 GiB"
PLAN = f"specoffload plan {MODEL}.gguf --hardware rtx-4090-ddr5"
INSTALLED = "installed.txt"  # the screen of the first call with --home
LINE = "class StreamWriter(Codec,codecs.StreamWriter):"  # a line of the pair's training text
BODY = f'{{"prompt": "{LINE}", "max_tokens": 24, "temperature": 0}}'
HEAD = f"""# The first ten minutes, as recorded

`scripts/lab/run first-minutes` typed these commands into a terminal of {COLUMNS} columns and wrote
down what it showed. The machine had {os.cpu_count()} CPU cores and no GPU. Nothing else was started
on it after the first screen. Progress bars, which disappear, are left out. llama.cpp had been
compiled on this machine before. The first `scripts/run` on yours compiles it, behind a bar that
shows how far it is: about 2 minutes on 2 cores. The included models only continue Python source
that is like the standard library. The file of R1 is only its header, which is all that `plan`
reads. The plan's figures are modelled, so its screen is recorded again more often than the others.
"""


class Terminal:
    """A shell in tmux. `wait` ends when its next prompt appears."""

    def __init__(self, home: Path, name: str) -> None:
        """Start the shell with `home` as its home and working folder."""
        self._name, self._home = name, home
        kept = {k: v for k, v in os.environ.items() if k.lower().startswith(("pip_", "ssl_"))}
        kept |= {k: v for k, v in os.environ.items() if k.lower().endswith("_proxy")}
        environment = kept | {
            "HOME": str(home), "PATH": os.environ["PATH"], "TERM": "screen-256color",
            "LANG": "C.UTF-8", "PS1": "$ ",
            "PROMPT_COMMAND": f"tmux -L {SOCKET} wait-for -S {name}",
        }  # fmt: skip
        words = [f"{key}={value}" for key, value in environment.items()]
        size = ["-x", str(COLUMNS), "-y", str(LINES)]
        shell = ["env", "-i", *words, "bash", "--norc", "--noprofile"]
        _tmux(
            "-f", "/dev/null", "new-session", "-d", "-s", name, *size, "-c", str(home), *shell
        )  # fmt: skip
        _tmux("set-option", "-t", name, "history-limit", "5000")
        self.wait()

    def type(self, words: str) -> None:
        _tmux("send-keys", "-t", self._name, "-l", words)
        _tmux("send-keys", "-t", self._name, "Enter")

    def press(self, key: str) -> None:
        _tmux("send-keys", "-t", self._name, key)

    def wait(self) -> None:
        """Wait for the next prompt. Raises TimeoutExpired."""
        _tmux("wait-for", self._name)

    def wait_for(self, words: str, *, at_end: bool = False) -> None:
        """Wait until the screen shows `words`, or ends with them. Raises TimeoutError."""
        end_s = time.monotonic() + PATIENCE_S
        while not (self.screen().endswith(words) if at_end else words in self.screen()):
            if time.monotonic() > end_s:
                raise TimeoutError(f"{words!r} did not appear:\n{self.screen()}")
            time.sleep(0.2)

    def run(self, words: str) -> str:
        """Type a command, wait for its end, and return the screen. The next screen is empty."""
        self.type(words)
        self.wait()
        return self.taken()

    def screen(self) -> str:
        """Everything that the terminal shows, without paths of this machine."""
        shown = _tmux("capture-pane", "-p", "-S", "-", "-t", self._name)
        lines = [line.rstrip() for line in shown.replace(str(self._home), "~").splitlines()]
        return "\n".join(lines).rstrip().removesuffix("\n$")

    def taken(self) -> str:
        """Return the screen, and clear it."""
        shown = self.screen()
        self.press("C-l")  # clears the screen and draws the prompt again
        time.sleep(_REDRAW_S)
        _tmux("clear-history", "-t", self._name)
        return shown


def _tmux(*words: str) -> str:
    done = subprocess.run(
        ["tmux", "-L", SOCKET, *words], capture_output=True, text=True, timeout=PATIENCE_S
    )
    if done.returncode:
        raise RuntimeError(f"tmux {words[0]}: {done.stderr.strip()}")
    return done.stdout


def installed(home: Path) -> str:
    """Clone and install into `home`. Returns the screen."""
    (home / "specoffload.git").symlink_to(ROOT / ".git" if (ROOT / ".git").is_dir() else ROOT)
    wheels = Path.home() / ".cache" / "specoffload" / "wheels"
    if wheels.is_dir():
        (home / ".cache" / "specoffload").mkdir(parents=True)
        (home / ".cache" / "specoffload" / "wheels").symlink_to(wheels)
    shell = Terminal(home, "install")
    clone = shell.run("git clone -q specoffload.git specoffload && cd specoffload")
    published_facts(MODEL, home / "specoffload")
    return f"{clone}\n{shell.run('scripts/run')}"


def recorded(home: Path, install: str) -> dict[str, str]:
    """The screens of the session, by title. `install` is the first one."""
    screens = {"Clone and install": install}
    shell = Terminal(home, "first")
    shell.run("cd specoffload")
    shell.run(". .venv/bin/activate && PS1='$ '")
    shell.type("specoffload chat")
    shell.wait_for("\n>", at_end=True)
    shell.type(LINE)
    shell.wait_for("\n>", at_end=True)
    time.sleep(1)  # the prompt is drawn before keys are read
    shell.press("C-d")
    shell.wait()
    screens["A first text"] = shell.taken()
    shell.type("specoffload serve")
    shell.wait_for("model loaded")
    other = Terminal(home, "second")
    asked = other.run(f"curl -s {URL}/v1/completions -d '{BODY}' | cut -c1-400")
    page = other.run(f"curl -s {URL} | grep -o '<title>.*</title>'")
    shell.press("C-c")
    shell.wait()
    screens["A server, and its page"] = shell.taken()
    screens["A request in another terminal"] = f"{asked}\n{page}"
    screens[PLANNED] = shell.run(PLAN)
    screens["Beside llama.cpp"] = shell.run("specoffload bench")
    screens["llama-bench's sweep"] = shell.run(
        "specoffload bench -p 64,256 -n 32 -fa 0,1 -d 0,512 -r 3"
    )
    return screens


def with_plan(page: str) -> str:
    """Return the page with the screen of the plan recorded again."""
    with tempfile.TemporaryDirectory() as name:
        published_facts(MODEL, Path(name))
        shell = Terminal(Path(name), "plan")
        here = shlex.quote(sys.prefix)
        shell.run(f"export PATH={here}/bin:$PATH PYTHONPATH={shlex.quote(str(ROOT))}")
        shell.taken()
        screen = shell.run(PLAN)
    before, rest = page.split(f"## {PLANNED}\n\n```\n", 1)
    after = rest.partition("```\n")[2]
    return before + section(PLANNED, screen) + after


def section(title: str, screen: str) -> str:
    return f"## {title}\n\n```\n{screen}\n```\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", default=PAGE)
    parser.add_argument("--home", type=Path)
    parser.add_argument("--modelled", action="store_true")
    arguments = parser.parse_args()
    try:
        if arguments.modelled:
            page = with_plan(PAGE.read_text(encoding="utf-8"))
            arguments.file.write_text(page, encoding="utf-8")
            return
        if arguments.home is None:
            with tempfile.TemporaryDirectory() as name:
                screens = recorded(Path(name), installed(Path(name)))
        elif not arguments.home.exists():
            arguments.home.mkdir(parents=True)
            (arguments.home / INSTALLED).write_text(installed(arguments.home), encoding="utf-8")
            return
        else:
            install = (arguments.home / INSTALLED).read_text(encoding="utf-8")
            screens = recorded(arguments.home, install)
    finally:
        subprocess.run(["tmux", "-L", SOCKET, "kill-server"], capture_output=True, check=False)
    parts = [section(title, screen) for title, screen in screens.items()]
    arguments.file.write_text("\n".join([HEAD, *parts]), encoding="utf-8")


if __name__ == "__main__":
    main()
