"""Audits the privacy of what sites send: `python -m reproduction.privacy.audit` runs it, `--show` prints the tables.

Many equal runs are trained as one batch. In one half of the trials, a site has a canary: a unit whose gradient and loss
are as large as clips allow, and unlike those of all others. In the other half the canary is replaced by nothing. An
attacker who knows everything else guesses which trials have it, by the likelihood ratio of what was sent. If it guesses
better than (epsilon, delta) allows, the claim is wrong. The bound assumes nothing about the mechanism: a threshold is
chosen on a fourth of the trials, and intervals of Clopper and Pearson are for the others.

Broken variants of the mechanism are audited in the same way, and must be found out.
"""

import argparse
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from fairmesh.algorithms import ADGDA, ChocoSGD, TrackedADGDA
from fairmesh.algorithms.base import Algorithm
from fairmesh.compression.compressors import Identity, Quantize
from fairmesh.data.site import Site
from fairmesh.losses import SquaredError
from fairmesh.privacy.accounting import Releases, epsilon_of, noise_for, shared_noise, static_shape
from fairmesh.privacy.secret_draws import ModelDigests, SecretDraws
from fairmesh.privacy.settings import Privacy
from fairmesh.problems.batches import Sampling
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.private_oracle import Clipped, PrivateOracle
from fairmesh.problems.private_run import PrivateRun, seal
from fairmesh.problems.problem import Problem, prepare
from fairmesh.problems.unit_gradients import UnitBatch
from fairmesh.topology.graphs import Complete
from fairmesh.training.loop import Training
from fairmesh.training.options import Options
from fairmesh.training.replicas import Replica

RESULTS = Path(__file__).parent / "audit.json"
EPSILONS, DELTA, CONFIDENCE = (1.0, 2.0), 1e-2, 0.999
TRIALS = 400_000
CLIP, LOSS_CLIP = 1.0, 2.0
LARGE = 1e3  # of inputs of canaries, whose gradients are clipped
_AT_ONCE = 50_000  # trials of one batch


# What a guess proves ---------------------------------------------------------------------------------------------------


def lower_bound(inside: np.ndarray, outside: np.ndarray, delta: float, confidence: float = CONFIDENCE) -> float:
    """Returns an epsilon that the true one exceeds with this confidence, whatever the mechanism is; 0 for none.

    Args:
        inside: The attacker's statistic of each trial with the canary; larger where it believes in it.
        outside: The same without it.
        delta: That of the claim.
        confidence: How sure the bound is.
    """
    first = len(inside) // 4
    every = np.concatenate([inside[:first], outside[:first]])
    cuts = np.unique(np.quantile(every, np.linspace(0.0005, 0.9995, 400)))
    tried = [(_proved(inside[:first], outside[:first], cut, up, delta, confidence), cut, up)
             for cut in cuts for up in (True, False)]  # fmt: skip
    _, cut, up = max(tried)
    return max(0.0, _proved(inside[first:], outside[first:], cut, up, delta, confidence))


def _proved(inside: np.ndarray, outside: np.ndarray, cut: float, up: bool, delta: float, confidence: float) -> float:
    """Returns the bound of one threshold: by trials above it, or by those that are not. Each of two intervals errs with
    half of what is left of the confidence."""
    more, less = (inside > cut, outside > cut) if up else (outside <= cut, inside <= cut)
    hits, errors, tail = int(more.sum()), int(less.sum()), (1 - confidence) / 2
    low = stats.beta.ppf(tail, hits, len(more) - hits + 1) if hits else 0.0
    high = stats.beta.ppf(1 - tail, errors + 1, len(less) - errors) if errors < len(less) else 1.0
    return math.log((low - delta) / high) if low > delta else -math.inf


def gaussian_bound(inside: np.ndarray, outside: np.ndarray, delta: float, confidence: float = CONFIDENCE) -> float:
    """Returns such a bound for a mechanism that is known to be Gaussian: the distance of two normal distributions that
    hits and errors prove, as an epsilon. So few trials say something about a small delta."""
    first, tail, best = len(inside) // 4, (1 - confidence) / 2, (-math.inf, 0.0)

    def distance(some: np.ndarray, others: np.ndarray, cut: float) -> float:
        hits, errors = int((some > cut).sum()), int((others > cut).sum())
        low = stats.beta.ppf(tail, hits, len(some) - hits + 1) if hits else 0.0
        high = stats.beta.ppf(1 - tail, errors + 1, len(others) - errors) if errors < len(others) else 1.0
        return float(stats.norm.ppf(low) - stats.norm.ppf(high)) if 0 < low and high < 1 else -math.inf

    for cut in np.quantile(np.concatenate([inside[:first], outside[:first]]), np.linspace(0.05, 0.95, 19)):
        best = max(best, (distance(inside[:first], outside[:first], cut), cut))
    shift = distance(inside[first:], outside[first:], best[1])
    return epsilon_of([Releases(1, 1.0, 1, 1 / shift, 1)], delta) if shift > 0 else 0.0


