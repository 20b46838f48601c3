"""Members that attack from within, with real nodes over real TLS and with the attacker's real key: the honest nodes
refuse what would break the run, name who sent it to all sites, survive a restart, and go on without it."""

import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fairmesh.compression.codes import Dense, Levels
from fairmesh.experiment import load_experiment
from fairmesh.mesh.announcements import wrong
from fairmesh.mesh.enrol.roster import Mesh
from fairmesh.mesh.fields import Terms
from fairmesh.mesh.node import data_agreement, ledger, reduction
from fairmesh.mesh.node.oversight import Oversight
from fairmesh.mesh.wire.bulletin import Announcement
from fairmesh.mesh.wire.mailroom import Mailroom
from fairmesh.mesh.wire.transport import FIRST_ROUND
from fairmesh.networks import remote
from tests.mesh import fuzz
from tests.mesh.experiments import experiment
from tests.mesh.lives import Lives, fresh
from tests.mesh.scenarios import Run
from tests.refusals import missing_from

ROUNDS, ATTACKED = 30, 10
EXPERIMENT = experiment(ROUNDS, 4, options={"checkpoint_every": 4})
NAMES = ["alpha", "beta", "gamma", "delta"]  # a ring; alpha is the root of the sums, and beta and delta its children
DELTA = 3


@pytest.fixture(scope="module")
def provisioned(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "mesh"
    Run(folder, NAMES, EXPERIMENT)
    load_experiment(folder / "experiment.toml").problem()  # what this imports and reads, forked processes need not
    return folder


@pytest.fixture
def siege(provisioned, tmp_path):
    found = Siege(fresh(provisioned, tmp_path / "mesh"))
    yield found
    found.lives.end()


class Siege:
    """A mesh with one hostile member."""

    def __init__(self, folder: Path):
        self.folder, self.lives = folder, Lives(folder, NAMES)
        self.mesh = Mesh.read(folder / "alpha" / "mesh.toml")

    def begin(self, hostile: str, attack: Callable[[], None]) -> None:
        """Starts all nodes; `attack` changes the program of the hostile one."""
        self.hostile, self.honest = hostile, [name for name in NAMES if name != hostile]
        self.lives.before_start = lambda name: attack() if name == hostile else None
        self.lives.awaited.add(hostile)
        self.lives.start_all()

    def status(self, name: str) -> dict:
        path = self.folder / name / "state" / "status.json"
        return json.loads(path.read_text()) if path.exists() else {"refusing": [], "activity": ""}

    def refusals(self, seen_from: str) -> dict[str, str]:
        """Returns which sites refuse the hostile one, and why, as one site sees it."""
        return {one["by"]: one["reason"] for one in self.status(seen_from)["refusing"] if one["site"] == self.hostile}

    def logged(self, name: str, what: str, site: str) -> list[dict]:
        return [event for event in self.lives.log_of(name) if event["what"] == what and event.get("site") == site]

    def wait(self, until: Callable[[], object], seconds: float = 60) -> None:
        self.lives.wait(lambda: bool(until()), seconds)

    def vote_out_and_finish(self) -> None:
        """The honest sites remove the hostile one, and end with one result."""
        for name in self.honest:
            ledger.wish(self.folder / name / "state", self.mesh, name, [self.hostile])
        self.wait(lambda: all(self.lives.exits.get(name) == 0 for name in self.honest), 90)
        models = {self.result(name) for name in self.honest}
        assert len(models) == 1
        summary = json.loads((self.folder / self.honest[0] / "state" / "result" / "summary.json").read_text())
        assert summary["sites"] == self.honest

    def result(self, name: str) -> bytes:
        return (self.folder / name / "state" / "result" / "model.safetensors").read_bytes()


def sending(change: Callable[[dict], dict]) -> Callable[[], None]:
    """Returns an attack: from one round on, the parts of messages are changed before they are encoded."""

    def attack() -> None:
        honest = remote.encode
        remote.encode = lambda codes, now: honest(change(dict(codes)) if now >= ATTACKED else codes, now)

    return attack


def scaled(norm: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict], dict]:
    def change(codes: dict) -> dict:
        levels: Levels = codes["model"]
        return codes | {"model": levels._replace(norms=norm(levels.norms), levels=levels.levels.clamp(min=1))}

    return change


