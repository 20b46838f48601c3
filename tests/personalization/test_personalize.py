"""Sites with models of their own, on problems whose best models are known."""

import dataclasses
import json
import math
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file

import fairmesh as fm
from fairmesh.networks.remote import RemoteNetwork
from fairmesh.personalization import FineTuned, Mixture, PersonalModel
from fairmesh.personalization.personalize import personalized
from fairmesh.report.runs import Run, personal_table
from fairmesh.testing.hosts import InProcess, Post, Threads
from tests.pairwise import case
from tests.personalization.problems import CLASSES, FEATURES, SIZES, linear, problem, sites
from tests.refusals import refused

QUICK = {"steps": 60, "local_steps": 100}
NAMES = list(SIZES)
AVERAGING = fm.TrackedADGDA(weighting=fm.weighting.PriorWeights())
SEEDS = range(4)


def trained(problem, seed=0, rounds=80, **options):
    return fm.train(problem, fm.Ring(), AVERAGING, rounds, seeds=[seed], measure_every=rounds, **options)


@pytest.fixture(scope="module")
def result():
    return trained(problem())


@pytest.fixture(scope="module", params=["labels", case("numbers", quick=False), case("hidden layer", quick=False)])
def outcomes(request):
    """Returns the loss of every kind of model at every site, over several draws of the data: (seeds, sites)."""
    kind = {"labels": {}, "numbers": {"numbers": True}, "hidden layer": {"hidden": 12}}[request.param]
    found = []
    for seed in SEEDS:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "clearly worse than a constant answer")
            result = trained(problem(seed, **kind), seed)
        mixture = fm.personalize(result, Mixture(**QUICK))
        tuned = fm.personalize(result, FineTuned(**QUICK))
        losses = {model: mixture.values(model, "loss") for model in ("common", "local")}
        found.append(
            losses | {"mixture": mixture.values("personal", "loss"), "tuned": tuned.values("personal", "loss")}
        )
    return {name: torch.tensor([one[name] for one in found], dtype=torch.float64) for name in found[0]}


def test_sites_are_those_that_the_tests_need(outcomes):
    common, local = (dict(zip(NAMES, outcomes[name].mean(dim=0).tolist())) for name in ("common", "local"))
    assert local["other"] < 0.7 * common["other"]
    assert all(common[name] < 0.9 * local[name] for name in ("alike 0", "alike 1"))


def test_mixture_is_nowhere_worse_than_the_better_of_common_and_local_beyond_noise(outcomes):
    for i, name in enumerate(NAMES[:-1]):
        better = min(outcomes["common"][:, i].mean(), outcomes["local"][:, i].mean())
        excess = outcomes["mixture"][:, i] - better
        assert excess.mean() <= 0.03 * better + 2 * excess.std() / len(SEEDS) ** 0.5, name


def test_mixture_beats_both_where_the_truth_lies_between(outcomes):
    at = NAMES.index("between")
    mixture, common, local = (outcomes[name][:, at].mean() for name in ("mixture", "common", "local"))
    assert mixture < min(common, local)


def test_fine_tuned_helps_the_site_with_another_truth_and_not_at_the_cost_of_the_others(outcomes):
    common, tuned = outcomes["common"].mean(dim=0), outcomes["tuned"].mean(dim=0)
    assert tuned[NAMES.index("other")] < 0.7 * common[NAMES.index("other")]
    assert tuned[:-1].mean() < common[:-1].mean()
    assert bool((tuned[:2] < 1.25 * common[:2]).all())  # the two alike sites with 20 rows, 4 of them unseen


def test_outcome_names_what_was_done(result):
    found = fm.personalize(result, Mixture(**QUICK))
    assert (found.method, found.replica, [site.name for site in found.sites]) == ("mixture", 0, NAMES)
    site = found.sites[NAMES.index("other")]
    assert site.rows == round(0.2 * SIZES["other"])
    assert (site.unseen, site.note) == (True, None)
    assert list(site.weights) == list(site.state_dicts) == ["common", "local", "fine-tuned"]
    assert sum(site.weights.values()) == pytest.approx(1.0)
    assert 0 < site.steps["local"] <= 100
    assert 0 < site.steps["fine-tuned"] <= 60
    for numbers in (site.held_out, site.test):
        assert set(numbers) == {"common", "local", "personal"}
        assert set(numbers["common"]) == {"accuracy", "loss"}
    assert site.held_out["personal"]["loss"] < site.held_out["common"]["loss"]


def test_common_numbers_are_those_of_the_run(result):
    found = fm.personalize(result, FineTuned(**QUICK))
    assert found.values("common", "accuracy") == pytest.approx(result.final[0]["accuracy"]["sites"])
    assert found.values("common", "loss") == pytest.approx(result.final[0]["loss"]["sites"], rel=1e-5)


