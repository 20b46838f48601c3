"""The bench of site problems: its problems and methods are as documented, it runs, and its tables count right."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fairmesh as fm
from fairmesh.data.partitions import Pool
from fairmesh.training.replicas import stacked
from reproduction.__main__ import app
from reproduction.sites import instruments, page, running, sources, table
from reproduction.sites.methods import CANDIDATES, METHODS
from reproduction.sites.problems import CONCEPT_ANGLE, PROBLEMS
from reproduction.sites.running import FULL, QUICK, Scale, Task, Trained, chosen_among, outcome_of, rows_of
from reproduction.sites.twins import TWINS
from reproduction.verdicts import RECORDED
from tests.late import late
from tests.refusals import refused

stats = late("scipy.stats")

RESULTS = RECORDED / "sites"
FEW_TEST_ROWS = {"small-sites-breast-cancer": 220}  # the whole table has 569


def _pool(name: str, folder=None) -> Pool:
    """Returns a pool in the form of a published dataset, of random bytes."""
    generator = torch.Generator().manual_seed(0)
    shape = (3, 32, 32) if name == "cifar-10" else (28, 28)

    def rows(per_class: int):
        images = torch.randint(256, (10 * per_class, *shape), dtype=torch.uint8, generator=generator)
        return images, torch.arange(10).repeat(per_class)

    return Pool(rows(1200), rows(200))


@pytest.fixture(scope="module")
def split_of():
    """Returns the sites of a problem's split; published datasets are random bytes."""
    known = {}

    def sites(name: str, split: int = 0):
        if (name, split) not in known:
            known[name, split] = PROBLEMS[name].sites(split)
        return known[name, split]

    pools = {name: _pool(name) for name in ("mnist", "fashion-mnist", "cifar-10")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "pool_of", pools.__getitem__)
        yield sites


def test_problems_cover_every_kind_in_both_halves():
    halves = {half: [p for p in PROBLEMS.values() if p.half == half] for half in ("development", "held-back")}
    assert sum(map(len, halves.values())) == len(PROBLEMS) - len(TWINS) >= 14
    assert {p.kind for p in halves["development"]} == {p.kind for p in halves["held-back"]}
    assert len({p.kind for p in PROBLEMS.values()}) == 9


def test_twins_have_every_kind_that_numbers_can_have_and_scales_as_a_table_makes_them():
    assert {p.kind for p in PROBLEMS.values()} - {p.kind for p in TWINS} == {"label shift", "rare classes"}
    curvatures = []
    for problem in TWINS:
        sites = problem.sites(0)
        inputs, targets = (torch.cat([site.train[k] for site in sites]) for k in range(2))
        for rows in (inputs, targets):
            assert torch.allclose(rows.mean(dim=0), torch.zeros(()), atol=1e-4)
            assert torch.allclose(rows.std(dim=0), torch.ones(()), atol=1e-2)
        curvatures.append(float(torch.linalg.matrix_norm(inputs.T @ inputs / len(inputs), 2)))
    assert min(curvatures) < 2
    assert sum(curvature > 10 for curvature in curvatures) >= 2
    assert max(curvatures) > 30


@pytest.mark.parametrize("name", PROBLEMS)
def test_problem_has_sites_of_natural_sizes_with_enough_test_rows(name, split_of):
    problem, sites = PROBLEMS[name], split_of(name)
    sizes = [len(site.train[1]) for site in sites]
    assert 6 <= len(sites) <= 12
    assert 300 <= problem.rounds <= 1000
    assert 30 <= min(sizes) < max(sizes) <= 3000
    assert min(len(site.test[1]) for site in sites) >= FEW_TEST_ROWS.get(name, 500)
    assert len({site.name for site in sites}) == len(sites)  # a reference is a table by names
    groups = [site.group for site in sites]
    unusual = [group for group in groups if group != groups[0]]
    assert len(unusual) < len(sites) / 2
    assert bool(unusual) == (problem.kind != "all alike")


@pytest.mark.parametrize(
    "name", ["concept-table", "instruments-digits", "label-noise-fashion", "two-populations-mnist"]
)
def test_problem_gives_a_split_again_and_another_one_for_another_number(name, split_of):
    for once, again, other in zip(split_of(name), PROBLEMS[name].sites(0), split_of(name, 1)):
        for k in range(2):
            assert torch.equal(once.train[k], again.train[k])
            assert torch.equal(once.test[k], again.test[k])
        assert not torch.equal(once.train[0], other.train[0])


