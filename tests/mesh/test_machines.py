"""Sites on other kinds of machines, and a node that moves to one: all end with the same model."""

import hashlib
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fairmesh as fm
from fairmesh.compression import DecodeError
from fairmesh.mesh.node import machine
from fairmesh.mesh.node.machine import Machines, pinned
from fairmesh.mesh.node.reduction import Branch
from fairmesh.mesh.node.start import START, Start
from fairmesh.training.options import Options
from tests import toys
from tests.mesh import fleet
from tests.mesh.experiments import experiment
from tests.mesh.lives import RESULTS
from tests.mesh.scenarios import Run
from tests.refusals import missing_from, refused

NAMES = ["alpha", "beta", "gamma"]
EXPERIMENT = experiment(300, model={"name": "import", "path": "net.py:Net"}, options={"checkpoint_every": 40})
NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, inputs=64, outputs=10):
        super().__init__()
        self.first, self.last = nn.Linear(64, 32), nn.Linear(32, 10)
        for layer in (self.first, self.last):
            nn.init.orthogonal_(layer.weight)
            nn.init.normal_(layer.bias)
        self.register_buffer("waves", torch.sin(torch.randn(64)), persistent=False)

    def forward(self, inputs):
        return self.last(torch.tanh(self.first(inputs.flatten(1) + 0.01 * self.waves)))
