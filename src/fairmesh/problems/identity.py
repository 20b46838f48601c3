"""What a run is continued with: data, model and every setting of a problem, the same in every process and folder."""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import re
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Mapping
from numbers import Number
from pathlib import PurePath
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fairmesh.data.samples import Samples
from fairmesh.metrics.base import NamedMetric

if TYPE_CHECKING:
    from fairmesh.problems.prepared import Prepared

# By class, the fields that are no part of a run's identity. Every other field of a problem and of what it contains is,
# also one that a class of the user's own adds: a run is not continued if one has another value. An object that is no
# dataclass goes by its code and the names of its attributes, whose values may change while it is used.
NOT_PART: dict[str, tuple[str, ...]] = {
    "Problem": (
        *("model", "sites", "prior", "test", "validation", "targets", "splits"),  # they are in "model" and "data"
        *("models_at_once", "class_names"),  # they change rounding errors, and what people read
        "metrics",  # those of the user's own are in "own metrics"; the others compute what their names say
        "primary",  # only `keep_best` computes anything by it: it is in "best by" of a run that does
    ),
    "Objective": ("local_losses", "untrained_losses", "constant_losses", "penalties"),  # found when the run starts
    "LocalTrainer": ("function",),  # may be mended during a run
    "BoundModelLoss": ("each", "by_vmap"),  # found by running the function
    "PackedLoss": ("packing",),  # follows from the model's outputs
}
_DEPTH = 3  # functions and objects that hold others, at most
_OF_MODULES = frozenset(vars(nn.Module()))


def identity_of(problem: "Prepared", of_sites: Mapping[int, str]) -> dict[str, Any]:
    """Returns all that makes two problems the same, by name: digests of the model and of data with these fingerprints,
    and the settings that differ from their defaults."""
    module = problem.initial_model(0)
    model = [problem.initial_whole_row(0), *problem.flat_model.fixed()]
    own = {name: m for name, m in problem.metrics.items() if not isinstance(m, NamedMetric)}
    return {
        "data": hashed(sorted(of_sites.items()), problem.prior_of_sites),
        "model": hashed(_module_in_words(module), *model),
        "class": described(problem.kind),
        **_settings(problem.kind, problem.settings(), 0, ""),
        **({"own metrics": described(own)} if own else {}),
    }


def digest_of(identity: Mapping[str, Any]) -> str:
    """Returns a short fingerprint of an identity."""
    return hashed(json.dumps(identity, sort_keys=True))


def fingerprint(samples: Samples) -> str:
    """Returns a fingerprint of a set of samples. That of a stream covers its length, the numbers of its rows, and the
    items that are read at the start."""
    if samples.sealed:
        return samples.sealed.fingerprint
    parts: list[Any] = []
    if samples.stream:
        parts += [f"{len(samples)} streamed", "" if samples.stream.whole else samples.stream.rows]
    if samples.units is not None:  # by which rows are held out
        parts += ["units", samples.units]
    samples = samples.seen
    if samples.subgroups is not None:
        parts.append(samples.subgroup_names)
    return hashed(*parts, *itertools.chain(*samples.named_tensors()), digits=64)


def hashed(*parts: Any, digits: int = 16) -> str:
    """Returns a digest of tensors and of the texts of other values."""
    hasher = hashlib.sha256()
    hash_into(hasher, *parts)
    return hasher.hexdigest()[:digits]


def hash_into(hasher: Any, *parts: Any) -> None:
    """Adds tensors and the texts of other values to what is hashed."""
    for part in parts:
        if isinstance(part, Tensor):
            hasher.update(f"{part.dtype}{tuple(part.shape)}".encode())
            hasher.update(part.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().data)
        else:
            hasher.update(str(part).encode())


