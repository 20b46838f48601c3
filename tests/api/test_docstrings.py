"""Every public class and function explains itself: one line, every argument with its default, an example that runs."""

import ast
import dataclasses
import doctest
import inspect
import re

import pytest

import fairmesh as fm
from tests.api.public import NAMESPACES, public_objects

PUBLIC = public_objects()
NEVER_CALLED = {fm.algorithms.Round}  # made by fairmesh only
ERRORS = {thing for thing in PUBLIC.values() if inspect.isclass(thing) and issubclass(thing, Exception)}
MODULES = {"fm": fm, **{f"fm.{name}": module for name, module in NAMESPACES.items()}}


def sections(thing):
    """Returns the docstring's sections by name; its first line is under ''."""
    text = inspect.cleandoc(thing.__doc__ or "")
    head, *rest = re.split(r"^(Args|Returns|Raises|Example|References):\n", text, flags=re.M)
    return {"": head, **dict(zip(rest[::2], rest[1::2]))}


def documented(thing):
    """Returns the entries of Args by name, each as one line."""
    entries = re.split(r"^ {4}(\*{0,2}\w+): ", sections(thing).get("Args", ""), flags=re.M)
    return {name: " ".join(text.split()) for name, text in zip(entries[1::2], entries[2::2])}


def parameters(thing):
    """Returns the parameters that a caller may give, with their defaults."""
    if inspect.isclass(thing) and (inspect.isabstract(thing) or thing in ERRORS | NEVER_CALLED):
        return {}
    if dataclasses.is_dataclass(thing):
        defaults = {}
        for field in sorted(dataclasses.fields(thing), key=lambda field: field.kw_only):  # as its arguments are
            made = field.default_factory
            defaults[field.name] = field.default if made is dataclasses.MISSING else made()
        return {name: inspect.Parameter.empty if d is dataclasses.MISSING else d for name, d in defaults.items()}
    signature = inspect.signature(thing).parameters.values()
    prefix = {inspect.Parameter.VAR_KEYWORD: "**", inspect.Parameter.VAR_POSITIONAL: "*"}
    return {prefix.get(p.kind, "") + p.name: p.default for p in signature}


def own_methods(thing):
    """Returns the public methods and properties that a class defines or inherits within fairmesh."""
    for name, member in inspect.getmembers(thing):
        home = next((base for base in thing.__mro__ if name in vars(base)), object)
        is_ours = home.__module__.startswith("fairmesh") and not name.startswith("_")
        if is_ours and (callable(member) or isinstance(vars(home)[name], property)):
            yield name, member


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring_has_a_line_of_its_own(name):
    thing = PUBLIC[name]
    first = (thing.__dict__.get("__doc__") if inspect.isclass(thing) else thing.__doc__) or ""
    first = first.split("\n")[0]
    assert first.rstrip().endswith((".", ",", ":")), f"{name} needs a first line"
    assert not first.startswith(f"{thing.__name__}("), f"{name} has only the docstring that dataclass generates"


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring_names_every_argument_with_its_default(name):
    told, actual = documented(PUBLIC[name]), parameters(PUBLIC[name])
    assert list(told) == list(actual), f"Args of {name}"
    for argument, default in actual.items():
        if default is inspect.Parameter.empty:
            assert "Default:" not in told[argument], f"{name}({argument}) has no default"
            continue
        assert "Default: " in told[argument], f"{name}({argument}) does not say its default"
        stated = told[argument].split("Default: ")[1]
        if default is None or isinstance(default, bool | int | float | str | tuple | list | dict):
            assert ast.literal_eval(stated.removesuffix(".").replace("inf", "1e999")) == default, f"{name}({argument})"
        else:
            kind = getattr(default, "__name__", type(default).__name__).replace("<lambda>", "")  # said in words
            assert kind in stated, f"{name}({argument}) has the default {default!r}"


@pytest.mark.parametrize("name", [name for name in PUBLIC if PUBLIC[name] not in ERRORS | NEVER_CALLED])
def test_docstring_has_an_example(name):
    assert ">>> " in sections(PUBLIC[name]).get("Example", ""), f"{name} has no Example"


@pytest.mark.parametrize("name", PUBLIC)
def test_methods_have_docstrings(name):
    if inspect.isclass(PUBLIC[name]):
        bare = [method for method, member in own_methods(PUBLIC[name]) if not inspect.getdoc(member)]
        assert bare == [], f"methods of {name} without a docstring"


@pytest.mark.parametrize("name", [*MODULES, *PUBLIC])
@pytest.mark.quick_cases(15)
def test_examples_run(name):
    thing = MODULES.get(name) or PUBLIC[name]
    tests = doctest.DocTestFinder(recurse=name not in MODULES).find(thing, name, globs={})
    for test in tests:
        failures: list[str] = []
        doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=failures.append)
        assert not failures, "".join(failures)
