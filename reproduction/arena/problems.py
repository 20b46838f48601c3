"""The problems of the arena: the bench of site problems, its twins with numbers to predict, and natural sets."""

from dataclasses import replace

from reproduction.arena.natural import NATURAL
from reproduction.sites.problems import DEVELOPMENT
from reproduction.sites.problems import PROBLEMS as BENCH
from reproduction.sites.running import Scale
from reproduction.sites.site_problem import SiteProblem
from reproduction.sites.twins import TWINS

# Of the bench's other half, those that fit the time of a run: one of each kind of data, among them a concept shift.
_OF_THE_OTHER_HALF = ("covariate-mnist", "label-shift-fashion", "concept-mnist", "small-sites-breast-cancer")


def _entered(problem: SiteProblem) -> SiteProblem:
    """Returns a problem of the bench as the arena has it: numbers are judged by their RMSE."""
    metric = "accuracy" if problem.metric == "accuracy" else "rmse"
    return replace(problem, half="twins" if problem.half == "twins" else "bench", metric=metric)


_LIST = (*map(_entered, (*DEVELOPMENT, *(BENCH[name] for name in _OF_THE_OTHER_HALF), *TWINS)), *NATURAL)

FULL = Scale(splits=5, seeds=1, rounds=300, worst_needs_rows=10)
QUICK = Scale(splits=1, seeds=1, rounds=20, worst_needs_rows=10)
PROBLEMS = {problem.name: problem for problem in _LIST}
