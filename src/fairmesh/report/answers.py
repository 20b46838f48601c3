"""What the models of a run answered, if it was kept."""

from fairmesh.errors import BadInput
from fairmesh.evidence.outcome_files import read_outcomes
from fairmesh.evidence.outcomes import Outcomes
from fairmesh.report.runs import Run
from fairmesh.storage.run_folder import OUTCOMES


def answers_of(run: Run) -> Outcomes | None:
    """Returns what the models of a run, or of a variant of a sweep, answered after the last round, if it was kept."""
    try:
        found = read_outcomes(run.folder / OUTCOMES) if run.folder else {}
    except BadInput:  # there are none, or of another version; the report does without them
        found = {}
    return found.get(f"{run.variant} last") or found.get(f"{run.variant} own")
