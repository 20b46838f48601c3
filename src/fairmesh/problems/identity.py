"""Fingerprints of data and model, the same in every process: a run is continued only with what it was begun with."""

import functools
import hashlib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import is_dataclass
from types import CellType, CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fairmesh.data.samples import Samples
from fairmesh.losses import NamedLoss
from fairmesh.metrics.base import Metric, NamedMetric
from fairmesh.problems.model_loss import BoundModelLoss
from fairmesh.problems.outputs import PackedLoss
from fairmesh.problems.parts import Parts

if TYPE_CHECKING:
    from fairmesh.problems.problem import Problem

_DEPTH = 3  # functions that hold functions, at most


def digest_of(problem: "Problem", of_sites: Mapping[int, str]) -> str:
    """Returns a fingerprint of a problem's model and settings, and of data with these fingerprints."""
    module = problem.initial_model(0)
    hasher = hashlib.sha256()
    hasher.update(repr(sorted(of_sites.items())).encode())
    hasher.update(problem.prior_of_sites.numpy().tobytes())
    hasher.update(problem.initial_whole_row(0).numpy().tobytes())
    for tensor in problem.flat_model.fixed():
        hasher.update(tensor.contiguous().cpu().flatten().view(torch.uint8).numpy().data)
    described = (module, problem.sampling, problem.weight_decay, problem.clip_norm)
    hasher.update(f"{without_addresses(str(described))} {named(problem.loss)} {named(problem.augment)}".encode())
    own = {type(layer) for layer in module.modules() if not type(layer).__module__.startswith("torch.")}
    for name in sorted(map(class_in_words, own)):  # two modules may look alike and compute other things
        hasher.update(name.encode())
    for name, metric in sorted(problem.metrics_by_name.items()):
        if not isinstance(metric, NamedMetric):  # of the user's own; the others compute what their names say
            function = metric.function if isinstance(metric, Metric) else metric
            hasher.update(f"metric {name} {named(function)} {problem.higher_is_better(name)}".encode())
    if problem.models_at_once != "auto":  # "auto" depends on the model alone
        hasher.update(f"{problem.models_at_once} at once".encode())
    if problem.read is not None:
        hasher.update(f"read by {named(problem.read)}".encode())
    if (problem.parts, problem.batch_norm) != (Parts(), "refuse"):
        hasher.update(f"{problem.parts} {problem.batch_norm}".encode())
    if problem.trainer is not None:  # not its code, which may be mended during a run
        hasher.update(b"trained by a function")
    if problem.objective.identity() is not None:
        hasher.update(f"{problem.objective.identity()}".encode())
    return hasher.hexdigest()[:16]


def fingerprint(samples: Samples) -> str:
    """Returns a fingerprint of a set of samples. That of a stream covers its length, the numbers of its rows, and the
    items that are read at the start."""
    hasher = hashlib.sha256()
    if samples.stream is not None:
        rows = samples.stream.rows
        hasher.update(f"{len(samples)} streamed".encode())
        hasher.update(b"" if rows is None else rows.numpy().data)
        samples = samples.seen
    if samples.subgroups is not None:
        hasher.update(repr(samples.subgroup_names).encode())
    for name, tensor in samples.named_tensors():
        hasher.update(name.encode())
        hasher.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        hasher.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def named(function: Any) -> str:
    """Returns a function's name, or the text of a module: the same in every process, and in whatever folder the file of
    the function is."""
    if isinstance(function, functools.partial):
        args = tuple(named(one) if callable(one) else one for one in function.args)
        keywords = {key: named(one) if callable(one) else one for key, one in function.keywords.items()}
        return without_addresses(f"{named(function.func)} {args} {keywords}")
    if isinstance(function, PackedLoss):
        return f"{named(function.function)} of all outputs"
    if isinstance(function, BoundModelLoss):
        return f"{named(function.function)} of the model"
    if isinstance(function, nn.Module | NamedLoss):
        return without_addresses(repr(function))
    if _is_own(function):
        return _own(function)
    code = getattr(function, "__code__", None)
    body = (code.co_code.hex(), [str(c) for c in code.co_consts if not hasattr(c, "co_code")]) if code else ""
    return f"{getattr(function, '__qualname__', type(function))} {body}"


def _is_own(function: Any) -> bool:
    """Returns whether a function or class is the user's own."""
    return (getattr(function, "__module__", None) or "").split(".")[0] not in ("torch", "fairmesh", "builtins")


def _own(function: Any, depth: int = 0) -> str:
    """Returns a text of a function of the user's own: its code, the names it uses, its defaults, and what it has from
    the function around it. Functions that it calls by name are not in it."""
    if isinstance(function, type):
        return class_in_words(function, depth)
    code = getattr(function, "__code__", None)
    if code is None:  # an object that can be called
        state = repr(function) if is_dataclass(function) else sorted(map(str, getattr(function, "__dict__", {})))
        call = _own(type(function).__call__, depth + 1) if depth < _DEPTH else ""
        return without_addresses(f"{type(function).__qualname__} {call} {state}")
    defaults = (
        *(function.__defaults__ or ()),
        *(value for _, value in sorted((function.__kwdefaults__ or {}).items())),
    )
    folder = os.path.dirname(code.co_filename)
    around = [_value(one, depth + 1, folder) for one in defaults]
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        if cell != CellType():
            held = cell.cell_contents
            around.append(without_addresses(repr(held)) if name == "__class__" else _value(held, depth + 1, folder))
    return f"{function.__qualname__} {_text(code)} {around}"


def _value(value: Any, depth: int, folder: str) -> str:
    """Returns a text of a value that a function holds whose file is in this folder."""
    if isinstance(value, functools.partial):
        return named(value)
    if callable(value) and not isinstance(value, nn.Module) and not (isinstance(value, type) and not _is_own(value)):
        return _own(value, depth) if depth < _DEPTH else ""
    text = without_addresses(repr(value))
    return text.replace(folder + os.sep, "").replace(folder, ".") if os.path.isabs(folder) else text


def without_addresses(text: str) -> str:
    """Returns what `repr` says without the addresses of objects in memory and the folders of Python files."""
    return re.sub(r"""(?<=['"<])/[^'"<>]*/(?=[^/'"<>]*\.py)| at 0x[0-9a-fA-F]+""", "", text)


def _text(code: CodeType) -> str:
    consts = [
        _text(one) if isinstance(one, CodeType) else str(sorted(map(repr, one)) if isinstance(one, frozenset) else one)
        for one in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {consts}"


def class_in_words(kind: type, depth: int = 0) -> str:
    """Returns a text of all functions that a class of the user's own defines, or inherits from another such class, but
    not from one of an installed package."""
    texts = []
    for one in kind.__mro__:
        if one is kind or (_is_own(one) and not _is_installed(one.__module__)):
            functions = {name: value for name, value in vars(one).items() if isinstance(value, FunctionType)}
            texts.append(f"{one.__qualname__} {[_own(functions[name], depth) for name in sorted(functions)]}")
    return " ".join(texts)


def _is_installed(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return module.split(".")[0] in sys.stdlib_module_names or "site-packages" in file or "dist-packages" in file
