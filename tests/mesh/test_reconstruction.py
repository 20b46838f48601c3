"""A passive neighbour tries to solve for the training rows of its neighbour, from what it receives.

The neighbour follows the public copies of both others on a ring of three, so it knows the gossip part of every step and
estimates the gradients. If it also knows which rows are in which batch, images and labels are the unknowns of a large
system of equations. A mesh draws batches from a secret of the site. `test_node.py` shows that a mesh equals a
simulation that is given the secrets, so the attack is made on simulations."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import fairmesh as fm
from fairmesh.networks.memory import MemoryNetwork
from fairmesh.training.loop import Training
from fairmesh.training.options import Options
from fairmesh.training.replicas import replicas_of
from tests.mesh import fleet

ROUNDS, BATCH, VICTIM = 3000, 10, 1
NAMES = ("attacker", "victim", "third")
ALGORITHM = fm.ADGDA(primal_step=1.0, dual_step=0.01, consensus_step=0.5, compressor=fm.Quantize(bits=4))


class Seen(NamedTuple):
    """What the attacker knows."""

    copies: Tensor  # of all three models, before each round and after the last (rounds + 1, 3, dim)
    weights: Tensor  # of the victim (rounds,)
    rows: Tensor  # that a simulation with the experiment's seed would use (rounds, batch)


def _sites() -> list[fm.Site]:
    return fm.data.Digits(nodes=3).sites()


def _training(secrets: list[bytes] | None) -> Training:
    problem = fm.Problem(
        lambda: fm.models.Logistic().build(torch.Size([8, 8]), 10), _sites(), sampling=fm.Sampling(BATCH)
    )
    network = MemoryNetwork(fm.Ring().build(3), secrets=secrets)
    return Training(problem, fm.Ring(), replicas_of([ALGORITHM], [0], None, 3), Options(), network=network)


def _seen(secrets: list[bytes] | None) -> Seen:
    """Trains, with the attacker watching. It computes the rows from what everybody knows."""
    training, guessed = _training(secrets), _training(None).oracle
    state, copies, weights, rows = training.initial(), [], [], []
    for t in range(ROUNDS):
        copies.append(state.algorithm.copies[0][0].clone())
        weights.append(state.algorithm.duals[0, VICTIM, VICTIM])
        chosen = guessed._chosen(torch.tensor(t), 0, 1).view(3, BATCH)[VICTIM]
        rows.append(chosen - int(guessed._starts[0, VICTIM, 0]))
        state = training.advance(state, t)
    copies.append(state.algorithm.copies[0][0].clone())
    return Seen(torch.stack(copies), torch.stack(weights), torch.stack(rows))


def _solved(seen: Seen, samples: int) -> tuple[Tensor, Tensor]:
    """Returns the images (samples, 64) and labels that explain the victim's steps best.

    A step is known up to the error of compression, and these errors cancel over consecutive rounds. So sums over longer
    and longer stretches are fitted."""
    copies, mixing = seen.copies, torch.tensor(fm.Ring().build(3)[0].matrix.toarray()).float()
    gossip = sum(mixing[VICTIM, j] * (copies[:-1, j] - copies[:-1, VICTIM]) for j in range(3))
    own = copies[1:, VICTIM] - copies[:-1, VICTIM] - ALGORITHM.consensus_step * gossip
    maps, biases = copies[:-1, VICTIM, :640].view(-1, 10, 64), copies[:-1, VICTIM, 640:]
    images = torch.zeros(samples, 64, requires_grad=True)
    labels = torch.zeros(samples, 10, requires_grad=True)
    generator = torch.Generator().manual_seed(0)
    for steps, length, stretches, rate in (
        (600, 1, 400, 0.1),
        (600, 8, 50, 0.05),
        (1000, 20, 20, 0.05),
        (1000, 40, 10, 0.03),
    ):
        optimizer = torch.optim.Adam([images, labels], lr=rate)
        for k in range(steps):
            starts = torch.randint(0, ROUNDS - length + 1, (stretches, 1), generator=generator)
            at = (starts + torch.arange(length)).flatten()
            drawn, targets = images.sigmoid()[seen.rows[at]], labels.softmax(-1)[seen.rows[at]]
            outputs = torch.einsum("tbd,tcd->tbc", drawn, maps[at]) + biases[at].unsqueeze(1)
            errors = (outputs.softmax(-1) - targets) / BATCH
            gradients = torch.cat([torch.einsum("tbc,tbd->tcd", errors, drawn).flatten(1), errors.sum(1)], dim=1)
            left = (seen.weights[at].unsqueeze(1) * gradients + own[at]).view(stretches, length, -1)
            if length > 1:
                left = torch.nn.functional.pad(left.cumsum(1), (0, 0, 1, 0))
                left = left - left.mean(1, keepdim=True)
            optimizer.zero_grad()
            left.square().sum(-1).mean().backward()
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] = rate * (1 - k / steps)
    return images.sigmoid().detach(), labels.argmax(1)


def attacked(secrets: list[bytes] | None) -> tuple[float, float]:
    """Returns the median correlation of images with the true ones, and the share of labels that are right."""
    images, labels = _sites()[VICTIM].train
    found, guesses = _solved(_seen(secrets), len(labels))
    true, found = (rows - rows.mean(1, keepdim=True) for rows in (images.flatten(1), found))
    correlation = (true * found).sum(1) / (true.norm(dim=1) * found.norm(dim=1))
    return float(correlation.median()), float((guesses == labels).float().mean())


@pytest.mark.slow
def test_neighbour_that_knows_the_draws_solves_for_the_training_rows():
    correlation, labels = attacked(None)
    assert correlation > 0.85
    assert labels > 0.5


@pytest.mark.slow
def test_neighbour_that_does_not_know_the_secret_finds_no_more_than_the_mean_image():
    correlation, labels = attacked([fleet.secret(name) for name in NAMES])
    mean = _sites()[VICTIM].train[0].flatten(1).mean(0)
    images = _sites()[VICTIM].train[0].flatten(1)
    alone = torch.corrcoef(torch.cat([mean[None], images]))[0, 1:].median()
    assert correlation < float(alone) + 0.05
    assert labels < 0.2


if __name__ == "__main__":
    for what, secrets in (("public draws", None), ("secrets", [fleet.secret(name) for name in NAMES])):
        correlation, labels = attacked(secrets)
        print(f"{what}: median correlation {correlation:.2f}, labels {labels:.1%}")
