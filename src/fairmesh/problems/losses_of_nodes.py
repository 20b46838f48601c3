"""Losses, errors and gradients of a stack of models, one per hosted node, each on its own batch."""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.func import jacrev

from fairmesh.errors import BadInput
from fairmesh.problems import convolutions
from fairmesh.problems.flat_model import FlatModel
from fairmesh.problems.hosted_nodes import HostedNodes
from fairmesh.problems.row_loss import (
    batch_error,
    batch_loss,
    evaluation_errors,
    evaluation_losses,
    losses_of_rows,
    weighed,
)
from fairmesh.problems.stacking import Precision, gradients, over_models, replayed


class Losses:
    """Functions of a stack of rows (nodes, dim + own_dim) and a stack of batches. Batches are seen in training mode,
    rows that only judge in evaluation mode.

    Args:
        nodes: The hosted nodes.
        model: Their model, on the device that computes.
        weighted: Whether the samples of a batch have weights.
        trace: Whether model and loss are traced once and their operations replayed, on a CPU.
        precision: Of the gradients.
    """

    def __init__(self, nodes: HostedNodes, model: FlatModel, weighted: bool, trace: bool, precision: Precision):
        problem = nodes.problem
        self._problem, self._model = problem, model
        self._at_once = problem.at_once(model.device)
        self._each = each = losses_of_rows(model, problem.loss, problem.augmenter)
        loss = (
            (lambda *arguments: each(*arguments)[0]) if weighted else batch_loss(model, problem.loss, problem.augmenter)
        )
        many = convolutions.of_many(loss, self._at_once or nodes.rows) if model.device.type == "cuda" else loss
        self.of_batch = over_models(many, self._at_once)  # (rows, *batch) -> (nodes,)
        self._gradients_of = functools.partial(
            gradients, model, at_once=self._at_once, models=nodes.rows, precision=precision
        )
        self.gradients = self._gradients_of(loss, trace=trace)  # (rows, *batch) -> gradients and losses
        judging = over_models(weighed(evaluation_losses(model, problem.loss)), self._at_once)
        # (rows, inputs, targets, weights) -> (nodes,)
        self.judging = replayed(judging) if trace and self._at_once is None else judging

    def errors(self, rows: Tensor, *batch: Any) -> Tensor:
        """Returns the share of each batch that a row misclassifies: (nodes,)."""
        self._refuse_without_classes()
        right = batch_error(self._model, self._problem.augmenter, self._problem.right)
        return over_models(right, self._at_once)(rows, *batch)

    def judging_errors(self, rows: Tensor, *batch: Any) -> Tensor:
        """Returns the share of the rows that judge which a row misclassifies: (nodes,)."""
        self._refuse_without_classes()
        wrong = weighed(evaluation_errors(self._model, self._problem.right))
        return over_models(wrong, self._at_once)(rows, *batch)

    def _refuse_without_classes(self) -> None:
        if self._problem.classes is None:
            raise BadInput("the 0-1 error needs class labels, which this problem does not have; use ascends = 'loss'")

    @functools.cached_property
    def gradients_and_samples(self) -> Callable[..., Any]:
        """(rows, *batch with weights) -> gradients, and the losses with those of every sample."""
        return self._gradients_of(self._each, has_aux=True)

    @functools.cached_property
    def judging_samples(self) -> Callable[..., Tensor]:
        """(rows, inputs, targets) -> the loss of every sample, in evaluation mode (nodes, samples)."""
        return over_models(evaluation_losses(self._model, self._problem.loss), self._at_once)

    def of_samples(self, rows: Tensor, *batch: Any) -> Tensor:
        """Returns the loss of every sample of a batch: (nodes, samples)."""
        return self._of_samples(lambda function: function, rows, *batch)

    def gradients_of_samples(self, rows: Tensor, *batch: Any) -> Tensor:
        """Returns the gradient of every sample's loss: (nodes, samples, dim + own_dim)."""
        return self._of_samples(jacrev, rows, *batch)

    def _of_samples(self, transform: Callable, rows: Tensor, *batch: Any) -> Tensor:
        """Returns a transform of the function row -> losses of the samples in a batch, for each node."""
        why, each = self._problem.why_not_stacked, self._each
        if why:
            raise BadInput(
                f"losses and gradients of single samples need torch.vmap, which cannot run this model: {why}"
            )
        if len(self._model.momenta):
            raise BadInput(
                "losses and gradients of single samples are not defined for BatchNorm layers in training mode, where "
                'every sample depends on its batch; use batch_norm = "frozen" or "convert"'
            )

        def of_node(row: Tensor, inputs: Any, targets: Any, key: Tensor) -> Tensor:
            return transform(lambda given: each(given, inputs, targets, key, row.new_zeros(()))[1])(row)

        return over_models(of_node, self._at_once)(rows, *batch[:3])