"""
OLD_CPU = {"ATEN_CPU_CAPABILITY": "default"}  # as a machine without AVX2


class Programs(Run):
    """Nodes as programs of their own, since torch reads the kind of CPU when it is imported."""

    def program(self, name: str, threads: int = 1, **environment: str) -> None:
        site = self.folder / name / fleet.SITE
        fleet.settle(site.parent, options={"threads": threads})
        command = [sys.executable, "-m", "fairmesh", "node", str(site)]
        start = lambda: os.execve(sys.executable, command, os.environ | environment)  # noqa: E731
        self.running[name] = fleet.forked(start, self.folder / f"{name}.log")


@pytest.mark.slow
def test_site_without_avx2_takes_part_and_a_node_moves_to_another_machine_during_the_run(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    with Programs(tmp_path, NAMES, EXPERIMENT) as nodes:
        nodes.program("alpha")
        nodes.program("beta", **OLD_CPU)  # from the start
        nodes.program("gamma")
        nodes.until(lambda: nodes.round("gamma") >= 60, 90)
        for settings in ({"threads": 2, **OLD_CPU}, {"threads": 1}):  # there, and back again
            done = nodes.round("gamma")
            nodes.crash("gamma")
            nodes.program("gamma", **settings)
            nodes.until(lambda done=done: nodes.round("gamma") > done + 45, 90)
        states = [tmp_path / name / "state" for name in NAMES]
        assert len({(state / START).read_bytes() for state in states}) == 1
        nodes.end(*NAMES)
    assert len({tuple((state / "result" / file).read_bytes() for file in RESULTS) for state in states}) == 1
    said = [line for line in nodes.every_event("gamma") if line["what"].startswith("this machine differs from before")]
    assert len(said) == 2
    assert missing_from(said[0]["difference"], "DEFAULT now", "threads 1 before, 2 now") == []


# The model to start from


class Wire:
    """The messages of step 0 between two nodes in one process, the first of which is the root."""

    def __init__(self):
        self.sent: dict[tuple[int, int], bytes] = {}

    def at(self, own: int):
        class End:
            first = 0  # nothing was sent before

            def as_sent(_, step, payloads):
                return payloads

            def post(_, step, payloads):
                self.sent |= {(own, other): text for other, text in payloads.items()}

            def take(_, step, positions, read, check=lambda position, found: None):
                found = {p: read(p, self.sent[p, own]) for p in positions if (p, own) in self.sent}
                for position, one in found.items():
                    check(position, one)
                return found

        return End()


def a_model(**changes: float) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model.register_buffer("counts", torch.arange(3))
    model.register_buffer("waves", torch.linspace(0, 1, 5), persistent=False)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, change in changes.items():
        tensors[name.replace("_", ".")].data += change
    return model


def agreed(folder: Path, root: nn.Module, leaf: nn.Module) -> list[nn.Module]:
    wire, starts, seen = Wire(), [], []
    for number, (model, branch) in enumerate([(root, Branch(None, (1,), ((1,),))), (leaf, Branch(0, (), ()))]):
        state = folder / str(number)
        state.mkdir(exist_ok=True)
        starts.append(Start(state, model, f"torch {number}.0", lambda *what: seen.append(what)))
        starts[-1].agree(wire.at(number), branch, [1 - number], [0, 1])  # type: ignore[arg-type]
        assert max(map(len, wire.sent.values())) <= starts[-1].largest()
    assert seen == [(0, "torch 0.0")]  # the leaf sees the root's; the root has not waited for the leaf's here
    return [one.model() for one in starts]


def test_all_start_from_the_first_sites_model_with_its_buffers(tmp_path):
    first, other = agreed(tmp_path, a_model(), a_model(**{"0_weight": 1e-7, "waves": 1e-8}))
    for name, tensor in [*first.named_parameters(), *first.named_buffers()]:
        assert torch.equal(tensor, dict([*other.named_parameters(), *other.named_buffers()])[name])
    assert torch.equal(first[0].weight, a_model()[0].weight)  # type: ignore[index]
    again = agreed(tmp_path, a_model(**{"0_weight": 1e-7}), a_model())  # the root has moved to another machine since
    assert torch.equal(again[1][0].weight, first[0].weight)  # type: ignore[index]


@pytest.mark.parametrize("tensor", ["0_weight", "1_bias", "counts", "waves"])
def test_model_that_is_not_the_experiments_is_refused_with_both_machines(tmp_path, tensor):
    name = tensor.replace("_", ".")
    with refused(name, "There: torch 0.0", "Here: torch 1.0", "versions", error=DecodeError):
        agreed(tmp_path, a_model(), a_model(**{tensor: 1}))
    assert not (tmp_path / "1" / START).exists()


def test_model_of_another_form_or_one_that_cannot_be_read_is_refused(tmp_path):
    with refused("0.weight", "(5, 4)", "(3, 4)", error=DecodeError):
        agreed(tmp_path, nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), nn.Sequential(*a_model().children()))
    start = Start(tmp_path, a_model(), "torch", lambda *what: None)
    with refused("digest", error=DecodeError):
        start._received(0, bytes(400))
    content = b"no model"
    with refused("cannot be read", error=DecodeError):
        start._received(0, hashlib.sha256(content).digest() + bytes(256) + content)


# The machine


A, B = {"torch": "2", "threads": "1"}, {"torch": "2", "threads": "2"}


def test_machine_differs_as_long_as_another_may_have_computed_what_was_sent(tmp_path):
    def started(now, step, generation=1):
        machines = Machines(tmp_path, now)
        found = machines.difference(generation, step)
        machines.begin(generation, step)
        return found

    assert [started(A, 0), started(A, 50)] == [None, None]
    assert started(B, 50) == "threads 1 before, 2 now"
    assert started(B, 50) == "threads 1 before, 2 now"  # A may have sent messages after step 50
    assert started(B, 90) is None
    assert started(B, 40) == "threads 1 before, 2 now"  # a checkpoint was damaged, an older one is used
    assert started(A, 95) == "threads 2 before, 1 now"
    assert started(A, 3, generation=2) is None


def test_node_pins_its_threads_and_settings_and_restores_those_of_the_process():
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic
    with pinned(Options(threads=before[0] + 1)):
        assert torch.get_num_threads() == before[0] + 1
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cudnn.deterministic
        assert not torch.backends.cuda.matmul.allow_tf32
        assert machine.machine(Options())["threads"] == str(before[0] + 1)
    now = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic
    assert now == before


def test_threads_of_a_simulation_are_set_while_it_trains():
    threads = []
    seen = [lambda done, state: threads.append(torch.get_num_threads())]
    fm.train(toys.problem(), fm.Ring(), toys.ALGORITHMS["dsgd"], rounds=1, threads=2, observers=seen)
    assert set(threads) == {2}
    with refused("threads", "0"):
        Options(threads=0)
