"""One small training run, for the tests that stop it: `python -m tests.training.interrupted_run FOLDER THREADS ...`.

It prints the number of rounds done and rests a little after each, so that a test can stop it where it wants."""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fairmesh as fm
from tests.toys import CLASSES, FEATURES, sites

ROUNDS = 18


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(5, CLASSES))


def train(folder: Path, rounds: int = ROUNDS, **options: Any) -> fm.Result:
    """The run: compressed, with dropout, two seeds, everything kept that can be."""
    given = [fm.Site(site.train, test=site.test, validation=site.test) for site in sites(3)]
    problem = fm.Problem(model, given, sampling=fm.Sampling(batch=5))
    algorithm = fm.ADGDA(
        primal_step=fm.schedules.Geometric(3.0, 0.98),
        dual_step=0.1,
        consensus_step=0.3,
        compressor=fm.compressors.TopKQuantize(0.5, bits=4),
    )
    keep: dict[str, Any] = {"keep_best": True, "own_models": True}
    return fm.train(problem, fm.Ring(), algorithm, rounds, seeds=(0, 1), out=folder, measure_every=3, **keep, **options)


def rest(done: int, state) -> None:
    print(done, flush=True)
    time.sleep(0.05)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    train(Path(sys.argv[1]), checkpoint_every=int(sys.argv[3]), observers=[rest], handle_signals=True)
