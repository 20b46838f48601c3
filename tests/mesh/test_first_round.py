"""A passive neighbour looks at the first message of a site. All sites start from the same model, so the message shows
the gradient of one batch, up to compression. The neighbour searches for rows that have this gradient. It does not need
to know which rows are in the batch, so secrets do not help here.

`python -m tests.mesh.test_first_round` prints the table of docs/results/security.md."""

from typing import NamedTuple

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.func import functional_call

import fairmesh as fm
from fairmesh.networks.memory import MemoryNetwork
from fairmesh.training.loop import Training
from fairmesh.training.options import Options
from fairmesh.training.replicas import replicas_of
from tests.mesh import fleet

NAMES, VICTIM = ("attacker", "victim", "third"), 1


def _logistic() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.Sigmoid(), nn.Conv2d(16, 16, 3, 2, 1), nn.Sigmoid(),
        nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


MODELS = {"logistic": _logistic, "small CNN": _cnn}
ALGORITHMS = {
    "AD-GDA, uncompressed": fm.ADGDA(primal_step=1.0, dual_step=0.01),
    "AD-GDA, 4 bits": fm.ADGDA(
        primal_step=1.0, dual_step=0.01, consensus_step=0.5, compressor=fm.compressors.Quantize(bits=4)
    ),
    "Tracked AD-GDA": fm.TrackedADGDA(),
}


class Found(NamedTuple):
    images: float  # median correlation of the images found with the true ones, each matched with another
    labels: float  # share that is right
    by_chance: float  # the correlation that rows of another site have, matched in the same way


def _first_message(model: str, algorithm: str, batch: int) -> tuple[fm.Problem, Tensor, Tensor, Tensor]:
    """Returns the problem, what the first message says about the gradient, and the true images and labels."""
    problem = fm.Problem(MODELS[model], fm.data.Digits(nodes=3).sites(), sampling=fm.Sampling(batch)).prepared
    network = MemoryNetwork(fm.Ring().build(3), secrets=[fleet.secret(name) for name in NAMES])
    replicas = replicas_of([ALGORITHMS[algorithm]], [0], None, 3)
    training = Training(problem, fm.Ring(), replicas, Options(), network=network)
    oracle = training.oracle
    rows = oracle.batches.indices(torch.tensor([0]), 0, 1).view(3, batch)[VICTIM] - int(
        oracle.division.starts[0, VICTIM, 0]
    )
    state = training.advance(training.initial(), 0).algorithm
    copies = getattr(state, "tracker_copies", None)
    seen = copies[0][0, VICTIM] if copies is not None else problem.initial_row(0) - state.copies[0][0, VICTIM]
    images, labels = problem.sites[VICTIM].train.inputs, problem.sites[VICTIM].train.targets
    return problem, seen, images[rows], labels[rows]


def attacked(model: str, algorithm: str, batch: int, steps: int = 800) -> Found:
    """Searches for images and labels whose gradient points where the message points."""
    problem, seen, images, labels = _first_message(model, algorithm, batch)
    module = MODELS[model]()
    parameters = {name: row.detach() for name, row in problem.flat_model.state_dict(problem.initial_row(0)).items()}
    generator = torch.Generator().manual_seed(0)
    drawn = (0.3 * torch.randn(batch, 8, 8, generator=generator)).requires_grad_()
    guesses = (0.3 * torch.randn(batch, 10, generator=generator)).requires_grad_()

    def gradient() -> Tensor:
        free = {name: tensor.clone().requires_grad_() for name, tensor in parameters.items()}
        outputs = functional_call(module, free, (drawn.sigmoid(),))
        loss = -(outputs.log_softmax(-1) * guesses.softmax(-1)).sum(-1).mean()
        return torch.cat([one.flatten() for one in torch.autograd.grad(loss, list(free.values()), create_graph=True)])

    optimizer = torch.optim.Adam([drawn, guesses], lr=0.1)
    for k in range(steps):
        optimizer.zero_grad()
        (1 - torch.cosine_similarity(gradient(), seen, dim=0)).backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (1 - k / steps)
    found, pairs = _matched(images, drawn.detach().sigmoid())
    right = guesses.argmax(1)[list(pairs[1])] == labels[list(pairs[0])]
    elsewhere = problem.sites[VICTIM + 1].train.inputs[:batch]
    return Found(found, float(right.float().mean()), _matched(images, elsewhere)[0])


def _matched(images: Tensor, others: Tensor) -> tuple[float, tuple]:
    """Returns the median correlation of images with others, each matched with another, and the pairs."""
    centred = [rows.flatten(1) - rows.flatten(1).mean(1, keepdim=True) for rows in (images, others)]
    one, other = (rows / rows.norm(dim=1, keepdim=True) for rows in centred)
    similar = one @ other.T
    pairs = linear_sum_assignment(-similar.numpy())
    return float(similar[pairs].median()), pairs


@pytest.mark.slow
def test_first_message_of_a_small_batch_shows_its_rows_and_secrets_do_not_prevent_it():
    alone = attacked("logistic", "AD-GDA, uncompressed", 1)
    assert alone.images > 0.9
    assert alone.labels == 1


@pytest.mark.slow
def test_large_batches_hide_more_than_small_ones():
    small, large = (attacked("small CNN", "AD-GDA, uncompressed", batch).images for batch in (1, 32))
    assert large < small - 0.1


if __name__ == "__main__":
    print("| model | algorithm | batch | correlation of images | by chance | labels right |")
    print("|---|---|---|---|---|---|")
    for model in MODELS:
        for algorithm in ALGORITHMS:
            for batch in (1, 10, 32):
                found = attacked(model, algorithm, batch)
                figures = f"{found.images:.2f} | {found.by_chance:.2f} | {found.labels:.0%}"
                print(f"| {model} | {algorithm} | {batch} | {figures} |")
