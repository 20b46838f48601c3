"""Models at sites that had no part in their training."""

from dataclasses import replace

import pytest
import torch

import fairmesh as fm
from tests.refusals import refused


def _site(sign: float, seed: int) -> fm.Site:
    x = torch.randn(120, 2, generator=torch.Generator().manual_seed(seed))
    y = (sign * x[:, 0] > 0).long()
    return fm.Site((x[:60], y[:60]), test=(x[60:], y[60:]), name=f"sign {sign:+g}, {seed}")


def _problem(*signs: float) -> fm.Problem:
    return fm.Problem(lambda: torch.nn.Linear(2, 2), [_site(sign, k) for k, sign in enumerate(signs)])


def test_leave_one_site_out_shows_which_site_others_do_not_speak_for():
    problem = _problem(1, 1, 1, -1)
    found = fm.leave_one_site_out(problem, algorithm=fm.ChocoSGD(primal_step=0.5), rounds=60).mean()
    *alike, unlike = found.values()
    assert min(alike) > 0.9  # the others know what this site needs
    assert unlike < 0.1  # they know the opposite


@pytest.mark.slow
def test_leave_one_site_out_is_training_without_the_site():
    # Weights follow held-out rows and are compared with local models, which are found by the names of the sites.
    objective = fm.Objective(judged_on="held-out", discount_noise=True)
    problem, options = replace(_problem(1, 1, -1), objective=objective), {"rounds": 10, "seeds": (0, 4)}
    left_out = fm.leave_one_site_out(problem, fm.Ring(), fm.TrackedADGDA(), **options)
    for k in range(3):
        rest = [site for i, site in enumerate(problem.sites) if i != k]
        alone = fm.train(replace(problem, sites=rest), fm.Ring(), fm.TrackedADGDA(), **options)
        mine = [r for r, one in enumerate(left_out.result.replicas) if one.split == k]
        assert torch.equal(left_out.result.row()[mine], alone.row())
        inputs, targets = problem.sites[k].test
        for s, state in enumerate(alone.state_dict(r) for r in range(2)):
            model = torch.nn.Linear(2, 2)
            model.load_state_dict(state)
            expected = (model(inputs).argmax(-1) == targets).double().mean()
            assert left_out.values["accuracy"][s][k] == pytest.approx(float(expected))


def test_leave_one_site_out_refuses_what_it_cannot_do():
    with refused("at least 3 sites", "2"):
        fm.leave_one_site_out(_problem(1, 1))
    with refused("3 nodes", "fm.Ring()"):
        fm.leave_one_site_out(_problem(1, 1, 1, 1), fm.topologies.Edges(edges=((0, 1), (1, 2), (2, 3))), rounds=1)


def test_leave_one_site_out_takes_all_splits_in_one_batch():
    problem = _problem(1, 1, -1)
    other = replace(problem, sites=[replace(site, train=site.test, test=site.train) for site in problem.sites])
    options = {"algorithm": fm.algorithms.DSGD(0.5), "rounds": 5, "seeds": (0, 4)}
    together = fm.leave_one_site_out(replace(problem, splits=[other]), **options)
    alone = [fm.leave_one_site_out(one, **options) for one in (problem, other)]
    assert together.values["accuracy"] == [row for one in alone for row in one.values["accuracy"]]
