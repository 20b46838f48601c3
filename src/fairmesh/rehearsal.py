"""A rehearsal: short runs of growing length on a part of every site's rows, until more rounds stop helping."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fairmesh.algorithms.base import Algorithm
from fairmesh.config.tables import to_table
from fairmesh.data.reserve import reserve
from fairmesh.data.site import Site
from fairmesh.errors import Diverged
from fairmesh.problems.prepared import Prepared
from fairmesh.topology.graphs import Topology
from fairmesh.training.defaults import ROUNDS
from fairmesh.training.options import Options
from fairmesh.training.train import train

LENGTHS = (75, 150, 300, 600, 1200, 2400, 4800)  # rounds; each run has a schedule of steps of its own
_HELD_OUT = 0.25  # share of a site's training rows by which the runs are judged
_SECONDS = 20.0  # for all runs; the next one takes about twice as long as the last
_POINTS, _RELATIVE = 0.013, 0.03  # a gain of a share, and of another error, that is too small to count
_PATIENCE = 2  # lengths without a gain; held-out rows are few, so one may not show it


class Rehearsal(NamedTuple):
    """What the runs of a rehearsal show."""

    lengths: tuple[int, ...]  # that were trained, in rounds
    errors: tuple[float, ...]  # mean over sites on held-out rows; lower is better
    is_share: bool  # whether errors are shares of 1

    @property
    def tolerance(self) -> float:
        """The difference between errors that does not count."""
        return _POINTS if self.is_share else _RELATIVE * min(self.errors)

    @property
    def stopped_helping(self) -> bool:
        """Whether the last lengths gained too little for a longer one to be tried."""
        before, last = self.errors[:-_PATIENCE], self.errors[-_PATIENCE:]
        return bool(before) and min(last) >= min(before) - self.tolerance

    @property
    def rounds(self) -> int:
        """The rounds after which more stop helping: the first length that is about as good as the best. If that is the
        last one, and short, because there was no time for more, it is twice that."""
        best = min(self.errors) + self.tolerance
        first = next(length for length, error in zip(self.lengths, self.errors) if error <= best)
        return min(2 * first, ROUNDS) if first == self.lengths[-1] < ROUNDS else first

    def in_words(self) -> str:
        """Returns why these are the rounds."""
        seen = ", ".join(f"{error:.3g} after {length:,}" for length, error in zip(self.lengths, self.errors))
        why = "more rounds did not help" if self.stopped_helping else "as far as there was time,"
        return f"{why} in a rehearsal (mean error on held-out rows: {seen})"


def rehearsed(
    problem: Prepared,
    topology: Topology,
    algorithm: Algorithm,
    options: Options = Options(),  # noqa: B008
    announce: Callable[[str], None] | None = None,
) -> Rehearsal | None:
    """Trains short runs over a graph and returns what they show; None if there are no rows to judge
    them by, if they diverge, or if there is time for only one of them.

    Args:
        problem: The problem, with all rows.
        topology: Who talks to whom.
        algorithm: The algorithm that is to be advised.
        options: How the runs are carried out. Default: Options().
        announce: Called with sentences about the work. Default: None.
    """
    part, begun = _part_of(problem), time.perf_counter()
    if part is None:
        return None
    if announce:
        announce("rehearsing: short runs of growing length on a part of the rows, judged by others")
    seen = Rehearsal((), (), problem.is_share(problem.primary))
    for rounds in LENGTHS:
        started = time.perf_counter()
        try:
            error = _error_of(part, topology, algorithm, options, rounds)
        except Diverged:
            break
        seen = seen._replace(lengths=(*seen.lengths, rounds), errors=(*seen.errors, error))
        now = time.perf_counter()
        if seen.stopped_helping or now - begun + 2 * (now - started) > _SECONDS:
            break
    return seen if len(seen.lengths) > 1 else None


def _part_of(problem: Prepared) -> Prepared | None:
    """Returns the problem with a part of every site's training rows, to be judged by the others; None if no site has
    enough rows, or if rows are read from streams."""
    first = problem.of_split(0)
    if any(samples.stream for samples in first.train_sets):
        return None
    reserved = reserve(first.sites, _HELD_OUT)
    sites = [_judged(site) for site in reserved]
    return first.changed(sites=sites) if any(site.test for site in sites) else None


def _judged(site: Site) -> Site:
    """Returns a site that is tested on its held-out rows; names of its former test rows are no longer true."""
    return replace(site, test=site.reserved or site.validation, reserved=None, validation=None, rows=None)


def _error_of(part: Prepared, topology: Topology, algorithm: Algorithm, options: Options, rounds: int) -> float:
    """Returns the mean error of runs of this length."""
    options = replace(
        options, measure_every=rounds, compare_weights=False, choose_weights=False, keep_best=False, own_models=False
    )
    result = train(part, topology, algorithm, rounds, announce=lambda text: None, **to_table(options))
    return mean_error(result.final[0], part)


def mean_error(record: Mapping[str, Any], problem: Prepared) -> float:
    """Returns the mean over sites of the primary metric as an error: 1 minus it where higher is better, and of squared
    errors the root."""
    name = problem.primary
    values = torch.tensor(record[name]["sites"], dtype=torch.float64)
    values = values[values.isfinite()]
    if problem.higher_is_better(name):
        values = 1.0 - values
    return float((values.sqrt() if name == "loss" and problem.task == "numbers" else values).mean())
