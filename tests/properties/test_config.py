"""Settings: every configured object survives a TOML file, and what a file gets wrong is refused by name."""

import sys
import tomllib
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import tomli_w
import torch
from hypothesis import given
from hypothesis import strategies as st

import fairmesh as fm
from fairmesh.algorithms import Algorithm
from fairmesh.config.imports import imported
from fairmesh.config.registry import registered, registered_name
from fairmesh.config.tables import from_table, to_table
from fairmesh.data.datasets import Data
from fairmesh.errors import nearest
from fairmesh.problems.models import Model
from tests import toys
from tests.refusals import refused

FAMILIES = {
    fm.compressors.Compressor: toys.COMPRESSORS,
    fm.topologies.Topology: toys.TOPOLOGIES,
    fm.regularizers.Regularizer: toys.REGULARIZERS,
    Algorithm: toys.ALGORITHMS,
    fm.weighting.Weighting: toys.WEIGHINGS,
    fm.optimizers.Optimizer: toys.OPTIMIZERS,
    fm.schedules.Schedule: {
        "constant": fm.schedules.Constant(0.1),
        "geometric": fm.schedules.Geometric(2.0, 0.998),
        "limited": fm.schedules.Limited(0.5, power=1.5),
        "limited, measured": fm.schedules.Limited(0.5, power=1.5, limit=0.1),
        "linear": fm.schedules.Linear(0.5),
        "linear with an end": fm.schedules.Linear(0.5, 5000),
        "measured": fm.schedules.Measured(factor=0.5),
        "measured, with a start": fm.schedules.Measured(0.02, power=2.0),
        "polynomial": fm.schedules.Polynomial(0.5, power=1.5),
        "staircase": fm.schedules.Staircase(1.0, 0.5, 100),
        "theorem 1": fm.schedules.Theorem1(1000),
        "theorem 2 dual": fm.schedules.Theorem2Dual(3.0, 1000),
        "theorem 2 primal": fm.schedules.Theorem2Primal(3.0, 2.5, 1000),
    },
    Data: {
        "digits": fm.data.Digits(),
        "digits by class": fm.data.Digits(nodes=20, split="class", seed=3, test_share=0.5),
        "fashion-mnist": fm.data.FashionMNIST(fm.data.OneClass(20), folder="somewhere"),
        "mnist": fm.data.MNIST(fm.data.Even(20, seed=3)),
        "cifar-10": fm.data.CIFAR10(fm.data.Contrast(8, (0.5, 2.0), tests="share", transform="formula")),
        "coos7": fm.data.COOS7(fm.data.BySite((3, 1)), per_node=50),
        "image-folder": fm.data.ImageFolder("scans", size=(32, 32)),
        "table": fm.data.Table(
            {"lyon": "a.csv"}, "outcome", predict="numbers", missing_values={"*": ("?",), "age": (-9,)}
        ),
        "parquet-rows": fm.data.ParquetRows("visits.parquet", "outcome", site="clinic", size=(8, 8), workers=2),
        "npz": fm.data.Npz("arrays.npz", fm.data.Dirichlet(5, 0.1), test_share=0.5),
        "held-out": fm.data.HeldOut(fm.data.FashionMNIST(), share=0.1),
        "fewer": fm.data.Fewer(fm.data.Digits(), train=20, test=10),
        "corrupted": fm.data.Corrupted(fm.data.FashionMNIST(fm.data.Dirichlet(20)), (3, 7), how="inputs", seed=2),
        "import": fm.data.ImportedData("tests.toys:sites", {"n": 4, "sizes": [3, 4, 5, 6]}),
    },
    fm.data.Partition: {
        "one-class": fm.data.OneClass(20),
        "contrast": fm.data.Contrast(),
        "instrument": fm.data.Instrument(4, 1, "camera", "share"),
        "by-site": fm.data.BySite((8, 2)),
        "dirichlet": fm.data.Dirichlet(7, 0.3, seed=1),
        "shards": fm.data.Shards(5, 3),
        "quantity": fm.data.Quantity(5, 2.0),
        "even": fm.data.Even(3),
    },
    fm.personalization.Personalization: {
        "fine-tuned": fm.personalization.FineTuned(steps=50, step=0.1),
        "choice": fm.personalization.Choice(steps=100, folds=4),
        "mixture": fm.personalization.Mixture(folds=3, share=0.3),
    },
    Model: {
        "logistic": fm.models.Logistic(),
        "fc": fm.models.FullyConnected(7),
        "paper-cnn": fm.models.PaperCNN(),
        "lora": fm.models.LoRA(fm.models.FullyConnected(7), rank=4, targets=("1",), head=("3",), seed=3),
        "import": fm.models.ImportedModel("tests.toys:small_model"),
    },
}
EVERY_MEMBER = pytest.mark.parametrize(
    ("role", "thing"),
    [
        pytest.param(role, thing, id=f"{role.__name__}-{name}")
        for role, table in FAMILIES.items()
        for name, thing in table.items()
    ],
)


