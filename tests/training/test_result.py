"""A result as people print it: the sites, their intervals, and the worst."""

import pytest

import fairmesh as fm
from tests.toys import problem


def cells(text):
    return [line.split() for line in text.splitlines()]


def test_result_prints_the_worst_site_the_mean_and_every_site_with_its_interval():
    result = fm.train(problem(4), fm.Ring(), fm.algorithms.DSGD(0.5), rounds=3)
    found, (header, worst, mean, *sites) = result.evidence(), cells(str(result))
    assert header[:2] == ["accuracy,", "%"]
    low, high = (f"{100 * end:.1f}" for end in found["worst"]["interval"])
    assert worst == ["worst", "site", f"{100 * found['worst']['value']:.1f}", low, "to", high]
    assert mean[3] == f"{100 * found['mean']['value']:.1f}"
    assert [row[-1] for row in sites] == [str(one["n"]) for one in found["sites"]]
    assert "tensor" not in repr(result)
    assert "sites=4" in repr(result)


def test_result_prints_the_worst_of_many_sites_first():
    data = fm.data.Digits(nodes=23, odd=2)
    result = fm.run(fm.Experiment(data, algorithm=fm.algorithms.DSGD(0.5), rounds=4))
    rows = str(result).splitlines()
    assert len(rows) == 3 + 10 + 1
    assert "13 more" in rows[-1]
    values = [float(row.split()[3]) for row in rows[3:-1]]
    assert values == sorted(values)


def test_result_prints_a_site_where_the_metric_is_not_defined():
    one_class = problem(3)
    result = fm.train(
        fm.Problem(
            one_class.initial.model,
            one_class.sites,
            metrics={"nothing": fm.metrics.Metric(lambda outputs, targets: float("nan"))},
        ).prepared,
        fm.Ring(),
        fm.algorithms.DSGD(0.1),
        rounds=1,
    )
    assert "nan" not in str(result)


@pytest.mark.filterwarnings("ignore")
def test_result_of_a_run_that_diverged_says_so():
    result = fm.train(problem(3), fm.Ring(), fm.algorithms.DSGD(1e30), rounds=5, on_divergence="mark")
    assert "diverged" in str(result)
    assert "diverged=[0]" in repr(result)
