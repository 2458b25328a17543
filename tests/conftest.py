"""Fixtures shared by the test folders, and a header that names the native versions."""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import random
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tally
import wide
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import settings

_N_LEFT_OUT = pytest.StashKey[int]()  # tests that the sample left out
_N_EXAMPLES = 30  # of a hypothesis test in a sample, unless it names a number
_PATIENCE_S = 60.0  # from the end of a test's time until its process ends
_SEED = "SPECOFFLOAD_TESTS_SEED"  # of this run's sample, for pytest-xdist's workers

# CI uses the same examples each time, so that failures can be reproduced. Local runs vary them.
settings.register_profile("ci", derandomize=True)
settings.register_profile("sanitized", derandomize=True, deadline=None)  # they are slower
if os.environ.get("PLAYER_SANITIZERS"):
    settings.load_profile("sanitized")
elif os.environ.get("CI"):
    settings.load_profile("ci")


# Let programs that tests start import the lab. The tests themselves have pytest's `pythonpath`.
SCRIPTS = Path(__file__).parents[1] / "scripts"
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH")])
)

# Shells make background processes ignore Ctrl-C, and programs that the tests start would inherit
# that. But tests send Ctrl-C themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def own_processor(worker: str, processors: Iterable[int]) -> int:
    """The processor on which pytest-xdist's worker "gw0", "gw1", ... runs."""
    allowed = sorted(processors)
    return allowed[int(worker.removeprefix("gw")) % len(allowed)]


# Bind each parallel worker, and so the programs it starts, to one processor. ggml's threads spin,
# so more threads than processors would wait for each other.
if (worker := os.environ.get("PYTEST_XDIST_WORKER", "")).startswith("gw"):
    os.sched_setaffinity(0, {own_processor(worker, os.sched_getaffinity(0))})


@pytest.hookimpl(tryfirst=True)  # before fixtures import the missing package
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test whose `extra` marker names a package that is not installed."""
    for marker in item.iter_markers("extra"):
        for package in marker.args:
            if importlib.util.find_spec(package) is None:
                pytest.skip(f"{package} is not installed: scripts/test-extras runs this")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """End the process if a test hangs in native code, where pytest-timeout's signal has to wait.

    pytest-xdist names the test then, and goes on in a new process.
    """
    marker = item.get_closest_marker("timeout")
    limit_s = float(marker.args[0] if marker else item.config.getini("timeout"))
    stderr = item.config.stash[fault_handler_stderr_fd_key]
    faulthandler.dump_traceback_later(limit_s + _PATIENCE_S, exit=True, file=stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", action="store_true", help="a sample of the tests in tests/wide.py")
    parser.addoption("--wide", action="store_true", help="only the tests in tests/wide.py")
    parser.addoption("--one-in", type=int, default=1, help="a random nth of the files")
    parser.addoption("--sample-seed", type=int, help="repeat the sample of an earlier run")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the sample's seed before pytest-xdist's workers start, so that all of them know it."""
    seed = config.getoption("--sample-seed")
    chosen = random.SystemRandom().randrange(10_000) if seed is None else seed
    os.environ.setdefault(_SEED, str(chosen))
    if config.getoption("--sample"):
        os.environ[wide.IS_SAMPLED] = "1"
        settings.register_profile("sample", settings(), max_examples=_N_EXAMPLES)
        settings.load_profile("sample")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed, n = int(os.environ[_SEED]), config.getoption("--one-in")
    chosen = {item.nodeid for item in items}
    if config.getoption("--sample"):
        chosen = wide.sample(chosen, seed)
    elif config.getoption("--wide"):
        chosen = {item.nodeid for item in items if _is_wide(item)}
    if n > 1:
        chosen = wide.share_of_files(chosen, n, seed)
    left_out = [item for item in items if item.nodeid not in chosen]
    if not left_out:
        return
    config.hook.pytest_deselected(items=left_out)
    config.stash[_N_LEFT_OUT] = len(left_out)
    if (output := getattr(config, "workeroutput", None)) is not None:  # of pytest-xdist
        output["n_left_out"] = len(left_out)
    gone = {id(item) for item in left_out}
    items[:] = [item for item in items if id(item) not in gone]


def _is_wide(item: pytest.Item) -> bool:
    """True if `scripts/test` leaves out this test, some cases of it or some of its examples."""
    return wide.is_wide(item.nodeid) or item.get_closest_marker("hypothesis") is not None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Learn from pytest-xdist's workers, which collect the same tests, how many were left out."""
    output = getattr(node, "workeroutput", None) or {}
    node.config.stash[_N_LEFT_OUT] = output.get("n_left_out", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Show a line for each reason of skips, and keep the counts for the script's last line."""
    counts = tally.tally_of(terminalreporter.stats, config.stash.get(_N_LEFT_OUT, 0))
    for line in tally.reason_lines(counts.skipped):
        terminalreporter.write_line(line)
    if not hasattr(config, "workerinput"):  # pytest-xdist's workers report to this process
        tally.keep(counts)


def pytest_report_header(config: pytest.Config) -> list[str]:
    of = "tests in tests/wide.py" if config.getoption("--sample") else "architectures"
    lines = [f"a sample of the {of}: --sample-seed {os.environ[_SEED]}"]
    try:
        import llama_cpp
    except ImportError:
        return [*lines, "llama-cpp-python: not installed (tests/pure only)"]
    return [*lines, f"llama-cpp-python: {llama_cpp.__version__}"]


@pytest.fixture(scope="session", autouse=True)
def profile_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of profiles for this test run, in place of the user's cache.

    First starts measure briefly.
    """
    folder = tmp_path_factory.mktemp("profiles")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECOFFLOAD_PROFILE_DIR", str(folder))
        patch.setenv("SPECOFFLOAD_MEASURE_S", "0.2")
        yield folder


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the models that tests write, kept for the test run."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tiny_moe(models: Path) -> Path:
    """A random DeepSeek-V3 shape: MLA, one dense layer, routed and shared experts."""
    from lab.synth import write_preset

    return write_preset("deepseek-v3", models / "tiny_moe.gguf", size="tiny", seed=1)


@pytest.fixture(scope="session")
def tiny_dense(models: Path) -> Path:
    """A random llama shape of a few layers."""
    from lab.synth import write_preset

    return write_preset("mistral-large", models / "tiny_dense.gguf", size="tiny", seed=2)


@pytest.fixture
def break_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function of Python code that makes `import torch` run this code."""

    def install(code: str) -> None:
        package = tmp_path / "packages" / "torch"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(code)
        monkeypatch.syspath_prepend(package.parent)
        monkeypatch.delitem(sys.modules, "torch", raising=False)

    return install
