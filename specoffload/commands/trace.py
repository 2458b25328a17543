"""`specoffload trace`: summarises a trace file, for people or as data for scripts."""

from __future__ import annotations

from pathlib import Path

from offload.trace.report import TraceReport, read_report
from specoffload import report


def _nothing_copied(found: TraceReport) -> str:
    """A sentence on why nothing was copied and what to try."""
    if found.compute_s:
        why = (
            "all that the device computed lay in its memory, or the CPU computed the other batches "
            "in place; a smaller --vram and --min-batch 1 make weights stream"
        )
    else:
        why = (
            "the model ran on the plain CPU, whose computation is not traced; --device "
            "sim:vram=8MiB,bw=1GB/s --min-batch 1 streams without a GPU, with the embedded model"
        )
    return f"nothing was copied: {why}"


def show_trace(path: Path) -> None:
    """Print a summary of a trace file. Raises OffloadError if specoffload did not write it."""
    found = read_report(path)
    report.table(
        str(path),
        ("", "value"),
        [
            ("trace", f"{found.span_s:.3f} s"),
            ("rounds", f"{found.n_rounds}, {report.plural(found.n_tokens, 'token')}"),
            ("overlap", f"{found.overlap:.1%}"),
            ("link utilisation", f"{found.link_utilisation:.1%}"),
            ("link bandwidth", f"{found.link_bytes_per_s / 1e9:.2f} GB/s"),
            ("copied", report.bytes_text(found.copied_bytes)),
            ("copying", f"{found.copy_s:.3f} s"),
            ("computing", f"{found.compute_s:.3f} s"),
            ("standing still", f"{found.stalled_s:.3f} s in {found.n_stalls} waits"),
        ],
    )
    report.table(
        "why the computation stood still",
        ("cause", "seconds"),
        [(cause, f"{seconds:.4f}") for cause, seconds in found.stalled_by_cause_s.items()],
    )
    if not found.copied_bytes:
        report.paragraph(_nothing_copied(found))
    if found.n_dropped:
        report.note(f"{found.n_dropped} older events were dropped; the trace keeps the last ones")
    report.data(found.as_json())
