"""Counts how many random changes of the source the tests notice.

A mutant is one module with one small change, such as `<` for `<=` or `n + 2` for `n + 1`. It is
*killed* if a test fails, and *survives* otherwise. The sample has equally many mutants of each
folder. Each mutant passes three stages until one kills it:

- `own`: the files of tests/pure that import or name its module, fastest first
- `native`: the files of tests/model and tests/server that do so
- `pure`: all other files of tests/pure, except tests/pure/house, which judges sources

With `--contexts FILE`, the stages `own` and `pure` run only the tests of tests/pure that run the
changed line, which no other test can notice. Lines that run during imports keep their files. FILE
is made by coverage.py with `dynamic_context = test_function`, from the same commit. So is the FILE
of `--native-contexts`: the stage `native` then runs up to 20 tests whose own process runs the
changed line, of as many files as possible. If there are none, it runs the files as above, because
the line may run in a server's process.

A stage runs for all mutants before the next one starts. Results are appended to a file as they
come, so a run that was stopped continues where it was. The tests run in a copy of the commit,
and never change the working tree. Tests that take longer than --limit-s seconds are *stopped*,
which says nothing about the mutant, because the machine may be busy. At the end, all tests that
killed a mutant run once without one: they have to pass.

Usage: scripts/lab/run mutants --seed 1 -n 60 [--modules offload/plan ...] [--stages own pure]
"""

from __future__ import annotations

import argparse
import ast
import copy
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "offload/schedule",
    "offload/times",
    "offload/plan",
    "specdec/policies",
    "specoffload/server/engine",
    "specoffload/chat",
)
STAGES = ("own", "native", "pure")
_TOPS = ("offload/", "specdec/", "specoffload/")
_MOST_NATIVE = 20  # tests of one mutant in the stage `native`, if the line of each test is known
KILLED, PASSED, STOPPED, NO_TESTS = "killed", "passed", "stopped", "no tests"

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One change of one file: the bytes from `start` to `end` become `after`."""

    path: str
    line: int
    start: int
    end: int
    before: str
    after: str

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}: {self.before} -> {self.after}"

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]


@dataclass
class Result:
    """The results of the stages for a mutant."""

    mutant: Mutant
    stages: dict[str, str] = field(default_factory=dict)
    killer: str = ""
    seconds: float = 0.0

    @property
    def killed(self) -> bool:
        return KILLED in self.stages.values()


def changed(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that may take the place of `node`."""
    if isinstance(node, ast.Compare):
        for i, operator in enumerate(node.ops):
            other = copy.deepcopy(node)
            other.ops[i] = _COMPARISONS[type(operator)]()
            yield other
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        yield ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id in _FUNCTIONS:
            function = ast.Name(_FUNCTIONS[node.func.id])
            yield ast.Call(function, node.args, node.keywords)
    elif isinstance(node, ast.AugAssign):
        yield ast.Pass()
    elif isinstance(node, ast.Expr):
        if isinstance(node.value, ast.Call):
            yield ast.Pass()
    elif isinstance(node, ast.Continue):
        yield ast.Break()
    elif isinstance(node, ast.Break):
        yield ast.Continue()


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """`node` and the nodes below it that run, without annotations and f-strings.

    Python 3.11 gives wrong positions for the parts of f-strings.
    """
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield from _evaluated(child)


def mutants_of(path: str, source: str) -> list[Mutant]:
    """All mutants of a module, in the order of its text."""
    lines = source.encode().splitlines(keepends=True)
    begins = [0]
    for line in lines:
        begins.append(begins[-1] + len(line))
    found = []
    for node in _evaluated(ast.parse(source)):
        for other in changed(node):
            assert isinstance(node, ast.expr | ast.stmt)
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            start = begins[node.lineno - 1] + node.col_offset
            end = begins[node.end_lineno - 1] + node.end_col_offset
            after = ast.unparse(ast.fix_missing_locations(other))
            if isinstance(node, ast.expr):
                after = f"({after})"
            before = " ".join(source.encode()[start:end].decode().split())
            found.append(Mutant(path, node.lineno, start, end, before, after))
    return sorted(set(found), key=lambda m: (m.start, m.end, m.after))


