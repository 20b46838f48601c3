"""Any number of sites of unequal difficulty, the best linear model for them, and the quality of a model."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fairmesh.data.site import Site
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.problem import Problem, Sampling, prepare
from fairmesh.regularizers.builtin import ChiSquare, worst_case
from reproduction.lines import Line

INPUTS, SAMPLES, BATCH = 25, 40, 20
PARAMETERS = 2 * INPUTS + 2  # of a linear model with two classes
HARD = 0.05  # share of the sites that follow another rule than the rest
REGULARIZER = ChiSquare(0.1)


@dataclass(frozen=True, eq=False)
class Sites:
    """Sites with two classes. One linear model cannot serve all of them.

    The classes differ along one direction at most sites and along an orthogonal one at the hard sites. The noise of the
    labels differs from site to site."""

    inputs: Tensor  # (n, samples, inputs)
    targets: Tensor  # (n, samples)

    @staticmethod
    def drawn(n: int) -> "Sites":
        generator = torch.Generator().manual_seed(n)
        usual, other = torch.linalg.qr(torch.randn(INPUTS, 2, generator=generator)).Q.T
        hard = torch.randperm(n, generator=generator) < worst_sites(n)
        noise = torch.where(hard, 1.0, torch.rand(n, generator=generator)) / 2
        inputs = torch.randn(n, SAMPLES, INPUTS, generator=generator)
        margins = (inputs @ torch.where(hard[:, None], other, usual)[..., None]).squeeze(-1)
        flips = noise[:, None] * torch.randn(n, SAMPLES, generator=generator)
        return Sites(inputs, (margins + flips > 0).long())

    def problem(self) -> Prepared:
        layer = nn.Linear(INPUTS, 2)
        for parameter in layer.parameters():
            nn.init.zeros_(parameter)
        sites = [Site(held) for held in zip(self.inputs, self.targets)]
        return prepare(Problem(layer, sites, sampling=Sampling(batch=BATCH)))

    def outcome(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns each site's loss and accuracy (n,) over all its samples, at one model (dim,) or one row per site."""
        layer = rows[..., : 2 * INPUTS].unflatten(-1, (2, INPUTS))
        outputs = self.inputs.to(rows.dtype) @ layer.mT + rows[..., None, 2 * INPUTS :]
        losses = nn.functional.cross_entropy(outputs.flatten(0, 1), self.targets.flatten(), reduction="none")
        return losses.view_as(self.targets).mean(dim=-1), (outputs.argmax(dim=-1) == self.targets).double().mean(dim=-1)

    def best(self) -> Tensor:
        """Returns the model (dim,) of least worst-case loss, by a quasi-Newton method with Danskin's gradient."""
        row = torch.zeros(PARAMETERS, dtype=torch.float64, requires_grad=True)
        method = torch.optim.LBFGS([row], max_iter=300, line_search_fn="strong_wolfe")

        def objective() -> Tensor:
            method.zero_grad()
            losses = self.outcome(row)[0]
            (exact(losses.detach()) * losses).sum().backward()
            return objective_of(losses.detach())

        method.step(objective)  # type: ignore[arg-type]
        return row.detach()


def worst_sites(n: int) -> int:
    """Returns the number of hard sites."""
    return max(1, round(HARD * n))


def exact(losses: Tensor) -> Tensor:
    """Returns lambda* (n,), the maximum of sum_i lambda_i f_i + alpha r(lambda), which is the weightings' objective."""
    n = len(losses)
    return REGULARIZER.maximiser(n * losses[None], torch.full_like(losses[None], 1 / n)).squeeze(0)


def objective_of(losses: Tensor) -> Tensor:
    """Returns the objective at its exact inner maximum."""
    n = len(losses)
    return worst_case(REGULARIZER, n * losses[None], torch.full_like(losses[None], 1 / n)).squeeze()


def quality(losses: Tensor, accuracies: Tensor) -> Line:
    """Returns the quality of a model for the sites."""
    few = worst_sites(len(losses))
    return {
        "objective": round(float(objective_of(losses)), 5),
        "worst_loss": round(float(losses.max()), 4),
        "hardest_5_percent_loss": round(float(losses.topk(few).values.mean()), 4),
        "hardest_5_percent_accuracy": round(100 * float(accuracies.sort().values[:few].mean()), 2),
        "mean_accuracy": round(100 * float(accuracies.mean()), 2),
    }
