"""A passive neighbour takes every message of a site for what it is: the gradient of one batch at a model that it knows.

The neighbour runs the protocol unchanged. It knows the experiment (graph, steps, model, size of batches, compressor),
its own rows, its own messages and those of its neighbours. On a ring of three these are all messages, so it follows
every public copy and subtracts the gossip. What is left of a message is a step along the gradient of one batch. The
sites draw their batches from secrets, so the neighbour does not know which rows are in a batch, and does not need to.

For a logistic model, the gradient of the biases tells how many rows of the batch have each label, and the gradient of
the weights is a sum of the rows. Each round is searched alone for rows of these labels that have this gradient.
`test_node.py` shows that a mesh equals a simulation that is given the secrets, so the attack is made on simulations.

`python -m tests.mesh.test_every_message` prints the table of docs/results/security.md.

With differential privacy, the gradient of a batch is one of clipped rows, with noise. The neighbour knows clip and
noise, and takes them into account. `reconstructed()` makes the attack on such runs."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import one_hot

import fairmesh as fm
from fairmesh.compression.codes import Code, Levels, Signs
from fairmesh.data.samples import Samples
from fairmesh.networks.memory import MemoryNetwork
from fairmesh.privacy.accounting import shared_noise
from fairmesh.problems.private_oracle import PrivateOracle
from fairmesh.problems.private_run import PrivateRun, seal
from fairmesh.training.loop import Training
from fairmesh.training.options import Options
from fairmesh.training.replicas import replicas_of
from tests.mesh import fleet

NAMES, ATTACKER, VICTIM = ("attacker", "victim", "third"), 0, 1
CLASSES, PIXELS = 10, 64
LENGTH = 1.0  # of a step
_ROUNDED = 6**-0.5  # standard deviation of rounding at random, in levels
_OFF_THE_MEAN = 0.75  # that of the magnitude of a normal number, in means of it
PASSES, STEPS = 3, 150  # of a search: labels are chosen again after each pass
DELTA, CLIP = (
    1e-3,
    1.0,
)  # of private runs; the delta is as large as it may be for these sites, which is easiest to attack
ALIKE = 0.9  # the correlation above which a row counts as found


def _ad_gda(compressor: fm.compressors.Compressor) -> fm.ADGDA:
    return fm.ADGDA(primal_step=LENGTH, dual_step=0.01, consensus_step=0.5, compressor=compressor)


ALGORITHMS = {
    "AD-GDA, uncompressed": _ad_gda(fm.compressors.Identity()),
    "AD-GDA, 4 bits in blocks of 64": _ad_gda(fm.compressors.Quantize(bits=4, block=64)),
    "AD-GDA, 4 bits": _ad_gda(fm.compressors.Quantize(bits=4)),
    "AD-GDA, 2 bits in blocks of 64": _ad_gda(fm.compressors.Quantize(bits=2, block=64)),
    "AD-GDA, signs in blocks of 64": _ad_gda(fm.compressors.Sign(block=64)),
    "Tracked AD-GDA, its default compressor": fm.TrackedADGDA(),
}


class Overheard(MemoryNetwork):
    """A network whose messages are kept."""

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.messages: list[dict[str, Code]] = []

    def exchange(self, parts, round_index):
        self.messages.append({name: part.code for name, part in parts.items()})
        return super().exchange(parts, round_index)


class Run(NamedTuple):
    """A run, and what is true of it."""

    problem: fm.Problem
    algorithm: Any
    mixing: Tensor  # W
    messages: list[dict[str, Code]]  # of all three sites
    weights: (
        Tensor  # n lambda of the victim in each round; a neighbour knows it of AD-GDA, and roughly of Tracked AD-GDA
    )
    consensus_step: float
    rows: list[Tensor]  # which of its rows the victim used in each round
    noise: float = 0.0  # deviation of what is added to each number of its gradients
    clip: float = math.inf  # of the gradient of each row


def _run(algorithm: str, batch: int, rounds: int, epsilon: float | None = None, number: int = 0) -> Run:
    """Trains, with the attacker watching; privately, if there is an epsilon. Runs of other numbers
    draw from other secrets."""
    settings, rows, weights = ALGORITHMS[algorithm], [], []
    model = fm.models.Logistic()
    problem = fm.Problem(
        lambda: model.build(torch.Size([8, 8]), CLASSES),
        fm.data.Digits(nodes=3).sites(),
        sampling=fm.Sampling(batch),
        privacy=None if epsilon is None else fm.Privacy(epsilon, DELTA, clip=CLIP),
    ).prepared
    secrets, private, noise = [fleet.secret(f"{name} {number}" if number else name) for name in NAMES], None, 0.0
    if epsilon is not None:
        problem = seal(problem)
        private = replace(PrivateRun.of(problem, 1, rounds, settings.uses_losses()), secrets=tuple(secrets))
        noise = shared_noise(private.releases[VICTIM].noise, private.loss_share)[0] * CLIP / batch
    network = Overheard(fm.Ring().build(3), secrets=secrets)
    replicas = replicas_of([settings], [0], None, 3)
    training = Training(problem, fm.Ring(), replicas, Options(), network=network, private=private)
    oracle, state = training.oracle, training.initial()
    if isinstance(oracle, PrivateOracle):
        _note_draws(oracle, rows)
    for t in range(rounds):
        if private is None:
            chosen = oracle.batches.indices(torch.tensor([t]), 0, 1).view(3, batch)[VICTIM]
            rows.append(chosen - int(oracle.division.starts[0, VICTIM, 0]))
        state = training.advance(state, t)
        shown = training.view.own_weights(state.algorithm)
        weights.append(torch.ones(()) if shown is None else shown[0, VICTIM, 0])
    steps = state.algorithm.consensus_steps
    step = settings.consensus_step if steps is None else float(steps.flatten()[0])
    mixing = torch.tensor(network.cycle[0].matrix.toarray())
    clip = math.inf if private is None else CLIP
    return Run(problem, settings, mixing, network.messages, torch.stack(weights).double(), step, rows, noise, clip)


def _note_draws(oracle: PrivateOracle, rows: list[Tensor]) -> None:
    """Adds the victim's rows to a list whenever they are drawn, which nobody else knows."""
    mechanism, drawn = oracle._mechanism, oracle._mechanism.drawn

    def noted(nonces: Tensor) -> tuple[Tensor, Tensor]:
        numbers, present = drawn(nonces)
        rows.append(numbers[VICTIM][present[VICTIM]])
        return numbers, present

    mechanism.drawn = noted


