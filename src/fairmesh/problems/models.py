"""The paper's models, and a user's own by import path."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fairmesh.config.imports import called
from fairmesh.config.tables import register
from fairmesh.errors import BadInput


class Model(ABC):
    """Makes a module for data of a given shape and number of classes."""

    @abstractmethod
    def build(self, shape: torch.Size, classes: int) -> nn.Module:
        """A new module, its weights drawn from torch's current generator."""


@dataclass(frozen=True)
class Logistic(Model):
    """Multinomial logistic regression, starting from zero."""

    def build(self, shape: torch.Size, classes: int) -> nn.Module:
        layer = nn.Linear(shape.numel(), classes)
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
        return nn.Sequential(nn.Flatten(), layer)


def _dense(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


@dataclass(frozen=True)
class FullyConnected(Model):
    """One hidden layer of rectified units, Glorot uniform; 25 in the paper."""

    hidden: int = 25

    def __post_init__(self):
        if self.hidden < 1:
            raise BadInput(f"hidden must be a number of units >= 1, got {self.hidden}")

    def build(self, shape: torch.Size, classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), _dense(shape.numel(), self.hidden), nn.ReLU(), _dense(self.hidden, classes))


@dataclass(frozen=True)
class PaperCNN(Model):
    """conv16 - pool - conv32 - pool - 64 - 32 - classes, 3 x 3 convolutions without padding: 81,290 parameters on
    CIFAR-10, 408,727 on COOS7."""

    def build(self, shape: torch.Size, classes: int) -> nn.Module:
        if len(shape) != 3 or min(shape[1:]) < 10:
            raise BadInput(
                f"the paper's CNN needs images (channels, height, width) of 10 x 10 or more, got {tuple(shape)}"
            )
        channels, height, width = shape
        convolutions = [nn.Conv2d(channels, 16, 3), nn.Conv2d(16, 32, 3)]
        for layer in convolutions:
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        features = 32 * (((height - 2) // 2 - 2) // 2) * (((width - 2) // 2 - 2) // 2)
        return nn.Sequential(
            convolutions[0], nn.ReLU(), nn.AvgPool2d(2), convolutions[1], nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(),
            _dense(features, 64), nn.ReLU(), _dense(64, 32), nn.ReLU(), _dense(32, classes),
        )  # fmt: skip


@dataclass(frozen=True)
class ImportedModel(Model):
    """A module class, or a function that returns a module, at 'package.module:name' or 'file.py:name'."""

    path: str
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def build(self, shape: torch.Size, classes: int) -> nn.Module:
        made = called(self.path, self.arguments, "model")
        if isinstance(made, Model):  # a class of models with no fields of its own
            return made.build(shape, classes)
        if not isinstance(made, nn.Module):
            raise BadInput(f"model.path: {self.path} made a {type(made).__name__}, not an nn.Module")
        return made


register(Model, {"logistic": Logistic, "fc": FullyConnected, "paper-cnn": PaperCNN, "import": ImportedModel})
