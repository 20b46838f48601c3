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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
TRIALS = 200_000
CLIP, LOSS_CLIP = 1.0, 2.0
LARGE = 1e3  # of inputs of canaries, whose gradients are clipped
_AT_ONCE = 50_000  # trials of one batch


# What a guess proves --------------------------------------------------------------------------------------------------


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
        return float(stats.norm.ppf(low) - stats.norm.ppf(high)) if low > 0 and high < 1 else -math.inf

    for cut in np.quantile(np.concatenate([inside[:first], outside[:first]]), np.linspace(0.05, 0.95, 19)):
        best = max(best, (distance(inside[:first], outside[:first], cut), cut))
    shift = distance(inside[first:], outside[first:], best[1])
    return epsilon_of([Releases(1, 1.0, 1, 1 / shift, 1)], delta) if shift > 0 else 0.0


# Trials ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What is trained, and what the attacker sees of it.

    Args:
        name: For tables.
        sees: "gradients", "losses" or "both" of every release, or "model": that of the site after the last round.
        rounds: How many rounds.
        units: How many units a site has.
        batch: How many of them are expected in a draw.
        rows: How many rows each unit has.
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


NOTHING = (0.0, 0.0, 1.0)  # a row whose gradient is zero, and whose loss is the centre of what is clipped
CANARY = (0.0, LARGE, -1e6)  # one whose gradient has one direction, whatever the model is, and whose loss is large