def test_problem_deals_no_row_twice_and_tests_on_none_that_it_trains_on(split_of):
    sites = split_of("all-alike-digits")
    train = torch.cat([site.train[0] for site in sites]).flatten(1).unique(dim=0)
    assert len(train) == sum(len(site.train[1]) for site in sites)
    test = torch.cat([site.test[0] for site in sites]).flatten(1).unique(dim=0)
    assert len(torch.cat([train, test]).unique(dim=0)) == len(train) + len(test)


def test_concept_table_turns_the_boundary_at_the_unusual_sites_by_the_angle_that_it_states(split_of):
    for site in split_of("concept-table"):
        inputs, labels = site.test
        along = (inputs[:, 1:3] * (2 * labels[:, None] - 1)).mean(dim=0)
        angle = float(torch.atan2(along[1], along[0]))
        assert angle == pytest.approx(CONCEPT_ANGLE if site.group == "turned" else 0.0, abs=0.1)


@pytest.mark.parametrize(("name", "share"), [("label-noise-digits", 0.4), ("label-noise-fashion", 0.35)])
def test_label_noise_problems_have_wrong_labels_at_one_site_in_training_and_testing(name, share, split_of):
    usual = PROBLEMS[name].sites(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "where", lambda wrong, others, labels: labels)  # nothing is mistaken
        clean = PROBLEMS[name].sites(0)
    for site, right in zip(usual, clean):
        expected = share if site.group == "wrong labels" else 0.0
        for k in ("train", "test"):
            wrong = (getattr(site, k)[1] != getattr(right, k)[1]).double().mean()
            assert float(wrong) == pytest.approx(expected, abs=0.15)
            assert (float(wrong) > 0) == (expected > 0)


@pytest.mark.parametrize(
    ("name", "group", "classes", "share"),
    [
        ("label-shift-digits", "mostly 3 and 9", (3, 9), 0.8),
        ("rare-classes-digits", "with 8 and 9", (8, 9), 0.6),
        ("rare-classes-digits", "usual", (8, 9), 0.0),
        ("label-shift-fashion", "pullovers", (2,), 0.7),
    ],
)
def test_sites_hold_the_shares_of_classes_that_the_problem_states(name, group, classes, share, split_of):
    for site in split_of(name):
        if site.group == group:
            for labels in (site.train[1], site.test[1]):
                assert float(torch.isin(labels, torch.tensor(classes)).double().mean()) == pytest.approx(
                    share, abs=0.05
                )


def test_instruments_change_images_as_they_are_called():
    rng = np.random.default_rng(0)
    images = torch.rand(40, 8, 8)
    assert torch.equal(instruments.mirrored(images, rng)[:, :, 0], images[:, :, -1])
    moved = instruments.shifted(1, -2)(images, rng)
    assert torch.equal(moved[:, :6, 1:], images[:, 2:, :7])
    assert not moved[:, 6:].any()
    assert not moved[:, :, 0].any()
    assert bool((instruments.thin(images, rng) <= images).all())
    assert bool((instruments.thick()(images, rng) >= images).all())
    coarse = instruments.coarse(4)(images, rng)
    assert torch.allclose(coarse[:, :4, :4], images[:, :4, :4].mean(dim=(1, 2), keepdim=True).expand(-1, 4, 4))
    assert torch.allclose(instruments.turned(180)(images, rng), images.flip(1, 2))
    assert torch.allclose(instruments.turned(89.999)(images, rng), images.rot90(1, (1, 2)), atol=1e-3)
    assert torch.allclose(instruments.blurred(3)(images, rng)[:, 1, 1], images[:, :3, :3].mean(dim=(1, 2)))
    half = instruments.half_of(instruments.mirrored)(images, rng)
    assert int((half != images).flatten(1).any(dim=1).sum()) == 20
    assert instruments.renamed({4: 9, 9: 4})(torch.tensor([4, 9, 1]), rng).tolist() == [9, 4, 1]


def test_breast_cancer_is_read_from_a_file_where_scikit_learn_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("FAIRMESH_DATA", str(tmp_path))
    sources._table.cache_clear()
    inputs, labels = sources._table("breast-cancer", "load_breast_cancer")
    sources.export(tmp_path)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    sources._table.cache_clear()
    again = sources._table("breast-cancer", "load_breast_cancer")
    assert np.array_equal(again[0], inputs)
    assert np.array_equal(again[1], labels)
    (tmp_path / "breast-cancer.npz").unlink()
    sources._table.cache_clear()
    with refused("breast-cancer.npz", "--data", "scikit-learn"):
        PROBLEMS["small-sites-breast-cancer"].sites(0)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.candidates])
