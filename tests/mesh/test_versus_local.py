"""Each site compares the common model with the one that it trains alone; only counts travel, and small ones do not."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fairmesh as fm
from fairmesh.data.samples import Samples
from fairmesh.errors import Diverged
from fairmesh.evidence import versus_counts
from fairmesh.evidence.verdicts import verdict_in_words
from fairmesh.mesh.announcements import CELLS, FEW, FEWEST, KINDS
from fairmesh.mesh.node import versus_local
from fairmesh.mesh.node.versus_local import difference, evidence_of, sentences
from fairmesh.mesh.node.watching import Aside
from fairmesh.metrics.units import Unit
from fairmesh.storage.strict_json import as_json
from tests.mesh import fleet
from tests.mesh.experiments import experiment
from tests.mesh.scenarios import Run, play
from tests.refusals import missing_from

NAMES = ["a", "b", "c"]
EXPERIMENT = experiment(60, algorithm="tracked-ad-gda", options={"measure_every": 20})


def _cells(*counts: int | str) -> dict[str, int | str]:
    return dict(zip(CELLS, counts))


def said(cells=None, verdict: str = "", why_not: str = "") -> dict:
    """What a site tells the others about its comparison."""
    return {"cells": cells or {}, "verdict": verdict, "why_not": why_not}


HONEST = said(_cells(100, 30, 6, 64))


def test_difference_from_told_counts_is_the_paired_one():
    assert difference(_cells(100, 30, 6, 64)) == versus_counts(200, 30, 6)
    assert difference({}) is None


@pytest.mark.parametrize(("counts", "verdict"), [((100, 30, FEW, 64), "better"), ((100, FEW, FEW, 64), "unclear")])
def test_verdict_from_untold_counts_holds_for_all_their_values(counts, verdict):
    found = difference(_cells(*counts))
    assert found.verdict == verdict
    for small in range(FEWEST):
        both, only_common, only_local, neither = (small if count == FEW else count for count in counts)
        rows = both + only_common + only_local + neither
        possible = versus_counts(rows, only_common, only_local)
        assert found.interval[0] <= possible.interval[0] + 1e-9
        assert found.interval[1] >= possible.interval[1] - 1e-9


def test_announced_counts_below_five_are_refused():
    holds = KINDS["versus_local"].fields["cells"]
    assert all(map(holds, (_cells(100, FEW, 5, 64), {})))
    assert not any(map(holds, (_cells(100, 4, 5, 64), _cells(100, "<6", 5, 64), {"patients": 100})))


def test_evidence_has_all_sites_and_says_why_one_was_not_compared():
    told = {"a": HONEST, "b": said(_cells(100, FEW, FEW, FEW)), "c": said(why_not="withheld by the site")}
    found = evidence_of(told, NAMES, [0.65, 0.95, 0.8], "accuracy")
    a, b, c = found["sites"]
    assert (a["n"], a["versus"]["local"]["verdict"]) == (200, "better")
    assert (b["n"], b["n_at_least"], b["versus"]["local"]["verdict"]) == (100, True, "unclear")
    assert (c["n"], c["versus"], c["why_not"]) == (None, {}, "withheld by the site")
    assert found["worst"]["site"] == "a"
    assert len(sentences({"evidence": found})) == 2


def test_mean_over_sites_includes_those_that_told_no_counts():
    told = {"a": HONEST, "b": said(why_not="fewer than 20 test rows"), "c": said(why_not="withheld by the site")}
    found = evidence_of(told, NAMES, [0.65, 0.5, 0.95], "accuracy")
    assert found["mean"]["value"] == pytest.approx(0.7)
    low, high = found["mean"]["interval"]
    assert low < 0.6, "b and c may have a single row"
    assert high > 0.8
    assert found["worst"]["site"] == "a"
    assert [site["value"] for site in found["sites"]] == [0.65, 0.5, 0.95]
    (note,) = found["notes"]
    assert "b, c" in note
    told["b"] = told["c"] = told["a"]
    assert not evidence_of(told, NAMES, [0.65, 0.65, 0.65], "accuracy")["notes"]


@pytest.mark.parametrize(("counts", "accuracy"), [
    ((100, 30, 6, 64), 0.2), ((100, 30, 6, 64), 7.0), ((100, 30, 6, 64), -1.0), ((100, FEW, FEW, FEW), 0.5),
    ((FEW, FEW, FEW, 64), 0.5), ((10**12, 5, 5, 5), 0.5),
])  # fmt: skip
def test_counts_that_contradict_the_accuracy_are_ignored_and_their_site_is_named(tmp_path, counts, accuracy):
    told = {"a": HONEST, "b": said(_cells(*counts)), "c": HONEST}
    record = {"round": 60, "accuracy": {"sites": [0.65, accuracy, 0.65]}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    events = []
    aside = Aside(lambda level, what, **fields: events.append(fields))
    rows = {"a": 200, "b": _rows(counts), "c": 200}
    found = versus_local.evidence(tmp_path, told, rows, judged_by("accuracy"), True, aside)
    a, b, _ = json.loads(as_json(found))["sites"]
    assert (a["n"], a["versus"]["local"]["verdict"]) == (200, "better")
    assert (b["value"], b["versus"]) == (None, {})
    assert [fields["site"] for fields in events] == ["b"]
    assert "accuracy" in aside.view()["b"][0]


def judged_by(metric: str) -> Any:
    """What the evidence asks of a problem."""
    return SimpleNamespace(primary=metric, higher_is_better=lambda metric: True)


def test_counts_of_right_answers_are_ignored_where_an_auroc_decides(tmp_path):
    told = {"a": said(verdict="better"), "b": HONEST, "c": said(why_not="auroc is not defined on its test rows")}
    record = {"round": 60, "accuracy": {"sites": [0.9, 0.65, 0.7]}, "auroc": {"sites": [0.7, 0.8, None]}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    aside = Aside(lambda level, what, **fields: None)
    found = versus_local.evidence(tmp_path, told, dict.fromkeys(NAMES, 200), judged_by("auroc"), True, aside)
    a, b, c = json.loads(as_json(found))["sites"]
    assert (found["metric"], found["worst"]["site"], found["worst"]["value"]) == ("auroc", "a", 0.7)
    assert a["versus"]["local"]["verdict"] == "better"
    assert (b["value"], b["versus"]) == (0.8, {})
    assert "counts" in aside.view()["b"][0]
    assert (c["value"], c["versus"], c["why_not"]) == (None, {}, told["c"]["why_not"])
    assert found["mean"]["value"] == pytest.approx(0.75)


@pytest.mark.parametrize(("counts", "accuracy"), [
    ((100, 30, 6, 64), 0.65), ((100, 30, 6, 64), 0.655), ((100, FEW, FEW, FEW), 0.95), ((FEW, FEW, FEW, 64), 0.05),
    ((15, FEW, FEW, FEW), 0.7), ((100, 30, 6, 64), None),
])  # fmt: skip
def test_counts_of_an_honest_site_do_not_contradict_its_accuracy(counts, accuracy):
    assert versus_local.contradiction(_cells(*counts), accuracy, _rows(counts)) == ""


def _rows(counts) -> int:
    return sum(1 if count == FEW else count for count in counts)


@pytest.mark.parametrize(("counts", "rows", "possible"), [
    ((100, 30, 6, 64), 200, True), ((100, 30, 6, 64), 201, False), ((100, 30, 6, 64), 0, False),
    ((100, FEW, FEW, 64), 164, True), ((100, FEW, FEW, 64), 172, True), ((100, FEW, FEW, 64), 173, False),
    ((100, FEW, FEW, 64), 163, False), ((), 7, True),
])  # fmt: skip
def test_counts_must_be_of_as_many_test_rows_as_the_site_has_declared(counts, rows, possible):
    reason = versus_local.contradiction(_cells(*counts) if counts else {}, None, rows)
    assert (reason == "") == possible
    assert possible or not missing_from(reason, "test rows", f"declared {rows}")


def test_evidence_of_numbers_has_verdicts_and_no_number_of_the_comparison():
    told = {"a": said(verdict="better"), "b": said(verdict="unclear"), "c": said(why_not="no test rows")}
    found = json.loads(as_json(evidence_of(told, NAMES, [0.4, 0.9, None], "rmse", higher_is_better=False)))
    a, b, c = found["sites"]
    assert a["versus"] == {"local": {"verdict": "better"}}
    assert b["versus"] == {"local": {"verdict": "unclear"}}
    assert (c["versus"], c["why_not"], c["value"]) == ({}, "no test rows", None)
    assert [site["n"] for site in found["sites"]] == [None] * 3
    assert (found["worst"]["site"], found["worst"]["value"]) == ("b", 0.9)
    assert [sentence.split(":")[0] for sentence in sentences({"evidence": found})] == ["a", "b"]
    unit = Unit("rmse", share=False)
    assert verdict_in_words(a["versus"]["local"], unit, "alone") == "better than alone"


def test_sites_with_units_tell_verdicts_on_accuracy_and_others_know_no_interval(tmp_path):
    told = {"a": said(verdict="better"), "b": said(verdict="unclear"), "c": said(why_not="fewer than 2 test units")}
    record = {"round": 60, "accuracy": {"sites": [0.9, 0.7, 0.8]}, "loss": {"sites": [0.3, 0.9, 0.5]}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    rows = dict.fromkeys(NAMES, 200)
    aside = Aside(lambda *_, **__: None)
    found = versus_local.evidence(tmp_path, told, rows, judged_by("accuracy"), True, aside)
    found = json.loads(as_json(found))
    assert (found["metric"], found["covers"], found["worst"]["site"]) == ("accuracy", "units", "b")
    assert [site["interval"] for site in found["sites"]] == [[None, None]] * 3
    assert found["sites"][0]["versus"] == {"local": {"verdict": "better"}}
    low, high = found["mean"]["interval"]
    assert high - low > 0.2, "each may have a single unit"
    by_unit, silent = sorted(found["notes"], key=lambda note: "a, b" not in note)
    assert "a, b" in by_unit
    assert "c" in silent
    assert len(sentences({"evidence": found})) == 2


def test_site_with_units_is_compared_by_unit_and_not_with_one_of_them():
    rng = torch.Generator().manual_seed(0)
    units = torch.arange(4).repeat_interleave(50)
    inputs = torch.randn(200, 2, generator=rng)
    labels = (inputs[:, 0] > 0).long()
    labels[units == 3] = 1 - labels[units == 3]  # the right model is right for three of four units only
    site = fm.Site((inputs, labels), test=Samples(inputs, labels, units=units), name="a")
    here = fm.Problem(torch.nn.Linear(2, 2, bias=False), [site]).prepared
    right, wrong = torch.tensor([-1.0, 0.0, 1.0, 0.0]), torch.tensor([0.0, -1.0, 0.0, 1.0])
    cells = versus_local._counted(here, right, wrong)
    assert difference(cells).verdict == "better", "by rows"
    assert versus_local._judged_here(here, right, wrong, among=1).verdict == "unclear", "by units"
    single = replace(here.sites[0], test=here.sites[0].test.take(units == 3))
    membership = SimpleNamespace(site=SimpleNamespace(compare_with_local=True))
    assert "unit" in versus_local._not_compared(membership, here, single)
    assert not versus_local._not_compared(membership, here, here.sites[0])


def test_announced_verdicts_are_words_and_nothing_else():
    holds = KINDS["versus_local"].fields["verdict"]
    assert all(map(holds, ("", "better", "worse", "unclear")))
    assert not any(map(holds, ("better by 3", 0.3, ["better"], None)))


@pytest.mark.parametrize("rounds", [1, 2, 10, 600])
def test_own_model_is_looked_at_early_and_after_the_last_round(rounds):
    looks = sorted(versus_local._looks(rounds))
    assert looks[0] in (1, 2)
    assert looks[-1] == rounds
    assert len(looks) <= 20


def test_numbers_are_compared_on_the_sites_own_rows():
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 2, generator=rng)
    targets = inputs @ torch.tensor([[1.0], [2.0]]) + 0.1 * torch.randn(40, 1, generator=rng)
    site = fm.Site((inputs, targets), test=(inputs, targets), name="a")
    here = fm.Problem(torch.nn.Linear(2, 1), [site], loss=torch.nn.functional.mse_loss).prepared
    right, wrong = torch.zeros(2, 3)
    right[:2] = torch.tensor([1.0, 2.0])
    assert versus_local._judged_here(here, right, wrong, among=60).verdict == "better"
    assert versus_local._judged_here(here, wrong, right, among=60).verdict == "worse"
    assert versus_local._judged_here(here, right, right, among=60).verdict == "unclear"


@pytest.mark.parametrize("hostile", [(500, 9000, 0, 500), (500, 0, 9000, 500), (9000, 0, 0, 1000)])
def test_verdict_on_a_site_is_one_among_all_and_others_cannot_move_it(hostile):
    names = [f"s{k}" for k in range(40)]
    told = {name: said(_cells(100, 20, 8, 72)) for name in names} | {"s1": said(_cells(100, 40, 8, 52))}
    honest = evidence_of(told, names, [0.6] * 40, "accuracy")["sites"]
    assert difference(_cells(100, 20, 8, 72)).verdict == "better", "by itself"
    assert [site["versus"]["local"]["verdict"] for site in honest[:2]] == ["unclear", "better"]
    lied = told | {name: said(_cells(*hostile)) for name in names[2:]}
    assert evidence_of(lied, names, [0.6] * 40, "accuracy")["sites"][:2] == honest[:2]


def _common_summary(run: Run) -> str:
    """Lets the nodes run to the end, and returns their summary, which is the same."""
    run.live()
    (summary,) = {(run.folder / name / "state" / "result" / "summary.json").read_text() for name in NAMES}
    return summary


def verdicts_on_numbers(run: Run) -> None:
    """Only verdicts travel. The difference is in each site's own folder."""
    summary = _common_summary(run)
    evidence = json.loads(summary)["evidence"]
    assert evidence["metric"] == "rmse"
    for name, site in zip(NAMES, evidence["sites"]):
        assert list(site["versus"]["local"]) == ["verdict"]
        (kept,) = (run.folder / name / "state").glob("**/compared-*.json")
        at_home = json.loads(kept.read_text())
        assert at_home["verdict"] == site["versus"]["local"]["verdict"]
        assert at_home["interval"][0] < at_home["difference"] < at_home["interval"][1]
        assert str(at_home["difference"]) not in summary
    assert len(sentences({"evidence": evidence})) == 3


