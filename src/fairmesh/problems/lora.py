"""Low-rank adapters (LoRA) of `peft`: layers whose change of a frozen weight is a product of two small factors, B A.

The mean of the products of several nodes is not the product of their mean factors, unless one factor is the same
everywhere. So A is drawn from a seed, the same at all nodes, and frozen. Then averaging B is averaging B A.
"""

import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fairmesh.errors import BadInput, nearest, optional
from fairmesh.numerics import random_streams

if TYPE_CHECKING:
    from fairmesh.problems.models import LoRA

_A, _B = "lora_A", "lora_B"  # of peft's layers
_KNOWINGLY = "fairmesh_trains_a"  # an attribute of modules whose user has asked to train both factors
_ADVICE = "target linear and convolutional layers, and train others whole: head = [...]"


def with_adapters(module: nn.Module, lora: "LoRA") -> nn.Module:
    """Returns a module with adapters, as a `peft.PeftModel`. The module itself becomes a part of it.

    Raises:
        BadInput: A name of a layer matches nothing, or a layer that peft or fairmesh cannot adapt.
    """
    with optional("lora"):
        from peft import LoraConfig, get_peft_model
        from peft.tuners.lora.layer import Linear, _ConvNd
    if any(True for _ in adapters_of(module)):
        raise BadInput(
            "model: it has adapters of peft already, so LoRA would adapt them again; give the model as it was before, "
            "or leave out LoRA here and train the adapters that it has"
        )
    _check_names(module, lora)
    everywhere = lora.targets == ("all-linear",)
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, modules_to_save=list(lora.head) or None,
        target_modules="all-linear" if everywhere else list(lora.targets) or None,
    )  # fmt: skip
    before = set(module.modules())
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            made = get_peft_model(module, config)
    except ValueError as error:  # of a kind of layer, or of an architecture
        raise BadInput(f"model.targets: peft cannot adapt this model: {' '.join(str(error).split())}") from error
    for name, layer in made.named_modules():
        if layer not in before and ".modules_to_save." not in name:  # copies are in the modes of the originals
            layer.training = module.training
    for name, layer in adapters_of(made):
        if not isinstance(layer, Linear | _ConvNd):
            raise BadInput(f"model.targets: {name} ({type(layer).__name__}) has no common A; {_ADVICE}")
        weight = made.get_parameter(f"{name}.{_A}.default.weight")
        weight.data.copy_(_common_factor(weight, name, lora.seed))
        weight.requires_grad_(lora.train_a)
    setattr(made, _KNOWINGLY, lora.train_a)
    return made


def _check_names(module: nn.Module, lora: "LoRA") -> None:
    """Raises BadInput if a name of a layer matches nothing, or if there are none and peft does not know them."""
    names = [name for name, _ in module.named_modules() if name]
    for kind, chosen in (("targets", lora.targets), ("head", lora.head)):
        for name in chosen:
            if not any(f".{layer}".endswith(f".{name}") for layer in names) and chosen != ("all-linear",):
                ends = {layer.rpartition(".")[2] for layer in names}  # peft compares ends too
                raise BadInput(f"model.{kind}: {name!r} matches no layer of the model{nearest(name, {*names, *ends})}")
    if not lora.targets and not hasattr(getattr(module, "config", None), "model_type"):
        linear = sorted(name for name, layer in module.named_modules() if isinstance(layer, nn.Linear) and name)
        raise BadInput(
            "model.targets: name the layers to adapt, by their names in the model or the ends of these, such as "
            f"{linear[:4]}; only for models of transformers does peft know them"
        )


def _common_factor(weight: Tensor, layer: str, seed: int) -> Tensor:
    """Returns the factor A of a layer, the same at all nodes, in the range in which peft draws it."""
    of_seed = torch.tensor(seed, dtype=torch.int64)
    key = random_streams.keys(of_seed, f"lora A {layer}", 0, torch.tensor([0])).squeeze(-1)
    uniform = random_streams.uniform(key, weight.numel(), torch.float64).reshape(weight.shape)
    return (2 * uniform - 1) / weight[0].numel() ** 0.5


