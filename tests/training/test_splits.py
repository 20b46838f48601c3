"""Several splits of the data, trained as replicas of one batch."""

from dataclasses import replace

import pytest
import torch

import fairmesh as fm
from fairmesh.problems.evaluator import Evaluator
from tests.refusals import refused

_DATA = fm.data.Digits(nodes=4, odd=1, sizes=(60, 40, 30, 20), validation_share=0.2)


def _alone(experiment: fm.Experiment, k: int) -> fm.Result:
    return fm.run(replace(experiment, data=experiment.data.resplit(k), splits=1))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),  # weights follow held-out rows, compared with local models
        {"algorithm": fm.ADGDA(6.0), "objective": fm.Objective(judged_on="validation"), "seeds": (1, 5)},
        {"algorithm": fm.algorithms.Local(), "sampling": fm.Sampling(order="full"), "placements": 2},
    ],
    ids=["default", "validation", "local"],
)
@pytest.mark.quick_cases(1)
def test_splits_give_the_same_in_a_batch_as_alone(changes):
    experiment = fm.Experiment(
        _DATA, rounds=8, splits=3, options=fm.Options(measure_every=4, own_models=True, keep_best=True), **changes
    )
    every = fm.run(experiment)
    for k in range(3):
        mine = [r for r, replica in enumerate(every.replicas) if replica.split == k]
        one = _alone(experiment, k)
        assert torch.equal(every.row()[mine], one.row())
        assert torch.equal(every.row("best")[mine], one.row("best"))
        for r, record in zip(mine * 3, one.records):
            same = next(x for x in every.records if x["replica"] == r and x["round"] == record["round"])
            assert same | {"replica": 0} == record | {"replica": 0, "split": k}


def test_splits_differ_in_their_rows():
    result = fm.run(fm.Experiment(_DATA, rounds=2, splits=2, algorithm=fm.algorithms.Local()))
    tests = [result.problem.of_split(k).sites[0].test.inputs for k in range(2)]
    assert tests[0].shape == tests[1].shape
    assert not torch.equal(*tests)


def test_splits_of_a_list_of_problems_are_those_of_the_experiment():
    experiment = fm.Experiment(_DATA, fm.Ring(), fm.TrackedADGDA(), rounds=5, splits=2)
    problems = [replace(experiment, data=_DATA.resplit(k), splits=1).problem() for k in range(2)]
    listed = fm.train(problems, fm.Ring(), fm.TrackedADGDA(), 5)
    assert torch.equal(listed.row(), fm.run(experiment).row())


def test_splits_resume_where_they_stopped_and_refuse_other_ones(tmp_path):
    def run(count: int, rounds: int = 6, folder: str = "a", resume: bool = False) -> fm.Result:
        problems = [fm.Experiment(_DATA.resplit(k), algorithm=fm.ADGDA()).problem() for k in range(count)]
        return fm.train(
            problems, fm.Ring(), fm.ADGDA(1.0), rounds, out=tmp_path / folder, resume=resume, measure_every=3
        )

    whole = run(3, folder="whole")
    run(3, rounds=3)
    assert torch.equal(run(3, resume=True).row(), whole.row())
    with refused("seeds", "[0, 0, 0]", error=fm.errors.CheckpointError):
        run(2, resume=True)


def test_splits_of_data_without_a_seed_are_refused():
    with refused("splits", "ImportedData", "held-out"):
        fm.Experiment(fm.data.ImportedData("somewhere.py:load"), splits=2)
    with refused("splits", "0"):
        fm.Experiment(_DATA, splits=0)


def test_splits_that_are_other_problems_are_refused():
    problem = fm.Experiment(_DATA).problem()
    with refused("split 1", "sites"):
        fm.train([problem, fm.Experiment(replace(_DATA, odd=2)).problem()], rounds=1)
    with refused("Problem"):
        fm.train([], rounds=1)


def test_splits_of_wrapped_data_are_drawn_again():
    held = fm.data.HeldOut(fm.data.Corrupted(_DATA, seed=4), seed=2).resplit(3)
    assert (held.seed, held.data.seed, held.data.data.seed) == (5, 7, 3)


@pytest.mark.parametrize("changes", [{}, {"metrics": ("balanced-accuracy",)}], ids=["at once", "one by one"])
def test_splits_are_judged_in_one_pass_as_they_are_one_by_one(changes):
    problem = fm.Experiment(_DATA, algorithm=fm.algorithms.Local(), splits=3, **changes).problem()
    splits, generator = (2, 0, 1, 0, 2, 1), torch.Generator().manual_seed(0)
    models = torch.randn(6, problem.n, problem.flat_model.dim, generator=generator)
    models[3, 1] = torch.nan  # which only its own site notices
    placements = torch.stack([torch.randperm(problem.n, generator=generator) for _ in splits])
    judge = Evaluator(problem, "test", "cpu", torch.float32, splits=splits)
    found = judge.of_sites(models[:, 0]), judge.of_own_models(models, placements)
    for r, split in enumerate(splits):
        alone = Evaluator(problem.of_split(split), "test", "cpu", torch.float32)
        expected = alone.of_sites(models[r : r + 1, 0]), alone.of_own_models(models[r : r + 1], placements[r : r + 1])
        for mine, theirs in zip(found, expected):
            assert mine.keys() == theirs.keys()
            for name, values in theirs.items():
                torch.testing.assert_close(mine[name][r], values[0], equal_nan=True, rtol=1e-5, atol=1e-6)
    assert found[1]["loss"][3].isnan().tolist() == [False, True, False, False]


def test_splits_say_which_site_cannot_be_measured():
    problem = fm.Experiment(_DATA, algorithm=fm.algorithms.Local(), splits=2).problem()
    problem = problem.each(
        lambda split: split.changed(
            sites=[replace(site, test=None if i == 1 else site.test) for i, site in enumerate(split.sites)]
        )
    )
    judge = Evaluator(problem, "test", "cpu", torch.float32, splits=(0, 1))
    rows = torch.zeros(2, problem.flat_model.dim)
    assert judge.of_sites(rows)["accuracy"].isnan().tolist() == [[False, True, False, False]] * 2
    rows[1, 0] = torch.nan
    assert bool(judge.of_sites(rows)["loss"][1].isnan().all())


def test_splits_share_what_was_checked_of_model_and_loss():
    problem = fm.Experiment(_DATA, algorithm=fm.algorithms.Local(), splits=3).problem()
    assert len({id(split.flat_model) for split in problem.every_split}) == 1
    sites = [replace(site, train=(site.train.inputs, site.train.targets + 5)) for site in problem.sites]
    with refused("labels", "10 classes"):
        problem.changed(sites=sites)
    wider = [fm.Site((torch.randn(9, 80), torch.arange(9))) for _ in range(4)]
    with refused("inputs of shape"):
        problem.changed(sites=wider)
    objective = fm.Objective(judged_on="validation")
    other = problem.changed(objective=objective)
    assert (other.objective, other.splits, problem.objective == objective) == (objective, (), False)