def test_site_too_small_to_hold_rows_out_keeps_the_common_model_and_says_so(result):
    found = fm.personalize(result, Mixture(**QUICK)).sites[-1]
    assert found.weights == {"common": 1.0}
    assert str(SIZES["tiny"]) in found.note
    assert found.test["personal"] == found.test["common"]
    assert math.isnan(found.test["local"]["loss"])
    for name, tensor in result.state_dict().items():
        assert torch.equal(found.state_dicts["common"][name], tensor)


def memorising(reserved: bool) -> tuple[fm.Problem, torch.Tensor]:
    """Returns a site whose inputs name each row, and a common model that knows the rows it was trained on by heart."""
    generator = torch.Generator().manual_seed(3)
    size, labels = 60, (torch.arange(560) // 2) % 2
    signal = 2.0 * (labels - 0.5).unsqueeze(-1) + torch.randn(560, 1, generator=generator)
    names = torch.zeros(560, size)
    names[:size] = torch.eye(size)
    inputs = torch.cat([signal, names], dim=-1)
    site = fm.Site((inputs[:size], labels[:size]), test=(inputs[size:], labels[size:]))
    made = fm.Problem(
        torch.nn.Linear(size + 1, 2, bias=False), fm.data.reserve([site]) if reserved else [site]
    ).prepared
    seen = made.sites[0].train
    row = torch.zeros(2, size + 1)
    for one, label in zip(seen.inputs, seen.targets):
        row[:, 1:] += 8.0 * torch.nn.functional.one_hot(label, 2).unsqueeze(-1) * one[1:]
    return made, row.flatten()


def test_reserved_rows_unmask_a_common_model_that_has_memorised_the_others():
    chosen = {}
    for reserved in (True, False):
        made, row = memorising(reserved)
        (chosen[reserved],) = personalized(made, row, Mixture(**QUICK), seed=0).sites
    fair, unfair = chosen[True], chosen[False]
    assert fair.test["common"]["accuracy"] == pytest.approx(0.5, abs=0.01)
    assert fair.held_out["common"]["accuracy"] <= 0.6
    assert fair.test["personal"]["accuracy"] > 0.75
    assert fair.weights["common"] < 0.2
    assert unfair.held_out["common"]["accuracy"] == 1.0
    assert unfair.weights["common"] + unfair.weights["fine-tuned"] > 0.9
    assert (fair.unseen, unfair.unseen) == (True, False)
    assert fair.note is None
    assert "reserve" in unfair.note


def test_validation_set_of_a_site_s_own_serves_as_unseen_rows_and_a_shared_one_does_not():
    made = sites()[4]
    inputs, labels = made.train
    rows, validation = (inputs[:100], labels[:100]), (inputs[100:], labels[100:])
    own = fm.Problem(linear(CLASSES), [fm.Site(rows, made.test, validation)]).prepared
    shared = fm.Problem(
        linear(CLASSES), [fm.Site(rows, made.test), fm.Site(rows, made.test)], validation=validation
    ).prepared
    zero = torch.zeros(own.flat_model.dim)
    (alone,) = personalized(own, zero, Mixture(**QUICK), seed=0).sites
    assert (alone.unseen, alone.rows) == (True, 50)
    two = personalized(shared, zero, Mixture(**QUICK), seed=0).sites
    assert [(one.unseen, one.rows) for one in two] == [(False, 100)] * 2


@pytest.mark.slow
def test_personalize_gives_the_same_twice_and_another_for_another_seed(result):
    one, again = (fm.personalize(result, Mixture(**QUICK)) for _ in range(2))
    assert json.dumps(one.table()) == json.dumps(again.table())
    other = personalized(result.problem, result.row()[0], Mixture(**QUICK), seed=5)
    assert other.table()["sites"][0]["weights"] != one.table()["sites"][0]["weights"]


def test_site_alone_chooses_what_it_chooses_among_others():
    whole, method = problem().prepared, Mixture(**QUICK)
    row = 0.1 * torch.randn(whole.flat_model.dim, dtype=torch.float64)
    everyone = personalized(whole, row, method, seed=0, dtype=torch.float64).sites
    (alone,) = personalized(whole.keeping([4]), row, method, seed=0, dtype=torch.float64).sites
    assert alone.number == 4
    assert alone.weights == pytest.approx(everyone[4].weights, abs=1e-8)
    assert alone.test["personal"]["loss"] == pytest.approx(everyone[4].test["personal"]["loss"], abs=1e-8)
    for name, tensor in everyone[4].state_dicts["local"].items():
        assert torch.allclose(alone.state_dicts["local"][name], tensor, atol=1e-7)


def test_steps_that_explode_are_never_chosen(result):
    found = fm.personalize(result, Mixture(steps=20, local_steps=20, step=1e30, local_step=1e30))
    for site in found.sites[:-1]:
        assert math.isfinite(site.test["personal"]["loss"])
        assert site.test["personal"]["loss"] <= 1.2 * max(site.test["common"]["loss"], math.log(CLASSES))


def test_fold_of_one_class_and_a_site_of_one_class_are_no_obstacle():
    inputs = torch.randn(20, FEATURES, generator=torch.Generator().manual_seed(0))
    rare, single = torch.zeros(20, dtype=torch.int64), torch.ones(20, dtype=torch.int64)
    rare[7] = 2
    made = fm.Problem(linear(CLASSES), fm.data.reserve([fm.Site((inputs, rare)), fm.Site((inputs, single))])).prepared
    found = personalized(made, torch.zeros(made.flat_model.dim), Mixture(**QUICK), seed=0)
    for site in found.sites:
        assert site.test == {}
        assert site.held_out["personal"]["loss"] < 0.7 * site.held_out["common"]["loss"]
    assert found.values("personal", "accuracy")[1] == 1.0


def test_personal_module_gives_the_outputs_that_were_measured(result, tmp_path):
    found = fm.personalize(result, Mixture(**QUICK)).sites[4]
    inputs, labels = result.problem.sites[4].test.inputs, result.problem.sites[4].test.targets
    with torch.no_grad():
        outputs = found.module(linear(CLASSES))(inputs)
    assert float(torch.nn.functional.cross_entropy(outputs, labels)) == pytest.approx(
        found.test["personal"]["loss"], rel=1e-5
    )


def test_personalize_measures_the_user_s_metrics():
    made = problem(metrics={"error": fm.metrics.Metric(lambda o, t: float((o.argmax(-1) != t).float().mean()), False)})
    found = fm.personalize(trained(made, rounds=5), FineTuned(steps=5, local_steps=5)).sites[0]
    for numbers in (found.held_out["personal"], found.test["common"]):
        assert numbers["error"] == pytest.approx(1 - numbers["accuracy"])


def test_personalize_tells_its_progress(result):
    seen = []
    fm.personalize(result, Mixture(steps=3, local_steps=4), progress=lambda done, steps: seen.append((done, steps)))
    assert seen == [(k, 7) for k in range(1, 8)]


def test_personalize_refuses_a_replica_that_is_not_there_and_a_model_that_diverged(result):
    with refused("replica", "0..0", 3):
        fm.personalize(result, replica=3)
    with refused("device", "gpu"):
        fm.personalize(result, device="gpu")
    broken = dataclasses.replace(result, averages=type(result._last)(result.row() * math.nan, None))
    with refused("replica 0", "not finite"):
        fm.personalize(broken)


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("steps", 0, ">= 1"),
        ("local_steps", -1, ">= 1"),
        ("step", 0.0, "> 0"),
        ("local_step", math.inf, "finite"),
        ("folds", 1, "[2, 10]"),
        ("folds", 11, "[2, 10]"),
        ("share", 1.0, "(0, 1)"),
    ],
)
def test_personalization_refuses_settings_by_name(field, value, shown):
    for kind in (FineTuned, Mixture):
        with refused(field, value, shown):
            kind(**{field: value})


