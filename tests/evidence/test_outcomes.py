"""What models answered: measured as in the records, stored, joined over processes, and compared row by row."""

import math
from dataclasses import replace

import pytest
import torch

import fairmesh as fm
from fairmesh.evidence import evidence_table, versus
from fairmesh.evidence.outcome_files import joined, packed, read_outcomes, unpacked
from tests.refusals import refused

DATA = fm.data.Digits(nodes=4, odd=1)


@pytest.fixture(scope="module")
def result() -> fm.Result:
    return fm.run(fm.Experiment(DATA, algorithm=fm.algorithms.DSGD(), rounds=8, seeds=(0, 1)))


@pytest.fixture(scope="module")
def alone() -> fm.Result:
    options = fm.Options(own_models=True)
    return fm.run(
        fm.Experiment(DATA, algorithm=fm.algorithms.Local(), rounds=8, seeds=(0, 1), placements=2, options=options)
    )


def test_outcomes_have_the_values_of_the_records(result, alone):
    for metric in ("accuracy", "loss"):
        rows = torch.tensor([record[metric]["sites"] for record in result.final], dtype=torch.float64)
        found = [one.value for one in result.outcomes().estimates(metric)]
        assert found == pytest.approx(rows.mean(dim=0).tolist(), rel=1e-5)
    own = torch.tensor([record["own_models"]["accuracy"]["sites"] for record in alone.final], dtype=torch.float64)
    assert [one.value for one in alone.outcomes().estimates()] == pytest.approx(own.mean(dim=0).tolist())


def test_metrics_of_outcomes_in_a_file_keep_their_settings():
    inputs, labels = torch.randn(40, 2), torch.arange(40) % 2
    metrics = [fm.metrics.Sensitivity(threshold=0.9, positive="ill")]
    sites = [fm.Site((inputs, labels), test=(inputs, labels))] * 2
    problem = fm.Problem(torch.nn.Linear(2, 2), sites, metrics=metrics, class_names=("well", "ill"))
    outcomes = fm.train(problem, fm.Ring(), fm.algorithms.DSGD(0.01), 1).outcomes()
    (read,) = unpacked(packed({"a": outcomes})).values()
    assert read.function("sensitivity") == fm.metrics.Sensitivity(threshold=0.9, positive=1)
    assert read.estimates("sensitivity")[0].value == outcomes.estimates("sensitivity")[0].value


def test_outcomes_survive_their_file(result, alone, tmp_path):
    path = tmp_path / "outcomes.safetensors"
    path.write_bytes(packed({"a": result.outcomes(), "b": alone.outcomes()}))
    read = read_outcomes(path)
    assert evidence_table(read["a"], against={"local": read["b"]}) == result.evidence(against={"local": alone})
    path.write_bytes(b"something else")
    with refused(str(path)):
        read_outcomes(path)
    with refused("absent"):
        read_outcomes(tmp_path / "absent")


def test_evidence_has_every_site_with_its_interval_and_comparison(result, alone):
    found = result.evidence(against={"local": alone})
    assert found["covers"] == "samples and seeds"
    for site in found["sites"]:
        low, high = site["interval"]
        assert low < site["value"] < high
        assert site["n"] == len(result.problem.sites[0].test)
        assert site["versus"]["local"]["verdict"] in ("better", "worse", "unclear")
    names = [site["name"] for site in found["sites"]]
    assert found["worst"]["value"] == min(site["value"] for site in found["sites"])
    assert found["worst"]["site"] in names


def test_versus_pairs_only_the_same_rows(result):
    other = fm.run(fm.Experiment(replace(DATA, seed=1), algorithm=fm.algorithms.DSGD(), rounds=8, seeds=(0, 1)))
    same, unpaired = versus(result.outcomes(), result.outcomes()), versus(result.outcomes(), other.outcomes())
    assert same.paired
    assert not unpaired.paired
    assert same.count("unclear") == 4
    widths = [one.interval[1] - one.interval[0] for one in (same.at_sites[0], unpaired.at_sites[0])]
    assert widths[0] < 0.5 * widths[1]
    renamed = replace(other.outcomes(), sites=("a", "b", "c", "d"))
    with refused("sites", "'a'"):
        versus(result.outcomes(), renamed)


def test_joined_outcomes_of_processes_are_those_of_one(result):
    whole = result.outcomes()
    parts = []
    for mine in ((0, 1), (2, 3)):
        of_sites = tuple(tuple(k if i in mine else -1 for i, k in enumerate(of)) for of in whole.of_sites)
        parts.append(replace(whole, of_sites=of_sites))
    assert evidence_table(joined(parts)) == evidence_table(whole)


