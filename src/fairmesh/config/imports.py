"""Objects named by an import path in an experiment file: 'package.module:name' or 'file.py:name'."""

import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from fairmesh.config.sealed import SEALED
from fairmesh.errors import BadInput, nearest, refusing


def imported(path: str, where: str) -> Any:
    """Returns the object at 'package.module:name' or 'file.py:name'."""
    module_name, separator, name = path.partition(":")
    if not separator or not re.fullmatch(r"[\w.]+", name) or not module_name.strip("."):
        raise BadInput(f"{where}: {path!r} is not an import path; write 'package.module:name' or 'file.py:name'")
    with refusing(f"{where}: cannot import {module_name!r}"):
        module = _module_from_file(module_name) if module_name.endswith(".py") else _module(module_name)
    try:
        return functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        known = [word for word in vars(module) if not word.startswith("_")]
        raise BadInput(f"{where}: {module_name!r} has no {name!r}{nearest(name, known)}") from None


def called(path: str, arguments: Mapping[str, Any], where: str) -> Any:
    """Returns what the function or class at an import path returns for these arguments."""
    function = imported(path, f"{where}.path")
    with refusing(f"{where}.arguments do not fit {path}", TypeError, ValueError):
        inspect.signature(function).bind(**arguments)
    return function(**arguments)


_NAMED: WeakValueDictionary[str, type] = WeakValueDictionary()  # classes by the path that tables of this process use


def path_of(kind: type) -> str:
    """Returns the import path of a class, by which files and checkpoints identify it.

    A class of the script that is being run is identified by the script's file. So classes with the same name in two
    scripts are different, and the file can be imported later. A class of a notebook, or one defined inside a function,
    gets a path that only this process can follow."""
    main = _main_file()
    module = str(main) if main and kind.__module__ == "__main__" and _in_main(kind.__qualname__) is kind else None
    path = f"{module or kind.__module__}:{kind.__qualname__}"
    _NAMED[path] = kind
    return path


def class_at(path: str, where: str) -> Any:
    """Returns what is at an import path; also a class that `path_of` named in this process and nobody can import."""
    module, _, name = path.partition(":")
    known, importable = _NAMED.get(path), module != "__main__" and "<locals>" not in name
    if known and not importable:
        return known
    main = _main_file()
    if main and module.endswith(".py") and Path(module).resolve() == main and _in_main(name) is not None:
        return _in_main(name)  # importing the script that is being run would run it again
    try:
        return imported(path, where)
    except BadInput as error:
        if known:
            return known
        if importable:
            raise
        place = f"inside a function of {module!r}" if "<locals>" in name else "in a notebook or an interactive session"
        raise BadInput(
            f"{where}: {name!r} was defined {place}, and cannot be imported; define the class at the top level of a "
            "file and write 'file.py:Class'"
        ) from error


def _main_file() -> Path | None:
    """Returns the Python file that is being run, if there is one."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file).resolve() if file and str(file).endswith(".py") else None


def _in_main(name: str) -> Any:
    return functools.reduce(
        lambda found, part: getattr(found, part, None), name.split("."), sys.modules.get("__main__")
    )


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
    if path in SEALED:
        return SEALED[path]()
    # The module is named by its path, so that a user's types.py does not replace Python's.
    spec = importlib.util.spec_from_file_location(path, path)
    if not spec or not spec.loader or not Path(path).is_file():
        raise OSError("no such Python file")
    known = sys.modules.get(path)
    written = Path(path).stat().st_mtime_ns
    if known and getattr(known, "_fairmesh_written", None) == written:
        return known
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        with _findable(str(Path(path).resolve().parent)):  # so that the file can import its neighbours
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    module._fairmesh_written = written  # type: ignore[attr-defined]
    return module
