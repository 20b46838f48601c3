"""Configured objects as tables and back: frozen dataclasses to and from what a TOML file can hold."""

import dataclasses
import difflib
import functools
import importlib
import importlib.util
import inspect
import numbers
import os
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from fairmesh.errors import BadInput

_FAMILIES: dict[type, dict[str, type]] = {}  # role -> name in files -> member

T = TypeVar("T")


def family(role: type, members: Mapping[str, type]) -> None:
    """Names the members of a role as experiment files call them. The one line to add for a new member."""
    _FAMILIES[role] = dict(members)
    for member in members.values():
        checked(member)


def checked(kind: type[T]) -> type[T]:
    """Makes a configured class check, on construction, that every field is of its declared type; whole numbers stand
    for floats and names for members of a family, as in files."""
    hook = "__post_init__" if hasattr(kind, "__post_init__") else "__init__"
    original = getattr(kind, hook)

    def check(self: Any) -> None:
        for name, hint in _hints(kind).items():
            value = getattr(self, name)
            taken = from_table(hint, value, name)
            if taken is not value:
                object.__setattr__(self, name, taken)

    @functools.wraps(original)
    def hooked(self: Any, *arguments: Any, **fields: Any) -> None:
        if hook == "__post_init__":
            check(self)
        original(self, *arguments, **fields)
        if hook == "__init__":
            check(self)

    setattr(kind, hook, hooked)
    return kind


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """The declared types of a dataclass's fields."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}  # type: ignore[arg-type]


def members(role: type) -> dict[str, type]:
    """Every registered member of a role, by its name in files."""
    return dict(_FAMILIES[role])


def name_of(thing: object) -> str:
    """The name that experiment files use for an object's class; that of the class where it is not registered."""
    for table in _FAMILIES.values():
        for name, member in table.items():
            if type(thing) is member:
                return name
    return type(thing).__name__


