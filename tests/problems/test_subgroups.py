"""Subgroups inside sites: their weights, what is sent, and what is refused."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import fairmesh as fm
from fairmesh.data.samples import Samples
from fairmesh.mesh.enrol.agreement import refuse_undeployable
from fairmesh.problems.objective import Objective
from fairmesh.problems.subgroups import OTHERS, Seen, own_names, ratios_of, table_of
from fairmesh.report.html import page
from fairmesh.report.runs import Run, subgroup_table
from tests import toys
from tests.equivalence.test_remote_network import compared
from tests.refusals import refused

FIXED = fm.TrackedADGDA(weighting=fm.weighting.PriorWeights())


def sites(n: int = 4, rare: float = 0.1, rows: int = 300, seed: int = 0) -> list[fm.Site]:
    """Returns sites whose rare subgroup follows a rule of its own, so that a linear model has to choose."""
    generator, made = torch.Generator().manual_seed(seed), []
    for _ in range(n):
        inputs = torch.randn(3 * rows, 5, generator=generator)
        odd = torch.rand(3 * rows, generator=generator) < rare
        labels = torch.where(odd, inputs[:, 0] - inputs[:, 1] > 0, inputs[:, 0] + inputs[:, 1] > 0).long()
        names = ["rare" if one else "usual" for one in odd.tolist()]
        made.append(
            fm.Site(
                train=(inputs[:rows], labels[:rows], names[:rows]), test=(inputs[rows:], labels[rows:], names[rows:])
            )
        )
    return made


def model() -> nn.Module:
    return nn.Linear(5, 2)


def problem(**objective) -> fm.Problem:
    return fm.Problem(model, sites(), objective=Objective(**objective))


def test_ratios_give_the_worst_mixture_at_a_distance():
    shares, losses, strength = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 1.0, 2.0]), 0.5
    mean = float((shares * losses).sum())
    raised = [float(s) * math.exp(float(f) / (strength * mean)) for s, f in zip(shares, losses)]
    expected = torch.tensor(raised) / sum(raised)
    found = shares * ratios_of(torch.cat([shares * losses, shares]), strength)
    torch.testing.assert_close(found, expected)
    weights = torch.softmax(torch.randn(2000, 3, generator=torch.Generator().manual_seed(0)), dim=-1)
    distance = (weights * (weights / shares).log()).sum(dim=-1)
    gains = (weights * losses).sum(dim=-1) / mean - strength * distance  # what the weights maximise
    own = float((found * losses).sum() / mean - strength * (found * (found / shares).log()).sum())
    assert own >= float(gains.max())


def test_ratios_are_one_where_nothing_is_known_or_all_losses_are_alike():
    shares = torch.tensor([[0.9, 0.1, 0.0], [0.5, 0.5, 0.0]])
    for losses in (torch.zeros(2, 3), torch.full((2, 3), 0.7)):
        found = ratios_of(torch.cat([shares * losses, shares], dim=-1), 0.5)
        torch.testing.assert_close(found[:, :2], torch.ones(2, 2))


def test_table_takes_the_mean_for_a_subgroup_that_was_not_seen_yet():
    known = Seen(torch.tensor([2.0, 0.0]), torch.tensor([4.0, 0.0]))
    assert table_of(known, torch.tensor([0.8, 0.2])).tolist() == pytest.approx([0.4, 0.1, 0.8, 0.2])


def test_gradient_is_that_of_the_weighed_subgroups():
    given = toys.problem(
        sites=[fm.Site((*site.train, ["a", "b", "b"] * 4)) for site in toys.sites(sizes=(12,) * 8)],
        sampling=fm.Sampling(order="full"),
        objective=Objective(subgroups="across"),
    )
    _, oracle = toys.on_stack(given, fm.Ring())
    models, ratios = oracle.initial_models(), torch.tensor([0.4, 1.3], dtype=torch.float64).expand(1, 8, 2)
    losses, gradients, seen = oracle.by_subgroup(models, torch.tensor(0), 0, ratios)
    for i in (0, 5):
        row = models[0, i].clone().requires_grad_(True)
        samples = given.sites[i].train
        each = nn.functional.cross_entropy(
            given.flat_model.to(torch.device("cpu"), torch.float64)(row, samples.inputs.double()),
            samples.targets,
            reduction="none",
        )
        parts = [each[samples.subgroups == k] for k in range(2)]
        weighed = (0.4 * parts[0].sum() + 1.3 * parts[1].sum()) / len(each)
        weighed.backward()
        torch.testing.assert_close(losses[0, i, 0], weighed.detach())
        torch.testing.assert_close(gradients[0, i], row.grad)
        torch.testing.assert_close(seen.sums[0, i], torch.stack([part.sum() for part in parts]).detach())
        assert seen.counts[0, i].tolist() == [4, 8]


def test_small_subgroups_of_a_site_share_one_weight():
    names = ["a"] * 30 + ["b"] * 12 + ["c"] * 9 + ["d"]
    samples = Samples.of((torch.zeros(52, 2), torch.zeros(52), names), "samples")
    assert own_names(samples) == ("a", "b", OTHERS)
    assert own_names(samples.take(torch.arange(42))) == ("a", "b")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "bits"), [("within", 0), ("across", 300 * 2 * 2 * 2 * 32)])
def test_weights_help_the_worst_subgroup_for_nothing_within_sites_and_for_two_numbers_each_across_them(kind, bits):
    """Across sites: rounds, neighbours, subgroups, numbers, bits."""
    weighed = problem(subgroups=kind, subgroup_strength=0.3)
    runs = [fm.train(made, fm.Ring(), FIXED, 300, seeds=range(3)) for made in (fm.Problem(model, sites()), weighed)]
    worst = [sum(min(o.metrics["accuracy"] for o in run.subgroups(k)) for k in range(3)) / 3 for run in runs]
    assert worst[1] > worst[0] + 0.02
    plain, other = (run.final[0] for run in runs)
    assert other["nominal_bits_busiest"] - plain["nominal_bits_busiest"] == bits
    assert (other["bytes_busiest_node"] == plain["bytes_busiest_node"]) == (bits == 0)


@pytest.mark.slow
def test_nodes_agree_on_the_mean_loss_of_subgroups_that_span_sites():
    """With models that stand still, gossip ends at the mean over all rows of all sites."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for i in range(5):
        rows = 12 + 6 * i
        inputs, labels = torch.randn(rows, 5, generator=generator), torch.arange(rows) % 2
        made.append(fm.Site((inputs, labels, ["x"] * (rows - 4 - i) + ["y"] * (4 + i) if i else ["x"] * rows)))
    given = fm.Problem(
        model, made, sampling=fm.Sampling(order="full"), objective=Objective(subgroups="across")
    ).prepared
    still = fm.TrackedADGDA(primal_step=0.0, weighting=fm.weighting.PriorWeights())
    result = fm.train(given, fm.Ring(), still, 400, dtype="float64")
    outputs = given.flat_model.to(torch.device("cpu"), torch.float64)
    row, sums, counts = given.initial_row(0), torch.zeros(2).double(), torch.zeros(2).double()
    for site in given.sites:
        each = nn.functional.cross_entropy(
            outputs(row, site.train.inputs.double()), site.train.targets, reduction="none"
        )
        for k, name in enumerate(site.train.subgroup_names):
            mine = site.train.subgroups == k
            sums["xy".index(name)] += each[mine].sum().detach()
            counts["xy".index(name)] += mine.sum()
    expected = counts / counts.sum() * ratios_of(torch.cat([sums, counts]), 0.5)
    for one in result.subgroups():
        assert one.weight == pytest.approx(float(expected["xy".index(one.subgroup)]), abs=1e-6)


