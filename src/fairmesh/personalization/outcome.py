"""The sites' own models, and how they compare with the common model and with training alone."""

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fairmesh.errors import BadInput
from fairmesh.personalization.candidates import COMMON, LOCAL, OWN
from fairmesh.personalization.evidence import mixed

_WEIGHTS, _LABELS, _SCALES, _SHIFTS = "weights", "labels", "scales", "shifts"


def _as_key(name: str) -> str:
    """Returns the name of a model as a module may have it."""
    return name.replace(", ", "-").replace(" ", "-")


class PersonalModel(nn.Module):
    """A site's own model as a module: a mixture of models, or a single one.

    For labels, its outputs are the logarithms of the mixture's probabilities.

    Args:
        module: A module of the trained architecture; it is copied.
        state_dicts: The state_dict of each model in the mixture, by name.
        weights: The weight of each; they sum to one.
        labels: Whether targets are class labels.
        calibrations: What the outputs of some of the models are multiplied with, and what is added to them, by name;
            None for nothing. Default: None.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> one, other = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1, bias=False)
        >>> states = {"common": one.state_dict(), "local": other.state_dict()}
        >>> model = fm.personalization.PersonalModel(one, states, {"common": 0.25, "local": 0.75}, labels=False)
        >>> x = torch.ones(1, 2)
        >>> torch.allclose(model(x), 0.25 * one(x) + 0.75 * other(x))
        True
    """

    def __init__(
        self,
        module: nn.Module,
        state_dicts: Mapping[str, Mapping[str, Tensor]],
        weights: Mapping[str, float],
        labels: bool,
        calibrations: Mapping[str, tuple[float, Tensor]] | None = None,
    ):
        super().__init__()
        self.weights, self.labels = {name: float(weights[name]) for name in state_dicts}, labels
        self.models = nn.ModuleDict()
        for name, state in state_dicts.items():
            one = copy.deepcopy(module)
            one.load_state_dict(state)
            self.models[_as_key(name)] = one
        for k, name in enumerate(state_dicts):
            scale, shift = (calibrations or {}).get(name, (1.0, None))
            self.register_buffer(f"scale_{k}", torch.tensor(scale) if shift is not None else None)
            self.register_buffer(f"shift_{k}", shift)
        self.eval()

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the outputs of the mixture.

        Args:
            inputs: A batch of inputs.
        """
        outputs = [one(inputs) for one in self.models.values()]
        for k in range(len(outputs)):
            scale, shift = getattr(self, f"scale_{k}"), getattr(self, f"shift_{k}")
            outputs[k] = outputs[k] if shift is None else scale * outputs[k] + shift
        return mixed(outputs, list(self.weights.values()), self.labels)

    @staticmethod
    def load(path: str | os.PathLike, module: nn.Module) -> "PersonalModel":
        """Reads a site's model from the file that a run has written.

        Args:
            path: The file, such as "runs/mine/personal-3.safetensors".
            module: A module of the trained architecture.

        Raises:
            BadInput: The file cannot be read, or does not fit the module.
        """
        try:
            tensors = load_file(path)
            labels = bool(tensors.pop(_LABELS))
            names = [key.removeprefix(f"{_WEIGHTS}.") for key in tensors if key.startswith(f"{_WEIGHTS}.")]
            weights = {name: float(tensors[f"{_WEIGHTS}.{name}"]) for name in names}
            states = {
                n: {k.removeprefix(f"{n}."): t for k, t in tensors.items() if k.startswith(f"{n}.")} for n in names
            }
            known = [name for name in names if f"{_SHIFTS}.{name}" in tensors]
            calibrations = {n: (float(tensors[f"{_SCALES}.{n}"]), tensors[f"{_SHIFTS}.{n}"]) for n in known}
            return PersonalModel(module, states, weights, labels, calibrations)
        except Exception as error:  # safetensors and load_state_dict raise various ones
            raise BadInput(f"{path} is not a site's model for this module: {error}") from error


@dataclass(frozen=True, eq=False)
class PersonalSite:
    """A site's own model, and how it was chosen.

    The numbers are dictionaries with the keys "common", "local" and "personal", each with every metric.

    Args:
        number: The number of the site.
        name: The name of the site.
        weights: The weight of each model in the mixture; a single one has weight 1.
        state_dicts: The state_dict of each of these models; none at a process of a cluster without the site's data.
        labels: Whether targets are class labels.
        rows: How many rows judged the models.
        unseen: Whether these rows were kept out of the common training. If not, the common model looks better than it
            is, and the choice leans towards it.
        steps: How many steps the local and the fine-tuned model took, on average along their paths. Default: {}.
        held_out: The metrics on these rows, by models that were trained without them. Default: {}.
        test: The metrics on the site's test set, if it has one. Default: {}.
        note: What a reader should know, such as why the common model was kept; None for nothing. Default: None.
        calibrations: What the outputs of some of the models are multiplied with, and what is added to them. Default:
            {}.
        outputs: What its own model and the one trained alone answer on the test set, by "personal" and "local".
            Default: {}.
        held_out_versus: How the loss of its own model differs from that of the others on the held-out rows, by "common"
            and "local". Default: {}.

    Example:
        >>> import fairmesh as fm
        >>> experiment = fm.Experiment(fm.data.Digits(nodes=4, odd=1), fm.Ring(), fm.TrackedADGDA(), rounds=20)
        >>> way = fm.personalization.Mixture(steps=10, local_steps=10)
        >>> site = fm.personalize(fm.run(experiment), way).sites[3]
        >>> site.name, site.unseen, sorted(site.test)
        ('site 3 (mirrored)', False, ['common', 'local', 'personal'])
    """

    number: int
    name: str
    weights: dict[str, float]
    state_dicts: dict[str, dict[str, Tensor]] = field(repr=False)
    labels: bool
    rows: int
    unseen: bool
    steps: dict[str, float] = field(default_factory=dict)
    held_out: dict[str, dict[str, float]] = field(default_factory=dict)
    test: dict[str, dict[str, float]] = field(default_factory=dict)
    note: str | None = None
    calibrations: dict[str, tuple[float, Tensor]] = field(default_factory=dict, repr=False)
    outputs: dict[str, Tensor] = field(default_factory=dict, repr=False)
    held_out_versus: dict[str, dict[str, float]] = field(default_factory=dict, repr=False)

    @property
    def shares(self) -> dict[str, float]:
        """How much of its model is the "common" one, "adapted" from it, and its "own", of its rows alone."""
        kinds = {"common": 0.0, "adapted": 0.0, "own": 0.0}
        for name, weight in self.weights.items():
            kinds["own" if name in (LOCAL, *OWN) else "common" if name == COMMON else "adapted"] += weight
        return kinds

    @property
    def uses(self) -> str:
        """What its model mostly is: the "common" model, one "adapted" from it, or its "own"."""
        return max(self.shares, key=self.shares.__getitem__)

    def module(self, module: nn.Module) -> PersonalModel:
        """Returns the site's model as a module.

        Args:
            module: A module of the trained architecture; it is copied.
        """
        return PersonalModel(module, self.state_dicts, self.weights, self.labels, self.calibrations)

    def tensors(self) -> dict[str, Tensor]:
        """Returns all that `PersonalModel.load` needs, as it is written to a file."""
        found = {_LABELS: torch.tensor(self.labels)}
        for name, state in self.state_dicts.items():
            found[f"{_WEIGHTS}.{name}"] = torch.tensor(self.weights[name], dtype=torch.float64)
            found |= {f"{name}.{key}": tensor for key, tensor in state.items()}
        for name, (scale, shift) in self.calibrations.items():
            found |= {f"{_SCALES}.{name}": torch.tensor(scale), f"{_SHIFTS}.{name}": shift}
        return found

    def table(self) -> dict[str, Any]:
        """Returns the numbers, without the models, as JSON can hold them."""
        names = ("number", "name", "weights", "labels", "rows", "unseen", "steps", "held_out", "test", "note")
        names += ("held_out_versus",)
        found = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return found | {"shares": self.shares, "uses": self.uses}


@dataclass(frozen=True, eq=False)
class Personalized:
    """The own models of the sites whose data is here.

    Args:
        method: The registered name of the way in which they were made.
        replica: The number of the replica whose common model they start from.
        sites: One outcome per site.

    Example:
        >>> import fairmesh as fm
        >>> experiment = fm.Experiment(fm.data.Digits(nodes=4, odd=1), fm.Ring(), fm.TrackedADGDA(), rounds=20)
        >>> way = fm.personalization.FineTuned(steps=10, local_steps=10)
        >>> personalized = fm.personalize(fm.run(experiment), way)
        >>> personalized.method, len(personalized.values("personal", "accuracy"))
        ('fine-tuned', 4)
    """

    method: str
    replica: int
    sites: list[PersonalSite]

    def values(self, model: str, metric: str) -> list[float]:
        """Returns one number per site, measured on its test set, or on held-out rows if it has none.

        Args:
            model: "common", "local" or "personal".
            metric: The metric, such as "accuracy" or "loss".
        """
        return [(site.test or site.held_out)[model][metric] for site in self.sites]

    def table(self) -> dict[str, Any]:
        """Returns the numbers, without the models, as JSON can hold them."""
        sites = [site.table() for site in self.sites]
        return {"method": self.method, "replica": self.replica, "sites": sites}