def test_methods_have_equal_numbers_of_candidates_that_run_as_one_batch(name):
    method = METHODS[name]
    assert len(method.candidates) == CANDIDATES or method.sees_test
    assert len(set(map(repr, method.candidates))) == len(method.candidates)
    stacked(method.candidates, torch.float64, torch.device("cpu"))
    assert all(set(method.differences(one)) <= _NUMBERS for one in method.candidates)


_NUMBERS = {"primal_step.start", "dual_step.value", "temperature", "regularizer.strength"}


def test_candidates_of_all_sites_follow_the_worst_site_and_those_of_single_sites_their_own():
    def tried(*accuracies: float, diverged: int = 0) -> Trained:
        return Trained(np.array([accuracies]), None, 0, diverged)

    candidates = [tried(0.9, 0.2), tried(0.5, 0.4), tried(0.6, 0.4), tried(1.0, 1.0, diverged=1)]
    assert chosen_among(candidates, by_site=False) == [2, 2]  # the mean decides between equal worst sites
    assert chosen_among(candidates, by_site=True) == [0, 2]


# Tables of made-up rows.


def _row(method: str, splits: list[list[list[float]]], tuning: str = "untuned") -> dict:
    outcomes = {str(s): {"accuracy": accuracy} for s, accuracy in enumerate(splits)}
    return {"problem": "concept-table", "method": method, "tuning": tuning, "splits": outcomes}


LOCAL = _row("Local", [[[0.8, 0.8, 0.5]], [[0.8, 0.8, 0.5]]])
FIXED = _row("Fixed", [[[0.9, 0.9, 0.5]], [[0.9, 0.9, 0.52]]])
POOLED = _row("Pooled", [[[0.9, 0.9, 0.5]], [[0.9, 0.9, 0.52]]])


def _oracle(*variants: list[list[list[float]]]) -> dict:
    row = _row("Pooled, oracle weights", [])
    row["splits"] = {str(s): {"variants": [{"accuracy": variant[s]} for variant in variants]} for s in range(2)}
    return row


def test_estimate_is_the_mean_with_a_t_interval():
    values = [0.1, 0.2, 0.4, 0.3, 0.15]
    found = table.Estimate.of(values)
    low, high = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    assert found.mean == pytest.approx(np.mean(values))
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx((low, high))
    assert table.Estimate.of([0.5]) == (0.5, None)
    assert table.Estimate(0.862, 0.0131).shown() == "86.2 ±1.3"
    assert table.Estimate(0.05, None).shown(signed=True) == "+5.0"


def test_table_averages_over_seeds_first_and_compares_with_the_sites_alone():
    seeds = _row("Tracked AD-GDA", [[[0.9, 0.7, 0.6], [0.9, 0.9, 0.4]], [[0.8, 0.9, 0.5], [0.8, 0.9, 0.5]]])
    lines = {line["method"]: line for line in table.table(table.book_of([seeds, LOCAL]))}
    line = lines["Tracked AD-GDA"]
    assert line["worst"].mean == pytest.approx(0.5)
    assert line["worst"].half == pytest.approx(0.0)
    assert line["fifth"] == line["worst"]  # a fifth of three sites is one
    assert line["mean"].mean == pytest.approx((4.4 / 6 + 2.2 / 3) / 2)
    assert line["better_off"].mean == pytest.approx((4 / 6 + 1 / 3) / 2)  # equal is not better
    assert line["regret"].mean == pytest.approx((-0.1 + 0.0) / 2)
    assert not {"better_off", "regret"} & lines["Local"].keys()


def test_worst_fifth_is_the_mean_of_a_fifth_of_the_sites():
    accuracy = np.array([[0.1, 0.9, 0.3, 0.8, 0.7, 0.6, 0.5, 0.9, 0.9, 0.9], np.full(10, 0.4)])
    assert table.worst_fifth(accuracy).tolist() == pytest.approx([0.2, 0.4])


