"""Models of torchvision, where it is installed, train as they are and under each BatchNorm policy."""

import runpy
from pathlib import Path

import pytest
import torch

import fairmesh as fm
from tests.late import late

torchvision = late("torchvision")
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap runs some operations in a loop
EXAMPLE = Path(__file__).parents[2] / "examples" / "models" / "resnet.py"


def sites(count: int) -> list[fm.Site]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(8) % 4
    images = [torch.randn(8, 3, 32, 32, generator=generator) + labels[:, None, None, None] for _ in range(count)]
    return [fm.Site((one, labels), test=(one, labels)) for one in images]


def losses(model: torch.nn.Module, rounds: int = 6, **fields) -> list[float]:
    problem = fm.Problem(model, sites(2), sampling=fm.Sampling(4, order="cyclic"), **fields).prepared
    result = fm.train(problem, fm.Ring(), fm.algorithms.DSGD(0.02), rounds, measure_every=rounds, trace="no")
    problem.initial_model(0).load_state_dict(result.state_dict())
    return [record["loss"]["mean"] for record in result.records]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["frozen", "local", "shared", "convert"])
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small"])
def test_torchvision_model_trains_under_each_policy(name: str, policy: str):
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, num_classes=4)
    first, last = losses(model, batch_norm=policy)
    assert last != first
    assert torch.isfinite(torch.tensor([first, last])).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["efficientnet_b0", "convnext_tiny", "vit"])
def test_torchvision_model_with_stochastic_depth_or_attention_dropout_trains_and_repeats(name: str):
    torch.manual_seed(0)
    if name == "vit":
        model = torchvision.models.VisionTransformer(32, 8, 1, 2, 16, 16, attention_dropout=0.1, num_classes=4)
    else:
        model = torchvision.models.get_model(name, num_classes=4)
    fields = {"batch_norm": "convert"} if name == "efficientnet_b0" else {}
    assert losses(model, 2, **fields) == losses(model, 2, **fields)


def test_resnet_of_the_example_is_torchvisions():
    torch.manual_seed(0)
    ours, theirs = (
        runpy.run_path(str(EXAMPLE))["ResNet18"](classes=4).eval(),
        torchvision.models.resnet18(num_classes=4),
    )
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs.eval()(images))
