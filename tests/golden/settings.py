"""Short float64 loss traces of what a problem, a run or a place of training can add: one trace for each setting, with
Tracked AD-GDA or, where the setting names none, the recipe that `fm.train(problem)` takes."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils import vector_to_parameters
from torch.utils.data import Dataset

import fairmesh as fm
from fairmesh.testing.hosts import on_hosts
from tests import toys
from tests.golden.trace import ROUNDS, Trace
from tests.mesh.fleet import ended, provisioned, start


def trace_of(result: fm.Result) -> Trace:
    """Returns the losses of a run's last replica."""
    last = result.records[-1].get("split")
    records = [record for record in result.records if record.get("split") == last]
    return [(record["round"], record["loss"]["worst"], record["loss"]["mean"]) for record in records]


def trained(problem, algorithm=None, topology=None, dtype="float64", **options) -> fm.Result:
    """Trains and measures after every round."""
    topology = topology or fm.topologies.Circulant((1, 2))
    return fm.train(problem, topology, algorithm, ROUNDS, dtype=dtype, measure_every=1, seeds=[7], **options)


HOSTS, MESH = "two hosts", "mesh of three"
TRACKED = toys.ALGORITHMS["tracked"]


def _normed() -> nn.Module:
    return nn.Sequential(nn.Linear(toys.FEATURES, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, toys.CLASSES))


def _jittered(inputs, draw):
    return inputs + 0.1 * (draw(*inputs.shape) - 0.5)


class _Items(Dataset):
    """A site's rows, one at a time."""

    def __init__(self, samples):
        self.inputs, self.targets = samples

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


def _streamed_sites() -> list[fm.Site]:
    return [fm.Site(fm.data.Streamed(_Items(site.train)), test=site.test) for site in toys.sites()]


def _with_subgroups() -> list[fm.Site]:
    return [
        fm.Site((*site.train, site.train[0][:, 0] > 0), test=(*site.test, site.test[0][:, 0] > 0))
        for site in toys.sites()
    ]


def _validated() -> list[fm.Site]:
    return [fm.Site(site.train, test=site.test, validation=site.test) for site in toys.sites()]


def _two_steps(module, data, ctx):
    """Training code of a user's own: plain steps on the site's rows."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(data.inputs), data.targets).backward()
        optimizer.step()


def on_two_hosts() -> Trace:
    """The losses of the average model after some numbers of rounds, with the nodes spread over two hosts."""
    problem, topology = toys.problem(), fm.topologies.Circulant((1, 2))
    traced = []
    for rounds in (1, 5, ROUNDS):
        run = on_hosts(problem, topology, TRACKED, rounds, [[0, 1, 2, 3, 4], [5, 6, 7]], seeds=(7,))
        average = torch.cat([state.models for state in run.states], dim=-2).mean(dim=(0, 1))
        module = toys.small_model().double()
        vector_to_parameters(average, module.parameters())
        with torch.no_grad():
            losses = [nn.functional.cross_entropy(module(site.train[0]), site.train[1]).item() for site in toys.sites()]
        traced.append((rounds, max(losses), sum(losses) / len(losses)))
    return traced


def mesh_of_three(folder: Path) -> Trace:
    """The losses that three nodes record, each of its own model."""
    (folder / "golden.toml").write_text(_EXPERIMENT)
    names = ["north", "south", "east"]
    provisioned(folder, folder / "golden.toml", names)
    processes = [start(folder, name) for name in names]
    assert [ended(process, 120) for process in processes] == [0, 0, 0]
    lines = (folder / "north" / "state" / "result" / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["models"] == "own"]
    return [(record["round"], record["loss"]["worst"], record["loss"]["mean"]) for record in records]


_EXPERIMENT = """
rounds = 20
topology = "ring"
data = { name = "digits", nodes = 3, split = "instrument", odd = 1 }
options = { dtype = "float64", measure_every = 1 }
"""

SETTINGS: dict[str, Callable[[], fm.Result]] = {
    "default recipe": lambda: trained(toys.problem()),
    "held-out, noise discounted": lambda: trained(
        toys.problem(objective=fm.Objective(judged_on="held-out", discount_noise=True)), TRACKED
    ),
    "held-out, against local": lambda: trained(
        toys.problem(objective=fm.Objective(judged_on="held-out", against="local")), TRACKED
    ),
    "against constant, validation": lambda: trained(
        toys.problem(sites=_validated(), objective=fm.Objective(judged_on="validation", against="constant")), TRACKED
    ),
    "clip and decay": lambda: trained(toys.problem(clip_norm=0.5, weight_decay=0.01), TRACKED),
    "adamw": lambda: trained(toys.problem(), fm.algorithms.DSGD(0.05, optimizer=toys.OPTIMIZERS["adamw, decay"])),
    "nesterov": lambda: trained(toys.problem(), fm.ChocoSGD(0.1, 0.3, optimizer=toys.OPTIMIZERS["nesterov"])),
    "own parts": lambda: trained(toys.problem(parts=fm.Parts(local=("2.*",))), TRACKED),
    "frozen parts": lambda: trained(toys.problem(parts=fm.Parts(frozen=("0.bias",))), TRACKED),
    "batch norm local": lambda: trained(toys.problem(model=_normed, batch_norm="local"), TRACKED),
    "batch norm shared": lambda: trained(toys.problem(model=_normed, batch_norm="shared"), TRACKED),
    "augmentation": lambda: trained(toys.problem(augment=_jittered), TRACKED),
    "streams": lambda: trained(toys.problem(sites=_streamed_sites()), TRACKED),
    "full batches": lambda: trained(toys.problem(sampling=fm.Sampling(order="full")), TRACKED),
    "shuffled batches": lambda: trained(toys.problem(sampling=fm.Sampling(batch=7, order="shuffled")), TRACKED),
    "trainer": lambda: trained(toys.problem(trainer=fm.trainers.LocalTrainer(_two_steps))),
    "subgroups within": lambda: trained(
        toys.problem(sites=_with_subgroups(), objective=fm.Objective(subgroups="within")), TRACKED
    ),
    "subgroups across": lambda: trained(
        toys.problem(sites=_with_subgroups(), objective=fm.Objective(subgroups="across")),
        toys.ALGORITHMS["tracked local"],
    ),
    "changing graphs": lambda: trained(toys.problem(), TRACKED, toys.TOPOLOGIES["changing"]),
    "splits": lambda: trained([toys.problem(sites=toys.sites(seed=seed)) for seed in (0, 1)], TRACKED),
    "clipped gossip": lambda: trained(toys.problem(), TRACKED, fm.topologies.Complete(), lying_neighbours=1),
}
