"""A result is confirmed when all sites have announced the same one, and their own metrics as it has them."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from fairmesh.mesh.node.node import Node
from fairmesh.mesh.node.result import (
    _read_back,
    _told,
    expected_results,
    result_digest,
    results_apart,
    undefined_metrics,
)
from tests.mesh.experiments import BY_CLASS, experiment
from tests.mesh.scenarios import Run, play
from tests.refusals import missing_from

NAMES = ("a", "b", "c")
EARLIER = {"round": 5, "accuracy": {"worst": 0.1, "sites": [0.1, 0.1, 0.1]}}
ACCURACIES, LOSSES = [0.9, 0.8, 0.7], [0.1, 1 / 3, None]  # a loss that is not finite is null


class Board:
    """A bulletin that keeps what sites announce."""

    def __init__(self):
        self.said = {}

    def announce(self, kind, body, number):
        self.said[self.who] = json.loads(json.dumps(body))

    def of_all(self, kind):
        return self.said


def member(name, generation=1):
    mesh = SimpleNamespace(generation=generation, present=[SimpleNamespace(name=one) for one in NAMES])
    return SimpleNamespace(name=name, names=NAMES, mesh=mesh)


def written(folder, accuracies=ACCURACIES, model=b"model", measured=None, best=None):
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(model)
    (folder / "model-time-average.safetensors").write_bytes(b"average")
    record = {"round": 7, "accuracy": {"worst": 0.7, "sites": accuracies}, "loss": {"sites": LOSSES}, "bytes_total": 1}
    if best:
        record["best_model"] = {"accuracy": {"worst": 0.75, "sites": best}}
        (folder / "model-best.safetensors").write_bytes(b"best")
    (folder / "metrics.jsonl").write_text(json.dumps(EARLIER) + "\n" + json.dumps(record) + "\n")
    (folder / "summary.json").write_text(json.dumps({"measured": measured or dict.fromkeys(NAMES, "0123")}))
    return folder


@pytest.fixture
def results(tmp_path):
    """The announced results of three sites that agree."""
    return {name: expected_results(written(tmp_path / name), member(name)) for name in NAMES}


def announced(results, **others):
    board = Board()
    for name, result in (results | others).items():
        board.who = name
        board.announce("result", result[name], result[name]["generation"])
    return board


def _silent(board):
    return Node.silent(SimpleNamespace(bulletin=board, membership=member("a")), "result")  # type: ignore[arg-type]


def test_result_that_all_sites_announced_is_confirmed(results):
    board = announced(results)
    assert [(_silent(board), results_apart(results[name], board)) for name in NAMES] == 3 * [([], {})]


def test_sites_that_have_announced_nothing_yet_are_named(results):
    board = announced(results)
    del board.said["b"]
    board.said["c"]["generation"] = 0  # of the mesh before a site left
    assert (_silent(board), results_apart(results["a"], board)) == (["b", "c"], {})


def test_another_model_at_one_site_is_named_by_all(results, tmp_path):
    other = expected_results(written(tmp_path / "other", model=b"another"), member("c"))
    board = announced(results, c=other)
    apart = results_apart(results["a"], board)
    assert (_silent(board), list(apart)) == ([], ["c"])
    assert missing_from(apart["c"], "digest", other["c"]["digest"][:16], results["a"]["a"]["digest"][:16]) == []
    assert list(results_apart(other, board)) == ["a", "b"]


def test_forged_accuracy_of_a_third_site_is_named(results, tmp_path):
    """The root gives everybody but b a sum in which b is worse than it is."""
    forged = {name: expected_results(written(tmp_path / f"f-{name}", [0.9, 0.1, 0.7]), member(name)) for name in "ac"}
    apart = results_apart(forged["a"], announced(results, **forged))
    assert list(apart) == ["b"]
    assert missing_from(apart["b"], "accuracy", "0.8", "0.1", "digest") == []


def test_forged_accuracy_of_the_best_model_is_named(tmp_path):
    mine = expected_results(written(tmp_path / "a", best=[0.9, 0.8, 0.75]), member("a"))
    theirs = expected_results(written(tmp_path / "b", best=[0.9, 0.1, 0.75]), member("b"))
    apart = results_apart(mine, announced({"a": mine, "b": theirs, "c": mine}))
    assert list(apart) == ["b"]
    assert missing_from(apart["b"], "best accuracy", "0.1", "0.8") == []


def test_site_that_told_others_different_metrics_during_the_run_is_named(results, tmp_path):
    heard = {"a": "0123", "b": "4567", "c": "0123"}
    other = expected_results(written(tmp_path / "other", measured=heard), member("c"))
    apart = results_apart(results["a"], announced(results, c=other))
    assert list(apart) == ["c"]
    assert missing_from(apart["c"], "metrics of b", "b has told sites different numbers") == []


def test_digest_covers_models_and_numbers(tmp_path):
    folder = written(tmp_path / "result", best=[0.9, 0.8, 0.75])
    before = result_digest(folder)
    for file in ("model.safetensors", "model-time-average.safetensors", "model-best.safetensors", "metrics.jsonl"):
        content = (folder / file).read_bytes()
        (folder / file).write_bytes(content + b" ")
        assert result_digest(folder) != before
        (folder / file).write_bytes(content)
    assert result_digest(folder) == before


@pytest.mark.parametrize("value", [0.25, -3.0, 0.0, math.nan, math.inf, -math.inf])
def test_metric_that_is_not_finite_travels_in_finite_numbers_and_changes_no_other_sites(value):
    of_sites = [0.5, value, 0.75]
    contributions = [_told(one, torch.eye(3, dtype=torch.float64)[i]) for i, one in enumerate(of_sites)]
    assert all(row.isfinite().all() for row in contributions)
    found = _read_back(*torch.stack(contributions).sum(0).reshape(2, 3))
    torch.testing.assert_close(found, torch.tensor([of_sites], dtype=torch.float64), equal_nan=True, rtol=0, atol=0)


def test_sites_without_a_value_are_named_by_metric(tmp_path):
    assert undefined_metrics(written(tmp_path / "result"), NAMES) == {"loss": ["c"]}


SCORES = """
def undefined(outputs, targets):
    return float("nan") if int(targets.min()) == 1 else 0.5

