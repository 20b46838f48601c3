"""What `fm.train(problem)` and an experiment without `[algorithm]` use. `python -m reproduction sites` shows why."""

from dataclasses import replace

from fairmesh.algorithms.tracked_ad_gda import TrackedADGDA
from fairmesh.algorithms.weighting import PriorWeights
from fairmesh.compression.compressors import Quantize
from fairmesh.problems.objective import Objective
from fairmesh.regularizers.builtin import ChiSquare

ROUNDS = 600
DEFAULT_ALGORITHM = TrackedADGDA()
FOR_UPDATES = TrackedADGDA(
    primal_step=1.0,
    beta1=0.5,
    beta2=0.0,
    compressor=Quantize(bits=4, block=256),
    regularizer=ChiSquare(0.1),
)


def default_objective() -> Objective:
    """Returns weights that follow held-out rows and discount noise."""
    return Objective(judged_on="held-out", share=0.35, discount_noise=True)


def only_subgroups(objective: Objective, like: Objective | None = None) -> Objective:
    """Returns the plain objective, or the one that it is to be `like`, with the subgroups of the given one."""
    subgroups = {name: getattr(objective, name) for name in ("subgroups", "subgroup_names", "subgroup_strength")}
    return replace(like or Objective(), **subgroups)


def completed(objective: Objective) -> Objective:
    """Returns the default objective with the subgroups of the given one, if it says nothing else."""
    return only_subgroups(objective, default_objective()) if objective == only_subgroups(objective) else objective


def algorithm_for(objective: Objective, updates: bool = False) -> TrackedADGDA:
    """Returns the default algorithm. Where subgroups that span sites have weights, the sites have fixed ones.
    Updates of training functions (`updates`) are applied whole, and damped: the weights multiply whole epochs, and then
    follow the losses in few rounds. `python -m reproduction.trainers --show` compares this with others."""
    if updates:
        return FOR_UPDATES
    return DEFAULT_ALGORITHM if objective.subgroups != "across" else TrackedADGDA(weighting=PriorWeights())
