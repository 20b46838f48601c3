"""A module as a flat row of parameters: any `nn.Module`, evaluated for a row by vmap or by itself."""

import copy
import functools
import hashlib
import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from fairmesh.errors import BadInput, refusing
from fairmesh.numerics import random_streams
from fairmesh.numerics.layout import Layout
from fairmesh.numerics.trees import Tree
from fairmesh.problems.batch_norm import STATISTICS, SiteBatchNorm, moments, statistics_of
from fairmesh.problems.torch_draws import TorchDraws, draw_computed_again

_DROPOUTS: dict[type, int] = {nn.Dropout: 0, nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}  # -> spatial axes
_LARGE = 1 << 18  # numbers; to move smaller gradients at once costs more than it saves


def architecture_of(module: nn.Module) -> str:
    """Returns a fingerprint of a module's architecture: its layers, and the names and shapes of its tensors, but not
    their values."""
    layers = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(module))  # where a function lies in memory
    shapes = sorted((name, list(tensor.shape)) for name, tensor in module.state_dict().items())
    return hashlib.sha256(f"{layers}\n{shapes}".encode()).hexdigest()[:16]


def has_adapters(module: nn.Module) -> bool:
    """Returns whether some layer is one of `peft`."""
    kinds = {base for layer in module.modules() for base in type(layer).__mro__}
    return any(kind.__module__.startswith("peft.") for kind in kinds)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and buffers of a module by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


class _StreamDropout(nn.Module):
    """Dropout whose mask comes from a counter-based stream; whole channels where there are spatial axes."""

    key: Tensor

    def __init__(self, p: float, spatial: int, layer: int):
        super().__init__()
        self.p, self.spatial, self.layer = p, spatial, layer  # p as in torch's layers: some models read it
        self.uses = 0  # of this layer in the current pass; each call draws its own mask
        self.again = False  # whether a part of the pass is computed again, to save memory
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            return inputs
        if self.again and self.uses > 1:  # which of its uses is this?
            raise draw_computed_again()
        use = 0 if self.again else self.uses
        self.uses += not self.again
        shape = inputs.shape[: inputs.ndim - self.spatial]
        one = torch.zeros(1, dtype=torch.int64, device=self.key.device)
        key = random_streams.keys(self.key, f"dropout {self.layer}", use, one).squeeze(-1)
        kept = random_streams.uniform(key, math.prod(shape), inputs.dtype) >= self.p
        mask = kept.reshape(*shape, *[1] * self.spatial)
        return inputs * mask / (1.0 - self.p or 1.0)