def test_personalization_of_a_user_s_own_needs_only_weights(result):
    @dataclasses.dataclass(frozen=True)
    class Halves(fm.personalization.OneByOne):
        components: ClassVar[tuple[str, ...]] = ("common", "local")

        def weights(self, held_out, rows):
            return {"common": 0.5, "local": 0.5}

    found = fm.personalize(result, Halves(local_steps=5))
    assert (found.method, found.sites[0].weights) == ("Halves", {"common": 0.5, "local": 0.5})


# In a run.

QUICKER = Mixture(steps=20, local_steps=20)
DIGITS = fm.data.Digits(nodes=4, odd=1)
EXPERIMENT = fm.Experiment(DIGITS, fm.Ring(), fm.TrackedADGDA(), rounds=20, seeds=(0, 1), personalization=QUICKER)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "personal"
    return fm.run(EXPERIMENT, out=folder), folder


def test_run_personalizes_every_replica_from_reserved_rows(run):
    result, _ = run
    assert [one.replica for one in result.personal] == [0, 1]
    assert all(site.unseen for one in result.personal for site in one.sites)
    assert result.personal[0].table() != result.personal[1].table()
    train = [len(site.train[1]) for site in EXPERIMENT.data.sites()]
    assert [len(site.train) + len(site.reserved) for site in result.problem.sites] == train


