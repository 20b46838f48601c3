"""What files may say, as text: the keys of a configured class with types, defaults and explanations."""

import dataclasses
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from fairmesh.config.registry import FAMILIES, role_of
from fairmesh.config.tables import field_types, settings, to_table
from fairmesh.errors import BadInput, nearest

_WIDTH = 120
_PLAIN = {int: "whole number", float: "number", str: "text", bool: "true or false", Any: "any value"}


class Key(NamedTuple):
    """A key of a table in a file."""

    name: str
    value: str  # what it may be, in words
    default: str  # as a file has it, "left out" for None; empty if the key is required
    what: str


def first_line(kind: type) -> str:
    """Returns the first sentence of a class's docstring."""
    return " ".join(inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].split())


def keys_of(kind: type, link: Callable[[type], str] | None = None) -> list[Key]:
    """Returns the keys of a configured class, as its fields and its docstring's Args have them. Refuses a class with a
    field that Args leave out.

    Args:
        kind: The class.
        link: How to name a role or a configured class; None for its name in words. Default: None.
    """
    told = _arguments(kind)
    found = []
    for name, field in settings(kind).items():
        if name not in told:
            raise BadInput(f"{kind.__qualname__}: {name} is missing from the Args of its docstring")
        what, _, stated = told[name].partition(" Default: ")
        found.append(Key(name, described(field_types(kind)[name], link), _default(field, stated), what))
    return found


def _arguments(kind: type) -> dict[str, str]:
    """Returns the entries of Args in a docstring, each as one line."""
    text = inspect.cleandoc(kind.__doc__ or "")
    sections = re.split(r"^(Args|Returns|Raises|Example|References):\n", text, flags=re.M)
    of_args = dict(zip(sections[1::2], sections[2::2])).get("Args", "")
    entries = re.split(r"^ {4}(\w+): ", of_args, flags=re.M)
    return {name: " ".join(text.split()) for name, text in zip(entries[1::2], entries[2::2])}


def _default(field: dataclasses.Field, stated: str) -> str:
    """Returns a field's default as a file has it, and what the docstring says of it after a comma."""
    made = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if made is dataclasses.MISSING:
        return ""
    remark = re.search(r"(?<=\)), [a-z].*(?=\.$)", stated)  # "Ring(), which ...": of an object only
    return ("left out" if made is None else f"`{_toml(_short(made))}`") + (remark[0] if remark else "")


def _short(thing: Any) -> Any:
    """Returns a configured object as a file would have it: a number or a name where that is enough."""
    table = to_table(thing, defaults=False)
    role = role_of(type(thing))
    if not role:
        return table
    if table.keys() == {"name"}:
        return table["name"]
    numbers = [value for key, value in table.items() if key != "name"]
    is_number = len(numbers) == 1 and isinstance(numbers[0], int | float)
    return numbers[0] if is_number and hasattr(role, "shorthand") and role.shorthand(numbers[0]) == thing else table


