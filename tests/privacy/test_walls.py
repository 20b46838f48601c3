"""Training rows of a private run are reachable only through the mechanism: what else reads them is refused."""

import dataclasses
import inspect
import itertools
import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import fairmesh as fm
from fairmesh.data.samples import Samples
from fairmesh.data.sealed import SealedRows, noun_of
from fairmesh.mesh.node.membership import facts
from fairmesh.problems.problem import prepare
from fairmesh.report.runs import Run, ranked
from fairmesh.report.text import run_in_words
from fairmesh.report.writing import write_report
from fairmesh.training.plan import Plan
from tests.refusals import refused

PRIVACY = fm.Privacy(epsilon=8, delta=1e-3)
FEATURES, PATIENTS, VISITS = 4, 24, 2


def site(number: int = 0, patients: int = PATIENTS, of_patients: bool = True, **more: Any) -> fm.Site:
    """A site with visits of patients, and test rows of others."""
    draws = torch.Generator().manual_seed(number)
    rows = patients * VISITS
    inputs = torch.randn(2 * rows, FEATURES, generator=draws)
    labels = (inputs[:, 0] > 0).long()
    train, test = (inputs[:rows].clone(), labels[:rows].clone()), (inputs[rows:].clone(), labels[rows:].clone())
    names = np.arange(rows) // VISITS
    called = {"train": [f"a{k}" for k in names], "test": [f"b{k}" for k in names]}
    named = {"units": called, "unit": "patient"} if of_patients else {}
    return fm.Site(**{"train": train, "test": test, "name": f"site {number}", **named, **more})


def problem(sites: Any = None, model: Any = None, **settings: Any) -> fm.Problem:
    settings = {"privacy": PRIVACY, "sampling": fm.Sampling(batch=8), **settings}
    made = [site(0), site(1), site(2)] if sites is None else sites
    return fm.Problem(nn.Linear(FEATURES, 2) if model is None else model, made, **settings)


def experiment(tmp_path: Path, **settings: Any) -> fm.Experiment:
    """An experiment on arrays with several rows per patient."""
    inputs, patient = torch.randn(180, FEATURES, generator=torch.Generator().manual_seed(0)), np.arange(180) // 2
    place = np.array(["A", "B", "C"])[patient % 3]
    np.savez(tmp_path / "visits.npz", x=inputs, y=(inputs[:, 0] > 0).long(), site=place, patient=patient)
    target = fm.data.Column("ill", "label", classes=("no", "yes"))
    contract = fm.data.Contract(inputs=fm.data.Arrays((FEATURES,)), target=target)
    data = fm.data.Npz(str(tmp_path / "visits.npz"), unit="patient")
    settings = {"rounds": 4, "contract": contract, "privacy": PRIVACY, "sampling": fm.Sampling(batch=8), **settings}
    return fm.Experiment(data, **settings)


# By construction ------------------------------------------------------------------------------------------------------


def test_sealed_rows_are_opened_by_the_mechanism_alone_in_a_whole_run_with_report(tmp_path, monkeypatch):
    callers, opened = set(), SealedRows.opened

    def noted(rows: SealedRows) -> Samples:
        callers.add(Path(inspect.stack()[1].filename).name)
        return opened(rows)

    monkeypatch.setattr(SealedRows, "opened", noted)
    result = fm.run(experiment(tmp_path), out=tmp_path / "run", announce=lambda line: None)
    list(run_in_words(Run.from_result(result), result, tmp_path / "run"))
    write_report([Run.from_folder(tmp_path / "run")], tmp_path / "run", "a run")
    assert callers == {"private_oracle.py"}