def test_outcomes_of_splits_know_their_common_rows():
    found = fm.run(fm.Experiment(DATA, algorithm=fm.algorithms.DSGD(), rounds=2, splits=3)).outcomes()
    assert found.covers == "samples and splits"
    assert all(0.15 < overlap < 0.35 for overlap in found.overlaps)  # a quarter of the digits is for testing
    assert found.trained_in_common == ()


def test_outcomes_of_sites_that_train_alone_know_their_common_training_rows():
    found = fm.run(fm.Experiment(DATA, algorithm=fm.algorithms.Local(), rounds=2, splits=3)).outcomes()
    shares = found.trained_in_common
    assert all(0.1 < share < 0.25 for share in shares)  # a site of four trains on a fifth of the digits
    assert unpacked(packed({"a": found}))["a"].trained_in_common == shares
    without = replace(found, trained_in_common=())
    for one, other in zip(found.estimates(), without.estimates()):
        assert one.interval()[1] - one.interval()[0] <= other.interval()[1] - other.interval()[0]


@pytest.mark.parametrize("metric", ["auroc", "brier", "f1"])
@pytest.mark.quick_cases(1)
def test_evidence_of_other_metrics_has_intervals(metric):
    experiment = fm.Experiment(DATA, algorithm=fm.algorithms.DSGD(), rounds=8, metrics=[metric])
    result = fm.run(experiment)
    found = result.evidence(metric, against={"itself": result})
    expected = result.final[0][metric]["sites"]
    assert [site["value"] for site in found["sites"]] == pytest.approx(expected, rel=1e-4)
    assert all(site["interval"][0] < site["value"] < site["interval"][1] for site in found["sites"])
    assert all(site["versus"]["itself"]["verdict"] == "unclear" for site in found["sites"])


def test_outcomes_of_a_site_without_test_rows_are_not_measured(result):
    whole = result.outcomes()
    absent = replace(whole, of_sites=tuple((-1, *of[1:]) for of in whole.of_sites))
    found = evidence_table(absent, against={"all": whole})
    assert math.isnan(found["sites"][0]["value"])
    assert found["sites"][0]["n"] == 0
    assert found["sites"][0]["versus"]["all"]["verdict"] == "unclear"
    assert not math.isnan(found["worst"]["value"])


def test_run_folder_keeps_outcomes_and_evidence(tmp_path):
    experiment = fm.Experiment(DATA, algorithm=fm.algorithms.DSGD(), rounds=3, sweep={"primal_step": (0.1, 0.2)})
    result = fm.run(experiment, out=tmp_path)
    read = read_outcomes(tmp_path / "outcomes.safetensors")
    assert len(read) == 2
    assert evidence_table(read["1 last"]) == result.evidence(variant=1)


def test_comparison_does_not_count_a_site_that_is_not_measured_as_unclear(result):
    sites = [replace(site, test=None) if i == 0 else site for i, site in enumerate(DATA.sites())]
    run = fm.train(
        fm.Problem(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)), sites),
        fm.Ring(),
        fm.algorithms.DSGD(),
        rounds=2,
    )
    found = versus(run.outcomes(), run.outcomes())
    assert "3 without a clear difference, 1 not compared" in found.sentence("itself")
    assert "not compared" in found.sentences("itself")[0]


def patients(seed: int, scaled: bool, named: bool) -> list[fm.Site]:
    """Two sites of 60 patients, of which 20 are for testing; each split may scale them by its own training rows."""
    sites = []
    for i in range(2):
        inputs = torch.randn(60, 3, generator=torch.Generator().manual_seed(i))
        labels = (inputs[:, 0] > 0).long()
        order = torch.randperm(60, generator=torch.Generator().manual_seed(100 * seed + i))
        test, train = order[:20], order[20:]
        if scaled:
            inputs = (inputs - inputs[train].mean(dim=0)) / inputs[train].std(dim=0)
        ids = [f"patient {k}" for k in test.tolist()] if named else None
        sites.append(fm.Site((inputs[train], labels[train]), test=(inputs[test], labels[test]), rows=ids))
    return sites


def outcomes_of_splits(scaled: bool, named: bool):
    problems = [fm.Problem(torch.nn.Linear(3, 2), patients(k, scaled, named)) for k in range(4)]
    return fm.train(problems, fm.Ring(), fm.algorithms.DSGD(0.1), 2).outcomes()


