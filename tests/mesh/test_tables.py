"""Tables between organisations: all sites fit the same preprocessing as a simulation, from sums; mistakes are named."""

import contextlib
import functools
import json
import operator
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import fairmesh as fm
from fairmesh.data.preprocessing import Preprocessing
from fairmesh.data.site_tables import SiteTable
from fairmesh.data.sums import Misfit, Sums, TableSums, fitted
from fairmesh.data.tables import in_order
from fairmesh.mesh.announcements import KINDS
from fairmesh.mesh.node import data_agreement
from fairmesh.mesh.node.membership import Objection, facts
from fairmesh.mesh.node.oversight import Notices
from fairmesh.mesh.node.table_agreement import TableAgreement
from fairmesh.storage.files import read_record
from fairmesh.storage.run_folder import PREPROCESSING
from tests.data.test_preprocessing import clinic, write
from tests.mesh import fleet
from tests.mesh.scenarios import Run, waits_at
from tests.refusals import missing_from, refused

NAMES = ["a", "b", "c"]
TRAINING = """
rounds = 6
topology = "ring"
algorithm = { name = "ad-gda", consensus_step = 0.5, primal_step = 0.1 }
[options]
measure_every = 3
"""


@pytest.fixture
def founded(tmp_path):
    """Founds meshes, and ends their nodes."""
    with contextlib.ExitStack() as made:
        yield lambda experiment: made.enter_context(Run(tmp_path, NAMES, experiment))


def preprocessing_of(folder: Path, name: str) -> Preprocessing:
    return Preprocessing.from_json((folder / name / "state" / "result" / PREPROCESSING).read_text())


def visits() -> dict:
    """The table with several rows of every person."""
    return {"who": [f"P{k // 3 % 8}{'abc'[k % 3]}" for k in range(120)], **clinic()}


