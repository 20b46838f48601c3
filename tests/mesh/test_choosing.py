"""Sites of a mesh choose their own models with a prior from all sites: as a simulation of the same file chooses,
whatever happens to nodes meanwhile. What others say in the sums is checked."""

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fairmesh as fm
from fairmesh.compression import DecodeError
from fairmesh.config.tables import from_table
from fairmesh.experiment import load_experiment
from fairmesh.mesh.enrol.agreement import own_problem, personalization_of
from fairmesh.mesh.node import choosing
from fairmesh.mesh.node.life import ENDING, Life
from fairmesh.mesh.node.reduction import Sums, spanning_tree
from fairmesh.mesh.node.watching import live_status
from fairmesh.personalization import Choice, FineTuned, Mixture
from fairmesh.personalization.personalize import personalized
from fairmesh.personalization.pooled_prior import CommonLosses, SomeSites, wrong_probabilities
from fairmesh.problems.problem import prepare
from fairmesh.report.runs import Run as Shown
from fairmesh.report.runs import personal_table
from fairmesh.topology.mixing import union_of
from tests.mesh import fleet
from tests.mesh.experiments import AD_GDA, experiment
from tests.mesh.scenarios import ROOT, Run, play
from tests.mesh.test_reduction import _Post, sum_with
from tests.refusals import missing_from, refused

NAMES = ["a", "b", "c"]
DEPLOY = ROOT / "docs" / "howto" / "deploy.md"
SIZES = (1, 30, 36)
ROUNDS = 8
FIRST_SUM = ROUNDS + 1 + 3  # after the rounds, two sums and the comparison of results
SHORT = {"steps": 10, "local_steps": 15}
ROWS = """
import torch
import fairmesh as fm

def sites():
    return [_site(i, rows) for i, rows in enumerate((1, 30, 36))]

def _site(i, rows):
    draws = torch.Generator().manual_seed(7 + i)
    inputs = torch.randn(rows + 30, 3, generator=draws)
    noise = torch.randn(rows + 30, generator=draws)
    sign = -1.0 if i == 1 else 1.0  # the second site contradicts the others
    labels = (sign * inputs @ torch.tensor([1.0, 1.0, i - 1.0]) + 0.2 * noise > 0).long()
    return fm.Site((inputs[:rows], labels[:rows]), test=(inputs[rows:], labels[rows:]))
"""
OF_ALL = {"data": {"name": "import", "path": "rows.py:sites"}, "options": {"dtype": "float64"}}
CHOICE = experiment(
    ROUNDS, algorithm=AD_GDA | {"consensus_step": 0.4}, personalization={"name": "choice"} | SHORT, **OF_ALL
)


# In one process


@pytest.fixture(scope="module")
def problem():
    names: dict[str, Any] = {}
    exec(ROWS, names)
    sites = fm.data.reserve(names["sites"]())
    return prepare(fm.Problem(lambda: torch.nn.Linear(3, 2), sites))


def _node(number: int, post: _Post) -> SimpleNamespace:
    """The rounds of a node, as far as the choice sees them."""
    facts = [{"samples": 1, "reserved": 0, "validation": 0}, *({"samples": 29, "reserved": 7, "validation": 0},) * 2]
    membership = SimpleNamespace(names=NAMES, number=number, experiment=SimpleNamespace(rounds=ROUNDS))
    node = SimpleNamespace(facts=dict(zip(NAMES, facts)))
    return SimpleNamespace(membership=membership, node=node, problem=None, mailroom=post.end(number))


@pytest.fixture
def sums_of_node(monkeypatch):
    """Returns what makes the sums of a node, which go through this process."""
    tree, post = spanning_tree(union_of(fm.Ring().build(3))), _Post()
    monkeypatch.setattr(
        choosing, "sums_of", lambda r: Sums(r.membership.number, tree[r.membership.number], range(3), NAMES, r.mailroom)
    )
    monkeypatch.setattr(choosing, "personalization_of", lambda experiment, problem: Choice())
    return lambda number: choosing._SumsOfSites(_node(number, post))  # type: ignore[arg-type]