@pytest.mark.parametrize("objective", [{"subgroups": "within"}, {"subgroups": "across"}], ids=["within", "across"])
@pytest.mark.quick_cases(1)
def test_remote_network_weighs_subgroups_as_the_simulator_does(objective):
    given = toys.problem(
        sites=[fm.Site((*site.train, ["a", "b", "b"] * 8)) for site in toys.sites(sizes=(24,) * 8)],
        objective=Objective(**objective),
    )
    compared(given, fm.Ring(), FIXED, [[0], [1, 2, 3], [4, 5, 6], [7]], seeds=(0, 2))


class Stop(Exception):
    pass


@pytest.mark.parametrize(
    ("objective", "algorithm"),
    [
        ({"subgroups": "within"}, FIXED),
        ({"subgroups": "across"}, FIXED),
        ({"judged_on": "held-out", "subgroups": "within"}, FIXED),
        ({"judged_on": "held-out", "rejoin": 0.5, "discount_noise": True}, fm.TrackedADGDA()),
    ],
    ids=str,
)
@pytest.mark.quick_cases(1)
def test_resumed_run_with_an_objective_is_bit_for_bit_the_uninterrupted_one(objective, algorithm, tmp_path):
    def stop(done: int, state) -> None:
        if done == 7:
            raise Stop

    def train(given: fm.Problem, **options) -> fm.Result:
        return fm.train(given, fm.Ring(), algorithm, 20, **options)

    given = problem(**objective)
    whole = train(given)
    with pytest.raises(Stop):
        train(given, out=tmp_path, observers=[stop], checkpoint_every=1)
    with refused("problem.objective", error=fm.errors.CheckpointError):
        train(problem(), out=tmp_path, resume=True)
    again = train(given, out=tmp_path, resume=True)
    assert torch.equal(again.row(), whole.row())
    if "subgroups" in objective:
        assert torch.equal(*(run.state.companions.subgroups.sums for run in (again, whole)))


