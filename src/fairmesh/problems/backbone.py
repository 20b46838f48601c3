"""[backbone] A frozen prefix of a model, such as a pretrained encoder: its outputs are computed once per row of data,
and only the rest of the model is trained, on these outputs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from fairmesh.config.tables import checked
from fairmesh.errors import BadInput, in_a_line, nearest
from fairmesh.numerics import trees
from fairmesh.numerics.trees import Tree
from fairmesh.problems.torch_draws import TorchDraws

if TYPE_CHECKING:
    from fairmesh.problems.flat_model import FlatModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
_ROWS = 3  # that the prefix is tried on
_CLOSE = (
    1e-3  # share of the largest number by which outputs of one row may differ between batches; they do by about 1e-6
)


@checked
@dataclass(frozen=True)
class Backbone:
    """A part of a model that is not trained, and whose outputs are therefore computed once for every row of data.

    The part is a module inside the model, such as a pretrained encoder. `forward` of the model must call it once, with
    arguments that depend on no trained parameter. It is frozen and in evaluation mode: dropout in it is off, and its
    BatchNorm layers keep their statistics. The whole model is what is measured, saved and exported.

    Outputs are kept in a folder and found again by a fingerprint of the data and of the prefix: its weights, its
    settings, its code, the versions of its libraries, and the fields below (docs/howto/backbones.md).

    Args:
        module: The name of the module in the model, such as "encoder" or "model.encoder", as in
            `model.named_modules()`.
        dtype: How outputs are stored: "float32"; "bfloat16", which takes half of the space; or "float64", which also
            computes them in float64. Default: "float32".
        batch: How many rows are computed at once, >= 1. Default: 64.
        folder: The folder where outputs are kept; None for $FAIRMESH_FEATURES, or `fairmesh/features` in
            $XDG_CACHE_HOME or ~/.cache. Between organisations it is always in the site's state folder. Default: None.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> encoder = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh())
        >>> model = torch.nn.Sequential(encoder, torch.nn.Linear(8, 2))
        >>> labels = torch.arange(20) % 2
        >>> sites = [fm.Site((torch.randn(20, 3) + labels[:, None], labels)) for _ in range(3)]
        >>> problem = fm.Problem(model, sites, backbone=fm.models.Backbone("0"))
        >>> problem.flat_model.dim  # parameters that are trained and sent
        18
    """

    module: str
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    batch: int = 64
    folder: str | None = None

    def __post_init__(self):
        if self.batch < 1:
            raise BadInput(f"backbone.batch must be a whole number >= 1, got {self.batch}")

    @property
    def computed_in(self) -> torch.dtype:
        """The dtype that outputs are computed in."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    @property
    def identity(self) -> str:
        """All that determines numbers, as text."""
        return f"backbone {self.module} {self.dtype} {self.batch}"

    @property
    def around(self) -> list[str]:
        """The names of the modules that the prefix is in, the model itself first."""
        parts = self.module.split(".")
        return [".".join(parts[:k]) for k in range(len(parts))]

    def freeze(self, module: nn.Module, local: Sequence[str]) -> None:
        """Freezes the prefix of a model, and puts it into evaluation mode for good.

        Args:
            module: The model.
            local: The names of parameters that are to be trained at each site.

        Raises:
            BadInput: There is no such prefix, or a part of it is to be trained.
        """
        prefix = self.found_in(module)
        inside = dict(prefix.named_parameters())
        if mine := [name for name in local if name.startswith(f"{self.module}.")]:
            raise BadInput(
                f"parts.local names {mine[0]}, which is inside the frozen prefix {self.module!r} (backbone): its "
                "outputs are computed once, so nothing in it is trained; name parameters of the rest of the model"
            )
        trained = [name for name, parameter in inside.items() if parameter.requires_grad]
        if trained and len(trained) < len(inside):
            raise BadInput(
                f"backbone: {self.module!r} has frozen parameters and {len(trained)} trained ones, such as "
                f"{self.module}.{trained[0]}. Its outputs are computed once, so nothing in it can be trained: call "
                "requires_grad_(False) on all of it; or, to train adapters in it, leave out the backbone"
            )
        named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        held = {id(tensor) for tensor in (*prefix.parameters(), *prefix.buffers())}
        for name, tensor in named:
            if id(tensor) in held and not f"{name}.".startswith(f"{self.module}."):
                raise BadInput(
                    f"backbone: {name} of the rest of the model is also a parameter or buffer of the frozen prefix "
                    f"{self.module!r} (tied weights), so it would be trained in one and not in the other; give the "
                    "rest a copy of its own"
                )
        prefix.requires_grad_(False).eval()

    def found_in(self, module: nn.Module) -> nn.Module:
        """Returns the prefix of a model."""
        names = dict(module.named_modules())
        if not self.module or self.module not in names:
            few = {name for name in names if name and name.count(".") <= self.module.count(".")}
            raise BadInput(f"backbone: the model has no module {self.module!r}{nearest(self.module, few)}")
        if any(isinstance(names[name], torch.jit.ScriptModule) for name in self.around):
            raise BadInput(
                f"backbone: {self.module!r} is inside a module of torch.jit, which cannot run without it; give the "
                "module before torch.jit"
            )
        return names[self.module]

    def in_words(self, module: nn.Module) -> str:
        """Returns what is done with the prefix of a model."""
        prefix = self.found_in(module)
        count = sum(parameter.numel() for parameter in prefix.parameters())
        norms = sum(isinstance(layer, _BatchNorm) for layer in prefix.modules())
        kept = f", and its BatchNorm layers ({norms}) keep their statistics" if norms else ""
        return (
            f"backbone: {self.module!r} ({count:,} parameters) is frozen and in evaluation mode, so dropout in it is "
            f"off{kept}; its outputs are computed once per row"
        )


