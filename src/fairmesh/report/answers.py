"""What the answers that a run keeps say beyond its summary: calibration."""

from typing import Any

import torch

from fairmesh.errors import BadInput
from fairmesh.evidence.outcomes import Outcomes, read_outcomes
from fairmesh.metrics.builtin import CalibrationError, bin_of, confidences
from fairmesh.report.runs import Run
from fairmesh.storage.run_folder import OUTCOMES

_BINS = 10


def answers_of(run: Run) -> Outcomes | None:
    """Returns what the models of a run, or of a variant of a sweep, answered after the last round, if it was kept."""
    try:
        found = read_outcomes(run.folder / OUTCOMES) if run.folder else {}
    except BadInput:  # there are none, or of another version; the report does without them
        found = {}
    return found.get(f"{run.variant} last") or found.get(f"{run.variant} own")


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
