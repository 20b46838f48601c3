"""Common models that were trained without a fold of every site's rows, to judge by these rows what a run would bring.

Every row is judged once, by models that have not seen it, and the model of the run itself is trained on all rows."""

from dataclasses import replace

from fairmesh.numerics import trees
from fairmesh.personalization.cross_fit import LARGE, in_folds
from fairmesh.problems.prepared import Prepared, with_splits
from fairmesh.training.plan import Plan

_FLOATS_AT_ONCE = 1 << 28  # of all training rows, in all folds


def folds_apart(problem: Prepared, folds: int) -> int:
    """Returns how many of the folds get models of their own: all, or one where models or data are large."""
    rows = sum(len(samples) * trees.numbers_per_sample(samples.inputs) for samples in problem.train_sets)
    small = problem.flat_model.dim <= LARGE and folds * rows <= _FLOATS_AT_ONCE
    return folds if small else 1


def without_fold(problem: Prepared, fold: int, folds: int) -> Prepared:
    """Returns the problem of one split without the rows of a fold, which test it instead. A site that would have no
    other rows keeps them all."""
    sites = [replace(site, test=None, rows=None) for site in problem.sites]
    for i in problem.here:
        train, fold_of_row = in_folds(problem, i, folds)
        rest = fold_of_row != fold
        if bool(rest.any()) and not bool(rest.all()):
            sites[i] = replace(sites[i], train=train.take(rest), test=train.take(~rest))
    # The prior stays: a process does not know how many rows sites elsewhere have without the fold.
    return problem.changed(sites=sites, prior=problem.prior_of_sites.tolist())


def plan_without_folds(plan: Plan, folds: int, apart: int) -> Plan:
    """Returns the plan of a run whose replicas each train once without each of the first folds: replica r without fold
    k is the replica r * apart + k."""
    splits = [without_fold(split, fold, folds) for split in plan.problem.every_split for fold in range(apart)]
    replicas = [
        replace(replica, split=replica.split * apart + fold) for replica in plan.replicas for fold in range(apart)
    ]
    return replace(plan, problem=with_splits(splits), replicas=replicas, personalization=None)