def adapters_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the layers with adapters of peft's in a module, by their names."""
    if "peft" not in sys.modules:  # without which there are none; its import takes seconds
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in module.named_modules():
        if isinstance(layer, BaseTunerLayer):
            yield name, layer


def peft_model_in(module: nn.Module) -> Any:
    """Returns the `peft.PeftModel` that a module is or contains, or None."""
    if "peft" not in sys.modules:
        return None
    from peft import PeftModel

    return next((layer for layer in module.modules() if isinstance(layer, PeftModel)), None)


def base_of_adapters(module: nn.Module) -> set[str]:
    """Returns the names of the frozen parameters of a model with adapters, the common A included; none if it has no
    adapters. The starting values of a head, which peft keeps next to the trained ones, do not count."""
    if peft_model_in(module) is None:
        return set()
    return {n for n, p in module.named_parameters() if not p.requires_grad and ".original_module." not in f".{n}."}


def check_adapters(module: nn.Module, local: set[str]) -> None:
    """Refuses adapters whose averages do not mean what users expect.

    Args:
        module: The model, with its frozen parameters.
        local: The names of the parameters that stay at their sites, which are not averaged.

    Raises:
        BadInput: Adapters of a module are merged, trained in both factors, or of a kind that cannot be averaged.
    """
    shared = {name for name, p in module.named_parameters() if p.requires_grad} - local
    for name, layer in adapters_of(module):
        own = {one.removeprefix(f"{name}.") for one in shared if one.startswith(f"{name}.")}
        factors = {one.partition(".")[0] for one in own}
        if layer.merged:
            raise BadInput(
                f"the LoRA adapter of {name} is merged into its layer, so training it would change nothing; call "
                "model.unmerge_adapter() first, or model.merge_and_unload() to train the model without adapters"
            )
        if not factors:
            continue
        if not _is_plain(layer):
            raise BadInput(
                f"the adapter of {name} ({type(layer).__module__}) is not plain LoRA of a linear or convolutional "
                "layer, but another kind, such as DoRA, where averaging B is not averaging what it adds; use "
                "fm.models.LoRA, or keep the adapter at the sites with parts.local"
            )
        if factors >= {_A, _B} and not getattr(peft_model_in(module), _KNOWINGLY, False):
            raise BadInput(
                f"the LoRA adapter of {name} trains both factors, A and B, and averaging them separately is not "
                'averaging their product B A; freeze A: parts.frozen = ["*.lora_A.*"], or give the model without '
                "adapters to fm.models.LoRA, which has a common frozen A (train_a = true trains it all the same)"
            )


def said_of_adapters(module: nn.Module, local: set[str]) -> str:
    """Returns what is special about a model with adapters, "" without any. Arguments as of `check_adapters`."""
    layers = [layer for _, layer in adapters_of(module)]
    if not layers:
        return ""
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    trained, every = (sum(p.numel() for p in ps) for ps in (parameters.values(), module.parameters()))
    plural = "s" * (len(layers) > 1)
    said = f"LoRA: adapters of {len(layers)} layer{plural}; {trained:,} of {every:,} parameters are trained"
    if not any(f".{_A}." in name for name in parameters):
        return f"{said}, A is common and frozen"
    if all(any(f".{factor}." in name for name in parameters.keys() - local) for factor in (_A, _B)):
        return (
            f"{said}. A is trained too: averaging A and B separately is not averaging B A, so that sites whose factors "
            "differ may lose by averaging; train_a = false has a common frozen A"
        )
    return said


def _is_plain(layer: Any) -> bool:
    """Returns whether an adapter is one of plain LoRA, whose change of a layer is B A."""
    from peft.tuners.lora.layer import Embedding, LoraLayer, MultiheadAttention

    is_lora = type(layer).__module__.startswith("peft.tuners.lora.") and isinstance(layer, LoraLayer)
    if not is_lora or isinstance(layer, Embedding | MultiheadAttention):
        return False
    return not any(layer.use_dora.values()) and not layer.lora_variant
