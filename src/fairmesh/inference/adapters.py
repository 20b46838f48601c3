"""Adapters of a trained model in peft's layout, and models with their adapters merged."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from fairmesh.errors import BadInput
from fairmesh.problems.lora import peft_model_in

_WEIGHTS = "adapter_model.safetensors"


def write_adapter(module: nn.Module, folder: Path) -> None:
    """Writes the adapters of a module as `peft.PeftModel.from_pretrained` reads them: adapter_config.json and
    adapter_model.safetensors."""
    found = _adapted(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it looks for the base model's configuration on the network
        found.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # an empty form of a model card
    if not (folder / _WEIGHTS).exists():
        raise BadInput(f"peft wrote no {_WEIGHTS}; it has several adapters, and one that is called 'default' is needed")


def with_adapters_changed(module: nn.Module, change: Callable[[Any], nn.Module]) -> nn.Module:
    """Returns a copy of a module in which a function has changed the `peft.PeftModel` that it is or contains."""
    _adapted(module)
    made = copy.deepcopy(module).cpu()
    inner = peft_model_in(made)
    if inner is made:
        return change(made).eval()
    made.set_submodule(next(name for name, layer in made.named_modules() if layer is inner), change(inner))
    return made.eval()


def _adapted(module: nn.Module) -> Any:
    found = peft_model_in(module)
    if found is None:
        raise BadInput(
            "the model is no PeftModel, so there are no adapters to write in peft's layout; fm.models.LoRA makes such "
            "models. Export the weights with --safetensors"
        )
    return found