def test_splits_that_scale_their_inputs_share_the_rows_that_are_named():
    plain, named = outcomes_of_splits(False, False), outcomes_of_splits(True, True)
    assert named.overlaps == plain.overlaps
    assert min(named.overlaps) > 0.2
    assert named.covers == plain.covers == "samples and splits"
    assert not named.notes()


def test_splits_that_scale_their_inputs_are_not_said_to_be_covered():
    found = outcomes_of_splits(True, False)
    assert found.covers == "samples"
    assert found.overlaps == [pytest.approx(1 / 3)] * 2  # as random splits with a third of the rows for testing
    (note,) = found.notes()
    assert "rows=ids" in note
    read = unpacked(packed({"a": found}))["a"]
    assert evidence_table(read) == evidence_table(found)


def test_site_refuses_rows_that_do_not_name_each_test_row():
    inputs, labels = torch.randn(12, 2), torch.arange(12) % 2
    sites = [fm.Site((inputs, labels), test=(inputs, labels), rows=range(11), name="Lyon")] * 2
    with refused("'Lyon'", "12 test rows"):
        fm.Problem(torch.nn.Linear(2, 2), sites)


def test_run_has_the_same_identity_with_and_without_named_rows():
    model = torch.nn.Linear(3, 2)
    digests = {fm.Problem(model, patients(0, False, named)).prepared.digest() for named in (False, True)}
    assert len(digests) == 1


def test_worst_site_needs_some_test_rows():
    inputs = torch.randn(40, 2)
    labels = (inputs[:, 0] > 0).long()
    wrong = fm.Site((inputs, labels), test=(inputs[:1], 1 - labels[:1]), name="one row")
    sites = [fm.Site((inputs, labels), test=(inputs[:20], labels[:20]), name=name) for name in ("a", "b")]
    problem = fm.Problem(torch.nn.Linear(2, 2), [*sites, wrong])
    result = fm.train(problem, fm.Ring(), fm.algorithms.DSGD(1.0), 40)
    found = result.evidence()
    assert found["worst"]["site"] != "one row"
    assert [site["few_rows"] for site in found["sites"]] == [False, False, True]
    assert "one row" in str(result).split("fewer than 5 rows:")[1]
    any_rows = fm.train(problem, fm.Ring(), fm.algorithms.DSGD(1.0), 40, worst_needs_rows=0).evidence()
    assert any_rows["worst"]["site"] == "one row"
    none = fm.train(problem, fm.Ring(), fm.algorithms.DSGD(1.0), 40, worst_needs_rows=100).evidence()
    assert none["worst"]["site"] == "one row"
    assert "No site has 100" in none["notes"][0]


@pytest.mark.filterwarnings("ignore:worse than predicting")
def test_intervals_stay_within_the_range_of_the_metric():
    inputs = torch.randn(30, 2, generator=torch.Generator().manual_seed(0))
    sites = [fm.Site((inputs, inputs[:, 0]), test=(inputs[:n], inputs[:n, 1])) for n in (2, 3, 5)]
    problem = fm.Problem(torch.nn.Linear(2, 1), sites, loss=fm.losses.SquaredError(), metrics=["rmse"])
    outcomes = fm.train(problem, fm.Ring(), fm.algorithms.DSGD(0.1), 5).outcomes()
    for metric in ("loss", "rmse"):
        every = [*outcomes.estimates(metric), outcomes.mean(metric), outcomes.worst(metric)]
        assert all(0.0 <= one.interval()[0] <= one.value <= one.interval()[1] for one in every)


@pytest.mark.filterwarnings("ignore:clearly worse than")
def test_evidence_says_where_tails_are_heavy():
    rng = torch.Generator().manual_seed(0)
    noise = torch.exp(3.0 * torch.randn(4, 60, generator=rng))
    inputs = torch.randn(4, 60, 2, generator=rng)
    sites = [fm.Site((x[30:], y[30:]), test=(x[:30], y[:30])) for x, y in zip(inputs, noise)]
    calm = [fm.Site((x[30:], x[30:, 0]), test=(x[:30], x[:30, 0])) for x in inputs]

    def notes(data):
        torch.manual_seed(0)
        problem = fm.Problem(torch.nn.Linear(2, 1), data, loss=fm.losses.AbsoluteError())
        return fm.train(problem, fm.Ring(), fm.algorithms.DSGD(0.001), 2).evidence()["notes"]

    assert "heavy a tail" in notes(sites)[0]
    assert not notes(calm)
