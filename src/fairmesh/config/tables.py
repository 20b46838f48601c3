"""Configured objects as tables and back: frozen dataclasses to and from what a TOML file can hold."""

import dataclasses
import functools
import numbers
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from fairmesh.config.imports import imported
from fairmesh.config.migrations import KEYS, NAMES
from fairmesh.config.registry import FAMILIES, registered_name, role_of
from fairmesh.errors import BadInput, nearest

T = TypeVar("T")


def register(role: type, members: Mapping[str, type]) -> None:
    """Names the members of a role as experiment files call them. The one line to add for a new member."""
    FAMILIES[role] = dict(members)
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


def to_table(thing: Any) -> Any:
    """A configured object as plain tables, lists and values; fields that are None are left out."""
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        table = {"name": registered_name(thing)} if role_of(type(thing)) else {}
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
    if kind in FAMILIES:
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
            if isinstance(value, Mapping) and (kind in FAMILIES or dataclasses.is_dataclass(kind)):
                raise
            if hasattr(kind, "shorthand"):  # it reads plain numbers too, so the number itself was refused
                raise
    raise reasons[0]


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
    known = FAMILIES[role]
    name = table.get("name")
    if name is None:
        raise BadInput(f"{where}: the table has no name; known: {', '.join(sorted(known))}")
    if not isinstance(name, str) or name not in known:
        raise BadInput(
            f"{where}: unknown {role.__name__.lower()} {name!r}{_hint(NAMES.get(str(name)), str(name), known)}"
        )
    return _filled(known[name], {key: item for key, item in table.items() if key != "name"}, where)


def _hint(renamed: str | None, word: str, known: Iterable[str]) -> str:
    """What to write instead of an unknown word: its new name, or the known word nearest to it."""
    if renamed is not None and renamed in known:
        return f"; it is now {renamed!r}: `fairmesh migrate FILE` rewrites old files"
    return nearest(word, known)


def _filled(kind: type, table: Any, where: str) -> Any:
    if not isinstance(table, Mapping):
        raise BadInput(f"{where}: expected a table, got {_described(table)}")
    hints = _hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    prefix = f"{where}." if where else ""
    for key in table:
        if key not in fields:
            raise BadInput(f"{prefix}{key}: unknown key{_hint(KEYS.get(key), key, fields)}")
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in table:
            raise BadInput(f"{prefix}{name}: missing")
    values = {key: from_table(hints[key], value, f"{prefix}{key}") for key, value in table.items()}
    try:
        return kind(**values)
    except BadInput as error:
        raise BadInput(f"{where}: {error}" if where and not str(error).startswith(where) else str(error)) from error
