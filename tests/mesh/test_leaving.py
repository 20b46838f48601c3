"""A site that is gone for good: the others vote, go back to one round, and go on without it as a simulation would."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fairmesh as fm
from fairmesh.algorithms.base import Round
from fairmesh.experiment import load_experiment
from fairmesh.mesh.enrol.roster import Member, Mesh
from fairmesh.mesh.node import ledger, states
from fairmesh.mesh.wire.transport import MeshProcess
from fairmesh.networks.remote import RemoteNetwork
from fairmesh.networks.transport import Transport
from fairmesh.problems.oracle import Oracle
from fairmesh.storage.state_tree import flatten_state, unflatten_state
from tests import toys
from tests.mesh import fleet
from tests.mesh.experiments import BY_CLASS, STEADY_AD_GDA, experiment
from tests.mesh.scenarios import CIRCULANT, Run, play

NAMES = ["a", "b", "c", "d", "e", "f"]
GONE, DEAD, DIES_AT = 5, "f", 40  # it alone holds the highest class, so the model has outputs that only it needs
CRASHES = {"b": "committed", "c": "followed", "d": "saved without", "e": "begun"}
EXPERIMENT = experiment(
    70,
    6,
    STEADY_AD_GDA | {"dual_compressor": {"name": "threshold", "level": 1e-3}},
    CIRCULANT,
    BY_CLASS,
    options={"measure_every": 20, "checkpoint_every": 15, "dtype": "float64"},
)


def one_dies_and_the_others_while_they_leave_it(run: Run) -> None:
    """One dies for good in the midst of a round; the others remove it; all but a are killed while they do, each at
    another point, and restarted."""

    def dies(where: str, at: int | None = None):
        def observe(point: str, step: int) -> None:
            if point == where and at in (None, step):
                os.kill(os.getpid(), signal.SIGKILL)

        return observe

    run.start("a")
    run.start(DEAD, observe=dies("sent", DIES_AT))
    for name, point in CRASHES.items():
        run.start(name, observe=dies(point))
    run.dies(DEAD)
    remain = [name for name in NAMES if name != DEAD]
    run.vote(*remain, out=[DEAD])
    for name in CRASHES:
        run.dies(name)
        run.start(name)
    run.end(*remain)


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    folder = tmp_path_factory.mktemp("leaving")
    play(one_dies_and_the_others_while_they_leave_it, folder, NAMES, EXPERIMENT)
    return folder


def _events(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / name / "state" / "log.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_remaining_sites_continue_from_one_round_and_end_alike(left):
    rounds, models, mesh = set(), set(), Mesh.read(left / "mesh" / "mesh.toml")
    for name in NAMES:
        if name == DEAD:
            assert not (left / DEAD / "state" / "result").exists()
            continue
        rounds |= {event["round"] for event in _events(left, name) if event["what"] == "continuing"}
        models.add((left / name / "state" / "result" / "model.safetensors").read_bytes())
        assert ledger.still_in(left / name / "state", mesh).removed == (DEAD,)
        assert [p.name for p in (left / name / "state").glob("generation-*")] == []
    assert len(rounds) == len(models) == 1
    assert rounds <= {DIES_AT - 2, DIES_AT - 1, DIES_AT}
    summary = json.loads((left / "a" / "state" / "result" / "summary.json").read_text())
    assert summary["sites"] == ["a", "b", "c", "d", "e"]
    assert summary["nodes"] == 5
    assert any("agreed" in note for note in summary["notes"])  # so few rounds over what is left of the ring
    model = load_file(left / "a" / "state" / "result" / "model.safetensors")
    assert {len(tensor) for tensor in model.values()} == {6}  # outputs, as before, though five classes remain


@pytest.mark.slow
def test_they_end_where_a_simulation_ends_that_drops_the_node_in_that_round(left):
    (agreed,) = {event["round"] for event in _events(left, "a") if event["what"] == "continuing"}
    experiment = load_experiment(left / "experiment.toml")
    mesh = Mesh.read(left / "mesh" / "mesh.toml")
    state = _simulated(experiment, mesh, None, range(agreed))
    after = mesh.without(DEAD)
    kept = [i for i in range(6) if i != GONE]
    slots = {i: [i, *sorted(mesh.position(other) for other in mesh.neighbours(NAMES[i]))] for i in kept}
    prior = torch.ones(5, dtype=torch.float64) / 5
    mine = [_rows(state, i) for i in kept]
    reduced = [states.without(one, [GONE], slots[i], prior) for i, one in zip(kept, mine)]
    end = _simulated(experiment, after, _stacked(reduced), range(agreed, experiment.rounds))
    average = end.models.mean(dim=-2)[0]
    problem = _problem(experiment, after)
    found = load_file(left / "a" / "state" / "result" / "model.safetensors")
    expected = problem.flat_model.state_dict(average)
    for name, tensor in expected.items():
        assert torch.allclose(found[name].double(), tensor.double(), rtol=0, atol=1e-6), name  # stored as float32
    record = json.loads((left / "a" / "state" / "result" / "metrics.jsonl").read_text().splitlines()[-1])
    assert torch.allclose(
        torch.tensor(record["lambda"], dtype=torch.float64), end.duals.mean(dim=-2)[0], rtol=0, atol=1e-9
    )
    assert float(end.duals.sum(dim=-1).sub(1).abs().max()) < 1e-9


def _problem(experiment, mesh):
    sites = experiment.data.sites()
    return experiment.problem([sites[mesh.position(member.name)] for member in mesh.present], outputs=6)


def _simulated(experiment, mesh, state, rounds):
    """All nodes in one process, each with a copy of every neighbour's."""
    problem, algorithm = _problem(experiment, mesh), experiment.algorithm
    identities = [mesh.position(member.name) for member in mesh.present]
    network = RemoteNetwork(
        states.cycle_of(experiment.topology, mesh), range(problem.n), _Nobody(), dtype=torch.float64,
        identities=identities, secrets=[fleet.secret(member.name) for member in mesh.present], each_copy=True,
    )  # fmt: skip
    oracle = Oracle(problem, network.hosted, network.streams, seeds=[0], dtype=torch.float64)
    state = algorithm.init(oracle, network) if state is None else state
    for t in rounds:
        state = algorithm.step(state, Round(torch.tensor(t), oracle, network))
    return state