def sample(folders: Sequence[str], root: Path, n: int, seed: int) -> list[Mutant]:
    """`n` mutants, one of each folder in turn, so that the first ones are a sample too."""
    chooser = random.Random(seed)
    by_folder = []
    for folder in folders:
        at = root / folder
        files = [at] if at.is_file() else sorted(at.rglob("*.py"))
        found = [
            m for p in files for m in mutants_of(str(p.relative_to(root)), p.read_text("utf-8"))
        ]
        by_folder.append(chooser.sample(found, min(len(found), -(-n // len(folders)))))
    longest = max(map(len, by_folder))
    return [found[i] for i in range(longest) for found in by_folder if i < len(found)][:n]


def names(path: str, text: str) -> bool:
    """Whether the text of a test imports or names the module at `path`."""
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    package, _, last = module.rpartition(".")
    imported = rf"from {re.escape(package)} import [^\n]*\b{last}\b"
    several = rf"from {re.escape(package)} import \([^)]*\b{last}\b"
    return re.search(rf"\b{re.escape(module)}\b|{imported}|{several}", text) is not None


def _own(path: str, tests: Sequence[Path], root: Path) -> list[Path]:
    """The tests that import or name a module, or have its name."""
    stem = Path(path).stem
    return [p for p in tests if p.stem == f"test_{stem}" or names(path, p.read_text("utf-8"))]


def tests_by_line(
    contexts: Path, root: Path, folders: Sequence[str]
) -> dict[tuple[str, int], list[str]]:
    """The pytest arguments of the tests that ran a line, by file and line, from coverage.py's data.

    Only the tests in `folders` count. A line that also ran outside of any test has the key, and the
    argument "" among its tests.
    """
    from coverage import CoverageData

    data = CoverageData(str(contexts))
    data.read()
    tests = {}  # by module and function, as in coverage.py's contexts
    for folder in folders:
        for p in (root / folder).rglob("test_*.py"):
            for function in re.findall(r"^def (test_\w+)", p.read_text("utf-8"), re.MULTILINE):
                tests[f"{p.stem}.{function}"] = f"{p.relative_to(root)}::{function}"
    found: dict[tuple[str, int], list[str]] = {}
    for measured in data.measured_files():
        top = next((top for top in _TOPS if f"/{top}" in measured), "")
        path = top + measured.rpartition(f"/{top}")[2]
        for line, names_of_tests in data.contexts_by_lineno(measured).items():
            found[path, line] = ["" for name in names_of_tests if not name] + sorted(
                tests[name] for name in names_of_tests if name in tests
            )
    return found


def spread(tests: Sequence[str], most: int) -> list[str]:
    """Take one test of each file in turn, until there are `most` or none is left."""
    by_file: dict[str, list[str]] = {}
    for test in tests:
        by_file.setdefault(test.partition("::")[0], []).append(test)
    turns = itertools.zip_longest(*by_file.values())
    return [test for turn in turns for test in turn if test is not None][:most]


def files_of(path: str, stage: str, root: Path, seconds: dict[str, float]) -> list[str]:
    """The test files of a stage, fastest first. Files without a measured time come last.

    If no test names the module, its own tests are those of the modules that import it.
    """
    pure = [
        p
        for p in (root / "tests/pure").rglob("test_*.py")
        if "house" not in p.relative_to(root).parts
    ]
    native = [
        p for folder in ("model", "server") for p in (root / "tests" / folder).glob("test_*.py")
    ]
    chosen = _own(path, native if stage == "native" else pure, root)
    if not chosen:
        modules = [
            p for top in ("offload", "specdec", "specoffload") for p in (root / top).rglob("*.py")
        ]
        importers = [str(p.relative_to(root)) for p in modules if names(path, p.read_text("utf-8"))]
        tests = native if stage == "native" else pure
        chosen = sorted({p for module in importers for p in _own(module, tests, root)})
    if stage == "pure":
        chosen = [p for p in pure if p not in chosen]
    files = [str(p.relative_to(root)) for p in chosen]
    return sorted(files, key=lambda file: (seconds.get(file, 1e9), file))


class Copy:
    """A copy of the commit in which mutants are tested."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        archive = subprocess.run(
            ["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, check=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        compiled = [
            sys.executable,
            "-m",
            "compileall",
            "-q",
            "numa",
            "offload",
            "specdec",
            "specoffload",
            "tests",
        ]
        subprocess.run(compiled, cwd=folder, check=True)

    def test(self, files: Sequence[str], limit_s: float) -> tuple[str, str]:
        """Run test files until one fails. Returns what came of it, and the first test to fail.

        The test is "" if the mutant ended the whole process, for instance by a failed assertion of
        ggml.
        """
        path = os.pathsep.join([str(self.folder / "scripts"), str(self.folder)])
        # Compiled files are told apart by whole seconds, so a mutant must not leave any.
        variables = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "CI": "1"}
        options = ["-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *options, *files]
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return STOPPED, f"no end in {limit_s:.0f} s"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            output.seek(0)
            text = output.read()
        if code == 0:
            return PASSED, ""
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
        if code in (1, 2) and failed:
            return KILLED, failed[1]
        if code not in (2, 3, 4, 5):  # not one of pytest's own errors: the process was ended
            return KILLED, ""
        raise RuntimeError(f"pytest ended with {code}:\n{text[-2000:]}")

    def test_mutant(self, mutant: Mutant, files: Sequence[str], limit_s: float) -> tuple[str, str]:
        """As `test`, while `mutant` is in place."""
        path = self.folder / mutant.path
        source = path.read_bytes()
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()
        path.write_bytes(mutant.apply(source))
        try:
            return self.test(files, limit_s)
        finally:
            path.write_bytes(source)


def read_results(path: Path) -> dict[Mutant, Result]:
    """The last result of each mutant in a file that `main` appended to."""
    results: dict[Mutant, Result] = {}
    if path.exists():
        for line in path.read_text("utf-8").splitlines():
            values = json.loads(line)
            mutant = Mutant(**values.pop("mutant"))
            results[mutant] = Result(mutant, **values)
    return results


def table(results: Sequence[Result], folders: Sequence[str]) -> str:
    """A row per folder: mutants, those that each stage killed, and what is known of the others."""
    titles = ["folder", "mutants", *(f"killed by `{stage}`" for stage in STAGES)]
    rows = ["| " + " | ".join([*titles, "stopped", "survived"]) + " |", "|---|" + "---|" * 6]
    for folder in (*folders, ""):
        found = [r for r in results if r.mutant.path.startswith(folder)]
        by = Counter(stage for r in found for stage, said in r.stages.items() if said == KILLED)
        n_stopped = sum(STOPPED in r.stages.values() for r in found if not r.killed)
        n_alive = sum(not r.killed for r in found) - n_stopped
        counts = [len(found), *(by[stage] for stage in STAGES), n_stopped, n_alive]
        rows.append(f"| {folder or 'all'} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(rows)


def run_stage(
    stage: str, results: Sequence[Result], file: Path, place: Copy, args: argparse.Namespace
) -> None:
    """Run a stage for all mutants that live and that it has not seen."""
    seconds = json.loads(args.times.read_text()) if args.times else {}
    contexts = args.native_contexts if stage == "native" else args.contexts
    folders = ["tests/model", "tests/abi", "tests/server"] if stage == "native" else ["tests/pure"]
    by_line = tests_by_line(contexts, ROOT, folders) if contexts else {}
    waiting = [r for r in results if not r.killed and r.stages.get(stage, NO_TESTS) == NO_TESTS]
    for i, result in enumerate(waiting, 1):
        files = files_of(result.mutant.path, stage, ROOT, seconds)
        known = by_line.get((result.mutant.path, result.mutant.line), [""])
        if stage == "native":
            files = spread([test for test in known if test], _MOST_NATIVE) or files
        elif "" not in known:
            files = known
        began = time.monotonic()
        said, killer = (
            place.test_mutant(result.mutant, files, args.limit_s) if files else (NO_TESTS, "")
        )
        result.stages[stage], result.killer = said, killer
        result.seconds += time.monotonic() - began
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(asdict(result)) + "\n")
        print(
            f"{stage} {i}/{len(waiting)} {said:8} {result.mutant.name[:100]} {killer}", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="mutants", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-n", type=int, default=60, help="number of mutants")
    parser.add_argument(
        "--modules", nargs="+", default=FOLDERS, metavar="PATH", help="folders or files"
    )
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--limit-s", type=float, default=300, help="seconds for a mutant's stage")
    parser.add_argument(
        "--part", default="1/1", metavar="I/N", help="every Nth mutant from the Ith"
    )
    parser.add_argument("--no-control", action="store_true", help="do not run the control")
    parser.add_argument("--contexts", type=Path, help="data of coverage.py for tests/pure")
    parser.add_argument("--native-contexts", type=Path, help="the same for the other tests")
    parser.add_argument("--times", type=Path, help="JSON object of seconds by test file")
    parser.add_argument(
        "--results", type=Path, help="default: mutants-SEED.jsonl in the working folder"
    )
    args = parser.parse_args()
    file = args.results or Path(f"mutants-{args.seed}.jsonl")
    known = read_results(file)
    chosen = [known.get(m, Result(m)) for m in sample(args.modules, ROOT, args.n, args.seed)]
    part, n_parts = map(int, args.part.split("/"))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        try:
            place = Copy(Path(folder))
            for stage in args.stages:
                run_stage(stage, chosen[part - 1 :: n_parts], file, place, args)
        except KeyboardInterrupt:
            print(f"stopped; the same command continues from {file}", file=sys.stderr)
        killers = sorted({r.killer for r in chosen if r.killed and r.killer})
        if killers and not args.no_control:
            said, failed = place.test(killers, 4 * args.limit_s)
            print(f"control, the tests that killed, without a mutant: {said} {failed}")
    print(table([r for r in chosen if r.stages], args.modules))
    for result in chosen:
        if result.stages and not result.killed:
            print(f"survived {result.mutant.name} {result.stages}")


if __name__ == "__main__":
    main()
