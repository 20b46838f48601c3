"""Configured objects as tables and back: frozen dataclasses to and from what a TOML file can hold.

A class that is registered for its role goes by its name there: `name = "ad-gda"`. Any other class of a role goes by its
import path: `name = "import"`, `path = "mine.py:MyAlgorithm"`, and its own fields.
"""

import dataclasses
import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from fairmesh.config.imports import class_at, imported, path_of
from fairmesh.config.ranges import Within
from fairmesh.config.registry import FAMILIES, IMPORT, is_registered, registered_name, role_of
from fairmesh.errors import BadInput, nearest, refusing

T = TypeVar("T")


def register(role: type, members: Mapping[str, type]) -> None:
    """Registers members of a role under their names in experiment files. A new member is one more line there."""
    FAMILIES.setdefault(role, {}).update(members)
    for member in members.values():
        checked(member)


class Instead(NamedTuple):
    """What to do instead of giving a field a value that it does not take; part of the field's annotation."""

    value: str
    advice: str


def checked(kind: type[T]) -> type[T]:
    """Makes a configured class check the types of its fields on construction. As in files, whole numbers are accepted
    as floats, and names as members of a role.

    Registered classes have this. The fields of any other class of a role are checked when an object of it becomes part
    of an Experiment or of a registered class, or is read from a file. To have them checked as soon as the object is
    made, put `@checked` above `@dataclass(frozen=True)`. A class in which the default of a field follows from
    other fields has a method `completed`, which returns such fields."""
    hook = "__post_init__" if hasattr(kind, "__post_init__") else "__init__"
    original = getattr(kind, hook)

    @functools.wraps(original)
    def hooked(self: Any, *arguments: Any, **fields: Any) -> None:
        if hook == "__init__":
            original(self, *arguments, **fields)
        for fields_to_set in (functools.partial(_converted, self, kind), getattr(self, "completed", dict)):
            for name, value in fields_to_set().items():
                object.__setattr__(self, name, value)
        if hook == "__post_init__":
            original(self, *arguments, **fields)

    setattr(kind, hook, hooked)
    return kind


def _converted(thing: Any, kind: type, where: str = "") -> dict[str, Any]:
    """Returns the fields of an object that have another value in their declared types. Refuses wrong types."""
    prefix = f"{where}." if where else ""
    given = {name: getattr(thing, name) for name in settings(kind)}
    taken = {name: from_table(hint, given[name], f"{prefix}{name}") for name, hint in field_types(kind).items()}
    return {name: value for name, value in taken.items() if value is not given[name]}


@functools.cache
def field_types(kind: type) -> dict[str, Any]:
    """Returns the declared types of a dataclass's fields."""
    advice = "annotate them with names that its module knows"
    with refusing(f"{kind.__qualname__}: the types of its fields cannot be found", advice=advice):
        hints = typing.get_type_hints(kind, include_extras=True)
    return {name: hints[name] for name in settings(kind)}