def verdicts_at_every_site(run: Run) -> None:
    """One site withholds its counts; all show the same verdicts of the others."""
    fleet.settle(run.folder / "c", compare_with_local=False)
    a, b, c = json.loads(_common_summary(run))["evidence"]["sites"]
    for one in (a, b):
        assert one["versus"]["local"]["verdict"] in ("better", "worse", "unclear")
        assert one["n"] > 100
    assert c["versus"] == {}
    assert c["why_not"]
    for name in "ab":
        assert (run.folder / name / "state" / "local" / "model.safetensors").exists()
    assert not (run.folder / "c" / "state" / "local").exists()


def a_comparison_that_fails(run: Run) -> None:
    """The result is complete without it. The site's log has the reason, which the others are not told."""

    def diverges(*arguments) -> None:
        raise Diverged("the loss of row 17 of patients.csv is not finite")

    def before() -> None:
        versus_local._regularised = diverges  # in the process of the node

    run.start("a", "b")
    run.start("c", before=before)
    run.end(*NAMES)
    a, _, c = json.loads((run.folder / "a" / "state" / "result" / "summary.json").read_text())["evidence"]["sites"]
    assert "local" in a["versus"]
    assert c["versus"] == {}
    assert "failed" in c["why_not"]
    (told,) = run.events("c", "the comparison with this site's model alone failed")
    assert "patients.csv" in told["reason"]
    heard = (run.folder / "a" / "state" / "log.jsonl").read_text() + json.dumps(c)
    assert "patients.csv" not in heard


