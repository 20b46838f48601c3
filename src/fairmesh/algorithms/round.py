"""One round as an algorithm sees it."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fairmesh.algorithms.companions import KINDS, NOTHING, CompanionInputs, Question, carried
from fairmesh.algorithms.optimizers import Optimizer
from fairmesh.algorithms.schedules import Schedule, as_schedule
from fairmesh.errors import BadInput
from fairmesh.networks.base import Delivery, Network, Part, Traffic
from fairmesh.numerics import random_streams
from fairmesh.numerics.layout import Layout
from fairmesh.numerics.random_streams import SERVER, Draw, SecretIdentities
from fairmesh.numerics.round_cache import RoundCache
from fairmesh.problems.oracle import Oracle


class Round:
    """One round as an algorithm sees it: its number, the local data, the random streams, and the neighbours.

    An algorithm gets it as the argument `ctx` of `step`, and never makes one. `ctx.losses_and_gradients(models)`
    evaluates the nodes' losses, `ctx.step_size(schedule)` is a step size in this round, `ctx.draws(purpose)` gives
    random numbers, and `ctx.exchange(name=part)` sends one message to each neighbour. `ctx.index` is the round t,
    `ctx.n` the number of nodes, `ctx.prior` is p (..., 1, n), and `ctx.own` (nodes, n) is 1 at each hosted node's own
    coordinate.
    """

    def __init__(
        self,
        index: Tensor,
        oracle: Oracle,
        network: Network,
        round_cache: RoundCache | None = None,
        carried: Any = NOTHING,
        optimizer: Optimizer | None = None,
    ):
        self.index = index  # t, a scalar tensor
        self._oracle, self._network, self._round_cache = oracle, network, round_cache or RoundCache()
        self.prior = oracle.prior  # p (..., 1, n)
        self.own = network.own  # (nodes, n) each hosted node's own coordinate
        self.n = network.n
        self.by_identity = network.by_identity  # (n,) so that a server's draws depend on identities, not on positions
        self.sent: list[Traffic] = []
        self._exchanged = False
        self._receivers: Tensor | None = None  # nodes that have got the server's model in this round (..., nodes)
        run = CompanionInputs(oracle, optimizer)
        self._companions = [KINDS[name](state, self, run) for name, state in zip(carried._fields, carried)]

    def losses_and_gradients(self, models: Tensor, call: int = 0) -> tuple[Tensor, Tensor]:
        """Returns each node's loss (..., nodes, 1), and its gradient (..., nodes, dim) on its batch.

        The loss is the one that weights follow: on the same batch, unless the problem's objective says on which other
        rows, or what it is compared with. With an optimizer, the gradients are the directions that it makes of them.
        With a trainer, they are the updates that the sites' own training functions make.

        Args:
            models: Where to evaluate, one row per hosted node: (..., nodes, dim).
            call: Which batch of the round to use, from 0 to `oracle_calls()` - 1. Asking for one call twice gives the
                same batch and the same random numbers, at other models too. So two gradients can be compared on one
                batch, as variance reduction needs it (examples/research/dm_hsgd.py).
        """
        question = self._asked(models, call)
        question.losses, question.gradients = question.evaluate(question)
        for companion in self._companions:
            companion.after(question)
        return question.losses, question.gradients

    def _asked(self, models: Tensor, call: int) -> Question:
        """Returns what an algorithm asks for, as companions change it. Losses and gradients are not known yet: `models`
        stands in their places."""
        question = Question(models, self.index, call, models, self._evaluated, self._receivers, models, models)
        for companion in self._companions:
            companion.before(question)
        return question

    def _evaluated(self, question: Question) -> tuple[Tensor, Tensor]:
        return self._oracle.losses_and_gradients(question.rows, self.index, question.call)

    def losses(self, models: Tensor, call: int = 0) -> Tensor:
        """Returns each node's loss (..., nodes, 1), on the rows and with the arguments of `losses_and_gradients`."""
        return self._oracle.losses(self._asked(models, call).rows, self.index, call)

    def errors(self, models: Tensor, call: int = 0) -> Tensor:
        """Returns each node's 0-1 error (..., nodes, 1), on the rows and with the arguments of `losses`."""
        return self._oracle.errors(self._asked(models, call).rows, self.index, call)

    def sample_losses(self, models: Tensor, call: int = 0) -> Tensor:
        """Returns the loss of every sample of each node's batch: (..., nodes, samples). Arguments as in
        `losses_and_gradients`. Refused for models that torch.vmap cannot run, for BatchNorm layers in training mode,
        and for full batches of unequal size."""
        return self._oracle.sample_losses(self._asked(models, call).rows, self.index, call)

    def sample_gradients(self, models: Tensor, call: int = 0) -> Tensor:
        """Returns the gradient of every sample's loss: (..., nodes, samples, dim). Their mean is the batch's gradient
        without weight decay, clipping and optimizer. Arguments as in `losses_and_gradients`; refused as `sample_losses`
        is. Parts that stay at a node take a step with the mean of their gradients."""
        question = self._asked(models, call)
        question.gradients = self._oracle.sample_gradients(question.rows, self.index, call)
        for companion in self._companions:
            companion.after_samples(question)
        return question.gradients

    @property
    def sizes(self) -> Tensor:
        """How many training rows each hosted node has, (..., nodes, 1)."""
        return self._oracle.sizes

    @property
    def all_sizes(self) -> Tensor:
        """How many training rows every node of the network has, (..., 1, n)."""
        return self._oracle.all_sizes

    @property
    def layout(self) -> Layout:
        """Names, shapes and places of the parameters in a row of `models`."""
        return self._oracle.model.layout

    def learnable_shares(self, losses: Tensor) -> Tensor:
        """Returns how much of each node's loss a model can lower, (..., nodes, 1) in [0, 1]."""
        return self._oracle.standard.learnable_shares(losses)

    @property
    def judging_rows(self) -> Tensor:
        """How many rows judge each node that it does not train on, (..., nodes, 1); those of one unit count once."""
        return self._oracle.division.apart

    def step_of_weights(self, step: Any) -> Any:
        """Returns a step of the weights while they follow the losses, and 0 once they only remember them, as the
        problem's objective says."""
        return self._oracle.step_of_weights(step, self.index)

    def step_size(self, schedule: Schedule | float) -> Tensor:
        """Returns the schedule's value in this round, in the models' dtype: a scalar, or (replicas, 1, 1)."""
        what = id(schedule) if isinstance(schedule, Schedule) else float(schedule)
        schedule = as_schedule(schedule)

        def steps(rounds: Tensor) -> Tensor:
            return schedule.at(rounds[:, None, None, None]).to(dtype=self.own.dtype, device=self.own.device)

        return self._round_cache.at(("step", what), steps, self.index, schedule)

    def draws(self, purpose: str) -> Draw:
        """Returns the random numbers of each hosted node for one purpose: `.uniforms(count)` is (..., nodes, count)."""
        return self._draw("nodes", purpose, self._network.streams)

    def server_draws(self, purpose: str) -> Draw:
        """Returns a server's random numbers for one purpose: `.uniforms(count)` is (..., 1, count)."""
        return self._draw("server", purpose, torch.full((1,), SERVER, device=self.own.device))

    def _draw(self, whose: str, purpose: str, identities: Tensor | SecretIdentities) -> Draw:
        def keys(rounds: Tensor) -> Tensor:
            return random_streams.keys(self._oracle.seeds, purpose, rounds.unsqueeze(-1), identities)

        def ahead(count: int) -> Tensor:
            bits = partial(random_streams.sixteen_bits, count=count)
            return self._round_cache.at((whose, purpose, count), lambda rounds: bits(keys(rounds)), self.index)

        return Draw(self._round_cache.at((whose, purpose), keys, self.index), self.own.dtype, ahead)

    def exchange(self, **parts: Part) -> Delivery:
        """Sends one message, made of these parts, from each node to each of its neighbours; returns the delivery.

        Raises:
            BadInput: The round has sent its message already.
        """
        if self._exchanged:
            raise BadInput(
                "the algorithm calls ctx.exchange twice in a round, but a node sends one message per round, by whose "
                "number it is journalled and expected; send all parts in one call, or let the second part wait in the "
                "state for the next round"
            )
        self._exchanged = True
        for companion in self._companions:
            parts |= companion.parts()
        delivery = self._network.exchange(parts, self.index)
        self.sent.append(delivery.sent)
        for companion in self._companions:
            companion.sent(delivery)
        return delivery

    def carried_after(self) -> Any:
        """Returns the states of the companions after the round."""
        return carried({companion.name: companion.end() for companion in self._companions})

    def hosted(self, row: Tensor) -> Tensor:
        """Returns the hosted nodes' entries (..., nodes) of a row over all nodes (..., 1, n)."""
        return row.squeeze(-2).index_select(-1, self._network.hosted)

    def mixed_copies(self, kept: Tensor) -> Tensor:
        """Returns s_i = sum_j w_ij x_hat_j from what each node keeps of its neighbours' copies: (..., nodes, dim)."""
        return self._network.mixed_copies(kept, self.index)

    def disagreement(self, own: Tensor, kept: Tensor) -> Tensor:
        """Returns sum_j w_ij (x_hat_j - x_hat_i) from a node's own copy and what it keeps of its neighbours' copies,
        (..., nodes, dim); clipped if the topology is."""
        return self._network.disagreement(own, kept, self.index)

    def broadcast(self, row: Tensor, receivers: Tensor) -> Tensor:
        """Returns a server's row (..., 1, dim) at every node; it is sent where `receivers` (..., nodes) is true."""
        self._receivers = receivers
        return self._counted(self._network.broadcast(row, receivers))

    def average(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Returns sum_i weights[i] rows[i] at the server: (..., 1, dim). A node of weight zero sends nothing."""
        return self._counted(self._network.average(rows, weights))

    def pooled(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Returns sum_i weights[i] rows[i], (..., 1, dim), where all data is in one place: nothing is sent."""
        return self._network.average(rows, weights)[0]

    def report(self, values: Tensor, senders: Tensor) -> Tensor:
        """Returns one number per node (..., 1, n) at the server; it is sent where `senders` (..., nodes) is true."""
        return self._counted(self._network.report(values, senders))

    def _counted(self, result: tuple[Tensor, Traffic]) -> Tensor:
        rows, sent = result
        self.sent.append(sent)
        return rows
