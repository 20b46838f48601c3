"""The examples of training code of one's own, and the adapters that they use."""

import importlib.util
import math
from pathlib import Path
from types import ModuleType

import pytest

import fairmesh as fm
from fairmesh.problems.local_work import unpacked_memory
from tests.pairwise import some_quick
from tests.refusals import refused

EXAMPLES = Path(__file__).parents[2] / "examples" / "own_training"
NEEDS = {
    "plain_loop": "torch",
    "hugging_face": "accelerate",
    "hugging_face_lora": "peft",
    "lightning_module": "lightning",
}

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*", "ignore::DeprecationWarning", "ignore::FutureWarning")


def example(name: str) -> ModuleType:
    pytest.importorskip(NEEDS[name])
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def steps_in(name: str, result: fm.Result) -> int:
    """How many steps the optimizer of the first site has taken."""
    kept = unpacked_memory(result.state.companions.trainer.memory[0, 0])
    optimizer = kept["optimizers"][0] if name == "lightning_module" else kept["optimizer"]
    return int(optimizer["state"][0]["step"])


@some_quick("name", NEEDS.keys(), "plain_loop", "hugging_face", "lightning_module")  # each adapter once in CI
def test_optimizer_continues_where_the_round_before_ended(name: str):
    result = example(name).main(rounds=2)
    batch = 16 if name.startswith("hugging_face") else 32
    assert steps_in(name, result) == 2 * math.ceil(len(result.problem.sites[0].train) / batch)


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_examples_learn(name: str):
    assert example(name).main().worst > 0.7


@pytest.mark.slow
@pytest.mark.parametrize("in_a_list", [True, False])
def test_lightning_takes_callbacks_as_its_trainer_does(in_a_list: bool):
    module, begun = example("lightning_module"), []

    class Noting(module.lightning.Callback):
        def on_train_start(self, trainer, pl_module):
            begun.append(trainer)

    def train(module, data, ctx):
        fm.trainers.fit_lightning(module, data, ctx, max_steps=1, callbacks=[Noting()] if in_a_list else Noting())

    sites = fm.data.Digits(nodes=2, odd=1).sites()
    fm.train(fm.Problem(module.Classifier(), sites, trainer=fm.trainers.LocalTrainer(train)), rounds=1)
    assert len(begun) == 2


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "lightning.pytorch", None)
    with refused("fairmesh[lightning]"):
        fm.trainers.fit_lightning(None, None, None)