# Trials ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What is trained, and what the attacker sees of it.

    Args:
        name: For tables.
        sees: "gradients", "losses" or "both" of every release, or "model": that of the site after the last round.
        rounds: How many rounds.
        units: How many units a site has.
        batch: How many of them are expected in a draw.
        rows: How many rows the canary has.
        algorithm: What trains.
    """

    name: str
    sees: str = "gradients"
    rounds: int = 1
    units: int = 4
    batch: int = 4
    rows: int = 1
    algorithm: Algorithm = ADGDA(0.1, 0.01, consensus_step=0.5, compressor=Identity())  # noqa: RUF009

    @property
    def rate(self) -> float:
        """The chance of a unit to be drawn."""
        return self.batch / self.units

    @property
    def loss_share(self) -> float:
        """The share of the budget for losses."""
        return {"gradients": 0.0, "losses": 0.9, "both": 0.5, "model": 0.1}[self.sees]

    def releases(self, noise: float) -> Releases:
        """Returns what a site releases with this noise."""
        return Releases(self.units, self.rate, static_shape(self.units, self.batch), noise, self.rounds)


SETTINGS = (
    Setting("gradients"),
    Setting("losses", "losses"),
    Setting("gradients and losses", "both"),
    Setting("gradients, 3 rounds", rounds=3),
    Setting("gradients and losses, 3 rounds", "both", rounds=3),
    Setting("gradients, unit of 20 rows", rows=20),
    Setting("gradients and losses, unit of 20 rows, 3 rounds", "both", rounds=3, rows=20),
    Setting("gradients, a fourth drawn", units=16),
    Setting("gradients and losses, a fourth drawn, 4 rounds", "both", rounds=4, units=16),
    Setting("model of AD-GDA, 3 rounds", "model", rounds=3),
    Setting("model of CHOCO-SGD, 4 bits, 3 rounds", "model", rounds=3,
            algorithm=ChocoSGD(0.1, consensus_step=0.5, compressor=Quantize(bits=4))),
    Setting("model of Tracked AD-GDA, 3 rounds", "model", rounds=3, algorithm=TrackedADGDA(primal_step=0.05)),
)  # fmt: skip


def problem_of(setting: Setting, canary: Sequence[float] = (0.0, LARGE, -1e6), other: Sequence[float] = (0.0, 0.0, 1.0),
               model: nn.Module | None = None) -> Prepared:  # fmt: skip
    """Returns a site with the canary and one without, as two splits, next to a site that nothing is asked about.

    Args:
        setting: What is trained.
        canary: Its two inputs and its target. By default its gradient has one direction, whatever the model is.
        other: Those of all other units. By default their gradient is zero, and their loss the centre of what is clipped.
        model: A linear model; by default without a bias.
    """
    rows = torch.tensor([canary] * setting.rows + [other] * (setting.units - 1), dtype=torch.float32)
    numbers = [0] * setting.rows + list(range(1, setting.units))
    nothing = torch.tensor([(0.0, 0.0, 1.0)] + [other] * (setting.units - 1), dtype=torch.float32)
    tested = torch.tensor([(0.0, 0.0, 1.0)] * 2)

    def site(training: Tensor, units: Sequence[int]) -> Site:
        sets = {"train": list(units), "test": [-1, -2]}
        return Site((training[:, :2], training[:, 2]), test=(tested[:, :2], tested[:, 2]), units=sets)

    torch.manual_seed(0)
    privacy = Privacy(1.0, DELTA, clip=CLIP, loss_clip=LOSS_CLIP)
    without = site(nothing, range(setting.units))
    splits = [
        Problem(model or nn.Linear(2, 1, bias=False), [first, without], loss=SquaredError(),
                privacy=privacy, sampling=Sampling(setting.batch))
        for first in (site(rows, numbers), without)
    ]  # fmt: skip
    return seal(prepare(splits))


def training_of(problem: Prepared, setting: Setting, noise: float, trials: int, batch: int = 0) -> Training:
    """Returns so many trials, half of them with the canary, as replicas of one run with a secret of its own.

    Args:
        problem: From `problem_of`.
        setting: What is trained.
        noise: As a multiple of the clip, of gradient and loss together.
        trials: How many.
        batch: The number of this batch of trials.
    """
    secret = hashlib.blake2b(f"audit {batch}".encode(), digest_size=32).digest()
    every = tuple(setting.releases(noise) for split in problem.every_split for _ in split.sites)
    assert problem.privacy is not None  # noqa: S101
    calls = setting.algorithm.oracle_calls()
    run = PrivateRun(
        problem.privacy, every, calls, setting.rounds, LOSS_CLIP, setting.loss_share, secrets=(secret,)
    )  # fmt: skip
    replicas = [Replica(0, (0, 1), setting.algorithm, split) for split in (0, 1) for _ in range(trials // 2)]
    return Training(problem, Complete(), replicas, Options(), private=run)


def private_oracle(training: Training) -> PrivateOracle:
    """Returns the oracle of a private run."""
    assert isinstance(training.oracle, PrivateOracle)  # noqa: S101
    return training.oracle


class Trials(NamedTuple):
    """A statistic of every trial."""

    inside: np.ndarray  # with the canary
    outside: np.ndarray

    @staticmethod
    def of(statistic: Tensor) -> "Trials":
        """Returns them from the statistic of all trials of a batch, the first half of which have the canary."""
        return Trials(*(half.double().numpy() for half in statistic.chunk(2)))

    @staticmethod
    def joined(batches: Sequence["Trials"]) -> "Trials":
        """Returns all trials of several batches."""
        return Trials(*(np.concatenate(parts) for parts in zip(*batches)))


def batches_of(trials: int) -> Iterator[tuple[int, int]]:
    """Yields number and size of batches of trials that fit into memory."""
    for number, first in enumerate(range(0, trials, _AT_ONCE)):
        yield number, min(_AT_ONCE, trials - first)


def attacked(setting: Setting, noise: float, trials: int) -> Trials:
    """Trains, and returns the attacker's statistic of every trial."""
    problem, found = problem_of(setting), []
    for number, size in batches_of(trials):
        training = training_of(problem, setting, noise, size, number)
        ratio = LogRatio(setting, noise)
        watched(training, ratio)
        state = training.initial()
        for t in range(setting.rounds):
            state = training.advance(state, t)
        seen_model = training.view.models(state.algorithm)[:, 0, 1]  # lower, the more often the canary was in a draw
        found.append(Trials.of(-seen_model if setting.sees == "model" else ratio.sum))
    return Trials.joined(found)


