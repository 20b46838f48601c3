"""What `fairmesh run` trains next to a run: its reference models, and models without each site."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fairmesh.comparisons.leave_one_out import LEFT_OUT, add_left_out, check_enough_sites
from fairmesh.comparisons.reference_models import FOLDER as REFERENCES_FOLDER
from fairmesh.comparisons.reference_models import ReferenceComparison, add_references, check_one_algorithm
from fairmesh.data.units import DivisionWarning
from fairmesh.experiment import Experiment
from fairmesh.problems.prepared import Prepared
from fairmesh.training.result import Result


class Compared(NamedTuple):
    """A run next to others."""

    references: ReferenceComparison | None
    left_out: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        tables = {"references": self.references and self.references.as_json(), "leave_one_out": self.left_out}
        return {name: table for name, table in tables.items() if table}


class Comparing(NamedTuple):
    """What was asked for."""

    references: bool
    left_out: bool

    @staticmethod
    def of(references: bool, left_out: bool, folder: Path, resume: bool) -> "Comparing":
        """Returns what was asked for. What belonged to a run that is resumed still does."""
        if not resume:
            return Comparing(references, left_out)
        return Comparing(references or (folder / REFERENCES_FOLDER).is_dir(), left_out or (folder / LEFT_OUT).exists())

    def check_experiment(self, experiment: Experiment) -> None:
        """Refuses an experiment that would fail after the last round."""
        if any(self):
            check_one_algorithm(experiment.algorithms())

    def check_problem(self, problem: Prepared) -> None:
        """Refuses a problem that would fail after the last round."""
        if self.references:
            problem.refuse_trainer("--with-references")
            problem.refuse_privacy("--with-references")
        if self.left_out:
            problem.refuse_privacy("--leave-one-out")
            check_enough_sites(problem)

    def add_to(
        self,
        result: Result,
        experiment: Experiment,
        out: Path,
        resume: bool,
        announce: Callable[[str], None] | None,
    ) -> Compared:
        """Trains it, and writes it into the run's folder. It takes the data of all sites, which a process of several
        reads again."""
        options, references, left_out = experiment.options, None, {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DivisionWarning)  # the run has said it
            if self.references:
                if not all(site.train.here for site in result.problem.sites):
                    result = result.with_data_of(experiment.problem())
                told = {"resume": resume, "announce": announce, "handle_signals": True}
                references = add_references(result, options, out=out, **told)
            if self.left_out:
                problem = experiment.problem()
                left_out = add_left_out(result, problem, experiment.topology, options, out, resume, announce)
        return Compared(references, left_out)
