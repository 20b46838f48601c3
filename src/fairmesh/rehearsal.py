"""A rehearsal: short runs of growing length on a part of every site's rows, until more rounds stop helping."""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from fairmesh.config.tables import to_table
from fairmesh.data.reserve import reserve
from fairmesh.errors import Diverged
from fairmesh.experiment import Experiment
from fairmesh.problems.prepared import Prepared
from fairmesh.topology.graphs import Topology
from fairmesh.training.train import train

LENGTHS = (75, 150, 300, 600, 1200, 2400, 4800)  # rounds; each run has a schedule of steps of its own
_HELD_OUT = 0.25  # share of a site's training rows by which the runs are judged
_SECONDS = 20.0  # for all runs; the next one takes about twice as long as the last
_FADING = 0.5  # what the gain of a doubling is of the gain before, where it is not known
_SLOWEST, _FASTEST = 0.75, 0.25  # the same at most and at least, where it is measured


class Rehearsal(NamedTuple):
    """What the runs of a rehearsal show."""

    lengths: tuple[int, ...]  # that were trained, in rounds
    errors: tuple[float, ...]  # mean over sites on held-out rows; lower is better
    rounds: int  # after which more stop helping

    @property
    def measured(self) -> bool:
        """Whether a longer run was seen not to help; else the number of rounds goes on from what was seen."""
        return self.rounds < self.lengths[-1]

    def in_words(self) -> str:
        """Returns why these are the rounds."""
        seen = ", ".join(f"{error:.3g} after {length:,}" for length, error in zip(self.lengths, self.errors))
        why = "more rounds stopped helping in a rehearsal" if self.measured else "by what a rehearsal gained until then"
        return f"{why} (error on held-out rows: {seen})"


def rehearsed(
    experiment: Experiment, problem: Prepared, topology: Topology, announce: Callable[[str], None] | None = None
) -> Rehearsal | None:
    """Trains short runs of the experiment over a graph and returns what they show; None if there are no rows to judge
    them by, or the time is enough for less than two of them.

    Args:
        experiment: The experiment, with the algorithm that is to be advised.
        problem: Its problem, with all rows.
        topology: Who talks to whom.
        announce: Called with sentences about the work. Default: None.
    """
    part, begun = _part_of(problem), time.perf_counter()
    if part is None:
        return None
    if announce:
        announce("rehearsing: short runs of growing length on three quarters of the rows")
    lengths: list[int] = []
    errors: list[float] = []
    for rounds in LENGTHS:
        started = time.perf_counter()
        try:
            errors.append(_error_of(experiment, part, topology, rounds))
        except Diverged:
            break
        lengths.append(rounds)
        now = time.perf_counter()
        if stopped_helping(errors) or now - begun + 2 * (now - started) > _SECONDS:
            break
    return Rehearsal(tuple(lengths), tuple(errors), enough(lengths, errors)) if len(lengths) > 1 else None


def _part_of(problem: Prepared) -> Prepared | None:
    """Returns the problem with a part of every site's training rows, to be judged by the others."""
    if any(samples.stream for samples in problem.train_sets):
        return None
    sites = reserve(problem.of_split(0).sites, _HELD_OUT)
    judged = [replace(site, test=site.reserved or site.validation, reserved=None, validation=None) for site in sites]
    return problem.of_split(0).changed(sites=judged) if any(site.test for site in judged) else None


def _error_of(experiment: Experiment, part: Prepared, topology: Topology, rounds: int) -> float:
    """Returns the error of a run of a length: of the primary metric, as a share of 1 where it is one."""
    options = replace(
        experiment.options, measure_every=rounds, compare_weights=False, keep_best=False, own_models=False
    )
    result = train(
        part, topology, experiment.algorithm, rounds, seeds=experiment.seeds[:1], announce=lambda text: None,
        **to_table(options),
    )  # fmt: skip
    return error_of_sites(result.final[0], part)


def error_of_sites(record: dict, problem: Prepared) -> float:
    """Returns the mean error over sites: 1 minus a metric of which higher is better; of numbers the root of the squared
    error."""
    name = problem.primary
    values = torch.tensor(record[name]["sites"], dtype=torch.float64)
    values = values[values.isfinite()]
    if problem.higher_is_better(name):
        values = 1.0 - values
    return float((values.sqrt() if name == "loss" and problem.task == "numbers" else values).mean())


def tolerance(errors: Sequence[float]) -> float:
    """Returns the difference between errors that does not count."""
    return 0.03 * min(errors)


def stopped_helping(errors: Sequence[float]) -> bool:
    """Returns whether the last doubling gained too little for a further one to count."""
    return len(errors) > 2 and _left(errors) <= tolerance(errors) / 2


def _left(errors: Sequence[float]) -> float:
    """Returns what all further doublings would gain, if gains go on to fade as they did last."""
    gains = [max(0.0, before - after) for before, after in itertools.pairwise(errors)]
    faded = gains[-1] / gains[-2] if len(gains) > 1 and gains[-2] > 0 else _FADING
    faded = min(_SLOWEST, max(_FASTEST, faded))
    return gains[-1] * faded / (1 - faded)


def enough(lengths: Sequence[int], errors: Sequence[float]) -> int:
    """Returns the rounds after which more stop helping: the first length whose error is within the tolerance of the
    best, also of what longer runs would reach."""
    left = _left(errors)
    limit = min(errors) - left + tolerance(errors)
    reached = [length for length, error in zip(lengths, errors) if error <= limit]
    if reached:
        return reached[0]
    gains = max(errors[-2] - errors[-1], 1e-12)
    fade = left / (left + gains)  # by which a gain becomes the next
    doublings = math.ceil(math.log(max(1e-12, tolerance(errors) / left)) / math.log(fade))
    return min(LENGTHS[-1], lengths[-1] * 2 ** max(1, doublings))
