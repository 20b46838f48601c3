"""Losses and gradients of all hosted nodes at once: what algorithms ask for.

`Batches` says which rows a node sees in a round, `Losses` what its model makes of them, `Judge` which of the losses the
weights follow, `Standard` what these are compared with, and the gradient path what is done with gradients.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fairmesh.errors import BadInput
from fairmesh.numerics.random_streams import Draw, SecretIdentities
from fairmesh.numerics.round_cache import RoundCache
from fairmesh.problems.batches import Batches
from fairmesh.problems.gradient_path import AskedGradients, gradient_path, validated_decay
from fairmesh.problems.hosted_nodes import HostedNodes, division_of
from fairmesh.problems.judge import judge_of, standard_of
from fairmesh.problems.local_work import LocalWorker, Work
from fairmesh.problems.losses_of_nodes import Losses
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.stacking import Precision
from fairmesh.problems.subgroups import Seen, SubgroupLosses
from fairmesh.trainers.local_trainer import LocalTrainer


class Oracle:
    """Computes f_i and its gradient at each hosted node's row.

    A replica has a seed, a placement and a split of the data: node i holds the rows of site placement[i] in that
    split."""

    def __init__(
        self,
        problem: Prepared,
        hosted: Tensor,
        identities: Tensor | SecretIdentities,
        *,
        seeds: Sequence[int],
        placements: Tensor | None = None,  # (replicas, n)
        splits: Sequence[int] = (),  # the split of each replica
        calls_per_round: int = 1,
        dtype: torch.dtype = torch.float32,
        data_device: torch.device | None = None,
        round_cache: RoundCache | None = None,
        trace: bool = True,  # trace model and loss once and replay their operations, on a CPU
        precision: Precision = "float32",  # of the gradients
    ):
        self.problem, self.dtype = problem, dtype
        self._nodes = nodes = HostedNodes(problem, hosted, identities, seeds, placements, splits, dtype)
        self.seeds, self._round_cache = nodes.seeds, round_cache or RoundCache()
        every = problem.every_split
        prior = torch.cat([split.prior_of_sites for split in every])
        self.prior = nodes.of_all(prior).to(dtype)  # p (replicas, 1, n)
        rows = torch.tensor([len(site.train) for split in every for site in split.sites], device=nodes.device)
        self.sizes, self.all_sizes = nodes.of_sites(rows), nodes.of_all(rows)  # training rows of the nodes
        self.model = problem.flat_model.to(nodes.device, dtype, short_floats=precision == "bf16")
        start = torch.stack([problem.initial_whole_row(int(seed)) for seed in seeds]).to(nodes.device, dtype)
        self.initial_rows, self._initial_own = start.split([self.model.dim, self.model.own_dim], dim=-1)
        division = division_of(nodes, rows)
        self.batches = Batches(nodes, division, calls_per_round, data_device or nodes.device, self._round_cache)
        self.division, self.source = division, self.batches.source
        self._losses = Losses(nodes, self.model, self.batches.weighted, trace, precision)
        self._judge, self.standard = judge_of(nodes, division, self.batches, self._losses), standard_of(nodes)
        decay = validated_decay(nodes, self.all_sizes, self.model.layout, dtype)
        self._path = (*gradient_path(problem).values(), *decay)

    @functools.cached_property
    def worker(self) -> LocalWorker | None:
        """Who calls the sites' own training functions; None if the problem has none."""
        if self.problem.trainer is None:
            return None
        return LocalWorker(
            cast(LocalTrainer, self.problem.trainer), self.model, self._nodes, self.division, self.batches
        )

    @functools.cached_property
    def subgroups(self) -> SubgroupLosses:
        """The losses by subgroup, if subgroups have weights."""
        return SubgroupLosses(self._nodes, self.batches, self._losses, self._judge)

    def begin_round(self) -> None:
        """Is told that a round begins, which a private run's oracle needs to know."""

    def initial_models(self) -> Tensor:
        """Returns the initial models, the same row at every node of a replica: (replicas, nodes, dim)."""
        return self._everywhere(self.initial_rows)

    def initial_own(self) -> Tensor:
        """Returns the own parts that nodes start from, the same at every node of a replica: (replicas, nodes,
        own_dim)."""
        return self._everywhere(self._initial_own)

    def _everywhere(self, rows: Tensor) -> Tensor:
        return rows.unsqueeze(1).expand(*self._nodes.shape, -1).clone()

    def losses_and_gradients(self, models: Tensor, round_index: Tensor, call: int) -> tuple[Tensor, Tensor]:
        """Returns the losses that weights follow (replicas, nodes, 1), and gradients on the nodes' batches, of the same
        shape as the models: (replicas, nodes, dim + own_dim), where the own parts follow the shared parameters."""
        rows = _stacked(models)
        function = functools.partial(self._losses.gradients, rows)
        gradients, on_batch = self.batches.mean(function, round_index, call)
        gradients = self._through_path(gradients.view_as(models), models, round_index, call)
        return self._compared(self._judge.settled(on_batch, rows, round_index, call)), gradients

    def by_subgroup(
        self, models: Tensor, round_index: Tensor, call: int, ratios: Tensor
    ) -> tuple[Tensor, Tensor, Seen]:
        """Returns losses and gradients with each row's loss multiplied by the ratio of its subgroup (replicas, nodes,
        subgroups), and the losses by subgroup on the rows that judge."""
        gradients, losses, seen = self.subgroups.gradients(_stacked(models), round_index, call, ratios)
        return self._compared(losses), self._through_path(gradients.view_as(models), models, round_index, call), seen

    def trained(self, models: Tensor, round_index: Tensor, call: int, memory: Tensor, at_work: Tensor | None) -> Work:
        """Returns what the sites' own training functions make of the models, with the losses that weights follow.

        Args:
            models: The parameters at the start (replicas, nodes, dim + own_dim).
            round_index: The round.
            call: Which batch fairmesh uses to measure losses.
            memory: What the functions have kept (replicas, nodes, length).
            at_work: Which nodes work (replicas, nodes). The others have no update and no loss. None for all.
        """
        work = cast(LocalWorker, self.worker).work(models, round_index, call, memory, at_work)
        updates = self._through_path(work.updates, models[..., : self.model.dim], round_index, call)
        on_batch = work.losses.flatten()
        losses = self._compared(self._judge.settled(on_batch, _stacked(models), round_index, call))
        unknown = losses.isnan()
        if bool(unknown.any()):
            losses = torch.where(unknown, self.losses(models, round_index, call), losses)
        return work._replace(losses=losses, updates=updates)

    def _through_path(self, gradients: Tensor, models: Tensor, round_index: Tensor, call: int) -> Tensor:
        """Returns gradients after every link of the gradient path, changed in place. The statistics of BatchNorm layers
        stay as they are."""
        trained = self.model.dim + self.model.local_dim
        changed, at = (gradients[..., :trained], models[..., :trained]) if self.model.own_dim else (gradients, models)

        def draws(purpose: str) -> Draw:
            keys = self._nodes.keys(f"{purpose} {call}", round_index.reshape(1, 1))
            return Draw(keys.squeeze(0), self.dtype)

        def of_samples() -> Tensor:
            return self.sample_gradients(models, round_index, call)[..., :trained]

        asked = AskedGradients(at, draws, of_samples)
        for link in self._path:
            link.apply(changed, asked)
        return gradients

    def _compared(self, losses: Tensor) -> Tensor:
        """Returns the losses of a stack (nodes,), compared with what the objective says: (replicas, nodes, 1)."""
        return self.standard.excess(losses.view(*self._nodes.shape, 1))

    def losses(self, models: Tensor, round_index: Tensor, call: int) -> Tensor:
        """Returns the losses that weights follow (replicas, nodes, 1)."""
        return self._compared(self._judge.losses(_stacked(models), round_index, call))

    def errors(self, models: Tensor, round_index: Tensor, call: int) -> Tensor:
        """Returns the share of the rows that judge each node which its model misclassifies: (replicas, nodes, 1)."""
        return self._judge.errors(_stacked(models), round_index, call).view(*self._nodes.shape, 1)

    def sample_losses(self, models: Tensor, round_index: Tensor, call: int) -> Tensor:
        """Returns the loss of every sample of each node's batch: (replicas, nodes, samples)."""
        with torch.no_grad():
            return self._of_samples(self._losses.of_samples, models, round_index, call)

    def sample_gradients(self, models: Tensor, round_index: Tensor, call: int) -> Tensor:
        """Returns the gradient of every sample's loss, without the gradient path: (replicas, nodes, samples,
        dim + own_dim)."""
        return self._of_samples(self._losses.gradients_of_samples, models, round_index, call)

    def _of_samples(self, function: Callable[..., Tensor], models: Tensor, round_index: Tensor, call: int) -> Tensor:
        if self.batches.padded:
            raise BadInput(
                "losses and gradients of single samples need batches of one length; with order = 'full' sites of "
                "unequal size have none: use Sampling(batch=...)"
            )
        of_batch = functools.partial(function, _stacked(models))
        return self.batches.joined(of_batch, round_index, call).unflatten(0, self._nodes.shape)

    def step_of_weights(self, step: Any, round_index: Tensor) -> Any:
        """Returns a step of the weights while they follow the losses, and 0 once they only remember them."""
        rejoin = self.division.rejoin
        return step if rejoin is None else step * (round_index < rejoin).to(self.dtype)


def _stacked(models: Tensor) -> Tensor:
    """Returns models (replicas, nodes, any) as rows."""
    return models.reshape(-1, models.shape[-1])
