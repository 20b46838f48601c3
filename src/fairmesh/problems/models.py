"""Models that experiment files can name: the paper's, and a user's own by import path. Public as `fm.models`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import nn

from fairmesh.config.imports import called
from fairmesh.config.ranges import Count, Within
from fairmesh.config.tables import checked, register
from fairmesh.errors import BadInput
from fairmesh.problems.frozen_features import frozen_features
from fairmesh.problems.lora import with_adapters

__all__ = ["FullyConnected", "ImportedModel", "LoRA", "Logistic", "Model", "PaperCNN", "frozen_features"]


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

    hidden: Count = 25

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


@checked
@dataclass(frozen=True)
class LoRA(Model):
    """A frozen model with trained low-rank adapters, by `peft` (`pip install 'fairmesh[lora]'`).

    An adapter adds (alpha / rank) B A x to the output of a layer that gets x. B begins at zero. A is drawn from a seed,
    is the same at all nodes, and is frozen: then averaging B is averaging B A, so averaging nodes is averaging their
    models (FFA-LoRA). Only B and the head are trained and sent. docs/howto/lora.md shows how to use it.

    Args:
        base: The model to adapt. None if it is given to `adapt`. Default: None.
        rank: Rank of the adapters, >= 1. Default: 8.
        alpha: Scale of the adapters, > 0; their outputs are multiplied by alpha / rank. Default: 16.
        targets: Names of the layers to adapt, or the ends of their names: ("query", "value"); ("all-linear",) for all
            linear layers but the last one. () for those that peft chooses for an architecture of transformers.
            Default: ().
        head: Names of layers that are trained whole, such as ("classifier",). Default: ().
        dropout: Share of the inputs that adapters drop in training, in [0, 1). Default: 0.0.
        seed: The seed that A is drawn from, >= 0. It does not depend on the run's seed. Default: 0.
        train_a: Whether A is trained and averaged too. The average of A times the average of B is not the average of
            their products, so models may get worse by averaging where sites differ. Default: False.

    Example:
        >>> import fairmesh as fm
        >>> lora = fm.models.LoRA(rank=4, targets=("query", "value"), head=("classifier",))
        >>> lora.alpha / lora.rank
        4.0

        `fm.Problem(lora.adapt(module), sites)` trains a module with it; `examples/models/lora.toml` is a whole run.
    """

    base: Model | None = None
    rank: Count = 8
    alpha: Count = 16
    targets: tuple[str, ...] = ()
    head: tuple[str, ...] = ()
    dropout: Annotated[float, Within("[0, 1)")] = 0.0
    seed: Annotated[int, Within(f"[0, {1 << 63})")] = 0
    train_a: bool = False

    def build(self, shape: torch.Size, classes: int) -> nn.Module:
        if self.base is None:
            raise BadInput(
                'model.base: missing; name the model to adapt: base = { name = "import", path = "mine.py:model" }'
            )
        return self.adapt(self.base.build(shape, classes))

    def adapt(self, module: nn.Module) -> nn.Module:
        """Returns a module with adapters, as a `peft.PeftModel`.

        Args:
            module: The model to adapt, which becomes a part of what is returned.

        Raises:
            BadInput: A name matches no layer, or one that cannot be adapted.
        """
        return with_adapters(module, self)


register(
    Model,
    {"logistic": Logistic, "fc": FullyConnected, "paper-cnn": PaperCNN, "import": ImportedModel, "lora": LoRA},
)