def test_nodes_that_have_one_site_each_choose_as_where_all_sites_are_in_one_place(problem, sums_of_node):
    """One of them has a single row: it keeps the common model, and takes part in every sum."""
    row, method = torch.tensor([-0.1, -0.1, 0.0, 0.1, 0.1, 0.0, 0.1, -0.1]).double(), Choice(**SHORT)
    settings = {"seed": 0, "dtype": torch.float64, "trace": False}

    def chosen(number: int):
        sums = sums_of_node(number)
        found = personalized(problem.keeping([number]), row, method, sums=sums, **settings)
        assert sums.step == FIRST_SUM + Choice.sums
        return found.sites[0]

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(chosen, range(3)))
    together = personalized(problem, row, method, **settings)
    for mine, site in zip(found, together.sites):
        assert mine.weights == pytest.approx(site.weights, rel=1e-9)
    assert found[0].weights == {"common": 1.0}
    alone = personalized(problem.keeping([1]), row, method, **settings).sites[0]
    assert alone.weights != pytest.approx(found[1].weights, rel=1e-3)  # the other site has its part in the prior


@pytest.mark.parametrize("method", [Mixture(**SHORT), FineTuned(**SHORT)])
def test_ways_in_which_every_site_decides_alone_send_nothing(problem, method):
    def sent(*_):
        raise AssertionError("it asks for a sum")

    row = problem.initial_row(0)
    assert personalized(problem.keeping([1]), row, method, seed=0, sums=sent, trace=False).sites[0].rows == 6
    assert method.sums == 0


def test_way_that_asks_for_more_sums_than_it_says_is_refused(sums_of_node):
    sums = sums_of_node(1)
    sums.step = FIRST_SUM + Choice.sums
    with refused("more sums", error=RuntimeError):
        sums(torch.zeros(1))


@pytest.mark.parametrize(
    ("settings", "chooses"),
    [
        ({}, True),
        ({"options": {"choose_weights": False}}, False),
        ({"algorithm": "tracked-ad-gda"}, False),
        ({"model": {"name": "fc", "hidden": 20_000}}, False),  # more than a million parameters
        ({"model": {"name": "fc", "hidden": 20_000}, "personalization": "choice"}, True),
        ({"parts": {"local": ["1.bias"]}}, False),
    ],
)
@pytest.mark.quick_cases("all")
def test_sites_choose_by_default_if_no_algorithm_is_named_and_models_can_be_mixed_and_are_small(settings, chooses):
    given = from_table(fm.Experiment, {"rounds": 5, "data": {"name": "digits", "nodes": 3}} | settings, "experiment")
    site = given.sites(given.known_data())[0]
    alone = own_problem(site, given)
    assert isinstance(personalization_of(given, alone), Choice) == chooses
    assert (alone.sites[0].reserved is not None) == chooses


class _Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int):
        return torch.full((8, 8), float(i)), i % 10


def test_site_whose_samples_are_not_in_memory_takes_part_in_every_sum_and_keeps_the_common_model(
    sums_of_node, monkeypatch, tmp_path
):
    given = from_table(fm.Experiment, {"rounds": ROUNDS, "data": {"name": "digits", "nodes": 3}}, "experiment")
    alone = own_problem(fm.Site(fm.data.Streamed(_Rows(), labels=[i % 10 for i in range(40)])), given)
    assert isinstance(personalization_of(given, alone), Choice)
    assert alone.sites[0].reserved is None
    rounds, said, steps = _node(0, _Post()), [], []
    rounds.problem, rounds.membership.experiment = alone, given

    class Counting:
        def over_sites(self, row, step, *_):
            steps.append(step)
            return row

    monkeypatch.setattr(choosing, "sums_of", lambda rounds: Counting())
    life = Life()
    life.state = ENDING
    generation = SimpleNamespace(rounds=rounds)
    node: Any = SimpleNamespace(
        generation=generation, folder=tmp_path, life=life, log=lambda *e, **f: said.append(e[1])
    )
    choosing.choose(node, tmp_path)
    assert steps == [*range(FIRST_SUM, FIRST_SUM + Choice.sums)]
    assert said == ["this site keeps the common model"]


# Lies. Nodes 0 - 1 - 2 are in a line.


def _sum(own: int, mine: list[float], wrong: Callable, rows: int = 6, **from_others: list[float]):
    """Returns the sum of a node, given what others send it, who have declared so many rows each."""

    def of_nodes(sums, nodes):
        return wrong(sums, SomeSites(len(nodes), rows * len(nodes), rows * len(nodes)))

    return sum_with(own, mine, wrong=of_nodes, **from_others)