class Seen(NamedTuple):
    """What the neighbour knows of the victim's gradient in each round (rounds, dim)."""

    points: Tensor  # where it was taken
    gradients: Tensor
    errors: Tensor  # about how far the numbers may be off, by compression and noise
    clip: float = math.inf  # of the gradient of each row


def _told(run: Run, code: Code) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what a message adds to all public copies, what the victim probably meant, and how far that may be off."""
    added = code.decode()[0].double()
    meant, error = added[VICTIM], torch.zeros_like(added[VICTIM])
    if isinstance(code, Levels):  # rounded at random to one of two levels, and shortened
        level = 2.0**-run.algorithm.compressor.bits
        meant, error = meant * level / code.unit, _each(code.norms, code.block, meant) * level * _ROUNDED
    if isinstance(code, Signs):
        error = _each(code.means, code.block, meant) * _OFF_THE_MEAN
    return added, meant, error


def _each(of_blocks: Tensor, block: int, row: Tensor) -> Tensor:
    return of_blocks[0, VICTIM].double().repeat_interleave(block)[: len(row)]


def _seen(run: Run) -> Seen:
    found = _in_trackers(run) if isinstance(run.algorithm, fm.TrackedADGDA) else _in_models(run)
    points, gradients, errors = (torch.stack(rows).float() for rows in zip(*found))
    return Seen(points, gradients, (errors**2 + run.noise**2).sqrt(), run.clip)


def _gossip(run: Run, copies: Tensor) -> Tensor:
    return run.consensus_step * (run.mixing @ copies - copies)[VICTIM]


def _in_models(run: Run) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields point, gradient and error of each round of AD-GDA. The weights travel as they are."""
    model = run.problem.initial_row(0).double()
    copies, off = torch.zeros(3, len(model), dtype=torch.float64), torch.zeros_like(model)
    samples = torch.tensor([len(site.train) for site in run.problem.sites], dtype=torch.float64)
    weight = (samples / samples.sum())[VICTIM]
    for message in run.messages:
        gossip = _gossip(run, copies)
        added, meant, error = _told(run, message["model"])
        after = copies[VICTIM] + meant
        yield model, (model + gossip - after) / (LENGTH * weight), (error**2 + off**2).sqrt() / (LENGTH * weight)
        copies, model, off = copies + added, after, error
        weight = (run.mixing @ message["dual"].decode()[0].double())[VICTIM, VICTIM]