def through_a_file(role: Any, thing: Any) -> Any:
    text = tomli_w.dumps({"it": to_table(thing)})
    return from_table(role, tomllib.loads(text)["it"], "it")


@EVERY_MEMBER
def test_table_of_every_registered_member_survives_a_toml_file(role, thing):
    again = through_a_file(role, thing)
    assert type(again) is type(thing)
    assert again == thing
    assert to_table(again) == to_table(thing)


@pytest.mark.parametrize("role", FAMILIES)
def test_table_may_be_the_bare_name_of_a_member_without_required_fields(role):
    tried = 0
    for name, member in registered(role).items():
        try:
            default = member()
        except (TypeError, fm.BadInput):  # it needs something
            continue
        assert from_table(role, name) == default
        assert registered_name(default) == name
        tried += 1
    assert tried or role is fm.schedules.Schedule


@given(
    start=st.floats(0, 1e300),
    ratio=st.floats(min_value=5e-324, max_value=1),
    every=st.integers(1, 2**62),
    bits=st.integers(1, 16),
    block=st.none() | st.integers(1, 10**9),
    offsets=st.lists(st.integers(1, 100), min_size=1, max_size=4),
    edges=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=5),
)
def test_table_keeps_numbers_of_any_size_none_and_nested_members(start, ratio, every, bits, block, offsets, edges):
    quantize, staircase = fm.compressors.Quantize(bits, block), fm.schedules.Staircase(start, ratio, every)
    graphs = fm.topologies.Changing(
        (
            fm.topologies.Circulant(tuple(offsets)),
            fm.topologies.Changing((fm.topologies.Edges(tuple(edges)), fm.topologies.Star("max-degree"))),
        ),
        3,
    )
    algorithm = fm.ADGDA(primal_step=staircase, dual_step=start, compressor=quantize)
    for role, thing in (
        (fm.compressors.Compressor, quantize),
        (fm.schedules.Schedule, staircase),
        (fm.topologies.Topology, graphs),
        (Algorithm, algorithm),
    ):
        assert through_a_file(role, thing) == thing


def test_table_holds_the_name_and_the_fields_and_leaves_out_none():
    assert to_table(fm.compressors.Sign()) == {"name": "sign"}
    assert to_table(fm.compressors.Sign(block=3)) == {"name": "sign", "block": 3}
    assert to_table(fm.topologies.Changing((fm.Ring(), fm.topologies.Torus(2, 3)))) == {
        "name": "changing",
        "topologies": [
            {"name": "ring", "mixing": "metropolis"},
            {"name": "torus", "rows": 2, "columns": 3, "mixing": "metropolis"},
        ],
        "every": 1,
    }
    assert to_table(toys.REGULARIZERS["custom"])["function"] == "tests.toys:_user_entropy"


def test_from_table_takes_a_number_as_a_constant_step():
    assert from_table(fm.schedules.Schedule, 2) == fm.schedules.Constant(2.0)
    assert from_table(fm.schedules.Schedule | float, 0.5) == fm.schedules.Constant(0.5)
    assert from_table(Algorithm, {"name": "ad-gda", "dual_step": 0.03}) == fm.ADGDA(dual_step=0.03)


def test_from_table_takes_objects_already_made_as_they_are():
    ring = fm.Ring()
    assert from_table(fm.topologies.Topology, ring) is ring
    assert from_table(Algorithm, {"name": "ad-gda", "compressor": fm.compressors.Sign()}) == fm.ADGDA(
        compressor=fm.compressors.Sign()
    )


# Types, on a table of one field of each kind.


@dataclass(frozen=True)
class Inner:
    depth: int = 1


@dataclass(frozen=True)
class Sheet:
    whole: int
    number: float = 1.0
    flag: bool = False
    word: str = "w"
    choice: Literal["left", "right"] = "left"
    numbers: tuple[float, ...] = ()
    pairs: tuple[tuple[int, ...], ...] = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    maybe: int | None = None
    function: Callable[..., Any] | None = None
    anything: Any = None
    inner: Inner = field(default_factory=Inner)
    compressor: fm.compressors.Compressor = field(default_factory=fm.compressors.Identity)
    step: fm.schedules.Schedule | float = 1.0


