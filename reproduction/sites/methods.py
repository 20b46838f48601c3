"""The methods of the bench, each with its defaults and with the six candidates among which it is tuned."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fairmesh.algorithms import ADGDA, DRDSGD, DRFA, Algorithm, TrackedADGDA
from fairmesh.algorithms.schedules import Geometric, Polynomial
from fairmesh.algorithms.weighting import PriorWeights
from fairmesh.compression.compressors import Identity, Quantize
from fairmesh.config.tables import to_table
from fairmesh.regularizers.members import ChiSquare
from fairmesh.topology.graphs import Complete, Ring, Topology

CANDIDATES = 6  # per method that is tuned


@dataclass(frozen=True)
class Method:
    """One row of every problem's table.

    Args:
        name: Its name in tables and on the command line.
        algorithm: The algorithm as it is without tuning; None for the most frequent class of each site.
        candidates: What tuning chooses from; none if there is nothing to tune.
        topology: Who talks to whom.
        steps_per_round: Gradients per round. The method gets so many times fewer rounds than the others.
        own_models: Whether each site is judged by its own model, and chooses its own candidate.
        sees_test: Whether the weights see the losses on test rows: a reference, not a method. Then every candidate is
            recorded, and the table shows the one with the best worst site.
        robust: Whether it seeks weights for the worst site.
    """

    name: str
    algorithm: Algorithm | None
    candidates: tuple[Algorithm, ...] = ()
    topology: Topology = Ring()
    steps_per_round: int = 1
    own_models: bool = False
    sees_test: bool = False
    robust: bool = False

    @property
    def tunings(self) -> tuple[str, ...]:
        return ("untuned", "tuned") if self.candidates and not self.sees_test else ("untuned",)

    def described(self) -> dict[str, Any]:
        """Returns what determines the numbers of a run, as a table."""
        return {
            "algorithm": None if self.algorithm is None else to_table(self.algorithm),
            "candidates": [to_table(one) for one in self.candidates],
            "topology": to_table(self.topology),
            "steps_per_round": self.steps_per_round,
            "sees_test": self.sees_test,
        }


def _scaled(algorithm: TrackedADGDA, factors: Sequence[float]) -> tuple[TrackedADGDA, ...]:
    """Returns the algorithm with its default steps multiplied by factors."""
    step = algorithm.primal_step
    if not isinstance(step, Polynomial):
        raise TypeError(f"candidates scale the start of a Polynomial step, got {step}")
    return tuple(replace(algorithm, primal_step=replace(step, start=factor * float(step.start))) for factor in factors)


def _tracked(algorithm: TrackedADGDA = TrackedADGDA()) -> tuple[Algorithm, ...]:  # noqa: B008  frozen
    """Returns three steps for each of two strengths."""
    return tuple(
        replace(one, regularizer=ChiSquare(strength))
        for strength in (0.05, 0.5)
        for one in _scaled(algorithm, (0.5, 1.0, 2.0))
    )


_STEPS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
_FIXED, _POOLED = TrackedADGDA(weighting=PriorWeights()), TrackedADGDA(weighting=PriorWeights(), compressor=Identity())
_ADGDA = ADGDA(compressor=Quantize(bits=4), consensus_step=0.5)
_DRFA = DRFA(primal_step=Geometric(0.1, 0.98))  # a round has ten steps, so 0.98 per round is 0.998 per step

METHODS = (
    Method("Constant", None),
    Method("Pooled", _POOLED, _scaled(_POOLED, _STEPS), Complete()),
    Method("Fixed", _FIXED, _scaled(_FIXED, _STEPS)),
    Method(
        "AD-GDA",
        _ADGDA,
        tuple(
            replace(_ADGDA, primal_step=Geometric(step, 0.998), regularizer=ChiSquare(strength))
            for strength in (0.001, 0.01)
            for step in (1.0, 3.0, 10.0)
        ),
        robust=True,
    ),
    Method("Tracked AD-GDA", TrackedADGDA(), _tracked(), robust=True),
    Method(
        "DR-DSGD",
        DRDSGD(),
        tuple(  # exp(loss / mu) / mu multiplies the step, so steps are in units of mu
            DRDSGD(Geometric(step * temperature, 0.998), temperature)
            for temperature in (2.0, 6.0)
            for step in (0.1, 0.3, 1.0)
        ),
        robust=True,
    ),
    Method(
        "DRFA",
        _DRFA,
        tuple(
            replace(_DRFA, primal_step=Geometric(step, 0.98), dual_step=dual_step)
            for dual_step in (0.002, 0.02)
            for step in (0.03, 0.1, 0.3)
        ),
        steps_per_round=_DRFA.local_steps,
        robust=True,
    ),
)
