"""Models that experiment files can name: the paper's, and a user's own by import path. Public as `fm.models`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fairmesh.config.imports import called
from fairmesh.config.tables import register
from fairmesh.errors import BadInput

__all__ = ["FullyConnected", "ImportedModel", "Logistic", "Model", "PaperCNN"]


class Model(ABC):
    """Base class of models: makes a module for data of a given shape and number of classes.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> fm.models.FullyConnected(hidden=8).build(torch.Size([3]), classes=2)[1]
        Linear(in_features=3, out_features=8, bias=True)
    """

    @abstractmethod
    def build(self, shape: torch.Size, classes: int) -> nn.Module:
        """Returns a new module, its weights drawn from torch's global generator.

        Args:
            shape: The shape of one input.
            classes: The number of classes, or of numbers to predict.
        """


@dataclass(frozen=True)
class Logistic(Model):
    """Multinomial logistic regression on the flattened input, with all weights starting at zero.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> module = fm.models.Logistic().build(torch.Size([8, 8]), classes=10)
        >>> sum(p.numel() for p in module.parameters())
        650
    """

    def build(self, shape: torch.Size, classes: int) -> nn.Module:
        layer = nn.Linear(shape.numel(), classes)
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
        return nn.Sequential(nn.Flatten(), layer)


class InUnits(nn.Module):
    """A model of a number in multiples of its spread, whose outputs are in the number's own units.

    Args:
        model: The model.
        center: The number where the model's scale begins.
        scale: The unit of the model's scale.
    """

    def __init__(self, model: nn.Module, center: float, scale: float):
        super().__init__()
        self.model, self.center, self.scale = model, center, scale

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.model(inputs) * self.scale + self.center

    def extra_repr(self) -> str:
        return f"center={self.center!r}, scale={self.scale!r}"


def build_in_units(model: Model, shape: torch.Size, center: float, scale: float) -> nn.Module:
    """Returns a new module that predicts one number in its own units."""
    return InUnits(model.build(shape, 1), center, scale)


def _dense(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


@dataclass(frozen=True)
class FullyConnected(Model):
    """A network with one hidden layer of ReLU units, initialised by Glorot's uniform rule.

    Args:
        hidden: Units of the hidden layer, >= 1; the AD-GDA paper uses 25. Default: 25.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> module = fm.models.FullyConnected(hidden=25).build(torch.Size([28, 28]), classes=10)
        >>> sum(p.numel() for p in module.parameters())
        19885
    """

    hidden: int = 25

    def __post_init__(self):
        if self.hidden < 1:
            raise BadInput(f"hidden must be a number of units >= 1, got {self.hidden}")

    def build(self, shape: torch.Size, classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), _dense(shape.numel(), self.hidden), nn.ReLU(), _dense(self.hidden, classes))


@dataclass(frozen=True)
class PaperCNN(Model):
    """The convolutional network of the AD-GDA paper: conv 16, pool, conv 32, pool, dense 64, dense 32, classes.

    Convolutions are 3 x 3 without padding and pooling averages 2 x 2 pixels. It has 81,290 parameters on CIFAR-10 and
    408,727 on COOS7. Images must be (channels, height, width) of at least 10 x 10 pixels.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> module = fm.models.PaperCNN().build(torch.Size([3, 32, 32]), classes=10)
        >>> sum(p.numel() for p in module.parameters())
        81290
    """

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
    """A model of your own, which experiment files name by its import path.

    Args:
        path: Where it is: "package.module:name" or "file.py:name" of a module class, or of a function that returns a
            module.
        arguments: Keyword arguments for the class or function. Default: {}.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> model = fm.models.ImportedModel("torch.nn:Linear", {"in_features": 3, "out_features": 2})
        >>> model.build(torch.Size([3]), classes=2)
        Linear(in_features=3, out_features=2, bias=True)
    """

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
