"""Losses and gradients of all hosted nodes at once, on batches drawn from counter-based streams."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from fairmesh.errors import BadInput
from fairmesh.numerics import random_streams
from fairmesh.numerics.round_cache import RoundCache
from fairmesh.numerics.tracing import Traced
from fairmesh.problems import convolutions
from fairmesh.problems.losses import as_floats, batch_error, batch_loss, weighted_loss
from fairmesh.problems.problem import Problem

AS_FLOATS_UP_TO = 1 << 28  # bytes; a CPU keeps smaller data as floats, to save the conversion in every round


class Oracle:
    """Computes f_i and its gradient at each hosted node's row.

    A replica has a seed and a placement: node i holds the data of site placement[i]."""

    def __init__(
        self,
        problem: Problem,
        hosted: Tensor,
        identities: Tensor,
        *,
        seeds: Sequence[int],
        placements: Tensor | None = None,  # (replicas, n)
        calls_per_round: int = 1,
        dtype: torch.dtype = torch.float32,
        data_device: torch.device | None = None,
        round_cache: RoundCache | None = None,
        trace: bool = True,  # trace model and loss once and replay their operations, on a CPU
    ):
        device = hosted.device
        self.problem, self.dtype = problem, dtype
        self.seeds = torch.tensor(list(seeds), dtype=torch.int64, device=device)
        self._identities, self._calls, self._round_cache = identities, calls_per_round, round_cache or RoundCache()
        self._data_device = data_device or device
        everywhere = torch.arange(problem.n).expand(len(self.seeds), -1)
        placements = (everywhere if placements is None else placements).to(device)
        self.prior = problem.prior_of_sites.to(device)[placements].unsqueeze(1).to(dtype)  # p (replicas, 1, n)
        sites = placements.index_select(1, hosted)  # (replicas, nodes)
        absent = set(sites.flatten().tolist()) - set(problem.here)
        if absent:
            raise BadInput(f"nodes hosted here hold the data of sites {sorted(absent)}, which is at another host")
        sizes = torch.tensor([len(site.train) for site in problem.sites], device=device)
        within = torch.zeros_like(sizes).index_fill_(0, torch.tensor(problem.here, device=device), 1) * sizes
        starts = within.cumsum(0) - within  # among the samples that are here
        self._sizes, self._starts = sizes[sites].unsqueeze(-1), starts[sites].unsqueeze(-1)
        self._largest, self._even = int(self._sizes.max()), bool((self._sizes == self._sizes.min()).all())
        held = [problem.sites[i].train for i in problem.here]
        inputs = torch.cat([samples.inputs for samples in held])
        floats = device.type == "cpu" and inputs.numel() * dtype.itemsize <= AS_FLOATS_UP_TO
        self._inputs = (as_floats(inputs, dtype) if floats else inputs).to(self._data_device)
        self._targets = torch.cat([samples.targets for samples in held]).to(self._data_device)
        self.model = problem.flat_model.to(device, dtype)
        draw_shape = (len(self.seeds), len(hosted))
        self.initial_rows = torch.stack([problem.initial_row(int(seed)) for seed in seeds]).to(device, dtype)
        self._shape = (*draw_shape, self.model.dim)
        full = problem.sampling.order == "full" and not self._even
        loss = (weighted_loss if full else batch_loss)(self.model, problem.loss, problem.augment)
        loss = convolutions.of_many(loss, draw_shape[0] * draw_shape[1], device)
        self._values = vmap(loss)
        self._errors = vmap(batch_error(self.model, problem.augment))
        gradients = vmap(grad_and_value(loss))
        self._gradients = Traced(gradients) if trace else gradients

    def initial_models(self) -> Tensor:
        """Returns the initial models, the same row at every node of a replica: (replicas, nodes, dim)."""
        return self.initial_rows.unsqueeze(1).expand(self._shape).clone()

    def losses_and_gradients(self, models: Tensor, round_index: Tensor, call: int) -> tuple[Tensor, Tensor]:
        """Returns losses (replicas, nodes, 1) and gradients (replicas, nodes, dim)."""
        rows = models.reshape(-1, models.shape[-1])
        gradients, losses = self._over_batches(self._gradients, rows, round_index, call)
        gradients = gradients.view(self._shape)
        if self.problem.weight_decay:
            gradients = gradients.add_(models, alpha=self.problem.weight_decay)
        if self.problem.clip_norm is not None:
            norms = torch.linalg.vector_norm(gradients, dim=-1, keepdim=True)
            gradients = gradients.mul_((self.problem.clip_norm / norms.clamp(min=1e-30)).clamp_(max=1.0))
        return losses.view(*self._shape[:-1], 1), gradients

    def losses(self, models: Tensor, round_index: Tensor, call: int) -> Tensor:
        """Returns losses (replicas, nodes, 1)."""
        return self._measured(self._values, models, round_index, call)

    def errors(self, models: Tensor, round_index: Tensor, call: int) -> Tensor:
        """Returns the share of each node's batch that its row misclassifies: (replicas, nodes, 1)."""
        if self.problem.classes is None:
            raise BadInput("the 0-1 error needs class labels, which this problem does not have; use ascends = 'loss'")
        return self._measured(self._errors, models, round_index, call)

    def _measured(self, function: Callable, models: Tensor, round_index: Tensor, call: int) -> Tensor:
        rows = models.reshape(-1, models.shape[-1])
        with torch.no_grad():
            (values,) = self._over_batches(lambda *a: (function(*a),), rows, round_index, call)
        return values.view(*self._shape[:-1], 1)

    def _over_batches(self, function: Callable, rows: Tensor, round_index: Tensor, call: int) -> tuple[Tensor, ...]:
        """Returns the mean of `function` over the batches of a step."""
        repeats = 1 if self.problem.sampling.order == "full" else self.problem.sampling.batches_per_step
        total = function(rows, *self._batch(round_index, call * repeats, self._calls * repeats))
        for k in range(1, repeats):
            more = function(rows, *self._batch(round_index, call * repeats + k, self._calls * repeats))
            total = tuple(a + b for a, b in zip(total, more))
        return total if repeats == 1 else tuple(a / repeats for a in total)

    def _indices(self, rounds: Tensor, call: int, calls: int) -> Tensor:
        """Returns the index, among all sites' samples, of each sample in a batch: (rounds, replicas, nodes, batch)."""
        sampling, device = self.problem.sampling, self.seeds.device
        if sampling.order == "full":
            steps = torch.arange(self._largest, device=device).expand(len(rounds), 1, 1, -1)
            return self._starts + steps % self._sizes
        if sampling.order == "cyclic":
            first = (rounds * calls + call) * sampling.batch
            steps = first[:, None, None, None] + torch.arange(sampling.batch, device=device)
            return self._starts + steps % self._sizes
        key = random_streams.keys(self.seeds, f"batch {call}", rounds.unsqueeze(-1), self._identities)
        return self._starts + random_streams.integers(key, sampling.batch, self._sizes)

    def _batch(self, round_index: Tensor, call: int, calls: int) -> tuple[Tensor, ...]:
        """Returns inputs, targets, the key of the model's random numbers, and sample weights of a padded full batch."""
        device = self.seeds.device

        def indices(rounds: Tensor) -> Tensor:
            return self._indices(rounds, call, calls).flatten(1).to(self._data_device)

        def keys(rounds: Tensor) -> Tensor:
            return random_streams.keys(self.seeds, f"model {call}", rounds.unsqueeze(-1), self._identities).flatten(1)

        chosen = self._round_cache.at(("batch", call), indices, round_index)
        shape = (self._shape[0] * self._shape[1], -1)
        inputs = self._inputs.index_select(0, chosen).to(device, non_blocking=True)
        targets = self._targets.index_select(0, chosen).to(device, non_blocking=True)
        key = self._round_cache.at(("model", call), keys, round_index)
        floats = targets.to(self.dtype) if targets.is_floating_point() else targets
        batch = (as_floats(inputs, self.dtype).unflatten(0, shape), floats.unflatten(0, shape), key)
        if self.problem.sampling.order == "full" and not self._even:
            steps = torch.arange(self._largest, device=device)
            weights = (steps < self._sizes).to(self.dtype) / self._sizes
            return *batch, weights.flatten(0, 1)
        return batch
