"""Losses and gradients of all hosted nodes, differentially private per unit: the only way to the rows of a private run.

In every evaluation a node draws its units by chance, clips what each of them contributes, sums, adds Gaussian noise,
and divides by the number of units that it expects. Gradient and loss come from the same draw, as one release. All that
happens to them later, such as weights, momentum, compression and gossip, uses no rows.
"""

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from fairmesh.data.rows import SampleRows
from fairmesh.data.samples import Samples
from fairmesh.data.sealed import rows_of_units
from fairmesh.errors import BadInput
from fairmesh.numerics import random_streams, trees
from fairmesh.numerics.random_streams import Draw, SecretIdentities
from fairmesh.numerics.round_cache import RoundCache
from fairmesh.numerics.tracing import values_readable
from fairmesh.privacy.accounting import shared_noise
from fairmesh.privacy.secret_draws import ModelDigests, SecretDraws
from fairmesh.problems.batches import RowSource
from fairmesh.problems.gradient_path import AskedGradients, gradient_path
from fairmesh.problems.hosted_nodes import HostedNodes
from fairmesh.problems.judge import Standard
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.private_run import PrivateRun
from fairmesh.problems.row_loss import as_floats
from fairmesh.problems.unit_gradients import UnitBatch, unit_gradients

_SLACK = 2.0**-8  # of the clip: a quarter covers rounding to a grid, half that of sums, and a quarter products in TF32
NUMBERS_AT_ONCE = {"cpu": 1 << 26, "cuda": 1 << 29}  # numbers of units' gradients that are held at once


class _Division(NamedTuple):
    """What algorithms ask about rows that judge: there are none apart from those that train."""

    apart: Tensor
    rejoin: int | None = None


class Clipped(NamedTuple):
    """Sums over the units of a draw, before noise."""

    gradients: Tensor  # (nodes, dim) float64
    losses: Tensor  # minus their centre (nodes, 1) float64


