"""Checks by headers alone whether a start would open a model, for those who open none."""

from __future__ import annotations

from offload.load_check import check_loads
from offload.model import ModelFacts
from offload.model_file import check_writes
from offload.plan.row_draft import no_mtp_reason
from offload.plan.row_file import ROW_FILES


def check_opens(facts: ModelFacts, *, is_draft: bool = False) -> None:
    """Raise BadModel if a start would refuse the model, as a target or as a draft.

    The library is asked in another process, which takes about a tenth of a second.
    """
    if not is_draft:
        check_writes(facts)
        check_loads(facts, load_mtp=not no_mtp_reason(facts))
        return
    if facts.architecture not in ROW_FILES:  # which draft by the target's rows
        check_writes(facts)
    check_loads(facts, load_mtp=False)
