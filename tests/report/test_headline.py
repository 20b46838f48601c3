"""The first sentences of a run."""

import math

import pytest

from fairmesh.report.first_sentences import advice_of, conclusion_of, headline_of
from tests.refusals import missing_from

METRICS = {"accuracy": {"share": True}, "loss": {"share": False}}


def difference(verdict, low=0.01, high=0.05):
    return {"difference": (low + high) / 2, "interval": [low, high], "verdict": verdict}


def summary(uses, alone, common=None, **more):
    """What a summary says of sites that use these models, with these verdicts against the one alone."""
    names = [f"site {k}" for k in range(len(uses))]
    common = common or ["unclear"] * len(uses)
    sites = [
        {"name": name, "versus": {"local": difference(a), "common": difference(c)}}
        for name, a, c in zip(names, alone, common)
    ]
    mean = {"versus": {"local": difference("better"), "common": difference("unclear", -0.01, 0.02)}}
    shares = [dict.fromkeys(("common", "adapted", "own"), 0.0) | {kind: 1.0} for kind in uses]
    personal = [{"sites": [{"name": name, "shares": of, "rows": 9} for name, of in zip(names, shares)]}]
    evidence = {"metric": "accuracy", "judged_on": "test", "sites": sites, "mean": mean}
    return {"metrics": METRICS, "judged_on": "test", "personal": personal, "site_models_evidence": evidence} | more


def test_headline_of_a_run_with_a_named_algorithm_is_empty():
    assert headline_of({"metrics": METRICS, "judged_on": "test"}) == []


def test_together_counts_sites_and_gives_the_mean_with_its_interval():
    said, _ = headline_of(summary(["common"] * 5, ["better", "better", "worse", "unclear", "unclear"]))
    assert said.startswith(
        "Training together: on test rows better than alone at 2 of 5 sites (site 0 and site 1), worse at 1 (site 2);"
    )
    assert "better by 1 to 5 points" in said


def test_sites_without_an_interval_are_not_counted():
    told = summary(["common"] * 3, ["better", "unclear", "unclear"])
    for site in told["site_models_evidence"]["sites"][1:]:
        site["versus"]["local"]["interval"] = [math.nan, math.nan]
    assert "at 1 of 1 site that could be compared" in headline_of(told)[0]
    told["site_models_evidence"]["sites"][0]["versus"] = {}
    assert "not compared with alone" in headline_of(told)[0]


@pytest.mark.parametrize(
    ("uses", "said"),
    [
        (["own", "own", *["common"] * 6], "site 0 and site 1 should use a model of the site's rows alone; 6 sites the"),
        (["adapted"] * 3, "every site should use one adapted"),
        (["own", *["adapted"] * 5, *["common"] * 5], "site 0 should use a model of the site's rows alone; 5 sites one"),
    ],
)
def test_sites_are_named_up_to_four_and_else_counted(uses, said):
    assert said in headline_of(summary(uses, ["unclear"] * len(uses)))[-1]


def test_site_uses_what_its_models_mostly_are_on_average_over_replicas():
    told = summary(["own"], ["unclear"])
    (site,) = told["personal"][0]["sites"]
    other = site | {"shares": {"common": 0.2, "adapted": 0.8, "own": 0.0}}
    told["personal"] += [{"sites": [other]}, {"sites": [other]}]
    assert "every site should use one adapted" in headline_of(told)[-1]  # 1.6 of 3, against 1 own


def test_common_model_everywhere_is_not_compared_with_itself():
    assert "better than the common model" not in headline_of(summary(["common"] * 3, ["unclear"] * 3))[-1]
    assert "better than the common model" in headline_of(summary(["own"] * 3, ["unclear"] * 3))[-1]


def test_weights_say_what_was_decided_and_what_test_rows_show():
    decided = {"weights": "robust", "why": "they help"}
    outcomes = {name: {"outcome": kind} for name, kind in zip("abc", ("helped", "no difference", "hurt"))}
    told = summary(["common"] * 3, ["unclear"] * 3, handed_out=decided, weights={"sites": outcomes})
    said = headline_of(told)[1]
    assert said.startswith(
        "Weights: the common model has robust weights, because they help; on test rows they helped 1"
    )
    assert said.endswith("hurt 1.")
    assert "helped" not in headline_of(told | {"judged_on": "train"})[1]  # on rows that both have seen
    fixed = headline_of(told | {"handed_out": {"weights": "fixed", "why": "why not"}, "weights": None})[1]
    assert fixed == "Weights: the common model has fixed weights, because why not."


def run_of(**more):
    return {"diverged": [], "final": [{}], "rounds": 40, "judged_on": "test", "metrics": METRICS} | more


def next_to_alone(*verdicts):
    names = [f"site {k}" for k in range(len(verdicts))]
    sites = [{"name": name, "versus": {"local": difference(v)}} for name, v in zip(names, verdicts)]
    return {"evidence": {"metric": "accuracy", "sites": sites}}


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (
            summary(["own", *["common"] * 2], ["better", "better", "worse"]),
            ["site 0", "2 of 3 sites", "worse at 1", "site 2"],
        ),
        (summary(["adapted"] * 3, ["unclear"] * 3), ["Every site", "adapted", "no difference is clear"]),
        (next_to_alone("better", "unclear"), ["worth it", "1 of 2 sites", "worse at none"]),
        (next_to_alone("worse", "unclear"), ["does not pay", "site 0", "[personalization]"]),
        (next_to_alone("worse", "better"), ["better", "worse at 1", "site 0", "[personalization]"]),
        (next_to_alone("unclear", "unclear"), ["no clear difference", "2 sites"]),
        ({"judged_by": "own models"}, ["alone", "its own model"]),
        ({"judged_on": "train"}, ["no site has test rows"]),
        ({"provenance": {"data": {}}}, ["alone", "--with-references"]),
        ({"diverged": [0]}, ["diverged", "smaller steps"]),
        ({"planned_rounds": 400}, ["not finished", "40 of 400"]),
    ],
)
def test_conclusion_says_what_to_take_away_and_to_do(told, said):
    assert missing_from(conclusion_of(run_of(**told)), *said) == []


@pytest.mark.parametrize(
    ("told", "advice"),
    [
        (summary(["adapted"] * 3, ["unclear"] * 3), "Every site should use a model adapted from the common one."),
        (next_to_alone("better", "unclear"), ""),
        (next_to_alone("worse", "unclear"), "To give sites a model of their own, train again with [personalization]."),
        ({"provenance": {"data": {}}}, "To see whether training together is worth it, run it with --with-references."),
        ({"provenance": None}, ""),
        ({"judged_on": "train"}, "No site has test rows. Give the sites some, and train again."),
        ({"diverged": [0]}, "Train again with smaller steps."),
        ({"planned_rounds": 400}, ""),
    ],
)
def test_advice_is_what_the_conclusion_says_to_do(told, advice):
    assert advice_of(run_of(**told)) == advice


def test_conclusion_advises_no_run_that_is_not_possible():
    assert "--with-references" not in conclusion_of(run_of(provenance={"data": {}}, privacy={"epsilon": 1.0}))
    assert "--with-references" not in conclusion_of(run_of(provenance=None))  # of a node between organisations
    of_sweep = run_of(provenance={"data": {}}, variants=[{}, {}])
    assert "--with-references" not in conclusion_of(of_sweep) + advice_of(of_sweep)
