"""Mistakes with data at one site: it gets a sentence with the remedy; the others wait, name it, and lose nothing."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from fairmesh.mesh.preflight import checks
from tests.mesh.test_hostile_votes import Run
from tests.refusals import missing_from

NAMES = ["a", "b", "c"]
EXPERIMENT = """
rounds = 30
data = { name = "digits", nodes = 3 }  # sites name their own
topology = "ring"
algorithm = { name = "ad-gda", consensus_step = 0.5, primal_step = 0.1 }
[options]
measure_every = 5
"""
CONTRACT = """
[[contract.columns]]
name = "age"
type = "whole"
unit = "years"
min = 18
max = 110
[[contract.columns]]
name = "creatinine"
unit = "mg/dl"
min = 0.2
max = 15
[contract.target]
name = "ill"
type = "label"
classes = ["no", "yes"]
"""
DATA = '\n[data]\nname = "table"\nfile = "rows.csv"\npartition = { name = "even", nodes = 1 }\n'
FREE = 'target = "ill"\nclasses = ["no", "yes"]\nstandardize = false\n'  # settings of a table without a contract

Rows = dict[str, np.ndarray]


def rows(seed: int, count: int = 60) -> Rows:
    """Patients of a site: older at one with a higher number, and ill if their creatinine is high."""
    generator = np.random.default_rng(seed)
    age = generator.integers(30 + 5 * seed, 80, count)
    creatinine = generator.uniform(0.5, 2.5, count).round(2)
    ill = np.where(creatinine + generator.normal(0, 0.2, count) > 1.2, "yes", "no")
    return {"age": age, "creatinine": creatinine, "ill": ill}


def write(home: Path, columns: Rows, settings: str = "") -> None:
    """Gives a site a table of its own."""
    lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values()))]
    (home / "rows.csv").write_text("\n".join(lines) + "\n")
    path = home / "site.toml"
    head = path.read_text().split("\n[data]")[0].replace('data = "experiment"\n', "")
    path.write_text(head + DATA + settings)


class Tables(Run):
    """A mesh of three sites that have tables of their own."""

    def __init__(self, folder: Path, contract: str = CONTRACT, settings: str = ""):
        super().__init__(folder, NAMES, EXPERIMENT + contract)
        self.settings = settings
        for seed, name in enumerate(NAMES):
            write(folder / name, rows(seed), settings)

    def checked(self, name: str) -> dict[str, dict]:
        return {one.what: asdict(one) for one in checks(self.folder / name / "site.toml")}


MISTAKES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "another unit": (
        lambda home: write(home, rows(2) | {"creatinine": rows(2)["creatinine"] * 88.4}),
        ["column 'creatinine'", "rows 1, 2, 3 and 57 more", "0.2 to 15 mg/dl", "convert"],
    ),
    "exchanged columns": (
        lambda home: write(home, rows(2) | {"age": rows(2)["creatinine"], "creatinine": rows(2)["age"]}),
        ["column 'age'", "whole numbers", "another column"],
    ),
    "reversed classes": (
        lambda home: write(home, rows(2), 'classes = ["yes", "no"]\n'),
        ["data.classes", '["yes", "no"] here', "remove classes"],
    ),
    "own scaling": (lambda home: write(home, rows(2), "standardize = true\n"), ["data.standardize", "remove"]),
    "a missing value": (
        lambda home: write(home, rows(2) | {"age": np.array(["", *rows(2)["age"][1:]])}),
        ["column 'age', row 1", "missing", "fill"],
    ),
    "another type": (
        lambda home: write(home, rows(2) | {"age": np.array(["old", *rows(2)["age"][1:]])}),
        ["column 'age', row 1", "'old'", "number"],
    ),
    "a wrong column": (
        lambda home: write(home, {"alter": rows(2)["age"], **rows(2)} | {"age": rows(2)["ill"]}),
        ["column 'age'", "number"],
    ),
    "no such file": (lambda home: (home / "rows.csv").unlink(), ["cannot read", "c/rows.csv"]),
    "a wrong file": (lambda home: (home / "rows.csv").write_text("x,y\n1,2\n"), ["no column 'age'", "rename or add"]),
}


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    return Tables(tmp_path_factory.mktemp("tables"))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_check_names_a_mistake_in_the_data_and_the_remedy(tables, mistake):
    home = tables.folder / "c"
    make, names = MISTAKES[mistake]
    make(home)
    found = tables.checked("c")["data"]
    assert not found["ok"]
    assert missing_from(found["found"], *names) == []
    write(home, rows(2))
    assert tables.checked("c")["data"]["ok"]


def test_order_of_columns_in_a_sites_file_does_not_matter(tables):
    write(tables.folder / "c", {name: rows(2)[name] for name in ("ill", "creatinine", "age")})
    assert tables.checked("c")["data"]["ok"]
    write(tables.folder / "c", rows(2))
