"""The methods of the bench, each with its defaults and with the six candidates among which it is tuned."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fairmesh.algorithms import ADGDA, DRDSGD, DRFA, Algorithm, Local, TrackedADGDA
from fairmesh.algorithms.schedules import Geometric, Polynomial
from fairmesh.algorithms.weighting import PriorWeights
from fairmesh.compression.compressors import Identity, Quantize
from fairmesh.config.overrides import flat_table
from fairmesh.config.tables import to_table
from fairmesh.personalization import Mixture, Personalization
from fairmesh.problems.objective import Objective
from fairmesh.regularizers.builtin import ChiSquare
from fairmesh.topology.graphs import Complete, Ring, Topology
from fairmesh.training.defaults import DEFAULT_ALGORITHM, default_objective

CANDIDATES = 6  # per method that is tuned


@dataclass(frozen=True)
class Method:
    """One row of every problem's table.

    Args:
        name: Its name in tables and on the command line.
        algorithm: The algorithm as it is without tuning; None for the most frequent class of each site.
        candidates: What tuning chooses from; none if there is nothing to tune.
        topology: Who talks to whom; None for what `fm.train` chooses.
        objective: Which losses the weights follow.
        personalization: How sites get models of their own after the last round; None if all use the common model.
        steps_per_round: Gradients per round. The number of rounds is divided by it.
        own_models: Whether each site is judged by its own model, and chooses its own candidate.
        sees_test: Whether the weights follow the losses on test rows: a reference, not a method. Every candidate is
            recorded, and the table shows the one with the best worst site.
        robust: Whether it seeks weights for the worst site.
        as_by_default: Whether it is trained as `fm.train(problem)` does, without an algorithm and an objective; those
            given here only describe it.
        regularised: Whether sites alone have a penalty that is validated, as in `fm.compare_with_references`.
        records: Which models of the sites are recorded next to the common one: "personal", "common", "local". Without
            any, a site with a model of its own is judged by that.
    """

    name: str
    algorithm: Algorithm | None
    candidates: tuple[Algorithm, ...] = ()
    topology: Topology | None = field(default_factory=Ring)
    objective: Objective = field(default_factory=Objective)
    personalization: Personalization | None = None
    steps_per_round: int = 1
    own_models: bool = False
    sees_test: bool = False
    robust: bool = False
    as_by_default: bool = False
    regularised: bool = False
    records: tuple[str, ...] = ()

    @property
    def tunings(self) -> tuple[str, ...]:
        """Returns how the method is run: "untuned", and "tuned" if it has candidates."""
        return ("untuned", "tuned") if self.candidates and not self.sees_test else ("untuned",)

    def differences(self, algorithm: Algorithm) -> dict[str, Any]:
        """Returns the settings of a candidate that differ from the untuned algorithm, by their dotted names."""
        usual = {} if self.algorithm is None else flat_table(to_table(self.algorithm))
        return {key: value for key, value in flat_table(to_table(algorithm)).items() if usual.get(key) != value}


Stepped = TypeVar("Stepped", TrackedADGDA, Local)


def scaled(algorithm: Stepped, factors: Sequence[float]) -> tuple[Stepped, ...]:
    """Returns the algorithm with its steps multiplied by factors."""
    step = algorithm.primal_step
    if not isinstance(step, Polynomial):
        raise TypeError(f"candidates scale the start of a Polynomial step, got {step}")
    return tuple(replace(algorithm, primal_step=replace(step, start=factor * step.start)) for factor in factors)


def tracked(algorithm: TrackedADGDA, strengths: Sequence[float] = (0.05, 0.5)) -> tuple[Algorithm, ...]:
    """Returns three steps for each of two strengths."""
    return tuple(
        replace(one, regularizer=ChiSquare(strength))
        for strength in strengths
        for one in scaled(algorithm, (0.5, 1.0, 2.0))
    )


# The default has no decay where labels are predicted, so these rows are of the default. results/decay.json has what a
# decay would change: `python -m reproduction.decay`.
_RECORDED = replace(default_objective(), validated_decay=False)
_STEPS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
_TRACKED = TrackedADGDA()
_FIXED = TrackedADGDA(weighting=PriorWeights())
_POOLED = TrackedADGDA(weighting=PriorWeights(), compressor=Identity())
_ORACLE = tuple(
    TrackedADGDA(compressor=Identity(), regularizer=ChiSquare(strength)) for strength in (0.005, 0.02, 0.1, 0.5, 2.0)
)
_ADGDA = ADGDA(Geometric(1.0, 0.998), compressor=Quantize(bits=4), consensus_step=0.5)  # as in version 0.1
_DRFA = DRFA(primal_step=Geometric(0.1, 0.98))  # a round has ten steps, so 0.98 per round is 0.998 per step

_LIST = (
    Method("Constant", None),
    Method("Local", Local(), scaled(Local(), _STEPS), own_models=True),
    Method("Pooled", _POOLED, scaled(_POOLED, _STEPS), Complete()),
    Method(
        "Pooled, oracle weights",
        TrackedADGDA(compressor=Identity()),
        _ORACLE,
        Complete(),
        Objective("validation"),
        sees_test=True,
    ),
    Method("Fixed", _FIXED, scaled(_FIXED, _STEPS)),
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
    Method("Tracked AD-GDA", _TRACKED, tracked(_TRACKED), robust=True),
    Method("Tracked, held-out", _TRACKED, tracked(_TRACKED), objective=Objective("held-out"), robust=True),
    Method(
        "Tracked, regret", _TRACKED, tracked(_TRACKED), objective=Objective("held-out", against="local"), robust=True
    ),
    Method(
        "Default",  # of fm.train
        DEFAULT_ALGORITHM,
        tracked(DEFAULT_ALGORITHM, strengths=(0.05, 0.2)),
        objective=_RECORDED,
        robust=True,
    ),
    Method("Fixed, mixture", _FIXED, personalization=Mixture()),
    Method("Default, mixture", DEFAULT_ALGORITHM, objective=_RECORDED, personalization=Mixture()),
    Method(
        "DR-DSGD",
        DRDSGD(Geometric(1.0, 0.998), 6.0),
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
            for step in (0.1, 0.3, 1.0)
        ),
        steps_per_round=_DRFA.local_steps,
        robust=True,
    ),
)

METHODS = {method.name: method for method in _LIST}
ALONE, EQUAL, ORACLE, FIXED = "Local", "Pooled", "Pooled, oracle weights", "Fixed"  # what the others are compared with
