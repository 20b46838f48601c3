"""The job as every engine but fairmesh gets it: each site's rows, a model, a step of SGD, and the final accuracies.

Needs torch and NumPy only, since an engine may live in an environment of its own.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class Net(nn.Module):
    """Logistic regression, all weights zero. NVFlare's jobs name a model by its class.

    Args:
        inputs: Numbers in an image. Default: 64.
        classes: Default: 10.
    """

    def __init__(self, inputs: int = 64, classes: int = 10):
        super().__init__()
        self.layer = nn.Linear(inputs, classes)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(images.flatten(1))


class Task:
    """The job in a folder that `written` has made.

    Args:
        folder: Has sites.npz and task.json.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        settings: dict[str, Any] = json.loads((self.folder / "task.json").read_text())
        self.nodes, self.batch, self.step = settings["nodes"], settings["batch"], settings["step"]
        self._arrays = dict(np.load(self.folder / "sites.npz"))

    def model(self) -> nn.Module:
        """Returns the model that every site starts from."""
        return Net(self._arrays["inputs-0"][0].size)

    def rows(self, node: int, of: str = "") -> tuple[Tensor, Tensor]:
        """Returns a site's training rows, or its test rows with of = "test-"."""
        inputs, targets = (torch.from_numpy(self._arrays[f"{of}{what}-{node}"]) for what in ("inputs", "targets"))
        return inputs, targets

    def batches(self, node: int) -> "Batches":
        """Returns a site's batches, without end."""
        return Batches(*self.rows(node), self.batch)

    def train(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
        """Takes one step of SGD on a batch."""
        optimizer = torch.optim.SGD(model.parameters(), lr=self.step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    def tell(self, model: nn.Module, model_bytes: float) -> None:
        """Writes the outcome: the accuracies of a model at all sites, and the bytes of the models that a node sends in
        a round."""
        accuracies = []
        with torch.no_grad():
            for node in range(self.nodes):
                inputs, targets = self.rows(node, "test-")
                accuracies.append((model(inputs).argmax(dim=1) == targets).double().mean().item())
        tell(self.folder, accuracies, model_bytes)

    def size(self) -> int:
        """Returns the bytes of a model in float32."""
        return sum(4 * parameter.numel() for parameter in self.model().parameters())


class Batches:
    """A site's batches, drawn with replacement."""

    def __init__(self, inputs: Tensor, targets: Tensor, size: int):
        self._inputs, self._targets, self._size = inputs, targets, size

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(self._targets), (self._size,))
        return self._inputs[chosen], self._targets[chosen]


def tell(folder: Path, accuracies: list[float], message_bytes: float) -> None:
    """Writes an outcome."""
    outcome = {"worst": min(accuracies), "mean": sum(accuracies) / len(accuracies), "message_bytes": message_bytes}
    (folder / "outcome.json").write_text(json.dumps(outcome))