@pytest.mark.parametrize("by_unit", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_nodes_and_a_simulation_have_the_same_preprocessing_and_rows(tmp_path, founded, by_unit):
    file = write(tmp_path / "clinic.csv", visits() if by_unit else clinic())
    data = f'[data]\nname = "table"\nfile = "{file}"\ntarget = "ill"\nsite = "where"\n'
    own = "algorithm" if by_unit else ""  # and the default, which holds rows out
    training = "".join(line for line in TRAINING.splitlines(keepends=True) if not own or own not in line)
    run = founded(training + data + ('unit = "who"\n[personalization]\nname = "mixture"\n' if by_unit else ""))
    run.live()
    problem = fm.load_experiment(tmp_path / "experiment.toml").problem()
    for k, name in enumerate(NAMES):
        assert preprocessing_of(tmp_path, name) == problem.preprocessing
        (agreed,) = run.events(name, "the sites' data is agreed")
        assert agreed["data_and_model"] == problem.keeping([k]).digest(), "its rows and the model to start from"
        assert (problem.sites[k].train.units is not None) == by_unit


def own_tables(run: Run, settings: dict | None = None, **changes) -> dict[str, Path]:
    """Gives each site a table of its own, in another order of columns."""
    files = {}
    for k, name in enumerate(NAMES):
        columns = [(key, values[k::3]) for key, values in clinic(240).items() if key != "where"]
        columns = changes.get(name, dict)(dict(columns[k:] + columns[:k]))
        files[name] = Path(write(run.folder / name / "rows.csv", columns))
        fleet.settle(run.folder / name, data={"name": "table", "file": "rows.csv", "target": "ill"} | (settings or {}))
    return files


SHARED = 'data = { name = "digits", nodes = 3 }'  # sites name their own


@pytest.mark.slow
def test_nodes_with_tables_of_their_own_agree_on_one_preprocessing_also_after_a_restart(tmp_path, founded):
    run = founded(SHARED + TRAINING.replace("rounds = 6", "rounds = 120"))
    files = own_tables(run)
    sums = {}
    for name, file in files.items():
        (site,) = fm.data.Table(str(file), "ill", partition=fm.data.Even(1)).sites()
        sums[name] = site.table.sums()
    run.start(*NAMES)
    run.until(lambda: run.status("b")["round"] > 20)
    run.crash("b")
    run.start("b")
    run.end(*NAMES)
    expected = fitted(sums)
    assert [preprocessing_of(tmp_path, name) for name in NAMES] == [expected] * 3
    assert expected.columns[1].classes == ("east", "north", "south")


def test_sums_cover_also_the_rows_that_a_site_reserves_for_a_model_of_its_own(tmp_path):
    (site,) = fm.data.Table(write(tmp_path / "t.csv", clinic()), "ill", partition=fm.data.Even(1)).sites()
    (kept,) = fm.data.reserve([site])
    bodies = {name: {"sums": site.table.sums().to_table(), "fitted_by": []} for name in NAMES}
    board = SimpleNamespace(of=lambda name, kind: bodies[name], of_all=lambda kind: bodies)
    declared = facts(kept) | {"outputs": 2}
    assert 0 < declared["reserved"] == len(site.table.rows["train"]) - declared["samples"]
    agreement = TableAgreement("a", kept, board, tmp_path)
    assert not agreement.misfit(NAMES, dict.fromkeys(NAMES, declared)).reason
    assert "training rows" in agreement.misfit(NAMES, dict.fromkeys(NAMES, declared | {"reserved": 0})).reason


@pytest.mark.slow
def test_nodes_with_tables_and_a_model_per_site_train_to_the_end(tmp_path, founded):
    run = founded(SHARED + '\npersonalization = { name = "mixture", steps = 15, local_steps = 15 }' + TRAINING)
    own_tables(run)
    run.start(*NAMES)
    run.end(*NAMES)
    assert all((tmp_path / name / "state" / "personal").exists() for name in NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("left", [[], ["a"]], ids=["", "after another has left"])
def test_site_with_a_table_that_has_lost_its_state_gets_the_same_preprocessing_again(tmp_path, founded, left):
    run = founded(SHARED + TRAINING.replace("rounds = 6", "rounds = 60") + "checkpoint_every = 5\n")
    own_tables(run)
    others, there = ["a", "b"], [name for name in NAMES if name not in left]
    run.start(*others)
    run.start("c", observe=waits_at(20, tmp_path / "go"))
    run.until(lambda: run.round("c") >= 18)
    before = read_record(tmp_path / "c" / "state" / PREPROCESSING, "")
    if left:
        run.crash("a")
        run.vote(*there, out=left)
        run.until(lambda: run.events("b", "all have voted"))
        (tmp_path / "go").touch()
        run.until(lambda: run.events("c", "continuing"))
    run.crash("c")
    shutil.rmtree(tmp_path / "c" / "state")
    run.start("c")
    if left:  # then others have its signature on what was decided, which it has forgotten
        run.stops("c", "fairmesh mesh restore")
    else:
        run.is_told_to_restore("c")
    run.vote(*there, restored=["c"])
    run.start("c")
    run.end(*there)
    assert run.events("c", "this site's state was restored from its neighbours")
    assert json.loads((tmp_path / "c" / "state" / "result" / PREPROCESSING).read_text()) == before
    assert preprocessing_of(tmp_path, "b") == preprocessing_of(tmp_path, "c")


@pytest.mark.slow
def test_column_that_a_site_lacks_is_missing_there_and_one_that_a_site_alone_has_is_left_out(tmp_path, founded):
    run = founded(SHARED + TRAINING)

    def without_age(columns: dict) -> dict:
        others = {key: values for key, values in columns.items() if key != "age"}
        return others | {"shoe": range(len(columns["ill"])), "days": ["-9", *others["days"][1:]]}

    own_tables(run, c=without_age)
    fleet.settle(run.folder / "c", data={"name": "table", "file": "rows.csv", "target": "ill", "missing_values": [-9]})
    run.live()
    made = [preprocessing_of(tmp_path, name) for name in NAMES]
    assert made[0] == made[1] == made[2].reading({})
    assert made[2].columns[-1].missing_values == ("-9",), "which c alone needs to predict"
    assert {"age", "age missing"} <= set(made[0].inputs)
    for name in NAMES:
        (lacking,) = run.events(name, "columns that a site does not have count as missing there")
        assert lacking["columns"] == "age (c)"
        (alone,) = run.events(
            name, "columns that one site alone has are left out; to use them, name them in a contract with a fill"
        )
        assert alone["columns"] == "shoe (c)"


UNFIT = "the data of the sites does not fit together"


@pytest.mark.slow
def test_site_whose_table_has_another_kind_ends_with_the_reason_and_the_others_name_it(tmp_path, founded):
    run = founded(SHARED + TRAINING)
    own_tables(run, c=lambda columns: columns | {"age": ["old" if k % 2 else "young" for k in range(80)]})
    run.start(*NAMES)
    # Of two sites that differ, no third can say which is odd: a names c once it has heard b.
    reasons = lambda: [e["reason"] for e in run.events("a", UNFIT) if e["site"] == "c"]  # noqa: E731
    run.until(reasons)
    assert "'age'" in reasons()[0]
    run.stops("c", "'age'")
    own_tables(run)
    run.kill()
    run.live()
    assert preprocessing_of(tmp_path, "a") == preprocessing_of(tmp_path, "c")


def test_sums_of_another_form_are_refused_before_anything_is_computed(tmp_path):
    (site,) = fm.data.Table(write(tmp_path / "t.csv", clinic()), "ill", partition=fm.data.Even(1)).sites()
    good = site.table.sums().to_table()
    accepts = KINDS["table"].fields["sums"]
    assert accepts(good)
    removed = object()
    for *path, last, value in (
        ("columns", "age", 2, 1e300), ("columns", "age", 3, -1.0), ("columns", "age", 0, 1.5),
        ("columns", "age", 2, float("nan")), ("columns", "age", removed), ("columns", []),
        ("columns", "ward", 4, ["x" * 1000]), ("plan", "target", removed), ("plan", "more", 1),
        ("plan", "columns", 0, "type", "picture"), ("plan", "columns", 0, "scale", "1"),
        ("plan", "columns", 0, "fill", 10**400), ("plan", "columns", 0, "fill", 1e20),
        ("plan", "columns", 1, "fill", "x" * 1000), ("plan", "columns", 0, "indicator", 1), ("plan", []),
    ):  # fmt: skip
        bad = json.loads(json.dumps(good))
        place = functools.reduce(operator.getitem, path, bad)
        if value is removed:
            del place[last]
        else:
            place[last] = value
        assert not accepts(bad), (path, last)
    assert TableSums.from_table(good) == site.table.sums()


def announced_sums(tmp_path, spoil, fewer=0, **declared):
    """What site a says about the sums of b, which has changed them; with a contract on the age."""
    (site,) = fm.data.Table(write(tmp_path / "t.csv", clinic()), "ill", partition=fm.data.Even(1)).sites()
    said = {name: site.table.sums().to_table() for name in NAMES}
    spoil(said["b"]["columns"]["age"])
    bodies = {name: {"sums": sums, "fitted_by": []} for name, sums in said.items()}
    board = SimpleNamespace(of=lambda name, kind: bodies[name], of_all=lambda kind: bodies)
    contract = fm.data.Contract((fm.data.Column("age", min=0, max=120),))
    rows = len(site.table.rows["train"])
    facts = {name: {"samples": rows, "reserved": 0, "test": 12, "validation": 0, "outputs": 2} for name in NAMES}
    facts["b"] |= {"samples": rows - fewer} | declared
    return [TableAgreement("a", site, board, tmp_path, one).misfit(NAMES, facts) for one in (None, contract)]


def set_to(**fields):
    places = {"known": 0, "missing": 1, "mean": 2, "squares": 3}

    def spoil(sums: list) -> None:
        for name, value in fields.items():
            sums[places[name]] = value

    return spoil


LIES = {
    "more values than samples": (set_to(known=10**12), ["counts", "1000000000000"]),
    "more missing than samples": (set_to(known=0, missing=10**12, mean=0, squares=0), ["missing"]),
    "a mean of nothing": (set_to(known=0, missing=0), ["no values"]),
    "a mean that makes the column constant": (set_to(mean=1e12), ["times"]),
    "a spread that makes the column constant": (set_to(squares=1e40), ["times"]),
}


@pytest.mark.parametrize("lie", LIES)
def test_sums_that_cannot_be_true_are_named_before_anything_is_fitted(tmp_path, lie):
    spoil, words = LIES[lie]
    answers = announced_sums(tmp_path, spoil)
    assert [sites for sites, _ in answers] == [["b"], ["b"]]
    assert [missing_from(reason, "b", "'age'") for _, reason in answers] == [[], []]
    assert missing_from(answers[0][1], *words) == []


def test_sums_are_of_the_declared_rows_and_in_the_range_of_the_contract_or_their_site_is_named(tmp_path):
    (sites, reason), _ = announced_sums(tmp_path, lambda sums: None, fewer=1)
    assert (sites, missing_from(reason, "training rows")) == (["b"], [])
    (sites, reason), _ = announced_sums(tmp_path, lambda sums: None, outputs=3)
    assert (sites, missing_from(reason, "3 outputs", "needs 2")) == (["b"], [])
    for outside in (set_to(mean=130.0, squares=1.0), set_to(mean=60.0, squares=1e9)):
        without, (sites, reason) = announced_sums(tmp_path, outside)
        assert (without, sites, missing_from(reason, "120")) == (Objection(), ["b"], [])
    for honest in (lambda sums: None, set_to(known=0, missing=0, mean=0, squares=0)):  # the other tells nothing
        assert announced_sums(tmp_path, honest) == [Objection()] * 2


# Categories and labels


class Wards(TableAgreement):
    """What site a makes of the tables of all sites, given the wards that each of them tells and the labels of c."""

    def __init__(self, folder: Path, labels=("0", "1"), fitted_by=(), **wards):
        columns = {"age": range(40, 100), "ward": ["north", "south"] * 30, "ill": [0, 1] * 30}
        (site,) = fm.data.Table(write(folder / "t.csv", columns), "ill", partition=fm.data.Even(1)).sites()
        said = {name: site.table.sums().to_table() for name in NAMES}
        for name, told in wards.items():
            said[name]["columns"]["ward"][4] = told
        said["c"]["target"][4] = list(labels)
        bodies = {name: {"sums": sums, "fitted_by": []} for name, sums in said.items()}
        bodies["c"]["fitted_by"] = list(fitted_by)
        assert all(KINDS["table"].fields["sums"](sums) for sums in said.values())
        super().__init__(
            "a", site, SimpleNamespace(of=lambda name, kind: bodies[name], of_all=lambda k: bodies), folder
        )

    def wards(self) -> tuple[str, ...]:
        return self.agreed(NAMES).columns[1].classes


INVENTED = [f"ward {i}" for i in range(98)]


def test_category_counts_if_two_sites_have_it_and_the_run_names_those_that_do_not(tmp_path):
    tables = Wards(tmp_path, b=["north", "west"], c=["north", "east", "west"])
    assert (tables.wards(), tables.alone(NAMES)) == (("north", "west"), "ward = south (a), ward = east (c)")
    assert Wards(tmp_path).alone(NAMES) == ""


def test_one_member_cannot_make_the_model_larger_by_inventing_categories_and_two_only_up_to_the_limit(tmp_path):
    assert Wards(tmp_path, c=["north", "south", *INVENTED]).wards() == ("north", "south")
    assert len(Wards(tmp_path, b=INVENTED, c=INVENTED).wards()) == 98
    with pytest.raises(AssertionError):
        Wards(tmp_path, c=[*INVENTED, *(f"more {i}" for i in range(3))])


def test_one_of_two_sites_cannot_leave_the_other_out_of_the_sums(tmp_path):
    for said, counted in ((["c"], ["a", "c"]), (["a", "b", "c"], ["a", "b", "c"])):  # b has left since
        assert list(Wards(tmp_path, fitted_by=said)._sites(["a", "c"])) == counted


def test_simulation_keeps_the_category_that_one_site_has(tmp_path):
    columns = {"age": range(40, 100), "ward": ["north"] * 30 + ["south"] * 30, "ill": [0, 1] * 30}
    columns["where"] = ["a"] * 30 + ["b"] * 30
    sites = fm.data.Table(write(tmp_path / "t.csv", columns), "ill", site="where").sites()
    assert sites[0].table.preprocessing.columns[1].classes == ("north", "south")


def test_site_that_alone_has_a_label_is_named_and_told_how_to_name_it_at_all_sites(tmp_path):
    facts = {key: {"samples": 48, "reserved": 0, "test": 12, "validation": 0, "outputs": 2} for key in NAMES}
    facts["c"] = facts["a"] | {"outputs": 3}
    sites, reason = Wards(tmp_path, labels=["0", "1", "maybe"]).misfit(NAMES, facts)
    assert (sites, missing_from(reason, "c alone", "'maybe'", "'ill'", "contract", "classes")) == (["c"], [])
    assert Wards(tmp_path).misfit(NAMES, facts | {"c": facts["a"]}) == Objection()


@pytest.mark.slow
def test_rows_with_a_category_of_one_site_count_as_other_and_every_node_says_so(tmp_path, founded):
    run = founded(SHARED + TRAINING)
    own_tables(run, c=lambda columns: columns | {"ward": ["attic" if w == "east" else w for w in columns["ward"]]})
    run.live()
    for name in NAMES:
        (said,) = run.events(
            name, "categories that one site alone has count as other; to use them, name them in a contract"
        )
        assert said["categories"] == "ward = attic (c)"
    assert preprocessing_of(tmp_path, "c").columns[1].classes == ("east", "north", "south")


@pytest.mark.slow
def test_label_of_one_site_can_be_used_once_all_sites_name_the_labels(tmp_path, founded):
    def third(columns: dict) -> dict:
        return columns | {"ill": ["maybe" if k < 9 else value for k, value in enumerate(columns["ill"])]}

    run = founded(SHARED + TRAINING)
    labels = sorted({str(value) for value in clinic(240)["ill"]})
    own_tables(run, c=third)
    run.start(*NAMES)
    run.until(lambda: all(run.events(name, "the data of the sites does not fit together") for name in "ab"))
    assert "'maybe'" in run.events("a", "the data of the sites does not fit together")[0]["reason"]
    run.stops("c", "'maybe'")
    run.kill()
    own_tables(run, {"classes": [*labels, "maybe"]}, c=third)
    run.live()
    assert preprocessing_of(tmp_path, "a").classes == (*labels, "maybe")


def test_table_of_too_many_labels_is_refused_at_its_own_site_with_the_limit_and_the_ways_out(tmp_path):
    columns = {"age": range(2_400), "ill": [f"label {i % 1_200}" for i in range(2_400)]}
    table = fm.data.Table(write(tmp_path / "t.csv", columns), "ill", partition=fm.data.Even(1))
    with refused("1,200 labels", "1,000", "contract", "classes", "exclude"):
        TableAgreement("a", table.sites()[0], SimpleNamespace(), tmp_path).announce(True)


@pytest.mark.parametrize("labels", [["1", "²"], ["1", "--5"], ["1", ""], ["1", "-"]])
def test_labels_that_only_look_like_numbers_are_put_in_an_order(labels):
    assert sorted(in_order(labels)) == sorted(labels)
    assert in_order(["10", "-2", "9"]) == ("-2", "9", "10")


@pytest.mark.slow
def test_site_that_would_make_a_column_constant_is_named_and_the_others_wait_for_it(tmp_path, founded):
    def weighs_all() -> None:
        honest = SiteTable.sums

        def many(self) -> TableSums:
            told = honest(self)
            many = {name: one._replace(known=10**9 * bool(one.known)) for name, one in told.columns.items()}
            return replace(told, columns=many)

        SiteTable.sums = many

    run = founded(SHARED + TRAINING)
    own_tables(run)
    run.start("a", "b")
    run.start("c", before=weighs_all)
    what = "the data of the sites does not fit together"
    run.until(lambda: all(run.events(name, what) for name in "ab"))
    assert [run.events(name, what)[0]["site"] for name in "ab"] == ["c", "c"]
    run.ended("c")
    run.start("c")
    run.end(*NAMES)


def test_one_member_cannot_blame_a_site_for_a_column_that_only_these_two_have(tmp_path):
    """c tells nothing of its ages, and b claims that all of its are nearly equal."""
    (site,) = fm.data.Table(write(tmp_path / "t.csv", clinic()), "ill", partition=fm.data.Even(1)).sites()
    said = {name: site.table.sums().to_table() for name in NAMES}
    said["b"]["columns"]["age"][3] = 1e-12
    said["c"]["columns"]["age"][:4] = [0, 0, 0.0, 0.0]
    bodies = {name: {"sums": sums, "fitted_by": []} for name, sums in said.items()}
    board = SimpleNamespace(of=lambda name, kind: bodies[name], of_all=lambda kind: bodies)
    rows = len(site.table.rows["train"])
    declared = {"samples": rows, "reserved": 0, "test": 12, "validation": 0, "outputs": 2}
    sites, reason = TableAgreement("a", site, board, tmp_path).misfit(NAMES, dict.fromkeys(NAMES, declared))
    assert (sites, missing_from(reason, "'age'", "ask a and b")) == (["a", "b"], [])


@pytest.mark.quick_cases("all")
@pytest.mark.parametrize("liar", ["a", "c"])
@pytest.mark.parametrize("lie", ["writing", "kind"])
def test_lie_about_a_column_that_one_site_alone_has_names_both_and_ends_neither(liar, lie):
    def told(**kinds: str) -> TableSums:
        columns = tuple(fm.data.Column(name, kind, fill="mean") for name, kind in kinds.items())
        plan = Preprocessing(columns, fm.data.Column("ill", "label", classes=("no", "yes")))
        return TableSums(plan, dict.fromkeys(kinds, Sums()), Sums())

    lies = {"writing": told(age="number", Shoe="number"), "kind": told(age="number", shoe="category")}
    sites = dict.fromkeys("abc", told(age="number")) | {"b": told(age="number", shoe="number"), liar: lies[lie]}
    with refused("shoe", "b", liar, error=Misfit) as caught:
        fitted(sites)
    assert sorted(caught.value.sites) == sorted(["b", liar])
    honest = SimpleNamespace(membership=SimpleNamespace(name="b", mesh=SimpleNamespace(present="abc")))
    objection = Objection(caught.value.sites, caught.value.reason)
    data_agreement._stop_if_alone(honest, objection, 3, Notices(since=0.0))
    with refused("shoe", error=Misfit) as caught:  # with a second honest site, the liar alone is named
        fitted(sites | {"d": sites["b"]})
    assert caught.value.sites == [liar]


def test_two_of_four_with_another_form_name_both_others_and_end_neither(tmp_path):
    (site,) = fm.data.Table(write(tmp_path / "t.csv", clinic()), "ill", partition=fm.data.Even(1)).sites()
    honest = site.table.sums()
    plan = replace(honest.plan, target=replace(honest.plan.target, name="sick"))
    with refused("ill", error=Misfit) as caught:
        fitted({"a": replace(honest, plan=plan), "b": replace(honest, plan=plan), "c": honest, "d": honest})
    assert caught.value.sites == ["c", "d"]
    membership = SimpleNamespace(name="c", mesh=SimpleNamespace(present="abcd"))
    long_ago = Notices(since=0.0)
    data_agreement._stop_if_alone(SimpleNamespace(membership=membership), Objection(["c", "d"], "ill"), 4, long_ago)
    with refused("ill"):
        long_ago.since = 0.0
        data_agreement._stop_if_alone(SimpleNamespace(membership=membership), Objection(["c"], "ill"), 4, long_ago)


def test_table_inside_other_data_is_refused_between_organisations(tmp_path):
    table = fm.data.Table(write(tmp_path / "t.csv", clinic()), "ill", site="where")
    with refused("held-out", "table"):
        TableAgreement("a", fm.data.HeldOut(table).sites()[0], None, tmp_path)