class PrivateOracle:
    """Computes f_i and its gradient at each hosted node's row, clipped per unit and noised.

    Args:
        problem: The problem, whose training rows are sealed.
        hosted: The numbers of the hosted nodes.
        identities: Those of their public random streams, such as dropout's.
        seeds: The seed of each replica.
        private: Rates, noise and secrets, and who is asked before a release.
        placements: The sites at all nodes (replicas, n).
        splits: The split of each replica.
        dtype: Of the models.
        data_device: Where the rows are kept.
        round_cache: What depends on the round alone.
    """

    worker = None

    def __init__(
        self,
        problem: Prepared,
        hosted: Tensor,
        identities: Tensor | SecretIdentities,
        *,
        seeds: Sequence[int],
        private: PrivateRun,
        placements: Tensor | None = None,
        splits: Sequence[int] = (),
        dtype: torch.dtype = torch.float32,
        data_device: torch.device | None = None,
        round_cache: RoundCache | None = None,
    ):
        self.problem, self.dtype, self._private = problem, dtype, private
        self._nodes = nodes = HostedNodes(problem, hosted, identities, seeds, placements, splits, dtype)
        self.seeds, device = nodes.seeds, nodes.device
        every = problem.every_split
        prior = torch.cat([split.prior_of_sites for split in every])
        self.prior = nodes.of_all(prior).to(dtype)
        units = torch.tensor([len(site.train) for split in every for site in split.sites], device=device)
        self.sizes, self.all_sizes = nodes.of_sites(units), nodes.of_all(units)  # units, not rows
        self.model = problem.flat_model.to(device, dtype)
        start = torch.stack([problem.initial_whole_row(int(seed)) for seed in seeds]).to(device, dtype)
        self.initial_rows = start[..., : self.model.dim]
        self.standard, self.division = Standard(), _Division(torch.zeros_like(self.sizes))
        self._path = tuple(gradient_path(problem).values())
        self._evaluated: set[int] | None = None  # calls of the present round; None before the first
        self._last_losses: Tensor | None = None
        self._units = _Units(nodes, private.privacy.rows_per_unit, data_device or device, dtype)
        self.source = self._units.source(round_cache or RoundCache())
        self._mechanism = _Mechanism(nodes, private, self.model.dim)
        self._gradients = unit_gradients(problem, self.model, self._units.width)

    def begin_round(self) -> None:
        """Forgets which releases the round before has made."""
        self._evaluated = set()

    def initial_models(self) -> Tensor:
        """Returns the initial models, the same row at every node of a replica: (replicas, nodes, dim)."""
        return self.initial_rows.unsqueeze(1).expand(*self._nodes.shape, -1).clone()

    def initial_own(self) -> Tensor:
        """Returns own parts, of which there are none: (replicas, nodes, 0)."""
        return self.initial_models()[..., :0]

    def losses_and_gradients(self, models: Tensor, round_index: Tensor, call: int) -> tuple[Tensor, Tensor]:
        """Returns noised losses (replicas, nodes, 1) and noised gradients, of the same shape as the models."""
        losses, gradients = self._released(models, round_index, call)
        gradients = gradients.view_as(models)

        def draws(purpose: str) -> Draw:
            keys = self._nodes.keys(f"{purpose} {call}", round_index.reshape(1, 1))
            return Draw(keys.squeeze(0), self.dtype)

        asked = AskedGradients(models, draws, _refused("gradients of single samples"))
        for link in self._path:
            link.apply(gradients, asked)
        return losses.view(*self._nodes.shape, 1), gradients

    def losses(self, models: Tensor, round_index: Tensor, call: int) -> Tensor:
        """Returns noised losses (replicas, nodes, 1). They cost as much as a gradient does."""
        return self._released(models, round_index, call)[0].view(*self._nodes.shape, 1)

    def released_loss(self) -> float:
        """Returns the noised loss of the first hosted node in the last round; NaN if none was released."""
        if self._last_losses is None or self._private.loss_share == 0:
            return float("nan")
        return float(self._last_losses[0])

    def errors(self, *_: Any) -> Any:
        """Refuses: 0-1 errors are no release of a private run."""
        return _refused('the 0-1 error (ascends = "error")')()

    sample_losses = sample_gradients = by_subgroup = trained = errors

    def step_of_weights(self, step: Any, round_index: Tensor) -> Any:
        """Returns a step of the weights, which follow the losses in all rounds."""
        return step

    def _released(self, models: Tensor, round_index: Tensor, call: int) -> tuple[Tensor, Tensor]:
        """Returns noised losses (nodes, 1) and gradients (nodes, dim) at a stack of models."""
        if not 0 <= call < self._private.calls:
            raise BadInput(
                f"the algorithm evaluates batch {call} of a round, but its oracle_calls() says that a round has "
                f"{self._private.calls}; the budget is for as many: correct it"
            )
        if self._evaluated is None:
            raise BadInput("the algorithm evaluates a batch before round 0, which privacy does not count; leave it out")
        if call in self._evaluated:
            raise BadInput(
                f"the algorithm evaluates batch {call} of a round twice, and each time is a release; privacy counts "
                "one per batch: leave out what asks again, such as local steps that limit drift"
            )
        self._evaluated.add(call)
        rows = models.reshape(-1, models.shape[-1])
        mechanism = self._mechanism
        nonces = mechanism.nonces(rows, round_index, call)
        allowed = mechanism.allowed(round_index, call, nonces)
        numbers, present = mechanism.drawn(nonces)
        keys = self._nodes.keys(f"model {call}", round_index.reshape(1, 1)).flatten()
        clipped = self._clipped(rows, numbers, present, keys)
        losses, gradients = mechanism.noised(clipped, nonces, allowed)
        if call == 0:
            self._last_losses = losses
        return losses.to(self.dtype), gradients.to(self.dtype)

    def _clipped(self, rows: Tensor, numbers: Tensor, present: Tensor, keys: Tensor) -> Clipped:
        """Returns the sums of the clipped contributions of the units that are present.

        Args:
            rows: The models (nodes, dim).
            numbers: The number of each drawn unit among those of its node (nodes, units).
            present: Whether it was drawn, or only fills up the shape (nodes, units).
            keys: Those of the models' public random numbers (nodes,).
        """
        mechanism, count = self._mechanism, numbers.shape[1]
        gradients = torch.zeros(rows.shape, dtype=torch.float64, device=rows.device)
        losses = torch.zeros(len(rows), 1, dtype=torch.float64, device=rows.device)
        width = self._units.width * self._gradients.numbers(*rows.shape)
        at_once = max(1, NUMBERS_AT_ONCE[rows.device.type] // max(1, width))
        unit_keys = random_streams.epoch_keys(keys, torch.arange(count, device=keys.device))
        offsets = mechanism.row_offsets(numbers) if self._units.chooses_rows else None
        for first in range(0, count, at_once):
            here = slice(first, first + at_once)
            taken = self._units.taken(numbers[:, here], None if offsets is None else offsets[:, here])
            sums, values = self._summed(rows, UnitBatch(*taken, unit_keys[:, here]), present[:, here])
            gradients += sums
            losses += mechanism.clipped_losses(values, present[:, here]).sum(dim=1, keepdim=True)
        return Clipped(gradients, losses)

    def _summed(self, rows: Tensor, batch: UnitBatch, present: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sums (nodes, dim) of the units' clipped gradients, and the units' losses (nodes, units). Where
        the model or the loss raises, as it may on numbers that it has not met before, units are evaluated one by one,
        and those on which it raises count as if their gradients were not finite: else a single unit would decide when
        the run ends."""

        def sums(rows: Tensor, batch: UnitBatch, present: Tensor) -> tuple[Tensor, Tensor]:
            return self._gradients.sums(rows, batch, functools.partial(self._mechanism.factors, present=present))

        try:
            return sums(rows, batch, present)
        except Exception as error:  # whatever the user's code raises
            if not values_readable(rows):
                raise
            warnings.warn(
                f"the model or the loss raises {type(error).__name__} on units of this site, which contribute nothing",
                stacklevel=2,
            )
        gradients = torch.zeros(rows.shape, dtype=torch.float64)
        losses = torch.full(present.shape, torch.nan, dtype=rows.dtype)
        for k, j in itertools.product(*map(range, present.shape)):
            node, unit = slice(k, k + 1), slice(j, j + 1)
            with contextlib.suppress(Exception):
                summed, losses[node, unit] = sums(rows[node], batch.at(node, unit), present[node, unit])
                gradients[node] += summed
        return gradients, losses


def _refused(what: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> NoReturn:
        raise BadInput(f"{what} would read training rows without noise, which a private run does not do; leave it out")

    return refuse


class _Units:
    """The units of the hosted nodes, and their rows.

    Args:
        nodes: The hosted nodes.
        most_rows: How many rows of a unit are looked at.
        device: Where the rows are kept.
        dtype: Of inputs.
    """

    def __init__(self, nodes: HostedNodes, most_rows: int, device: torch.device, dtype: torch.dtype):
        problem = nodes.problem
        sets = [_opened(samples) for samples in problem.train_sets]
        orders, lengths, first, base = [], [], {}, 0
        for (k, i), samples in zip(((k, i) for k in range(len(problem.every_split)) for i in problem.here), sets):
            units = torch.arange(len(samples)) if samples.units is None else samples.units
            _, owners, counts = units.unique(return_inverse=True, return_counts=True)
            first[k * problem.n + i] = sum(len(part) for part in lengths)
            orders.append(base + owners.argsort(stable=True))
            lengths.append(counts)
            base += len(samples)
        self._rows = SampleRows(sets, device, torch.cat(orders), lambda part: as_floats(part, dtype))
        sizes = torch.cat(lengths)
        self._lengths = sizes.to(nodes.device)
        self._starts = (sizes.cumsum(0) - sizes).to(nodes.device)
        self.width = rows_of_units(sets, most_rows)
        self.chooses_rows = int(sizes.max()) > most_rows
        places = torch.tensor([first.get(k, 0) for k in range(problem.n * len(problem.every_split))])
        self._first = nodes.of_sites(places).flatten(0, 1)  # the first unit of each node (nodes, 1)
        self._device, self._dtype = device, dtype

    def source(self, round_cache: RoundCache) -> RowSource:
        """Returns what the round loop asks about streams, which are refused here."""
        return RowSource(self._rows, round_cache)

    def taken(self, numbers: Tensor, offsets: Tensor | None) -> tuple[Any, Any, Tensor]:
        """Returns inputs and targets of the rows of units (nodes, units, rows, ...), and what each row counts. Of a
        unit with more rows, those that follow an offset in [0, 1) of its length are taken."""
        units = self._first + numbers
        lengths, starts = self._lengths[units].unsqueeze(-1), self._starts[units].unsqueeze(-1)
        steps = torch.arange(self.width, device=numbers.device)
        if offsets is not None:
            steps = steps + torch.where(lengths > self.width, (offsets.unsqueeze(-1) * lengths).long(), 0)
        rows = starts + steps % lengths
        weights = (torch.arange(self.width, device=numbers.device) < lengths).to(self._dtype)
        weights = weights / lengths.clamp(max=self.width)
        inputs, targets = self._rows.take(rows.flatten().to(self._device))

        def shaped(part: Tensor) -> Tensor:
            return part.to(numbers.device, non_blocking=True).unflatten(0, rows.shape)

        return trees.mapped(shaped, inputs), trees.mapped(shaped, targets), weights


def _opened(samples: Samples) -> Samples:
    if samples.sealed is None:
        raise BadInput("a private run takes sealed rows; fm.train seals them")
    return samples.sealed.opened()


class _Mechanism:
    """Draws units, clips, and adds noise: the truncated Poisson subsampled Gaussian mechanism.

    Args:
        nodes: The hosted nodes.
        private: Rates, noise, secrets, and who is asked before a release.
        dim: The number of parameters.
    """

    def __init__(self, nodes: HostedNodes, private: PrivateRun, dim: int):
        self._private, self._rows, device = private, nodes.rows, nodes.device
        secrets = private.secrets_of(nodes)
        self._for_units = SecretDraws(secrets, "units", device)
        self._for_rows = SecretDraws(secrets, "rows", device)
        self._for_noise = SecretDraws(secrets, "noise", device)
        self._digests = ModelDigests(secrets, device)
        sites = private.releases
        of = functools.partial(_per_node, nodes)
        self._units = of([site.units for site in sites])  # (nodes, 1)
        self._rates, self._most = of([site.rate for site in sites]), of([site.most for site in sites])
        self._expected = self._rates * self._units
        noise = [shared_noise(site.noise, private.loss_share) for site in sites]
        privacy = private.privacy
        self._clip, self._centre = privacy.clip, private.loss_clip / 2
        # Sums are rounded to a grid, on which the noise lies too, so that the last bits of a float tell nothing.
        self._grid = 2.0 ** torch.tensor(self._clip * _SLACK / 4 / dim**0.5).double().log2().floor().item()
        self._loss_grid = 2.0 ** torch.tensor(self._centre * _SLACK / 4).double().log2().floor().item()
        self._largest = self._clip * (1 - _SLACK)
        self._deviation = of([self._clip * gradient for gradient, _ in noise])
        self._loss_deviation = of([self._centre * loss for _, loss in noise])
        self._with_losses, self._dim = private.loss_share > 0, dim
        self._shape, self._most_units = max(site.most for site in sites), max(site.units for site in sites)
        self._present = torch.arange(self._shape, device=device)
        self._known_units = torch.arange(self._most_units, device=device)

    def nonces(self, rows: Tensor, round_index: Tensor, call: int) -> Tensor:
        """Returns what draws are a function of besides secret, purpose and generation: round, call and a digest of the
        model that is evaluated, (nodes, 3) int32."""
        moment = (round_index * self._private.calls + call).to(torch.int32).reshape(1, 1).expand(self._rows, 1)
        return torch.cat([moment.to(rows.device), self._digests.of(rows)], dim=1)

    def allowed(self, round_index: Tensor, call: int, nonces: Tensor) -> Tensor | None:
        """Returns which nodes may release (nodes, 1), after their ledgers were written; None if all may."""
        if self._private.charge is None:
            return None
        allowed = self._private.charge(int(round_index), call, nonces)
        return torch.tensor(allowed, device=nonces.device).view(-1, 1)

    def drawn(self, nonces: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the numbers of units of each node, and which of them were drawn: (nodes, units) each. A unit is drawn
        if its uniform number lies below the rate; if more are drawn than the shape holds, those with the smallest
        numbers, which is a uniformly random subset."""
        uniforms = self._for_units.uniforms(nonces, self._most_units)
        uniforms = torch.where(self._known_units < self._units, uniforms, 2.0)  # of smaller sites
        smallest, numbers = uniforms.topk(self._shape, dim=1, largest=False)
        present = (smallest < self._rates) & (self._present < self._most)
        self._nonces = nonces
        return torch.where(present, numbers, 0), present

    def row_offsets(self, numbers: Tensor) -> Tensor:
        """Returns where the rows begin that are taken of a unit with many, in [0, 1) of its length."""
        drawn = self._for_rows.uniforms(self._nonces, self._most_units)
        return drawn.gather(1, numbers)

    def factors(self, norms: Tensor, present: Tensor) -> Tensor:
        """Returns what gradients with these norms are multiplied with so that none is longer than the clip; 0 for units
        that are not present, and for those whose gradient is not finite."""
        scale = (self._largest / norms.clamp(min=1e-30)).clamp(max=1.0)
        return torch.where(present & norms.isfinite(), scale, 0.0)

    def clipped_losses(self, losses: Tensor, present: Tensor) -> Tensor:
        """Returns losses minus their centre, of which none is larger than the centre; 0 for units not present."""
        centre = self._centre
        bounded = torch.where(losses.isfinite(), losses.double(), 2 * centre) - centre
        return bounded.clamp(-centre * (1 - _SLACK), centre * (1 - _SLACK)) * present

    def noised(self, clipped: Clipped, nonces: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the means over the expected units with noise: losses (nodes, 1) and gradients (nodes, dim). A node
        that may not release has a gradient of zero and the centre as its loss."""
        noise = self._for_noise.normals(nonces, self._dim + 1)
        of_gradient = (noise[:, :-1] * self._deviation / self._grid).round_()
        gradients = ((clipped.gradients / self._grid).round_() + of_gradient) * (self._grid / self._expected)
        losses = torch.full_like(clipped.losses, self._centre)
        if self._with_losses:
            of_loss = (noise[:, -1:] * self._loss_deviation / self._loss_grid).round_()
            sums = ((clipped.losses / self._loss_grid).round_() + of_loss) * self._loss_grid
            losses += sums / self._expected
        if allowed is not None:
            gradients, losses = gradients * allowed, torch.where(allowed, losses, self._centre)
        return losses.clamp_(min=0.0), gradients


def _per_node(nodes: HostedNodes, numbers: Sequence[float]) -> Tensor:
    """Returns the entry of each hosted node among those of the sites of all splits: (nodes, 1), float64."""
    return nodes.of_sites(torch.tensor(numbers, dtype=torch.float64)).flatten(0, 1)
