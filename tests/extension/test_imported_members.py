"""Classes of a user's own: as tables and back, in experiment files, checkpoints, sweeps and digests."""

import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import tomli_w
from safetensors.torch import load_file

import fairmesh as fm
from fairmesh.config.registry import registered_name
from fairmesh.config.tables import checked, from_table, to_table
from fairmesh.mesh.enrol.agreement import agreed
from fairmesh.mesh.enrol.manifest import collected, loaded
from tests import toys
from tests.extension import mine
from tests.refusals import refused

FILE = Path(mine.__file__)
MEMBERS = {
    fm.algorithms.Algorithm: mine.ExactDiffusion(fm.schedules.Geometric(0.2, 0.99), 0.4),
    fm.ChocoSGD: mine.Compressed(0.1, compressor=mine.Ternary(), damping=0.9),
    fm.compressors.Compressor: mine.Ternary(),
    fm.topologies.Topology: mine.Barbell(2),
    fm.regularizers.Regularizer: mine.SquaredDistance(0.3),
    fm.schedules.Schedule: mine.Cosine(0.5, 40),
    fm.weighting.Weighting: mine.LossPower(2.0),
    fm.data.Data: mine.ToySites(4),
    fm.models.Model: mine.Wide(4),
}
EXPERIMENT = """
rounds = 6
[data]
name = "import"
path = "mine.py:ToySites"
nodes = 6
[model]
name = "import"
path = "mine.py:Wide"
width = 4
[topology]
name = "import"
path = "mine.py:Barbell"
bridges = 2
[algorithm]
name = "import"
path = "mine.py:ExactDiffusion"
primal_step = { name = "import", path = "mine.py:Cosine", start = 0.2, rounds = 6 }
mixing = 0.4
[options]
measure_every = 3
checkpoint_every = 3
"""
NESTED = """
rounds = 4
[data]
name = "import"
path = "mine.py:ToySites"
[topology]
name = "ring"
[algorithm]
name = "tracked-ad-gda"
primal_step = 0.05
compressor = { name = "import", path = "mine.py:Ternary" }
regularizer = { name = "import", path = "mine.py:SquaredDistance", strength = 0.2 }
[algorithm.weighting]
name = "import"
path = "mine.py:LossPower"
q = 1.5
[options]
measure_every = 2
"""

ROOT = Path(__file__).parents[2]


def through_toml(role: type, thing: object) -> object:
    return from_table(role, tomllib.loads(tomli_w.dumps({"it": to_table(thing)}))["it"], "it")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(FILE, tmp_path / "mine.py")
    (tmp_path / "toy.toml").write_text(EXPERIMENT)
    (tmp_path / "nested.toml").write_text(NESTED)
    return tmp_path


@pytest.mark.parametrize("role", MEMBERS)
def test_to_table_names_the_class_by_its_import_path_and_from_table_makes_it_again(role):
    thing = MEMBERS[role]
    table = to_table(thing)
    assert table["name"] == "import"
    assert table["path"] == f"tests.extension.mine:{type(thing).__name__}"
    again = through_toml(role, thing)
    assert type(again) is type(thing)
    assert again == from_table(role, thing, "it")  # with schedules for numbers, as a run has it too


def test_registered_name_of_an_outside_class_is_the_name_of_the_class():
    assert registered_name(mine.ExactDiffusion()) == "ExactDiffusion"


@pytest.mark.parametrize("file", ["toy.toml", "nested.toml"])
def test_load_experiment_runs_classes_of_a_file_next_to_it_and_its_run_folder_names_them(folder, file):
    experiment = fm.load_experiment(folder / file)
    result = fm.run(experiment, out=folder / "run")
    assert result.final[0]["round"] == experiment.rounds
    written = fm.load_experiment(folder / "run" / "experiment.toml")
    assert to_table(written) == to_table(experiment)
    again = fm.run(written, out=folder / "again")
    assert (result.row() == again.row()).all()


def test_load_experiment_gives_what_the_same_python_gives(folder):
    loaded = fm.run(fm.load_experiment(folder / "toy.toml"))
    algorithm = mine.ExactDiffusion(mine.Cosine(0.2, 6), 0.4)
    made = fm.Experiment(mine.ToySites(6), mine.Barbell(2), algorithm, 6, model=mine.Wide(4))
    assert (loaded.row() == fm.run(made).row()).all()


def test_experiment_sweeps_over_fields_of_an_outside_algorithm(folder):
    experiment = fm.load_experiment(folder / "toy.toml", ["sweep.mixing=[0.2, 0.5]"])
    result = fm.run(experiment, out=folder / "run")
    alone = fm.run(fm.load_experiment(folder / "toy.toml", ["algorithm.mixing=0.5"]))
    assert [replica.algorithm.mixing for replica in result.replicas] == [0.2, 0.5]
    assert float((result.row()[1] - alone.row()[0]).abs().max()) < 1e-6


