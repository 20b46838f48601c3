"""Python files that are imported from contents given beforehand, with the files of their folder that they import.

An ordinary import executes whatever is in the folder at that moment: the file, a compiled copy in `__pycache__`, or any
module there whose name is found first. `SealedFiles` executes only the contents that it was given, so that they can be
compared with an agreed list before. `helpers` finds what a file imports from its folder without executing it.
"""

import ast
import builtins
import functools
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from fairmesh.errors import BadInput, refusing

_WHERE_FILES_BELONG = "files that an experiment names belong where its paths say, which start at its own folder"
SEALED: dict[str, Callable[[], ModuleType]] = {}  # by path: the files that `imported` must take from a SealedFiles

_PRESENT = {"torch", "fairmesh", "numpy", *sys.stdlib_module_names}  # found before a user's file of the same name


def parsed(content: bytes, where: str) -> ast.Module:
    """Returns the syntax tree of a Python file."""
    with refusing(f"{where} is not a Python file that can be read", SyntaxError, ValueError, RecursionError):
        return ast.parse(content, where)


def wanted(file: str, content: bytes) -> Iterator[str]:
    """Yields the modules that a file's import statements may mean, by their full names. `file` is its path in the
    folder, such as 'package/module.py'. 'package.*' stands for all modules of a package."""
    package = file.split("/")[:-1]
    for node in ast.walk(parsed(content, file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level > len(package):
                continue  # Python refuses this import as well
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def helpers(file: Path) -> dict[str, bytes]:
    """Returns a Python file and all that it imports from its folder, directly or not: contents by path in the folder.
    Nothing is imported."""
    folder, found, left = file.parent, {}, [file.name]
    while left:
        name = left.pop()
        if name in found:
            continue
        with refusing(f"cannot read {folder / name}", OSError, advice=_WHERE_FILES_BELONG):
            found[name] = (folder / name).read_bytes()
        for module in wanted(name, found[name]):
            more = imported_files(folder, module)
            if more and module.partition(".")[0] in _PRESENT:
                raise BadInput(
                    f"{folder / name} imports {module}, and {folder / more[0]} has the name of a module that Python "
                    "already has; rename that file"
                )
            left += more
    return found


def imported_files(folder: Path, module: str) -> list[str]:
    """Returns the files that importing a module takes from a folder, by their paths there; 'package.*' takes all files
    of the package."""
    if module.endswith(".*"):
        package = folder / module[:-2].replace(".", "/")
        return sorted(path.relative_to(folder).as_posix() for path in package.glob("*.py"))
    files: list[str] = []
    for path in itertools.accumulate(module.split("."), "{}/{}".format):
        files += [file for file in (f"{path}/__init__.py", f"{path}.py") if (folder / file).is_file()][:1]
    return files


class SealedFiles:
    """The Python files of one folder, which import each other and nothing else from the folder.

    From now on `imported` takes these files from here, whatever the folder contains by then. A module has the path of
    its file as its name. Imports of modules outside the folder are Python's.

    Args:
        folder: The folder that the files are in, or would be in.
        contents: The contents of the files by path in the folder, such as 'package/module.py'.
    """

    def __init__(self, folder: Path, contents: Mapping[str, bytes]):
        self._folder, self._contents = folder, dict(contents)
        self._modules: dict[str, ModuleType] = {}  # by path in the folder
        for file in contents:
            SEALED[str(folder / file)] = functools.partial(self.module, file)

    def module(self, file: str) -> ModuleType:
        """Returns the module of a file, which is executed when it is first asked for."""
        if file in self._modules:
            return self._modules[file]
        path = str(self._folder / file)
        spec = importlib.util.spec_from_file_location(path, path)
        module = importlib.util.module_from_spec(spec) if spec else ModuleType(path)
        namespace = vars(module)
        namespace["__builtins__"] = vars(builtins) | {"__import__": functools.partial(self._import, file)}
        self._modules[file] = sys.modules[path] = module
        try:
            exec(compile(self._contents[file], path, "exec", dont_inherit=True), namespace)
        except BaseException:
            del self._modules[file], sys.modules[path]
            raise
        return module

    def _import(
        self,
        importer: str,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """Does what an import statement in the file `importer` asks for, as the builtin `__import__` does."""
        if level:
            package = importer.split("/")[:-1]
            if len(package) < level:
                raise ImportError(f"{importer}: attempted relative import beyond its package")
            name = ".".join([*package[: len(package) - level + 1], *([name] if name else [])])
        elif not self._holds(name.partition(".")[0]):
            return builtins.__import__(name, globals, locals, fromlist or (), 0)
        chain = self._chain(name)
        if not fromlist:
            return chain[0]
        names = [item for item in fromlist if item != "*"]
        names += getattr(chain[-1], "__all__", ()) if "*" in fromlist else ()
        for item in names:
            if not hasattr(chain[-1], item) and self._holds(f"{name}.{item}"):
                self._chain(f"{name}.{item}")
        return chain[-1]

    def _holds(self, name: str) -> bool:
        path = name.replace(".", "/")
        return any(file == f"{path}.py" or file.startswith(f"{path}/") for file in self._contents)

    def _chain(self, name: str) -> list[ModuleType]:
        """Returns the modules from the outermost package to the one of this name."""
        chain: list[ModuleType] = []
        for prefix in itertools.accumulate(name.split("."), "{}.{}".format):
            if not self._holds(prefix):
                raise ModuleNotFoundError(f"No module named {prefix!r}", name=prefix)
            path = prefix.replace(".", "/")
            files = [file for file in (f"{path}/__init__.py", f"{path}.py") if file in self._contents]
            package = ModuleType(str(self._folder / path))  # without an __init__.py
            chain.append(self.module(files[0]) if files else self._modules.setdefault(path, package))
            if len(chain) > 1:
                setattr(chain[-2], prefix.rpartition(".")[2], chain[-1])
        return chain