def test_subgroups_without_weights_change_nothing_but_are_measured():
    plain = [fm.Site(site.train[:2], site.test[:2]) for site in sites()]
    one = fm.train(fm.Problem(model, plain), fm.Ring(), fm.TrackedADGDA(), 20)
    other = fm.train(fm.Problem(model, sites()), fm.Ring(), fm.TrackedADGDA(), 20)
    assert torch.equal(one.row(), other.row())
    assert {(o.subgroup, o.weight) for o in other.subgroups()} == {("rare", None), ("usual", None)}
    assert sum(o.rows for o in other.subgroups() if o.site == "node 0") == 600
    with refused("subgroups"):
        one.subgroups()


def write_patients(folder: Path) -> str:
    scanner = ["new", "old scanner", "old scanner"]
    rows = [f"{i % 7},{i % 2},{'north' if i < 60 else 'south'},{scanner[i % 3]}\n" for i in range(120)]
    (folder / "patients.csv").write_text("age,ill,ward,scanner\n" + "".join(rows))
    return str(folder / "patients.csv")


def test_table_reads_subgroups_from_a_column(tmp_path):
    file = write_patients(tmp_path)
    made = fm.data.Table(file, target="ill", site="ward", subgroup="scanner").sites()
    given = fm.Problem(lambda: nn.Linear(1, 2), made, objective=Objective(subgroups="within")).prepared
    assert [site.train.subgroup_names for site in given.sites] == [("new", "old scanner")] * 2
    assert given.sites[0].train.inputs.shape[1] == 1
    counts = torch.stack([site.train.subgroups.bincount() + site.test.subgroups.bincount() for site in given.sites])
    assert counts.tolist() == [[20, 40], [20, 40]]
    with refused("gender", "scanner"):
        fm.data.Table(file, target="ill", site="ward", subgroup="gender").sites()


def test_default_of_train_keeps_its_objective_when_subgroups_are_asked_for():
    within, across = problem(subgroups="within"), problem(subgroups="across", subgroup_strength=0.3)
    result = fm.train(within, rounds=12)
    assert result.problem.objective.judged_on == "held-out"
    assert result.problem.objective.discount_noise
    assert result.handed_out is not None
    result = fm.train(across, rounds=12)
    assert result.replicas[0].algorithm.weighting == fm.weighting.PriorWeights()
    assert result.problem.objective.subgroup_strength == 0.3
    assert result.fixed is result.handed_out is None


def test_weighed_loss_on_held_out_rows_does_not_depend_on_which_rows_they_are():
    given = problem(judged_on="held-out", rejoin=1.0, subgroups="across", rounds=10)
    _, oracle = toys.on_stack(given, fm.Ring())
    models = torch.zeros(1, 4, 12, dtype=torch.float64)  # the same loss in every row
    ratios = torch.tensor([5.0, 0.2], dtype=torch.float64).expand(1, 4, 2)
    losses, *_ = oracle.by_subgroup(models, torch.tensor(0), 0, ratios)
    torch.testing.assert_close(losses, torch.full_like(losses, math.log(2)))


@pytest.mark.parametrize(
    "wrapped",
    [lambda data: fm.data.Fewer(data, train=30), fm.data.HeldOut, fm.data.Corrupted],
    ids=["fewer", "held-out", "corrupted"],
)
def test_data_made_from_other_data_keeps_the_subgroups(wrapped, tmp_path):
    made = wrapped(fm.data.Table(write_patients(tmp_path), target="ill", site="ward", subgroup="scanner")).sites()
    given = fm.Problem(lambda: nn.Linear(1, 2), made).prepared
    assert all(site.train.subgroups is not None and site.test.subgroups is not None for site in given.sites)


