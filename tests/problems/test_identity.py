"""The fingerprint of a problem knows every function of the user's own, so that no run goes on with another one."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fairmesh as fm
from fairmesh.problems.identity import named
from tests import toys
from tests.refusals import refused


def scaled(factor):
    return lambda outputs, targets: factor * F.cross_entropy(outputs, targets)


class Weighing:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, outputs, targets):
        return F.cross_entropy(outputs, targets)


class Other(Weighing):
    def __call__(self, outputs, targets):
        return F.nll_loss(outputs.log_softmax(dim=1), targets)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda o, t: F.l1_loss(o, t), lambda o, t: F.mse_loss(o, t)),  # the same instructions, other names
        (scaled(1.0), scaled(2.0)),
        (lambda o, t, power=1: (o - t) ** power, lambda o, t, power=2: (o - t) ** power),
        (lambda o, t: (lambda x: x + 1)(o), lambda o, t: (lambda x: x + 2)(o)),
        (Weighing(1.0), Other(1.0)),
        (partial(F.huber_loss, delta=1.0), partial(F.huber_loss, delta=2.0)),
    ],
    ids=["names", "closure", "default", "inner function", "class", "partial"],
)
def test_functions_that_compute_other_things_have_other_names(one, other):
    assert named(one) == named(one) != named(other)


def test_name_of_a_function_holds_no_address_and_no_order_of_a_set():
    def function(outputs, targets):
        return outputs if str(targets) in {"alpha", "beta", "gamma"} else F.relu(outputs)

    around = [nn.Linear(2, 2), object()]
    text = named(lambda outputs, targets: (around, function(outputs, targets)))
    assert "0x" not in text
    places = [named(function).index(word) for word in ("alpha", "beta", "gamma")]
    assert places == sorted(places)


def test_digest_of_a_problem_knows_the_metrics_of_the_users_own(tmp_path):
    model = nn.Linear(toys.FEATURES, toys.CLASSES)

    def made(function, higher=True):
        return toys.problem(2, model=model, metrics={"mine": fm.Metric(function, higher)})

    def same(outputs, targets):
        return (outputs.argmax(1) == targets).float().mean()

    problems = made(same), made(lambda o, t: o.mean()), made(lambda o, t: o.amax()), made(same, False)
    assert len({problem.digest() for problem in problems}) == 4
    assert made(same).digest() == problems[0].digest()
    fm.train(problems[0], fm.Ring(), fm.DSGD(0.1), 1, out=tmp_path, trace="no")
    with refused("model", error=fm.FairmeshError):
        fm.train(problems[1], fm.Ring(), fm.DSGD(0.1), 2, out=tmp_path, resume=True, trace="no")


def test_digest_of_a_problem_knows_all_functions_of_a_module_of_the_users_own():
    def network(helper):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(toys.FEATURES, toys.CLASSES)
                nn.init.zeros_(self.layer.weight), nn.init.zeros_(self.layer.bias)

            def forward(self, inputs):
                return self.changed(self.layer(inputs))

            changed = helper

        return Net()

    def relu(self, x):
        return F.relu(x + 1)

    def tanh(self, x):
        return torch.tanh(x + 1)

    tanh.__qualname__ = relu.__qualname__
    assert toys.problem(2, model=network(relu)).digest() != toys.problem(2, model=network(tanh)).digest()
    assert toys.problem(2, model=network(relu)).digest() == toys.problem(2, model=network(relu)).digest()
