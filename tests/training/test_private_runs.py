"""Private runs: their budget, how they are continued, and what several models on the same rows spend together."""

import csv
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fairmesh as fm
from fairmesh.errors import CheckpointError
from fairmesh.networks.remote import RemoteNetwork
from fairmesh.report.sentences import privacy_sentences
from fairmesh.testing.hosts import InProcess, Post, Threads
from fairmesh.testing.hosts import _results as results_of
from fairmesh.training.plan import Plan
from fairmesh.training.private import NOISE, SECRET, on_privacy
from tests.refusals import refused

PRIVACY = fm.Privacy(epsilon=8, delta=1e-3, repeatable=True)
ROUNDS, FEATURES = 6, 4


def sites() -> list[fm.Site]:
    draws = torch.Generator().manual_seed(0)

    def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(count, FEATURES, generator=draws)
        return inputs, (inputs[:, 0] > 0).long()

    return [fm.Site(rows(40), test=rows(30), name=name) for name in ("A", "B", "C")]


def problem(**settings: Any) -> fm.Problem:
    settings = {"privacy": PRIVACY, "sampling": fm.Sampling(batch=8), **settings}
    return fm.Problem(lambda: nn.Linear(FEATURES, 2), settings.pop("sites", None) or sites(), **settings)


def train(made: fm.Problem | None = None, rounds: int = ROUNDS, **settings: Any) -> fm.Result:
    settings = {"measure_every": 1, "checkpoint_every": 2, **settings}
    return fm.train(made or problem(), fm.Ring(), settings.pop("algorithm", None), rounds, **settings)


class Crash(Exception):
    pass


def crash(at: int) -> Any:
    def after_round(round: int, state: Any) -> None:
        if round == at:
            raise Crash

    return after_round


def crashed(folder: Path, at: int = 5, **settings: Any) -> Path:
    """A run that ended after the checkpoint before a round."""
    with pytest.raises(Crash):
        train(problem(**settings), out=folder, observers=[crash(at)])
    return folder


def records_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# Continuing -----------------------------------------------------------------------------------------------------------


def test_resumed_run_ends_bit_identical_also_in_another_place(tmp_path):
    straight = train(out=tmp_path / "straight")
    shutil.move(crashed(tmp_path / "run"), tmp_path / "moved")
    assert (tmp_path / "moved" / SECRET).stat().st_mode & 0o077 == 0  # nobody else reads it
    resumed = train(out=tmp_path / "moved", resume=True)
    assert torch.equal(resumed.row(), straight.row())
    assert resumed.privacy == straight.privacy
    assert records_of(tmp_path / "moved") == records_of(tmp_path / "straight")
    assert not (tmp_path / "moved" / SECRET).exists()  # so that nobody can compute the noise any more


def test_resumed_run_with_a_secret_of_its_own_repeats_the_noise_of_lost_rounds(tmp_path):
    own = dataclasses.replace(PRIVACY, repeatable=False)
    before = records_of(crashed(tmp_path / "run", privacy=own))
    train(problem(privacy=own), out=tmp_path / "run", resume=True)
    assert records_of(tmp_path / "run")[: len(before)] == before
    assert len(before) > 4
    other = train(problem(privacy=own))
    assert other.records[len(before) - 1]["loss"] != before[-1]["loss"]


DAMAGED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "no noise": (lambda folder: (folder / NOISE).unlink(), (NOISE,)),
    "cut noise": (lambda folder: (folder / NOISE).write_text("{"), (NOISE,)),
    "no secret": (lambda folder: (folder / SECRET).unlink(), (SECRET,)),
    "another secret": (lambda folder: (folder / SECRET).write_bytes(bytes(32)), (SECRET,)),
    "noise of another run": (lambda folder: _noise_of_another_run(folder), (NOISE,)),
}