def test_digest_of_a_problem_knows_the_names_of_subgroups_and_not_how_often_they_were_read():
    def made(names: list) -> fm.Problem:
        return fm.Problem(
            lambda: nn.Linear(2, 2), [fm.Site((torch.zeros(24, 2), torch.arange(24) % 2, names))]
        ).prepared

    numbers = made(list(range(12)) * 2)
    again = fm.Problem(lambda: nn.Linear(2, 2), numbers.sites).prepared
    assert again.digest() == numbers.digest()
    assert made(["a", "b"] * 12).digest() != made(["a", "c"] * 12).digest()


@pytest.mark.slow
def test_run_writes_the_subgroups_into_its_summary_and_its_report(tmp_path):
    result = fm.train(problem(subgroups="within"), fm.Ring(), FIXED, 5, out=tmp_path / "run")
    run = Run.from_folder(tmp_path / "run")
    header, *rows = subgroup_table(run)
    assert len(rows) == len(result.subgroups()) == 8
    assert header[1] == "subgroup"
    assert rows[0][:2] == ["node 0", "rare"]
    assert "usual" in page([run], "a run")


@pytest.mark.parametrize(
    ("subgroups", "names"),
    [
        (["a"] * 9, [9, 10]),
        ([0.5] * 10, ["float"]),
        (["a"] * 9 + [None], ["sample 9"]),
        (["a"] * 9 + [""], ["sample 9"]),
    ],
)
def test_subgroups_that_do_not_name_every_sample_are_refused(subgroups, names):
    with refused("Lyon", *names):
        fm.Problem(
            lambda: nn.Linear(2, 2), [fm.Site((torch.zeros(10, 2), torch.arange(10) % 2, subgroups), name="Lyon")]
        )


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"subgroup_strength": 0.0}, ["subgroup_strength", 0.0]),
        ({"subgroup_strength": math.nan}, ["subgroup_strength", "nan"]),
        ({"subgroups": "within", "subgroup_names": ("a",)}, ["subgroup_names", "across"]),
        ({"subgroups": "across", "subgroup_names": ("a", "a")}, ["subgroup_names", "a"]),
        ({"subgroups": "between"}, ["subgroups", "between"]),
        ({"subgroups": "within", "judged_on": "validation"}, ["subgroups", "validation"]),
        ({"subgroups": "within", "against": "constant"}, ["subgroups", "against"]),
    ],
)
def test_objective_refuses_subgroups_that_cannot_be_weighed(fields, names):
    with refused(*names):
        Objective(**fields)


NAMED, SOME = sites(4), [*sites(3), fm.Site(sites(1)[0].train[:2])]
RESERVED = [fm.Site((torch.zeros(20, 5), torch.arange(20) % 2, [OTHERS] * 20))]


@pytest.mark.parametrize(
    ("given", "objective", "words"),
    [
        (SOME[3:], {"subgroups": "within"}, ("objective.subgroups", "node 0")),
        (NAMED, {"subgroups": "across", "subgroup_names": ("usual",)}, ("objective.subgroup_names", "rare", "usual")),
        (SOME, {"subgroups": "across"}, ("objective.subgroups", "node 3")),
        (RESERVED, {"subgroups": "within"}, (OTHERS, "node 0")),
    ],
    ids=["no names", "unknown name", "no names at a site", "reserved name"],
)
def test_problem_refuses_subgroups_that_are_not_named_or_not_known(given, objective, words):
    with refused(*words):
        fm.Problem(model, given, objective=Objective(**objective))


def test_mesh_refuses_subgroups_across_sites_whose_names_it_cannot_know():
    digits = fm.data.Digits(nodes=4)
    with refused("objective.subgroup_names"):
        refuse_undeployable(fm.Experiment(digits, algorithm=FIXED, objective=Objective(subgroups="across")))
    named = Objective(subgroups="across", subgroup_names=("a", "b"))
    refuse_undeployable(fm.Experiment(digits, algorithm=FIXED, objective=named))
    with refused("prior-weights"):
        refuse_undeployable(fm.Experiment(digits, algorithm=fm.TrackedADGDA(), objective=named))


@pytest.mark.parametrize(
    ("objective", "algorithm", "names"),
    [
        ({"subgroups": "across"}, fm.TrackedADGDA(), ["across", "prior-weights", "TrackedADGDA"]),
        ({"subgroups": "across"}, fm.ChocoSGD(), ["across", "prior-weights", "ChocoSGD"]),
        ({"subgroups": "within"}, fm.algorithms.DRFA(), ["objective.subgroups", "DRFA"]),
    ],
)
def test_training_refuses_algorithms_that_cannot_weigh_subgroups(objective, algorithm, names):
    with refused(*names):
        fm.train(problem(**objective), fm.Ring(), algorithm, 3)