def settings(kind: type) -> dict[str, dataclasses.Field]:
    """Returns the fields that a class is constructed with, by name, in the order of its arguments; none for a plain
    class."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return {field.name: field for field in sorted(fields, key=lambda field: field.kw_only is True) if field.init}


def to_table(thing: Any, defaults: bool = True) -> Any:
    """Returns a configured object as plain tables, lists and values. Fields that are None are left out; without
    `defaults`, also those that have their default value.

    The table of an object with a role names its class, by its registered name or as "import" with its import path. So
    two classes with the same fields have different tables."""
    role = None if isinstance(thing, type) else role_of(type(thing))
    if role and not is_registered(type(thing)):
        check_configurable(type(thing), role)
    if role or (dataclasses.is_dataclass(thing) and not isinstance(thing, type)):
        table: dict[str, Any] = _heading(thing) if role else {}
        for name, field in settings(type(thing)).items():
            value = getattr(thing, name)
            if value is not None and (defaults or not _is_default(field, value)):
                table[name] = to_table(value, defaults)
        return table
    if isinstance(thing, Mapping):
        return {str(key): to_table(value, defaults) for key, value in thing.items()}
    if isinstance(thing, tuple | list):
        return [to_table(item, defaults) for item in thing]
    if isinstance(thing, bool | int | float | str):
        return thing
    if callable(thing) and hasattr(thing, "__qualname__"):
        return f"{thing.__module__}:{thing.__qualname__}"
    raise BadInput(f"a {type(thing).__name__} cannot be written to an experiment file")


def _is_default(field: dataclasses.Field, value: Any) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return value == field.default_factory()
    return field.default is not dataclasses.MISSING and value == field.default


def _heading(thing: Any) -> dict[str, Any]:
    if is_registered(type(thing)):
        return {"name": registered_name(thing)}
    return {"name": IMPORT, "path": path_of(type(thing))}


def check_configurable(kind: type, role: type, where: str = "") -> None:
    """Refuses a class that cannot be configured. It must define all methods of its role and be a dataclass, frozen if
    those of its role are. If they are not (observers), a class without settings may be a plain one."""
    who = f"{where}: {kind.__qualname__}" if where else kind.__qualname__
    params = getattr(kind, "__dataclass_params__", None)
    own = inspect.get_annotations(kind)
    if params and "__dataclass_params__" not in vars(kind):  # inherited, so its own fields would be none
        params = None if any("ClassVar" not in str(hint) for hint in own.values()) else params
    frozen = any(member.__dataclass_params__.frozen for member in FAMILIES[role].values())  # type: ignore[attr-defined]
    plain = not frozen and not own and kind.__init__ is object.__init__
    if not plain and (not params or (frozen and not params.frozen)):
        what, line = ("frozen dataclass", "@dataclass(frozen=True)") if frozen else ("dataclass", "@dataclass")
        raise BadInput(
            f"{who} is not a {what}, so its settings are not known; write {line} above `class {kind.__name__}`"
        )
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    if missing:
        raise BadInput(f"{who} lacks {', '.join(missing)}; a {role.__name__} defines all of them")
    taken = [name for name in settings(kind) if name in ("name", "path")]
    if taken:
        raise BadInput(f"{who} has a field {taken[0]!r}, which files use to name the class itself; rename the field")


def from_table(kind: Any, value: Any, where: str = "") -> Any:
    """Returns the object of type `kind` that a table describes. Unknown keys and wrong types are refused by name."""
    origin = Callable if kind is Callable else get_origin(kind)
    if kind is Any:
        return value
    if origin:
        if origin not in _READERS:
            raise BadInput(
                f"{where}: a file cannot hold a field of type {kind}; use a number, a string, a list or a table"
            )
        return _READERS[origin](get_args(kind), value, where)
    role = role_of(kind) if isinstance(kind, type) else None
    if role and not (isinstance(value, Mapping) and "name" not in value and is_registered(kind)):
        made = _member_from(role, value, where)
        if not isinstance(made, kind):
            raise BadInput(f"{where}: expected a {kind.__name__}, got a {type(made).__name__}")
        return made
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return value if isinstance(value, kind) else _filled(kind, value, where)
    return _plain(kind, value, where)


def _from_annotated(arguments: tuple[Any, ...], value: Any, where: str) -> Any:
    try:
        taken = from_table(arguments[0], value, where)
    except BadInput as error:
        advice = [note.advice for note in arguments[1:] if isinstance(note, Instead) and note.value == value]
        raise BadInput(" ".join([str(error), *advice])) from error
    for note in arguments[1:]:
        if isinstance(note, Within) and not note.has(taken):
            raise BadInput(f"{where} {note.refusal(taken)}")
    return taken


def _from_literal(choices: tuple[Any, ...], value: Any, where: str) -> Any:
    if value not in choices:
        hint = nearest(str(value), map(str, choices))
        raise BadInput(f"{where}: {value!r} is not one of {', '.join(map(repr, choices))}{hint}")
    return value


def _from_list(kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise BadInput(f"{where}: expected a list, got {_described(value)}")
    items = list(value)
    kinds = kinds[:1] * len(items) if kinds[1:] == (Ellipsis,) else kinds
    if len(kinds) != len(items):
        raise BadInput(f"{where}: expected a list of {len(kinds)}, got {len(items)}")
    return tuple(from_table(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(kinds, items)))


def _from_mapping(kinds: tuple[Any, ...], value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise BadInput(f"{where}: expected a table, got {_described(value)}")
    return {key: from_table(kinds[1], item, f"{where}.{key}") for key, item in value.items()}


def _described(value: Any) -> str:
    return "a table" if isinstance(value, Mapping) else f"{value!r} ({type(value).__name__})"


_PLAIN: dict[Any, tuple[type, str]] = {  # what a field takes, and how messages call it
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    str: (str, "a string"),
    bool: (bool, "true or false"),
}


def _plain(kind: Any, value: Any, where: str) -> Any:
    accepted, name = _PLAIN.get(kind, (kind, kind.__name__))
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise BadInput(f"{where}: expected {name}, got {_described(value)}")
    return kind(value) if accepted is not kind and not isinstance(value, kind) else value


def _from_union(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    reasons = []
    for kind in _likely(kinds, value):
        try:
            return from_table(kind, value, where)
        except BadInput as error:
            reasons.append(error)
            meant = isinstance(value, Mapping) and (_has_role(kind) or dataclasses.is_dataclass(kind))
            if meant or hasattr(kind, "shorthand"):  # which reads plain numbers too, so the number was refused
                raise
    raise reasons[0]


_READERS: dict[Any, Callable[[tuple[Any, ...], Any, str], Any]] = {  # by the origin of a type with arguments
    typing.Annotated: _from_annotated,
    Union: _from_union,
    types.UnionType: _from_union,
    Literal: _from_literal,
    tuple: _from_list,
    list: lambda kinds, value, where: _from_list((*kinds, Ellipsis), value, where),
    Sequence: lambda kinds, value, where: _from_list((*kinds, Ellipsis), value, where),
    dict: _from_mapping,
    Mapping: _from_mapping,
    Callable: lambda _, value, where: value if callable(value) else imported(_plain(str, value, where), where),
}


def _likely(kinds: tuple[Any, ...], value: Any) -> list[Any]:
    """Returns the kinds that a value can mean, the likeliest first, so that an error is about that one. A table with a
    name means a member of a role, and one without means another dataclass. A string with a colon is the path of a
    function."""
    by_form: dict[str, list[Any]] = {}
    for kind in kinds:
        by_form.setdefault(_form_of(kind, value), []).append(kind)
    named, plain = by_form.get("role", []), by_form.get("dataclass", [])
    if isinstance(value, Mapping) and named and plain:
        return named if "name" in value else plain
    if isinstance(value, str):
        if ":" in value and "function" in by_form:
            return by_form["function"]
        if named and "this text" not in by_form:
            return named
    unlikely = ("list",) if isinstance(value, Mapping) else ()
    likely = [kind for kind in kinds if kind is not type(None) and _form_of(kind, value) not in unlikely]
    return likely or list(kinds)


def _form_of(kind: Any, value: Any) -> str:
    """Returns what a value of this kind is in a file, as far as it helps to tell which of several kinds is meant."""
    origin = Callable if kind is Callable else get_origin(kind)
    if kind is str or (origin is Literal and value in get_args(kind)):
        return "this text"
    if _has_role(kind):
        return "role"
    if dataclasses.is_dataclass(kind):
        return "dataclass"
    return {Callable: "function", tuple: "list", list: "list", Sequence: "list"}.get(origin, "other")


def _has_role(kind: Any) -> bool:
    return isinstance(kind, type) and bool(role_of(kind))


def _member_from(role: type, value: Any, where: str) -> Any:
    if isinstance(value, role):
        return value if is_registered(type(value)) else _with_checked_fields(value, where)
    if hasattr(role, "shorthand") and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return role.shorthand(value)  # type: ignore[attr-defined]
        except BadInput as error:
            raise BadInput(f"{where}: {error}") from error
    table = {"name": value} if isinstance(value, str) else value
    if not isinstance(table, Mapping):
        raise BadInput(f"{where}: expected a table with a name, got {_described(value)}")
    known = {IMPORT: role, **FAMILIES[role]}
    fields = dict(table)
    name = fields.pop("name", None)
    if not name:
        raise BadInput(f"{where}: the table has no name; known: {', '.join(sorted(known))}")
    if not isinstance(name, str) or name not in known:
        noun = getattr(role, "noun", role.__name__.lower())
        raise BadInput(f"{where}: unknown {noun} {name!r}{nearest(str(name), known)}")
    if name == IMPORT and (known[IMPORT] is role or _names_class_with_fields(role, fields, where)):
        return _imported_member(role, fields, where)
    return _filled(known[name], fields, where)


def _names_class_with_fields(role: type, table: Mapping[str, Any], where: str) -> bool:
    """Returns whether a table means a class of the role. Data and models may also be functions. The table of a class
    has the class's fields next to the path. That of a function has `arguments`, and it is imported when called."""
    if table.keys() <= {"path", "arguments"} or not isinstance(table.get("path"), str):
        return False
    found = class_at(table["path"], f"{where}.path")
    return isinstance(found, type) and issubclass(found, role)


