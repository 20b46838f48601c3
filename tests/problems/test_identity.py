"""The fingerprint of a problem knows every function of the user's own, so that no run goes on with another one."""

import shutil
import sys
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fairmesh as fm
from fairmesh.problems.identity import NOT_PART, code_in_words, described
from fairmesh.problems.outputs import PackedLoss
from fairmesh.problems.row_loss import BoundModelLoss
from fairmesh.training import options
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


def calling(function):
    return lambda outputs, targets: function(outputs, targets)


PAIRS = {
    "names": (lambda o, t: F.l1_loss(o, t), lambda o, t: F.mse_loss(o, t)),  # the same instructions
    "closure": (scaled(1.0), scaled(2.0)),
    "default": (lambda o, t, power=1: (o - t) ** power, lambda o, t, power=2: (o - t) ** power),
    "inner function": (lambda o, t: (lambda x: x + 1)(o), lambda o, t: (lambda x: x + 2)(o)),
    "class": (Weighing(1.0), Other(1.0)),
    "module": (nn.CrossEntropyLoss(weight=torch.ones(2)), nn.CrossEntropyLoss(weight=torch.zeros(2))),
    "partial": (partial(F.huber_loss, delta=1.0), partial(F.huber_loss, delta=2.0)),
    "default by name": (lambda o, t, *, power=1: (o - t) ** power, lambda o, t, *, power=2: (o - t) ** power),
    "partial in a closure": (calling(partial(F.huber_loss, delta=1.0)), calling(partial(F.huber_loss, delta=2.0))),
    "class in a closure": (calling(Weighing), calling(Other)),
}


@pytest.mark.parametrize(("one", "other"), PAIRS.values(), ids=PAIRS)
def test_functions_that_compute_other_things_have_other_names(one, other):
    assert described(one) == described(one) != described(other)


def test_values_of_an_objects_attributes_may_change_while_it_is_used():
    assert described(Weighing(1.0)) == described(Weighing(2.0))


def test_name_of_a_function_holds_no_address_and_no_order_of_a_set():
    def function(outputs, targets):
        return outputs if str(targets) in {"alpha", "beta", "gamma"} else F.relu(outputs)

    around = [nn.Linear(2, 2), object()]
    text = code_in_words(lambda outputs, targets: (around, function(outputs, targets)))
    assert "0x" not in text
    assert "0x" not in str(described(partial(F.cross_entropy, weight=function, other=[object()])))
    places = [code_in_words(function).index(word) for word in ("alpha", "beta", "gamma")]
    assert places == sorted(places)


def test_digest_of_a_problem_knows_the_metrics_of_the_users_own(tmp_path):
    model = nn.Linear(toys.FEATURES, toys.CLASSES)

    def made(function, higher=True):
        return toys.problem(2, model=model, metrics={"mine": fm.metrics.Metric(function, higher)})

    def same(outputs, targets):
        return (outputs.argmax(1) == targets).float().mean()

    problems = made(same), made(lambda o, t: o.mean()), made(lambda o, t: o.amax()), made(same, False)
    assert len({problem.digest() for problem in problems}) == 4
    assert made(same).digest() == problems[0].digest()
    fm.train(problems[0], fm.Ring(), fm.algorithms.DSGD(0.1), 1, out=tmp_path, trace="no")
    with refused("problem.own metrics.mine", error=fm.errors.FairmeshError):
        fm.train(problems[1], fm.Ring(), fm.algorithms.DSGD(0.1), 2, out=tmp_path, resume=True, trace="no")


def test_digest_of_a_problem_knows_all_functions_of_a_module_of_the_users_own():
    def digest(helper) -> str:
        made = toys.module(lambda self, inputs: self.changed(self.layer(inputs)), layer=nn.Linear(toys.FEATURES, 3))
        type(made).changed = helper
        nn.init.zeros_(made.layer.weight), nn.init.zeros_(made.layer.bias)
        return toys.problem(2, model=made).digest()

    def relu(self, x):
        return F.relu(x + 1)

    def tanh(self, x):
        return torch.tanh(x + 1)

    tanh.__qualname__ = relu.__qualname__
    assert digest(relu) == digest(relu) != digest(tanh)


@dataclass(frozen=True)
class Noise:
    scale: float = 0.0


@dataclass(frozen=True, eq=False)
class Private(fm.Problem):
    clip_each: float | None = None
    noise: Noise = field(default_factory=Noise)