class _Nobody(Transport):
    process_group = MeshProcess()

    def exchange(self, round_index, outgoing, expected, read):
        assert not outgoing
        assert not expected
        return dict


def _rows(state, node):
    return unflatten_state(state, {name: tensor[:, node : node + 1] for name, tensor in flatten_state(state).items()})


def _stacked(states):
    """Nodes' states as one, copies padded to the most neighbours a node has."""
    tables = [flatten_state(state) for state in states]
    width = max(table["state.copies.of_neighbours"].shape[-2] for table in tables)
    whole = {}
    for name in tables[0]:
        rows = [table[name] for table in tables]
        if name.endswith(".of_neighbours"):
            rows = [torch.nn.functional.pad(row, (0, 0, 0, width - row.shape[-2])) for row in rows]
        whole[name] = torch.cat(rows, dim=1)
    return unflatten_state(states[0], whole)


@pytest.mark.parametrize(
    "weighting",
    [
        fm.weighting.ProjectedAscent(compressor=fm.compressors.Threshold(1e-3)),
        fm.weighting.ExactMaximum(),
        fm.weighting.ShadowPrice(),
    ],
    ids=str,
)
def test_fields_that_sum_to_zero_are_reset_and_the_rest_of_a_tracked_state_stays(weighting):
    state = _Tracked(weighting).after(None, fm.topologies.Circulant((1, 2)).build(6), range(6), range(8))
    slots, prior = [0, 1, 2, 4, 5], torch.ones(5, dtype=torch.float64) / 5
    mine = _rows(state, 0)
    before, after = flatten_state(mine), flatten_state(states.without(mine, [GONE], slots, prior))
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        shape = list(before[name].shape)
        if name.endswith(".of_neighbours"):
            assert tensor.shape[-2] == shape[-2] - 1, name
        if "dual" in name:
            assert tensor.shape[-1] == shape[-1] - 1 == 5, name
        if "balance" in name:
            assert not tensor.any(), name
        elif "dual" not in name and not name.endswith(".of_neighbours"):
            assert torch.equal(tensor, before[name]), name
    assert {name for name in after if "balance" in name} >= {"state.balances"}
    assert before["state.balances"].any()
    assert before["state.tracker_copies.of_neighbours"].shape[-2] == 5
    if "state.weighting.duals" in after:
        assert float(after["state.weighting.duals"].sum()) == pytest.approx(1)


@pytest.mark.slow
def test_those_who_remain_go_on_with_trackers_and_weights_of_their_own():
    """Balances sum to zero over the five, weights to one, and they agree again."""
    tracked, whole = _Tracked(fm.weighting.ShadowPrice()), fm.topologies.Circulant((1, 2)).build(6)
    state = tracked.after(None, whole, range(6), range(10))
    kept = [0, 1, 2, 3, 4]
    graph = {i: [j for j in range(6) if j != i and whole[0].matrix.toarray()[i, j]] for i in kept}
    prior = torch.ones(5, dtype=torch.float64) / 5
    reduced = _stacked([states.without(_rows(state, i), [GONE], [i, *graph[i]], prior) for i in kept])
    graph[GONE] = [j for j in kept if whole[0].matrix.toarray()[GONE, j]]
    mesh = Mesh("six", tuple(Member(n, f"{n}:1", tuple(NAMES[j] for j in graph[i])) for i, n in enumerate(NAMES)))
    cycle = states.cycle_of(fm.topologies.Circulant((1, 2)), mesh.without(DEAD))
    end = tracked.after(reduced, cycle, kept, range(10, 150))
    assert float(end.balances.sum(dim=-2).abs().max()) < 1e-12
    assert float(end.weighting.balances.sum(dim=-2).abs().max()) < 1e-12
    assert float(end.weighting.weights.mean()) == pytest.approx(1, abs=0.05)
    trackers = end.momenta + end.balances
    assert float(trackers.std(dim=-2).mean()) < float(end.momenta.std(dim=-2).mean())


class _Tracked:
    """A run of Tracked AD-GDA whose nodes keep a copy of each neighbour's."""

    def __init__(self, weighting):
        self.algorithm = fm.TrackedADGDA(0.1, weighting=weighting, compressor=fm.compressors.Quantize(6))
        self.sites = toys.sites(6, sizes=(20,) * 6)

    def after(self, state, cycle, identities, rounds):
        problem = toys.problem(sites=[self.sites[i] for i in identities])
        nodes = range(len(problem.sites))
        network = RemoteNetwork(
            cycle, nodes, _Nobody(), dtype=torch.float64, identities=list(identities), each_copy=True
        )
        oracle = Oracle(problem, network.hosted, network.identities, seeds=[0], dtype=torch.float64)
        state = self.algorithm.init(oracle, network) if state is None else state
        for t in rounds:
            state = self.algorithm.step(state, Round(torch.tensor(t), oracle, network))
        return state