class Output(NamedTuple):
    """One tensor that a prefix returns."""

    name: str
    shape: tuple[int, ...]  # of one row
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Cut:
    """Where a model is cut: what its prefix returns, and what else the rest reads.

    In place of its inputs, the rest gets a tensor or a tuple of them: the outputs of the prefix that the rest reads,
    then the inputs that the rest reads itself. What it does not read is not kept.

    Args:
        path: The name of the prefix in the model.
        outputs: The tensors that the prefix returns.
        read: Which of these the rest reads, by place.
        constants: What else it returns, such as None, by the place among all that it returns.
        spec: The structure of all that it returns.
        inputs: The inputs of the whole model, without values.
        kept: Which of their tensors the rest reads itself, by place.
    """

    path: str
    outputs: tuple[Output, ...]
    read: tuple[int, ...]
    constants: dict[int, Any]
    spec: TreeSpec
    inputs: Tree
    kept: tuple[int, ...]

    @property
    def kept_outputs(self) -> list[Output]:
        """The outputs that are kept."""
        return [self.outputs[k] for k in self.read]

    def stored_as(self, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Returns shape and dtype of one row of each tensor that the rest gets, if floats are stored in a dtype."""
        made = [(one.shape, dtype if one.dtype.is_floating_point else _stored(one.dtype)) for one in self.kept_outputs]
        leaves = trees.leaves(self.inputs)
        return [*made, *((tuple(leaves[k].shape[1:]), leaves[k].dtype) for k in self.kept)]

    def together(self, tensors: Sequence[Tensor]) -> Tree:
        """Returns tensors as the inputs of the rest."""
        return tensors[0] if len(tensors) == 1 else tuple(tensors)

    def shorten(self, module: nn.Module) -> None:
        """Puts a stand-in for the prefix into a model."""
        module.set_submodule(self.path, _Given(module.get_submodule(self.path)))

    def called(self, module: nn.Module, inputs: Tree) -> Any:
        """Returns what a shortened model returns.

        Args:
            module: The model with a stand-in for its prefix.
            inputs: The inputs of the rest.
        """
        given = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        known = dict(zip(self.read, given))
        parts = iter(
            _nothing(one.shape, one.dtype, given[0])
            if k not in known
            else known[k].to(one.dtype)
            if one.dtype in _WIDER
            else known[k]
            for k, one in enumerate(self.outputs)
        )
        count = len(self.outputs) + len(self.constants)
        returned = [self.constants[k] if k in self.constants else next(parts) for k in range(count)]
        stand_in = module.get_submodule(self.path)
        stand_in.returned = tree_unflatten(returned, self.spec)  # type: ignore[assignment]
        kept = dict(zip(self.kept, given[len(self.read) :]))
        leaves, spec = tree_flatten(self.inputs)
        whole = [
            kept[k] if k in kept else _nothing(leaf.shape[1:], leaf.dtype, given[0]) for k, leaf in enumerate(leaves)
        ]
        return call(module, tree_unflatten(whole, spec))


_WIDER = {torch.uint8: torch.int16}  # bytes would be taken for images, and scaled


def _stored(dtype: torch.dtype) -> torch.dtype:
    return _WIDER.get(dtype, dtype)


def _nothing(shape: Sequence[int], dtype: torch.dtype, beside: Tensor) -> Tensor:
    """Returns rows that nothing reads, which take no memory."""
    if dtype.is_floating_point or dtype == torch.uint8:  # a model gets bytes as floats
        dtype = beside.dtype if beside.is_floating_point() else torch.float32
    return torch.zeros((), dtype=dtype, device=beside.device).expand(len(beside), *shape)


class _Given(nn.Module):
    """Stands for a module whose outputs are known. It has the module's settings, but none of its parts."""

    def __init__(self, module: nn.Module):
        super().__init__()
        plain = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        self.__dict__.update({name: value for name, value in plain.items() if not isinstance(value, Tensor)})
        self.returned: Any = None
        self.training = False

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.returned


def call(module: nn.Module, inputs: Tree) -> Any:
    """Returns what a module returns: a tuple of inputs is its positional arguments, a dictionary its keywords."""
    if isinstance(inputs, dict):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple) else module(inputs)


