"""Mistakes with data at one site: it gets a sentence with the remedy; the others wait, name it, and lose nothing."""

import contextlib
import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from fairmesh.experiment import load_experiment
from fairmesh.mesh.node.data_consent import unaccepted
from fairmesh.mesh.node.membership import Membership, too_heavy
from fairmesh.mesh.node.oversight import WeightWatch
from fairmesh.mesh.preflight import checks
from fairmesh.storage.files import write_record
from tests.mesh import fleet
from tests.mesh.experiments import experiment
from tests.mesh.scenarios import Run, waits_at
from tests.mesh.stranger import apart
from tests.refusals import missing_from

NAMES = ["a", "b", "c"]
AD_GDA = {"name": "ad-gda", "consensus_step": 0.5, "primal_step": 1e-5}
CONTRACT = {
    "columns": [
        {"name": "age", "type": "whole", "unit": "years", "min": 18, "max": 110},
        {"name": "creatinine", "unit": "mg/dl", "min": 0.2, "max": 15},
    ],
    "target": {"name": "ill", "type": "label", "classes": ["no", "yes"]},
}
FREE = {"target": "ill", "classes": ["no", "yes"], "standardize": False}  # settings of a table without a contract
ONE_SITE = {"name": "even", "nodes": 1}

WEIGHTS = "one site has most of the weight; ask it to check its data, or vote it out if the data is broken"

Rows = dict[str, np.ndarray]


def rows(seed: int, count: int = 60) -> Rows:
    """Patients of a site: older at one with a higher number, and ill if their creatinine is high."""
    generator = np.random.default_rng(seed)
    age = generator.integers(30 + 5 * seed, 80, count)
    creatinine = generator.uniform(0.5, 2.5, count).round(2)
    ill = np.where(creatinine + generator.normal(0, 0.2, count) > 1.2, "yes", "no")
    return {"age": age, "creatinine": creatinine, "ill": ill}


def write(home: Path, columns: Rows, **settings) -> None:
    """Gives a site a table of its own."""
    lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values()))]
    (home / "rows.csv").write_text("\n".join(lines) + "\n")
    fleet.settle(home, data={"name": "table", "file": "rows.csv", "partition": ONE_SITE} | settings)


class Tables(Run):
    """A mesh of three sites that have tables of their own, of one contract unless these have settings."""

    def __init__(self, folder: Path, rounds: int = 30, algorithm: dict = AD_GDA, **settings):
        data = {"odd": None} if settings else {"name": None}  # without a contract an experiment needs some data
        contract = None if settings else CONTRACT
        options = {"measure_every": 5}
        super().__init__(
            folder, NAMES, experiment(rounds, algorithm=algorithm, data=data, contract=contract, options=options)
        )
        for seed, name in enumerate(NAMES):
            write(folder / name, rows(seed), **settings)

    def refused(self, name: str, *names: object) -> None:
        """Passes if a node ends at once with a sentence that has these words."""
        before = (self.folder / f"{name}.log").read_text() if (self.folder / f"{name}.log").exists() else ""
        self.start(name)
        assert fleet.ended(self.running.pop(name), 30) == 1, self.logs()
        said = (self.folder / f"{name}.log").read_text().removeprefix(before).strip().splitlines()[-1]
        assert missing_from(said, "BadInput", *names) == []

    def checked(self, name: str) -> dict[str, dict]:
        found = apart(self.folder, lambda: [asdict(one) for one in checks(self.folder / name / "site.toml")])
        return {one["what"]: one for one in found}


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
        lambda home: write(home, rows(2), classes=["yes", "no"]),
        ["data.classes", '["yes", "no"] here', "remove classes"],
    ),
    "own scaling": (lambda home: write(home, rows(2), standardize=True), ["data.standardize", "remove"]),
    "a missing value": (
        lambda home: write(home, rows(2) | {"age": np.array(["", *rows(2)["age"][1:]])}),
        ["column 'age', row 1", "missing", "fill"],
    ),
    "another type": (
        lambda home: write(home, rows(2) | {"age": np.array(["old", *rows(2)["age"][1:]])}),
        ["row 1", "column 'age'", "'old'", "number"],
    ),
    "a wrong column": (
        lambda home: write(home, {"alter": rows(2)["age"], **rows(2)} | {"age": rows(2)["ill"]}),
        ["column 'age'", "number"],
    ),
    "no such file": (lambda home: (home / "rows.csv").unlink(), ["cannot read", "c/rows.csv"]),
    "a wrong file": (lambda home: (home / "rows.csv").write_text("x,y\n1,2\n"), ["no column 'age'", "rename or add"]),
}