def described(value: Any, depth: int = 0, folder: str = "") -> Any:
    """Returns a value as plain tables, lists, numbers and texts: of a dataclass its class and the fields that differ
    from their defaults; of functions, modules and tensors their names and digests.

    Args:
        value: A setting, or what a function or an object of the user's own holds.
        depth: How many functions and objects it is in. Default: 0.
        folder: The folder of the file of the function that holds it, left out of texts. Default: "".
    """
    if isinstance(value, bool | int | None) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, str):
        return _anywhere(value, folder)
    if isinstance(value, Mapping):
        return {str(key): described(value[key], depth, folder) for key in value}
    if isinstance(value, tuple | list):
        return [described(item, depth, folder) for item in value]
    if isinstance(value, set | frozenset):  # whose order is another one in every process
        return sorted((described(item, depth, folder) for item in value), key=str)
    if isinstance(value, functools.partial):
        return described({"function": value.func, "args": value.args, "keywords": value.keywords}, depth, folder)
    return _object_in_words(value, depth, folder)


def _object_in_words(value: Any, depth: int, folder: str) -> Any:
    """Returns a description of a tensor, a module, a dataclass, a function, a class or another object."""
    if isinstance(value, Tensor):
        return f"tensor {hashed(value)}"
    if isinstance(value, nn.Module):
        return f"{type(value).__qualname__} {hashed(_module_in_words(value), *value.state_dict().values())}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"class": described(type(value), depth)} | _settings(type(value), _values(value), depth, folder)
    if name := getattr(value, "__qualname__", ""):
        if not _is_own(value):
            return f"{value.__module__}.{name}"
        return f"{name} {hashed(code_in_words(value, depth))}" if depth < _DEPTH else name
    if _is_users(type(value)) and hasattr(value, "__dict__"):
        return {"class": described(type(value), depth), "attributes": sorted(vars(value))}
    return f"{type(value).__qualname__} {_anywhere(repr(value), folder)}"


def digest_of_now(problem: "Prepared") -> str:
    """Returns a digest of all that gradients and losses follow from besides rows, as it is now: model, loss and
    settings, also the numbers inside of the user's objects."""
    return digest_of(identity_of(problem, {}) | {"held": _held_values(problem)})


def _held_values(problem: "Prepared") -> str:
    """Returns a digest of the numbers, texts and tensors that a problem's model, loss and other objects hold now. An
    identity leaves them out, since they may change while the objects are used."""
    settings = {name: value for name, value in problem.settings().items() if name not in NOT_PART["Problem"]}
    hasher, seen, left = hashlib.sha256(), dict[int, Any](), [("", [problem.initial_model(0), settings])]
    while left:  # no recursion, since objects may hold each other
        name, thing = left.pop()
        parts = _parts_of(thing)
        hash_into(hasher, name, _alone(thing) if parts is None else type(thing).__qualname__, "\0")
        if parts and id(thing) not in seen:
            seen[id(thing)] = thing  # kept alive, so that no other object gets its number
            left += sorted(((_anywhere(str(key)), part) for key, part in parts.items()), key=lambda pair: pair[0])
    return hasher.hexdigest()


def _alone(thing: Any) -> str:
    """Returns a number, a text or a tensor as text, without folders and addresses; of other things their kind."""
    if isinstance(thing, np.ndarray | np.generic):
        values = thing.tobytes() if thing.dtype.kind in "biufcSUmM" else str(thing.tolist()).encode()
        return f"{thing.dtype.str}{thing.shape}{hashlib.sha256(values).hexdigest()}"
    if isinstance(thing, Tensor):
        try:
            return hashed(thing.resolve_conj().to_dense())
        except (RuntimeError, NotImplementedError):  # without values, or nested
            return f"{thing.dtype}{thing.layout}"
    if isinstance(thing, str | PurePath) and os.path.isabs(thing):
        return os.path.basename(thing)
    if isinstance(thing, str | bytes | bool | None | Number | range | PurePath):
        return _anywhere(repr(thing))
    return type(thing).__qualname__