def test_worse_off_counts_sites_below_their_accuracy_alone_beyond_the_interval():
    alone = {split: np.array([[0.8, 0.8, 0.8]]) for split in range(3)}
    found = {0: np.array([[0.7, 0.7, 0.9]]), 1: np.array([[0.72, 0.9, 0.9]]), 2: np.array([[0.71, 0.7, 0.9]])}
    assert table.worse_off(found, alone) == 1
    assert table.worse_off({0: found[0]}, alone) is None


def test_oracle_is_the_variant_with_the_best_worst_site_over_all_splits():
    steady, once = [[[0.8, 0.6]], [[0.8, 0.6]]], [[[0.8, 0.7]], [[0.8, 0.4]]]
    found = table.accuracies(_oracle(steady, once))
    assert [one.tolist() for one in found.values()] == steady


def _summary(method: list[list[list[float]]], *oracle: list[list[list[float]]]) -> dict:
    rows = [LOCAL, FIXED, POOLED, _oracle(*oracle), _row("Tracked AD-GDA", method)]
    found = table.summary("concept-table", rows)
    (line,) = found["methods"]
    return found | line


def test_summary_asks_for_half_of_what_oracle_weights_gain_and_for_the_mean():
    better = [[[0.9, 0.89, 0.6]], [[0.9, 0.89, 0.62]]]
    found = _summary([[[0.9, 0.88, 0.56]], [[0.9, 0.88, 0.58]]], better)
    assert found["to_be_had"].mean == pytest.approx(0.1)
    assert found["worst"].mean == pytest.approx(0.06)
    assert found["share"] == pytest.approx(0.6)
    assert found["mean"].mean == pytest.approx(0.04 / 3)
    assert found["reached"]
    assert found["possible"]
    assert found["worse_off"] == 0
    assert not _summary([[[0.9, 0.88, 0.54]], [[0.9, 0.88, 0.56]]], better)["reached"]  # less than half
    assert not _summary([[[0.8, 0.8, 0.58]], [[0.8, 0.8, 0.6]]], better)["reached"]  # the mean loses 4 points


def test_summary_says_where_the_oracle_misses_the_goal_too():
    found = _summary([[[0.8, 0.8, 0.58]], [[0.8, 0.8, 0.6]]], [[[0.7, 0.7, 0.6]], [[0.7, 0.7, 0.62]]])
    assert not found["reached"]
    assert not found["possible"]
    assert table.summary_in_words([found])[1][-1] != table.summary_in_words([found | {"possible": True}])[1][-1]


def test_summary_asks_for_no_loss_where_oracle_weights_gain_nothing():
    nothing = [[[0.9, 0.9, 0.51]], [[0.9, 0.9, 0.53]]]
    found = _summary([[[0.9, 0.9, 0.496]], [[0.9, 0.9, 0.516]]], nothing)
    assert found["share"] is None
    assert found["reached"]
    assert not _summary([[[0.9, 0.9, 0.49]], [[0.9, 0.9, 0.51]]], nothing)["reached"]


def test_page_holds_every_recorded_problem_and_method(tmp_path):
    rows = [LOCAL, FIXED, POOLED, _oracle([[[0.9, 0.8, 0.6]], [[0.9, 0.8, 0.6]]]), _row("DRFA", [[[0.7, 0.8, 0.6]]])]
    text = "".join(json.dumps(row | {"settings": {}}) + "\n" for row in rows)
    (tmp_path / "concept-table.jsonl").write_text(text)
    made = page.page(tmp_path)
    assert made.count("### concept-table") == 1
    for row in rows:
        assert f"| {row['method']} |" in made
    assert "| concept-table | DRFA | +9.0 ±12.7 |" in made


# Runs.


