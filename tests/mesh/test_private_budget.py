"""What a private site may still release after other runs on the same rows, and what it tells and refuses."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fairmesh as fm
from fairmesh.experiment import experiment_from
from fairmesh.mesh.enrol.agreement import refuse_undeployable
from fairmesh.mesh.node.membership import facts, misfit
from fairmesh.mesh.node.private_site import PrivateSite
from fairmesh.privacy.accounting import Releases, epsilon_of, static_shape
from fairmesh.problems.private_run import PrivateRun
from fairmesh.problems.problem import prepare
from tests.refusals import refused

PRIVACY, UNITS, BATCH, ROUNDS = fm.Privacy(epsilon=4, delta=1e-4), 300, 40, 20
USUAL = Releases(UNITS, BATCH / UNITS, static_shape(UNITS, BATCH), 1.0, ROUNDS)


@dataclass
class _Plan:
    private: PrivateRun
    rounds: int = ROUNDS


def _site(folder: Path, run: str, ledger: str = "shared.jsonl", privacy: fm.Privacy = PRIVACY) -> PrivateSite:
    """Returns the privacy of a node that is started, and has begun its run from then on."""
    membership = SimpleNamespace(
        site=SimpleNamespace(state=folder / run, ledger_path=folder / ledger),
        manifest=SimpleNamespace(digest=lambda: run, files={}),
        experiment=SimpleNamespace(privacy=privacy),
    )
    made = PrivateSite(membership, lambda *args, **kwargs: None)
    journal = folder / run / "generation-1" / "journal"
    journal.parent.mkdir(parents=True, exist_ok=True)
    journal.touch()
    return made


def _entered(folder: Path, run: str, unit: str = "row") -> PrivateSite:
    return _enters(_site(folder, run), 1, 0, unit=unit)


def _enters(
    private: PrivateSite, generation: int, start: int, restored: bool = False, unit: str = "row"
) -> PrivateSite:
    mesh = SimpleNamespace(generation=generation, members=["a", "b"])
    plan = _Plan(PrivateRun(PRIVACY, (USUAL,), 1, ROUNDS, 1.0, 0.1, unit))
    private.entered(plan, SimpleNamespace(number=0, secret=b"s" * 32, mesh=mesh), start, restored)
    return private


@contextmanager
def _without_state(folder: Path, run: str, ledger: bytes) -> Iterator[PrivateSite]:
    """A node whose state folder is lost, and whose ledger is this one."""
    shutil.rmtree(folder / run)
    (folder / "shared.jsonl").write_bytes(ledger)
    private = _site(folder, run)
    yield private
    private.close()


def _released(private: PrivateSite, rounds: range) -> int:
    """Returns in how many of these rounds the site may use its rows, at a model of its own in each run."""
    nonces = torch.tensor([[0, 1, len(private._run)]])
    return sum(private._charge(done, 0, nonces)[0] for done in rounds)


def test_interrupted_run_that_goes_on_after_another_one_stays_in_the_budget(tmp_path):
    first = _entered(tmp_path, "first")
    assert _released(first, range(2)) == 2
    first.close()
    second = _entered(tmp_path, "second")
    assert _released(second, range(ROUNDS)) == ROUNDS
    second.close()
    again = _entered(tmp_path, "first")
    assert _released(again, range(2)) == 2, "what a restart repeats is no release"
    assert _released(again, range(2, ROUNDS)) < 3
    assert epsilon_of(again.ledger.spent(), PRIVACY.delta) <= PRIVACY.epsilon
    again.close()


def test_undisturbed_run_makes_all_releases_of_its_plan(tmp_path):
    only = _entered(tmp_path, "only")
    assert _released(only, range(ROUNDS + 2)) == ROUNDS
    only.close()


def test_another_ledger_is_refused_also_before_the_first_checkpoint(tmp_path):
    _entered(tmp_path, "first").close()
    (tmp_path / "other.jsonl").touch()
    with refused("other.jsonl", "older"):
        _site(tmp_path, "first", ledger="other.jsonl")


def test_restored_site_with_a_ledger_of_before_it_went_back_is_refused(tmp_path):
    """Releases of an earlier generation must not stand in for those of the last one, which the ledger lacks."""
    private = _entered(tmp_path, "run")
    assert _released(private, range(15)) == 15
    older = (tmp_path / "shared.jsonl").read_bytes()
    _enters(private, 2, 5)
    assert _released(private, range(5, 12)) == 7
    private.close()
    newest = (tmp_path / "shared.jsonl").read_bytes()
    with _without_state(tmp_path, "run", older) as lost, refused("shared.jsonl", "12"):
        _enters(lost, 3, 12, restored=True)
    with _without_state(tmp_path, "run", newest) as kept:
        made = kept.ledger.made(1)
        _enters(kept, 3, 12, restored=True)
        assert kept.ledger.made(1) > made, "rounds that the others had not done are assumed"
        assert epsilon_of(kept.ledger.spent(), PRIVACY.delta) < PRIVACY.epsilon


def test_restored_site_with_a_ledger_that_ends_too_early_is_refused(tmp_path):
    private = _entered(tmp_path, "run")
    _released(private, range(4))
    older = (tmp_path / "shared.jsonl").read_bytes()
    _released(private, range(4, 12))
    private.close()
    with _without_state(tmp_path, "run", older) as lost, refused("shared.jsonl", "12"):
        _enters(lost, 2, 12, restored=True)


def test_ledger_of_rows_does_not_count_for_patients(tmp_path):
    _entered(tmp_path, "first").close()
    with refused("shared.jsonl", "per row", "per patient"):
        _entered(tmp_path, "second", unit="patient")


def test_later_run_keeps_the_delta_that_was_promised_for_the_same_rows(tmp_path):
    _entered(tmp_path, "first").close()
    with refused("privacy.delta", "0.003", "shared.jsonl", "0.0001"):
        _site(tmp_path, "second", privacy=fm.Privacy(epsilon=4, delta=3e-3))
    _site(tmp_path, "second", privacy=fm.Privacy(epsilon=8, delta=1e-5)).close()
    _site(tmp_path, "first").close()


def test_run_that_was_made_is_not_made_again_with_an_empty_state_folder(tmp_path):
    first = _entered(tmp_path, "first")
    assert _released(first, range(ROUNDS)) == ROUNDS
    first.close()
    with (
        _without_state(tmp_path, "first", (tmp_path / "shared.jsonl").read_bytes()) as again,
        refused("shared.jsonl", "already", "new mesh"),
    ):
        _enters(again, 1, 0)


def test_sites_that_protect_other_units_are_named():
    said = [{"inputs": 1, "targets": 1, "samples": 200, "unit": unit} for unit in ("patient", "patient", "row")]
    known = dict(zip("abc", said))
    experiment = fm.Experiment(fm.data.Digits(), privacy=PRIVACY)
    found = misfit(known, experiment)
    assert found.sites == ["c"]
    assert all(part in found.reason for part in ("patient", '"row" at c', "[contract]"))
    assert misfit(known, fm.Experiment(fm.data.Digits())).sites == ()


def test_images_whose_form_single_ones_decide_are_refused():
    data = fm.data.ImageFolder("scans", classes=("healthy", "ill"))
    with refused("privacy", "channels"):
        fm.Experiment(data=data, privacy=PRIVACY).problem()


def test_of_validation_rows_only_the_number_of_units_is_told():
    rows = {"train": 60, "test": 12, "validation": 30}
    units = {
        "train": range(60),
        "test": [100 + k // 2 for k in range(12)],
        "validation": [200 + k // 3 for k in range(30)],
    }
    sets = {name: fm.data.Samples(torch.randn(count, 3), torch.arange(count) % 2) for name, count in rows.items()}
    site = fm.Site(**sets, units={name: list(numbers) for name, numbers in units.items()})
    (own,) = prepare(fm.Problem(nn.Linear(3, 2), [site], sampling=fm.Sampling(batch=10), privacy=PRIVACY)).sites
    told = facts(own)
    assert (told["samples"], told["test"], told["validation"], told["unit"]) == (60, 6, 10, "unit")


@pytest.mark.parametrize("option", ["choose_weights", "compare_weights"])
def test_models_of_the_sites_own_are_refused_before_data_is_read(option):
    data, privacy = {"name": "digits", "nodes": 3}, {"epsilon": 4.0, "delta": 1e-4}
    asked = experiment_from({"data": data, "privacy": privacy, "options": {option: True}}, None)
    with refused("privacy", option):
        refuse_undeployable(asked)