@dataclass(frozen=True, eq=False)
class BoundBackbone:
    """A backbone of a problem whose sites hold the outputs of the prefix.

    Args:
        settings: The backbone as it was given.
        cut: Where the model is cut.
    """

    settings: Backbone
    cut: Cut


# How the prefix is found to be fit -----------------------------------------------------------------------------------


class _Enough(Exception):
    """Ends a pass as soon as the prefix has returned."""


class _Call(NamedTuple):
    arguments: list[Tensor]
    returned: Any


@contextmanager
def _watched(prefix: nn.Module, stop: bool) -> Iterator[list[_Call]]:
    """Writes down the calls of a module meanwhile; with `stop`, the first one ends the pass."""
    calls: list[_Call] = []

    def after(_: nn.Module, arguments: Any, keywords: Any, returned: Any) -> None:
        given = [one for one in tree_leaves((arguments, keywords)) if isinstance(one, Tensor)]
        calls.append(_Call(given, returned if stop else _copied(returned)))  # the rest may change it in place
        if stop:
            raise _Enough

    handle = prefix.register_forward_hook(after, with_kwargs=True)
    try:
        yield calls
    except _Enough:
        pass
    finally:
        handle.remove()


def returned_by(model: "FlatModel", row: Tensor, inputs: Tree, path: str, draws: TorchDraws | None = None) -> Any:
    """Returns what the prefix of a whole model returns for a batch, in evaluation mode. The rest is not computed.

    Args:
        model: The whole model.
        row: Its parameters.
        inputs: The batch, as the model sees it.
        path: The name of the prefix.
        draws: What answers torch's random functions; None for the same numbers every time. Default: None.
    """

    def action(module: nn.Module) -> Any:
        with _watched(module.get_submodule(path), stop=True) as calls:
            call(module, inputs)
        if not calls:
            raise _called_times(path, 0)
        return calls[0].returned

    return model.within(row, action, None, draws)


def tensors_of(returned: Any, cut: Cut, rows: int) -> list[Tensor]:
    """Returns the tensors that a prefix has returned for some rows. Refuses what has another form than before."""
    leaves, spec = tree_flatten(returned)
    if spec != cut.spec:
        raise BadInput(f"backbone: {cut.path!r} returns another structure for other rows; it must always be the same")
    tensors = [leaf for k, leaf in enumerate(leaves) if k not in cut.constants]
    for one, tensor in zip(cut.outputs, tensors):
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != (rows, *one.shape):
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise BadInput(
                f"backbone: {one.name} of {cut.path!r} has the shape {shape} for {rows} rows, and "
                f"{(_ROWS, *one.shape)} for {_ROWS}; all rows need outputs of one shape, with rows on the first axis"
            )
    return tensors


def cut_at(settings: Backbone, model: "FlatModel", row: Tensor, inputs: Tree, given: Tree) -> Cut:
    """Returns where a model is cut, after trying it.

    Args:
        settings: The backbone.
        model: The whole model, on the CPU in float32.
        row: Its parameters.
        inputs: A few rows of inputs as the model sees them.
        given: The same as the data has them.

    Raises:
        BadInput: The prefix cannot be computed once and for all. The error says why.
    """
    path = settings.module
    inputs = trees.at(inputs, torch.arange(_ROWS) % trees.length(inputs))
    try:
        with torch.enable_grad():
            leaf = row.detach().clone().requires_grad_()

            def action(module: nn.Module) -> list[_Call]:
                with _watched(module.get_submodule(path), stop=False) as calls:
                    call(module, inputs)
                return calls

            calls = model.within(leaf, action)
    except BadInput:
        raise
    except Exception as error:  # a user's module may raise anything
        raise BadInput(f"the model does not accept its inputs: {in_a_line(error)}") from error
    if len(calls) != 1:
        raise _called_times(path, len(calls))
    _refuse_trained_before(path, model, leaf, calls[0].arguments)
    with torch.no_grad():
        cut = _first_cut(path, calls[0].returned, given)
        first = tensors_of(calls[0].returned, cut, _ROWS)
        for one, tensor in zip(cut.outputs, first):
            if not bool(torch.isfinite(tensor).all()):
                raise BadInput(
                    f"backbone: {one.name} of {path!r} has values that are not finite (NaN or infinite) for the first "
                    "rows; look at its weights, and at the scale of the inputs"
                )
        _refuse_random(cut, first, model, row, inputs)
        _refuse_mixing(cut, first, model, row, inputs)
        return _checked_cut(cut, first, model, row, inputs)


