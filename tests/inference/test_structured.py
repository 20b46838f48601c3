"""Models with several inputs or outputs are exported with all of them; predict says that it does not take them."""

from pathlib import Path

import pytest
import torch
from torch import nn

import fairmesh as fm
from tests import toys
from tests.refusals import refused

ROWS = 12


def masked() -> nn.Module:
    """Takes two inputs by name, as a text classifier does, and returns a dictionary."""

    def forward(self, ids, mask):
        hidden = (self.embedding(ids) * mask.unsqueeze(-1)).sum(dim=1)
        return {"logits": self.head(hidden), "hidden": hidden}

    return toys.module(forward, embedding=nn.Embedding(5, 4), head=nn.Linear(4, 2))


def pair() -> nn.Module:
    """Takes a tuple, one of images as bytes, and returns a tuple."""

    def forward(self, image, age):
        return self.one(image.flatten(1)) + self.other(age), age.sum(dim=1)

    return toys.module(forward, one=nn.Linear(4, 2), other=nn.Linear(3, 2))


@pytest.fixture(scope="module")
def trained() -> dict[str, fm.Result]:
    torch.manual_seed(0)
    labels = torch.arange(ROWS) % 2
    ids, mask = torch.randint(0, 5, (ROWS, 6)), torch.ones(ROWS, 6)
    images = torch.randint(0, 256, (ROWS, 2, 2), dtype=torch.uint8), torch.randn(ROWS, 3)
    problems = {
        "names": fm.Problem(masked(), [{"ids": ids, "mask": mask, "labels": labels}] * 2),
        "tuple": fm.Problem(pair(), [(images, labels)] * 2, read=lambda outputs: outputs[0]),
    }
    return {name: fm.train(made, fm.Ring(), fm.algorithms.DSGD(0.1), 1, trace="no") for name, made in problems.items()}


@pytest.mark.parametrize("kind", ["names", "tuple"])
def test_file_of_torch_export_gives_what_the_module_gives(trained, kind, tmp_path):
    model = fm.inference.TrainedModel.of(trained[kind])
    about = fm.export(model, tmp_path / "model.pt2", "torch-export")
    program = torch.export.load(tmp_path / "model.pt2").module()
    if kind == "names":
        inputs = {"ids": torch.randint(0, 5, (5, 6)), "mask": torch.rand(5, 6)}
        wanted = model.module(**inputs)
        assert [part["name"] for part in about["input"]["parts"]] == ["ids", "mask"]
        assert about["output"]["parts"] == ["logits", "hidden"]
        found = dict(zip(about["output"]["parts"], program(*inputs.values())))
        for name in wanted:
            torch.testing.assert_close(found[name], wanted[name])
    else:
        inputs = torch.randint(0, 256, (5, 2, 2), dtype=torch.uint8), torch.randn(5, 3)
        wanted = model.module(inputs[0] / 255.0, inputs[1])
        for one, other in zip(program(*inputs), wanted):
            torch.testing.assert_close(one, other)
    assert about["largest_difference"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["names", "tuple"])
def test_file_of_onnx_gives_what_the_module_gives(trained, kind, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    about = fm.export(trained[kind], tmp_path / "model.onnx", "onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    assert [one.name for one in session.get_inputs()] == [part["name"] for part in about["input"]["parts"]]
    assert len(session.get_outputs()) == 2
    assert about["largest_difference"] < 1e-4


def test_file_of_weights_describes_inputs_and_outputs(trained, tmp_path: Path):
    about = fm.export(trained["names"], tmp_path / "model.safetensors", "safetensors")
    assert about["input"]["kind"] == about["output"]["kind"] == "structure"
    module = masked()
    fm.inference.load_weights(tmp_path / "model.safetensors", module)
    assert torch.equal(module.head.weight, trained["names"].state_dict()["head.weight"])


def test_predict_refuses_structures_with_the_way_out(trained):
    with refused("several inputs or outputs", "fm.export", "model.module"):
        fm.predict(fm.inference.TrainedModel.of(trained["names"]), torch.zeros(2, 6))