@pytest.mark.parametrize(
    ("name", "value", "names"),
    [("clip_each", 0.5, ("problem.clip_each", "default", 0.5)), ("noise", Noise(2.0), ("problem.noise.scale", 2.0))],
)
def test_field_that_a_class_adds_to_problem_is_part_of_a_runs_identity(tmp_path, name, value, names):
    def train(rounds, resume=False, **fields):
        made = Private(nn.Linear(toys.FEATURES, toys.CLASSES), toys.sites(2), **fields)
        return fm.train(made, fm.Ring(), fm.algorithms.DSGD(0.1), rounds, out=tmp_path, resume=resume, trace="no")

    torch.manual_seed(0)
    train(1, **{name: value})
    torch.manual_seed(0)
    with refused(*names, error=fm.errors.CheckpointError):
        train(2, resume=True)
    torch.manual_seed(0)
    assert train(2, resume=True, **{name: value}).rounds == 2


@dataclass(frozen=True, eq=False)
class Named(fm.Problem):
    kind: str = "mine"  # as fields of a prepared problem are called
    initial: float = 0.5
    made: int = field(init=False, default=3)


def test_a_class_of_problems_names_its_fields_freely():
    made = Named(nn.Linear(toys.FEATURES, toys.CLASSES), toys.sites(2), kind="another").prepared
    settings = made.changed(clip_norm=1.0).settings()
    assert (settings["kind"], settings["initial"], settings["clip_norm"]) == ("another", 0.5, 1.0)
    assert "another" in str(made.identity())


def test_identity_of_a_problem_holds_every_setting_that_differs_from_its_default():
    plain = toys.problem(2)
    objective = fm.Objective(judged_on="held-out")
    found = toys.problem(
        2, sampling=fm.Sampling(batch=3), objective=objective, clip_norm=1.0, metrics=["sensitivity"]
    ).identity()
    assert found["sampling"] == {"batch": 3}
    assert found["objective"] == {"judged_on": "held-out"}
    assert found["clip_norm"] == 1.0
    assert "metrics" not in found  # those of fairmesh compute what their names say, and change no model
    assert not set(plain.identity()) & {"objective", "clip_norm", "metrics", "loss", "trainer"}


def test_fields_that_are_no_part_of_an_identity_exist():
    kinds = (fm.Problem, fm.Objective, fm.trainers.LocalTrainer, BoundModelLoss, PackedLoss)
    assert {kind.__name__ for kind in kinds} == set(NOT_PART)
    for kind in kinds:
        assert set(NOT_PART[kind.__name__]) <= {one.name for one in fields(kind)}
    assert set(options._NOT_PART) <= {one.name for one in fields(fm.Options)}


FILES = {
    "x.toml": """
rounds = 2
data = { name = "digits", nodes = 3 }
topology = { name = "import", path = "own.py:Graph" }
algorithm = { name = "import", path = "own.py:Mine", primal_step = 0.1 }
model = { name = "import", path = "own.py:Net" }
loss = "own.py:loss"
augment = "own.py:same"
""",
    "own.py": """
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.nn import functional as F

import fairmesh as fm
from neighbour import Base


class Net(Base):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)


def loss(outputs, targets, table=Path(__file__).parent / "table.csv"):
    return F.cross_entropy(outputs, targets)


def same(inputs, kind=Net):
    return inputs


@dataclass(frozen=True)
class Mine(fm.algorithms.DSGD):
    pass


@dataclass(frozen=True)
class Graph(fm.Ring):
    pass
""",
    "neighbour.py": """
from torch import nn


class Base(nn.Module):
    def forward(self, x):
        return self.layer(x.flatten(1))
""",
}


def _in(folder: Path) -> fm.Experiment:
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return fm.load_experiment(folder / "x.toml")


def test_run_with_files_of_its_own_goes_on_in_a_moved_folder(tmp_path):
    fm.run(_in(tmp_path / "here"), out=tmp_path / "here" / "run")
    shutil.move(tmp_path / "here", tmp_path / "there")
    moved = fm.load_experiment(tmp_path / "there" / "x.toml", ["rounds=3"])
    assert fm.run(moved, out=tmp_path / "there" / "run", resume=True).rounds == 3


@pytest.mark.parametrize(
    ("file", "before", "after"), [("own.py", "F.cross", "2 * F.cross"), ("neighbour.py", "(1)", "(-2)")]
)
def test_digest_depends_on_what_is_in_the_files_and_not_on_where_they_are(tmp_path, monkeypatch, file, before, after):
    here, there = _in(tmp_path / "here").problem().digest(), _in(tmp_path / "there").problem().digest()
    assert here == there
    monkeypatch.setitem(FILES, file, FILES[file].replace(before, after))
    monkeypatch.delitem(sys.modules, "neighbour")  # of this name there is one in a process
    assert _in(tmp_path / "changed").problem().digest() != here