MESSAGES = {
    "norms of 3.4e38": (scaled(lambda norms: torch.full_like(norms, 3.4e38)), ["model", "norm", "limit"]),
    "numbers that are none": (scaled(lambda norms: torch.full_like(norms, torch.nan)), ["model"]),
    "numbers 100,000 times too large": (scaled(lambda norms: 1e5 * norms + 1e5), ["model", "norm", "limit"]),
    "weights off the simplex": (lambda codes: codes | {"dual": Dense(3 * codes["dual"].values)}, ["dual", "sum to 3"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MESSAGES)
def test_messages_that_would_break_the_run_are_refused_and_their_sender_is_named_and_voted_out(siege, case):
    change, words = MESSAGES[case]
    siege.begin("delta", sending(change))
    siege.wait(lambda: all(set(siege.refusals(name)) == {"alpha", "gamma"} for name in siege.honest))
    for reason in siege.refusals("beta").values():  # which is no neighbour of delta
        assert missing_from(reason, f"step {ATTACKED + FIRST_ROUND}", *words) == []
    siege.wait(lambda: all(one["sent"] for one in siege.status("beta")["refusing"]))  # as delta's own node says
    for name in ("alpha", "gamma"):
        assert siege.logged(name, "refused", "delta")
        assert siege.status(name)["waiting_for"].keys() >= {"delta"}
    killed = time.time()
    siege.lives.kill("alpha")
    siege.wait(lambda: [one for one in siege.status("alpha")["refusing"] if one["since"] > killed])  # it refuses again
    assert not siege.lives.exits
    siege.vote_out_and_finish()


@pytest.mark.slow
def test_member_that_declares_a_billion_classes_is_refused_before_anything_is_allocated(siege):
    def attack() -> None:
        facts = data_agreement.facts
        data_agreement.refuse_many_outputs = lambda said, experiment: None
        data_agreement.facts = lambda site: facts(site) | {"outputs": 10**9}

    siege.begin("delta", attack)
    siege.wait(lambda: all(set(siege.refusals(name)) == {"alpha", "gamma"} for name in siege.honest))
    assert missing_from(siege.refusals("beta")["alpha"], "facts", "delta", f"outputs = {10**9}") == []
    assert not siege.lives.exits.keys() & siege.honest
    siege.vote_out_and_finish()


def babbling(flag: Path) -> Callable[[], None]:
    """Returns an attack: every second some announcements of every kind, signed, as no honest site makes them. Without
    the flag these are such that pass the wall, so that the others take them over; with it, all others as well."""

    def attack() -> None:
        honest, cycles = Oversight._show, []

        def drawn(terms: Terms) -> list[Iterator]:
            every = [one for one in fuzz.bodies(terms, 50) if one[0] != "certificate"]
            random.Random(7).shuffle(every)
            passing = [(kind, body) for kind, body in every if not wrong(kind, body, terms)]
            return [itertools.cycle(passing), itertools.cycle([one for one in every if "nan" not in str(one)])]

        def babble(self) -> None:
            honest(self)
            board = self._bulletin
            cycles[:] = cycles or drawn(board.terms.by("delta"))
            passing, others = cycles
            for kind, body in itertools.islice(others if flag.exists() else passing, 3):
                entry = Announcement("delta", kind, board.next_number(kind), body, b"")
                with board._lock:
                    board._put(board._signed_here(entry), board)
                board.changed()

        encoded = remote.encode
        remote.encode = lambda codes, now: time.sleep(0.7) or encoded(codes, now)  # so that the run lasts
        Oversight._show = babble

    return attack


@pytest.mark.slow
def test_member_that_announces_anything_neither_stops_the_others_nor_their_restarts(siege, tmp_path):
    siege.begin("delta", babbling(tmp_path / "flag"))
    siege.wait(lambda: all(siege.status(name).get("round", 0) >= 4 for name in siege.honest))
    siege.wait(lambda: "delta" in siege.status("alpha")["ignored"])
    for name in ("alpha", "beta"):
        siege.lives.kill(name)
    before = {name: siege.lives.step(name) for name in siege.honest}
    siege.wait(lambda: all(siege.lives.step(name) > before[name] for name in siege.honest))
    (tmp_path / "flag").touch()
    siege.wait(lambda: all(set(siege.refusals(name)) >= {"alpha"} for name in siege.honest))
    siege.lives.kill("gamma")
    siege.wait(lambda: siege.logged("gamma", "refused", "delta"))
    assert not siege.lives.exits.keys() & siege.honest
    siege.vote_out_and_finish()
    for name in siege.honest:
        assert not [event for event in siege.lives.log_of(name) if "failed; the node goes on" in event["what"]]


def forging(step: int, receiver: int, change: Callable[[torch.Tensor], None]) -> Callable[[], None]:
    """Returns an attack: the root changes the total of one sum that it gives to one child."""

    def attack() -> None:
        honest, encoded, totals = Mailroom.post, reduction.encode, {}

        def noting(codes: dict, now: int) -> bytes:
            ((_, code),) = codes.items()
            totals[now] = code.values.clone()
            return encoded(codes, now)

        def post(self, now, payloads):
            if now == step and receiver in payloads:
                change(totals[now][0])
                payloads = payloads | {receiver: encoded({"sums": Dense(totals[now])}, now)}
            honest(self, now, payloads)

        reduction.encode, Mailroom.post = noting, post

    return attack


def _other_model(row: torch.Tensor) -> None:
    row[:100] += 1.0


def _other_accuracy(site: int) -> Callable[[torch.Tensor], None]:
    def change(row: torch.Tensor) -> None:
        row[site] = 0.99  # accuracies come first

    return change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "change", "words"),
    [
        (ROUNDS + FIRST_ROUND, _other_model, ["digest"]),
        (ROUNDS + FIRST_ROUND + 1, _other_accuracy(2), ["digest", "accuracy", "0.99"]),
    ],
    ids=["another model", "another accuracy of gamma"],
)
def test_root_that_gives_a_site_other_sums_than_the_rest_is_found_out_and_voted_out(siege, step, change, words):
    siege.begin("alpha", forging(step, DELTA, change))
    siege.wait(lambda: siege.logged("delta", "results differ", "gamma"))
    found = siege.logged("delta", "results differ", "gamma")[0]
    assert missing_from(found["reason"], *words) == []
    assert (found["sums"], found["kept"]) == ("from alpha", "unconfirmed-1")
    siege.wait(lambda: all(siege.logged(name, "results differ", "delta") for name in ("beta", "gamma")))
    for name in siege.honest:
        assert not (siege.folder / name / "state" / "result").exists()
        assert (siege.folder / name / "state" / "unconfirmed-1" / "model.safetensors").exists()
    siege.lives.kill("delta")
    siege.wait(lambda: len(siege.logged("delta", "results differ", "gamma")) > 1)
    siege.vote_out_and_finish()


@pytest.mark.slow
def test_root_that_forges_what_a_site_said_of_itself_is_refused_by_that_site(siege):
    siege.begin("alpha", forging(ROUNDS + FIRST_ROUND + 1, DELTA, _other_accuracy(DELTA)))
    siege.wait(lambda: all(set(siege.refusals(name)) == {"delta"} for name in siege.honest))
    assert missing_from(siege.refusals("beta")["delta"], "site delta", "0.99") == []
    siege.vote_out_and_finish()
