"""A passive neighbour tries to solve for the training rows of its neighbour, from what it receives in the whole run.

The neighbour follows the public copies of its neighbours, so it knows most of the gossip part of every step and
estimates the gradients. If it also knows which rows are in which batch, images and labels are the unknowns of a large
system of equations. A mesh draws batches from a secret of the site, which is against this attack alone:
`test_every_message.py` has one that needs no draws. `test_node.py` shows that a mesh equals a simulation that is given
the secrets, so the attack is made on simulations.

`python -m tests.mesh.test_reconstruction` prints the table of docs/results/security.md."""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

import fairmesh as fm
from fairmesh.networks.memory import MemoryNetwork
from fairmesh.training.loop import Training
from fairmesh.training.options import Options
from fairmesh.training.replicas import replicas_of
from tests.mesh import fleet
from tests.mesh.test_first_round import MODELS

ROUNDS, BATCH, CLASSES, ATTACKER, VICTIM = 3000, 10, 10, 0, 1
AD_GDA = fm.ADGDA(primal_step=1.0, dual_step=0.01, consensus_step=0.5, compressor=fm.compressors.Quantize(bits=4))


class Stage(NamedTuple):
    """A part of the search: steps of Adam, each on some stretches of consecutive rounds."""

    steps: int
    length: int  # rounds of a stretch
    stretches: int
    until: int  # the last round used
    rate: float  # of images; labels move more slowly


class Setting(NamedTuple):
    model: str
    algorithm: Any
    sites: int  # on a ring; in a ring of three the attacker sees both neighbours of its neighbour, else one
    search: tuple[Stage, ...]
    trend: int = 0  # degree of the polynomials in time that the fit leaves out: 0 where the gossip is known

    @property
    def tracked(self) -> bool:
        return isinstance(self.algorithm, fm.TrackedADGDA)


class Seen(NamedTuple):
    """What the attacker knows of each round."""

    points: Tensor  # where the victim takes its gradient (rounds, dim), up to compression
    moves: Tensor  # what the victim's gradient, times its factor, has done (rounds, dim), up to compression
    factors: Tensor  # (rounds,); of Tracked AD-GDA a neighbour knows them roughly, and here exactly
    rows: Tensor  # that a simulation with the experiment's seed would use (rounds, batch)
    memory: float  # share of a move that is left after a round: 1 if moves add up


def _training(setting: Setting, secrets: list[bytes] | None) -> Training:
    problem = fm.Problem(MODELS[setting.model], _sites(setting), sampling=fm.Sampling(BATCH)).prepared
    network = MemoryNetwork(fm.Ring().build(setting.sites), secrets=secrets)
    replicas = replicas_of([setting.algorithm], [0], None, setting.sites)
    return Training(problem, fm.Ring(), replicas, Options(), network=network)


def _sites(setting: Setting) -> list[fm.Site]:
    return fm.data.Digits(nodes=setting.sites).sites()


def _samples(setting: Setting, site: int) -> fm.data.Samples:
    return fm.data.Samples.of(_sites(setting)[site].train, "its samples")


def _seen(setting: Setting, secrets: list[bytes] | None) -> Seen:
    """Trains, with the attacker watching. It computes the rows from what everybody knows."""
    training, guessed, tracked = _training(setting, secrets), _training(setting, None).oracle, setting.tracked
    state, copies, trackers, weights, rows = training.initial(), [], [], [], []
    for t in range(ROUNDS):
        copies.append(state.algorithm.copies.own[0].clone())
        chosen = guessed.batches.indices(torch.tensor([t]), 0, 1).view(setting.sites, BATCH)[VICTIM]
        rows.append(chosen - int(guessed.division.starts[0, VICTIM, 0]))
        weights += [] if tracked else [state.algorithm.duals[0, VICTIM, VICTIM]]
        trackers += [state.algorithm.tracker_copies.own[0].clone()] if tracked else []
        state = training.advance(state, t)
        weights += [training.view.own_weights(state.algorithm)[0, VICTIM, 0]] if tracked else []
    last = state.algorithm
    models, factors = torch.stack([*copies, last.copies.own[0]]), torch.stack(weights)
    if not tracked:
        moves = models[1:, VICTIM] - models[:-1, VICTIM] - AD_GDA.consensus_step * _gossip(setting, models[:-1])
        return Seen(models[:-1, VICTIM], moves, factors, torch.stack(rows), 1.0)
    copies_of_trackers, beta = torch.stack([*trackers, last.tracker_copies.own[0]]), setting.algorithm.beta1
    step = float(last.consensus_steps.flatten()[0])
    balances = (step * _gossip(setting, copies_of_trackers[:-1])).cumsum(0)
    momenta = copies_of_trackers[1:, VICTIM] - balances  # of the victim's weighted gradients
    moves = beta * torch.nn.functional.pad(momenta[:-1], (0, 0, 1, 0)) - momenta
    points = models[:-1, VICTIM] + _gossip(setting, models[:-1])
    return Seen(points, moves, (1 - beta) * factors, torch.stack(rows), beta)


