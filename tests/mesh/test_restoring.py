"""A site that has lost its state gets one from its neighbours, by a vote of all, and the run ends as it should."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load, save

from fairmesh.algorithms.ad_gda import ADGDAState
from fairmesh.algorithms.gossip import PublicCopies
from fairmesh.algorithms.weighting import Prices
from fairmesh.compression import DecodeError
from fairmesh.errors import BadInput
from fairmesh.mesh.node.states import read_shared, restored, shared
from fairmesh.networks.base import Traffic
from fairmesh.networks.roles import Models
from fairmesh.storage.state_tree import flatten_state, unflatten_state
from fairmesh.training.loop import TrainingState
from tests.mesh.experiments import BY_CLASS, STEADY_AD_GDA, experiment
from tests.mesh.scenarios import CIRCULANT, NAMES, OPTIONS, Run, play, waits_at
from tests.refusals import missing_from

ALGORITHMS = {
    name: experiment(48, 5, settings, CIRCULANT, BY_CLASS, options=OPTIONS)
    for name, settings in {
        "ad-gda": STEADY_AD_GDA,
        "tracked-ad-gda": "tracked-ad-gda",
        "dsgd": {"name": "dsgd", "primal_step": 0.5},
    }.items()
}


def _node(number: int, copies: torch.Tensor) -> TrainingState:
    """The state of AD-GDA at one of three nodes that all know each other, after some rounds; slot 0 is its own."""
    slots = [number, *(other for other in range(3) if other != number)]
    kept = copies[slots].reshape(1, 1, 3, -1)
    models, duals = kept[..., 0, :] + 0.01, torch.tensor([[[0.5, 0.3, 0.2]]]) + 0.01 * number
    state = ADGDAState(models, duals, PublicCopies(kept[..., 0, :].clone(), kept), None)
    nothing = torch.zeros(())
    averages = models[:, 0] - 1.0, duals[:, 0] - 0.1
    return TrainingState(state, *averages, Traffic(nothing, nothing, nothing, nothing), None)


def _empty(state: TrainingState) -> TrainingState:
    return unflatten_state(state, {path: torch.zeros_like(tensor) for path, tensor in flatten_state(state).items()})


@pytest.fixture
def mesh():
    copies = torch.arange(12.0).reshape(3, 4)
    nodes = [_node(number, copies) for number in range(3)]
    slot = {0: 2, 1: 2}  # of node 2 at each of the others
    return nodes, {f"node {k}": read_shared(shared(nodes[k], slot[k]), nodes[2]) for k in slot}


def test_restored_site_has_the_public_copies_that_it_had(mesh):
    (_, _, before), told = mesh
    found = restored(_empty(before), told)
    assert torch.equal(found.algorithm.copies.own, before.algorithm.copies.own)
    assert torch.equal(found.algorithm.copies.of_neighbours, before.algorithm.copies.of_neighbours)
    assert torch.equal(found.algorithm.models, before.algorithm.copies.own), "its model is what others know of it"
    torch.testing.assert_close(found.algorithm.duals, torch.tensor([[[0.505, 0.305, 0.205]]]))
    assert torch.equal(found.average_model, found.algorithm.models[:, 0])


class Priced(NamedTuple):
    models: Models
    copies: PublicCopies
    weighting: Prices


def test_restored_site_takes_the_mean_loss_for_its_own(mesh):
    nodes, _ = mesh
    loss, price, weight, mean = (torch.full((1, 1, 1), value) for value in (0.9, 8.0, 1.2, 0.6))
    prices = Prices(loss, price, torch.zeros_like(loss), weight, torch.zeros_like(loss), mean)
    first, second, before = (
        node._replace(algorithm=Priced(node.algorithm.models, node.algorithm.copies, prices)) for node in nodes
    )
    told = {name: read_shared(shared(node, 2), before) for name, node in (("node 0", first), ("node 1", second))}
    found = restored(_empty(before), told).algorithm.weighting
    assert torch.equal(found.losses, mean), "with the loss 0 it would weigh nothing to the end of the run"
    assert torch.equal(found.prices, price)


def test_neighbours_do_not_send_their_models_but_only_their_public_copies(mesh):
    nodes, told = mesh
    sent = torch.cat([tensor.flatten() for tensor in told["node 0"].values()])
    assert not torch.isin(nodes[0].algorithm.models.flatten(), sent).any()


def test_different_copies_of_a_site_are_named(mesh):
    (_, _, before), told = mesh
    name = next(name for name in told["node 1"] if name.startswith("copy of the receiver"))
    told["node 1"][name] = told["node 1"][name] * 1.01
    with pytest.raises(BadInput, match="node 0 and node 1 have different copies"):
        restored(before, told)


def _changed(kind: str, data: bytes) -> bytes:
    tensors = load(data)
    name = next(iter(tensors))
    if kind == "no file":
        return data[:20]
    if kind == "missing":
        del tensors[name]
    if kind == "shape":
        tensors[name] = tensors[name][..., :-1].contiguous()
    if kind == "dtype":
        tensors[name] = tensors[name].double()
    if kind == "nan":
        tensors[name] = tensors[name] * float("nan")
    return save(tensors)


@pytest.mark.parametrize("kind", ["no file", "missing", "shape", "dtype", "nan"])
def test_what_does_not_fit_the_run_is_refused(mesh, kind):
    nodes, _ = mesh
    with pytest.raises(DecodeError):
        read_shared(_changed(kind, shared(nodes[0], 2)), nodes[2])


def _state(run: Run, name: str) -> Path:
    return run.folder / name / "state"


def _stopped_in_the_middle(run: Run, name: str, at: int, *others: str) -> None:
    """A mesh of which one site's node was killed before a step, for which the others wait."""
    flag = run.folder / f"go-{at}"
    run.start(*others, name, observe=waits_at(at, flag))
    run.until(lambda: run.round(name) >= at - 1)
    run.crash(name)
    flag.touch()