def verdicts_by_auroc(run: Run) -> None:
    """Only verdicts travel. A site whose test rows have one class is not compared, and cannot be the worst."""
    summary = json.loads(_common_summary(run))
    evidence = summary["evidence"]
    a, b, c = evidence["sites"]
    assert (summary["metric"], evidence["metric"], evidence["worst"]["site"] in ("a", "b")) == ("auroc", "auroc", True)
    assert all(list(site["versus"]["local"]) == ["verdict"] for site in (a, b))
    assert (c["value"], c["versus"]) == (None, {})
    assert "auroc" in c["why_not"]
    assert summary["worst"] == min(a["value"], b["value"])
    said = {name: [event["what"] for event in run.every_event(name)] for name in NAMES}
    assert [sum("metric that decides is not defined" in what for what in said[name]) for name in NAMES] == [0, 0, 1]
    assert json.loads((run.folder / "c" / "state" / "status.json").read_text())["metric_name"] == "auroc"


def _table_of_classes(folder: Path) -> str:
    """Writes a table of three sites with rare events, none of them at c, and returns the experiment."""
    rng = torch.Generator().manual_seed(0)
    lines = ["site,x,y,ill"]
    for name in NAMES:
        for x, y, noise in torch.randn(300, 3, generator=rng).tolist():
            lines.append(f"{name},{x:.4f},{y:.4f},{'yes' if x + 0.3 * noise > 1.2 and name != 'c' else 'no'}")
    (folder / "ill.csv").write_text("\n".join(lines) + "\n")
    data = {"name": "table", "file": str(folder / "ill.csv"), "target": "ill", "site": "site", "classes": ["no", "yes"]}
    return experiment(60, algorithm="tracked-ad-gda", data=data, primary="auroc", options={"measure_every": 20})


def _table_of_numbers(folder: Path) -> str:
    """Writes a table of three sites with numbers to predict, and returns the experiment."""
    rng = torch.Generator().manual_seed(0)
    lines = ["site,x,y,dose"]
    for name in NAMES:
        for x, y, noise in torch.randn(150, 3, generator=rng).tolist():
            lines.append(f"{name},{x:.4f},{y:.4f},{5 + x - 2 * y + 0.3 * noise:.4f}")
    (folder / "doses.csv").write_text("\n".join(lines) + "\n")
    fields = {"name": "table", "file": str(folder / "doses.csv"), "target": "dose", "site": "site"}
    data = fields | {"predict": "numbers"}
    return experiment(60, algorithm="tracked-ad-gda", data=data, options={"measure_every": 20})


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario", [verdicts_at_every_site, a_comparison_that_fails, verdicts_on_numbers, verdicts_by_auroc]
)
def test_nodes_show_the_verdicts_of_all_sites(scenario, tmp_path):
    tables = {verdicts_on_numbers: _table_of_numbers, verdicts_by_auroc: _table_of_classes}
    play(scenario, tmp_path, NAMES, tables[scenario](tmp_path) if scenario in tables else EXPERIMENT)