def test_table_with_every_kind_of_field_survives_a_toml_file():
    sheet = Sheet(
        whole=3, number=0.1, flag=True, word="ü\n\"", choice="right", numbers=(1.0, 2.5), pairs=((1, 2), (3,)),
        limits={"a": 1, "b c": 2}, maybe=4, function=torch.relu, anything=[1, "x", {"y": 2.0}], inner=Inner(5),
        compressor=fm.compressors.TopKQuantize(0.5, 3), step=fm.schedules.Theorem1(9),
    )  # fmt: skip
    table = to_table(sheet)
    assert from_table(Sheet, tomllib.loads(tomli_w.dumps({**table, "function": "torch:relu"}))) == sheet
    assert from_table(Sheet, {"whole": 3}) == Sheet(3)


def test_from_table_takes_a_whole_number_for_a_number():
    sheet = from_table(Sheet, {"whole": 3, "number": 2, "numbers": [1, 2]})
    assert type(sheet.number) is float
    assert [type(number) for number in sheet.numbers] == [float, float]


@pytest.mark.parametrize(
    ("table", "names"),
    [
        ({"whole": 1.0}, ["run.whole", "1.0"]),
        ({"whole": True}, ["run.whole", "True"]),
        ({"whole": "3"}, ["run.whole", "'3'"]),
        ({"whole": [1]}, ["run.whole", "[1]"]),
        ({"whole": {"a": 1}}, ["run.whole", "a table"]),
        ({"number": "fast"}, ["run.number", "'fast'"]),
        ({"number": False}, ["run.number", "False"]),
        ({"flag": 1}, ["run.flag", "1"]),
        ({"word": 3}, ["run.word", "3"]),
        ({"choice": "rihgt"}, ["run.choice", "'rihgt'", "'left'", "'right'"]),
        ({"choice": 5}, ["run.choice", "5", "'left'", "'right'"]),
        ({"numbers": 3.0}, ["run.numbers", "3.0"]),
        ({"numbers": [1, "x"]}, ["run.numbers[1]", "'x'"]),
        ({"pairs": [[0, 1], [1, 2.5]]}, ["run.pairs[1][1]", "2.5"]),
        ({"limits": [1]}, ["run.limits", "[1]"]),
        ({"limits": {"a": "b"}}, ["run.limits.a", "'b'"]),
        ({"maybe": "many"}, ["run.maybe", "'many'"]),
        ({"function": 5}, ["run.function", "5"]),
        ({"inner": 3}, ["run.inner", "3"]),
        ({"inner": {"depth": "x"}}, ["run.inner.depth", "'x'"]),
        ({"inner": {"dept": 1}}, ["run.inner.dept", "'depth'"]),
        ({"compressor": 5}, ["run.compressor", "5"]),
        ({"compressor": {"bits": 3}}, ["run.compressor", "none", "quantize", "random-k"]),
        ({"compressor": "quantise"}, ["run.compressor", "'quantise'", "'quantize'"]),
        ({"compressor": {"name": "zip"}}, ["run.compressor", "'zip'", "none", "quantize"]),
        ({"compressor": {"name": ["sign"]}}, ["run.compressor", "'sign'"]),
        ({"compressor": {"name": "sign", "bits": 1}}, ["run.compressor.bits", "block"]),
        ({"compressor": {"name": "quantize", "bit": 1}}, ["run.compressor.bit", "'bits'"]),
        ({"compressor": {"name": "quantize", "bits": 4.5}}, ["run.compressor.bits", "4.5"]),
        ({"compressor": {"name": "quantize", "bits": 99}}, ["run.compressor.bits", "[1, 16]", "99"]),
        ({"step": {"name": "geometric", "start": 1.0}}, ["run.step.ratio"]),
        ({"step": {"name": "geometrc", "start": 1.0}}, ["run.step", "'geometrc'", "'geometric'"]),
        ({"step": -1}, ["run.step", "-1.0"]),
        ({"step": [1]}, ["run.step", "[1]"]),
        ({"wholes": 1}, ["run.wholes", "'whole'"]),
        ({"zzz": 1}, ["run.zzz", "anything", "choice", "compressor", "flag"]),
    ],
    ids=lambda value: str(value)[:50],
)
def test_from_table_refuses_a_wrong_value_with_its_dotted_path(table, names):
    with refused(*names) as caught:
        from_table(Sheet, {"whole": 1, **table}, "run")
    assert str(caught.value).startswith((f"{names[0]}: ", f"{names[0]} must "))