def _toml(value: Any) -> str:
    """Returns a value as TOML has it on one line."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }" if value else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value!r}"


def described(hint: Any, link: Callable[[type], str] | None = None) -> str:
    """Returns the type of a field in words.

    Args:
        hint: The type.
        link: How to name a role or a configured class; None for its name in words. Default: None.
    """
    origin, arguments = Callable if hint is Callable else get_origin(hint), get_args(hint)
    if origin in _DESCRIBED:
        return _DESCRIBED[origin](arguments, lambda inner: described(inner, link))
    if hint in _PLAIN:
        return _PLAIN[hint]
    role = role_of(hint) if isinstance(hint, type) else None
    word = (link or noun)(role or hint)
    return f"number or {word}" if hasattr(role, "shorthand") else word


def _either(kinds: tuple[Any, ...], told: Callable[[Any], str]) -> str:
    words = [told(kind).split(" or ") for kind in kinds if kind is not type(None)]
    return " or ".join(dict.fromkeys(word for some in words for word in some))


def _list(kinds: tuple[Any, ...], told: Callable[[Any], str]) -> str:
    items = kinds[:1] if kinds[1:] == (Ellipsis,) else kinds
    words = dict.fromkeys(map(told, items))
    return f"list of {f'{len(items)} ' if len(items) > 1 else ''}{' and '.join(map(_plural, words))}"


_DESCRIBED: dict[Any, Callable[[tuple[Any, ...], Callable[[Any], str]], str]] = {  # by the origin of a type
    typing.Annotated: lambda kinds, told: told(kinds[0]),
    Union: _either,
    types.UnionType: _either,
    Literal: lambda choices, _: " or ".join(f"`{_toml(choice)}`" for choice in choices),
    tuple: _list,
    list: _list,
    Sequence: _list,
    dict: lambda kinds, told: f"table of {_plural(told(kinds[1]))} by name",
    Mapping: lambda kinds, told: f"table of {_plural(told(kinds[1]))} by name",
    Callable: lambda *_: '`"file.py:function"`',
}


def _plural(words: str) -> str:
    return re.sub(r"^(whole number|number|text|list)\b", r"\1s", words)


def noun(kind: type) -> str:
    """Returns what a role or a configured class is called in sentences."""
    return getattr(kind, "noun", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind.__name__).lower())


def reached(root: type) -> list[type]:
    """Returns the roles and configured classes that a file of class `root` may name, in the order of its keys."""
    found: list[type] = []

    def visit(hint: Any) -> None:
        for one in get_args(hint):
            visit(one)
        kind = role_of(hint) or hint if isinstance(hint, type) else None
        if kind in found or not kind or not (kind in FAMILIES or dataclasses.is_dataclass(kind)):
            return
        found.append(kind)
        waiting.extend(FAMILIES.get(kind, {}).values() or [kind])

    waiting = [root]
    while waiting:
        for hint in field_types(waiting.pop(0)).values():
            visit(hint)
    return found


def text_of(kind: type, heading: str, link: Callable[[type], str] | None = None) -> str:
    """Returns a class as Markdown that can also be read in a terminal: a heading, a sentence, and its keys."""
    lines = [heading, "", *textwrap.wrap(first_line(kind), _WIDTH), ""]
    for key in keys_of(kind, link):
        default = f"default: {key.default}" if key.default else "required"
        text = f"- **`{key.name}`** ({key.value}; {default}): {key.what}"
        lines += textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).rstrip() + "\n"


def text_of_role(role: type, link: Callable[[type], str] | None = None) -> str:
    """Returns all members of a role as Markdown."""
    parts = [f"## {noun(role)}\n"]
    parts += [text_of(kind, f'### {noun(role)} `name = "{name}"`', link) for name, kind in FAMILIES[role].items()]
    return "\n".join(parts)


def text_of_file(root: type) -> str:
    """Returns all that a file of class `root` may have, as Markdown: its keys, and each section."""
    kinds = reached(root)

    def link(kind: type) -> str:
        return f"[{noun(kind)}](#{noun(kind).replace(' ', '-')})" if kind in kinds else noun(kind)

    parts = [text_of(root, "## At the top of the file", link)]
    parts += [text_of_role(one, link) if one in FAMILIES else text_of(one, f"## {noun(one)}", link) for one in kinds]
    return "\n".join(parts)


def found_by(root: type, word: str) -> list[str]:
    """Returns the texts of what a word names: a section or role, such as "algorithm", or members of roles, such as
    "ad-gda". Refuses an unknown word."""
    kinds = reached(root)
    sections = [one for one in kinds if noun(one) == word]
    sections += [role_of(h) or h for n, h in field_types(root).items() if n == word and isinstance(h, type)]
    members = [(one, FAMILIES[one][word]) for one in kinds if one in FAMILIES and word in FAMILIES[one]]
    if not sections and not members:
        known = {noun(one) for one in kinds} | {name for one in kinds for name in FAMILIES.get(one, {})}
        raise BadInput(f"no key, section or class is called {word!r}{nearest(word, known)}")
    texts = [text_of_role(one) if one in FAMILIES else text_of(one, f"## {noun(one)}") for one in sections]
    return texts + [text_of(kind, f'## {noun(role)} `name = "{word}"`') for role, kind in members]
