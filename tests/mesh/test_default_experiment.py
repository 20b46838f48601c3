"""The experiment file of deploy.md between organisations, with nothing named that it does not name: its objective
compares sites with models that they train alone."""

import os
import re
import shutil
import signal
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fairmesh.errors import Interrupted
from fairmesh.mesh.node import rounds
from fairmesh.mesh.node.membership import Membership, common_problem, facts, own_data
from fairmesh.mesh.node.rounds import Rounds, alone_identity, identity_of
from fairmesh.mesh.node.store import Store, landmarks_in
from fairmesh.storage.checkpoint import read_stored, write_stored
from fairmesh.storage.occupied import ALONE
from tests.mesh import fleet
from tests.mesh.scenarios import NAMES, ROOT, Run, play

_PAGE = (ROOT / "docs" / "howto" / "deploy.md").read_text()
RISK = next(block for block in re.findall(r"```toml\n(.*?)```", _PAGE, re.S) if "contract.target" in block)


def _patients(folder: Path, number: int) -> None:
    """Writes a site's table; patients are ill earlier where the number is higher."""
    draws = torch.Generator().manual_seed(number)
    lines = ["age,creatinine,ill"]
    for age, creatinine, chance in torch.rand(80, 3, generator=draws).tolist():
        risk = age + creatinine + 0.1 * number + 0.4 * chance
        lines.append(f"{18 + int(80 * age)},{0.3 + 3 * creatinine:.2f},{'yes' if risk > 1.3 else 'no'}")
    (folder / "patients.csv").write_text("\n".join(lines) + "\n")


NET = """
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(2, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.outer(self.inner(x).relu())
"""


def _with_tables(run: Run) -> None:
    """Sites name tables of their own, as deploy.md says."""
    for number, name in enumerate(run.mesh.names):
        _patients(run.folder / name, number)
        fleet.settle(run.folder / name, data={"name": "table", "file": "patients.csv"})


# Quickly, in one process


class _Watcher:
    """Counts the rounds that a site trains alone, and stops it after some."""

    def __init__(self, stop_after: int | None = None):
        self.rounds, self.said, self._stop_after = [], [], stop_after

    def works_alone(self, what: str, done: int, of: int) -> None:
        self.rounds.append(done)
        if done == self._stop_after:
            raise Interrupted("stopped")

    def log(self, level: str, what: str, **fields) -> None:
        self.said.append(what)

    def metric_failed(self, name: str, error: Exception) -> None:
        raise error


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mesh") / "run"
    _with_tables(Run(folder, NAMES[:3], RISK.replace("rounds = 300", "rounds = 20")))
    membership = Membership.read(folder / "b" / "site.toml").with_secret()
    (own,) = own_data(membership).sites
    return membership, own


def _problem(membership: Membership, own):
    return common_problem(membership, own, {member.name: facts(own) for member in membership.mesh.present})


def _begun(membership: Membership, own, watcher: _Watcher | None = None) -> tuple[Rounds, _Watcher]:
    watcher, store = watcher or _Watcher(), Store(membership.site.state, 1, lambda *said, **fields: None)
    node: Any = SimpleNamespace(membership=membership, oversight=watcher, log=watcher.log, private=None)
    mailroom: Any = None
    return Rounds(node, _problem(membership, own), mailroom, store), watcher


def test_checkpoint_that_a_vote_writes_has_the_identity_with_which_it_is_read(site):
    membership, own = site
    found, _ = _begun(membership, own)
    assert found.problem.objective.local_losses
    assert identity_of(membership, found.problem) == identity_of(membership, _problem(membership, own))


def test_reference_losses_are_found_once_and_outlive_a_site_that_leaves(site):
    membership, own = site
    _forget(membership)
    first, trained = _begun(membership, own)
    again, not_trained = _begun(membership, own)
    assert (trained.rounds, not_trained.rounds) == ([*range(21)], [])
    assert again.problem.objective == first.problem.objective
    later = replace(membership, mesh=membership.mesh.without("a"))
    after, not_trained = _begun(later, own)
    assert not_trained.rounds == []
    assert after.problem.objective == first.problem.objective


def test_site_that_was_stopped_while_it_trained_alone_continues_there(site):
    membership, own = site
    _forget(membership)
    whole, _ = _begun(membership, own)
    _forget(membership)
    with pytest.raises(Interrupted):
        _begun(membership, own, _Watcher(stop_after=13))
    continued, watcher = _begun(membership, own)
    assert watcher.rounds == [*range(13, 21)]
    assert continued.problem.objective == whole.problem.objective


def _forget(membership: Membership) -> None:
    shutil.rmtree(membership.site.state / ALONE, ignore_errors=True)


@pytest.mark.parametrize("what", ["empty", "cut short", "changed", "of another run"])
def test_reference_losses_that_are_damaged_or_of_another_run_are_found_again(site, what):
    membership, own = site
    _forget(membership)
    before, _ = _begun(membership, own)
    file = membership.site.state / ALONE / "reference-losses.safetensors"
    written = file.read_bytes()
    if what == "of another run":
        stored = read_stored(file, alone_identity(_problem(membership, own), membership))
        write_stored(file, stored.tensors, 0, {"site": "another"})
    else:
        file.write_bytes({"empty": b"", "cut short": written[:-5], "changed": written[:-1] + b"!"}[what])
    after, watcher = _begun(membership, own)
    assert watcher.rounds == [*range(21)]
    assert any("trained again" in said for said in watcher.said)
    assert after.problem.objective == before.problem.objective
    assert _begun(membership, own)[1].rounds == []


