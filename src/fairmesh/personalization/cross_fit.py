"""Trains many models at once: for every site one on all of its rows, and one without each fold of them."""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fairmesh.data.reserve import FEWEST_ROWS, can_hold_out, key_for, order_by_class
from fairmesh.data.samples import Samples
from fairmesh.data.site import Site
from fairmesh.data.units import FEWEST_UNITS, folds_of_units, joined_units
from fairmesh.errors import BadInput
from fairmesh.numerics import trees
from fairmesh.personalization.evidence import log_evidence
from fairmesh.personalization.pooled_prior import LARGEST_LOGARITHM, LARGEST_LOSS, CommonLosses
from fairmesh.problems.objective import Objective
from fairmesh.problems.oracle import Oracle
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.row_loss import as_floats, per_sample
from fairmesh.problems.stacking import over_models

_BETA1, _BETA2, _TINY = 0.9, 0.99, 1e-8  # of the scaled steps, as in Tracked AD-GDA
_LOOKS = 20  # models along a path that are judged; early ones are closer together
_FLOATS_AT_ONCE = 1 << 23  # of inputs times models
_SMALL, _BATCH = 200, 200  # parameters of a model whose batches have at least so many rows
LARGE = 10_000  # parameters; a larger model is trained with few penalties
PENALTIES = (0.0, 1.0, 10.0, 30.0, 100.0, 1e3)
OF_LABELS = (0.0, 1.0, 3.0, 10.0)  # with more, small differences of the biases decide, which folds do not show
FEW_PENALTIES = (0.0, 1.0, 10.0)


class Fitted(NamedTuple):
    """Models (sites, folds + 1, dim), the last one of a site from all of its rows, and the steps (sites,) they took."""

    models: Tensor
    steps: Tensor


class _Steps(NamedTuple):
    """Steps as in Tracked AD-GDA: each has a Euclidean norm of about `length`, which falls to zero with a power."""

    steps: int
    length: float
    power: float


class Walk(NamedTuple):
    """Models in training with the memory of their steps, each (1, sites * (folds + 1), dim)."""

    models: Tensor
    momenta: Tensor
    squares: Tensor


class Average(NamedTuple):
    """The average of each site's models along a path, by the evidence that some rows give to each of them."""

    total: Tensor  # the sum of the models times their weights (sites, folds + 1, dim)
    weight: Tensor  # the sum of the weights, relative to the largest evidence (sites, 1) or (sites, folds + 1)
    steps: Tensor  # the sum of the steps times the weights
    evidence: Tensor  # the largest so far, a logarithm

    @classmethod
    def empty(cls, like: Tensor, kinds: int = 1) -> "Average":
        """Returns no average yet, with one evidence for all models of a site or, of several kinds, one for each."""
        nothing = torch.zeros(len(like), kinds, dtype=torch.float64)
        return cls(torch.zeros_like(like), nothing, nothing, torch.full_like(nothing, -math.inf))

    def with_models(self, models: Tensor, steps: int, evidence: Tensor) -> "Average":
        """Returns the average with the models after a number of steps, given their evidence (sites, 1) or (sites,
        folds + 1)."""
        best = torch.maximum(self.evidence, evidence)  # weights are relative to it, so that none is too large
        before = torch.where(self.evidence.isfinite(), (self.evidence - best).exp(), 0.0)
        here = torch.where(evidence.isfinite(), (evidence - best).exp(), 0.0)
        kept, added = (t.to(models.device, models.dtype)[..., None] for t in (before, here))
        total = torch.where(added > 0, kept * self.total + added * models, kept * self.total)
        return Average(total, before * self.weight + here, before * self.steps + here * steps, best)

    def mean(self, start: Tensor) -> Fitted:
        """Returns the average; the start where no models count."""
        weight = self.weight.to(self.total.device, self.total.dtype)[..., None]
        models = torch.where(weight > 0, self.total / weight, start)
        return Fitted(models, (self.steps / self.weight.clamp(min=1e-300))[:, -1])


class Penalised(NamedTuple):
    """Models of several penalties (penalties, sites, folds + 1, dim), and the loss of every row by the model of its
    penalty and site that was trained without it (penalties, rows): 0 or 1 if targets are labels."""

    models: Tensor
    losses: Tensor


class Pull(NamedTuple):
    """What a penalty adds to gradients: a multiple of the distance of each model from a point, or from zero."""

    strength: Tensor  # (penalties, models, dim)
    to: Tensor | None = None