class _Inside(nn.Module):
    """Lets an action run while `functional_call` has put other parameters into a module: a gradient may compute parts
    of the model again, and needs them too."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, action: Callable[[nn.Module], Any]) -> Any:
        return action(self.module)


def _called(inside: _Inside, tensors: Mapping[str, Tensor], action: Callable[[nn.Module], Any]) -> Any:
    """Returns what an action gives for a module with these parameters and buffers."""
    return functional_call(inside, {f"module.{name}": tensor for name, tensor in tensors.items()}, (action,))


def as_it_is(outputs: Any) -> Any:
    """Returns what a model returns."""
    return outputs


def called_with(module: nn.Module, inputs: Tree) -> Any:
    """Returns what a module returns: a tuple of inputs is its positional arguments, a dictionary its keywords."""
    if isinstance(inputs, dict):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple) else module(inputs)


class FlatModel:
    """The trainable parameters of a module as one row; frozen parameters and buffers are not part of it.

    A row begins with the shared parameters (`dim` numbers), which algorithms train and send. A node's own part follows
    (`own_dim` numbers): local parameters, then the running statistics of BatchNorm layers in training mode.

    Args:
        module: The user's module.
        local: The names of local parameters. Default: ().
        local_affine: Whether the affine parameters of BatchNorm layers in training mode are local too. Default: False.
        pool_statistics: Whether a site is judged with the statistics of all sites together. Default: False.
    """

    def __init__(
        self,
        module: nn.Module,
        local: Collection[str] = (),
        local_affine: bool = False,
        pool_statistics: bool = False,
    ):
        _refuse_unsuitable(module)
        self._original = module
        tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        self._training = copy.deepcopy(module, dict(tensors))  # the tensors themselves are shared
        stand_ins = _replaced_layers(self._training, _stand_ins())
        self._norms = {path: layer for path, layer in stand_ins.items() if isinstance(layer, SiteBatchNorm)}
        self._dropouts = {
            f"{path}.key": layer for path, layer in stand_ins.items() if isinstance(layer, _StreamDropout)
        }
        self._evaluation = copy.deepcopy(self._training, dict(tensors)).eval()
        affine = {f"{path}.{name}" for path in self._norms for name in ("weight", "bias")} if local_affine else set()
        trainable = {name: p for name, p in self._training.named_parameters() if p.requires_grad}
        shared, own = _divided(trainable, {*local, *affine})
        statistics = {
            f"{path}.{name}": getattr(norm, name) for path, norm in self._norms.items() for name in STATISTICS
        }
        rows = shared | own | statistics
        self._shapes = {name: tensor.shape for name, tensor in rows.items()}
        self._sizes = [tensor.numel() for tensor in rows.values()]
        self._of_statistics = [tensor.numel() for tensor in statistics.values()]
        # Where each parameter lies in a row that algorithms train and send.
        self.layout = Layout(tuple(shared), tuple(tuple(parameter.shape) for parameter in shared.values()))
        self.dim, self.own_dim = self.layout.dim, sum(self._sizes) - self.layout.dim
        self.local_dim = self.own_dim - sum(self._of_statistics)
        self._pool_statistics = pool_statistics
        rates = [
            torch.full((2 * len(norm.running_mean),), norm.momentum, dtype=torch.float64)
            for norm in self._norms.values()
        ]
        self.momenta = torch.cat([torch.empty(0, dtype=torch.float64), *rates])
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self._inside = _Inside(self._training)
        self._read: Callable[[Any], Any] = as_it_is
        self._short_floats = False  # whether it computes in bfloat16 in training mode
        self._holds_a_row = False  # whether the module's parameters are those of a row at the moment
        self._fixed = {name: t.detach() for name, t in tensors_of(self._training).items() if name not in rows}
        self._buffers = self._places_of_buffers()

    def _places_of_buffers(self) -> dict[str, tuple[nn.Module, str]]:
        """Returns the layer of every buffer, and its name there: looking for them takes time in every pass."""
        names = self._fixed.keys() & dict(self._training.named_buffers()).keys() - self._dropouts.keys()
        split = {name: name.rpartition(".") for name in names}
        return {name: (self._training.get_submodule(path), own) for name, (path, _, own) in split.items()}

    def to(self, device: torch.device, dtype: torch.dtype, short_floats: bool = False) -> "FlatModel":
        """Returns the same model with frozen parameters and buffers on a device, in a dtype.

        With `short_floats`, it computes in bfloat16 in training mode, where torch's autocast finds that safe."""
        placed = copy.copy(self)
        placed.device, placed.dtype = device, dtype
        placed._short_floats = short_floats
        placed.momenta = self.momenta.to(device, dtype)
        placed._fixed = {
            name: t.to(device=device, dtype=dtype if t.is_floating_point() else t.dtype)
            for name, t in self._fixed.items()
        }
        return placed

    def reading(self, read: Callable[[Any], Any]) -> "FlatModel":
        """Returns the same model with outputs that are read as one tensor by a function."""
        made = copy.copy(self)
        made._read = read
        return made

    @property
    def architecture(self) -> str:
        """A fingerprint of the user's module without its weights."""
        return architecture_of(self._original)

    def module(self, row: Tensor) -> nn.Module:
        """Returns the user's module with this row's parameters, for evaluation."""
        made = copy.deepcopy(self._original).eval()
        made.load_state_dict(self.state_dict(row))
        return made

    def module_to_train(self, row: Tensor) -> nn.Module:
        """Returns a copy of the user's module with this row's parameters, on the device, in the dtype, and in the modes
        in which the user gave it."""
        made = copy.deepcopy(self._original).to(self.device, self.dtype)
        _copy_into(made, self.parameters_of(row))
        return made

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shapes of all parameters and buffers of the user's module, by name."""
        return {name: tensor.shape for name, tensor in tensors_of(self._original).items()}

    def changed_in(self, held: Mapping[str, Tensor]) -> str | None:
        """Returns the name of a frozen parameter or buffer that has another value among these tensors, if there is
        one. How many batches a BatchNorm layer has seen does not matter."""
        compared = {name for name in held.keys() & self._fixed.keys() if not name.endswith("num_batches_tracked")}
        changed = (n for n, t in self._fixed.items() if n in compared and not torch.equal(held[n].detach().to(t), t))
        return next(changed, None)

    def copy_fixed(self, module: nn.Module) -> None:
        """Gives a module of the same architecture the frozen parameters and buffers of this one."""
        _copy_into(module, self._fixed)

    def row_of(self, module: nn.Module) -> Tensor:
        """Returns the trainable parameters of a module of the same architecture, and its statistics, as one row."""
        return self.row_of_state_dict(tensors_of(module))

    def row_of_state_dict(self, state_dict: Mapping[str, Tensor]) -> Tensor:
        """Returns the trainable parameters of a state_dict of the user's module, and its statistics, as one row."""
        return torch.cat([state_dict[name].detach().flatten() for name in self._shapes])

    def parameters_of(self, row: Tensor) -> dict[str, Tensor]:
        """Returns a row as named parameters and statistics."""
        if row.shape[-1] != self.dim + self.own_dim:
            raise ValueError(f"a row of {row.shape[-1]} numbers is not one of {self.dim} shared and {self.own_dim} own")
        pieces = row.split(self._sizes, dim=-1)
        return {name: piece.reshape(shape) for (name, shape), piece in zip(self._shapes.items(), pieces)}

    @property
    def differs_by_site(self) -> bool:
        """Whether sites are judged with local parameters or BatchNorm statistics of their own."""
        return bool(self.local_dim) or (bool(self._of_statistics) and not self._pool_statistics)

    @property
    def pools_statistics(self) -> bool:
        """Whether the sites' BatchNorm statistics are averaged for the common model."""
        return bool(self._of_statistics) and self._pool_statistics

    def own_for_judging(self, own: Tensor, shares: Tensor) -> Tensor:
        """Returns the own parts that sites are judged with, given those that they have.

        Args:
            own: The own part of every site, (..., sites, own_dim).
            shares: The share of each site in all samples (sites,).
        """
        if not self._pool_statistics:
            return own
        common = self._pooled(own, shares).unsqueeze(-2)
        return torch.cat([own[..., : self.local_dim], common.expand(*own.shape[:-1], -1)], dim=-1)

    def _pooled(self, own: Tensor, shares: Tensor) -> Tensor:
        """Returns the BatchNorm statistics of all sites' data together."""
        if not self._of_statistics:
            return own[..., 0, self.local_dim :]
        mean = (shares.to(own.device).unsqueeze(-1) * self.moments(own)).sum(dim=-2)
        return self.statistics_of(mean).to(own.dtype)

    def moments(self, own: Tensor) -> Tensor:
        """Returns the moments behind the statistics in own parts, whose average over sites means something."""
        return moments(own[..., self.local_dim :], self._of_statistics)

    def statistics_of(self, averaged: Tensor) -> Tensor:
        """Returns the statistics that averaged moments stand for."""
        return statistics_of(averaged, self._of_statistics)

    def at_site(self, row: Tensor, own: Tensor) -> Tensor:
        """Returns the common model as a site is judged by it: with the site's own part.

        Args:
            row: The common model, (dim + own_dim,).
            own: The own part of the site, (own_dim,).
        """
        first = self.dim + self.local_dim
        kept = row[first:] if self._pool_statistics else own[self.local_dim :]
        return torch.cat([row[: self.dim], own[: self.local_dim].to(row), kept.to(row)])

    def common_own(self, own: Tensor, shares: Tensor) -> Tensor:
        """Returns the own part of the common model, (..., own_dim): the mean of the sites' local parameters, and the
        statistics of all their data. Arguments as in `own_for_judging`."""
        return torch.cat([own[..., : self.local_dim].mean(dim=-2), self._pooled(own, shares)], dim=-1)

    def __call__(self, row: Tensor, inputs: Tree, key: Tensor | None = None) -> Tensor:
        """Returns the outputs of the model with this row's parameters.

        A tuple of inputs is its positional arguments, and a dictionary its keyword arguments.

        With a key, the model is in training mode and draws its random numbers from the key. Without one, a model that
        draws all the same draws the same numbers every time."""
        return self.within(row, lambda module: self._read(called_with(module, inputs)), key)

    def within(
        self,
        row: Tensor,
        action: Callable[[nn.Module], Any],
        key: Tensor | None = None,
        draws: TorchDraws | None = None,
    ) -> Any:
        """Returns what an action gives for the module with this row's parameters.

        Args:
            row: The parameters.
            action: A function of the module, which it may call several times.
            key: As of a call. Default: None, evaluation mode.
            draws: What answers torch's random functions in evaluation mode; None for the same numbers every time.
                Default: None.
        """
        if key is None:
            tensors = self._fixed | self.parameters_of(row)
            with draws or TorchDraws(torch.zeros((), dtype=torch.int64, device=row.device)):
                return _called(_Inside(self._evaluation), tensors, action)
        for layer in (*self._dropouts.values(), *self._norms.values()):
            layer.uses, layer.again = 0, False
        kind, short = row.device.type, self._short_floats
        alone = self._holds_a_row and kind == "cpu"
        with (
            TorchDraws(key, alone),
            torch.autocast(kind, torch.bfloat16, cache_enabled=False) if short else nullcontext(),
        ):
            if self._holds_a_row:
                found = action(self._training)
            else:
                tensors = self._fixed | self.parameters_of(row) | dict.fromkeys(self._dropouts, key)
                found = _called(self._inside, tensors, action)
        return found.to(row.dtype) if short else found

    def with_gradient(
        self, loss: Callable[..., Any], row: Tensor, batch: Sequence[Tensor], gradient: Tensor, has_aux: bool = False
    ) -> Any:
        """Computes a loss and its gradient by ordinary automatic differentiation.

        Args:
            loss: (row, inputs, targets, key, ...) -> a scalar, or with `has_aux` a scalar and more. It evaluates this
                model in training mode.
            row: The parameters (dim,).
            batch: The other arguments of the loss.
            gradient: Where the gradient is written (dim,).
            has_aux: Whether the loss returns more than a scalar. Default: False.

        Returns:
            What the loss returns, detached.

        Raises:
            BadInput: The model changes its buffers.
        """
        leaves = {name: piece.detach().requires_grad_() for name, piece in self.parameters_of(row).items()}
        targets, written = self.parameters_of(gradient), set()

        def move(name: str, leaf: Tensor) -> None:
            found, leaf.grad = leaf.grad, None
            if found is not None:  # checkpointing in its old form finds it in several parts
                (targets[name].add_ if name in written else targets[name].copy_)(found)
                written.add(name)

        for name, leaf in leaves.items():
            if leaf.numel() >= _LARGE:  # at once: a CPU's cache still holds it, and it is not held twice for long
                leaf.register_post_accumulate_grad_hook(functools.partial(move, name))
        keys = dict.fromkeys(self._dropouts, batch[2])
        versions = {name: self._fixed[name]._version for name in self._buffers}

        def act(module: nn.Module) -> Any:
            with torch.enable_grad():
                found = loss(row, *batch)
                value = found[0] if has_aux else found
            for layer in (*self._dropouts.values(), *self._norms.values()):
                layer.again = True
            torch.autograd.backward(value)  # not grad(), which checkpointing in its old form does not support
            with torch.no_grad():
                for name, leaf in leaves.items():
                    move(name, leaf)
                    if name not in written:
                        targets[name].zero_()
            for name, (layer, own_name) in self._buffers.items():
                buffer = getattr(layer, own_name, None)
                if buffer is not self._fixed[name] or self._fixed[name]._version != versions[name]:
                    raise _changing(name, layer.training)
            return tuple(part.detach() for part in found) if has_aux else found.detach()

        self._holds_a_row = True
        try:
            return _called(self._inside, self._fixed | leaves | keys, act)
        finally:
            self._holds_a_row = False

    def switched_off(self) -> str | None:
        """Returns the layers that draw only in training mode, in words, if the whole module is in evaluation mode."""
        drawing = [type(layer).__name__ for layer in self._original.modules() if _drops(layer)]
        return ", ".join(sorted(set(drawing))) if drawing and not self._original.training else None

    def fixed(self) -> list[Tensor]:
        """Returns frozen parameters and buffers, in the order of their names."""
        return [self._fixed[name] for name in sorted(self._fixed)]

    @property
    def evaluated(self) -> nn.Module:
        """The module that a pass evaluates."""
        return self._training

    def state_dict(self, row: Tensor) -> dict[str, Tensor]:
        """Returns a row as a state_dict of the user's module."""
        row = row.detach().cpu()
        parameters = self.parameters_of(row)
        alias = {id(tensor): name for name, tensor in tensors_of(self._original).items()}
        held = self._original.state_dict(keep_vars=True)
        values = {
            name: parameters[source] if (source := alias.get(id(tensor), name)) in parameters else tensor.detach()
            for name, tensor in held.items()
        }
        return {name: value.to(dtype=held[name].dtype).clone() for name, value in values.items()}


