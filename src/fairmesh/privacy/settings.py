"""The settings of a private run, as `[privacy]` of an experiment file has them."""

from dataclasses import dataclass
from typing import Annotated

from fairmesh.config.ranges import Count, Within
from fairmesh.config.tables import checked

_CLIP = "1 is usual; a smaller one has less noise, and shortens more"


@checked
@dataclass(frozen=True)
class Privacy:
    """Differential privacy per unit of all that a site sends, against all other sites together.

    A unit is what `[data] unit` or `Site(units=)` names, such as a patient; else a row. Every site draws its units at
    random in every round, clips what each of them contributes, and adds Gaussian noise, so that what it sends is nearly
    as likely without the rows of any one unit. docs/concepts/privacy.md says what this covers, and what it does not.

    Args:
        epsilon: The most that any site may spend on its training units for one model, in (0, 100]. Several models on
            the same rows, as by `seeds` or a sweep, spend more together, which summary.json tells.
        delta: The chance that the bound by epsilon does not hold, in [1e-12, 1); less than one over the number of units
            of every site.
        clip: The largest Euclidean norm of what one unit contributes to a gradient, in [1e-30, 1e30]. Default: 1.0.
        loss_clip: The largest loss of one unit that the weights of the sites see, in [1e-30, 1e30]; None for twice the
            loss of equal chances, 2 ln(classes), which only labels have. Default: None.
        loss_share: The share of the budget for the losses that weights follow, in [0.001, 0.999]; nothing is spent on
            them by an algorithm without such weights. Default: 0.1.
        rows_per_unit: How many rows of a unit are looked at in a round, >= 1; of one with more, as many are drawn.
            Where rows belong to units, each unit takes the time and the memory of this many rows, since how many it has
            is not told. Default: 8.
        evaluation_epsilon: What a site between organisations may spend on its test units, for the one evaluation that
            it tells others at the end, in [0, 100]; 0 to tell none. Default: 1.0.
        repeatable: Whether a simulation draws its noise from the seed, so that it can be repeated. Then the noise can
            be computed by whoever knows the seed, and its models must not be published as private. Default: False.

    Example:
        >>> import fairmesh as fm
        >>> fm.Privacy(epsilon=4, delta=1e-5).clip
        1.0
    """

    epsilon: Annotated[float, Within("(0, 100]", "0 would be all noise, and over 100 protects nobody; 1 to 8 is usual")]
    delta: Annotated[float, Within("[1e-12, 1)", "1e-5 is usual for up to 10,000 units per site")]
    clip: Annotated[float, Within("[1e-30, 1e30]", _CLIP)] = 1.0
    loss_clip: Annotated[float, Within("[1e-30, 1e30]", _CLIP)] | None = None
    loss_share: Annotated[float, Within("[0.001, 0.999]", "0.1 is usual")] = 0.1
    rows_per_unit: Count = 8
    evaluation_epsilon: Annotated[float, Within("[0, 100]", "0 tells nothing, and over 100 protects nobody")] = 1.0
    repeatable: bool = False
