"""Which round to keep: compares rules on digits with small validation sets.

Every site holds out a few of its training rows for validation. A rule sees the accuracy on them at 60 measured rounds
and keeps one round. What counts is the accuracy of that round's model at the worst site, on the test rows.

    python -m reproduction.best_round            # 6 splits, 4 kinds of curves, 3 sizes of validation sets: 5 minutes
    python -m reproduction.best_round --quick    # 2 splits, short runs
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

import fairmesh as fm
from fairmesh.data.samples import Samples
from fairmesh.data.site import Site
from fairmesh.training.best_round import RoundScores, replaces

MEASUREMENTS = 60
_SIZES = (180, 180, 180, 180, *[60] * 6)


@dataclass(frozen=True)
class SmallValidation(fm.data.Data):
    """Digits at ten sites, six of them small and with a shifted scanner, of which each holds out `rows` rows. A share
    of the labels of the other training rows is replaced by random ones."""

    rows: int
    wrong_labels: float = 0.0
    seed: int = 0

    def sites(self) -> list[Site]:
        made = []
        for i, site in enumerate(fm.data.Digits(10, 6, seed=self.seed, instrument="shifted", sizes=_SIZES).sites()):
            samples = Samples.of(site.train, f"site {i}")
            held_out, kept = (samples.take(torch.arange(*ends)) for ends in ((self.rows,), (self.rows, len(samples))))
            draw = torch.Generator().manual_seed(1000 * self.seed + i)
            wrong = torch.rand(len(kept), generator=draw) < self.wrong_labels
            labels = torch.where(wrong, torch.randint(0, 10, (len(kept),), generator=draw), kept.targets)
            made.append(replace(site, train=(kept.inputs, labels), validation=held_out.parts(), name=f"site {i}"))
        return made


class Setting(NamedTuple):
    """A kind of curve."""

    model: fm.models.Model
    step: float
    wrong_labels: float = 0.0
    batch: int = 50
    rounds: int = 600


SETTINGS = {
    "still improves": Setting(fm.models.Logistic(), 0.05),
    "levels off": Setting(fm.models.FullyConnected(25), 0.1),
    "overfits": Setting(fm.models.FullyConnected(100), 0.5, wrong_labels=0.4, rounds=1000),
    "is noisy": Setting(fm.models.FullyConnected(25), 0.5, wrong_labels=0.2, batch=5),
}


def _kept(problem: fm.Problem, values: Tensor, smoothing: float) -> int:
    """Returns the measurement that fairmesh keeps, given those of all sites (measurements, sites)."""
    rule, kept, best = RoundScores(problem, "worst"), 0, torch.tensor(-math.inf, dtype=torch.float64)
    rule.smoothing = smoothing
    for t, row in enumerate(values):
        score = rule.add(row.unsqueeze(0)).squeeze(0)
        if bool(replaces(score, best)):
            kept, best = t, torch.maximum(score, best)
    return kept


def _within_one_error(values: Tensor, rows: int) -> int:
    """Returns the last measurement whose worst site is within a binomial standard error of the best one."""
    worst = values.min(-1).values
    top = float(worst.max())
    error = math.sqrt(max(top * (1 - top), 1 / rows) / rows)
    return int((worst >= top - error).nonzero().flatten()[-1])


RULES: dict[str, Callable[[fm.Problem, Tensor, int], int]] = {
    "the last round": lambda problem, values, rows: len(values) - 1,
    "the best, the first of equal ones": lambda problem, values, rows: int(values.min(-1).values.argmax()),
    "the best, the last of equal ones": lambda problem, values, rows: _kept(problem, values, 0.0),
    "the last within one standard error": lambda problem, values, rows: _within_one_error(values, rows),
    "the best after smoothing, 0.3": lambda problem, values, rows: _kept(problem, values, 0.3),
    "the best after smoothing, 0.5": lambda problem, values, rows: _kept(problem, values, 0.5),
    "the best after smoothing, 0.8": lambda problem, values, rows: _kept(problem, values, 0.8),
}


def worst_of_kept(setting: Setting, rows: int, splits: int) -> dict[str, Tensor]:
    """Returns, for each rule, the test accuracy at the worst site of the model that it keeps, for every split."""
    experiment = fm.Experiment(
        SmallValidation(rows, setting.wrong_labels),
        fm.Ring(),
        fm.TrackedADGDA(primal_step=setting.step),
        rounds=setting.rounds,
        model=setting.model,
        sampling=fm.Sampling(batch=setting.batch),
        splits=splits,
        options=fm.Options(measure_every=setting.rounds // MEASUREMENTS, count_bytes=False),
    )
    result = fm.run(experiment)
    found: dict[str, list[float]] = {name: [] for name in RULES}
    for split in range(splits):
        mine = [record for record in result.records if record["split"] == split and record["round"]]
        seen, test = (
            torch.tensor([one["accuracy"]["sites"] for one in part], dtype=torch.float64)
            for part in ([record["validation"] for record in mine], mine)
        )
        for name, rule in RULES.items():
            found[name].append(float(test[rule(result.problem, seen, rows)].min()))
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in found.items()}


def main(arguments: Sequence[str]) -> None:
    quick = "--quick" in arguments
    found: dict[str, dict[str, Tensor]] = {}
    for name, setting in SETTINGS.items():
        given = setting._replace(rounds=MEASUREMENTS) if quick else setting
        every = [worst_of_kept(given, rows, 2 if quick else 6) for rows in ((5,) if quick else (5, 10, 20))]
        found[name] = {rule: torch.cat([one[rule] for one in every]) for rule in RULES}
    print("| kept | " + " | ".join(f"the curve {name}" for name in SETTINGS) + " | all |")
    print("|---" * (len(SETTINGS) + 2) + "|")
    for rule in RULES:
        columns = [found[name][rule] for name in SETTINGS]
        cells = [f"{100 * values.mean():.1f}" for values in [*columns, torch.cat(columns)]]
        print(f"| {rule} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main(sys.argv[1:])