def _divided(
    trainable: Mapping[str, nn.Parameter], local: Collection[str]
) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Returns the trained parameters that are shared, and those that stay at their site."""
    if not trainable:
        raise BadInput("the model has no trainable parameter; set requires_grad on those to train")
    shared = {name: parameter for name, parameter in trainable.items() if name not in local}
    if not shared:
        raise BadInput(
            "all trained parameters are local, so there is nothing to share; to train every site alone, use the "
            "algorithm fm.algorithms.Local() without local parts"
        )
    return shared, {name: parameter for name, parameter in trainable.items() if name in local}


def _copy_into(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Gives a module values by name, except those that it does not have: of layers put in place of the user's."""
    held = tensors_of(module)
    with torch.no_grad():
        for name, value in values.items():
            if name in held:
                held[name].copy_(value)


def _changing(name: str, training: bool) -> BadInput:
    """Returns what to do about a buffer that a model changes, whose layer is in training or in evaluation mode."""
    return BadInput(
        f"the model changes its buffer {name} in {'training' if training else 'evaluation'} mode, which all nodes "
        "would share; give its layer no running state, call .eval() on it, or do not change it in forward(): to "
        "count, use a plain attribute of the module"
    )


def own_copy(module: nn.Module) -> nn.Module:
    """Returns a copy of a user's module on the CPU.

    Raises:
        BadInput: It cannot be copied, or has no values.
    """
    for name, tensor in tensors_of(module).items():
        if tensor.device.type == "meta" and not is_lazy(tensor):
            raise BadInput(
                f"the model's {name} is on the device 'meta', so it has shape but no values; load its weights on "
                "another device first: module.to_empty(device='cpu'), then load_state_dict, or build it without "
                "device='meta'"
            )
    _refuse_norms_of_weights(module)
    with refusing("the model cannot be copied", advice="give a function without arguments that makes the module"):
        return copy.deepcopy(module).cpu()


