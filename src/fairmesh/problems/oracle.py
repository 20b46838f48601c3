"""Losses and gradients of all hosted nodes at once, on batches drawn from counter-based streams."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import jacrev

from fairmesh.data.rows import Ahead, SampleRows
from fairmesh.data.samples import Samples
from fairmesh.data.site import Site
from fairmesh.errors import BadInput
from fairmesh.numerics import random_streams, trees
from fairmesh.numerics.random_streams import SecretIdentities
from fairmesh.numerics.round_cache import RoundCache
from fairmesh.numerics.trees import Tree
from fairmesh.problems import convolutions
from fairmesh.problems.local_work import LocalWorker, Node, Work, no_memory
from fairmesh.problems.objective import LEARNABLE, held_out_last
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.row_loss import (
    as_floats,
    batch_error,
    batch_loss,
    evaluation_errors,
    evaluation_losses,
    losses_of_rows,
    weighed,
)
from fairmesh.problems.stacking import Precision, gradients, over_models, replayed
from fairmesh.problems.subgroups import Seen, seen_in
from fairmesh.trainers.local_trainer import LocalTrainer, SiteData

Wanted = Callable[[Tensor], tuple[Tensor, Tensor | None]]  # rounds -> rows to read, and their seeds

AS_FLOATS_UP_TO = 1 << 28  # bytes; a CPU keeps smaller data as floats, to save the conversion in every round


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
        splits: Sequence[int] | None = None,  # the split of each replica
        calls_per_round: int = 1,
        dtype: torch.dtype = torch.float32,
        data_device: torch.device | None = None,
        round_cache: RoundCache | None = None,
        trace: bool = True,  # trace model and loss once and replay their operations, on a CPU
        precision: Precision = "float32",  # of the gradients
    ):
        device = hosted.device
        self.problem, self.dtype, self._hosted = problem, dtype, hosted.tolist()
        self.seeds = torch.tensor(list(seeds), dtype=torch.int64, device=device)
        self._identities, self._calls, self._round_cache = identities, calls_per_round, round_cache or RoundCache()
        self._data_device = data_device or device
        everywhere = torch.arange(problem.n).expand(len(self.seeds), -1)
        placements = (everywhere if placements is None else placements).to(device)
        absent = set(placements.index_select(1, hosted).flatten().tolist()) - set(problem.here)
        if absent:
            raise BadInput(f"nodes hosted here hold the data of sites {sorted(absent)}, which is at another host")
        # Site i of split k is number k n + i among the sites of all splits.
        every = problem.every_split
        first_of_split = problem.n * torch.tensor(splits or [0] * len(self.seeds), device=device).unsqueeze(-1)
        placements = placements + first_of_split
        prior = torch.cat([split.prior_of_sites for split in every])
        self.prior = prior.to(device)[placements].unsqueeze(1).to(dtype)  # p (replicas, 1, n)
        self._sites = sites = placements.index_select(1, hosted)  # (replicas, nodes)
        sizes = torch.tensor([len(site.train) for split in every for site in split.sites], device=device)
        self.sizes, self.all_sizes = sizes[sites].unsqueeze(-1), sizes[placements].unsqueeze(1)  # (..., nodes, 1)
        # Where the rows of each site of each split begin among those that are here.
        here = torch.zeros(problem.n, dtype=sizes.dtype).index_fill_(0, torch.tensor(problem.here), 1)
        rows_here = here.to(device).repeat(len(every)) * sizes
        starts = rows_here.cumsum(0) - rows_here
        self._starts = starts[sites].unsqueeze(-1)
        self._trained_sizes: Tensor | None = None  # where rows are held out
        even = bool((self.sizes == self.sizes.min()).all()) and problem.objective.judged_on != "held-out"
        self._largest, self._padded = int(self.sizes.max()), problem.sampling.order == "full" and not even
        self._weighted = self._padded or problem.objective.subgroups is not None
        held = [split.sites[i].train for split in every for i in problem.here]
        self._judge: tuple[Tensor, Tensor] | None = None  # first row and number of rows that judge each hosted node
        self.rows_apart = torch.zeros_like(self.sizes)  # how many of these are not trained on (replicas, nodes, 1)
        order: Tensor | None = None
        if problem.objective.judged_on == "validation":
            held += self._judge_by_validation_sets(int(rows_here.sum()))
        elif problem.objective.judged_on == "held-out":
            order = self._judge_by_held_out_rows(sizes, starts)
        self.subgroups = problem.subgroup_count if problem.objective.subgroups else 0
        shares = torch.zeros(problem.n, self.subgroups, dtype=torch.float64)
        if self.subgroups:
            numbers = {i: problem.subgroup_numbers(i) for i in problem.here}
            of_rows = torch.cat(list(numbers.values()))
            self._numbers = (of_rows if order is None else of_rows[order]).to(self._data_device)  # of each row
            for i, of_site in numbers.items():
                shares[i] = torch.bincount(of_site, minlength=shares.shape[1]) / len(of_site)
        self.subgroup_shares = shares.to(device, dtype)[sites]  # of each node's rows (replicas, nodes, subgroups)
        names = [[site.name or "" for site in split.sites] for split in every]
        references = [split.objective.references(of) for split, of in zip(every, names)]
        learnable = [split.objective.learnable(of, problem.here) for split, of in zip(every, names)]

        def of_nodes(numbers: Sequence[Tensor]) -> Tensor:
            return torch.cat(list(numbers)).to(device, dtype)[sites].unsqueeze(-1)

        self._learnable = None if learnable[0] is None else tuple(map(of_nodes, zip(*learnable)))  # type: ignore[arg-type]
        self._excess = None if references[0] is None else of_nodes([r - r.mean() for r in references if r is not None])
        numbers_here = sum(len(samples) * trees.numbers_per_sample(samples.inputs) for samples in held)
        floats = device.type == "cpu" and numbers_here * dtype.itemsize <= AS_FLOATS_UP_TO
        change = (lambda part: as_floats(part, dtype)) if floats else None
        self._rows = SampleRows(held, self._data_device, order, change)
        batches = len(self.seeds) * len(hosted)
        self._ahead = None if self._rows.reader is None else Ahead(self._rows.reader, batches)
        self.round_number: int | None = None  # of the round that is computed, so that no GPU needs to be asked
        self._fed: dict[Any, tuple[Wanted, tuple[Tree, Tree]]] | None = None  # what captured rounds read
        self._fed_round: int | None = None  # whose batches that is
        self.model = problem.flat_model.to(device, dtype, short_floats=precision == "bf16")
        self.worker = None if problem.trainer is None else LocalWorker(cast(LocalTrainer, problem.trainer), self.model)
        draw_shape = (len(self.seeds), len(hosted))
        start = torch.stack([problem.initial_whole_row(int(seed)) for seed in seeds]).to(device, dtype)
        self.initial_rows, self._initial_own = start.split([self.model.dim, self.model.own_dim], dim=-1)
        self._shape = (*draw_shape, self.model.dim)
        at_once, rows = problem.at_once(device), draw_shape[0] * draw_shape[1]
        self._each = each = losses_of_rows(self.model, problem.loss, problem.augmenter)
        loss = batch_loss(self.model, problem.loss, problem.augmenter)
        loss = (lambda *arguments: each(*arguments)[0]) if self._weighted else loss
        self._values = over_models(convolutions.of_many(loss, at_once or rows, device), at_once)
        self._errors = over_models(batch_error(self.model, problem.augmenter, problem.right), at_once)
        self._held_values = over_models(weighed(evaluation_losses(self.model, problem.loss)), at_once)
        if trace and at_once is None:
            self._held_values = replayed(self._held_values)
        self._held_errors = over_models(weighed(evaluation_errors(self.model, problem.right)), at_once)
        self._gradients = gradients(self.model, loss, at_once, rows, device, trace=trace, precision=precision)
        if self.subgroups:
            self._gradients_and_rows = gradients(self.model, each, at_once, rows, device, True, precision=precision)
            self._held_rows = over_models(evaluation_losses(self.model, problem.loss), at_once)

    def initial_models(self) -> Tensor:
        """Returns the initial models, the same row at every node of a replica: (replicas, nodes, dim)."""
        return self.initial_rows.unsqueeze(1).expand(self._shape).clone()

    def initial_own(self) -> Tensor:
        """Returns the own parts that nodes start from, the same at every node of a replica: (replicas, nodes,
        own_dim)."""
        return self._initial_own.unsqueeze(1).expand(*self._shape[:-1], -1).clone()

    def losses_and_gradients(self, models: Tensor, round_index: Tensor, call: int) -> tuple[Tensor, Tensor]:
        """Returns losses (replicas, nodes, 1), and gradients of the same shape as the models, which are (replicas,
        nodes, dim + own_dim): the nodes' own parts follow the shared parameters."""
        rows = models.reshape(-1, models.shape[-1])
        gradients, losses = self._over_batches(self._gradients, rows, round_index, call)
        gradients = self._regularized(gradients.view(*self._shape[:-1], -1), models)
        if self._judge is not None:
            return self.losses(models, round_index, call), gradients
        return self._compared(losses.view(*self._shape[:-1], 1)), gradients

    def initial_memory(self) -> Tensor | None:
        """Returns what the sites' training functions have kept before the first round; None without a trainer."""
        return None if self.worker is None else no_memory(*self._shape[:-1])

    def trained(
        self, rows: Tensor, round_index: Tensor, call: int, memory: Tensor, at_work: Tensor | None = None
    ) -> Work:
        """Returns what the sites' own training functions make of the models, with the losses that weights follow.

        Args:
            rows: The parameters at the start (replicas, nodes, dim + own_dim).
            round_index: The round.
            call: Which batch fairmesh uses to measure losses.
            memory: What the functions have kept (replicas, nodes, length).
            at_work: Which nodes work (replicas, nodes). The others have no update and no loss. Default: None, all.
        """
        if self.worker is None:
            raise TypeError("the problem has no trainer")
        number, (replicas, count, _) = int(round_index), self._shape
        keys = random_streams.keys(self.seeds, "local work", number, self._identities)  # (replicas, nodes)
        works = torch.ones(replicas, count, dtype=torch.bool) if at_work is None else at_work
        nodes = [
            Node(r, i, self._hosted[i], self._site(r, i).name or "", int(keys[r, i]) & 0x7FFFFFFF)
            for r in range(replicas)
            for i in range(count)
            if bool(works[r, i])
        ]
        batches: list[tuple[Any, ...]] = []  # of all nodes, found once if a function asks for one

        def batch(node: Node) -> tuple[Tree, Tree]:
            if not batches:
                batches.append(self._batch(round_index, call, self._calls))
            inputs, targets, *_ = batches[0]
            at = node.replica * count + node.place
            own = int(self._sizes_in(round_index)[node.replica, node.place])  # what follows them fills up a stack
            few = slice(own if self.problem.sampling.order == "full" else None)
            return trees.at(trees.at(inputs, at), few), trees.at(trees.at(targets, at), few)

        models, own = rows.split([self.model.dim, self.model.own_dim], dim=-1)
        work = self.worker.work(
            number, models, own, memory, nodes, lambda node: self._data_of(node, round_index), batch
        )
        if self.problem.clip_norm is not None:
            work = work._replace(updates=work.updates * _clipping(work.updates, self.problem.clip_norm))
        losses = self._compared(work.losses)
        if self._judge is not None or bool(work.losses.isnan().any()):
            measured = self.losses(rows, round_index, call)
            losses = measured if self._judge is not None else torch.where(work.losses.isnan(), measured, losses)
        return work._replace(losses=losses)

    def _site(self, replica: int, node: int) -> Site:
        split, i = divmod(int(self._sites[replica, node]), self.problem.n)
        return self.problem.every_split[split].sites[i]

    def _data_of(self, node: Node, round_index: Tensor) -> SiteData:
        """Returns the rows that a node trains on in a round, without those that judge it."""
        samples = self._site(node.replica, node.place).train
        rows = int(self._sizes_in(round_index)[node.replica, node.place])
        if rows < len(samples):
            i = int(self._sites[node.replica, node.place]) % self.problem.n
            samples = samples.take(held_out_last(samples, i, len(samples) - rows)[:rows])
        return SiteData(samples, functools.partial(as_floats, dtype=self.dtype))

    def _regularized(self, gradients: Tensor, models: Tensor) -> Tensor:
        """Returns gradients, clipped and then with weight decay, in place. The statistics of BatchNorm layers have
        neither."""
        trained = self.model.dim + self.model.local_dim
        mine = gradients[..., :trained] if self.model.own_dim else gradients
        if self.problem.clip_norm is not None:
            mine.mul_(_clipping(mine, self.problem.clip_norm))
        if self.problem.weight_decay:
            mine.add_(models[..., :trained], alpha=self.problem.weight_decay)
        return gradients

    def losses(self, models: Tensor, round_index: Tensor, call: int) -> Tensor:
        """Returns losses (replicas, nodes, 1)."""
        return self._compared(self._measured(self._values, self._held_values, models, round_index, call))

    def _compared(self, losses: Tensor) -> Tensor:
        """Returns the losses' excess over the references, plus the references' mean."""
        return losses if self._excess is None else (losses - self._excess).clamp_(min=0.0)

    def errors(self, models: Tensor, round_index: Tensor, call: int) -> Tensor:
        """Returns the share of each node's batch that its row misclassifies: (replicas, nodes, 1)."""
        if self.problem.classes is None:
            raise BadInput("the 0-1 error needs class labels, which this problem does not have; use ascends = 'loss'")
        return self._measured(self._errors, self._held_errors, models, round_index, call)

    @property
    def discounts_noise(self) -> bool:
        """Whether a loss counts only as far as a model can lower it and chance does not explain it."""
        return self._learnable is not None

    def learnable_shares(self, losses: Tensor) -> Tensor:
        """Returns how much of each loss (replicas, nodes, 1) a model can lower, in [0, 1]."""
        if self._learnable is None:
            return torch.ones_like(losses)
        local, untrained = self._learnable
        learned = 1.0 - torch.minimum(local, losses) / untrained
        return (learned / LEARNABLE).clamp_(0.0, 1.0).pow_(4)

    def weights_open(self, round_index: Tensor) -> Tensor | None:
        """Returns 1 while the weights follow the losses and 0 when they remember them; None if they always follow."""
        rejoin = self.problem.objective.rejoin_round()
        return None if rejoin is None else (round_index < rejoin).to(self.dtype)

    def _judge_by_validation_sets(self, trained: int) -> list[Samples]:
        """Returns the validation sets, which follow the `trained` rows. Each hosted node is judged by its site's."""
        sets: list[Samples] = []
        of_site: list[int] = []
        for split in self.problem.every_split:
            for i, site in enumerate(split.sites):
                if site.validation is None:
                    raise BadInput(
                        f"site {i} ({site.name}) has no validation set; with objective.judged_on = "
                        '"validation" every site needs one'
                    )
            of_split, which_set = split.held_out("validation")
            of_site += [len(sets) + max(k, 0) for k in which_set]  # one that is elsewhere judges no node here
            sets += of_split
        lengths = torch.tensor([len(samples) for samples in sets])
        first = trained + lengths.cumsum(0) - lengths
        which = torch.tensor(of_site)[self._sites.cpu()].unsqueeze(-1)
        self._judge = first[which].to(self._sites.device), lengths[which].to(self._sites.device)
        self.rows_apart = self._judge[1]
        return sets

    def _judge_by_held_out_rows(self, sizes: Tensor, starts: Tensor) -> Tensor:
        """Returns the order of the training rows in which each site's held-out rows, which judge it, come last."""
        problem, sites = self.problem, self._sites
        held_out = [problem.objective.held_out_of(size) for size in sizes.tolist()]
        begins = starts.tolist()
        orders = [
            begins[k * problem.n + i] + held_out_last(split.sites[i].train, i, held_out[k * problem.n + i])
            for k, split in enumerate(problem.every_split)
            for i in problem.here
        ]
        counts = torch.tensor(held_out, device=sizes.device)
        self._trained_sizes = (sizes - counts)[sites].unsqueeze(-1)
        self.rows_apart = counts[sites].unsqueeze(-1)
        judges = torch.where(counts == 0, sizes, counts)  # one too small to hold any out is judged on its training rows
        self._judge = (starts + sizes - judges)[sites].unsqueeze(-1), judges[sites].unsqueeze(-1)
        return torch.cat(orders)

    def _held_batch(self, judge: tuple[Tensor, Tensor], round_index: Tensor, call: int) -> tuple[Any, ...]:
        """Returns inputs, targets and weights of rows that judge each hosted node: (nodes, rows, ...). If subgroups
        have weights, the rows' subgroups follow."""
        (first, counts), sampling, device = judge, self.problem.sampling, self.seeds.device
        largest = int(counts.max()) if sampling.order == "full" else sampling.batch

        def indices(rounds: Tensor) -> Tensor:
            if sampling.order == "full":
                chosen = (first + torch.arange(largest, device=device) % counts).expand(len(rounds), -1, -1, -1)
            else:
                key = random_streams.keys(self.seeds, f"held-out {call}", rounds.unsqueeze(-1), self._identities)
                chosen = first + random_streams.integers(key, largest, counts)
            return chosen.flatten(1).to(self._data_device)

        inputs, targets = self._read(("held-out", call), indices, None, round_index)
        weights = torch.full((1, largest), 1.0 / largest, dtype=self.dtype, device=device)
        weights = weights.expand(self._shape[0] * self._shape[1], -1)
        if sampling.order == "full":
            weights = ((torch.arange(largest, device=device) < counts).to(self.dtype) / counts).flatten(0, 1)
        if not self.subgroups:
            return inputs, targets, weights
        return inputs, targets, weights, self._numbers_in(("held-out", call), indices, round_index)

    def _numbers_in(self, what: tuple[str, int], indices: Callable[[Tensor], Tensor], round_index: Tensor) -> Tensor:
        """Returns the subgroups of the rows of each hosted node in a batch: (nodes, rows). Arguments as of `_read`."""
        chosen = self._numbers.index_select(0, self._round_cache.at(what, indices, round_index))
        return chosen.to(self.seeds.device, non_blocking=True).unflatten(0, (self._shape[0] * self._shape[1], -1))

    def by_subgroup(
        self, models: Tensor, round_index: Tensor, call: int, ratios: Tensor
    ) -> tuple[Tensor, Tensor, Seen]:
        """Returns losses and gradients with each row's loss multiplied by the ratio of its subgroup, and the losses by
        subgroup on the rows that judge.

        Args:
            models: As in `losses_and_gradients`.
            round_index: As there.
            call: As there.
            ratios: (replicas, nodes, subgroups)."""
        rows, of_nodes, shape = models.reshape(-1, models.shape[-1]), ratios.flatten(0, 1), self._shape[:-1]

        def seen_of(each: Tensor, numbers: Tensor, weights: Tensor) -> Seen:
            found = seen_in(each, numbers, weights, self.subgroups)
            return Seen(*(part.view(*shape, -1) for part in found))

        def on_batch(number: int, calls: int) -> tuple[Tensor, ...]:
            *batch, weights = self._batch(round_index, number, calls)
            numbers = self._numbers_in(("batch", number), self._rows_in(number, calls), round_index)
            weighed = weights * of_nodes.gather(1, numbers)
            gradients, (losses, each) = self._gradients_and_rows(rows, *batch, weighed)
            return gradients, losses, *seen_of(each, numbers, weights)

        gradients, losses, *sums_and_counts = _sums(on_batch(*step) for step in self._steps(call))
        gradients, losses, seen = gradients / self._repeats, losses / self._repeats, Seen(*sums_and_counts)
        if self._judge is not None:
            inputs, targets, weights, numbers = self._held_batch(self._judge, round_index, call)
            with torch.no_grad():
                each = self._held_rows(rows, inputs, targets)
            weighed = weights * of_nodes.gather(1, numbers)  # divided by its sum: few rows hold no exact shares
            losses, seen = (each * weighed).sum(dim=-1) / weighed.sum(dim=-1), seen_of(each, numbers, weights)
        return (
            self._compared(losses.view(*shape, 1)),
            self._regularized(gradients.view(*shape, -1), models),
            seen,
        )

    def _sizes_in(self, rounds: Tensor) -> Tensor:
        """Returns how many rows each hosted node trains on, for rounds that broadcast with (replicas, nodes, 1)."""
        if self._trained_sizes is None:
            return self.sizes
        rejoin = self.problem.objective.rejoin_round()
        return self._trained_sizes if rejoin is None else torch.where(rounds < rejoin, self._trained_sizes, self.sizes)

    def sample_losses(self, models: Tensor, round_index: Tensor, call: int) -> Tensor:
        """Returns the loss of every sample of each node's batch: (replicas, nodes, samples)."""
        with torch.no_grad():
            return self._of_samples(lambda function: function, models, round_index, call)

    def sample_gradients(self, models: Tensor, round_index: Tensor, call: int) -> Tensor:
        """Returns the gradient of every sample's loss, without weight decay and clipping: (replicas, nodes, samples,
        dim + own_dim)."""
        return self._of_samples(jacrev, models, round_index, call)

    def _of_samples(self, what: Callable, models: Tensor, round_index: Tensor, call: int) -> Tensor:
        """Returns `what` of the function row -> losses of the samples in a batch, for each node."""
        at_once, why = self.problem.at_once(self.seeds.device), self.problem.why_not_stacked
        if why is not None:
            raise BadInput(
                f"losses and gradients of single samples need torch.vmap, which cannot run this model: {why}"
            )
        if len(self.model.momenta):
            raise BadInput(
                "losses and gradients of single samples are not defined for BatchNorm layers in training mode, where "
                'every sample depends on its batch; use batch_norm = "frozen" or "convert"'
            )
        if self._padded:
            raise BadInput(
                "losses and gradients of single samples need batches of one length; with order = 'full' sites of "
                "unequal size have none: use Sampling(batch=...)"
            )
        each = self._each

        def one(row: Tensor, inputs: Any, targets: Any, key: Tensor) -> Tensor:
            return what(lambda given: each(given, inputs, targets, key, row.new_zeros(()))[1])(row)

        rows, function = models.reshape(-1, models.shape[-1]), over_models(one, at_once)
        of_batches = [function(rows, *self._batch(round_index, *step)[:3]) for step in self._steps(call)]
        return torch.cat(of_batches, dim=1).unflatten(0, self._shape[:-1])

    def _measured(
        self, function: Callable, on_held_rows: Callable, models: Tensor, round_index: Tensor, call: int
    ) -> Tensor:
        """Returns `function` of each hosted node's row on its batch, or `on_held_rows` on the rows that judge it:
        (replicas, nodes, 1)."""
        rows = models.reshape(-1, models.shape[-1])
        with torch.no_grad():
            if self._judge is not None:
                values = on_held_rows(rows, *self._held_batch(self._judge, round_index, call)[:3])
            else:
                (values,) = self._over_batches(lambda *a: (function(*a),), rows, round_index, call)
        return values.view(*self._shape[:-1], 1)

    @property
    def _repeats(self) -> int:
        """How many batches a step has."""
        return 1 if self.problem.sampling.order == "full" else self.problem.sampling.batches_per_step

    def _steps(self, call: int) -> list[tuple[int, int]]:
        """Returns the number of each batch of a call, and how many batches a round has."""
        return [(call * self._repeats + k, self._calls * self._repeats) for k in range(self._repeats)]

    def _over_batches(self, function: Callable, rows: Tensor, round_index: Tensor, call: int) -> tuple[Tensor, ...]:
        """Returns the mean of `function` over the batches of a step."""
        total = _sums(function(rows, *self._batch(round_index, *step)) for step in self._steps(call))
        return total if self._repeats == 1 else tuple(a / self._repeats for a in total)

    def _indices(self, rounds: Tensor, call: int, calls: int) -> Tensor:
        """Returns the index, among all sites' samples, of each sample in a batch: (rounds, replicas, nodes, batch)."""
        sampling, device = self.problem.sampling, self.seeds.device
        sizes = self._sizes_in(rounds[:, None, None, None])
        if sampling.order == "full":
            steps = torch.arange(self._largest, device=device).expand(len(rounds), 1, 1, -1)
            return self._starts + steps % sizes
        if sampling.order in ("cyclic", "shuffled"):
            first = (rounds * calls + call) * sampling.batch
            steps = first[:, None, None, None] + torch.arange(sampling.batch, device=device)
            if sampling.order == "cyclic":
                return self._starts + steps % sizes
            streams = random_streams.keys(self.seeds, "epochs", 0, self._identities)  # (replicas, nodes)
            epochs = random_streams.epoch_keys(streams, steps // sizes)
            return self._starts + random_streams.permuted(epochs, steps % sizes, sizes)
        key = random_streams.keys(self.seeds, f"batch {call}", rounds.unsqueeze(-1), self._identities)
        return self._starts + random_streams.integers(key, sampling.batch, sizes)

    def _batch(self, round_index: Tensor, call: int, calls: int) -> tuple[Any, ...]:
        """Returns inputs, targets, the key of the model's random numbers, and sample weights of a padded full batch."""
        device = self.seeds.device

        def keys(rounds: Tensor) -> Tensor:
            return random_streams.keys(self.seeds, f"model {call}", rounds.unsqueeze(-1), self._identities).flatten(1)

        def seeds(rounds: Tensor) -> Tensor:
            key = random_streams.keys(self.seeds, f"items {call}", rounds.unsqueeze(-1), self._identities)
            drawn = random_streams.bits(key, self._indices(rounds[:1], call, calls).shape[-1])
            return drawn.flatten(1).to(torch.int64) & 0xFFFFFFFF

        key = self._round_cache.at(("model", call), keys, round_index)
        inputs, targets = self._read(("batch", call), self._rows_in(call, calls), seeds, round_index)
        if self.problem.augmenter is not None:
            inputs, targets = self.problem.augmenter.beforehand(inputs, targets, key)
        batch = (inputs, targets, key)
        if self._padded:
            steps, sizes = torch.arange(self._largest, device=device), self._sizes_in(round_index)
            weights = (steps < sizes).to(self.dtype) / sizes
            return *batch, weights.flatten(0, 1)
        if self._weighted:
            nodes, count = trees.leaves(batch[0])[0].shape[:2]
            return *batch, torch.full((nodes, count), 1.0 / count, dtype=self.dtype, device=device)
        return batch

    def _read(
        self,
        what: tuple[str, int],
        indices: Callable[[Tensor], Tensor],
        seeds: Callable[[Tensor], Tensor] | None,
        round_index: Tensor,
    ) -> tuple[Tree, Tree]:
        """Returns inputs and targets of a batch of each hosted node, as the model sees them: (nodes, rows, ...).

        Args:
            what: Which batch of a round.
            indices: Rounds (k,) -> the numbers of its rows (k, rows of all nodes).
            seeds: The same for the seeds of items that are read from a stream; None if they depend on the item alone.
            round_index: The round.
        """
        if self._ahead is None:
            pair = self._rows.take(self._round_cache.at(what, indices, round_index))
        else:

            def wanted(rounds: Tensor) -> tuple[Tensor, Tensor | None]:
                rounds = rounds.to(self.seeds.device)
                return indices(rounds), None if seeds is None else seeds(rounds)

            if self._fed is not None and what in self._fed:
                pair = self._fed[what][1]
            else:
                known = None if round_index.is_cpu else self.round_number
                number = int(round_index) if known is None else known
                pair = self._ahead.at(what, number, wanted)
                if self._fed is not None:
                    pair = trees.mapped(self._buffer, pair)
                    self._fed[what], self._fed_round = (wanted, pair), number
        shape = (self._shape[0] * self._shape[1], -1)

        def seen(part: Tensor) -> Tensor:
            return as_floats(part.to(self.seeds.device, non_blocking=True), self.dtype).unflatten(0, shape)

        return trees.mapped(seen, pair[0]), trees.mapped(seen, pair[1])

    @property
    def streamed(self) -> bool:
        """Whether rows are read from streams."""
        return self._ahead is not None

    def feed_captured(self, yes: bool) -> None:
        """Decides whether rounds read streamed batches from buffers on the device, which `feed` fills, so that a
        captured round can be replayed with other batches."""
        self._fed = {} if yes else None

    def feed(self, number: int) -> None:
        """Fills the buffers with the batches of a round."""
        if self._ahead is None or self._fed is None or number == self._fed_round:
            return
        self._fed_round = number
        for what, (wanted, buffers) in self._fed.items():
            trees.mapped(_fill, buffers, self._ahead.at(what, number, wanted))

    def _buffer(self, part: Tensor) -> Tensor:
        """Returns a tensor on the device. It is part of a larger one, since a compiler takes the value of a tensor with
        one number for a constant."""
        rows = torch.empty(len(part) + 1, *part.shape[1:], dtype=part.dtype, device=self.seeds.device)
        return rows[:-1].copy_(part)

    def _rows_in(self, call: int, calls: int) -> Callable[[Tensor], Tensor]:
        """Returns the function rounds (k,) -> indices of the rows in a batch of all hosted nodes (k, rows)."""
        return lambda rounds: self._indices(rounds, call, calls).flatten(1).to(self._data_device)


def _fill(buffer: Tensor, part: Tensor) -> Tensor:
    return buffer.copy_(part.pin_memory() if buffer.is_cuda else part, non_blocking=True)


def _sums(parts: Iterable[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Returns the sums of tensors at the same places of tuples."""
    return functools.reduce(lambda total, more: tuple(a + b for a, b in zip(total, more)), parts)


def _clipping(rows: Tensor, norm: float) -> Tensor:
    """Returns by how much each row is multiplied, so that its Euclidean norm is at most this one."""
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return (norm / norms.clamp(min=1e-30)).clamp_(max=1.0)