def _called(*arguments: str):
    return CliRunner().invoke(app, ["sites", *arguments], catch_exceptions=False)


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_quick_bench_runs_every_method_resumes_and_is_shown(tmp_path):
    command = ["--quick", "--only", "concept-table", "--out", str(tmp_path)]
    some = ["--methods", "Local", "--methods", "Fixed"]
    assert "[4/4]" in _called(*command, *some).stderr  # two methods, untuned and tuned
    before = {(row["method"], row["tuning"]): row for row in rows_of(tmp_path / "results" / "sites", "concept-table")}
    assert len(before) == 4
    answer = _called(*command)
    assert "concept-table: Local" not in answer.stderr
    rows = {(row["method"], row["tuning"]): row for row in rows_of(tmp_path / "results" / "sites", "concept-table")}
    assert list(rows) == [(m.name, tuning) for m in METHODS.values() for tuning in m.tunings]
    assert before == {key: row for key, row in rows.items() if key in before}
    for (method, tuning), row in rows.items():
        (outcome,) = row["splits"].values()
        for one in outcome.get("variants", [outcome]):
            assert np.shape(one["accuracy"]) == (1, 9)
            assert not METHODS[method].robust or method == "DR-DSGD" or sum(one["lambda"]) == pytest.approx(1, abs=0.01)
        assert ("chosen" in outcome) == (tuning == "tuned")
    assert rows["Local", "untuned"]["splits"]["0"]["bytes"] == 0
    shown = json.loads(_called("--show", "--json", "--out", str(tmp_path)).stdout)
    assert list(shown["problems"]) == ["concept-table"]
    assert [line["method"] for line in shown["summary"][0]["methods"]] == [m.name for m in METHODS.values() if m.robust]
    assert shown["problems"]["concept-table"][0]["worst"].keys() == {"mean", "half"}


@pytest.mark.slow
def test_bench_runs_rows_of_other_settings_again(tmp_path, monkeypatch):
    def ran() -> list[str]:
        said: list[str] = []
        running.run(["concept-table"], ["Fixed"], tmp_path, QUICK, say=said.append)
        return said

    assert len(ran()) == 2
    assert not ran()
    changed = replace(METHODS["Fixed"], algorithm=replace(METHODS["Fixed"].algorithm, beta1=0.8))
    monkeypatch.setitem(METHODS, "Fixed", changed)
    assert len(ran()) == 2
    monkeypatch.setitem(PROBLEMS, "concept-table", replace(PROBLEMS["concept-table"], revision=99))
    assert len(ran()) == 2


@pytest.mark.slow  # starts processes
def test_bench_in_two_processes_gives_the_same_rows(tmp_path):
    for jobs in (1, 2):
        running.run(["concept-table"], ["Fixed"], tmp_path / str(jobs), QUICK, jobs=jobs)
    once, again = (rows_of(tmp_path / str(jobs), "concept-table") for jobs in (1, 2))
    assert [row["splits"]["0"]["accuracy"] for row in once] == [row["splits"]["0"]["accuracy"] for row in again]


def test_bench_leaves_out_problems_without_data_and_says_why(tmp_path, monkeypatch):
    def missing(name):
        raise fm.BadInput(f"{name} is not here")

    monkeypatch.setattr(sources, "pool_of", missing)
    left_out = running.run(["concept-mnist", "concept-table"], ["Constant"], tmp_path, QUICK)
    assert list(left_out) == ["concept-mnist"]
    assert "mnist" in left_out["concept-mnist"]
    assert rows_of(tmp_path, "concept-table")


def test_local_models_are_judged_at_their_own_site(split_of):
    found = outcome_of(Task("concept-table", "Local", "untuned", 0, Scale(1, 1)))["accuracy"][0]
    assert min(found) > 0.85  # a common model has 0.67 at the turned sites


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--only", "no-such"], ["--only", "'no-such'", "concept-table"]),
        (["--methods", "Magic"], ["--methods", "'Magic'", "Tracked AD-GDA"]),
        (["--half", "first"], ["--half", "'first'", "held-back"]),
        (["--half", "held-back", "--only", "concept-table"], ["held-back", "concept-table"]),
    ],
)
def test_bench_refuses_unknown_problems_methods_and_halves(arguments, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused(*names):
        _called(*arguments)
    assert not any(tmp_path.iterdir())


def test_options_of_the_bench_are_refused_with_other_recipes():
    with refused("--half", "sites", "table2"):
        CliRunner().invoke(app, ["table2", "--half", "development"], catch_exceptions=False)


# The recorded results.


@pytest.mark.parametrize("name", sorted(path.stem for path in RESULTS.glob("*.jsonl")))
def test_recorded_rows_are_complete_and_of_the_bench_as_it_is(name):
    for row in rows_of(RESULTS, name):
        assert running.was_run_as(row, PROBLEMS[name], METHODS[row["method"]], FULL), (row["method"], row["tuning"])
        assert list(row["splits"])[: FULL.splits] == [str(split) for split in PROBLEMS[row["problem"]].splits]


def test_page_is_that_of_the_recorded_rows():
    assert (RESULTS.parents[1] / "sites.md").read_text(encoding="utf-8") == page.page(RESULTS)