def _imported_member(role: type, table: Mapping[str, Any], where: str) -> Any:
    """Returns an object of the class that a table names by its import path, with the fields next to the path."""
    if "path" not in table:
        raise BadInput(f"{where}.path: missing; write path = 'file.py:Class', the {role.__name__} to import")
    path = _plain(str, table["path"], f"{where}.path")
    kind = class_at(path, f"{where}.path")
    if not isinstance(kind, type) or not issubclass(kind, role):
        what = f"the class {kind.__qualname__}" if isinstance(kind, type) else f"a {type(kind).__name__}"
        raise BadInput(f"{where}.path: {path} is {what}, not a subclass of {role.__name__}; derive a class from it")
    check_configurable(kind, role, f"{where}.path")
    fields = {key: item for key, item in table.items() if key != "path"}
    with refusing(f"{where}: {path} cannot be made with these fields"):
        return _filled(kind, fields, where)


def _with_checked_fields(thing: Any, where: str) -> Any:
    """Returns the object with its fields checked and converted, which a class that is not registered has not done."""
    changed = _converted(thing, type(thing), where)
    if changed and thing.__dataclass_params__.frozen:
        return dataclasses.replace(thing, **changed)
    for name, value in changed.items():  # in place: an observer's owner may read from it later
        setattr(thing, name, value)
    return thing


