"""What the models of a run answered, if it was kept."""

from fairmesh.errors import BadInput
from fairmesh.evidence.outcome_files import read_outcomes
from fairmesh.evidence.outcomes import Outcomes
from fairmesh.report.runs import Run
from fairmesh.storage.run_folder import OUTCOMES


def answers_of(run: Run) -> Outcomes | None:
    """Returns what the models of a run, or of a variant of a sweep, answered after the last round, if it was kept."""
    found, _ = _read(run)
    return found.get(f"{run.variant} last") or found.get(f"{run.variant} own")


def why_unreadable(run: Run) -> str:
    """Returns why the answers that a run has kept cannot be read; nothing if they can, or if it has none."""
    return _read(run)[1]


def _read(run: Run) -> tuple[dict[str, Outcomes], str]:
    if run.folder is None or not (run.folder / OUTCOMES).exists():
        return {}, ""
    try:
        return read_outcomes(run.folder / OUTCOMES), ""
    except BadInput as error:  # damaged, or of another version
        return {}, str(error)