def _in_trackers(run: Run) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields the same of Tracked AD-GDA, whose trackers are momenta of gradients plus gossip."""
    models = run.problem.initial_row(0).double().expand(3, -1)
    momentum, off, balance, beta = 0.0, 0.0, 0.0, run.algorithm.beta1
    copies = torch.zeros_like(models)
    for message, weight in zip(run.messages, run.weights):
        balance = balance + _gossip(run, copies)
        added, meant, error = _told(run, message["tracker"])
        after = copies[VICTIM] + meant - balance
        share = (1 - beta) * weight
        errors = (error**2 + (beta * off) ** 2).sqrt()
        yield (run.mixing @ models)[VICTIM], (after - beta * momentum) / share, errors / share
        copies, momentum, off = copies + added, after, error
        models = models + message["model"].decode()[0].double()


# The search


def _gradients(points: Tensor, rows: Tensor, labels: Tensor, clip: float = math.inf) -> tuple[Tensor, Tensor]:
    """Returns the gradients (rounds, starts, dim) of batches (rounds, starts, batch, ...), and what the model says,
    times what the clip leaves of each row's gradient."""
    weights, biases = (
        points[:, None, : CLASSES * PIXELS].unflatten(-1, (CLASSES, PIXELS)),
        points[:, None, None, -CLASSES:],
    )
    said = (rows @ weights.mT + biases).softmax(-1)
    wrong = said - labels
    left = torch.ones_like(said[..., :1])
    if clip < math.inf:
        squares = wrong.square().sum(-1, keepdim=True) * (rows.square().sum(-1, keepdim=True) + 1)
        left = (clip / (squares + 1e-12).sqrt()).clamp(max=1)
    wrong = wrong * left / rows.shape[-2]
    return torch.cat([(wrong.mT @ rows).flatten(-2), wrong.sum(-2)], -1), said * left


def _labels(said: Tensor, gradients: Tensor) -> Tensor:
    """Returns the labels (rounds, starts, batch) that the gradient of the biases tells, given what the model says."""
    batch, left = said.shape[-2], said.sum(-1).mean(-1)[..., None]
    counts = (batch * (said.mean(-2) - gradients[:, None, -CLASSES:]) / left).clamp(min=0)
    chosen = torch.zeros_like(counts)
    for _ in range(batch):  # one label after the other, where the most is missing
        chosen += one_hot((counts - chosen).argmax(-1), CLASSES)
    return (torch.arange(batch)[:, None] >= chosen.cumsum(-1).unsqueeze(-2)).sum(-1)


