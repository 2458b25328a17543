"""`specoffload trace`: summarises a trace file, for people or as data for scripts."""

from __future__ import annotations

from pathlib import Path

from offload.trace.report import TraceReport, read_report
from specoffload import report


def _nothing_copied(summary: TraceReport) -> str:
    """A sentence on why nothing was copied and what to try."""
    if summary.compute_s:
        reason = (
            "all that the device computed lay in its memory, or the CPU computed the other batches "
            "in place; a smaller --vram and --min-batch 1 make weights stream"
        )
    else:
        reason = (
            "the model ran on the plain CPU, whose computation is not traced; --device "
            "sim:vram=8MiB,bw=1GB/s --min-batch 1 streams without a GPU, with the embedded model"
        )
    return f"nothing was copied: {reason}"


def show_trace(path: Path) -> None:
    """Print a summary of a trace file. Raises OffloadError if specoffload did not write it."""
    summary = read_report(path)
    report.table(
        str(path),
        ("", "value"),
        [
            ("trace", f"{summary.span_s:.3f} s"),
            ("rounds", f"{summary.n_rounds}, {report.plural(summary.n_tokens, 'token')}"),
            ("overlap", f"{summary.overlap:.1%}"),
            ("link utilisation", f"{summary.link_utilisation:.1%}"),
            ("link bandwidth", f"{summary.link_bytes_per_s / 1e9:.2f} GB/s"),
            ("copied", report.bytes_text(summary.copied_bytes)),
            ("copying", f"{summary.copy_s:.3f} s"),
            ("computing", f"{summary.compute_s:.3f} s"),
            ("standing still", f"{summary.stalled_s:.3f} s in {summary.n_stalls} waits"),
        ],
    )
    report.table(
        "why the computation stood still",
        ("cause", "seconds"),
        [(cause, f"{seconds:.4f}") for cause, seconds in summary.stalled_by_cause_s.items()],
    )
    if not summary.copied_bytes:
        report.paragraph(_nothing_copied(summary))
    if summary.n_dropped:
        report.note(f"{summary.n_dropped} older events were dropped; the trace keeps the last ones")
    report.data(summary.as_json())