def _gossip(setting: Setting, copies: Tensor) -> Tensor:
    """Returns sum_j w_ij (x_hat_j - x_hat_i) of the victim i, without the copies that the attacker does not have."""
    weights = torch.tensor(fm.Ring().build(setting.sites)[0].matrix.toarray())[VICTIM].float()
    known = {ATTACKER, (ATTACKER + 1) % setting.sites, (ATTACKER - 1) % setting.sites}
    return sum(weights[j] * (copies[:, j] * (j in known) - copies[:, VICTIM]) for j in range(setting.sites))


def _gradients(model: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Returns a function of models (rounds, dim), images (rounds, batch, 8, 8) and labels (rounds, batch, 10)."""
    module = MODELS[model]()
    shapes = {name: one.shape for name, one in module.named_parameters()}

    def loss(row: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        pieces = row.split([shape.numel() for shape in shapes.values()])
        parameters = {name: piece.view(shape) for piece, (name, shape) in zip(pieces, shapes.items())}
        return -(functional_call(module, parameters, (images,)).log_softmax(-1) * labels).sum(-1).mean()

    return vmap(grad(loss))


def _filter(memory: float, length: int, trend: int) -> Tensor:
    """Returns a matrix (length + 1, length) that adds up what consecutive moves leave, and takes out what the attacker
    cannot know: where the stretch began, and polynomials in time. Errors of compression do not add up over rounds, so
    they matter less in longer stretches."""
    times = torch.arange(length + 1, dtype=torch.float64)
    sums = memory ** (times[:, None] - 1 - times[None, :-1]) * (times[:, None] > times[None, :-1])
    basis, _ = torch.linalg.qr(torch.stack([memory**times * (times / length) ** k for k in range(trend + 1)], 1))
    return (sums - basis @ (basis.T @ sums)).float()


def _first_guess(setting: Setting, seen: Seen, samples: int) -> tuple[Tensor, Tensor]:
    """Returns images and labels to start from, as logits. If every row always had the same gradient, the moves would be
    linear in these gradients. They are solved for, and their part for the outputs' biases is negative at the label. The
    images are means of the attacker's own ones by label."""
    length = setting.search[0].length
    added, count = _filter(seen.memory, length, setting.trend), ROUNDS // length
    at = torch.arange(count * length)
    members = torch.zeros(len(at), samples).scatter_add_(1, seen.rows[at], torch.full((len(at), BATCH), 1 / BATCH))
    left = added @ (members * seen.factors[at, None]).view(count, length, samples)
    right = -added @ seen.moves[at, -CLASSES:].view(count, length, CLASSES)
    size = (added @ seen.moves[at].view(count, length, -1)).square().sum((1, 2), keepdim=True).sqrt()
    left, right = (left / size).flatten(0, 1), (right / size).flatten(0, 1)
    squares = left.T @ left
    ridge = 0.1 * squares.diagonal().mean() * torch.eye(samples)
    biases = torch.linalg.solve(squares + ridge, left.T @ right)
    labels = (biases.mean(0) - biases) / biases.std()
    own = _samples(setting, ATTACKER)
    means = torch.stack([own.inputs[own.targets == label].mean(0) for label in range(CLASSES)])
    images = torch.einsum("nc,cij->nij", (2 * labels).softmax(-1), means)
    return images.clamp(0.02, 0.98).logit(), labels


def _solved(setting: Setting, seen: Seen, samples: int) -> tuple[Tensor, Tensor]:
    """Returns the images (samples, 64) and labels that explain the victim's moves best."""
    gradients = _gradients(setting.model)
    images, labels = (guess.requires_grad_() for guess in _first_guess(setting, seen, samples))
    generator = torch.Generator().manual_seed(0)
    for steps, length, stretches, until, rate in setting.search:
        optimizer = torch.optim.Adam([{"params": [images]}, {"params": [labels]}])
        added, size = _filter(seen.memory, length, setting.trend), seen.moves.square().sum(-1).mean()
        for k in range(steps):
            starts = torch.randint(0, until - length + 1, (stretches, 1), generator=generator)
            at = (starts + torch.arange(length)).flatten()
            drawn, targets = images.sigmoid()[seen.rows[at]], labels.softmax(-1)[seen.rows[at]]
            left = seen.factors[at].unsqueeze(1) * gradients(seen.points[at], drawn, targets) + seen.moves[at]
            optimizer.zero_grad()
            ((added @ left.view(stretches, length, -1)).square().sum(-1).mean() / size).backward()
            for group, share in zip(optimizer.param_groups, (1.0, 0.5)):
                group["lr"] = share * rate * (1 - k / steps)
            optimizer.step()
    return images.sigmoid().detach().flatten(1), labels.argmax(1)


class Found(NamedTuple):
    images: float  # median correlation of the images found with the true ones
    labels: float  # share that is right
    mean_image: float  # the median correlation that the mean of all true images would have
    commonest: float  # the share of labels that are right if all are guessed to be the commonest one


def attacked(setting: Setting, secrets: bool) -> Found:
    """Makes the attack on a run whose draws are public, or come from secrets."""
    true = _samples(setting, VICTIM)
    images, labels = true.inputs.flatten(1), true.targets
    given = [fleet.secret(f"site {i}") for i in range(setting.sites)]
    found, guesses = _solved(setting, _seen(setting, given if secrets else None), len(labels))
    return Found(
        _correlation(images, found),
        float((guesses == labels).float().mean()),
        _correlation(images, images.mean(0).expand_as(images)),
        float(labels.bincount().max() / len(labels)),
    )


def _correlation(images: Tensor, others: Tensor) -> float:
    one, other = (rows - rows.mean(1, keepdim=True) for rows in (images, others))
    return float(((one * other).sum(1) / (one.norm(dim=1) * other.norm(dim=1))).median())


_SEARCH = (Stage(400, 8, 50, 3000, 0.05), Stage(600, 20, 20, 3000, 0.05), Stage(600, 40, 10, 3000, 0.03))
_OF_TRACKERS = (Stage(600, 20, 20, 600, 0.05), Stage(800, 40, 10, 3000, 0.05))  # while they are large, and then all
_OF_A_CNN = (Stage(300, 20, 2, 3000, 0.05), Stage(300, 40, 1, 3000, 0.05))  # its gradients take long to compute
SETTINGS = {
    "logistic, AD-GDA": Setting("logistic", AD_GDA, 3, _SEARCH),
    "logistic, AD-GDA, one side seen": Setting("logistic", AD_GDA, 5, _SEARCH, trend=2),
    "logistic, Tracked AD-GDA": Setting("logistic", fm.TrackedADGDA(), 3, _OF_TRACKERS),
    "small CNN, AD-GDA": Setting("small CNN", AD_GDA, 3, _OF_A_CNN),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "images", "labels"),
    [
        ("logistic, AD-GDA", 0.78, 0.5),
        ("logistic, AD-GDA, one side seen", 0.75, 0.6),
        ("logistic, Tracked AD-GDA", 0.0, 0.18),
        ("small CNN, AD-GDA", 0.0, 0.3),
    ],
)
def test_neighbour_that_knows_the_draws_finds_rows_or_at_least_labels(name, images, labels):
    found = attacked(SETTINGS[name], secrets=False)
    assert found.images > images
    assert found.labels > labels


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_neighbour_that_does_not_know_the_secret_finds_no_more_than_the_mean_image(name):
    found = attacked(SETTINGS[name], secrets=True)
    assert found.images < found.mean_image + 0.05
    assert found.labels < found.commonest + 0.06


if __name__ == "__main__":
    print("| model, algorithm | sites | draws | images | mean image | labels right | commonest label |")
    print("|---|---|---|---|---|---|---|")
    for name, setting in SETTINGS.items():
        if sys.argv[1:] not in ([], [name]):
            continue
        for secrets in (False, True):
            found = attacked(setting, secrets)
            figures = f"{found.images:.2f} | {found.mean_image:.2f} | {found.labels:.0%} | {found.commonest:.0%}"
            print(f"| {name} | {setting.sites} | {'secret' if secrets else 'public'} | {figures} |", flush=True)
