"""Sends malformed requests over HTTP, while a witness checks that it is served as before."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from lab.attack import ATTACK
from lab.attack.client import PATIENCE_S, Answer, NoAnswer, Witness, decided_texts, read, send_raw
from lab.attack.malformed import Attack, attack
from lab.attack.outcome import Breach, Outcome
from lab.attack.program import Program, bad_lines, serving

SERVE = (
    *("--device", "cpu", "-t", "1", "-np", "4", "-c", "2048", "--temp", "0"),
    *("-n", "8", "--time-limit", "10", "--metrics", "--max-queue", "16"),
)
_N_AT_ONCE = 6
_WARM = 200  # requests before the first measurement of memory
_MOST_GROWTH = 1.2
_SETTLE_S = 1.5


def command(seed: int, number: int) -> str:
    return f"{ATTACK} --part http --seed {seed} --only {number}"


def http_part(seed: int, numbers: range, folder: Path) -> Outcome:
    outcome = Outcome("http", len(numbers))
    log = folder / "http.log"
    with serving(log, (*SERVE, "--slot-save-path", str(folder)), None) as program:
        asyncio.run(_attack(program, seed, numbers, outcome))
        code = program.end()
    again = f"{ATTACK} --part http --seed {seed} --only {numbers.start}-{numbers.stop}"
    if code != 0:
        outcome.breaches.append(Breach(f"the server ended with {code}", again))
    outcome.breaches += [Breach(f"{log.name}: {line}", again) for line in bad_lines(program.said())]
    return outcome


async def _attack(program: Program, seed: int, numbers: range, outcome: Outcome) -> None:
    witness = Witness(program.port, await decided_texts(program.port))
    warm = range(numbers.start, min(numbers.start + _WARM, numbers.stop))
    rest = range(warm.stop, numbers.stop)
    over = asyncio.Event()
    watching = asyncio.ensure_future(witness.watch(over))
    await _send_all(program.port, seed, warm, outcome)
    before_bytes = await _settled(program)
    await _send_all(program.port, seed, rest, outcome)
    after_bytes = await _settled(program)
    over.set()
    await watching
    again = f"{ATTACK} --part http --seed {seed} --only {numbers.start}-{numbers.stop}"
    outcome.breaches += [Breach(what, again) for what in witness.lost]
    outcome.figures |= figures_of(witness) | {
        "MB before": before_bytes >> 20,
        "MB after": after_bytes >> 20,
    }
    if rest and after_bytes > _MOST_GROWTH * before_bytes:
        what = f"memory grew from {before_bytes >> 20} to {after_bytes >> 20} MB"
        outcome.breaches.append(Breach(what, again))
    if "restarting it" in program.said():
        outcome.breaches.append(Breach("the engine process died", again))


def figures_of(witness: Witness) -> dict[str, object]:
    return {
        "witness's answers": witness.n_answers,
        "its longest s": round(witness.longest_s, 2),
        "told to wait": witness.n_told_to_wait,
    }


async def _settled(program: Program) -> int:
    """Resident bytes of the program, after a pause without requests."""
    await asyncio.sleep(_SETTLE_S)
    return program.rss_bytes()


async def _send_all(port: int, seed: int, numbers: range, outcome: Outcome) -> None:
    left = iter(numbers)

    async def worker(left: Iterator[int]) -> None:
        for number in left:
            try:
                ended = await send_one(port, attack(seed, number, port))
            except NoAnswer as e:
                outcome.tally["no answer"] += 1
                outcome.breaches.append(Breach(str(e), command(seed, number)))
            else:
                outcome.tally[ended] += 1

    await asyncio.gather(*(worker(left) for _ in range(_N_AT_ONCE)))


async def send_one(port: int, sent: Attack) -> str:
    """Send one request. Returns its status, or "closed" or "left". Raises NoAnswer for an end that
    is not allowed."""
    try:
        data = await send_raw(port, sent.data, ends=sent.ends, leaves=sent.leaves)
    except TimeoutError as e:
        raise NoAnswer(f"no answer in {PATIENCE_S:g} s") from e
    except OSError as e:
        if sent.may_hang_up:
            return "closed"
        raise NoAnswer(f"{type(e).__name__}: {e}") from e
    if sent.leaves:
        return "left"
    if not data and sent.may_hang_up:
        return "closed"
    try:
        return _judged(read(data))
    except (NoAnswer, ValueError) as e:
        if sent.may_hang_up:
            return "closed"
        raise NoAnswer(f"no HTTP answer: {data[:200]!r}") from e


def _judged(answer: Answer) -> str:
    can_be = answer.status < 500 or answer.status == 501
    if answer.status == 503 and "retry-after" in answer.headers:
        can_be = True
    # A stream that broke off has status 200, and the error's code in its last event.
    failed = b"Traceback" in answer.body or b'"code": 500' in answer.body[-2000:]
    if not can_be or failed:
        raise NoAnswer(f"{answer.status}: {answer.body[-300:]!r}")
    return str(answer.status)