def test_load_experiment_takes_observers_of_a_file_next_to_it(folder):
    observers = """observers = [
        { name = "import", path = "mine.py:StopAt", last = 3 }, { name = "import", path = "mine.py:NoSettings" }
    ]\n"""
    (folder / "watched.toml").write_text(observers + EXPERIMENT)
    experiment = fm.load_experiment(folder / "watched.toml")
    assert fm.run(experiment, out=folder / "run").rounds == 3
    assert to_table(fm.load_experiment(folder / "run" / "experiment.toml")) == to_table(experiment)


def test_observer_in_an_experiment_stays_the_object_that_it_was():
    observer = mine.StopAt(2)
    experiment = fm.Experiment(mine.ToySites(), fm.Ring(), fm.algorithms.DSGD(0.1), 4, observers=(observer,))
    assert experiment.observers[0] is observer
    with refused("HiddenSettings", "dataclass"):
        to_table(mine.HiddenSettings(3))


# Checkpoints ----------------------------------------------------------------------------------------------------------


def test_checkpoint_of_one_class_is_not_resumed_by_another_with_the_same_fields(tmp_path):
    problem = toys.problem()
    fm.train(problem, fm.Ring(), mine.ExactDiffusion(), 4, out=tmp_path)
    with refused("LocalSteps", "ExactDiffusion", error=fm.errors.CheckpointError):
        fm.train(problem, fm.Ring(), mine.LocalSteps(), 8, out=tmp_path, resume=True)
    fm.train(problem, fm.Ring(), mine.ExactDiffusion(), 8, out=tmp_path, resume=True)


def test_checkpoint_with_an_outside_part_is_not_resumed_with_another_part(tmp_path):
    problem = toys.problem()
    fm.train(problem, fm.Ring(), fm.ChocoSGD(0.1, 0.3, compressor=mine.Ternary()), 2, out=tmp_path)
    with refused("compressor.name", error=fm.errors.CheckpointError):
        fm.train(
            problem, fm.Ring(), fm.ChocoSGD(0.1, 0.3, compressor=fm.compressors.Sign()), 4, out=tmp_path, resume=True
        )


def _local_class(gain: float) -> type[fm.algorithms.Algorithm]:
    @dataclass(frozen=True)
    class Local(mine.ExactDiffusion):
        pass

    return Local


def test_class_inside_a_function_trains_writes_its_folder_and_resumes_in_the_same_process(tmp_path):
    kind = _local_class(1.0)
    experiment = fm.Experiment(mine.ToySites(), fm.Ring(), kind(0.1), 4)
    fm.run(experiment, out=tmp_path)
    fm.run(replace(experiment, rounds=8), out=tmp_path, resume=True)
    path = tomllib.loads((tmp_path / "experiment.toml").read_text())["algorithm"]["path"]
    assert path == "tests.extension.test_imported_members:_local_class.<locals>.Local"


def test_class_inside_a_function_cannot_be_read_by_another_process():
    table = {"name": "import", "path": "somewhere:f.<locals>.Local"}
    with refused("it.path", "'f.<locals>.Local'", "function"):
        from_table(fm.algorithms.Algorithm, table, "it")


SCRIPT = """
from dataclasses import dataclass
import fairmesh as fm
from tests.extension import mine

@dataclass(frozen=True)
class Mine(mine.ExactDiffusion):
    pass

if __name__ == "__main__":
    experiment = fm.Experiment(mine.ToySites(), fm.Ring(), Mine(0.1), 3, sweep={"mixing": (0.2, 0.4)})
    assert all(type(algorithm) is Mine for algorithm in experiment.algorithms())
    fm.run(experiment, out="run")
"""