def _tensors(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yields the tensors that an object holds, besides those behind a seal."""
    if id(thing) in seen or isinstance(thing, SealedRows | type | types.ModuleType):
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
        return
    if isinstance(thing, np.ndarray) and thing.dtype != object:
        yield torch.as_tensor(np.zeros(1) if thing.dtype.kind not in "iuf" else thing)
        return
    parts: list[Any] = [*vars(thing).values()] if hasattr(thing, "__dict__") else []
    parts += list(thing.values()) if isinstance(thing, dict) else []
    parts += list(thing) if isinstance(thing, list | tuple | set | frozenset) else []
    for part in parts:
        yield from _tensors(part, seen)


@pytest.mark.parametrize("changed", [False, True], ids=["prepared", "changed"])
def test_prepare_leaves_no_training_row_outside_the_seals(changed):
    sites = [site(0), site(1)]
    made = prepare(problem(sites))
    if changed:
        made = made.changed(sites=sites, objective=fm.Objective())
    rows = torch.cat([part.train[0] for part in sites])
    held = [tensor for tensor in _tensors(made, set()) if tensor.device.type != "meta" and tensor.is_floating_point()]
    assert any(torch.equal(tensor, sites[0].test[0]) for tensor in held)  # the walk finds what is not sealed
    for tensor in held:
        if tensor.ndim == 2 and tensor.shape[1] == FEATURES:
            assert not any(bool((row == rows).all(dim=1).any()) for row in tensor)


def test_prepare_leaves_no_row_of_a_table_in_a_private_run(tmp_path):
    made = table_experiment(tmp_path, closed_contract()).problem()
    tables = [one.table for one in made.sites]
    assert all(table is not None and not table.rows and not table.columns for table in tables)
    assert made.preprocessing is not None
    assert made.preprocessing.classes == ("ill", "well")


READS = {
    "some": lambda rows: rows.some(),
    "known_targets": lambda rows: rows.known_targets(),
    "read": lambda rows: rows.read(torch.arange(2)),
    "take": lambda rows: rows.take(torch.arange(2)),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.quick_cases("all")
def test_samples_that_are_sealed_refuse_to_be_read(name):
    rows = prepare(problem()).sites[0].train
    assert (len(rows), rows.labels, rows.class_counts(2)) == (PATIENTS, None, None)  # patients, not visits
    with refused("sealed", "privacy"):
        READS[name](rows)


def test_training_without_privacy_refuses_rows_that_were_sealed():
    opened = dataclasses.replace(prepare(problem()), privacy=None)
    with refused("sealed"):
        fm.train(opened, rounds=1)


def test_splits_with_other_budgets_are_refused():
    with refused("split 1", "privacy", "epsilon=8"):
        fm.train([problem(), problem(privacy=fm.Privacy(epsilon=8, delta=1e-4))], rounds=1)
    with refused("split 1", "privacy"):
        fm.train([problem(privacy=None), problem()], rounds=1)


# What is refused ------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # by a part of the message: settings of the problem, and of the run
    "judged_on": ({"objective": fm.Objective(judged_on="held-out")}, {}),
    "against": ({"objective": fm.Objective(against="constant")}, {}),
    "validated_decay": ({"objective": fm.Objective(validated_decay=True)}, {}),
    "sampling.order": ({"sampling": fm.Sampling(batch=8, order="cyclic")}, {}),
    "batches_per_step": ({"sampling": fm.Sampling(batch=8, batches_per_step=2)}, {}),
    "trainer": ({"trainer": lambda module, data, ctx: None}, {}),
    "parts": ({"parts": fm.Parts(local=("bias",), step=0.1)}, {}),
    "personalization": ({}, {"personalization": fm.personalization.Mixture()}),
    "compare_weights": ({}, {"compare_weights": True}),
    "choose_weights": ({}, {"choose_weights": True}),
    "keep_best": ({}, {"keep_best": True}),
    "penalties": ({"objective": fm.Objective(penalties={"site 0": 1.0})}, {}),
    "precision": ({}, {"precision": "bf16"}),
    "primal_step": ({}, {"algorithm": fm.algorithms.FedAvg()}),
    "local_steps": ({}, {"algorithm": fm.TrackedADGDA(local_steps=2)}),
    "ascends": ({}, {"algorithm": fm.algorithms.DRFA(primal_step=0.1, ascends="error")}),
    "early stopping": ({}, {"observers": [fm.observers.EarlyStopping(split="test")]}),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.quick_cases("all")
def test_train_refuses_what_reads_rows_in_another_way(name):
    of_problem, of_run = REFUSED[name]
    made = problem([site(k, validation=site(k + 10).test, of_patients=False) for k in range(3)], **of_problem)
    with refused("privacy", name, "docs/concepts/privacy.md"):
        fm.train(made, rounds=2, **of_run)


def test_train_refuses_a_problem_without_test_sets():
    made = problem([site(k, test=None, of_patients=False) for k in range(3)])
    with refused("privacy", "test set"):
        fm.train(made, rounds=2)


def test_problem_refuses_balanced_class_weights_and_batch_statistics():
    with refused("balanced"):
        problem(loss=fm.losses.CrossEntropy(class_weights="balanced"))
    model = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with refused("batch", "convert"):
        Plan.of(problem(model=model, batch_norm="shared"), rounds=2)


def test_comparisons_and_personal_models_of_a_private_run_are_refused():
    made, result = problem(), fm.train(problem(), rounds=2)
    for what in (
        lambda: fm.leave_one_site_out(made, rounds=2),
        lambda: fm.compare_with_references(made, rounds=2),
        lambda: fm.personalize(result),
    ):
        with refused("privacy"):
            what()


# Data -----------------------------------------------------------------------------------------------------------------


def table_experiment(tmp_path: Path, contract: fm.data.Contract | None, **settings: Any) -> fm.Experiment:
    draws, lines = np.random.default_rng(0), ["age,ward,hospital,outcome"]
    for row in range(120):
        ward = ["north", "south"][draws.integers(2)]
        lines.append(f"{draws.integers(20, 90)},{ward},{'AB'[row % 2]},{['ill', 'well'][draws.integers(2)]}")
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    data = fm.data.Table(str(tmp_path / "rows.csv"), "outcome", site="hospital")
    return fm.Experiment(data, rounds=2, contract=contract, privacy=PRIVACY, sampling=fm.Sampling(batch=8), **settings)


def closed_contract(**age: Any) -> fm.data.Contract:
    ward = fm.data.Column("ward", "category", classes=("north", "south"))
    target = fm.data.Column("outcome", "label", classes=("ill", "well"))
    return fm.data.Contract((fm.data.Column("age", **{"center": 50.0, "scale": 20.0, **age}), ward), target)


def test_tables_need_a_contract_that_leaves_nothing_to_the_rows(tmp_path):
    with refused("[contract]", "A"):
        table_experiment(tmp_path, None).problem()
    with refused("[contract]", "A"):
        problem(table_experiment(tmp_path, None).data.sites(), lambda: nn.Linear(4, 2))  # type: ignore[union-attr]
    with refused("[contract]", "standardize"):
        table_experiment(tmp_path, closed_contract(center=0.0, scale=1.0, standardize=True)).problem()
    made = table_experiment(tmp_path, closed_contract())
    closed = {"standardize": False, "missing": "refuse", "categories": {"ward": ("north", "south")}}
    table = dataclasses.replace(made.data, classes=("ill", "well"), **closed)  # type: ignore[type-var]
    with refused("[contract]"):  # since that age is a number is found by its values
        problem(table.sites(), lambda: nn.Linear(4, 2))
    result = fm.run(made)
    assert result.privacy["unit"] == "row"


def test_the_number_of_classes_comes_from_the_labels_of_no_row(tmp_path):
    made = experiment(tmp_path)
    with refused("classes", "[contract]"):
        dataclasses.replace(made, contract=None).problem()
    three = fm.data.Column("ill", "label", classes=("no", "yes", "unknown"))
    contract = fm.data.Contract(inputs=fm.data.Arrays((FEATURES,)), target=three)
    assert dataclasses.replace(made, contract=contract).problem().classes == 3  # though no row is unknown
    assert fm.Experiment(fm.data.Digits(nodes=3), privacy=PRIVACY).problem().classes == 10


@pytest.mark.parametrize("model", [nn.Conv2d(1, 6, 1), nn.Conv2d(1, 1, 1)], ids=["masks", "counts of its own loss"])
def test_the_number_of_outputs_follows_from_no_label(model):
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.poisson_nll_loss(outputs.squeeze(1), targets.float())

    told = []
    for rare in (1, 4):
        x, y = torch.randn(40, 1, 3, 3), torch.zeros(40, 3, 3, dtype=torch.int64)
        y[7, 0, 0] = rare
        one = fm.Site((x, y), test=(torch.randn(8, 1, 3, 3), torch.zeros(8, 3, 3, dtype=torch.int64)))
        own = {} if model.out_channels > 1 else {"loss": loss}
        (sealed,) = prepare(problem([one], model, privacy=_with(loss_clip=3.0), **own)).sites
        told.append(facts(sealed))
    assert told[0] == told[1]
    assert told[0]["outputs"] in (0, model.out_channels)


def test_targets_that_are_no_labels_are_refused_where_the_loss_reads_labels():
    soft = site(0, of_patients=False)
    labels = soft.train[1].float()
    labels[3] = 0.5
    logits = {"model": nn.Sequential(nn.Linear(FEATURES, 1), nn.Flatten(0)), "loss": fm.losses.BinaryCrossEntropy()}
    tested = (soft.test[0], soft.test[1].float())
    with refused("0 or 1", "round"):
        problem([dataclasses.replace(soft, train=(soft.train[0], labels), test=tested)], **logits)
    binary = dataclasses.replace(soft, train=(soft.train[0], soft.train[1].float()), test=tested)
    assert prepare(problem([binary], **logits)).task == "binary"


def test_settings_that_let_single_rows_decide_about_all_are_refused(tmp_path):
    classes, grey = ("healthy", "ill"), {"channels": 1, "size": (4, 4)}
    inputs, target = fm.data.Arrays((4, 4)), fm.data.Column("ill", "label", classes=classes)
    scans = {
        "classes": (fm.data.ImageFolder("scans", **grey), None),
        "channels": (fm.data.ImageFolder("scans", classes=classes), None),
        "channels is": (fm.data.ImageFolder("scans", classes=classes), fm.data.Contract(target=target)),
        "largest": (fm.data.Fewer(fm.data.Corrupted(fm.data.Digits(), how="inputs")), None),
        "labels are drawn": (fm.data.Corrupted(fm.data.ImportedData("patients.py:sites")), None),
        "there is no folder": (fm.data.ImageFolder("scans", classes=classes, **grey), None),
        "no folder scans": (fm.data.ImageFolder("scans", classes=classes), fm.data.Contract(inputs=inputs)),
    }
    for said, (data, contract) in scans.items():
        with refused(said):
            fm.Experiment(data, contract=contract, privacy=PRIVACY).problem()
    corrupted = fm.data.Corrupted(fm.data.Digits(nodes=3))
    assert fm.Experiment(corrupted, privacy=PRIVACY).problem().classes == 10


def test_sites_tell_what_single_rows_have_decided_whoever_makes_them(tmp_path):
    for place, kind in itertools.product("AB", ("healthy", "ill")):
        (tmp_path / place / kind).mkdir(parents=True)
        for k in range(12):
            Image.new("L", (4, 4), 20 * k).save(tmp_path / place / kind / f"{place}{k}.png")
    folder, model = str(tmp_path), nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    named = fm.data.ImageFolder(folder, classes=("healthy", "ill"), channels=1)
    assert prepare(problem(named.sites(), model)).classes == 2
    for data, said in (
        (fm.data.ImageFolder(folder, channels=1), "data.classes"),
        (fm.data.ImageFolder(folder, classes=("healthy", "ill")), "data.channels"),
        (fm.data.Corrupted(named, how="inputs"), "smallest"),
        (fm.data.Fewer(dataclasses.replace(named, unit="^(.[0-9]+)"), train=9), "data.train"),
        (fm.data.Corrupted(dataclasses.replace(named, unit="^(.[0-9]+)")), "place of a row"),
    ):
        with refused(said, "A"):
            problem(data.sites(), model)
    inputs, target = fm.data.Arrays((4, 4)), fm.data.Column("ill", "label", classes=("healthy", "ill"))
    shaped = fm.data.Contract(inputs=inputs, target=target)
    unnamed = fm.data.ImageFolder(folder, classes=("healthy", "ill"))
    assert fm.Experiment(unnamed, contract=shaped, privacy=PRIVACY, sampling=fm.Sampling(batch=8)).problem().n == 2


@pytest.mark.filterwarnings("ignore::fairmesh.data.units.LeftOutWarning")
def test_dates_of_one_unit_do_not_leave_out_rows_of_others(tmp_path):
    made = experiment(tmp_path)
    arrays = dict(np.load(made.data.file))
    np.savez(made.data.file, day=np.arange(180) % 7, **arrays)
    with refused("data.time", "patient", "leave time out"):
        dataclasses.replace(made, data=dataclasses.replace(made.data, time="day")).problem()
    assert made.problem().n == 3


@pytest.mark.parametrize("of", ["train", "test"])
def test_tokens_beyond_a_vocabulary_are_refused_without_a_word_on_the_row(of):
    """Models that are stacked look them up in the table of the next model or unit, whose gradient they would change."""

    def texts(token: int) -> list[fm.Site]:
        tokens = torch.randint(0, 10, (2, 3, 40, 5), generator=torch.Generator().manual_seed(0))
        labels = torch.arange(40) % 2
        tokens[("train", "test").index(of), 0, 7, 2] = token
        return [fm.Site((a, labels), test=(b, labels), name=f"site {k}") for k, (a, b) in enumerate(zip(*tokens))]

    model = nn.Sequential(nn.Embedding(10, 3), nn.Flatten(), nn.Linear(15, 2))
    assert prepare(problem(texts(9), model)).n == 3
    for token in (10, -1):
        with pytest.raises(fm.BadInput, match="vocabulary") as caught:
            problem(texts(token), model)
        assert f"{of} row of site 0" in str(caught.value)
        assert str(token) not in str(caught.value)
    with refused("augment", "whole numbers"):
        fm.train(problem(texts(9), model, augment=lambda inputs, draw: inputs.flip(-1)), rounds=1)


class Coded(nn.Module):
    """A model that looks up a column of a table of floats."""

    def __init__(self):
        super().__init__()
        self.codes, self.layer = nn.Embedding(4, 3), nn.Linear(FEATURES + 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.cat([x[:, 1:], self.codes(x[:, 0].long())], dim=1))


def test_codes_that_a_model_reads_from_floats_are_refused_beyond_its_table():
    def sites(code: float) -> list[fm.Site]:
        inputs = torch.randn(2, 40, FEATURES, generator=torch.Generator().manual_seed(0))
        inputs[:, :, 0] = torch.arange(40) % 4
        inputs[0, 7, 0] = code
        return [fm.Site((part, part[:, 1:2]), test=(part + 0, part[:, 1:2])) for part in inputs]

    privacy = dataclasses.replace(PRIVACY, loss_clip=4.0)
    assert prepare(problem(sites(3.0), Coded(), privacy=privacy)).n == 2
    for code in (4.0, -1.0):
        with refused("train row of node 0", "vocabulary"):
            problem(sites(code), Coded(), privacy=privacy)
    with refused("augment", "whole numbers"):
        augmented = problem(sites(3.0), Coded(), privacy=privacy, augment=lambda inputs, draw: 1.0 * inputs)
        fm.train(augmented, rounds=1)


def test_units_have_a_noun_of_their_own():
    assert [noun_of(name) for name in ("patient_id", "Patient ID", " PatientID ")] == ["patient"] * 3
    assert noun_of("row_id") == "unit"  # else it would be taken for rows without units


def test_report_of_a_private_sweep_shows_the_first_variant_and_ranks_none(tmp_path):
    made = experiment(tmp_path, sweep={"algorithm.primal_step": (0.1, 1.0)}, algorithm=fm.algorithms.DSGD())
    fm.run(made, out=tmp_path / "run")
    run = Run.from_folder(tmp_path / "run")
    variants, ranked_on = ranked(run)
    steps = [variant.summary["variants"][0]["changes"] for variant in variants]
    assert ranked_on == ""
    assert [list(changes.values()) for changes in steps] == [[0.1], [1.0]]
    write_report([run], tmp_path / "run", "a run")
    page = (tmp_path / "run" / "report.html").read_text()
    assert "no private run is chosen by them" in page
    assert "best first" not in page


def test_the_model_of_a_sweep_is_not_chosen_by_rows_that_have_no_noise():
    judged = [dataclasses.replace(site(k, of_patients=False), validation=site(9 + k).test) for k in range(3)]
    algorithms = [fm.algorithms.DSGD(primal_step=step) for step in (0.1, 1.0)]
    for privacy, chosen in ((PRIVACY, [None]), (None, [0, 1])):
        result = fm.train(problem(judged, privacy=privacy), fm.Ring(), algorithms, rounds=2)
        assert result.chosen in chosen


def test_problem_refuses_rows_that_are_both_trained_and_judged_on():
    whole = site(0, of_patients=False)
    with refused("site 0", "test", "fm.data.split"):
        problem([dataclasses.replace(whole, test=(whole.train[0][:10], whole.train[1][:10]))])
    with refused("unit", "fm.data.split"):
        named = {"train": [f"a{k}" for k in range(48)], "test": [f"a{k}" for k in range(48)]}
        problem([site(0, units=named)])


def test_problem_refuses_to_judge_one_site_on_the_training_rows_of_another():
    first, second = site(0, of_patients=False), site(1, of_patients=False)
    with refused("validation", "site 1", "site 0", "fm.data.split"):
        problem([first, dataclasses.replace(second, validation=first.train)])


def test_rows_of_one_array_may_be_divided_between_training_and_testing():
    whole, other, labels = torch.randn(60, FEATURES), torch.randn(60, FEATURES), torch.arange(60) % 2
    apart = fm.Site((whole[::2], labels[::2]), test=(whole[1::2], labels[1::2]))
    after = fm.Site((other[:30], labels[:30]), test=(other[30:], labels[30:]))
    assert problem([apart, after]).n == 2
    with refused("node 0"):
        problem([fm.Site((whole[::2], labels[::2]), test=(whole[20:], labels[20:]))])


def test_problem_refuses_a_site_of_one_unit_and_a_unit_with_most_rows():
    names = {"test": [f"b{k}" for k in range(48)]}
    with refused("site 0", "48", "patient"):
        problem([site(0, units={"train": ["one"] * 48} | names)])
    with refused("site 0", "30", "48", "patient", "not known"):
        problem([site(0, units={"train": ["one"] * 30 + [f"a{k}" for k in range(18)]} | names)])


def test_problem_refuses_streams():
    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 40

        def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
            return torch.full((FEATURES,), float(k)), torch.tensor(k % 2)

    with refused("streamed", "memory"):
        problem([fm.Site(fm.data.Streamed(Rows()), test=site(0).test)])


# Units cannot be told apart -------------------------------------------------------------------------------------------


class Centred(nn.Module):
    """Subtracts the mean of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(dim=0))