def _parts_of(thing: Any) -> Mapping[Any, Any] | None:
    """Returns what an object holds, by name; None for one that holds nothing of the user's own."""
    if isinstance(thing, Mapping):
        return thing
    if isinstance(thing, set | frozenset):
        return dict(enumerate(sorted(thing, key=str)))
    if isinstance(thing, tuple | list | deque):
        return dict(enumerate(thing))
    if isinstance(thing, functools.partial):
        return {"function": thing.func, "args": thing.args, "keywords": thing.keywords}
    if isinstance(thing, MethodType):
        return {"self": thing.__self__, "function": thing.__func__}
    if isinstance(thing, FunctionType):
        return _parts_of_function(thing)
    if isinstance(thing, type):
        return _parts_of_class(thing) if _is_users(thing) else None
    if isinstance(thing, nn.Module):  # parameters and buffers are in the identity
        own = {name: value for name, value in vars(thing).items() if name not in _OF_MODULES}
        hooks = [*thing._forward_hooks.values(), *thing._forward_pre_hooks.values()]  # their keys count all hooks
        return own | {"modules": thing._modules, "hooks of torch": hooks} | _class_of(thing)
    own = _is_users(type(thing))
    if own or dataclasses.is_dataclass(thing) or isinstance(thing, SimpleNamespace | Namespace):
        slots = [
            name for base in type(thing).__mro__ for name in getattr(base, "__slots__", ()) if hasattr(thing, name)
        ]
        held = {name: getattr(thing, name) for name in slots if not name.startswith("__")}
        return held | getattr(thing, "__dict__", {}) | (_class_of(thing) if own else {})
    return None


def _parts_of_class(kind: type) -> dict[str, Any]:
    """Returns what a class of the user's own defines, or inherits from another such class."""
    found: dict[str, Any] = {}
    for base in filter(_is_users, reversed(kind.__mro__)):
        found |= vars(base)
    plain = ("__module__", "__dict__", "__weakref__", "__doc__", "__qualname__")
    parts = {name: _unwrapped(value) for name, value in found.items() if name not in plain}
    return {name: value for name, value in parts.items() if name[:2] != "__" or isinstance(value, FunctionType)}


def _unwrapped(value: Any) -> Any:
    """Returns the functions behind a property, a method of a class, or a decorator that says what it wraps."""
    if isinstance(value, property):
        return [value.fget, value.fset]
    for name in ("__wrapped__", "__func__", "func"):
        inner = getattr(value, name, None)
        if isinstance(inner, FunctionType):
            return inner
    return value


def _class_of(thing: Any) -> dict[str, Any]:
    return {"class": type(thing)} if _is_own(type(thing)) else {}


def _parts_of_function(function: FunctionType) -> dict[str, Any]:
    """Returns the code, defaults, what the function has from the function around it, and the globals that it names:
    values, and the user's own functions and classes, also those of a module of the user's own."""
    if not _is_own(function):
        return {}
    closure = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    cells = {name: cell.cell_contents for name, cell in closure.items() if cell != CellType()}
    names = sorted(_names_in(function.__code__))  # the order of a set is another one in every process
    named = {name: function.__globals__[name] for name in names if name in function.__globals__}
    left = [(name, value) for name, value in named.items() if isinstance(value, ModuleType) and _is_users(value)]
    seen = {id(value) for _, value in left}
    while left:  # modules of the user's own, and those in them
        alias, module = left.pop()
        inside = {f"{alias}.{name}": vars(module)[name] for name in names if name in vars(module)}
        found = [(k, v) for k, v in inside.items() if isinstance(v, ModuleType) and _is_users(v) and id(v) not in seen]
        seen |= {id(value) for _, value in found}
        left, named = [*left, *found], named | inside
    held = {name: value for name, value in named.items() if not isinstance(value, ModuleType)}
    held = {k: _unwrapped(v) for k, v in held.items() if not isinstance(v, type | FunctionType) or _is_users(v)}
    around = {"defaults": function.__defaults__, "keywords": function.__kwdefaults__, "closure": cells}
    return around | {"globals": held, "code": _text(function.__code__)}