class _UnknownKey(BadInput):
    """A table has a key that is no field. `place` is the whole path to the key."""

    def __init__(self, place: str, key: str, hint: str) -> None:
        super().__init__(f"{place}: unknown key{hint}")
        self.place, self.key = place, key


def _filled(kind: type, table: Any, where: str) -> Any:
    if not isinstance(table, Mapping):
        raise BadInput(f"{where}: expected a table, got {_described(table)}")
    hints, fields = field_types(kind), settings(kind)
    prefix = f"{where}." if where else ""
    for key in table:
        if key not in fields:
            raise _UnknownKey(f"{prefix}{key}", key, nearest(key, fields))
    for name, field in fields.items():
        if name not in table and field.default is field.default_factory is dataclasses.MISSING:
            raise BadInput(f"{prefix}{name}: missing")
    try:
        values = {key: from_table(hints[key], value, f"{prefix}{key}") for key, value in table.items()}
    except _UnknownKey as error:
        if where or error.key not in fields:
            raise
        # A line at the end of a TOML file belongs to the last section.
        hint = f"; {error.key} belongs at the top of the file, above the first [section]"
        raise BadInput(f"{error.place}: unknown key{hint}") from error
    try:
        return kind(**values)
    except BadInput as error:
        raise BadInput(f"{where}: {error}" if where and not str(error).startswith(where) else str(error)) from error
