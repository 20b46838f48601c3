"""What `fm.train(problem)` and an experiment without `[algorithm]` use. `python -m reproduction sites` shows why."""

from dataclasses import replace
from typing import NamedTuple

from fairmesh.algorithms.tracked_ad_gda import TrackedADGDA
from fairmesh.algorithms.weighting import PriorWeights
from fairmesh.compression.compressors import Quantize
from fairmesh.problems.objective import Objective
from fairmesh.regularizers.builtin import ChiSquare
from fairmesh.training.options import Options

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
    """Returns weights that follow held-out rows and discount noise, and a decay of models that predict numbers."""
    return Objective(judged_on="held-out", share=0.35, discount_noise=True, validated_decay="numbers")


def only_subgroups(objective: Objective, like: Objective | None = None) -> Objective:
    """Returns the plain objective, or the one that it is to be `like`, with the subgroups of the given one."""
    subgroups = {name: getattr(objective, name) for name in ("subgroups", "subgroup_names", "subgroup_strength")}
    return replace(like or Objective(), **subgroups)


class Default(NamedTuple):
    """What a run uses that names no algorithm."""

    algorithm: TrackedADGDA
    objective: Objective
    compare_weights: bool

    def completed(self, options: Options) -> Options:
        """Returns the options, in which `compare_weights` and `choose_weights` are decided."""
        compare, choose = options.compare_weights, options.choose_weights
        compare = self.compare_weights if compare is None else compare
        return replace(options, compare_weights=compare, choose_weights=compare if choose is None else choose)


def default_for(
    objective: Objective, updates: bool = False, weight_decay: float = 0.0, private: bool = False
) -> Default:
    """Returns what a run uses whose problem has this objective, if it names no algorithm.

    An objective that says nothing but subgroups becomes the default one, without a decay of its own if the problem has
    a `weight_decay`. Where subgroups that span sites have weights, the sites have fixed ones. Updates of training
    functions (`updates`) are applied whole, and damped: the weights multiply whole epochs, and then follow the losses
    in few rounds. `python -m reproduction.trainers --show` compares this with others."""
    if updates:
        return Default(FOR_UPDATES, objective, compare_weights=False)
    if private:  # held-out rows, references and a second run would each be releases of their own
        return Default(DEFAULT_ALGORITHM, objective, compare_weights=False)
    if objective == only_subgroups(objective):
        like = replace(default_objective(), validated_decay=False) if weight_decay else default_objective()
        objective = only_subgroups(objective, like)
    if objective.subgroups == "across":
        return Default(TrackedADGDA(weighting=PriorWeights()), objective, compare_weights=False)
    return Default(DEFAULT_ALGORITHM, objective, compare_weights=True)