class Averaging(NamedTuple):
    """Models in training that are averaged."""

    walk: Walk
    by_all: Average  # rows
    by_judges: Average | None  # the rows that judge, if they have a say of their own


class Carrier(Protocol):
    """Trains to the end: takes a name, the number of steps, the state before the first one, and what yields from a
    state after some steps how many are done and the state then. Returns the last state. Who keeps states can continue
    after a stop."""

    def __call__(
        self, name: str, steps: int, first: Any, onwards: Callable[[Any, int], Iterator[tuple[int, Any]]], /
    ) -> Any: ...


def to_the_end(name: str, steps: int, first: Any, onwards: Callable[[Any, int], Iterator[tuple[int, Any]]]) -> Any:
    """Trains without a stop."""
    ((_, last),) = collections.deque(onwards(first, 0), maxlen=1)
    return last


class CrossFit:
    """The rows of some sites, in folds, and the training of models on them.

    A row is *unseen* if the common model was not trained on it: it is in the site's reserved set or, if there is none,
    in a validation set of the site's own. Or its fold is one of the first `folds_apart`, each of which has a common
    model of its own that was trained without it. Folds divide unseen and seen rows alike, so every row is held out
    once."""

    def __init__(
        self,
        problem: Prepared,
        sites: Sequence[int],
        folds: int,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
        trace: bool = True,
        carrier: Carrier = to_the_end,
        folds_apart: int = 0,
    ):
        self.problem, self.sites, self.folds, self._seed = problem, sites, folds, seed
        self._device, self._dtype, self._trace, self._carrier = device, dtype, trace, carrier
        self._outputs = over_models(problem.flat_model.to(device, dtype), problem.at_once(device))
        pools = [_pool(problem, i) for i in sites]
        self.sizes = torch.tensor([len(pool) for pool, _ in pools])
        places = [_place_of_unit(pool) for pool, _ in pools]
        counts = torch.tensor([int(place.max()) + 1 for place in places])
        # Rows of one unit may all say the same, so together they are taken for one row of evidence.
        self.independent = counts.double() / self.sizes
        self.site_of_row = torch.repeat_interleave(torch.arange(len(sites)), self.sizes)
        self._unit_of_row = torch.cat(places) + (counts.cumsum(0) - counts)[self.site_of_row]
        self._site_of_unit = torch.repeat_interleave(torch.arange(len(sites)), counts)
        self.fold_of_row = torch.cat([_folds_of(pool, unseen, folds) for pool, unseen in pools])
        self.unseen = torch.cat([unseen for _, unseen in pools]) | (self.fold_of_row < folds_apart)
        self._inputs = trees.joined([pool.inputs for pool, _ in pools])
        self.targets = as_floats(trees.joined([pool.targets for pool, _ in pools]), dtype)
        none = torch.zeros(len(sites)).index_add_(0, self.site_of_row, self.unseen.float()) == 0
        self.judged = self.unseen | none[self.site_of_row]  # rows that judge: the unseen, or all if there are none
        self._held = self._table_of_held_rows(len(sites))
        trained = []  # of every site, all rows but those of each fold, and all rows
        for s, (pool, _) in enumerate(pools):
            fold = self.fold_of_row[self.site_of_row == s]
            trained += [Site(pool.take(rows)) for rows in (*(fold != k for k in range(folds)), fold >= 0)]
        self._trained = problem.changed(sites=trained, prior=None, objective=Objective())
        self._identities = torch.tensor([i * (folds + 1) + k for i in sites for k in range(folds + 1)])

    def _table_of_held_rows(self, sites: int) -> Tensor:
        """Returns the rows of every site's every fold (sites * folds, most), filled up with -1."""
        group = self.site_of_row * self.folds + self.fold_of_row
        order = group.argsort(stable=True)
        counts = torch.bincount(group, minlength=sites * self.folds)
        place = torch.arange(len(order)) - (counts.cumsum(0) - counts)[group[order]]
        table = torch.full((len(counts), int(counts.max())), -1)
        table[group[order], place] = order
        return table

    @torch.no_grad()
    def outputs(self, models: Tensor) -> Tensor:
        """Returns what the models (sites, folds + 1, dim) predict for all rows, each row by the model of its site that
        was trained without the row's fold: (rows, ...), on the CPU."""
        rows = models[:, : self.folds].flatten(0, 1).to(self._device, self._dtype)
        width = max(1, _FLOATS_AT_ONCE // (len(rows) * trees.numbers_per_sample(self._inputs)))
        places, made = [], []
        for table in self._held.split(width, dim=1):
            chosen = trees.at(self._inputs, table.clamp(min=0))
            inputs = as_floats(trees.mapped(lambda part: part.to(self._device), chosen), self._dtype)
            made.append(self._outputs(rows, inputs)[(table >= 0).to(self._device)].cpu())
            places.append(table[table >= 0])
        return torch.cat(made)[torch.cat(places).argsort()]

    def losses_of_common(self, commons: Tensor) -> CommonLosses:
        """Returns the sums of the losses of a common model that stands for each fold (folds + 1, dim). Rows whose loss
        is not finite, or nearly so, do not count."""
        outputs = self.outputs(commons.expand(len(self.sites), -1, -1))
        losses = per_sample(self.problem.output_loss, outputs, self.targets).double()
        weights, finite = self.independent[self.site_of_row], losses.abs() < LARGEST_LOSS
        masks = [rows & finite for rows in (self.unseen, ~self.unseen)]
        parts = [(torch.where(rows, losses * weights, 0.0), weights * rows) for rows in masks]
        judges = self.judged & finite
        means = self._sums(torch.where(judges, losses, 0.0)) / self._sums(judges.double())  # NaN without rows
        logarithms = means[means > 0].log().clamp(-LARGEST_LOGARITHM, LARGEST_LOGARITHM)
        (unseen, unseen_rows), (seen, seen_rows) = ((float(a.sum()), float(b.sum())) for a, b in parts)
        return CommonLosses(unseen, unseen_rows, seen, seen_rows, float(logarithms.sum()), float(len(logarithms)))

    def same(self, rows: Tensor) -> Tensor:
        """Returns one model per site (sites, dim) for all folds: (sites, folds + 1, dim)."""
        return rows.unsqueeze(1).expand(-1, self.folds + 1, -1)

    def alone(self, start: Tensor, steps: int, step: float) -> Fitted:
        """Trains every site's models from a start that knows no data, and averages each site's over its path by how
        well held-out rows support them.

        A model that took k steps counts in proportion to the evidence that the rows give to k steps. Where they clearly
        support one number of steps, that is the choice; where they do not, the average is steadier than a choice.
        Steps of which the loss is not finite do not count."""
        return self._averaged("alone", start, _Steps(steps, step, 3.0)).by_all.mean(start)

    def tuned(self, start: Tensor, steps: int, step: float, nested: bool = False) -> Fitted:
        """Trains every site's models from the common one, and averages them as `alone` does. The common model itself
        has half of the prior probability, so that noise does not move a site away from it.

        The rows that judge are the unseen ones. The common model looks too good on the others, so these speak against
        any step. If they support more steps all the same, they are right to, and all rows judge.

        The model without a fold counts steps as all rows of the site do, this fold included: it is for comparing models
        along the path. With `nested` the fold has no say in it, so that it may judge the outcome too."""
        last = self._averaged("tuned", start, _Steps(steps, step, 1.0), True, nested)
        by_judges, by_all = last.by_judges.mean(start), last.by_all.mean(start)  # type: ignore[union-attr]
        more = by_all.steps > by_judges.steps
        models = torch.where(more.to(start.device)[:, None, None], by_all.models, by_judges.models)
        return Fitted(models, torch.where(more, by_all.steps, by_judges.steps))

    def _averaged(self, name: str, start: Tensor, plan: _Steps, tuned: bool = False, nested: bool = False) -> Averaging:
        """Returns the averages along a path. If it begins at the common model (`tuned`), this is as probable as all
        models after it, and the rows that judge have a say of their own."""
        labels, every = self.problem.classes is not None, torch.ones_like(self.judged)

        def added(average: Average, k: int, models: Tensor, losses: Tensor, judges: Tensor) -> Average:
            rows = self._sums_without(judges.double(), nested)
            total = self._sums_without(losses.masked_fill(~judges, 0.0), nested)
            evidence = log_evidence(total, rows, labels).masked_fill(rows == 0, 0.0)  # nothing speaks for any step
            return average.with_models(models, k, evidence + (math.log(_LOOKS) if tuned and k == 0 else 0.0))

        def looked(state: Averaging, k: int) -> Averaging:
            models = state.walk.models.view_as(start)
            losses = per_sample(self.problem.output_loss, self.outputs(models), self.targets).double()
            by_judges = state.by_judges
            if by_judges is not None:
                by_judges = added(by_judges, k, models, losses, self.judged)
            return Averaging(state.walk, added(state.by_all, k, models, losses, every), by_judges)

        empty = Average.empty(start, self.folds + 1 if nested else 1)
        return self._trained_along(name, plan, Averaging(self._at(start), empty, empty if tuned else None), looked)

    def regularised(self, start: Tensor, steps: int, step: float) -> Fitted:
        """Trains every site's models from a start that knows no data, each with several penalties on its size, and
        averages each site's over the penalties by how well held-out rows support them.

        Rows are judged as sites are: by right or wrong if targets are labels, else by the loss. The penalty of a model
        of n rows is Lambda / (2 n) times its squared norm, without biases, added to the mean loss: that of ridge
        regression, or of logistic regression with an L2 penalty. The average is steadier than a choice where few rows
        judge. A penalty whose outcome is not finite does not count."""
        ended = self.penalised(start, steps, step, penalties_for(self.problem), self.in_large_batches())
        return self.averaged_over_penalties(ended, start, steps)

    def averaged_over_penalties(self, ended: Penalised, start: Tensor, steps: int) -> Fitted:
        """Returns each site's models, averaged over the penalties by how well held-out rows support them."""
        average = Average.empty(start)
        for models, losses in zip(ended.models, ended.losses):
            # One wrong answer more than there are: no penalty is certain to make none.
            total = self._sums(losses) * self.independent + (0.0 if self.problem.classes is None else 1.0)
            evidence = log_evidence(total, self.sizes * self.independent, labels=False)
            average = average.with_models(models, steps, evidence[:, None])
        return average.mean(start)

    def penalised(
        self, start: Tensor, steps: int, step: float, penalties: Sequence[float], trained: Prepared | None = None
    ) -> Penalised:
        """Trains every site's models from a start that knows no data, each with several penalties, on the folds or on
        what is `trained` instead."""
        plan, first = _Steps(steps, step, 3.0), self._at(start, len(penalties))
        pull = Pull(self._decay(penalties, self.problem.flat_model.layout.without_biases()))
        last = self._carrier("alone", steps, first, lambda walk, done: self._walk(walk, done, plan, pull, trained))
        models = last.models.unflatten(1, start.shape[:2])
        return Penalised(models, torch.stack([self._badness(self.outputs(of_penalty)) for of_penalty in models]))

    def near(self, start: Tensor, steps: int, step: float, strengths: Sequence[float]) -> Tensor:
        """Trains every site's models from the common one, each with several penalties on the distance from it.

        The penalty of a model of n rows is a strength over 2 n times the squared distance, biases included, added to
        the mean loss.

        Returns:
            The models (strengths, sites, folds + 1, dim)."""
        plan, first = _Steps(steps, step, 1.0), self._at(start, len(strengths))
        pull = Pull(self._decay(strengths, torch.ones(start.shape[-1])), first.models)
        last = self._carrier("near", steps, first, lambda walk, done: self._walk(walk, done, plan, pull))
        return last.models.unflatten(1, start.shape[:2])

    def least_penalties(
        self, start: Tensor, steps: int, step: float, penalties: Sequence[float], errors: float = 1.0
    ) -> Tensor:
        """Returns the smallest penalty of every site (sites,) that does as well as the best on held-out rows: it is
        behind by at most so many standard errors."""
        losses = self.penalised(start, steps, step, penalties).losses.nan_to_num(nan=torch.inf)
        means = torch.stack([self._means(rows) for rows in losses])
        best = means.argmin(dim=0)
        behind = losses - losses.gather(0, best[self.site_of_row].unsqueeze(0))
        distance = torch.stack([self._means(rows) for rows in behind])
        error = torch.stack([self._error(rows - mean[self.site_of_row]) for rows, mean in zip(behind, distance)])
        as_good = (distance <= errors * error).int()  # false where it is not finite
        return torch.tensor(penalties, dtype=torch.float64)[as_good.argmax(dim=0)]

    def _badness(self, outputs: Tensor) -> Tensor:
        """Returns how bad the output for every row is: 1 or 0 for a wrong or right label, else the loss; infinite where
        it is not finite."""
        if self.problem.classes is not None:
            wrong = 1.0 - self.problem.right(outputs, self.targets).double()
            return wrong.masked_fill(~outputs.isfinite().flatten(1).all(dim=1), torch.inf)
        losses = per_sample(self.problem.output_loss, outputs, self.targets).double()
        return losses.nan_to_num(nan=torch.inf)

    def _sums(self, values: Tensor) -> Tensor:
        """Returns the sum of the rows' numbers at every site."""
        return torch.zeros(len(self.sizes), dtype=torch.float64).index_add_(0, self.site_of_row, values)

    def _sums_without(self, values: Tensor, each_fold: bool) -> Tensor:
        """Returns the sum of the rows' numbers at every site, one per unit (sites, 1); for `each_fold` that of the rows
        outside it, and of all rows last (sites, folds + 1)."""
        total = (self._sums(values) * self.independent)[:, None]
        if not each_fold:
            return total
        of_folds = torch.zeros(len(self.sizes) * self.folds, dtype=torch.float64)
        of_folds.index_add_(0, self.site_of_row * self.folds + self.fold_of_row, values)
        inside = of_folds.view(-1, self.folds) * self.independent[:, None]
        return torch.cat([total - inside, total], dim=1)

    def _means(self, values: Tensor) -> Tensor:
        """Returns the mean of the rows' numbers at every site."""
        return self._sums(values) / self.sizes

    def _error(self, deviations: Tensor) -> Tensor:
        """Returns the standard error of every site's mean, by what its units deviate from it."""
        of_units = torch.zeros(len(self._site_of_unit), dtype=torch.float64)
        of_units = of_units.index_add_(0, self._unit_of_row, deviations).square()
        total = torch.zeros(len(self.sizes), dtype=torch.float64).index_add_(0, self._site_of_unit, of_units)
        counts = torch.bincount(self._site_of_unit, minlength=len(self.sizes))
        return (total * counts / (counts - 1).clamp(min=1)).sqrt() / self.sizes

    def _at(self, start: Tensor, times: int = 1) -> Walk:
        """Returns models (sites, folds + 1, dim) before their first step, as often as there are penalties."""
        models = start.to(self._device, self._dtype).reshape(1, len(self._trained.sites), -1).repeat(times, 1, 1)
        return Walk(models, torch.zeros_like(models), torch.zeros_like(models))

    def _trained_along(
        self, name: str, plan: _Steps, first: Averaging, looked: Callable[[Averaging, int], Averaging]
    ) -> Averaging:
        """Returns the state after all steps, where `looked` judges the models after some of them."""
        looks = {round(plan.steps * (j / _LOOKS) ** 2) for j in range(_LOOKS + 1)}

        def onwards(state: Averaging, done: int) -> Iterator[tuple[int, Averaging]]:
            for k, walk in self._walk(state.walk, done, plan):
                state = state._replace(walk=walk)
                if k in looks and (k > done or k == 0):
                    state = looked(state, k)
                yield k, state

        return self._carrier(name, plan.steps, first, onwards)

    def _walk(
        self, walk: Walk, done: int, plan: _Steps, pull: Pull | None = None, trained: Prepared | None = None
    ) -> Iterator[tuple[int, Walk]]:
        """Yields how many steps are done and the models then, from `done` on."""
        oracle = Oracle(
            trained or self._trained,
            torch.arange(len(self._trained.sites), device=self._device),
            self._identities.to(self._device),
            seeds=[self._seed] * len(walk.models),  # the same batches for all penalties
            dtype=self._dtype,
            trace=self._trace,
        )
        models, momenta, squares = walk
        yield done, walk
        for t in range(done, plan.steps):
            _, gradients = oracle.losses_and_gradients(models, torch.tensor(t, device=self._device), 0)
            if pull:
                gradients = gradients.addcmul(pull.strength, models if pull.to is None else models - pull.to)
            momenta = torch.lerp(momenta, gradients, 1.0 - _BETA1)
            squares = torch.lerp(momenta.square(), squares, _BETA2)
            length = plan.length * (1.0 - t / plan.steps) ** plan.power / models.shape[-1] ** 0.5
            models = models - length * momenta / ((squares / (1.0 - _BETA2 ** (t + 1))).sqrt() + _TINY)
            yield t + 1, Walk(models, momenta, squares)

    def _decay(self, penalties: Sequence[float], parameters: Tensor) -> Tensor:
        """Returns the multiple of each model that its penalty on some parameters adds to the gradient of its mean
        loss."""
        rows = torch.tensor([len(site.train) for site in self._trained.sites], device=self._device)
        by_row = torch.tensor(penalties, dtype=self._dtype, device=self._device)[:, None, None] / rows[:, None]
        return by_row * parameters.to(by_row)

    def in_large_batches(self) -> Prepared:
        """Returns the problem with batches that are nearly all rows of small sites, if the model is small: their noise
        would keep it away from the minimum that a penalty has."""
        sampling = self._trained.sampling
        if self.problem.flat_model.dim > _SMALL or sampling.batch >= _BATCH:
            return self._trained
        return self._trained.changed(sampling=dataclasses.replace(sampling, batch=_BATCH))


def penalties_for(problem: Prepared) -> tuple[float, ...]:
    """Returns the penalties that a site alone tries."""
    if problem.flat_model.dim > LARGE:
        return FEW_PENALTIES
    return PENALTIES if problem.classes is None else OF_LABELS


def refuse_streams(sets: Sequence[Samples], what: str) -> None:
    """Raises BadInput if samples are not in memory, for what needs all of them there."""
    if any(samples.stream for samples in sets):
        raise BadInput(
            f"{what} need samples in memory, but these are read from a Dataset when a batch needs them; give arrays, "
            "also of numpy.memmap, or keep parts of the model at each site"
        )


def _pool(problem: Prepared, i: int) -> tuple[Samples, Tensor]:
    """Returns all rows that a site may train its own model on, and which of them the common model has not seen."""
    site = problem.sites[i]
    shared = sum(other.validation is site.validation for other in problem.sites) > 1
    more = site.reserved if site.reserved is not None else None if shared else site.validation
    parts = [site.train] if more is None else [site.train, more]
    refuse_streams(parts, f"{site.name}: models of its own, and comparisons with them,")
    inputs, targets = (trees.joined([getattr(part, name) for part in parts]) for name in ("inputs", "targets"))
    pool = Samples(inputs, targets, units=joined_units(parts))
    return pool, torch.arange(len(pool)) >= len(site.train)


def _place_of_unit(pool: Samples) -> Tensor:
    """Returns the place of each row's unit among those of the site; each row is its own if none are known."""
    return torch.arange(len(pool)) if pool.units is None else pool.units.unique(return_inverse=True)[1]


def _folds_of(pool: Samples, unseen: Tensor, folds: int) -> Tensor:
    """Returns the fold of every row, one for all rows of a unit. Each fold has its share of the unseen rows and, as far
    as possible, of every class."""
    fold = torch.empty(len(pool), dtype=torch.int64)
    for part in (unseen, ~unseen):
        rows = part.nonzero().flatten()
        some = pool.take(rows)
        if some.units is None:
            fold[rows[order_by_class(some, "folds")]] = torch.arange(len(rows)) % folds
        else:
            fold[rows] = folds_of_units(some, folds, key_for("folds"))
    return fold


def rows_to_learn_from(problem: Prepared, i: int) -> Samples:
    """Returns the rows that a site may train its own model on."""
    return _pool(problem, i)[0]


def can_judge(problem: Prepared, i: int, rows: int = FEWEST_ROWS, units: int = FEWEST_UNITS) -> bool:
    """Returns whether a site has enough rows and units to judge models by rows that they have not seen."""
    return can_hold_out(rows_to_learn_from(problem, i), rows, units)


def in_folds(problem: Prepared, i: int, folds: int) -> tuple[Samples, Tensor]:
    """Returns a site's training rows, and the fold of each of them in a `CrossFit`."""
    pool, unseen = _pool(problem, i)
    return problem.sites[i].train, _folds_of(pool, unseen, folds)[~unseen]


def sites_at_once(
    problem: Prepared, sites: Sequence[int], folds: int, dtype: torch.dtype, penalties: int = 1
) -> list[list[int]]:
    """Returns the sites in portions whose rows and models take about a gibibyte."""
    portions: list[list[int]] = []
    used = 0.0
    for i in sites:
        numbers = len(rows_to_learn_from(problem, i)) * trees.numbers_per_sample(problem.sites[i].train.inputs)
        size = (folds + 1) * (12 * penalties * problem.flat_model.dim + 2 * numbers) * dtype.itemsize
        if not portions or used + size > 1 << 30:
            portions.append([])
            used = 0.0
        portions[-1].append(i)
        used += size
    return portions
