"""[objective] What the weights of the sites follow: which rows judge a site, and what its loss is compared with."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from fairmesh.config.ranges import Positive, Within
from fairmesh.config.tables import checked
from fairmesh.data.reserve import FEWEST_ROWS, spread_over
from fairmesh.data.samples import Samples
from fairmesh.data.units import drawn_units, sortable_targets, too_few_units
from fairmesh.errors import BadInput
from fairmesh.numerics import random_streams

LEARNABLE = 0.5  # a site where a model can learn away this share of the untrained model's loss counts in full
BY_CHANCE = 3.0  # variance of a row's loss, as a multiple of the squared mean loss


@checked
@dataclass(frozen=True)
class Objective:
    """Which losses the robust weights follow. Gradients always come from training rows.

    The weights lambda solve max over lambda of sum_i lambda_i l_i. By default l_i is the training loss of site i. It
    misleads where a small site is memorised, since its training loss is then small although its model is bad, and where
    labels are noise that no model can fit. On "held-out" rows l_i shows how well the model generalises.

    With `against`, l_i is the excess over a reference r_i, the regret of the site. The mean of the references keeps the
    scale of the losses and does not change the weights:

        l_i = f_i - r_i + mean(r)

    With `discount_noise`, a loss counts only as far as a model can lower it, and only as far as it differs from the
    other sites' losses by more than chance. u_i is the loss of the untrained model, or of the best constant output if
    that is larger, and b_i the loss of the site's own model, or of the common model if that is smaller. d_i is the part
    that can be learned, m the mean of all c_j, and h_i the number of rows that judge the site:

        d_i = f_i min(1, (1 - b_i / u_i) / 0.5)^4
        c_i = the number between d_i and f_i that is nearest to m
        l_i = m + (c_i - m) max(0, 1 - 3 c_i^2 / (h_i (c_i - m)^2))

    So a site with noisy labels, or with too few rows to tell, keeps about the weight of its prior.

    With `subgroups`, f_i is the loss of the worst mixture of the subgroups of the rows, such as scanners. Let P_g be
    the share of a subgroup's rows, F_g its mean loss, and F the mean of all rows. A row's loss is multiplied by

        exp(F_g / (strength F)) / sum_h P_h exp(F_h / (strength F))

    Args:
        judged_on: "training" rows; "held-out" rows, a share of every site's training rows; or the sites' "validation"
            sets. Default: "training".
        share: Share of each site's training rows that is held out, in (0, 0.5], chosen evenly from all classes. A site
            with fewer than 10 training rows holds none out and is judged on its training rows. Default: 0.2.
        rejoin: Share of the run after which the held-out rows join the training rows, in (0, 1]. The weights then
            remember the losses that they saw last. 1 for never. Default: 0.1.
        against: What a site's loss is compared with: None for nothing; "local" for the loss that the site reaches
            alone, on the same rows; "constant" for that of the best constant output; or a table of losses by site name.
            Default: None.
        discount_noise: Whether losses that no model can lower, and differences that chance explains, count less. Each
            site trains a model of its own before the run, which sends nothing. Needs an algorithm whose nodes know the
            mean loss: `TrackedADGDA` with its default weighting. Default: False.
        validated_decay: Whether models are kept small, as far as held-out rows say that this helps; "numbers" for only
            if they predict numbers, where it helps most: the search takes time. Before the run, each site i trains
            models of its own with several penalties, in folds of its training rows, and finds Lambda_i, the smallest
            penalty that does as well as the best, at most 30. It sends nothing. It adds Lambda_i / N times the model,
            without biases, to its gradients; N is the number of all sites' training rows. Lambda_i is 0 for a model of
            more than 10,000 parameters, and for a site of fewer than 10 rows. Default: False.
        subgroups: None for no weights of subgroups; "within": each site weighs the subgroups of its own rows, and sends
            nothing more; "across": all sites weigh the subgroups that span them, and a message has two more numbers per
            subgroup. Needs sites with (inputs, targets, subgroups). Default: None.
        subgroup_names: The names of the subgroups with "across", the same at all sites; () to collect them from the
            sites. Default: ().
        subgroup_strength: How far the weights of subgroups stay near their shares of the rows, > 0. Default: 0.5.
        rounds: The length of the run; None to fill it in when the run starts. Default: None.
        local_losses: The loss that each site reaches alone, by its name; None to find it when the run starts. Default:
            None.
        untrained_losses: u_i by the site's name; None to find it when the run starts. Default: None.
        constant_losses: The loss of the best constant output by the site's name; None to find it when the run starts.
            Default: None.
        penalties: Lambda_i by the site's name; None to find it when the run starts. Default: None.

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
    share: Annotated[float, Within("(0, 0.5]")] = 0.2
    rejoin: Annotated[float, Within("(0, 1]", "1 keeps rows out to the end")] = 0.1
    against: Literal["local", "constant"] | Mapping[str, float] | None = None
    discount_noise: bool = False
    validated_decay: bool | Literal["numbers"] = False
    subgroups: Literal["within", "across"] | None = None
    subgroup_names: tuple[str, ...] = ()
    subgroup_strength: Positive = 0.5
    rounds: int | None = None
    local_losses: Mapping[str, float] | None = None
    untrained_losses: Mapping[str, float] | None = None
    constant_losses: Mapping[str, float] | None = None
    penalties: Mapping[str, float] | None = None

    def __post_init__(self):
        for wrong, refusal in self._combinations():
            if wrong:
                raise BadInput(f"objective.{refusal}")
        for field in ("against", "local_losses", "untrained_losses", "constant_losses", "penalties"):
            table = getattr(self, field)
            for name, value in (table if isinstance(table, Mapping) else {}).items():
                if not math.isfinite(value):
                    raise BadInput(f"objective.{field} of site {name!r} is {value}; a reference loss must be finite")

    def _combinations(self) -> list[tuple[bool, str]]:
        """Returns whether settings exclude each other, and the refusal."""
        names = self.subgroup_names
        what = "discount_noise" if self.discount_noise else 'against = "local"'
        needs_other_rows = self.against == "local" or self.discount_noise
        weighed, compared = self.subgroups is not None, self.against is not None
        return [
            (
                self.judged_on == "training" and needs_other_rows,
                f'{what} needs judged_on = "held-out" or "validation", got "training": on the rows that it was '
                "trained on, a local model has almost no loss",
            ),
            (len(set(names)) < len(names), f"subgroup_names has a name twice: {', '.join(names)}"),
            (compared and self.discount_noise, "against and objective.discount_noise exclude each other; give one"),
            (
                weighed and self.judged_on == "validation",
                'subgroups needs judged_on = "training" or "held-out", got "validation"',
            ),
            (weighed and compared, "subgroups and objective.against exclude each other; give one of them"),
            (
                bool(names) and self.subgroups != "across",
                'subgroup_names needs subgroups = "across"; with "within" each site has its own',
            ),
        ]

    @property
    def needs_local_models(self) -> bool:
        """Whether each site trains a model of its own before the run."""
        return (self.against == "local" or self.discount_noise) and self.local_losses is None

    @property
    def needs_constants(self) -> bool:
        """Whether each site's best constant output is found before the run."""
        return (self.against == "constant" and self.constant_losses is None) or (
            self.discount_noise and self.untrained_losses is None
        )

    @property
    def needs_penalties(self) -> bool:
        """Whether each site finds the penalty on its model's size before the run."""
        return bool(self.validated_decay) and self.penalties is None

    @property
    def needs_references(self) -> bool:
        """Whether sites compute something alone before the run."""
        return self.needs_local_models or self.needs_constants or self.needs_penalties

    def with_run_length(self, rounds: int) -> "Objective":
        """Returns the objective of a run of this many rounds."""
        return self if self.judged_on != "held-out" or self.rounds is not None else replace(self, rounds=rounds)

    def rejoin_round(self) -> int | None:
        """Returns the first round in which held-out rows are trained on, or None if there is none."""
        if self.judged_on != "held-out" or self.rejoin == 1:
            return None
        if self.rounds is None:
            raise BadInput("objective.rounds, the length of the run, is not known; fm.train and fm.run fill it in")
        return math.ceil(self.rejoin * self.rounds)

    def held_out_of(self, rows: int) -> int:
        """Returns how many of a site's training rows are held out, if each is a unit of its own."""
        if self.judged_on != "held-out" or rows < FEWEST_ROWS:
            return 0
        return max(1, round(self.share * rows))

    def references(self, names: list[str]) -> Tensor:
        """Returns the loss of every site (n,), float64, that the objective is `against`."""
        tables = {"local": self.local_losses, "constant": self.constant_losses}
        table = tables[self.against] if isinstance(self.against, str) else self.against
        if table is None:
            raise BadInput(f"objective.against = {self.against!r} has no numbers yet; fm.train and fm.run find them")
        return _by_site(table, names, range(len(names)), "against")

    def learnable(self, names: list[str], here: Collection[int]) -> tuple[Tensor, Tensor]:
        """Returns what each site reaches alone and its loss before training, (n,) float64.

        The numbers of sites that are not here are NaN."""
        if self.local_losses is None or self.untrained_losses is None:
            raise BadInput("objective.discount_noise has no numbers yet; fm.train and fm.run find them")
        return (
            _by_site(self.local_losses, names, here, "local_losses"),
            _by_site(self.untrained_losses, names, here, "untrained_losses"),
        )

    def penalties_of(self, names: list[str], here: Collection[int]) -> Tensor:
        """Returns Lambda_i of every site, (n,) float64. The numbers of sites that are not here are NaN."""
        if self.penalties is None:
            raise BadInput("objective.validated_decay has no numbers yet; fm.train and fm.run find them")
        return _by_site(self.penalties, names, here, "penalties")