def broken(outputs, targets):
    if int(targets.min()) == 1:
        raise RuntimeError("no such class here")
    return 0.25

def share(outputs, targets):
    return float(len(targets))
"""


def a_metric_without_a_value(run: Run) -> None:
    """At one site one metric is undefined, and another raises. All sites get the same result, which says so."""
    run.live()
    folder = run.folder
    results = {(folder / name / "state" / "result" / "metrics.jsonl").read_text() for name in NAMES}
    assert len(results) == 1
    record = json.loads(results.pop().splitlines()[-1])
    assert record["undefined"]["sites"] == [0.5, None, 0.5]
    assert record["broken"]["sites"] == [0.25, None, 0.25]
    assert all(record["share"]["sites"])
    assert record["undefined"]["worst"] == 0.5
    for name in NAMES:
        said = {one["metric"]: one["sites"] for one in run.events(name, "a metric has no value at some sites")}
        assert said == {"undefined": "b", "broken": "b"}
    (failed,) = run.events("b", "a metric failed; it has no value at this site")
    assert missing_from(failed["reason"], "broken", "RuntimeError", "no such class here") == []


@pytest.mark.slow
def test_site_without_a_value_of_a_metric_is_named_and_all_get_their_results(tmp_path):
    metrics = {name: f"scores.py:{name}" for name in ("undefined", "broken", "share")}
    text = experiment(6, algorithm="ad-gda", data=BY_CLASS, metrics=metrics, options={"measure_every": 3})
    play(a_metric_without_a_value, tmp_path, NAMES, text, {"scores.py": SCORES})