def watched(training: Training, seen: Callable[[Tensor, Tensor], None]) -> None:
    """Shows every release of the first site to a function (losses, gradients), as the algorithm gets it."""
    oracle = private_oracle(training)
    release = oracle.losses_and_gradients

    def shown(models: Tensor, round_index: Tensor, call: int) -> tuple[Tensor, Tensor]:
        losses, gradients = release(models, round_index, call)
        seen(losses[:, 0, 0].double(), gradients[:, 0].double())
        return losses, gradients

    oracle.losses_and_gradients = shown  # type: ignore[method-assign]


class LogRatio:
    """Sums, over releases, the logarithm of how much likelier they are with the canary.

    A release is drawn from a mixture: the canary is in the draw, with the chance `rate`, or not. It adds the clip to the
    second coordinate of the gradient, and half the loss clip to the loss. Losses below zero are sent as zero.

    Args:
        setting: What is trained, and what is seen.
        noise: That of gradient and loss together.
    """

    def __init__(self, setting: Setting, noise: float):
        self._setting, self.sum = setting, torch.zeros(())
        self._gradient_noise, self._loss_noise = shared_noise(noise, setting.loss_share)

    def __call__(self, losses: Tensor, gradients: Tensor) -> None:
        batch, log = self._setting.batch, torch.zeros_like(losses)
        if self._setting.sees != "losses":
            log += _log_normal_ratio(gradients[:, 1] * batch / CLIP, self._gradient_noise)
        if self._setting.sees != "gradients" and self._loss_noise < math.inf:
            height = (losses / (LOSS_CLIP / 2) - 1) * batch
            below = torch.tensor(_log_tail_ratio(-batch, self._loss_noise), dtype=torch.float64)
            log += torch.where(losses > 0, _log_normal_ratio(height, self._loss_noise), below)
        drawn = torch.tensor(self._setting.rate, dtype=torch.float64)
        mixed = torch.logaddexp(drawn.log() + log, (1 - drawn).log() + torch.zeros_like(log))
        self.sum = self.sum + mixed


def _log_normal_ratio(x: Tensor, deviation: float) -> Tensor:
    """Returns log N(x; 1, deviation) / N(x; 0, deviation)."""
    return (x - 0.5) / deviation**2


def _log_tail_ratio(x: float, deviation: float) -> float:
    return float(stats.norm.logcdf((x - 1) / deviation) - stats.norm.logcdf(x / deviation))


def noise_of(setting: Setting, epsilon: float, delta: float = DELTA) -> float:
    """Returns the noise that a run would have for a claim."""
    return noise_for(epsilon, delta, setting.units, setting.batch, setting.rounds)


class Audited(NamedTuple):
    """What was found of a claim."""

    name: str
    epsilon: float
    delta: float
    noise: float
    trials: int
    bound: float  # the largest epsilon that is proved
    share: float  # of the claim
    gaussian: float | None = None  # what is proved if the mechanism is known to be Gaussian


def audited(setting: Setting, epsilon: float, trials: int = TRIALS, delta: float = DELTA) -> Audited:
    """Audits the mechanism as it is."""
    noise = noise_of(setting, epsilon, delta)
    found = attacked(setting, noise, trials)
    bound = lower_bound(*found, delta)
    gaussian = gaussian_bound(*found, delta) if setting.rate == 1 and setting.sees != "model" else None
    return Audited(setting.name, epsilon, delta, noise, trials, bound, bound / epsilon, gaussian)