@pytest.mark.parametrize(
    ("own", "sent", "named"),
    [
        (0, {"node_1": [-0.5, 0.5, 1.0]}, "-0.5"),
        (0, {"node_1": [2.0, 0.5, 0.0]}, "2.5"),  # of two sites
        (2, {"node_1": [0.2, 2.0, 2.0]}, "-0.3"),  # less than this site has sent
        (2, {"node_1": [0.5, 3.0, 0.5]}, "3 sites"),
    ],
)
def test_probabilities_that_sites_cannot_have_are_refused_and_the_sites_named(own, sent, named):
    with refused(named, "site-0" if own == 2 else "site-2", error=DecodeError):
        _sum(own, [0.5, 0.5, 0.0], wrong_probabilities, **sent)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ([1.0, 13.0, 1.0, 10.0], "13"),
        ([1.0, 2.0, 1.0, -3.0], "-3"),
        ([1.0, 2.0, 1.0, 12.1], "12.1"),
        ([-4.0, 5.0, 1.0, 10.0], "-4"),
        ([1.0, 5.0, 1e200, 10.0], "1e+200"),
    ],
)
def test_losses_and_rows_that_sites_cannot_have_are_refused(said, named):
    def wrong(total, sites):
        return CommonLosses.wrong(total, sites, lowest=0.0)

    with refused(named, "site-1", "site-2", error=DecodeError):
        _sum(0, [1.0, 2.0, 3.0, 20.0], wrong, node_1=said)


def test_sums_of_honest_sites_are_accepted_whatever_their_sizes_are():
    """A site of few rows accepts what others of a million rows add, which is more than messages may have."""
    said = [2.5e6, 2e6, 1e6, 1_999_999.0]
    found = _sum(0, [0.0, 0.0, 0.7, 1.0], CommonLosses.wrong, 10**6, node_1=said)
    assert found.tolist() == pytest.approx([2.5e6, 2e6, 1e6 + 0.7, 2e6])


# Real nodes


def _chosen(folder: Path, name: str) -> dict:
    return json.loads((folder / name / "state" / "personal" / "summary.json").read_text())


def undisturbed(run: Run) -> None:
    run.live()