def _by_site(table: Mapping[str, float], names: list[str], here: Collection[int], field: str) -> Tensor:
    """Returns a table's number for every site, and NaN for a site elsewhere that it does not name."""
    absent = [names[i] for i in here if names[i] not in table]
    if absent:
        raise BadInput(f"objective.{field} has no number for site {absent[0]!r}; give one for every site")
    unknown = sorted(set(table) - set(names))
    if unknown:
        raise BadInput(f"objective.{field} names {unknown[0]!r}; the sites are {', '.join(names)}")
    return torch.tensor([table.get(name, math.nan) for name in names], dtype=torch.float64)


def counted_losses(losses: Tensor, learnable: Tensor, mean: Tensor) -> Tensor:
    """Returns c_i, the number between the learnable part of each loss and the loss that is nearest to the mean."""
    return torch.maximum(losses * learnable, torch.minimum(losses, mean))


def beyond_chance(units: Tensor, rows: Tensor) -> Tensor:
    """Returns losses in units of their mean, with the part of their distance to it that chance does not explain.

    Args:
        units: c_i / m.
        rows: how many rows each was measured on; 0 if it tells nothing."""
    apart = units - 1.0
    chance = BY_CHANCE * units.square() / (rows * apart.square()).clamp(min=torch.finfo(units.dtype).tiny)
    return 1.0 + apart * (1.0 - chance).clamp(min=0.0)


def held_out_rows(samples: Samples, site: int, objective: Objective) -> Tensor:
    """Returns a mask of the rows of a site that judge it, and are not trained on before they rejoin.

    They are spread evenly over the classes, or over the range of other targets. Of samples with units they are whole
    units; a site with too few of these holds none out."""
    rows, count = len(samples), objective.held_out_of(len(samples))
    if not count or too_few_units(samples):
        return torch.zeros(rows, dtype=torch.bool)
    key = random_streams.keys(torch.tensor([site]), "held-out rows", 0, torch.tensor([0]))
    if samples.units is not None:
        return drawn_units(samples, count, key)
    targets = sortable_targets(samples)
    order = random_streams.bits(key, rows).flatten().argsort(stable=True)
    if samples.subgroups is not None:
        order = order[samples.subgroups[order].argsort(stable=True)]
    if targets is not None:  # they are if a stream does not know its labels
        order = order[targets[order].argsort(stable=True)]  # by target and subgroup, and in random order within one
    return spread_over(order, count)
