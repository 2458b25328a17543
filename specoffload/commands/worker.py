"""`specoffload worker`: computes layers of a model for a client on another machine."""

from __future__ import annotations

import contextlib
import errno
import signal
import threading
from dataclasses import replace
from types import FrameType

from offload.device import device_names
from offload.model import ModelFacts
from offload.remote.hello import WorkerFacts
from offload.remote.secret import FLAG, VARIABLE, Secret
from offload.schedule.division import DeviceCosts
from offload.schedule.splitter import stay
from offload.worker.serving import WorkerOptions
from specoffload import report
from specoffload.config.options import Toggle, WorkerFlags
from specoffload.config.resolution import Config
from specoffload.config.rpc_secret import read_secret
from specoffload.ctrl_c import EXIT_CODE
from specoffload.errors import UsageError
from specoffload.kept import KeptFile, today
from specoffload.kept_bounds import is_old
from specoffload.opening.choices import StartChoices
from specoffload.opening.header import target_facts
from specoffload.opening.target import projector_of, wanted_of
from specoffload.server.worker import Worker
from specoffload.server.worker_gate import WorkerGate

_WAKE_S = 1.0  # least seconds between looks at signals


def run_worker(config: Config, flags: WorkerFlags) -> None:
    """Serve clients until Ctrl-C. Raises UsageError if the address or the device cannot be used."""
    if len(names := device_names(config.device)) > 1:
        raise UsageError(
            f"--device {config.device}: a worker offers one device, and these are {len(names)}; "
            "start a worker for each, with a --listen port of its own"
        )
    secret = _secret(config, flags)
    facts = target_facts(config)
    toggle = config.hybrid.toggle
    file = _kept_file(config, facts)
    splits = toggle is not Toggle.OFF
    wanted = wanted_of(config, StartChoices.as_asked(config), projector_of(config))
    options = WorkerOptions(
        facts.path,
        config.device,
        replace(wanted, hybrid=splits, plan_for_splits=splits),
        replace(config.streaming, splitter=stay if splits else None, warmup=False),
        n_threads=config.threads,
        on=config.decode_on,
        kept_splits=kept_splits(file, toggle),
        measures_splits=toggle is Toggle.AUTO,
    )
    known = WorkerFacts.of(facts)

    def keep(costs: DeviceCosts) -> None:
        if file is not None and (failed := file.update(lambda kept: kept.put_worker(costs))):
            report.line(failed)

    worker = Worker(
        options, known, report.line, _ProgressLines(), n_layers=facts.n_layers, keep=keep
    )
    with contextlib.closing(worker):
        device = worker.open_device()
        if device.error:
            raise UsageError(device.error)
        try:
            gate = WorkerGate(flags.listen.host, flags.listen.port, worker, flags.allow, secret)
        except OSError as e:
            raise UsageError(f"--listen {flags.listen}: {_reason(e)}") from e
        with gate:
            _serve(gate, flags, device.device, known)


def _secret(config: Config, flags: WorkerFlags) -> Secret | None:
    """Return the secret of clients. Raises UsageError if the address needs one and has none."""
    secret, warning = read_secret(flags.rpc_secret_file, "")
    secret = secret or config.rpc_secret
    if warning:
        report.line(warning)
    if secret is not None and flags.insecure:
        report.line(f"--insecure is ignored: there is a secret ({FLAG} or {VARIABLE})")
    if secret is None and not flags.insecure and not flags.listen.is_loopback:
        raise UsageError(
            f"--listen {flags.listen}: other machines may reach this address, and a worker "
            f"computes what its clients ask for; {FLAG} FILE lets only those connect that know a "
            "secret, and --insecure lets everybody"
        )
    return secret


def _kept_file(config: Config, facts: ModelFacts) -> KeptFile | None:
    """Return the file with this machine's measurements of the model, or None to use none."""
    folder = config.spec.kept_folder
    return None if folder is None else KeptFile(folder, facts)


def kept_splits(file: KeptFile | None, toggle: Toggle) -> tuple[DeviceCosts, ...]:
    """Return the kept costs of split layers that a worker uses.

    With --hybrid auto, the worker measures them again if they are old or contradict each other.
    """
    if file is None or toggle is Toggle.OFF:
        return ()
    kept = file.load()[0].split_costs()
    if toggle is Toggle.ON:
        return kept
    return tuple(one for one in kept if not (is_old(one.date, today()) or one.costs.is_doubtful))


class _ProgressLines:
    """Prints a line for each tenth of a step."""

    def __init__(self) -> None:
        self._last = "", 0

    def __call__(self, step: str, done: float) -> None:
        now = step, int(10 * done)
        if now != self._last:
            self._last = now
            report.line(f"{step}: {now[1] * 10} %")


def _reason(e: OSError) -> str:
    if e.errno == errno.EADDRINUSE:
        return "the port is already in use; choose another"
    return e.strerror or str(e)


def _serve(gate: WorkerGate, flags: WorkerFlags, device: str, known: WorkerFacts) -> None:
    if not gate.is_loopback:
        who = ", ".join(map(str, flags.allow)) or "every machine that reaches it"
        lacks = "a password nor encryption"
        if gate.secret is not None:
            who, lacks = f"{who} that knows the secret", "encryption nor signatures after the proof"
        report.line(
            f"warning: {who} can use this worker: ggml's RPC has neither {lacks} (docs/defence.md "
            "shows WireGuard and SSH)"
        )
    host, port = gate.server_address[:2]
    report.line(f"{known.file} (hash {known.hash}) on {device}")
    report.line(f"worker listening on {host!s}:{port}")
    ended = threading.Event()
    codes: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        codes.append(EXIT_CODE if number == signal.SIGINT else 0)
        ended.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    threading.Thread(target=gate.serve_forever, name="gate", daemon=True).start()
    try:
        # The kernel may give a signal to another thread, which does not end this one's wait.
        while not ended.wait(_WAKE_S):
            pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        gate.shutdown()
    raise SystemExit(codes[0])