def test_state_before_the_first_round_is_known_without_training(site, monkeypatch):
    membership, own = site

    def trains(*arguments, **more):
        raise AssertionError("it trains a model")

    monkeypatch.setattr(rounds, "with_references", trains)
    assert rounds.untrained(membership, _problem(membership, own)).average_model.isfinite().all()


# Real nodes


def _paused_at(folder: Path, *steps: int):
    """A node that pauses before some steps until a file for each exists."""

    def observe(point: str, at: int) -> None:
        while point == "computed" and at in steps and not (folder / f"go-{at}").exists():
            time.sleep(0.02)

    return observe


def three_votes(run: Run) -> None:
    """The first site is removed, the last one restored, and then all go back to a round."""
    _with_tables(run)
    first, *others = NAMES
    last, paused = others[-1], _paused_at(run.folder, 60, 120, 200)

    def until_round(done: int) -> None:
        run.until(lambda: all(run.round(name) >= done - 2 for name in others), 120)

    def continues(times: int) -> None:
        # Else some sites would go on, and drop the checkpoint that they should go back to, before all votes are known.
        run.until(lambda: all(len(run.events(name, "vote")) >= len(others) * times for name in others[:-1]), 60)
        (run.folder / f"go-{(60, 120, 200)[times - 1]}").touch()
        run.until(lambda: all(len(run.events(name, "continuing")) == times for name in others[:-1]), 60)
        assert not [one for name in others[:-1] for one in run.events(name, "stopped")]

    run.start(*NAMES, observe=paused)
    until_round(60)
    run.crash(first)
    run.vote(*others, out=[first])
    continues(1)
    until_round(120)
    run.crash(last)
    shutil.rmtree(run.folder / last / "state")
    run.start(last, observe=paused)
    run.stops(last, "fairmesh mesh restore")
    run.vote(*others, restored=[last])
    run.start(last, observe=paused)
    continues(2)
    until_round(200)
    back_to = landmarks_in(run.folder / "c" / "state", 3)[-1]
    run.vote(*others, back_to=back_to)
    continues(3)
    run.end(*others)
    for name in others[:-1]:
        begun = [one for one in run.events(name, "finding reference losses") if "rounds" in one]
        assert len(begun) == 1, "a site's own data has not changed, so its model alone has not either"
        assert run.events(name, "continuing")[-1]["round"] == back_to
        assert not (run.folder / name / "state" / ALONE).exists()


def a_stop_while_it_trains_alone(run: Run) -> None:
    """The node shows how far it is, obeys at once, and keeps what is done."""
    _with_tables(run)
    (port,) = fleet.free_ports(1)
    run.start("a", monitor_port=port)
    run.start("b", "c")
    run.until(lambda: (run.status("a").get("phase") or {"done": 0})["done"] > 10)
    status = run.status("a")
    assert status["phase"]["what"] == "finding reference losses"
    assert status["phase"]["of"] == 500_000
    assert re.fullmatch(r"finding reference losses: [\d,]+ of [\d,]+ rounds", status["activity"])
    run.until(lambda: "finding reference" in run.status("b").get("sites", {}).get("a", {}).get("activity", ""))
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    (share,) = re.findall(r'^fairmesh_phase\{phase="finding reference losses"\} (\S+)$', page, re.M)
    assert 0 < float(share) < 1
    began = time.monotonic()
    os.kill(run.running["a"], signal.SIGTERM)
    run.stops("a", "start the node again")
    assert time.monotonic() - began < 2
    (stopped,) = run.events("a", "interrupted; it continues there when it is needed again")
    assert (run.folder / "a" / "state" / ALONE / "reference-losses-begun.safetensors").exists()
    run.start("a")
    run.until(lambda: (run.status("a").get("phase") or {"done": 0})["done"] > stopped["done"])
    assert run.events("a", "finding reference losses")[-1]["continued_at"] == stopped["done"]
    run.crash("a")
    run.vote("b", "c", out=["a"])
    run.until(lambda: run.events("b", "continuing") and run.events("c", "continuing"), 20)


def a_moved_folder(run: Run) -> None:
    """All sites restore their folders somewhere else, as from a backup, and go on."""
    _with_tables(run)
    names = run.mesh.names
    run.start(*names, observe=_paused_at(run.folder, 40))
    run.until(lambda: all(run.round(name) >= 38 for name in names))
    for name in names:
        run.crash(name)
    elsewhere = run.folder.with_name("another place")
    shutil.move(run.folder, elsewhere)
    run.folder = elsewhere
    run.start(*names)
    run.end(*names)
    for name in names:
        assert len([one for one in run.events(name, "finding reference losses") if "rounds" in one]) == 1
        assert not run.events(name, "stopped")


SCENARIOS = {
    a_moved_folder: (NAMES[:3], RISK + '[model]\nname = "import"\npath = "net.py:Net"\n'),
    three_votes: (NAMES, RISK),
    a_stop_while_it_trains_alone: (NAMES[:3], RISK.replace("rounds = 300", "rounds = 500000")),
}


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_nodes_with_the_default_experiment(scenario, tmp_path):
    play(scenario, tmp_path / "run", *SCENARIOS[scenario], files={"net.py": NET})