def _found(seen: Seen, own: Samples, batch: int) -> tuple[Tensor, Tensor]:
    """Returns the rows (rounds, batch, pixels) and labels (rounds, batch) that explain the gradient of each round best,
    of three searches from different starts. Rows are drawn towards the neighbour's own of the same label, which decides
    what the gradient leaves open."""
    images, of_label = own.inputs.flatten(1), [own.targets == label for label in range(CLASSES)]
    means = torch.stack([images[mask].mean(0) for mask in of_label])
    spreads = torch.stack([images[mask].std(0) for mask in of_label]) + 0.1
    generator = torch.Generator().manual_seed(0)
    size = seen.gradients.square().mean(-1, keepdim=True).sqrt()
    precision = (seen.errors.square() + (1e-3 * size).square()).reciprocal()[:, None]
    drawn = torch.randint(len(images), (len(size), 3, batch), generator=generator)
    guessed = one_hot(own.targets[drawn], CLASSES).float()
    labels = _labels(_gradients(seen.points, images[drawn], guessed, seen.clip)[1], seen.gradients)
    rows = means[labels] + 0.5 * spreads[labels] * torch.randn(*drawn.shape, PIXELS, generator=generator)
    for _ in range(PASSES):
        logits = rows.clamp(0.02, 0.98).logit().requires_grad_()
        optimizer = torch.optim.Adam([logits])
        for k in range(STEPS):
            optimizer.param_groups[0]["lr"] = 0.1 * (1 - k / STEPS)
            gradients, said = _gradients(seen.points, logits.sigmoid(), one_hot(labels, CLASSES).float(), seen.clip)
            misfit = ((gradients - seen.gradients[:, None]).square() * precision).mean(-1)
            unlike = ((logits.sigmoid() - means[labels]) / spreads[labels]).square().sum((-2, -1))
            optimizer.zero_grad()
            (gradients.shape[-1] * misfit.log1p() + unlike).sum().backward()  # log1p: starts are far from any fit
            optimizer.step()
        rows, found, best = logits.detach().sigmoid(), labels, misfit.detach().argmin(-1)
        labels = _labels(said.detach(), seen.gradients)
    at = torch.arange(len(best)), best
    return rows[at], found[at]


class Found(NamedTuple):
    """What was found of each round, next to what somebody would find who sees no message."""

    rows: Tensor  # whose correlation with a true one is above 0.9, each matched with another (rounds,)
    labels: Tensor  # that are right (rounds,)
    guessed_rows: Tensor  # the same of rows of the third site
    guessed_labels: Tensor  # the same if every batch has each label equally often
    drawn: Tensor  # how many rows the victim has used (rounds,)


def attacked(algorithm: str, batch: int, rounds: int, epsilon: float | None = None) -> Found:
    run = _run(algorithm, batch, rounds, epsilon)
    return _searched(_seen(run), run.rows, batch)


def attacked_first(algorithm: str, batch: int, runs: int, epsilon: float | None = None) -> Found:
    """Makes the attack on runs of one round, which spend all on it, so that there is the least noise."""
    every = [_run(algorithm, batch, 1, epsilon, number) for number in range(1, runs + 1)]
    seen = [_seen(run) for run in every]
    parts = (torch.cat([getattr(one, name) for one in seen]) for name in ("points", "gradients", "errors"))
    return _searched(Seen(*parts, seen[0].clip), [run.rows[0] for run in every], batch)


def _searched(seen: Seen, drawn: list[Tensor], batch: int) -> Found:
    """Searches for the rows that the victim has drawn in each round."""
    rounds, train = len(drawn), [Samples.of(site.train, "rows") for site in fm.data.Digits(nodes=3).sites()]
    rows, labels = _found(seen, train[ATTACKER], batch)
    images, targets = train[VICTIM].inputs.flatten(1), train[VICTIM].targets
    true, true_labels = [images[some] for some in drawn], [targets[some] for some in drawn]
    elsewhere = train[2].inputs.flatten(1)
    other = elsewhere[torch.arange(rounds * batch) % len(elsewhere)].view(rounds, batch, -1)
    even = (torch.arange(batch) % CLASSES).expand(rounds, batch)
    of_rows, of_labels = (
        [torch.tensor([same(*pair) for pair in zip(known, some)]) for some in guesses]
        for same, known, guesses in ((_alike, true, (rows, other)), (_same, true_labels, (labels, even)))
    )
    counts = torch.tensor([len(some) for some in drawn])
    return Found(of_rows[0], of_labels[0], of_rows[1], of_labels[1], counts)


def _alike(true: Tensor, found: Tensor) -> int:
    one, other = (rows - rows.mean(1, keepdim=True) for rows in (true, found))
    similar = (one @ other.T) / (one.norm(dim=1)[:, None] * other.norm(dim=1)).clamp(min=1e-9)
    return int((similar[linear_sum_assignment(-similar.numpy())] > ALIKE).sum())


