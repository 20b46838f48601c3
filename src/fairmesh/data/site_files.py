"""Tables of which every site has a file of its own, as one table: the union of their columns, with gaps where a file
lacks one."""

import difflib
import glob
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fairmesh.data.tables import SUFFIXES, column_of, read_table, with_gaps
from fairmesh.errors import BadInput, listed

Files = str | tuple[str, ...] | Mapping[str, str]  # a file, a folder or a pattern; paths; or paths by the site's name
_SHOWN = 4  # names in a sentence
_ALIKE = 0.85  # share of equal letters from which on two names look like one that was mistyped


class Part(NamedTuple):
    """One of the files that a table was read from."""

    path: str
    site: str  # the site that the file is of; "" if a table has one file
    rows: slice  # its rows among those of all files
    names: frozenset[str]  # its columns


class Columns(dict[str, np.ndarray]):
    """The columns of a table, by name, and the files that they come from.

    Args:
        columns: The values of all rows, by column.
        parts: The files, in the order of their rows.
    """

    def __init__(self, columns: Mapping[str, np.ndarray], parts: tuple[Part, ...]):
        super().__init__(columns)
        self.parts = parts

    @staticmethod
    def of(columns: Mapping[str, np.ndarray], path: str) -> "Columns":
        """Returns columns that come from one file."""
        if isinstance(columns, Columns):
            return columns
        return Columns(columns, (Part(path, "", slice(None), frozenset(columns)),))

    @property
    def sites(self) -> np.ndarray | None:
        """The site of every row, if the files name them."""
        if not self.parts[0].site:
            return None
        return np.concatenate([np.full(part.rows.stop - part.rows.start, part.site) for part in self.parts])

    def by_file(self, name: str) -> list[tuple[str, np.ndarray]]:
        """Returns a column's values by the path of the file. Refuses a file that lacks the column, by its path."""
        return [
            (part.path, column_of(self if name in part.names else _only(self, part), name, part.path)[part.rows])
            for part in self.parts
        ]

    def in_all_files(self, name: str) -> np.ndarray:
        """Returns a column. Refuses a file that lacks it, by its path."""
        return np.concatenate([values for _, values in self.by_file(name)])

    def read(self, name: str, how: Callable[[np.ndarray, str], np.ndarray]) -> np.ndarray:
        """Returns a column as read file by file, so that errors name the file and its row.

        Args:
            name: The column.
            how: Values, and the path of their file -> what they mean.
        """
        return np.concatenate([how(self[name][part.rows], part.path) for part in self.parts])

    def without(self, markers: Callable[[str], Sequence[str | float]]) -> "Columns":
        """Returns them with gaps for the values that stand for missing ones, by the name of the column."""
        return Columns({name: with_gaps(values, markers(name)) for name, values in self.items()}, self.parts)

    def with_empty(self, names: Iterable[str]) -> "Columns":
        """Returns them with columns of missing values for names that no file has."""
        count = len(next(iter(self.values())))
        return Columns({name: np.full(count, "") for name in names} | self, self.parts)

    def lacking(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Returns the files that lack a column, by column."""
        found = {name: [part.path for part in self.parts if name not in part.names] for name in names}
        return {name: paths for name, paths in found.items() if paths}

    def refuse_apart(self, inputs: Sequence[str]) -> None:
        """Refuses files that have no input in common with the others."""
        names_of = {part.path: part.names & set(inputs) for part in self.parts}
        apart = without_common(names_of)
        if apart:
            usual = next((part for part in self.parts if part.path not in apart), self.parts[0])
            unlike = [path for path in apart if path != usual.path]
            if len(apart) == len(self.parts):  # no group of files is the largest
                unlike = [path for path in unlike if path not in _near(names_of, usual.path)]
            raise BadInput(
                f"{listed(unlike, _SHOWN)} has no input in common with {usual.path}, which has "
                f"{listed(sorted(names_of[usual.path]), _SHOWN)}; give columns the same names in all files"
            )


def _only(columns: Columns, part: Part) -> dict[str, np.ndarray]:
    return {name: values for name, values in columns.items() if name in part.names}


def are_several(files: Files) -> bool:
    """Returns whether every site has a file of its own: a folder, a pattern, a list or a table of paths."""
    if not isinstance(files, str):
        return True
    return "*" in files or "?" in files or Path(files).suffix.lower() not in SUFFIXES


def in_words(files: Files) -> str:
    """Returns what the files are called in a sentence."""
    return files if isinstance(files, str) else listed(paths_of(files).values(), _SHOWN)


def in_folder(files: Files, folder: Path) -> Files:
    """Returns the files with relative paths resolved in this folder."""
    if isinstance(files, str):
        return str(folder / files)
    if isinstance(files, Mapping):
        return {site: str(folder / path) for site, path in files.items()}
    return tuple(str(folder / path) for path in files)


def paths_of(files: Files) -> dict[str, str]:
    """Returns the paths by the names of the sites, which are those of the files unless they are given.

    Raises:
        BadInput: There are no such files, or two have the same name.
    """
    if isinstance(files, Mapping):
        return dict(files)
    paths = _found(files) if isinstance(files, str) else list(files)
    made: dict[str, str] = {}
    for path in paths:
        site = Path(path).stem.strip()
        if site in made:
            raise BadInput(
                f"{made[site]} and {path} would both be the site {site!r}; name the sites of the files: file = "
                f'{{ "{site} 1" = "{made[site]}", "{site} 2" = "{path}" }}'
            )
        made[site] = path
    if not made:
        raise BadInput("file lists no files; give at least one")
    return made


def _found(files: str) -> list[str]:
    """Returns the files of a folder or a pattern, in order."""
    here = "" if Path(files).is_absolute() else f"; the path is relative to {Path.cwd()}"
    if "*" not in files and "?" not in files:
        if Path(files).suffix and not Path(files).is_dir():
            raise BadInput(f"{files}: a table is a .csv or a .parquet file, or a folder of such files")
        if not Path(files).is_dir():
            raise BadInput(f"there is no folder {files}{here}")
        found = [str(path) for path in sorted(Path(files).iterdir()) if path.suffix.lower() in SUFFIXES]
        if not found:
            raise BadInput(f"the folder {files} has no .csv and no .parquet file")
        return found
    found = sorted(path for path in glob.glob(files, recursive=True) if Path(path).is_file())
    if not found:
        raise BadInput(f"no file matches {files!r}{here}")
    return found


def read_files(files: Files) -> Columns:
    """Returns the columns of all files under one header, by name. A column that a file lacks is missing in its rows.

    Raises:
        BadInput: A file cannot be read, or files write the name of a column in two ways.
    """
    if isinstance(files, str) and not are_several(files):
        return Columns.of(read_table(files), files)
    paths = paths_of(files)
    tables = {site: read_table(path) for site, path in paths.items()}
    names = list(dict.fromkeys(name for table in tables.values() for name in table))
    if written := two_writings(tables):
        first, second = (next(paths[site] for site, table in tables.items() if name in table) for name in written)
        raise BadInput(
            f"{first} has a column {written[0]!r}, and {second} a column {written[1]!r}; if they are the same, write "
            "the name in the same way in all files, else rename one"
        )
    parts, start = [], 0
    for site, table in tables.items():
        stop = start + len(next(iter(table.values())))
        parts.append(Part(paths[site], site, slice(start, stop), frozenset(table)))
        start = stop
    return Columns(
        {name: _joined([table.get(name) for table in tables.values()], parts) for name in names}, tuple(parts)
    )


def _joined(values: Sequence[np.ndarray | None], parts: Sequence[Part]) -> np.ndarray:
    """Returns the values of one column in all files; of a file without the column, missing ones."""
    there = [column for column in values if column is not None]
    numeric = all(column.dtype.kind in "fiu" for column in there)
    gap, kind = (np.nan, None) if numeric else (None, object)
    if all(column.dtype.kind == "U" for column in there):
        gap, kind = "", None
    sizes = [part.rows.stop - part.rows.start for part in parts]
    return np.concatenate(
        [
            np.full(size, gap) if column is None else column.astype(kind or column.dtype)
            for column, size in zip(values, sizes)
        ]
    )


def two_writings(names_of: Mapping[str, Iterable[str]]) -> tuple[str, str] | None:
    """Returns two names of columns that differ in case or blanks only, if nobody has both. None if there are none.

    Args:
        names_of: The names of the columns, by who has them.
    """
    named = {who: set(names) for who, names in names_of.items()}
    first_of: dict[str, str] = {}
    for name in dict.fromkeys(name for names in names_of.values() for name in names):
        other = first_of.setdefault(_plain(name), name)
        if other != name and not any({name, other} <= names for names in named.values()):
            return other, name
    return None


def almost(name: str, names: Iterable[str]) -> bool:
    """Returns whether one of the names is probably another writing of this one."""
    return bool(difflib.get_close_matches(_plain(name), map(_plain, names), n=1, cutoff=_ALIKE))


def _plain(name: str) -> str:
    return "".join(name.split()).casefold()


def without_common(names_of: Mapping[str, AbstractSet[str]]) -> list[str]:
    """Returns who is not in the largest group whose members have names in common, directly or by way of others.
    Everybody, if several groups are the largest: each of them may be right."""
    groups = list[set[str]]()
    for who in names_of:
        if not any(who in group for group in groups):
            groups.append(_near(names_of, who))
    largest = max(map(len, groups))
    largest_groups = [group for group in groups if len(group) == largest]
    if len(largest_groups) > 1:
        return list(names_of)
    return [who for who in names_of if who not in largest_groups[0]]


def _near(names_of: Mapping[str, AbstractSet[str]], first: str) -> set[str]:
    """Returns who has a name in common with the first, or with anybody who has; the first, too."""
    apart = {who: set(names) for who, names in names_of.items()}
    shared = apart.pop(first)
    while near := [who for who, names in apart.items() if names & shared]:
        shared = shared.union(*(apart.pop(who) for who in near))
    return {who for who in names_of if who not in apart}
