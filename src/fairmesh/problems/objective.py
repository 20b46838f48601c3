"""What the weights of the sites see: which rows a site is judged on, and what its loss is compared with."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fairmesh.config.tables import checked
from fairmesh.data.samples import Samples
from fairmesh.errors import BadInput
from fairmesh.numerics import random_streams

FEWEST_ROWS = 10  # a site with fewer training rows holds none out


@checked
@dataclass(frozen=True)
class Objective:
    """Which losses the robust weights follow. Gradients always come from training rows.

    The weights lambda solve max over lambda of sum_i lambda_i l_i. By default l_i is the training loss of site i. It
    misleads where a small site is memorised, since its training loss is then small although its model is bad, and where
    labels are noise that no model can fit. On "held-out" rows l_i shows how well the model generalises. With `against`
    it is the excess over what can be had at the site, the site's regret:

        l_i = f_i - r_i + mean(r)

    The mean of the references keeps the scale of the losses; it does not change the weights.

    Args:
        judged_on: "training" rows; "held-out" rows, a share of every site's training rows; or the sites' "validation"
            sets. Default: "training".
        share: Share of each site's training rows that is held out, in (0, 0.5], chosen evenly from all classes. A site
            with fewer than 10 training rows holds none out and is judged on its training rows. Default: 0.2.
        rejoin: Share of the run after which the held-out rows join the training rows, in (0, 1]. The weights then
            remember the losses that they saw last. 1 for never. Default: 0.8.
        against: What a site's loss is compared with: None for nothing; "local" for the loss that the site reaches
            alone, on the same rows; "constant" for that of the best constant output; or a table of losses by site name.
            Default: None.
        rounds: The length of the run; None to fill it in when the run starts. Default: None.

    Example:
        >>> import fairmesh as fm
        >>> objective = fm.Objective(judged_on="held-out", against="constant")
        >>> experiment = fm.Experiment(
        ...     fm.data.Digits(nodes=4, odd=1), fm.Ring(), fm.TrackedADGDA(), rounds=20, objective=objective
        ... )
        >>> fm.run(experiment).weights().shape
        torch.Size([1, 4])

    References:
        Agarwal, Zhang: Minimax Regret Optimization for Robust Machine Learning under Distribution Shift, COLT 2022.
    """

    judged_on: Literal["training", "held-out", "validation"] = "training"
    share: float = 0.2
    rejoin: float = 0.8
    against: Literal["local", "constant"] | Mapping[str, float] | None = None
    rounds: int | None = None

    def __post_init__(self):
        if not 0 < self.share <= 0.5:
            raise BadInput(f"objective.share must lie in (0, 0.5], got {self.share}")
        if not 0 < self.rejoin <= 1:
            raise BadInput(f"objective.rejoin must lie in (0, 1], got {self.rejoin}; 1 keeps the rows out to the end")
        if isinstance(self.against, Mapping):
            for name, value in self.against.items():
                if not math.isfinite(value):
                    raise BadInput(f"objective.against of site {name!r} is {value}; a reference loss must be finite")

    def with_run_length(self, rounds: int) -> "Objective":
        """Returns the objective of a run of this many rounds."""
        return self if self.rounds is not None else replace(self, rounds=rounds)

    def rejoin_round(self) -> int | None:
        """Returns the first round in which held-out rows are trained on, or None if there is none."""
        if self.judged_on != "held-out" or self.rejoin == 1:
            return None
        if self.rounds is None:
            raise BadInput("objective.rounds, the length of the run, is not known; fm.train and fm.run fill it in")
        return math.ceil(self.rejoin * self.rounds)

    def held_out_of(self, rows: int) -> int:
        """Returns how many of a site's training rows are held out."""
        if self.judged_on != "held-out" or rows < FEWEST_ROWS:
            return 0
        return max(1, round(self.share * rows))

    def references(self, names: list[str]) -> Tensor | None:
        """Returns the reference loss of every site (n,), float64, or None if there is none."""
        if self.against is None:
            return None
        if isinstance(self.against, str):
            raise BadInput(f"objective.against = {self.against!r} has no numbers yet; fm.train and fm.run find them")
        absent = [name for name in names if name not in self.against]
        if absent:
            raise BadInput(f"objective.against has no reference for site {absent[0]!r}; give one for every site")
        unknown = sorted(set(self.against) - set(names))
        if unknown:
            raise BadInput(f"objective.against names {unknown[0]!r}; the sites are {', '.join(names)}")
        return torch.tensor([self.against[name] for name in names], dtype=torch.float64)


def held_out_last(samples: Samples, site: int, count: int) -> Tensor:
    """Returns an order of a site's rows: those to train on, then the `count` rows to hold out.

    Held-out rows are spread evenly over the classes, or over the range of other targets."""
    rows = len(samples)
    key = random_streams.keys(torch.tensor([site]), "held-out rows", 0, torch.tensor([0]))
    order = random_streams.bits(key, rows).flatten().argsort(stable=True)
    targets = samples.targets.reshape(rows, -1)[:, 0]
    order = order[targets[order].argsort(stable=True)]  # by target, and in random order within one
    places = ((torch.arange(count) + 0.5) * rows / count).long()
    held = torch.zeros(rows, dtype=torch.bool)
    held[order[places]] = True
    return torch.cat([(~held).nonzero().flatten(), held.nonzero().flatten()])
