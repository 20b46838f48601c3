"""Several splits of the same data as one problem, whose replicas are trained on each of them."""

import dataclasses
from collections.abc import Sequence

from fairmesh.errors import BadInput
from fairmesh.losses import NamedLoss
from fairmesh.problems.problem import Problem


def with_splits(problems: Sequence[Problem], same_sites: bool = True) -> Problem:
    """Returns several problems as one whose replicas are trained on each of them.

    Args:
        problems: The problems.
        same_sites: Whether their sites must have the same names. Default: True.
    """
    if not problems or not all(isinstance(one, Problem) for one in problems):
        raise BadInput("give a Problem, or a list of problems that differ only in which rows are for training")
    first, *others = problems
    names = [site.name for site in first.sites]
    for k, other in enumerate(others, start=1):
        theirs = [site.name for site in other.sites]
        if same_sites and theirs != names:
            raise BadInput(f"split {k} has the sites {theirs}, but split 0 has {names}; only their rows may differ")
    if isinstance(first.loss, NamedLoss):  # balanced class weights are those of the first split
        others = [one if one.loss is first.loss else dataclasses.replace(one, loss=first.loss) for one in others]
    return first.with_splits(others)