def _noise_of_another_run(folder: Path) -> None:
    table = json.loads((folder / NOISE).read_text())
    table["releases"][0]["noise"] /= 2
    (folder / NOISE).write_text(json.dumps(table))


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.quick_cases("all")
def test_resume_refuses_a_folder_that_does_not_know_what_was_spent(tmp_path, name):
    damage, named = DAMAGED[name]
    damage(crashed(tmp_path / "run"))
    with refused(*named, error=CheckpointError):
        train(out=tmp_path / "run", resume=True)


OTHERS = {
    "clip": ({"privacy": dataclasses.replace(PRIVACY, clip=2.0)}, "privacy"),
    "epsilon": ({"privacy": dataclasses.replace(PRIVACY, epsilon=9.0)}, "privacy"),
    "batch": ({"sampling": fm.Sampling(batch=9)}, "batch"),
    "rows": ({"sites": [dataclasses.replace(s, train=(s.train[0] + 1, s.train[1])) for s in sites()]}, "data"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_resume_refuses_other_settings_and_rows(tmp_path, name):
    settings, named = OTHERS[name]
    crashed(tmp_path / "run")
    with refused(named, error=CheckpointError):
        train(problem(**settings), out=tmp_path / "run", resume=True)


@pytest.mark.parametrize("finished", [True, False])
def test_resume_with_more_rounds_stops_at_the_budget(tmp_path, finished):
    algorithm = fm.algorithms.DSGD(primal_step=STEP)
    if finished:
        train(algorithm=algorithm, out=tmp_path / "run")
    else:
        with pytest.raises(Crash):
            train(algorithm=algorithm, out=tmp_path / "run", observers=[crash(5)])
    longer = train(algorithm=algorithm, rounds=3 * ROUNDS, out=tmp_path / "run", resume=True)
    assert (longer.rounds, longer.privacy["releases"]) == (ROUNDS, ROUNDS)
    assert "budget" in str(longer.stop_reason)
    assert longer.privacy["epsilon"] <= 8


def test_folder_of_a_private_run_is_taken_over_by_no_other(tmp_path):
    train(out=tmp_path / "run")
    with refused(str(tmp_path / "run")):
        train(out=tmp_path / "run")


# Several models on the same rows --------------------------------------------------------------------------------------


def test_several_models_spend_more_together_than_each(tmp_path):
    alone, several = train(), train(seeds=(0, 1, 2), out=tmp_path / "run")
    assert "together" not in alone.privacy
    assert several.privacy["epsilon"] == alone.privacy["epsilon"] <= 8
    assert 1.3 * alone.privacy["epsilon"] < several.privacy["together"] < 3.01 * alone.privacy["epsilon"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["privacy"]["models"] == 3
    for many in (train(seeds=(0, 1, 2)), train([problem(), problem(), problem()])):  # splits may share units
        assert many.privacy["together"] == pytest.approx(several.privacy["together"])
    said = " ".join(privacy_sentences(several.privacy))
    assert "each of 3 models" in said
    assert f"epsilon = {several.privacy['together']:.3g}" in said
    assert "do not publish" in said  # since this noise is drawn from the seed
    private = Plan.of(problem(), rounds=ROUNDS).private
    assert private is not None
    assert "together" not in on_privacy(private, [0])
    assert f"3 models; together they spend up to epsilon = {several.privacy['together']:.3g}" in on_privacy(
        private, [0, 0, 0]
    )


def test_replicas_of_a_private_run_have_noise_of_their_own():
    result = train(seeds=(0, 1))
    assert not torch.equal(result.row()[0], result.row()[1])


# Algorithms, processes, and how they are told -------------------------------------------------------------------------

STEP = 0.1
ALGORITHMS: dict[str, tuple[fm.algorithms.Algorithm, int]] = {  # and the releases of a round
    "ad-gda": (fm.ADGDA(primal_step=STEP, dual_step=0.1), 1),
    "choco-sgd": (fm.ChocoSGD(primal_step=STEP), 1),
    "choco-sgd, 2 local steps": (fm.ChocoSGD(primal_step=STEP, local_steps=2), 2),
    "tracked-ad-gda": (fm.TrackedADGDA(), 1),
    "dsgd": (fm.algorithms.DSGD(primal_step=STEP), 1),
    "dr-dsgd": (fm.algorithms.DRDSGD(primal_step=STEP, temperature=5.0), 1),
    "fedavg": (fm.algorithms.FedAvg(primal_step=STEP, local_steps=2), 2),
    "afl": (fm.algorithms.AFL(primal_step=STEP), 1),
    "drfa": (fm.algorithms.DRFA(primal_step=STEP, local_steps=2), 3),
    "q-ffl": (fm.algorithms.QFFL(primal_step=STEP, local_steps=2), 2),
    "local": (fm.algorithms.Local(primal_step=STEP), 1),
    "pooled": (fm.algorithms.Pooled(primal_step=STEP), 1),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_evaluation_of_an_algorithm_is_a_release_that_is_counted(name, monkeypatch):
    algorithm, releases = ALGORITHMS[name]
    counted = []
    from fairmesh.problems.private_oracle import _Mechanism

    noised = _Mechanism.noised

    def noting(mechanism: Any, *arguments: Any) -> Any:
        counted.append(1)
        return noised(mechanism, *arguments)

    monkeypatch.setattr(_Mechanism, "noised", noting)
    result = train(algorithm=algorithm)
    assert len(counted) == result.privacy["releases"] == ROUNDS * releases
    assert result.privacy["epsilon"] <= 8


def test_algorithm_that_evaluates_more_than_it_says_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Twice(fm.algorithms.DSGD):
        call: int = 0

        def step(self, state: Any, ctx: Any) -> Any:
            ctx.losses_and_gradients(state.models, self.call)
            return super().step(state, ctx)

    for call, named in ((0, "twice"), (1, "oracle_calls()")):
        with refused(named):
            train(algorithm=Twice(primal_step=STEP, call=call))


def test_algorithm_without_losses_spends_nothing_on_them():
    fixed = train(algorithm=fm.algorithms.DSGD(primal_step=STEP))
    assert (fixed.privacy["loss_share"], train().privacy["loss_share"]) == (0.0, PRIVACY.loss_share)


class EqualShares(Threads):
    """Threads that train as the ranks of a cluster do."""

    def nodes(self, n: int) -> range:
        each = 4 // self.world_size
        return range(each * self.rank, each * self.rank + each)

    def network(self, cycle: Any, *, device: Any, dtype: Any, count_bytes: bool) -> RemoteNetwork:
        transport = InProcess(self.post, self.rank)
        transport.process_group = self
        return RemoteNetwork(cycle, self.nodes(4), transport, device=device, dtype=dtype)


@pytest.mark.parametrize("hosts", [2, 4])
def test_private_run_in_double_precision_is_the_same_on_several_hosts(hosts):
    four = [*sites(), sites()[1]]
    alone, post = train(problem(sites=four), dtype="float64"), Post(hosts)

    def host(rank: int) -> fm.Result:
        with post.arrived:  # one computes at a time
            return train(problem(sites=four), dtype="float64", process_group=EqualShares(post, rank))

    for result in results_of(host, hosts):
        assert result.privacy == alone.privacy
        assert torch.allclose(result.row(), alone.row(), atol=1e-10)  # the same noise at every node


def test_csv_has_epsilon_and_records_have_one_number_that_rises(tmp_path):
    result = train(observers=[fm.observers.CsvWriter(str(tmp_path / "rows.csv"))])
    with open(tmp_path / "rows.csv", newline="") as file:
        column = [float(row["epsilon"]) for row in csv.DictReader(file)]
    assert column == [record["epsilon"] for record in result.records] == sorted(set(column))
    assert column[0] == 0
    assert column[-1] == pytest.approx(result.privacy["epsilon"])
    assert "epsilon" not in result.problem.metrics