def _relative(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = nn.functional.cross_entropy(outputs, targets, reduction="none")
    return (losses / (losses.detach().mean() + 1e-3)).mean() * 2


def test_problem_refuses_models_and_losses_that_mix_samples():
    with refused("other samples", "BatchNorm"):
        problem(model=Centred())
    with refused("mean"):
        problem(loss=_relative)

    def of_batch(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    with refused("one number per sample"):
        problem(loss=fm.losses.ModelLoss(of_batch))

    def of_each(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    assert fm.train(problem(loss=fm.losses.ModelLoss(of_each)), rounds=2).privacy["epsilon"] <= 8


# Numbers --------------------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[Any, tuple[str, ...]]] = {
    "epsilon": (lambda: fm.Privacy(epsilon=0, delta=1e-3), ("epsilon", "(0, 100]")),
    "epsilon that protects nobody": (lambda: fm.Privacy(epsilon=1e9, delta=1e-3), ("epsilon", "(0, 100]")),
    "delta beyond the accountant": (lambda: fm.Privacy(epsilon=1, delta=1e-16), ("delta", "[1e-12, 1)")),
    "epsilon infinite": (lambda: fm.Privacy(epsilon=float("inf"), delta=1e-3), ("epsilon",)),
    "delta": (lambda: fm.Privacy(epsilon=1, delta=1), ("delta", "[1e-12, 1)")),
    "clip": (lambda: fm.Privacy(epsilon=1, delta=1e-3, clip=0), ("clip", "[1e-30, 1e30]")),
    "clip beyond all numbers": (lambda: fm.Privacy(epsilon=1, delta=1e-3, clip=1e300), ("clip", "1e30")),
    "evaluation without noise": (
        lambda: fm.Privacy(epsilon=1, delta=1e-3, evaluation_epsilon=1e9),
        ("evaluation_epsilon", "[0, 100]"),
    ),
    "rows_per_unit": (lambda: fm.Privacy(epsilon=1, delta=1e-3, rows_per_unit=0), ("rows_per_unit",)),
    "delta and units": (
        lambda: Plan.of(problem(privacy=fm.Privacy(epsilon=1, delta=0.1)), rounds=2),
        ("privacy.delta", "24", "site 0"),
    ),
    "batch": (lambda: Plan.of(problem(sampling=fm.Sampling(batch=32)), rounds=2), ("24", "32", "sampling.batch")),
    "loss clip": (
        lambda: Plan.of(
            problem([fm.Site((torch.randn(40, FEATURES), torch.randn(40, 2)), test=_numbers())], loss=_squares),
            rounds=2,
        ),
        ("privacy.loss_clip",),
    ),
}


_squares = nn.functional.mse_loss


def _numbers() -> tuple[Tensor, Tensor]:
    return torch.randn(9, FEATURES), torch.randn(9, 2)


@pytest.mark.parametrize("name", BAD)
@pytest.mark.quick_cases("all")
def test_bad_numbers_are_refused_before_a_round(name):
    make, named = BAD[name]
    with refused(*named):
        make()


def test_privacy_says_which_extra_is_missing(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with refused("fairmesh[privacy]"):
        Plan.of(problem(privacy=fm.Privacy(epsilon=3.21, delta=1e-3)), rounds=2)


# What goes with privacy -----------------------------------------------------------------------------------------------


def test_head_on_frozen_features_is_trained_by_units(tmp_path):
    encoder = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh())
    sites = fm.models.frozen_features(encoder, [site(0), site(1)], folder=tmp_path)
    result = fm.train(problem(sites, nn.Linear(6, 2)), rounds=2)
    assert (result.privacy["unit"], result.privacy["units"]) == ("patient", [PATIENTS, PATIENTS])


def test_features_of_a_table_that_follows_all_rows_are_refused(tmp_path):
    sites = table_experiment(tmp_path, None).data.sites()
    width = sites[0].train[0].shape[1]
    features = fm.models.frozen_features(nn.Linear(width, 6), sites, folder=tmp_path)
    assert fm.Problem(nn.Linear(6, 2), features).prepared.classes == 2
    with refused("[contract]", "A"):
        problem(features, nn.Linear(6, 2))


@pytest.mark.parametrize("policy", ["frozen", "convert"])
def test_batch_norm_without_statistics_of_the_batch_goes_with_privacy(policy):
    model = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    assert fm.train(problem(model=model, batch_norm=policy), rounds=2).privacy["epsilon"] <= 8


def test_numbers_are_predicted_with_a_loss_clip_and_no_word_on_constants(tmp_path):
    def numbers(one: fm.Site) -> fm.Site:
        train, test = ((x, x[:, :1].clone()) for x, _ in (one.train, one.test))
        return dataclasses.replace(one, train=train, test=test)

    made = problem([numbers(site(k)) for k in range(2)], nn.Linear(FEATURES, 1), privacy=_with(loss_clip=4.0))
    result = fm.train(made, rounds=2)
    lines = list(run_in_words(Run.from_result(result), result, tmp_path))
    assert not any(isinstance(line, str) and "constant answer" in line for line in lines)


def _with(**settings: Any) -> fm.Privacy:
    return dataclasses.replace(PRIVACY, **settings)


def test_augmentation_acts_inside_a_unit():
    made = problem(augment=lambda inputs, draw: inputs + 0.1 * draw(*inputs.shape))
    assert fm.train(made, rounds=2).privacy["epsilon"] <= 8


# What is told ---------------------------------------------------------------------------------------------------------


def test_run_folder_tells_units_and_no_count_or_digest_of_training_rows(tmp_path):
    fm.run(experiment(tmp_path), out=tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    privacy, data = summary["privacy"], summary["provenance"]["data"]
    assert privacy["unit"] == "patient"
    assert privacy["accountant"].startswith("dp-accounting")
    assert 0 < privacy["epsilon"] <= 8
    assert privacy["delta"] == 1e-3
    assert privacy["units"] == [24, 24, 24]
    assert [one["train"] for one in data["sites"]] == [24, 24, 24]
    assert not any("train" in one["classes"] for one in data["sites"])
    assert {one["digest"] for one in data["sites"]} | {data["digest"]} == {""}
    assert summary["judged_on"] == "test"
    assert "penalties" not in summary


def test_report_card_and_terminal_say_what_was_spent(tmp_path):
    result = fm.run(experiment(tmp_path), out=tmp_path / "run")
    write_report([Run.from_folder(tmp_path / "run")], tmp_path / "run", "a run")
    spent = f"epsilon = {result.privacy['epsilon']:.3g} of 8"
    lines = list(run_in_words(Run.from_result(result), result, tmp_path / "run"))
    for text in (
        (tmp_path / "run" / "report.html").read_text(),
        (tmp_path / "run" / "model-card.md").read_text(),
        "\n".join(line for line in lines if isinstance(line, str)),
    ):
        assert spent in text
        assert "per patient" in text
        assert "without noise" in text
    (told,) = json.loads((tmp_path / "run" / "report.json").read_text())["runs"]
    assert told["privacy"] == json.loads(json.dumps(result.privacy))
    assert "SHA-256 of training data" not in (tmp_path / "run" / "model-card.md").read_text()


def test_local_steps_without_a_second_look_at_a_batch_are_charged_one_by_one():
    result = fm.train(problem(), rounds=3, algorithm=fm.TrackedADGDA(local_steps=2, max_drift=0.0))
    assert result.privacy["releases"] == 6


def test_server_that_does_not_weigh_by_losses_spends_nothing_on_them():
    shares = [
        Plan.of(problem(), rounds=2, algorithm=algorithm).private.loss_share
        for algorithm in (fm.algorithms.FedAvg(primal_step=0.1), fm.algorithms.QFFL(primal_step=0.1), fm.TrackedADGDA())
    ]
    assert shares == [0.0, 0.1, 0.1]


def test_records_tell_at_least_what_any_site_has_spent():
    sites = [site(k, patients=count) for k, count in enumerate((24, 25, 60, 61, 62, 900))]
    private = Plan.of(problem(sites, sampling=fm.Sampling(batch=20)), rounds=40).private
    for rounds in (1, 5, 20, 39):
        assert private.spent(rounds) >= private.largest_spent(rounds)
    assert private.spent(40) == private.largest_spent(40) <= PRIVACY.epsilon
