"""What the answers that a run keeps say beyond its summary: comparisons with references, and calibration."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fairmesh.errors import BadInput
from fairmesh.evidence.outcomes import Outcomes, read_outcomes
from fairmesh.evidence.verdicts import versus
from fairmesh.metrics.builtin import CalibrationError, bin_of, confidences
from fairmesh.report.runs import Run
from fairmesh.storage.run_folder import OUTCOMES

_BINS = 10


def answers_of(run: Run) -> Outcomes | None:
    """Returns what the models of a run, or of a variant of a sweep, answered after the last round, if it was kept."""
    return _read(run.folder / OUTCOMES, run.variant) if run.folder else None


def _read(path: Path, variant: int = 0) -> Outcomes | None:
    try:
        found = read_outcomes(path) if path.exists() else {}
    except BadInput:  # of another version; the report does without it
        found = {}
    return next((found[name] for name in (f"{variant} last", f"{variant} own") if name in found), None)


def compared(run: Run, known: set[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns how each site differs from the reference models whose answers were kept: by reference, then by site.

    Args:
        run: The run.
        known: The references that the summary compares with already.
    """
    ours, found = answers_of(run), {}
    for name, table in run.summary.get("references", {}).items() if ours and run.folder else ():
        theirs = _read(run.folder / table["folder"] / OUTCOMES) if name not in known and "folder" in table else None
        with suppress(BadInput):  # a metric of the user's own, which the folder does not know
            found |= {name: versus(ours, theirs, run.metric).table()["sites"]} if theirs else {}
    return found


def calibration(run: Run) -> dict[str, Any] | None:
    """Returns how probable the model says its predictions are, and how often they are right, in bins over all sites,
    and the calibration error of each site; None if the model's probabilities are not known."""
    ours = answers_of(run)
    if ours is None:
        return None
    sure, right, errors = [], [], []
    for i in range(len(ours.sites)):
        here = []
        for one in ours.at(i):
            outputs, targets = one.outputs, one.targets
            if outputs is None or targets is None or one.right is None or targets.ndim != 1:
                return None
            for of_seed in outputs:
                read = confidences(of_seed, targets)
                sure.append(read[0])
                right.append(read[1])
                here.append(CalibrationError()(of_seed, targets))
        errors.append({"name": ours.sites[i], "error": sum(here) / len(here) if here else None})
    if not sure:
        return None
    every, hit = torch.cat(sure), torch.cat(right)
    where = bin_of(every, _BINS)
    bins = [
        {"confidence": float(every[at].mean()), "accuracy": float(hit[at].mean()), "n": int(at.sum())}
        for at in (where == k for k in range(_BINS))
        if bool(at.any())
    ]
    return {"bins": bins, "sites": errors}