def nearest(word: str, known: Iterable[str]) -> str:
    """' (did you mean ...?)' for a mistyped word, or the list of what is known."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known) or 'none'}"


def imported(path: str, where: str) -> Any:
    """The object at 'package.module:name' or 'file.py:name'."""
    module_name, separator, name = path.partition(":")
    if not separator or not name or not module_name.strip("."):
        raise BadInput(f"{where}: {path!r} is not an import path; write 'package.module:name' or 'file.py:name'")
    try:
        module = _module_from_file(module_name) if module_name.endswith(".py") else _module(module_name)
    except Exception as error:  # whatever the user's module raises
        kind = "" if isinstance(error, ImportError | OSError) else f"{type(error).__name__}: "
        raise BadInput(f"{where}: cannot import {module_name!r}: {kind}{error}") from error
    try:
        return functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        known = [word for word in vars(module) if not word.startswith("_")]
        raise BadInput(f"{where}: {module_name!r} has no {name!r}{nearest(name, known)}") from None


def called(path: str, arguments: Mapping[str, Any], where: str) -> Any:
    """What the function or class at an import path gives for these arguments."""
    function = imported(path, f"{where}.path")
    try:
        inspect.signature(function).bind(**arguments)
    except (TypeError, ValueError) as error:
        raise BadInput(f"{where}.arguments do not fit {path}: {error}") from error
    return function(**arguments)


@contextmanager
def _findable(folder: str) -> Iterator[None]:
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _module(name: str) -> types.ModuleType:
    with _findable(os.getcwd()):  # a console script's sys.path lacks the folder the user is in
        return importlib.import_module(name)


def _module_from_file(path: str) -> types.ModuleType:
    # Named by its path: a user's types.py must not take the place of Python's, and the name leads back to the file.
    spec = importlib.util.spec_from_file_location(path, path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise OSError("no such Python file")
    known = sys.modules.get(path)
    written = Path(path).stat().st_mtime_ns
    if known is not None and getattr(known, "_fairmesh_written", None) == written:
        return known
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        with _findable(str(Path(path).resolve().parent)):  # the file's neighbours are its own
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    module._fairmesh_written = written  # type: ignore[attr-defined]
    return module


def read_toml(source: Path | str, where: str = "") -> dict[str, Any]:
    """The table in a TOML file, or in the text of one that came from `where`."""
    try:
        return tomllib.loads(source if isinstance(source, str) else source.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"cannot read {source}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{where or source} is not valid TOML: {error}") from error


def to_table(thing: Any) -> Any:
    """A configured object as plain tables, lists and values; fields that are None are left out."""
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        table = {"name": name_of(thing)} if _family_of(type(thing)) else {}
        for field in dataclasses.fields(thing):
            value = getattr(thing, field.name)
            if value is not None and field.init:
                table[field.name] = to_table(value)
        return table
    if isinstance(thing, Mapping):
        return {str(key): to_table(value) for key, value in thing.items()}
    if isinstance(thing, tuple | list):
        return [to_table(item) for item in thing]
    if isinstance(thing, bool | int | float | str):
        return thing
    if callable(thing) and hasattr(thing, "__qualname__"):
        return f"{thing.__module__}:{thing.__qualname__}"
    raise BadInput(f"a {type(thing).__name__} cannot be written to an experiment file")


def flat_table(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, keys joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= flat_table(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def from_table(kind: Any, value: Any, where: str = "") -> Any:
    """The object of type `kind` that a table describes. Unknown keys and wrong types are refused by name."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is typing.Annotated:
        return from_table(arguments[0], value, where)
    if origin in (Union, types.UnionType):
        return _from_union(arguments, value, where)
    if origin is Literal:
        if value not in arguments:
            choices = ", ".join(repr(a) for a in arguments)
            raise BadInput(f"{where}: {value!r} is not one of {choices}{nearest(str(value), map(str, arguments))}")
        return value
    if origin in (tuple, list):
        if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
            raise BadInput(f"{where}: expected a list, got {_described(value)}")
        return tuple(from_table(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise BadInput(f"{where}: expected a table, got {_described(value)}")
        return {key: from_table(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is Callable or kind is Callable or origin is typing.get_origin(Callable[..., Any]):
        return imported(_plain(str, value, where), where) if not callable(value) else value
    if kind in _FAMILIES:
        return _member_from(kind, value, where)
    if dataclasses.is_dataclass(kind):
        return value if isinstance(value, typing.cast(type, kind)) else _filled(typing.cast(type, kind), value, where)
    return _plain(kind, value, where)


def _described(value: Any) -> str:
    return "a table" if isinstance(value, Mapping) else f"{value!r} ({type(value).__name__})"


def _plain(kind: Any, value: Any, where: str) -> Any:
    if kind in (int, float) and not isinstance(value, bool | int | float):
        if isinstance(value, numbers.Integral):
            value = int(value)
        elif isinstance(value, numbers.Real):
            value = float(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = {
            int: "a whole number",
            float: "a number",
            str: "a string",
            bool: "true or false",
            type(None): "nothing",
        }
        raise BadInput(f"{where}: expected {names.get(kind, kind.__name__)}, got {_described(value)}")
    return value


def _from_union(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    reasons = []
    for kind in kinds:
        if kind is type(None):
            continue
        try:
            return from_table(kind, value, where)
        except BadInput as error:
            reasons.append(error)
            if isinstance(value, Mapping) and (kind in _FAMILIES or dataclasses.is_dataclass(kind)):
                raise
            if hasattr(kind, "shorthand"):  # it reads plain numbers too, so the number itself was refused
                raise
    raise reasons[0]


def _family_of(kind: type) -> type | None:
    return next((role for role, table in _FAMILIES.items() if kind in table.values()), None)


def _member_from(role: type, value: Any, where: str) -> Any:
    if isinstance(value, role):
        return value
    if hasattr(role, "shorthand") and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return role.shorthand(value)  # type: ignore[attr-defined]
        except BadInput as error:
            raise BadInput(f"{where}: {error}") from error
    table = {"name": value} if isinstance(value, str) else value
    if not isinstance(table, Mapping):
        raise BadInput(f"{where}: expected a table with a name, got {_described(value)}")
    known = _FAMILIES[role]
    name = table.get("name")
    if name is None:
        raise BadInput(f"{where}: the table has no name; known: {', '.join(sorted(known))}")
    if not isinstance(name, str) or name not in known:
        raise BadInput(f"{where}: unknown {role.__name__.lower()} {name!r}{nearest(str(name), known)}")
    return _filled(known[name], {key: item for key, item in table.items() if key != "name"}, where)


def _filled(kind: type, table: Any, where: str) -> Any:
    if not isinstance(table, Mapping):
        raise BadInput(f"{where}: expected a table, got {_described(table)}")
    hints = _hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    prefix = f"{where}." if where else ""
    for key in table:
        if key not in fields:
            raise BadInput(f"{prefix}{key}: unknown key{nearest(key, fields)}")
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in table:
            raise BadInput(f"{prefix}{name}: missing")
    values = {key: from_table(hints[key], value, f"{prefix}{key}") for key, value in table.items()}
    try:
        return kind(**values)
    except BadInput as error:
        raise BadInput(f"{where}: {error}" if where and not str(error).startswith(where) else str(error)) from error