def test_from_table_names_missing_fields():
    with refused("run.whole"):
        from_table(Sheet, {}, "run")
    with refused("whole"):
        from_table(Sheet, {})
    with refused("graph.rows"):
        from_table(fm.topologies.Topology, {"name": "torus", "columns": 3}, "graph")


@EVERY_MEMBER
def test_from_table_refuses_a_mistyped_key_and_suggests_the_right_one(role, thing):
    table = to_table(thing)
    fields = [key for key in table if key != "name"]
    with refused("it.qqqq", *fields):
        from_table(role, {**table, "qqqq": 1}, "it")
    for key in fields:
        mistyped = {(f"{word}x" if word == key else word): value for word, value in table.items()}
        with refused(f"it.{key}x", f"'{key}'"):
            from_table(role, mistyped, "it")


@pytest.mark.parametrize("role", FAMILIES)
def test_from_table_suggests_the_nearest_name_for_a_mistyped_one(role):
    for name in registered(role):
        with refused("it: ", role.__name__.lower(), f"'{name}e'", f"'{name}'"):
            from_table(role, {"name": f"{name}e"}, "it")


def test_nearest_lists_what_is_known_for_a_word_like_no_other():
    assert "ring, star" in nearest("qqqq", ["ring", "star"])
    assert "'ring'" in nearest("rnig", ["ring", "star"])
    assert "star" not in nearest("rnig", ["ring", "star"])
    assert "none" in nearest("x", [])


# What cannot be written, and what cannot be imported.


@pytest.mark.parametrize("value", [torch.ones(2), object(), {"a": {1, 2}}, 1j])
def test_to_table_refuses_what_a_file_cannot_hold(value):
    with refused("set" if isinstance(value, dict) else type(value).__name__):
        to_table(value)


def test_registered_name_of_an_object_of_no_role_is_its_class():
    assert registered_name(Inner()) == "Inner"


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("torch.nn", ["'torch.nn'", "package.module:name", "file.py:name"]),
        ("torch.nn:", ["'torch.nn:'"]),
        (":relu", ["':relu'"]),
        (".:relu", ["'.:relu'"]),
        ("no_such_module_here:f", ["'no_such_module_here'"]),
        ("no/such/file.py:f", ["'no/such/file.py'"]),
        ("torch.nn:Lineer", ["'torch.nn'", "'Lineer'", "'Linear'"]),
        ("torch.nn:functional.nothing", ["'torch.nn'", "'functional.nothing'"]),
    ],
)
def test_import_path_that_leads_nowhere_is_refused_by_its_parts(path, names):
    with refused("model: ", *names):
        imported(path, "model")


def test_import_path_gives_the_object_of_a_module_and_of_what_is_inside_it():
    assert imported("tests.toys:sites", "data") is toys.sites
    assert imported("torch:nn.Linear", "model") is torch.nn.Linear


@pytest.fixture
def users_folder(tmp_path, monkeypatch):
    """A user's folder, as the current one, with files whose names Python's own modules have."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "types.py").write_text("def mine(w, p):\n    return -(w - p).square().sum()\n")
    (tmp_path / "sub" / "types.py").write_text("def mine(w, p):\n    return -((w - p) ** 4).sum()\n")
    (tmp_path / "fm_users_module_in_folder.py").write_text("answer = 42\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_import_path_of_a_users_file_never_replaces_pythons_own_module(users_folder):
    assert imported("types.py:mine", "regularizer").__name__ == "mine"
    assert sys.modules["types"] is types


def test_import_path_of_a_users_function_is_written_as_it_was_read(users_folder):
    for path in ("types.py:mine", "sub/types.py:mine"):
        table = {"name": "custom", "function": path, "strength": 0.5}
        assert to_table(from_table(fm.regularizers.Regularizer, table, "regularizer")) == table


def test_import_path_finds_a_module_in_the_current_folder(users_folder):
    assert imported("fm_users_module_in_folder:answer", "data") == 42


def test_key_below_the_wrong_section_is_sent_to_the_top_of_the_file(tmp_path):
    path = tmp_path / "experiment.toml"
    path.write_text('[data]\nname = "digits"\nnodes = 4\nsplits = 10\n')
    with refused("data.splits", "top of the file"):
        fm.load_experiment(path)
    path.write_text('[data]\nname = "digits"\nnodse = 4\n')
    with refused("data.nodse", "'nodes'") as caught:
        fm.load_experiment(path)
    assert "top of the file" not in str(caught.value)