# Founding


def test_founder_writes_only_a_contract_and_every_site_names_its_own_table_as_the_documentation_says(tmp_path, called):
    guide = (Path(__file__).parents[2] / "docs" / "howto" / "deploy.md").read_text(encoding="utf-8")
    experiment, own = re.findall(r"```toml\n(.*?)```", guide.split("**What the founder writes.**")[1], re.DOTALL)[:2]
    (command,) = re.findall(r"(?m)^fairmesh (mesh init risk\.toml .*)$", guide)
    (tmp_path / "risk.toml").write_text(experiment)
    mesh = tmp_path / "mesh"
    words = [str(tmp_path / word) if word == "risk.toml" else word for word in command.split()]
    code, _, err = called(*words, "--out", mesh)
    assert (code, missing_from(err, "names its own data")) == (0, [])
    for seed, name in enumerate(["north", "south", "east"]):
        home = tmp_path / name
        assert called("mesh", "key", mesh / "mesh.toml", name, "--out", home)[0] == 0
        fleet.approve_at(home)
        write(home, rows(seed))
        fleet.settle(home, **tomllib.loads(own.replace("patients.csv", "rows.csv")))
    found = {one.what: one for one in checks(home / "site.toml")}
    assert (found["data"].ok, found["data"].found) == (
        True,
        "38 training samples and 10 reserved to choose this site's model by, 12 test samples; they fit the model "
        "and the contract",
    )
    code, _, err = called("mesh", "key", mesh / "mesh.toml", "north", "--out", tmp_path / "again", "--trial")
    assert (code, missing_from(err, "--trial", "no [data]", "site.toml")) == (2, [])
    code, _, err = called("run", tmp_path / "risk.toml")
    assert (code, missing_from(err, "data: missing", "[contract] only", "add [data]")) == (2, [])
    table = f'\n[data]\nname = "table"\nfile = "{home / "rows.csv"}"\npartition = {{ name = "even", nodes = 2 }}\n'
    (tmp_path / "risk.toml").write_text(experiment + table)
    assert load_experiment(tmp_path / "risk.toml").problem().n == 2  # target and inputs come from the contract
    (tmp_path / "risk.toml").write_text("rounds = 3\n")
    code, _, err = called("mesh", "init", tmp_path / "risk.toml", "--site", "a=a:1", "--site", "b", "--out", mesh)
    assert (code, missing_from(err, "data: missing", "[contract]", "fairmesh data contract")) == (2, [])


def test_check_names_a_column_that_the_contract_lists_with_a_fill_and_the_table_lacks(tmp_path, called):
    guide = (Path(__file__).parents[2] / "docs" / "howto" / "deploy.md").read_text(encoding="utf-8")
    (experiment,) = re.findall(r"```toml\n(rounds.*?)```", guide, re.DOTALL)[:1]
    (tmp_path / "risk.toml").write_text(experiment.replace("scale = 0.5", "scale = 0.5\nfill = 0.9"))
    mesh, home = tmp_path / "mesh", tmp_path / "a"
    assert called("mesh", "init", tmp_path / "risk.toml", "--site", "a=a:1", "--site", "b", "--out", mesh)[0] == 0
    assert called("mesh", "key", mesh / "mesh.toml", "a", "--out", home)[0] == 0
    fleet.approve_at(home)
    write(home, {key: values for key, values in rows(0).items() if key != "creatinine"})
    found = {one.what: one for one in checks(home / "site.toml")}
    assert (found["data"].ok, missing_from(found["data"].found, "no values of creatinine")) == (True, [])


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    return Tables(tmp_path_factory.mktemp("tables"))


@pytest.fixture
def made(tmp_path):
    """Makes a mesh in the test's folder, whose nodes are killed at its end."""
    with contextlib.ExitStack() as runs:
        yield lambda *given, kind=Tables, **more: runs.enter_context(kind(tmp_path, *given, **more))


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