def _refuse_norms_of_weights(module: nn.Module) -> None:
    """Raises BadInput for a spectral norm with a state, and for torch's old hooks, which cannot be copied."""
    for name, layer in module.named_modules():
        if isinstance(layer, _SpectralNorm) and layer.training and hasattr(layer, "_u"):  # a vector needs no state
            raise BadInput(
                f"{name}: torch's spectral_norm changes its vectors in every pass, which all nodes would share; "
                "register a parametrization of your own without a state, whose forward(weight) returns "
                "weight / torch.linalg.matrix_norm(weight.flatten(1), ord=2), or call .eval() on the layer"
            )
        if any(isinstance(hook, SpectralNorm | WeightNorm) for hook in layer._forward_pre_hooks.values()):
            raise BadInput(
                f"layer {name or 'itself'} ({type(layer).__name__}) has the hook of torch.nn.utils.weight_norm or "
                "spectral_norm, which cannot be copied; use torch.nn.utils.parametrizations.weight_norm for the former,"
                " and for the latter a parametrization of your own (docs/howto/own-models.md)"
            )


def _refuse_unsuitable(module: nn.Module) -> None:
    _refuse_norms_of_weights(module)
    for name, layer in module.named_modules():
        why = ""
        if isinstance(getattr(layer, "_orig_mod", None), nn.Module):
            why = "was compiled by torch.compile, which does not work inside fairmesh's own gradients; give the module "
            why += "as it was before: fairmesh traces it, and compiles it with fuse = 'yes'"
        if isinstance(layer, _InstanceNorm) and layer.training and layer.track_running_stats:
            why = "keeps running statistics, which nodes with different data cannot share; use "
            why += "track_running_stats=False, or call .eval() on a pretrained layer"
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse and layer.weight.requires_grad:
            why = "has sparse=True, but gradients of all nodes are rows of one dense tensor; leave out sparse=True, "
            why += "which gives the same numbers"
        if why:
            raise BadInput(f"layer {name or 'itself'} ({type(layer).__name__}) {why}")
    for name, tensor in module.named_parameters():
        if is_lazy(tensor):
            raise BadInput(f"parameter {name} is not initialised yet; run the lazy model once on a sample first")
        if tensor.is_complex() and tensor.requires_grad:
            layer = module.get_submodule(name.rpartition(".")[0])
            raise BadInput(
                f"parameter {name} ({type(layer).__name__}) is complex, but models are rows of real numbers; make two "
                "parameters of it, w.real and w.imag, and use torch.complex(real, imag) in forward()"
            )