def test_run_writes_the_models_and_the_numbers(run):
    result, folder = run
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["personal"] == [one.table() for one in result.personal]
    module = EXPERIMENT.model.build(torch.Size([8, 8]), 10)
    for one, suffix in zip(result.personal, ("", "-1")):
        for site in one.sites:
            model = PersonalModel.load(folder / f"personal-{site.number}{suffix}.safetensors", module)
            assert model.weights == pytest.approx(site.weights)
            test = result.problem.sites[site.number].test
            with torch.no_grad():
                hits = (model(test.inputs).argmax(-1) == test.targets).double().mean()
            assert float(hits) == pytest.approx(site.test["personal"]["accuracy"])


def test_personal_model_refuses_a_file_of_another_kind(run):
    module = EXPERIMENT.model.build(torch.Size([8, 8]), 10)
    with refused("model.safetensors"):
        PersonalModel.load(run[1] / "model.safetensors", module)
    with refused("personal-0.safetensors"):
        PersonalModel.load(run[1] / "personal-0.safetensors", torch.nn.Linear(3, 2))


def test_report_has_a_row_for_every_site_averaged_over_replicas(run):
    result, folder = run
    header, *rows = personal_table(Run.from_folder(folder))
    assert header[1:4] == ["common model", "alone", "its model"]
    for k, row in enumerate(rows):
        mean = sum(one.values("personal", "accuracy")[k] for one in result.personal) / 2
        assert row[0] == result.problem.sites[k].name
        assert row[3] == f"{100 * mean:.1f} %"
    assert personal_table(Run.from_result(dataclasses.replace(result, personal=[]))) == []


def test_run_sends_nothing_for_it_and_the_common_model_is_that_of_the_reserved_problem(run):
    result, _ = run
    plain = fm.train(EXPERIMENT.problem(), EXPERIMENT.topology, EXPERIMENT.algorithm, 20, seeds=(0, 1))
    assert torch.equal(plain.row(), result.row())
    assert [one["bytes_total"] for one in plain.final] == [one["bytes_total"] for one in result.final]


def test_run_resumed_after_its_end_chooses_the_same(run):
    result, folder = run
    before = load_file(folder / "personal-3.safetensors")
    again = fm.run(EXPERIMENT, out=folder, resume=True)
    assert [one.table() for one in again.personal] == [one.table() for one in result.personal]
    after = load_file(folder / "personal-3.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("line", "made"),
    [
        ('[personalization]\nname = "fine-tuned"\nsteps = 7\n', FineTuned(steps=7)),
        ('personalization = "mixture"\n', Mixture()),
        ("", None),
    ],
)
def test_experiment_file_names_a_personalization(line, made, tmp_path):
    file = tmp_path / "experiment.toml"
    text = 'rounds = 5\ndata = { name = "digits", nodes = 4 }\ntopology = "ring"\nalgorithm = { name = "ad-gda" }\n'
    file.write_text(text + line)
    assert fm.load_experiment(file).personalization == made
    file.write_text(text + 'personalization = "mixtur"\n')
    with refused("mixtur", "mixture"):
        fm.load_experiment(file)


def test_replica_that_diverged_has_no_personal_models():
    options = {"personalization": FineTuned(steps=2, local_steps=2), "on_divergence": "mark"}
    found = fm.train(problem(), fm.Ring(), [fm.algorithms.DSGD(0.1), fm.algorithms.DSGD(1e30)], 5, **options)
    assert found.diverged == [1]
    assert [one.replica for one in found.personal] == [0]


class Host(Threads):
    """One of two threads that train together as the processes of a cluster do."""

    def nodes(self, n):
        return range(n)[self.rank * 4 : self.rank * 4 + 4]

    def network(self, cycle, *, device, dtype, count_bytes):
        transport = InProcess(self.post, self.rank)
        transport.process_group = self
        return RemoteNetwork(cycle, self.nodes(cycle[0].n), transport, device=device, dtype=dtype)


@pytest.mark.slow
def test_processes_choose_for_their_own_sites_and_know_all_numbers():
    post = Post(2)
    method = Mixture(steps=3, local_steps=3)

    def host(rank):
        return trained(problem(), rounds=3, personalization=method, dtype="float64", process_group=Host(post, rank))

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(host, range(2))
    tables = [result.personal[0].table() for result in (one, other)]
    assert len(tables[0]["sites"]) == len(NAMES)
    assert json.dumps(tables[0]) == json.dumps(tables[1])
    held = [{site.number for site in result.personal[0].sites if site.state_dicts} for result in (one, other)]
    assert held[0] | held[1] == set(range(len(NAMES)))
    assert held[0].isdisjoint(held[1])
    alone = trained(problem(), rounds=3, personalization=method, dtype="float64").personal[0]
    assert [one.test["personal"]["loss"] for one in alone.sites] == pytest.approx(
        [site["test"]["personal"]["loss"] for site in tables[0]["sites"]], abs=1e-6
    )
