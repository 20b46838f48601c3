"""Tables of runs: every metric with its direction, and what was not defined or not measured."""

import math

import pytest
import torch

import fairmesh as fm
from fairmesh.report.contents import card
from fairmesh.report.html import page
from fairmesh.report.runs import Run, site_table, worst_sites
from fairmesh.report.tables import of_metrics
from tests.refusals import missing_from
from tests.training.test_named_metrics import one_class_at, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run whose second site is tested on one class, and whose fourth has no test data."""
    out = tmp_path_factory.mktemp("run") / "r"
    given = one_class_at(4, 1)
    given[3] = fm.Site(given[3].train, name="s3")
    width = fm.metrics.Metric(lambda outputs, targets: outputs.std(), higher_is_better=False)
    metrics = {"auroc": "auroc", "width": width}
    train(fm.Problem(torch.nn.Linear(2, 2), given, metrics=metrics), 2, out=out)
    return out


def test_own_metrics_are_in_the_table_with_their_direction(folder):
    run = Run.from_folder(folder)
    header, *rows = of_metrics(card(run), range(4))
    assert ["auroc" in header, "width\nlower is better" in header] == [True, True]
    by_name = {row[0]: dict(zip(header, row)) for row in rows}
    widths = [value for value in run.by_site("width") if not math.isnan(value)]
    assert by_name["worst site"]["width\nlower is better"] == f"{max(widths):.4g}"


def test_sites_tell_not_defined_from_not_measured(folder):
    run = Run.from_folder(folder)
    header, *rows = of_metrics(card(run), range(4))
    cells = {row[0]: dict(zip(header, row)) for row in rows}
    assert cells["s1"]["auroc"] == "not defined"
    assert cells["s1"]["accuracy"].endswith("%")
    assert cells["s3"]["auroc"] == "not measured"
    assert site_table([run])[4][1] == "not measured"
    assert 3 not in worst_sites([run])
    assert any(not missing_from(note, "s3", "not measured") for note in run.notes())


def test_page_shows_own_metrics_and_notes(folder):
    pytest.importorskip("matplotlib")
    assert not missing_from(page([Run.from_folder(folder)], "t"), "width", "not defined", "not measured")


def test_runs_without_test_data_say_so(tmp_path):
    given = [fm.Site(site.train) for site in one_class_at(3, -1)]
    result = train(fm.Problem(torch.nn.Linear(2, 2), given))
    run = Run.from_result(result)
    assert run.summary["judged_on"] == "train"
    assert sum("training data" in note for note in run.notes()) == 1


@pytest.mark.slow
def test_level_of_cvar_is_a_setting_that_tables_name(tmp_path):
    given = one_class_at(4, 1)
    for level, named in ((0.5, "CVaR at 50 %"), (0.25, "CVaR at 25 %")):
        problem = fm.Problem(torch.nn.Linear(2, 2), given, metrics=["brier"])
        result = train(problem, 2, out=tmp_path / named, cvar_level=level)
        run = Run.from_folder(tmp_path / named)
        losses, table = sorted(result.final[0]["loss"]["sites"]), run.summary["metrics"]["loss"]
        assert table["cvar"] == pytest.approx(sum(losses[-int(4 * level) :]) / (4 * level))
        assert named in [row[0] for row in of_metrics(card(run), range(4))]
        assert named in page([run], "a run")