def problem_of(
    setting: Setting,
    canary: Sequence[float] = CANARY,
    nothing: Sequence[float] = NOTHING,
    other: Sequence[float] = NOTHING,
    bias: bool = False,
) -> Prepared:
    """Returns a site with the canary and one without, as two splits, next to a site that nothing is asked about.

    Args:
        setting: What is trained.
        canary: Its two inputs and its target.
        nothing: Those of a row that contributes nothing, which stands where the canary is not.
        other: Those of all other units.
        bias: Whether the linear model has one.
    """
    others = [other] * (setting.rows * (setting.units - 1))
    rows = torch.tensor([canary] * setting.rows + others, dtype=torch.float32)
    without_it = torch.tensor([nothing] * setting.rows + others, dtype=torch.float32)
    numbers = [unit for unit in range(setting.units) for _ in range(setting.rows)]
    tested = torch.tensor([NOTHING] * 2)

    def site(training: Tensor, units: Sequence[int]) -> Site:
        sets = {"train": list(units), "test": [-1, -2]}
        return Site((training[:, :2], training[:, 2]), test=(tested[:, :2], tested[:, 2]), units=sets)

    torch.manual_seed(0)
    privacy = Privacy(1.0, DELTA, clip=CLIP, loss_clip=LOSS_CLIP, rows_per_unit=min(8, setting.rows))
    without = site(without_it, numbers)
    splits = [
        Problem(nn.Linear(2, 1, bias=bias), [first, without], loss=SquaredError(), privacy=privacy,
                sampling=Sampling(setting.batch))
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
    run = PrivateRun(problem.privacy, every, 1, setting.rounds, LOSS_CLIP, setting.loss_share, secrets=(secret,))
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

    A release is drawn from a mixture: the canary is in the draw, with the chance `rate`, or not. It adds the clip to
    the second coordinate of the gradient, and half the loss clip to the loss. Losses below zero are sent as zero.

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


# Broken variants ------------------------------------------------------------------------------------------------------


def _released(oracle: PrivateOracle, models: Tensor, round_index: int = 0) -> tuple[Tensor, Tensor]:
    """Returns losses and gradients of the first site, as they are sent in a round of their own."""
    oracle.begin_round()
    losses, gradients = oracle.losses_and_gradients(models, torch.tensor(round_index), 0)
    return losses[:, 0, 0].double(), gradients[:, 0].double()


def _unclipped(oracle: PrivateOracle, models: Tensor, round_index: int = 0) -> Clipped:
    """Returns sums over the drawn units without clip and noise, which no part of a right mechanism has."""
    mechanism, rows = oracle._mechanism, models.reshape(-1, models.shape[-1])
    bounded = mechanism.factors
    mechanism.factors = lambda norms, present: present.double()  # type: ignore[method-assign]
    nonces = mechanism.nonces(rows, torch.tensor(round_index), 0)
    found = oracle._clipped(rows, *mechanism.drawn(nonces), torch.zeros(len(rows), dtype=torch.int64))
    mechanism.factors = bounded  # type: ignore[method-assign]
    return found


def _zeros(training: Training) -> Tensor:
    return torch.zeros_like(private_oracle(training).initial_models())


def public_noise(training: Training, setting: Setting, noise: float, broken: bool) -> Tensor:
    """Noise comes from the public stream of the experiment's seed, so the attacker subtracts it."""
    oracle, models = private_oracle(training), _zeros(training)
    rows = models.flatten(0, 1)
    everybody = [hashlib.blake2b(f"seed 0 node {k}".encode(), digest_size=32).digest() for k in range(len(rows))]
    draws, digests = SecretDraws(everybody, "noise", rows.device), ModelDigests(everybody, rows.device)
    if broken:
        oracle._mechanism._for_noise, oracle._mechanism._digests = draws, digests
    nonces = torch.cat([torch.zeros(len(rows), 1, dtype=torch.int32), digests.of(rows)], dim=1)
    known = draws.normals(nonces, oracle.model.dim + 1).view(len(models), 2, -1)[:, 0, 1] * noise
    return _released(oracle, models)[1][:, 1] * setting.batch / CLIP - known


def clipped_mean(training: Training, setting: Setting, noise: float, broken: bool) -> Tensor:
    """The mean over the batch is clipped, instead of each unit."""
    oracle, models = private_oracle(training), _zeros(training)

    def clipped(*_: Any) -> Clipped:
        sums = _unclipped(oracle, models).gradients
        norms = sums.norm(dim=1, keepdim=True) / setting.batch
        return Clipped(sums * (CLIP / norms.clamp(min=CLIP)), torch.zeros(len(sums), 1, dtype=torch.float64))

    original = oracle._clipped
    if broken:
        oracle._clipped = lambda *given: _within(oracle, original, clipped, given)  # type: ignore[method-assign]
    return _released(oracle, models)[1][:, 1]


def _within(oracle: PrivateOracle, original: Any, instead: Any, given: Any) -> Clipped:
    """Returns what stands instead of a method, in which the method is itself again."""
    changed, oracle._clipped = oracle._clipped, original  # type: ignore[method-assign]
    found = instead(*given)
    oracle._clipped = changed  # type: ignore[method-assign]
    return found


class _EveryRow:
    """Clips the gradient of each row, and adds up those of a unit.

    Args:
        of_units: What computes gradients of units.
    """

    def __init__(self, of_units: Any):
        self._of_units, self.numbers = of_units, of_units.numbers

    def sums(self, rows: Tensor, batch: UnitBatch, factors: Any) -> tuple[Tensor, Tensor]:
        there = batch.weights > 0
        alone = UnitBatch(
            batch.inputs.flatten(1, 2).unsqueeze(2),
            batch.targets.flatten(1, 2).unsqueeze(2),
            torch.ones_like(batch.weights).flatten(1, 2).unsqueeze(2),
            batch.keys.repeat_interleave(there.shape[2], dim=1),
        )
        present = (factors.keywords["present"].unsqueeze(2) & there).flatten(1, 2)
        sums, losses = self._of_units.sums(rows, alone, lambda norms: factors.func(norms, present=present))
        return sums, losses.view_as(batch.weights).mean(dim=2)


def clipped_rows(training: Training, setting: Setting, noise: float, broken: bool) -> Tensor:
    """The gradient of each row is clipped, instead of that of each unit."""
    oracle = private_oracle(training)
    if broken:
        oracle._gradients = _EveryRow(oracle._gradients)  # type: ignore[assignment]
    return _released(oracle, _zeros(training))[1][:, 1]


def two_samples(training: Training, setting: Setting, noise: float, broken: bool) -> Tensor:
    """Gradient and loss come from one draw, but were accounted for as from two. The noise is that of `broken_noise`."""
    ratio = LogRatio(setting, noise)
    ratio(*_released(private_oracle(training), _zeros(training)))
    return ratio.sum


def rewound(training: Training, setting: Setting, noise: float, broken: bool) -> Tensor:
    """Draws are keyed by the round alone, and the round is computed again at another model."""
    oracle, models = private_oracle(training), _zeros(training)
    if broken:
        mechanism, nonces = oracle._mechanism, oracle._mechanism.nonces
        by_round = torch.tensor([1, 0, 0], dtype=torch.int32)
        mechanism.nonces = lambda *given: nonces(*given) * by_round  # type: ignore[method-assign]
    up, down = models.clone(), models.clone()
    up[..., 1], down[..., 1] = 1.0, -1.0
    return _released(oracle, up)[1][:, 1] - _released(oracle, down)[1][:, 1]


def own_part(training: Training, setting: Setting, noise: float, broken: bool) -> Tensor:
    """The bias stays at the site and is trained without noise. What is sent is about the weights alone."""
    oracle, models = private_oracle(training), _zeros(training)
    _released(oracle, models)
    if broken:
        own = _unclipped(oracle, models).gradients[:, -1].view(models.shape[:2]) / setting.batch
        models = models.clone()
        models[..., -1] -= 0.1 * own.to(models.dtype)
    return -_released(oracle, models, 1)[1][:, 1]


def forgotten_metric(training: Training, setting: Setting, noise: float, broken: bool) -> Tensor:
    """The mean loss of the drawn training rows is sent along, without noise."""
    oracle, models = private_oracle(training), _zeros(training)
    losses, _ = _released(oracle, models)
    return _unclipped(oracle, models).losses.view(models.shape[:2])[:, 0] if broken else losses


@dataclass(frozen=True)
class Variant:
    """A broken mechanism.

    Args:
        name: For tables.
        statistic: What an attacker makes of what is sent, also by the right mechanism.
        setting: What is trained.
        rows: Other rows than usual: settings of `problem_of`.
    """

    name: str
    statistic: Callable[[Training, Setting, float, bool], Tensor]
    setting: Setting = SETTINGS[0]
    rows: tuple[tuple[str, Any], ...] = ()


VARIANTS = (
    Variant("noise from the public stream", public_noise),
    Variant("the batch mean is clipped", clipped_mean),
    Variant("rows are clipped instead of units", clipped_rows, Setting("", rows=8)),
    Variant("gradient and loss as from two samples", two_samples, Setting("", "both", units=16, batch=2)),
    Variant("noise keyed by the round alone, rewound", rewound, Setting("", rounds=2),
            (("canary", (0.0, LARGE, 0.0)),)),
    Variant("an own part trained without noise", own_part, Setting("", rounds=2, units=16, batch=16),
            (("canary", (0.0, 0.0, -1e6)), ("nothing", (0.0, 0.0, 0.0)), ("other", (0.0, LARGE, 0.0)), ("bias", True))),
    Variant("a forgotten metric", forgotten_metric, Setting("", "losses")),
)  # fmt: skip


def noise_of_two_samples(setting: Setting, epsilon: float, delta: float = DELTA) -> float:
    """Returns the noise of gradient and loss together that two sampled events would ask for: too little."""
    low, high = 0.05, noise_of(setting, epsilon, delta)
    for _ in range(15):
        noise = math.sqrt(low * high)
        events = [setting.releases(part) for part in shared_noise(noise, setting.loss_share)]
        low, high = (noise, high) if epsilon_of(events, delta) > epsilon else (low, noise)
    return high


class Caught(NamedTuple):
    """What was found of a broken variant, and of the right mechanism by the same attack."""

    name: str
    epsilon: float  # that is claimed
    delta: float
    trials: int
    bound: float  # that the broken variant proves to be exceeded
    right: float  # the same of the right mechanism
    exact: float | None = None  # what the broken variant spends, where it has an epsilon that can be computed


def caught(variant: Variant, epsilon: float, trials: int = TRIALS, delta: float = DELTA) -> Caught:
    """Attacks a broken variant and the right mechanism."""
    setting, problem = variant.setting, problem_of(variant.setting, **dict(variant.rows))
    right_noise = noise_of(setting, epsilon, delta)
    noise = noise_of_two_samples(setting, epsilon, delta) if variant.statistic is two_samples else right_noise
    exact = epsilon_of([setting.releases(noise)], delta) if variant.statistic is two_samples else None

    def attack(noise: float, broken: bool) -> Trials:
        found = []
        for number, size in batches_of(trials):
            training = training_of(problem, setting, noise, size, number)
            found.append(Trials.of(variant.statistic(training, setting, noise, broken)))
        return Trials.joined(found)

    bounds = [lower_bound(*attack(*one), delta) for one in ((noise, True), (right_noise, False))]
    return Caught(variant.name, epsilon, delta, trials, *bounds, exact)


# The record -----------------------------------------------------------------------------------------------------------


SMALL_DELTA = 1e-5
_KEYS = ("name", "epsilon", "attack", "batch")  # by which a row of the record replaces an earlier one


def run(names: Sequence[str] = (), trials: int = TRIALS) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields part and row of the record, of settings and variants with these names, or of all."""

    def asked(name: str) -> bool:
        return not names or name in names

    for epsilon in EPSILONS:
        for setting in SETTINGS:
            if asked(setting.name):
                yield "right", audited(setting, epsilon, trials)._asdict()
        if asked(SETTINGS[0].name):
            yield "small delta", audited(SETTINGS[0], epsilon, trials, SMALL_DELTA)._asdict()
        for variant in VARIANTS:
            if asked(variant.name):
                yield "broken", caught(variant, epsilon, trials)._asdict()
    if asked("reconstruction"):
        from tests.mesh.test_every_message import reconstructed

        for row in reconstructed():
            yield "reconstruction", row


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _show(record: dict[str, list[dict[str, Any]]]) -> None:
    _header("what is sent", "claim", "delta", "trials", "proved", "of the claim", "proved, if Gaussian")
    for row in [*record.get("right", []), *record.get("small delta", [])]:
        figures = f"{row['trials']:,} | {row['bound']:.2f} | {row['share']:.0%} | {_number(row['gaussian'])}"
        print(f"| {row['name']} | {row['epsilon']:g} | {row['delta']:g} | {figures} |")
    _header("broken variant", "claim", "trials", "proved", "spent", "proved of the right one")
    for row in record.get("broken", []):
        figures = f"{row['trials']:,} | {row['bound']:.2f} | {_number(row['exact'])} | {row['right']:.2f}"
        print(f"| {row['name']} | {row['epsilon']:g} | {figures} |")
    _header(
        "attack",
        "batch",
        "epsilon",
        "rows found",
        "by chance",
        "labels right",
        "by chance",
        "above chance: rows",
        "labels",
    )
    for row in record.get("reconstruction", []):
        names = ("rows", "rows by chance", "labels", "labels by chance", "rows above chance", "labels above chance")
        cells = [f"{row[name][0]:.1%} ±{row[name][1]:.1%}" for name in names]
        print(f"| {row['attack']} | {row['batch']} | {row['epsilon'] or 'none'} | {' | '.join(cells)} |")


def _header(*names: str) -> None:
    print(f"\n| {' | '.join(names)} |\n|{'---|' * len(names)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="a setting, a variant, or reconstruction")
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--show", action="store_true", help="print the record, and run nothing")
    given = parser.parse_args()
    if not given.show:
        for part, row in run(given.only, given.trials):
            record = json.loads(given.out.read_text()) if given.out.exists() else {}
            by_key = {
                tuple(map(old.get, _KEYS)): old for old in (*record.get(part, ()), row)
            }  # each stays in its place
            record[part] = list(by_key.values())
            given.out.write_text(json.dumps(record, indent=1) + "\n")
            print(part, row, flush=True)
    _show(json.loads(given.out.read_text()))


if __name__ == "__main__":
    main()
