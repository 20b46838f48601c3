"""How good the model is that each site gets, on sites whose truths are known: `python -m reproduction.choice`.

Linear and logistic sites of 2 to 300 rows are alike, differ, or contradict each other. What each site gets by the
choice is compared with the common model, its own one and the mixture. The rule's constants are changed one by one, and
the choice is made again among the same trained candidates."""

import argparse
import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fairmesh.algorithms import TrackedADGDA
from fairmesh.algorithms.weighting import PriorWeights
from fairmesh.comparisons.without_folds import without_fold
from fairmesh.config.tables import to_table
from fairmesh.data.site import Site
from fairmesh.personalization import Choice, Mixture, Personalization, pooled_prior
from fairmesh.personalization import choice as rule
from fairmesh.personalization.base import TriedSite, Weigh
from fairmesh.personalization.evidence import mixed
from fairmesh.personalization.outcome import Personalized
from fairmesh.personalization.personalize import outputs_on, personalized
from fairmesh.personalization.pooled_prior import CommonLosses, Sums, all_here
from fairmesh.problems.prepared import Prepared, with_splits
from fairmesh.problems.problem import Problem
from fairmesh.topology.graphs import Complete
from fairmesh.training.train import train
from reproduction.decay import in_lines
from reproduction.wording import markdown

FILE = Path(__file__).parent / "results" / "choice.json"
FEATURES, TEST_ROWS = 5, 400
ROUNDS = 120
SIZES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 30, 60, 120, 300)  # training rows of a site
SIZE_CLASSES = ((2, 5), (6, 20), (21, 300))
DRAWS = {5: 6, 12: 3, 40: 1}  # how often a population of so many sites is drawn
AVERAGING = TrackedADGDA(weighting=PriorWeights())
CHOICE = Choice()
MODELS = {"common": "common model", "own": "own model", "mixture": "`mixture`", "chosen": "site's model"}
_ERRORS = 2.0  # standard errors that a difference must exceed
_FEWEST = 3  # sites of a cell, for its standard error