def _drops(layer: nn.Module) -> bool:
    """Returns whether a layer drops numbers in training mode, by the names that torch and others use."""
    chances = (getattr(layer, name, 0.0) for name in ("p", "dropout", "drop_prob"))
    return any(isinstance(chance, float) and 0.0 < chance <= 1.0 for chance in chances)


def _replaced_layers(module: nn.Module, stand_in: Callable[[nn.Module, str], nn.Module | None]) -> dict[str, nn.Module]:
    """Replaces layers of a module by what a function of a layer and its path gives, None to leave it. Returns the new
    ones by their paths."""
    by_path: dict[str, nn.Module] = {}
    by_layer: dict[nn.Module, nn.Module] = {}
    for path, layer in list(module.named_modules(remove_duplicate=False)):  # one layer may stand in several places
        made = by_layer.get(layer) or stand_in(layer, path)
        if made is None:
            continue
        if not path:
            raise BadInput(f"the model is nothing but a layer {type(layer).__name__}")
        if layer not in by_layer:
            by_layer[layer] = by_path[path] = made
        module.set_submodule(path, made)
    return by_path


def _stand_ins() -> Callable[[nn.Module, str], nn.Module | None]:
    """Returns what stands for dropout layers, which draw from a node's stream, and for BatchNorm layers in training
    mode, whose statistics are a node's own."""
    numbers = itertools.count()

    def stand_in(layer: nn.Module, path: str) -> nn.Module | None:
        if isinstance(layer, _BatchNorm) and layer.training:
            return SiteBatchNorm(layer, path)
        if isinstance(layer, _DropoutNd) and type(layer) in _DROPOUTS and layer.p > 0 and layer.training:
            return _StreamDropout(layer.p, _DROPOUTS[type(layer)], next(numbers))
        return None

    return stand_in