def _names_in(code: CodeType) -> set[str]:
    """Returns the names that code uses, also that of functions inside of it."""
    inside = [_names_in(const) for const in code.co_consts if isinstance(const, CodeType)]
    return {*code.co_names}.union(*inside)


def _values(thing: Any) -> dict[str, Any]:
    return {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing)}


def _settings(kind: Any, values: Mapping[str, Any], depth: int, folder: str) -> dict[str, Any]:
    """Returns the fields of a dataclass that differ from their defaults."""
    not_part = {name for base in kind.__mro__ for name in NOT_PART.get(base.__name__, ())}
    table = {}
    for field in dataclasses.fields(kind):
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        if field.name in not_part:
            continue
        value = values[field.name]
        if dataclasses.is_dataclass(value) and type(value) is type(default):
            table[field.name] = _settings(type(value), _values(value), depth, folder)
        elif default is dataclasses.MISSING or described(value, depth, folder) != described(default, depth, folder):
            table[field.name] = described(value, depth, folder)
    return {name: value for name, value in table.items() if value != {}}


def _module_in_words(module: nn.Module) -> str:
    """Returns the text of a module, and of the code of its classes: two may look alike and compute other things."""
    own = {type(layer) for layer in module.modules() if not type(layer).__module__.startswith("torch.")}
    return " ".join([_anywhere(str(module)), *sorted(map(class_in_words, own))])


def _is_own(function: Any) -> bool:
    """Returns whether a function or class is the user's own, or of a package other than torch and fairmesh."""
    return _module_of(function).split(".")[0] not in ("torch", "fairmesh", "builtins")


def _is_users(thing: Any) -> bool:
    """Returns whether a function, a class or a module is the user's own, and of no installed package."""
    name = _module_of(thing)
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    installed = name.split(".")[0] in sys.stdlib_module_names or "site-packages" in file or "dist-packages" in file
    return _is_own(thing) and not installed


def _module_of(thing: Any) -> str:
    return thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None) or ""


def code_in_words(function: Any, depth: int = 0) -> str:
    """Returns a text of a function or class of the user's own: its code, the names it uses, its defaults, and what it
    has from the function around it. Functions that it calls by name are not in it."""
    if isinstance(function, type):
        return class_in_words(function, depth)
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return function.__qualname__
    keywords = sorted((function.__kwdefaults__ or {}).items())
    held = [*(function.__defaults__ or ()), *(value for _, value in keywords)]
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        if cell != CellType():
            held.append(cell.cell_contents.__qualname__ if name == "__class__" else cell.cell_contents)
    folder = os.path.dirname(code.co_filename)
    return f"{function.__qualname__} {_text(code)} {described(held, depth + 1, folder)}"


def class_in_words(kind: type, depth: int = 0) -> str:
    """Returns a text of all functions that a class of the user's own defines, or inherits from another such class, but
    not from one of an installed package."""
    texts = []
    for base in kind.__mro__:
        if base is kind or _is_users(base):
            functions = {name: value for name, value in vars(base).items() if isinstance(value, FunctionType)}
            texts.append(f"{base.__qualname__} {[code_in_words(functions[name], depth) for name in sorted(functions)]}")
    return " ".join(texts)


def _text(code: CodeType) -> str:
    consts = [
        _text(const)
        if isinstance(const, CodeType)
        else str(sorted(map(repr, const)) if isinstance(const, frozenset) else const)
        for const in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {consts}"


def _anywhere(text: str, folder: str = "") -> str:
    """Returns a text without the addresses of objects in memory, the folders of Python files, and this folder."""
    text = re.sub(r"""(?:^|(?<=['"<]))/[^'"<>]*/(?=[^/'"<>]*\.py)| at 0x[0-9a-fA-F]+""", "", text)
    return text.replace(folder + os.sep, "").replace(folder, ".") if os.path.isabs(folder) else text
