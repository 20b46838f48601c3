"""Private oracles of small problems with the noise that a test wants, through the classes that a run uses."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import fairmesh as fm
from fairmesh.privacy.accounting import Releases
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.private_oracle import PrivateOracle
from fairmesh.problems.private_run import PrivateRun, seal
from fairmesh.training.loop import Training
from fairmesh.training.options import Options
from fairmesh.training.replicas import Replica

NOISELESS = 1e-9  # a multiple of the clip that the grid, on which noise lies, rounds to nothing
AD_GDA = fm.ADGDA(primal_step=0.1, dual_step=0.01, consensus_step=0.5, compressor=fm.compressors.Identity())
SECRET = hashlib.sha256(b"the secret of the tests").digest()


def problem(model: Any, sites: Sequence[fm.Site], **settings: Any) -> Prepared:
    """Returns a private problem with sealed rows. Test rows are zeros, which no test looks at."""
    privacy = settings.pop("privacy", fm.Privacy(1.0, 1e-3, loss_clip=2.0))
    with_tests = []
    for site in sites:
        inputs, targets, *names = site.train
        test = (torch.zeros_like(inputs[:2]), torch.zeros_like(targets[:2]), *[part[:2] for part in names])
        units = None if site.units is None else {"train": site.units, "test": [-1, -2]}
        with_tests.append(replace(site, test=test, units=units))
    return seal(fm.Problem(model, with_tests, privacy=privacy, sampling=fm.Sampling(batch=1), **settings).prepared)


def private_run(of: Prepared, noise: float, rate: float = 1.0, most: int | None = None, **decisions: Any) -> PrivateRun:
    """Returns decisions with this noise and rate at every site."""
    sites = [site for split in of.every_split for site in split.sites]
    releases = tuple(Releases(len(site.train), rate, most or len(site.train), noise, 1) for site in sites)
    privacy = of.privacy
    assert privacy is not None
    given = {"calls": 1, "rounds": 100, "loss_clip": privacy.loss_clip, "loss_share": 0.5, "secrets": (SECRET,)}
    return PrivateRun(privacy=privacy, releases=releases, **given | decisions)


def training(
    of: Prepared,
    run: PrivateRun,
    replicas: int = 1,
    algorithm: Any = AD_GDA,
    options: Options = Options(),  # noqa: B008
    seed: int = 0,
) -> Training:
    """Returns a private run of so many equal replicas, with noise of their own, of each split."""
    sites = tuple(range(of.n))
    every = [Replica(seed, sites, algorithm, split) for split in range(len(of.every_split)) for _ in range(replicas)]
    return Training(of, fm.topologies.Complete(), every, options, private=run)


def oracle_of(of: Prepared, run: PrivateRun, replicas: int = 1, **settings: Any) -> PrivateOracle:
    """Returns the oracle of such a run."""
    made = training(of, run, replicas, **settings).oracle
    assert isinstance(made, PrivateOracle)
    return made


def released(
    oracle: PrivateOracle, models: Tensor | None = None, round: int = 0, call: int = 0
) -> tuple[Tensor, Tensor]:
    """Returns what an oracle releases in a round of its own: losses (nodes,) and gradients (nodes, dim) of all
    replicas."""
    oracle.begin_round()
    models = oracle.initial_models() if models is None else models
    losses, gradients = oracle.losses_and_gradients(models, torch.tensor(round), call)
    return losses.flatten(), gradients.flatten(0, 1)