def _called_times(path: str, times: int) -> BadInput:
    how = "does not call" if not times else f"calls {times} times"
    return BadInput(
        f"backbone: forward of the model {how} {path!r}, but its outputs can stand for it only if it is called once, "
        "as module(...) and not by another method; name another module, or wrap what is to be frozen in one"
    )


def _copied(returned: Any) -> Any:
    leaves, spec = tree_flatten(returned)
    return tree_unflatten([leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def _refuse_trained_before(path: str, model: "FlatModel", row: Tensor, arguments: Sequence[Tensor]) -> None:
    """Raises BadInput if what the prefix gets depends on trained parameters."""
    trained = [one for one in arguments if one.requires_grad]
    if not trained:
        return
    (slope,) = torch.autograd.grad([one.sum() for one in trained], row, allow_unused=True)
    names = [] if slope is None else [n for n, part in model.parameters_of(slope).items() if bool(part.any())]
    said = f", such as {names[0]}," if names else ""
    raise BadInput(
        f"backbone: what {path!r} gets depends on trained parameters{said} so its outputs change in every round; "
        "freeze those too (parts.frozen), or name a module that comes before them"
    )


def _first_cut(path: str, returned: Any, given: Tree) -> Cut:
    """Returns a cut whose rest reads all inputs."""
    leaves, spec = tree_flatten(returned)
    places = _names_of(returned, len(leaves))
    outputs, constants = [], {}
    for k, (name, leaf) in enumerate(zip(places, leaves)):
        if isinstance(leaf, Tensor):
            if leaf.ndim == 0 or leaf.shape[0] != _ROWS:
                raise BadInput(
                    f"backbone: {name} of {path!r} has the shape {tuple(leaf.shape)} for {_ROWS} rows; its first axis "
                    "must be the rows of the batch, since outputs are kept row by row"
                )
            outputs.append(Output(name, tuple(leaf.shape[1:]), leaf.dtype))
        elif leaf is None or isinstance(leaf, bool | int | float | str):
            constants[k] = leaf
        else:
            cache = "; for a language model, set config.use_cache = False" if "ache" in type(leaf).__name__ else ""
            raise BadInput(
                f"backbone: {path!r} returns a {type(leaf).__name__} ({name}), which cannot be kept row by row; let it "
                f"return tensors, in tuples or dictionaries{cache}"
            )
    if not outputs:
        raise BadInput(f"backbone: {path!r} returns no tensor, so there is nothing to keep")
    empty = trees.mapped(lambda part: torch.empty(0, *part.shape[1:], dtype=part.dtype, device="meta"), given)
    read, kept = range(len(outputs)), range(len(trees.leaves(given)))
    return Cut(path, tuple(outputs), tuple(read), constants, spec, empty, tuple(kept))


def _names_of(returned: Any, count: int) -> list[str]:
    """Returns a name for each leaf of what a prefix returns."""
    if isinstance(returned, Tensor):
        return ["the output"]
    keys = list(returned) if hasattr(returned, "keys") else None
    if keys is not None and len(keys) == count:
        return [f"output {key!r}" for key in keys]
    return [f"output {k}" for k in range(count)]


def _refuse_random(cut: Cut, first: Sequence[Tensor], model: "FlatModel", row: Tensor, inputs: Tree) -> None:
    """Raises BadInput if the prefix gives other outputs for the same rows, also with other random numbers."""
    for seed in (1, 2):
        again = returned_by(model, row, inputs, cut.path, TorchDraws(torch.tensor(seed)))
        for one, before, now in zip(cut.outputs, first, tensors_of(again, cut, _ROWS)):
            if not torch.equal(before, now):
                raise BadInput(
                    f"backbone: {one.name} of {cut.path!r} is random: two passes over the same rows differ, also in "
                    "evaluation mode, so one of them cannot stand for all; make it deterministic, or freeze it with "
                    f'parts.frozen = ["{cut.path}.*"] instead, which computes it in every pass'
                )


def _refuse_mixing(cut: Cut, first: Sequence[Tensor], model: "FlatModel", row: Tensor, inputs: Tree) -> None:
    """Raises BadInput if the outputs of a row depend on the other rows of its batch."""
    fewer = _ROWS - 1
    for rows in (torch.arange(fewer), torch.tensor([_ROWS - 1])):
        part = tensors_of(returned_by(model, row, trees.at(inputs, rows), cut.path), cut, len(rows))
        for one, whole, few in zip(cut.outputs, first, part):
            if not close(whole[rows], few):
                raise BadInput(
                    f"backbone: {one.name} of {cut.path!r} depends on the other rows of its batch, so rows have no "
                    "outputs of their own; use layers without batch statistics there, or leave out the backbone"
                )


def close(one: Tensor, other: Tensor, share: float = _CLOSE) -> bool:
    """Returns whether two tensors differ by no more than rounding errors."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    apart = (one.double() - other.double()).abs().max() if one.numel() else torch.zeros(())
    return bool(apart <= share * one.double().abs().max().clamp(min=1e-6)) if one.numel() else True


def _checked_cut(cut: Cut, first: Sequence[Tensor], model: "FlatModel", row: Tensor, inputs: Tree) -> Cut:
    """Returns the cut with only those outputs and inputs that the rest reads, after comparing the rest with the whole
    model."""
    count, own = len(first), [leaf.clone() for leaf in trees.leaves(inputs)]
    needed: set[int] = set()
    wanted = []
    try:
        rest = model.shortened(cut)
        for key in (None, torch.zeros((), dtype=torch.int64)):  # in evaluation and in training mode
            wanted.append(model(row, trees.mapped(torch.clone, inputs), key))
            given = [tensor.clone() for tensor in (*first, *own)]
            marks = _Marks(given)
            with marks:
                found = rest(row, cut.together(given), key)
            needed |= marks.read | {k for leaf in tree_leaves(found) for k in marks.of(leaf)}
        read, kept = ([k for k in sorted(needed) if (k < count) == is_output] for is_output in (True, False))
        if not read:
            raise BadInput(
                f"backbone: the outputs of the model do not depend on what {cut.path!r} returns; name the module that "
                "they depend on"
            )
        cut = replace(cut, read=tuple(read), kept=tuple(k - count for k in kept))
        rest = model.shortened(cut)
        rows = [*(first[k] for k in cut.read), *(own[k] for k in cut.kept)]
        outputs = [
            rest(row, cut.together([tensor.clone() for tensor in rows]), key)
            for key in (None, torch.zeros((), dtype=torch.int64))
        ]
    except BadInput:
        raise
    except Exception as error:  # a user's module may raise anything
        raise BadInput(
            f"backbone: the model does not run without {cut.path!r}: {in_a_line(error)}. The rest of the model may use "
            "what the module returns, but not its layers or methods"
        ) from error
    for one, other in zip(tree_leaves(wanted), tree_leaves(outputs)):
        if isinstance(one, Tensor) and not close(one, other):
            apart = float((one - other).abs().max())
            raise BadInput(
                f"backbone: the rest of the model gives other outputs for what {cut.path!r} returned (by {apart:.2g}) "
                "than the whole model; it may read something else that the prefix changes, such as its inputs"
            )
    return cut


class _Marks(TorchDispatchMode):
    """Follows which results depend on which tensors, through all operations.

    Args:
        sources: The tensors.
    """

    def __init__(self, sources: Sequence[Tensor]):
        super().__init__()
        self._marks = {_place(tensor): {k} for k, tensor in enumerate(sources)}
        self._alive: list[Any] = list(sources)  # so that no place in memory is used twice
        self.read: set[int] = set()  # those on which a decision in Python depends

    def of(self, leaf: Any) -> set[int]:
        """Returns the numbers of the tensors that a result depends on."""
        return self._marks.get(_place(leaf), set()) if isinstance(leaf, Tensor) else set()

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        marks: set[int] = set().union(*map(self.of, given))
        result = func(*args, **(kwargs or {}))
        if marks:
            made = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
            if not made:
                self.read |= marks
            changed = given if func._schema.is_mutable else []  # type: ignore[attr-defined]
            for tensor in (*made, *changed):
                self._marks[_place(tensor)] = self.of(tensor) | marks
                self._alive.append(tensor)
        return result


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