def _python(*arguments: str, folder: Path, text: str | None = None) -> subprocess.CompletedProcess:
    command = [sys.executable, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, input=text, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_class_of_a_script_is_known_by_the_script_s_file(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = _python("script.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    written = fm.load_experiment(tmp_path / "run" / "experiment.toml")
    assert to_table(written.algorithm)["path"] == f"{(tmp_path / 'script.py').resolve()}:Mine"


@pytest.mark.slow
def test_class_of_a_notebook_trains_and_reading_its_run_folder_says_what_to_do(tmp_path):
    done = _python("-", folder=tmp_path, text=SCRIPT)  # like a notebook, it has no file
    assert done.returncode == 0, done.stderr
    with refused("algorithm.path", "'Mine'", "notebook"):
        fm.load_experiment(tmp_path / "run" / "experiment.toml")


# On a cluster ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # cluster/test_launching.py launches a built-in algorithm
def test_fairmesh_launch_gives_what_one_process_gives(folder):
    command = ["-m", "fairmesh", "launch", str(folder / "toy.toml"), "--processes", "2", "--out", str(folder / "run")]
    done = _python(*command, "--set", "options.dtype=float64", folder=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    alone = fm.run(fm.load_experiment(folder / "toy.toml", ["options.dtype=float64"]), out=folder / "alone")
    found, wanted = (load_file(folder / name / "model.safetensors") for name in ("run", "alone"))
    assert alone.final[0]["round"] == 6
    for name, tensor in wanted.items():
        assert float((found[name] - tensor).abs().max()) < 1e-10


# Between organisations ------------------------------------------------------------------------------------------------


def test_agreed_knows_a_class_by_its_file_s_name_and_the_file_is_handed_out(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    contents = collected(folder / "toy.toml")
    assert contents.keys() == {"experiment.toml", "mine.py"}
    here, there = agreed(fm.load_experiment(folder / "toy.toml")), agreed(loaded(elsewhere, contents, {}))
    assert here == there
    assert here["algorithm.path"] == "mine.py:ExactDiffusion"
    assert here["algorithm.primal_step.path"] == "mine.py:Cosine"


# What is refused ------------------------------------------------------------------------------------------------------


MINE = "tests.extension.mine:"
UNUSABLE = [
    ("topology", {}, ["it.path", "missing"]),
    ("topology", {"path": 3}, ["it.path", "string", 3]),
    ("topology", {"path": "mine"}, ["it.path", "'mine'"]),
    ("topology", {"path": MINE + "Barbel"}, ["it.path", "Barbel", "'Barbell'"]),
    ("topology", {"path": MINE + "Ternary"}, ["it.path", "Ternary", "Topology"]),
    ("topology", {"path": MINE + "function"}, ["it.path", "function", "subclass"]),
    ("topology", {"path": MINE + "NotFrozen"}, ["it.path", "NotFrozen", "frozen"]),
    ("topology", {"path": MINE + "FieldsUndeclared"}, ["it.path", "FieldsUndeclared", "frozen"]),
    ("topology", {"path": MINE + "FieldCalledPath"}, ["it.path", "FieldCalledPath", "'path'"]),
    ("topology", {"path": MINE + "Barbell", "bridge": 2}, ["it.bridge:", "'bridges'"]),
    ("topology", {"path": MINE + "Barbell", "bridges": 2.5}, ["it.bridges", 2.5]),
    ("topology", {"path": MINE + "Picky", "hops": 9}, ["it:", "Picky", "KeyError", "too many hops"]),
    ("topology", {"path": MINE + "Picky", "sizes": [1]}, ["it.sizes", "set"]),
    ("schedule", {"path": MINE + "Abstract"}, ["it.path", "Abstract", "at"]),
    ("schedule", {"path": MINE + "Cosine", "start": 1}, ["it.rounds", "missing"]),
    ("compressor", {"path": MINE + "NotADataclass"}, ["it.path", "NotADataclass", "frozen"]),
]
ROLES = {
    "topology": fm.topologies.Topology,
    "schedule": fm.schedules.Schedule,
    "compressor": fm.compressors.Compressor,
}


@pytest.mark.parametrize(("role", "table", "names"), UNUSABLE)
def test_from_table_refuses_an_outside_class_it_cannot_use_and_says_which_field(role, table, names):
    with refused(*names):
        from_table(ROLES[role], {"name": "import", **table}, "it")


def test_to_table_refuses_an_object_whose_settings_are_not_known():
    with refused("NotFrozen", "frozen"):
        to_table(mine.NotFrozen())


@pytest.mark.parametrize(
    ("made", "names"),
    [
        (lambda: fm.ADGDA(primal_step=mine.Cosine("fast", 3)), ["primal_step.start", "'fast'"]),
        (lambda: fm.ADGDA(compressor=mine.Barbell()), ["compressor", "Barbell"]),
        (lambda: fm.Experiment(mine.ToySites("5"), fm.Ring(), fm.algorithms.DSGD(), 3), ["data.nodes", "'5'"]),
        (
            lambda: fm.Experiment(mine.ToySites(), fm.Ring(), mine.ExactDiffusion(0.1, "x"), 3),
            ["algorithm.mixing", "'x'"],
        ),
    ],
)
def test_fields_of_outside_classes_are_checked_where_they_enter_an_experiment_or_a_registered_class(made, names):
    with refused(*names):
        made()


def test_whole_numbers_become_floats_where_an_outside_object_enters_an_experiment():
    experiment = fm.Experiment(mine.ToySites(), fm.Ring(), mine.ExactDiffusion(1, 1), 3)
    assert experiment.algorithm == mine.ExactDiffusion(fm.schedules.Constant(1.0), 1.0)


def test_checked_is_how_an_outside_class_checks_its_fields_on_construction():
    kind = checked(dataclass(frozen=True)(type("Kind", (mine.Barbell,), {"__annotations__": {}})))
    with refused("bridges", "'two'"):
        kind("two")


def test_field_may_be_of_one_member_and_a_list_may_hold_different_types():
    @dataclass(frozen=True)
    class Sheet:
        compressor: fm.compressors.Quantize
        pair: tuple[int, str] = (1, "a")

    made = from_table(Sheet, {"compressor": {"name": "quantize", "bits": 3}, "pair": [2, "b"]})
    assert made == Sheet(fm.compressors.Quantize(3), (2, "b"))
    with refused("compressor", "Quantize", "Sign"):
        from_table(Sheet, {"compressor": "sign"})
    with refused("pair", 2, 1):
        from_table(Sheet, {"compressor": "quantize", "pair": [2]})