@dataclass(frozen=True)
class Population:
    """Sites whose truths lie around a common one.

    Args:
        spread: How far a site's truth is from the common one.
        alike: The share of sites that have the common truth. Default: 0.0.
        contradicting: The share of sites whose truth is the opposite. Default: 0.0.
    """

    spread: float
    alike: float = 0.0
    contradicting: float = 0.0

    def sites(self, count: int, numbers: bool, seed: int) -> list[Site]:
        """Returns so many sites. Their sizes are drawn without replacement, until all were drawn."""
        rng = np.random.default_rng((seed, count))
        sizes = np.concatenate([rng.permutation(SIZES) for _ in range(-(-count // len(SIZES)))])[:count]
        alike = round(self.alike * count)
        spreads = [0.0] * alike + [self.spread] * (count - alike)
        return sites_of(rng.permutation(sizes).tolist(), spreads, numbers, seed, round(self.contradicting * count))


POPULATIONS = {
    "alike": Population(0.0),
    "spread 0.3": Population(0.3),
    "spread 1.0": Population(1.0),
    "half alike, half spread 0.7": Population(0.7, alike=0.5),
    "a fifth contradicts": Population(0.0, contradicting=0.2),
}


def sites_of(
    sizes: Sequence[int], spread: float | Sequence[float], numbers: bool = True, seed: int = 0, contradicting: int = 0
) -> list[Site]:
    """Returns sites whose truths are spread around a common one; the last ones contradict it.

    Args:
        sizes: Training rows of each site.
        spread: How far the truths are from the common one; one number, or one per site.
        numbers: Whether targets are numbers; else labels of two classes. Default: True.
        seed: Of the draw. Default: 0.
        contradicting: How many sites contradict the others. Default: 0.
    """
    generator = torch.Generator().manual_seed(seed)
    outputs = 1 if numbers else 2
    spreads = [spread] * len(sizes) if isinstance(spread, (int, float)) else spread
    common = torch.randn(FEATURES, outputs, generator=generator)
    made = []
    for i, (size, apart) in enumerate(zip(sizes, spreads, strict=True)):
        rows = size + TEST_ROWS
        truth = common + apart * torch.randn(FEATURES, outputs, generator=generator)
        truth = -common if i >= len(sizes) - contradicting else truth
        x = torch.randn(rows, FEATURES, generator=generator)
        if numbers:
            y = x @ truth + torch.randn(rows, 1, generator=generator)
        else:  # drawn from the softmax
            y = (1.5 * x @ truth - torch.rand(rows, outputs, generator=generator).log().neg().log()).argmax(-1)
        made.append(Site((x[:size], y[:size]), test=(x[size:], y[size:]), name=f"{i} of {size}"))
    return made


def problem_of(sites: Sequence[Site], numbers: bool = True) -> Problem:
    """Returns the problem of a linear model, or a logistic one if targets are labels, that starts at zero."""
    model = nn.Linear(FEATURES, 1 if numbers else 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return Problem(model, sites)


def common_models(problem: Prepared, rounds: int, folds: int = 0) -> tuple[Tensor, Tensor | None]:
    """Returns the common model with fixed weights (dim,), and those without each fold of the sites' rows (folds, dim),
    if there are folds."""

    def trained(given: Prepared) -> Tensor:
        return train(given, Complete(), AVERAGING, rounds, measure_every=rounds, announce=lambda text: None).row()

    whole = trained(problem)[0]
    return whole, trained(with_splits([without_fold(problem, k, folds) for k in range(folds)])) if folds else None


@dataclass(frozen=True)
class _Keeping(Personalization):
    """The choice, which keeps what the sites tried."""

    components: ClassVar[tuple[str, ...]] = Choice.components
    fewest_rows: ClassVar[int] = Choice.fewest_rows
    fewest_units: ClassVar[int] = Choice.fewest_units
    keep: Any = None  # called with the sites and the losses of the common model

    def learned(self, sites: Sequence[TriedSite], common: CommonLosses, sums: Sums) -> Weigh:
        self.keep(sites, common)
        return Choice().learned(sites, common, sums)


class Tried(NamedTuple):
    """Sites with their trained candidates, among which the choice can be made again."""

    problem: Prepared
    sites: Sequence[TriedSite]
    common: CommonLosses
    tested: list[dict[str, Tensor]]  # what each candidate of a site answers on the test rows

    def losses(self, changed: Mapping[str, float] | None = None) -> list[float]:
        """Returns the loss of every site's model on its test rows, if some constants of the rule are changed."""
        with constants(changed or {}):
            weigh = Choice().learned(self.sites, self.common, all_here)
            weights = [weigh(site, torch.ones_like(site.unseen)) for site in self.sites]
        labels, found = self.problem.task == "classes", []
        for site, answers, of_site in zip(self.sites, self.tested, weights, strict=True):
            out = mixed([answers[name] for name in of_site], list(of_site.values()), labels)
            found.append(float(self.problem.output_loss(out, self.problem.sites[site.number].test.targets)))
        return found


def tried_by(problem: Prepared, method: Choice, rounds: int) -> tuple[Tried, Personalized]:
    """Trains the common models and all candidates. Returns the sites with them, and what the sites get."""
    common, without = common_models(problem, rounds, method.folds)
    kept: list[tuple[Sequence[TriedSite], CommonLosses]] = []
    of_method = {one.name: getattr(method, one.name) for one in fields(method)}
    keeping = _Keeping(**of_method, keep=lambda *tried: kept.append(tried))
    outcome = personalized(problem, common, keeping, seed=0, without_folds=without)
    ((sites, losses),) = kept
    return Tried(problem, sites, losses, [_answers(problem, site) for site in sites]), outcome


def _answers(problem: Prepared, site: TriedSite) -> dict[str, Tensor]:
    answers = {}
    for name, model in site.models.items():
        scale, shift = site.calibrations.get(name, (1.0, torch.zeros(())))
        answers[name] = scale * outputs_on(problem, model, problem.sites[site.number].test) + shift
    return answers


class Constant(NamedTuple):
    """A constant of the rule, where it is, and what is tried in its place."""

    module: Any
    name: str
    values: tuple[float, ...]

    @property
    def present(self) -> float:
        return getattr(self.module, self.name)


CONSTANTS = {
    "trust in a row's evidence": Constant(pooled_prior, "_TRUST", (1.0, 0.5, 0.25)),
    "sites that speak for the common model": Constant(pooled_prior, "_FOR_COMMON", (1.0, 2.0, 4.0)),
    "units that an own model needs": Constant(rule, "_UNITS_FOR_OWN", (0, 6, 10)),
}


@contextmanager
def constants(changed: Mapping[str, float]) -> Iterator[None]:
    """Changes constants of the rule, by their names in `CONSTANTS`, until the end."""
    before = {name: CONSTANTS[name].present for name in changed}
    try:
        for name, value in changed.items():
            setattr(CONSTANTS[name].module, CONSTANTS[name].name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(CONSTANTS[name].module, CONSTANTS[name].name, value)


def variants() -> dict[str, dict[str, float]]:
    """Returns the changes that are tried: one constant at a time."""
    return {
        f"{name}: {value:g}": {name: value}
        for name, constant in CONSTANTS.items()
        for value in constant.values
        if value != constant.present
    }


def settings(draws: Mapping[int, int] = DRAWS, rounds: int = ROUNDS, method: Choice = CHOICE) -> dict[str, Any]:
    """Returns what determines the recorded numbers, as a table."""
    return {
        "constants": {name: constant.present for name, constant in CONSTANTS.items()},
        "choice": to_table(method),
        "draws": {str(sites): count for sites, count in draws.items()},
        "rounds": rounds,
    }


def outcome_of(population: str, sites: int, numbers: bool, draw: int, rounds: int, method: Choice) -> dict[str, Any]:
    """Draws a population and trains everything once. Returns the losses of every site on its test rows."""
    problem = problem_of(POPULATIONS[population].sites(sites, numbers, draw), numbers)
    tried, outcome = tried_by(problem.prepared, method, rounds)
    steps = {name: getattr(method, name) for name in ("steps", "local_steps")}
    reserving = train(
        problem, Complete(), AVERAGING, rounds, measure_every=rounds, personalization=Mixture(**steps),
        announce=lambda text: None,
    )  # fmt: skip

    def rounded(losses: Sequence[float]) -> list[float]:
        return [round(loss, 4) for loss in losses]

    return {
        "population": population,
        "targets": "numbers" if numbers else "labels",
        "sites": sites,
        "rows": [len(site.train) for site in problem.prepared.sites],
        "common": rounded(outcome.values("common", "loss")),
        "own": rounded(outcome.values("local", "loss")),
        "mixture": rounded(reserving.personal[0].values("personal", "loss")),
        "chosen": rounded(outcome.values("personal", "loss")),
        "variants": {name: rounded(tried.losses(changed)) for name, changed in variants().items()},
    }


def run(
    file: Path,
    populations: Sequence[str] = tuple(POPULATIONS),
    draws: Mapping[int, int] = DRAWS,
    rounds: int = ROUNDS,
    method: Choice = CHOICE,
) -> dict[str, Any]:
    """Runs all populations, and writes the file after each."""
    table: dict[str, Any] = {"settings": settings(draws, rounds, method)}
    for population, numbers, (sites, count) in itertools.product(populations, (True, False), draws.items()):
        for draw in range(count):
            row = outcome_of(population, sites, numbers, draw, rounds, method)
            table[f"{population}, {row['targets']}, {sites} sites, draw {draw}"] = row
        file.write_text(in_lines(table))
        print(population, "numbers" if numbers else "labels", sites, flush=True)
    return table


class Cell(NamedTuple):
    """The sites of a size class in all draws of a population."""

    population: str
    targets: str
    sites: int
    size: tuple[int, int]
    losses: dict[str, np.ndarray]  # of each model, and of the choice with each variant

    @property
    def better(self) -> np.ndarray:
        """The losses of the better of the common and the sites' own models, on average over these sites."""
        return min((self.losses[name] for name in ("common", "own")), key=lambda losses: float(losses.mean()))

    def against_better(self, name: str) -> float:
        """Returns how much more a model's mean loss is than that of the better of common and own, as a share."""
        return float(self.losses[name].mean() / self.better.mean()) - 1.0

    def verdict(self, name: str) -> int:
        """Returns 1 if a model is better than both common and own, -1 if it is worse than the better of them, each
        beyond two standard errors over sites and draws; else 0."""
        differences = self.losses[name] - self.better
        if len(differences) < _FEWEST:
            return 0
        error = differences.std(ddof=1) / math.sqrt(len(differences))
        mean = float(differences.mean())
        return 0 if abs(mean) <= _ERRORS * error else (1 if mean < 0 else -1)


def cells_of(table: Mapping[str, Any]) -> list[Cell]:
    """Returns the cells of a recorded table: population, targets, number of sites and size class."""
    rows = [row for name, row in table.items() if name != "settings"]
    keys = dict.fromkeys((row["population"], row["targets"], row["sites"]) for row in rows)
    found = []
    for key, (low, high) in itertools.product(keys, SIZE_CLASSES):
        alike = [row for row in rows if (row["population"], row["targets"], row["sites"]) == key]
        sizes = np.concatenate([row["rows"] for row in alike])
        chosen = (sizes >= low) & (sizes <= high)
        if not chosen.any():
            continue
        losses = {name: np.concatenate([row[name] for row in alike])[chosen] for name in MODELS}
        losses |= {
            name: np.concatenate([row["variants"][name] for row in alike])[chosen] for name in alike[0]["variants"]
        }
        found.append(Cell(*key, (low, high), losses))
    return found


def summary(cells: Sequence[Cell], names: Sequence[str] = tuple(MODELS)) -> dict[str, Any]:
    """Returns, for each model, how much more its loss is than that of the better of common and own, as a mean over
    cells, and in how many cells it is worse and better."""
    return {"cells": len(cells), "sites": sum(len(cell.better) for cell in cells)} | {
        name: {
            "more": float(np.mean([cell.against_better(name) for cell in cells])),
            "worse": sum(cell.verdict(name) < 0 for cell in cells),
            "better": sum(cell.verdict(name) > 0 for cell in cells),
        }
        for name in names
    }


def compared(groups: Mapping[str, Sequence[Cell]], names: Mapping[str, str] = MODELS) -> str:
    """Returns a table in Markdown with a row for every group of cells: how much more the loss of each model is than
    that of the better of common and own, and in how many cells it is worse / better.

    Args:
        groups: The cells of each group, by its title.
        names: The titles of the models.
    """
    rows = []
    for title, cells in groups.items():
        found = summary(cells, list(names))
        rows.append([title, str(found["sites"]), str(found["cells"]), *(_in_words(found[name]) for name in names)])
    return markdown(["", "sites", "cells", *names.values()], rows)


def _in_words(found: Mapping[str, Any]) -> str:
    return f"{100 * found['more']:+.1f} %, {found['worse']} / {found['better']}"


def in_words(size: tuple[int, int]) -> str:
    return f"{size[0]} to {size[1]} rows"


def by_size(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Returns the cells of each size class."""
    return {in_words(size): [cell for cell in cells if cell.size == size] for size in SIZE_CLASSES}


def ablation(cells: Sequence[Cell]) -> str:
    """Returns a table in Markdown: the choice with every variant of the rule, by size class."""
    groups, rows = by_size(cells) | {"all": list(cells)}, []
    for name in ("chosen", *(name for name in cells[0].losses if name not in MODELS)):
        found = [_in_words(summary(some, [name])[name]) for some in groups.values()]
        rows.append(["as it is" if name == "chosen" else name, *found])
    return markdown(["rule", *groups], rows)


def shown(table: Mapping[str, Any]) -> str:
    """Returns the tables in words."""
    cells = cells_of(table)

    def grouped(title: Callable[[Cell], str]) -> dict[str, list[Cell]]:
        found: dict[str, list[Cell]] = {}
        for cell in cells:
            found.setdefault(f"{title(cell)}, {in_words(cell.size)}", []).append(cell)
        return found

    worse = [
        f"{cell.population}, {cell.targets}, {cell.sites} sites, {in_words(cell.size)}: "
        f"{100 * cell.against_better('chosen'):+.1f} %"
        for cell in cells
        if cell.verdict("chosen") < 0
    ]
    return "\n\n".join(
        (
            "Loss on test rows, against the better of common and own model, and cells worse / better than both",
            compared(by_size(cells) | {"all": cells}),
            compared(grouped(lambda cell: cell.population)),
            compared(grouped(lambda cell: f"{cell.sites} sites")),
            "Cells in which the site's model is worse:\n" + ("\n".join(worse) or "none"),
            "The same with one constant of the rule changed",
            ablation(cells),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", action="store_true", help="print the recorded tables")
    parser.add_argument("--file", type=Path, default=FILE)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    print(shown(json.loads(given.file.read_text()) if given.show else run(given.file)))


if __name__ == "__main__":
    main()
