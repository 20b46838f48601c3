"""Each site compares the common model with the one that it trains alone; only counts travel, and small ones do not."""

import json
import sys
from pathlib import Path

import pytest

from fairmesh.errors import Diverged
from fairmesh.evidence import versus_counts
from fairmesh.mesh.node import versus_local
from fairmesh.mesh.node.versus_local import difference, evidence_of, sentences
from fairmesh.mesh.wire.bulletin import CELLS, FEW, FEWEST, KINDS
from tests.mesh.scenarios import Run, played

NAMES = ["a", "b", "c"]
EXPERIMENT = """
rounds = 60
data = { name = "digits", nodes = 3, odd = 1 }
topology = "ring"
algorithm = "tracked-ad-gda"
[options]
measure_every = 20
"""


def _cells(*counts: int | str) -> dict[str, int | str]:
    return dict(zip(CELLS, counts))


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
    holds = KINDS["versus_local"]["cells"]
    assert holds(_cells(100, FEW, 5, 64))
    assert holds({})
    assert not holds(_cells(100, 4, 5, 64))
    assert not holds(_cells(100, "<6", 5, 64))
    assert not holds({"patients": 100})


def test_evidence_has_all_sites_and_says_why_one_was_not_compared():
    told = {
        "a": {"cells": _cells(100, 30, 6, 64), "why_not": ""},
        "b": {"cells": _cells(100, FEW, FEW, FEW), "why_not": ""},
        "c": {"cells": {}, "why_not": "withheld by the site"},
    }
    found = evidence_of(told, NAMES, [0.65, 0.95, 0.8])
    a, b, c = found["sites"]
    assert (a["n"], a["versus"]["local"]["verdict"]) == (200, "better")
    assert (b["n"], b["n_at_least"], b["versus"]["local"]["verdict"]) == (100, True, "unclear")
    assert (c["n"], c["versus"], c["why_not"]) == (None, {}, "withheld by the site")
    assert found["worst"]["site"] == "a"
    assert len(sentences({"evidence": found})) == 2


def verdicts_at_every_site(run: Run) -> None:
    """One site withholds its counts; all show the same verdicts of the others."""
    site = run.folder / "c" / "site.toml"
    site.write_text("compare_with_local = false\n" + site.read_text())
    run.start(*NAMES)
    run.end(*NAMES)
    summaries = {(run.folder / name / "state" / "result" / "summary.json").read_bytes() for name in NAMES}
    assert len(summaries) == 1
    a, b, c = json.loads(summaries.pop())["evidence"]["sites"]
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
        versus_local.early_stopped_models = diverges  # in the process of the node

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


SCENARIOS = {one.__name__: one for one in (verdicts_at_every_site, a_comparison_that_fails)}


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_nodes_show_the_verdicts_of_all_sites(scenario, tmp_path):
    played("tests.mesh.test_versus_local", scenario, str(tmp_path / "run"))


if __name__ == "__main__":
    made = Run(Path(sys.argv[2]), NAMES, EXPERIMENT)
    try:
        SCENARIOS[sys.argv[1]](made)
    finally:
        made.kill()