@pytest.fixture(scope="module")
def lived(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mesh") / "run"
    play(undisturbed, folder, NAMES, CHOICE, {"rows.py": ROWS})
    return folder


@pytest.mark.slow
def test_three_nodes_choose_what_a_simulation_of_the_same_file_chooses(lived):
    simulated = fm.run(load_experiment(lived / "experiment.toml"), process_group=fleet.KnowingSecrets(NAMES))
    common, flat = load_file(lived / "a" / "state" / "result" / "model.safetensors"), simulated.problem.flat_model
    row, method = flat.row_of_state_dict(common), Choice(**SHORT)
    from_file = personalized(simulated.problem, row, method, seed=0, dtype=torch.float64)
    for name, site, exact in zip(NAMES, simulated.personal[0].sites, from_file.sites):
        found = _chosen(lived, name)
        assert (found["method"], found["uses"], found["rows"]) == ("choice", site.uses, site.rows)
        assert found["weights"] == pytest.approx(exact.weights, rel=1e-6)
        assert found["weights"] == pytest.approx(site.weights, abs=1e-4)  # the file of the common model has float32
    assert len(_chosen(lived, "b")["weights"]) > 1


def _dies_at(point: str, step: int) -> Callable[[str, int], None]:
    def observe(now: str, at: int) -> None:
        if (now, at) == (point, step):
            os.kill(os.getpid(), 9)

    return observe


def killed_while_they_choose(run: Run) -> None:
    """The root and a leaf of the sums die in turn, at several points."""
    deaths = {
        "a": [("received", FIRST_SUM), ("logged", FIRST_SUM + 7), ("result written", ROUNDS)],
        "c": [("computed", FIRST_SUM + 1), ("noted", FIRST_SUM + 20), ("logged", FIRST_SUM + Choice.sums)],
    }
    run.start("b")
    for name, points in deaths.items():
        run.start(name, observe=_dies_at(*points[0]))
    for k in range(3):
        for name, points in deaths.items():
            run.dies(name)
            run.start(name, **({"observe": _dies_at(*points[k + 1])} if k < 2 else {}))
    run.end(*NAMES)


@pytest.mark.slow
def test_nodes_that_are_killed_while_they_choose_end_with_the_same_bits(tmp_path, lived):
    play(killed_while_they_choose, tmp_path, NAMES, CHOICE, {"rows.py": ROWS})
    for name in NAMES:
        files = [folder / name / "state" / "personal" / "personal.safetensors" for folder in (tmp_path, lived)]
        assert files[0].read_bytes() == files[1].read_bytes()
        assert _chosen(tmp_path, name) == _chosen(lived, name)


def one_leaves_while_they_choose(run: Run) -> None:
    run.start("a", "b")
    run.start("c", observe=_dies_at("logged", FIRST_SUM + 3))
    run.dies("c")
    run.vote("a", "b", out=["c"])
    run.end("a", "b")


@pytest.mark.slow
def test_sites_that_remain_choose_again_without_the_one_that_has_left(tmp_path):
    play(one_leaves_while_they_choose, tmp_path, NAMES, CHOICE, {"rows.py": ROWS})
    assert _chosen(tmp_path, "a")["weights"] == {"common": 1.0}
    assert sum(_chosen(tmp_path, "b")["weights"].values()) == pytest.approx(1.0)


DEFAULT = experiment(ROUNDS, algorithm=None, **OF_ALL)


def by_default(run: Run) -> None:
    run.live()
    for name in NAMES:
        assert run.events(name, "this site's model is chosen")


@pytest.fixture(scope="module")
def by_itself(tmp_path_factory):
    """A mesh of an experiment that names neither an algorithm nor a personalization."""
    folder = tmp_path_factory.mktemp("default") / "run"
    play(by_default, folder, NAMES, DEFAULT, {"rows.py": ROWS})
    return folder


@pytest.mark.slow
def test_experiment_that_names_nothing_ends_with_a_model_for_each_site(by_itself):
    found = {name: _chosen(by_itself, name) for name in NAMES}
    assert {site["method"] for site in found.values()} == {"choice"}
    assert [site["rows"] for site in found.values()] == [0, 6, 7]  # those that they have reserved
    assert found["a"]["uses"] == "common"
    assert "1 row" in found["a"]["note"]


@pytest.mark.slow
def test_predictions_at_a_sites_folder_are_those_of_its_model_and_of_the_common_one_at_its_result(by_itself):
    site, inputs = by_itself / "c", torch.zeros(2, 3)
    own, common = (fm.inference.load_model(folder, allow=["rows.py"]) for folder in (site, site / "state" / "result"))
    assert (own.about["site"], own.module.weights) == ("c", _chosen(by_itself, "c")["weights"])
    assert "site" not in common.about
    assert fm.predict(own, inputs).values.shape == fm.predict(common, inputs).values.shape


@pytest.mark.slow
def test_status_and_report_of_a_node_say_which_model_its_site_uses(by_itself):
    words = {"common": "the common model", "adapted": "adapted from the common", "own": "its own rows alone"}
    for name in NAMES:
        own, state = _chosen(by_itself, name), by_itself / name / "state"
        assert words[own["uses"]] in live_status(state)["uses"]
        (row,) = personal_table(Shown.from_folder(state / "result"))[1:]
        assert row[0] == name
        assert own["uses"] in row[-1]


FIXED = """
[algorithm]
name = "tracked-ad-gda"
weighting = "prior-weights"

[objective]
validated_decay = "numbers"

[personalization]
name = "choice"
"""


@pytest.mark.slow
def test_mesh_with_the_fixed_weights_of_the_documentation_chooses_too(tmp_path):
    assert FIXED in DEPLOY.read_text()
    play(undisturbed, tmp_path, NAMES, experiment(ROUNDS, algorithm=None, **OF_ALL) + FIXED, {"rows.py": ROWS})
    record = json.loads((tmp_path / "a/state/result/metrics.jsonl").read_text().splitlines()[-1])
    assert "lambda" not in record  # no weights to learn
    assert all(_chosen(tmp_path, name)["method"] == "choice" for name in NAMES)


def _lies() -> None:
    """Adds three sites to every kind of model, of which there are eleven."""
    honest = choosing._SumsOfSites.__call__

    def lying(self, total, wrong, /):
        return honest(self, total + 3.0 if wrong is wrong_probabilities else total, wrong)

    choosing._SumsOfSites.__call__ = lying


def a_liar(run: Run) -> None:
    run.start("a", "b")
    run.start("c", before=_lies)
    run.until(lambda: run.status("a").get("refusing"))
    (refusal,) = (one for one in run.status("a")["refusing"] if one["by"] == "a")
    assert refusal["site"] == "c"
    assert missing_from(refusal["reason"], "probabilities of 34 sites", "not 1", "of c") == []
    run.vote("a", "b", out=["c"])
    run.end("a", "b")


@pytest.mark.slow
def test_member_that_lies_in_the_choice_is_named_and_voted_out_and_the_others_end(tmp_path):
    play(a_liar, tmp_path, NAMES, CHOICE, {"rows.py": ROWS})
    assert _chosen(tmp_path, "b")["method"] == "choice"