LOOKS = {
    "another unit": (rows(2) | {"creatinine": rows(2)["creatinine"] * 1000}, ["creatinine", "another unit"]),
    "exchanged columns": (
        {"creatinine": rows(2)["age"], "age": rows(2)["creatinine"], "ill": rows(2)["ill"]},
        ["age", "looks like creatinine elsewhere", "another order"],
    ),
    "another order": ({"creatinine": rows(2)["creatinine"], "age": rows(2)["age"], "ill": rows(2)["ill"]}, []),
    "reversed classes": (
        rows(2) | {"ill": np.where(rows(2)["ill"] == "yes", "no", "yes")},
        ["the other way round", "classes are reversed"],
    ),
    "honest": (rows(2), []),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", LOOKS)
def test_nodes_name_the_site_whose_data_looks_different_and_begin(made, tmp_path, called, mistake):
    columns, names = LOOKS[mistake]
    run = made(**FREE)
    write(tmp_path / "c", columns, **FREE)
    run.live()
    for name in NAMES:
        said = run.events(name, "a site's data looks different")
        assert [one["site"] for one in said] == (["c"] if names else [])
        assert missing_from(said[0]["reason"] if said else "", *names) == []
        shown = {site: "; ".join(reasons) for site, reasons in run.status(name)["unusual"].items()}
        assert shown == {one["site"]: one["reason"] for one in said}
    assert missing_from(called("status", tmp_path / "a" / "site.toml")[2], *names) == []


@pytest.mark.slow
def test_site_may_withhold_its_statistics(made, tmp_path, called):
    run = made(**FREE)
    write(tmp_path / "c", LOOKS["another unit"][0], **FREE)
    fleet.settle(tmp_path / "c", announce_statistics=False)
    run.live()
    assert run.status("a")["unusual"] == {}
    shown, withheld = (json.loads(called("mesh", "show", tmp_path / name / "site.toml", "--json")[1]) for name in "ac")
    said = [sum("spread" in part for part in one["leaves"]["to_all_sites"]) for one in (shown, withheld)]
    assert said == [1, 0]
    assert '"mean": []' in (tmp_path / "a" / "state" / "bulletin.json").read_text()


# Consent


ACCEPT = "a site's data looks different, and this site waits until somebody here accepts it"


def test_what_looks_different_is_accepted_as_it_looks_now(tmp_path, called):
    Tables(tmp_path)
    site, state = tmp_path / "a" / "site.toml", tmp_path / "a" / "state"
    said = {"c": ["age: 10 times as large"], "b": ["all labels are of one class there"]}
    assert (unaccepted(state, {}), unaccepted(state, said)) == ([], ["c", "b"])
    assert called("mesh", "accept", site, "c")[0] == 2  # the node has not been started
    state.mkdir()
    write_record(state / "status.json", {"unusual": said})
    code, _, err = called("mesh", "accept", site, "c")
    assert (code, missing_from(err, "a accepts the data of c", "10 times as large")) == (0, [])
    assert unaccepted(state, said) == ["b"]
    assert unaccepted(state, said | {"c": ["age: 1,000 times as large"]}) == ["c", "b"]  # other statistics by now
    for name, reason in {"a": "does not look different; those that look different: c, b", "x": "no site 'x'"}.items():
        code, _, err = called("mesh", "accept", site, name)
        assert (code, missing_from(err, reason)) == (2, [])


@pytest.mark.slow
@pytest.mark.parametrize("ends_by", ["accepting", "mending"])
def test_node_that_is_told_to_wait_begins_once_a_person_accepts_the_data_or_it_is_mended(
    made, tmp_path, called, ends_by
):
    run, site = made(**FREE), tmp_path / "a" / "site.toml"
    write(tmp_path / "c", rows(2) | {"creatinine": rows(2)["creatinine"] * 10}, **FREE)
    fleet.settle(tmp_path / "a", on_unusual_data="wait")
    assert "waits until somebody here accepts it" in called("mesh", "show", site)[1]
    run.start(*NAMES)
    run.until(lambda: run.events("a", ACCEPT))
    (said,) = run.events("a", ACCEPT)
    reason = ["creatinine", "times as large", "another unit", "fairmesh mesh accept site.toml c"]
    assert (said["site"], missing_from(said["reason"], *reason)) == ("c", [])
    run.until(lambda: "accepts the data of c" in run.status("a").get("activity", ""))
    assert missing_from(called("status", site)[2], "this node waits", f"fairmesh mesh accept {site} c") == []
    run.until(lambda: run.events("b", "waiting"))
    assert run.events("b", "waiting")[-1]["sites"] == "a"
    assert not any(run.events(name, "measured") for name in NAMES)
    if ends_by == "accepting":
        assert called("mesh", "accept", site, "c")[0] == 0
    else:
        run.crash("c")
        write(tmp_path / "c", rows(2), **FREE)
        run.start("c")
    run.end(*NAMES)
    assert len(run.events("a", "accepted here")) == (ends_by == "accepting")
    assert run.status("a")["unusual"].keys() == ({"c"} if ends_by == "accepting" else set())
    assert run.status("a")["unaccepted"] == []


# Weights


def told(weight: float | None, measured: int | None) -> dict:
    return {"weight": weight, "metric_round": measured}


def test_site_is_heavy_after_a_twentieth_of_the_run_above_half_of_lambda_and_twice_its_share():
    watch, prior = WeightWatch(1000), {"a": 0.2, "b": 0.3, "c": 0.5}
    assert watch.heavy({"a": told(0.9, 100), "b": told(0.1, 100)}, prior) == {}
    assert watch.heavy({"a": told(0.9, 149)}, prior) == {}
    later = watch.heavy({"a": told(0.9, 150), "b": told(0.1, 150)}, prior)
    assert later == {"a": {"weight": 0.9, "prior": 0.2, "since": 100, "round": 150}}
    for site, weight in (("b", 0.55), ("c", 0.9)):  # less than twice its share
        assert [watch.heavy({site: told(weight, at)}, prior) for at in (100, 150)] == [{}, {}]
    assert watch.heavy({"a": told(0.4, 160)}, prior) == {}  # it has less again, so that it counts from now
    assert watch.heavy({"a": told(0.9, 170)}, prior) == {}
    assert watch.heavy({"a": told(0.9, 230)}, prior).keys() == {"a"}
    assert watch.heavy({"a": told(0.9, 10)}, prior) == {}  # all have gone back to an earlier round
    assert watch.heavy({"a": told(None, 300), "b": told(0.9, None), "d": told(0.9, 300)}, prior) == {}


def test_no_site_is_heavy_while_the_weights_of_all_are_above_one():
    watch, prior = WeightWatch(20), {"a": 0.3, "b": 0.3, "c": 0.4}
    for at in (1, 5):  # a shadow price that has not settled yet
        assert watch.heavy(dict.fromkeys("abc", told(3.0, at)), prior) == {}
    assert watch.heavy({"a": told(9.0, 6), "b": told(1.0, 6)}, prior) == {}
    assert watch.heavy({"a": told(9.0, 8), "b": told(1.0, 8)}, prior)["a"]["weight"] == 0.9


@pytest.mark.slow
def test_nodes_warn_of_a_site_that_takes_most_of_the_weight(made, tmp_path, called):
    """One site's labels are noise, as if those of another table were joined to its rows. It can only be learned badly,
    so the weights turn to it."""
    scaled = FREE | {"standardize": True}
    run = made(600, AD_GDA | {"primal_step": 0.5, "dual_step": 0.5}, **scaled)
    write(tmp_path / "c", rows(2) | {"ill": np.array(["no", "yes"] * 30)}, **scaled)
    run.live()
    for name in NAMES:
        assert [one["site"] for one in run.events(name, WEIGHTS)] == ["c"]
        assert run.events(name, WEIGHTS)[0]["weight"] > 0.66
        assert run.status(name)["heavy"].keys() == {"c"}
    err = called("status", tmp_path / "a" / "site.toml")[2]
    assert missing_from(err, "c has", "of the weight since round", "33% before training", "check its data") == []


def test_site_may_declare_twice_its_share_and_no_more_than_four_fifths_without_consent(tmp_path):
    membership = Membership.read(Tables(tmp_path).folder / "a" / "site.toml")
    own = replace(membership, site=replace(membership.site, largest_prior=0.9))

    def heavy(of: Membership, *samples: int) -> list[str]:
        return list(too_heavy(of, dict(zip("abcdefghij", ({"samples": count} for count in samples)))))

    assert (heavy(membership, 20, 80), heavy(membership, 19, 81)) == ([], ["b"])
    assert (heavy(membership, 1, 1, 4), heavy(membership, 1, 1, 5), heavy(membership, 5, 1, 1)) == ([], ["c"], [])
    assert (heavy(membership, *[4] * 8, 10, 10), heavy(membership, *[1] * 9, 3)) == ([], ["j"])
    assert (heavy(own, 1, 9), heavy(own, 1, 10)) == ([], ["b"])
    assert heavy(replace(membership, experiment=replace(membership.experiment, prior=(0.1, 0.8, 0.1))), 1, 99, 1) == []


@pytest.mark.slow
def test_node_waits_and_names_the_site_that_declares_most_of_the_samples_until_this_site_accepts_it(
    made, tmp_path, called
):
    run = made()
    write(tmp_path / "c", rows(2, 600))
    run.start(*NAMES)
    run.until(lambda: run.events("a", ACCEPT) and run.events("b", ACCEPT))
    (said,) = run.events("a", ACCEPT)
    assert (said["site"], run.events("c", ACCEPT)) == ("c", [])
    reason = ["480 of 576 samples", "0.833", "0.667 (largest_prior)", "fairmesh mesh accept site.toml c"]
    assert missing_from(said["reason"], *reason) == []
    run.until(lambda: "accepts the data of c" in run.status("a").get("activity", ""))
    shown = called("mesh", "show", tmp_path / "a" / "site.toml")[1]
    assert missing_from(shown, "share of all samples", "more than 67% (largest_prior)") == []
    assert called("mesh", "accept", tmp_path / "a" / "site.toml", "c")[0] == 0
    run.crash("b")
    fleet.settle(tmp_path / "b", largest_prior=0.84)  # a consent that lasts
    run.start("b")
    run.end(*NAMES)
    assert run.status("a")["prior"]["c"] == pytest.approx(480 / 576)
    assert (run.status("a")["unusual"].keys(), run.status("b")["unusual"]) == ({"c"}, {})


# Changed data


@pytest.mark.slow
def test_data_that_has_changed_since_the_run_began_is_found_by_the_check_and_may_be_put_back(made, tmp_path):
    def new_row(home: Path) -> None:
        with (home / "rows.csv").open("a") as file:
            file.write("50,1.00,no\n")

    changes = {
        "samples: 48 then, 49 now": new_row,
        "other values or another order": lambda home: write(home, rows(2) | {"age": rows(2)["age"][::-1]}),
    }
    run, home, go = made(), tmp_path / "c", tmp_path / "go"
    run.start(*NAMES, observe=waits_at(10, go))
    run.until(lambda: run.round("c") >= 5)
    run.crash("c")
    before = {path: path.read_bytes() for path in (home / "state").rglob("*.safetensors")}
    for what, change in changes.items():
        change(home)
        found = run.checked("c")["data"]
        assert not found["ok"]
        remedy = ["since the run began", what, "put the old data back", "fairmesh mesh remove SITE c"]
        assert missing_from(found["found"], *remedy) == []
        run.refused("c", *remedy)
        write(home, rows(2))
    assert {path: path.read_bytes() for path in (home / "state").rglob("*.safetensors")} == before
    assert run.checked("c")["data"]["ok"]
    go.touch()
    run.start("c")
    run.end(*NAMES)
    assert not run.events("a", "stopped")


# At the start, with real nodes


@pytest.fixture(scope="module")
def waiting(tmp_path_factory):
    """A mesh of which two nodes run and wait for the third."""
    with Tables(tmp_path_factory.mktemp("waiting")) as run:
        run.start("a", "b")
        yield run


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_node_with_a_mistake_in_its_data_stops_with_the_remedy_before_it_joins(waiting, mistake):
    make, names = MISTAKES[mistake]
    make(waiting.folder / "c")
    waiting.refused("c", *names)
    assert not (waiting.folder / "c" / "state" / "facts.json").exists()
    write(waiting.folder / "c", rows(2))


@pytest.mark.slow
def test_others_waited_named_it_and_all_finish_once_it_is_mended(waiting):
    for name in ("a", "b"):
        waiting.until(lambda name=name: waiting.events(name, "waiting"))
        assert {one["sites"] for one in waiting.events(name, "waiting")} <= {"a, c", "b, c", "c"}
        assert not waiting.events(name, "stopped")
    waiting.start("c")
    waiting.end(*NAMES)


@pytest.mark.slow
def test_site_with_another_dtype_stops_the_others_name_it_and_all_finish_once_it_is_mended(made, tmp_path):
    run = made(NAMES, experiment(30, algorithm=AD_GDA, data={"odd": None}), kind=Run)

    def save(seed: int, dtype: type) -> None:
        home, columns = tmp_path / NAMES[seed], rows(seed)
        inputs = np.stack([columns["age"], columns["creatinine"]], axis=1).astype(dtype)
        np.savez(home / "rows.npz", x=inputs, y=(columns["ill"] == "yes").astype(int))

    for seed, name in enumerate(NAMES):
        save(seed, np.float64 if name == "c" else np.float32)
        fleet.settle(tmp_path / name, data={"name": "npz", "file": "rows.npz", "partition": ONE_SITE})
    run.start(*NAMES)
    run.stops("c", '["torch.float64", [2]] at c; all sites need data of the same form. Give this site')
    for name in ("a", "b"):
        run.until(lambda name=name: run.events(name, "the data of the sites does not fit together"))
        assert run.events(name, "the data of the sites does not fit together")[0]["site"] == "c"
    assert fleet.ended(run.running["a"], 0.5) is None
    save(2, np.float32)
    run.start("c")
    run.end(*NAMES)