def _is_told(run: Run, *parts: str) -> None:
    """Waits until the node of e says that its neighbours say that it has lost its state, and that the rounds of the
    others confirm it. Then it is asked to stop."""
    run.until(lambda: any("older" in said["reason"] for said in run.events("e", "a claim about this site")))
    assert missing_from(run.events("e", "a claim about this site")[-1]["reason"], *parts) == []
    assert not run.events("e", "stopped")
    os.kill(run.running["e"], signal.SIGTERM)
    run.stops("e", "start the node again")


def an_empty_folder(run: Run) -> None:
    """It waits and says what its neighbours say, since only people can help. After all have voted it takes part again,
    here after a round that is otherwise measured."""
    _stopped_in_the_middle(run, "e", 33, "a", "b", "c", "d")
    shutil.rmtree(_state(run, "e"))
    run.start("e")
    _is_told(run, "begins again", "older", "32", "fairmesh mesh restore")
    run.vote(*NAMES, restored=["e"])
    run.start("e")
    run.end(*NAMES)
    (found,) = run.events("e", "this site's state was restored from its neighbours")
    assert found["round"] == 32
    assert (_state(run, "e") / "before-restoring-1" / "decisions.json").exists()
    assert not run.events("a", "stopped")
    _as_good_as_undisturbed(run)


def _as_good_as_undisturbed(run: Run) -> None:
    """The result's worst site is within a few points of that of a run that nobody disturbed."""
    calm = Run(run.folder / "calm", experiment=(run.folder / "experiment.toml").read_text())
    calm.start(*NAMES)
    calm.end(*NAMES)
    here, there = (json.loads((_state(one, "a") / "result" / "summary.json").read_text()) for one in (run, calm))
    assert abs(here["worst"] - there["worst"]) <= 0.06, (here["worst"], there["worst"])


def a_backup_that_is_too_old(run: Run) -> None:
    """Its neighbours no longer have the messages since then."""
    _stopped_in_the_middle(run, "e", 8, "a", "b", "c", "d")
    old = run.folder / "backup"
    shutil.copytree(_state(run, "e"), old)
    run.start("e", observe=waits_at(40, run.folder / "go-40"))
    run.until(lambda: run.round("e") >= 38)
    run.crash("e")
    shutil.rmtree(_state(run, "e"))
    shutil.copytree(old, _state(run, "e"))
    run.start("e")
    _is_told(run, "which it had acknowledged and which is no longer kept here", "older", "fairmesh mesh restore")
    run.vote(*NAMES, restored=["e"])
    run.start("e")
    run.end(*NAMES)


def a_lost_secret(run: Run) -> None:
    """Its state is intact, but it cannot draw what it drew. It is restored as the refusal says, with a new secret."""
    _stopped_in_the_middle(run, "e", 20, "a", "b", "c", "d")
    secret = run.folder / "e" / "e.secret"
    before = secret.read_bytes()
    secret.unlink()
    run.start("e")
    run.ended("e")
    assert missing_from((run.folder / "e.log").read_text(), "e.secret is missing", "fairmesh mesh restore") == []
    run.vote(*NAMES, restored=["e"])
    run.start("e")
    run.end(*NAMES)
    assert secret.read_bytes() != before
    assert not run.events("a", "stopped")


def after_another_has_left(run: Run) -> None:
    """It takes over from the others that a site has left before."""
    _stopped_in_the_middle(run, "d", 12, "a", "b", "c", "e")
    run.vote("a", "b", "c", "e", out=["d"])
    run.until(lambda: run.round("e") >= 16)
    run.crash("e")
    shutil.rmtree(_state(run, "e"))
    run.start("e")
    run.stops("e", "has forgotten what it had agreed to")
    run.vote("a", "b", "c", "e", restored=["e"])
    run.start("e")
    run.end("a", "b", "c", "e")
    decided = json.loads((_state(run, "e") / "decisions.json").read_text())["decisions"]
    assert [(one["sites"], one["restored"]) for one in decided] == [(["d"], []), ([], ["e"])]


def crashes_meanwhile(run: Run) -> None:
    """It dies at each point of the way, and so does a neighbour that sends it its state."""
    _stopped_in_the_middle(run, "e", 30, "a", "b", "c", "d")
    shutil.rmtree(_state(run, "e"))
    run.crash("a")
    run.vote(*NAMES, restored=["e"])
    run.start("a", observe=_dies_at("followed"))
    of_the_neighbour = {"agreed": "begun", "noted": "logged", "saved without": ""}
    for point in ("committed", "followed", "agreed", "noted", "saved without", "begun"):
        run.start("e", observe=_dies_at(point))
        if point in of_the_neighbour:
            run.dies("a")
            run.start("a", observe=_dies_at(of_the_neighbour[point]))
        run.dies("e")
    run.start("e")
    run.end(*NAMES)


def _dies_at(point: str) -> Callable[[str, int], None]:
    def observe(reached: str, step: int) -> None:
        if reached == point:
            os.kill(os.getpid(), 9)

    return observe


SCENARIOS = (an_empty_folder, a_backup_that_is_too_old, a_lost_secret, after_another_has_left, crashes_meanwhile)
RUNS = [(one, "ad-gda") for one in SCENARIOS] + [(an_empty_folder, name) for name in list(ALGORITHMS)[1:]]


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "algorithm"), RUNS)
def test_site_that_has_lost_its_state_takes_part_again(scenario, algorithm, tmp_path):
    play(scenario, tmp_path, experiment=ALGORITHMS[algorithm])