def _same(true: Tensor, found: Tensor) -> int:
    """Returns how many labels two batches have in common, in any order."""
    return int(torch.minimum(*(labels.bincount(minlength=CLASSES) for labels in (true, found))).sum())


def test_every_uncompressed_message_of_a_small_batch_shows_its_rows_and_labels():
    found = attacked("AD-GDA, uncompressed", 8, 4)
    assert found.labels.tolist() == [8, 8, 8, 8]
    assert found.rows.min() >= 5
    assert found.guessed_rows.sum() <= 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "batch", "rows", "labels"),
    [
        ("AD-GDA, uncompressed", 8, 67, 80),
        ("AD-GDA, uncompressed", 32, 155, 317),
        ("AD-GDA, 4 bits in blocks of 64", 8, 45, 78),
        ("AD-GDA, 4 bits in blocks of 64", 32, 0, 310),
    ],
)
def test_neighbour_finds_at_least_what_the_documentation_says(algorithm, batch, rows, labels):
    found = attacked(algorithm, batch, 10)
    assert found.rows.sum() >= rows
    assert found.labels.sum() >= labels


@pytest.mark.slow
@pytest.mark.parametrize("batch", [8, 32])
def test_default_shows_labels_of_the_first_rounds_and_later_no_more_than_guessing(batch):
    found = attacked("Tracked AD-GDA, its default compressor", batch, 40)
    assert found.labels[0] > found.guessed_labels[0]
    assert found.labels[10:].sum() <= found.guessed_labels[10:].sum()
    assert found.rows.sum() <= found.guessed_rows.sum() + 0.05 * 40 * batch


@pytest.mark.slow
@pytest.mark.parametrize("batch", [8, 32])
def test_two_bits_show_labels_but_no_rows(batch):
    found = attacked("AD-GDA, 2 bits in blocks of 64", batch, 10)
    assert found.labels.sum() > found.guessed_labels.sum() + 0.05 * 10 * batch
    assert found.rows.sum() <= found.guessed_rows.sum() + 0.05 * 10 * batch


def reconstructed(rounds: int = 40) -> Iterator[dict[str, Any]]:
    """Yields what is found of rows and labels in uncompressed messages, without privacy and at epsilon 8: shares of the
    rows that were used, with half widths of 95 % intervals over rounds. Of a run, and of many runs of one round, which
    have less noise."""
    attacks = {"every message of a run": attacked, "the message of a run of one round": attacked_first}
    for epsilon, (name, attack), batch in itertools.product((None, 8.0), attacks.items(), (8, 32)):
        found = attack("AD-GDA, uncompressed", batch, rounds, epsilon)
        named = {
            "rows": found.rows,
            "rows by chance": found.guessed_rows,
            "labels": found.labels,
            "labels by chance": found.guessed_labels,
            "rows above chance": found.rows - found.guessed_rows,
            "labels above chance": found.labels - found.guessed_labels,
        }
        shares = {what: _interval(counts / found.drawn.clamp(min=1)) for what, counts in named.items()}
        yield {"attack": name, "batch": batch, "epsilon": epsilon, **shares}


def _interval(values: Tensor) -> list[float]:
    return [float(values.mean()), 2.02 * float(values.std()) / len(values) ** 0.5]


def _row(algorithm: str, batch: int, rounds: int = 40) -> str:
    found = attacked(algorithm, batch, rounds)
    spans = [slice(0, 1), slice(1, 10), slice(10, rounds)]
    labels = [f"{found.labels[span].double().mean() / batch:.0%}" for span in spans]
    guessed = f"{found.guessed_labels.double().mean() / batch:.0%}"
    rows = [f"{found.rows.sum()} of {rounds * batch}", str(int(found.guessed_rows.sum()))]
    return f"| {' | '.join([algorithm, str(batch), *rows, *labels, guessed])} |"


if __name__ == "__main__":
    print("| algorithm | batch | rows found | by guessing | labels in round 0 | 1 to 9 | 10 to 39 | by guessing |")
    print("|---|---|---|---|---|---|---|---|")
    for algorithm in ALGORITHMS:
        for batch in (8, 32):
            print(_row(algorithm, batch), flush=True)
