"""The official files of the published datasets: their names, where they come from, where they are looked for."""

import gzip
import os
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from fairmesh.errors import BadInput


@dataclass(frozen=True)
class File:
    """One official file, named as it is unpacked."""

    name: str
    md5: str | None  # of the unpacked bytes: distributions pack them anew
    bytes: int | None  # unpacked
    url: str | None = None  # where it comes alone, packed as .gz where the address says so


@dataclass(frozen=True)
class Source:
    """A published dataset."""

    name: str  # as experiment files and folders call it
    title: str
    files: tuple[File, ...]
    licence: str
    home: str  # for people
    folders: tuple[str, ...] = ()  # names its folder also goes by
    system: tuple[str, ...] = ()  # where operating systems put it
    archive: File | None = None  # a .tar.gz that holds all files, with the checksum of the archive itself


_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"  # this bucket's website answers no https
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_CIFAR = "https://www.cs.toronto.edu/~kriz/"


def _idx(base: str, sums: tuple[str, str, str, str]) -> tuple[File, ...]:
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    sizes = (47_040_016, 60_008, 7_840_016, 10_008)
    return tuple(
        File(f"{name}-ubyte", md5, size, f"{base}{name}-ubyte.gz") for name, md5, size in zip(names, sums, sizes)
    )


SOURCES = {
    source.name: source
    for source in (
        Source(
            "fashion-mnist",
            "Fashion-MNIST",
            _idx(
                _FASHION,
                (
                    "f4a8712d7a061bf5bd6d2ca38dc4d50a",
                    "9018921c3c673c538a1fc5bad174d6f9",
                    "8181f5470baa50b63fa0f6fddb340f0a",
                    "15d484375f8d13e6eb1aabb0c3f46965",
                ),
            ),
            licence="MIT",
            home="https://github.com/zalandoresearch/fashion-mnist",
            system=("/usr/share/datasets/fashion-mnist",),  # Debian's package dataset-fashion-mnist
        ),
        Source(
            "mnist",
            "MNIST",
            _idx(
                _MNIST,
                (
                    "6bbc9ace898e44ae57da46a324031adb",
                    "a25bea736e30d166cdddb491f175f624",
                    "2646ac647ad5339dbf082846283269ea",
                    "27ae3e4e09519cfbb04c329615203637",
                ),
            ),
            licence="CC BY-SA 3.0",
            home="http://yann.lecun.com/exdb/mnist/",
        ),
        Source(
            "cifar-10",
            "CIFAR-10",
            tuple(
                File(f"{name}.bin", md5, 30_730_000)
                for name, md5 in {
                    "data_batch_1": "5dd7e06a14cb22eb9f671a540d1b7c25",
                    "data_batch_2": "5ea93a67294ea407fff1d09f752e9692",
                    "data_batch_3": "942cd6a4bcdd0dd3c604fbe906cb4421",
                    "data_batch_4": "ae636b3ba5c66a11e91e8cb52e771fcb",
                    "data_batch_5": "53f37980c15c3d472c316c40844f3f0d",
                    "test_batch": "803d5f7f4d78ea53de84dbe85f74fb6d",
                }.items()
            ),
            licence="none stated; cite Krizhevsky, 2009",
            home="https://www.cs.toronto.edu/~kriz/cifar.html",
            folders=("cifar-10-batches-bin",),
            archive=File(
                "cifar-10-binary.tar.gz",
                "c32a1d4ab5d03f1284b67883e8d87530",
                170_052_171,
                f"{_CIFAR}cifar-10-binary.tar.gz",
            ),
        ),
        Source(
            "coos7",
            "COOS7",
            # No checksum of these could be established: they are checked by their layout.
            (File("COOS7_v1.1_test4.hdf5", None, None), File("COOS7_v1.1_test3.hdf5", None, None)),
            licence="see its record",
            home="https://zenodo.org (search for COOS7)",
        ),
    )
}


def cache_of(source: Source) -> Path:
    """Where fetched files go unless told otherwise."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "fairmesh" / source.name


def places(source: Source, folder: str | os.PathLike | None = None) -> list[Path]:
    """Where the files are looked for, in order: the folder given and no other, else $FAIRMESH_DATA, the cache, the
    system's folder."""
    own = os.environ.get("FAIRMESH_DATA")
    roots = [Path(folder)] if folder else [Path(own)] if own else []
    named = [root / name for root in roots for name in (source.name, *source.folders, "")]
    named = named[-1:] + named[:-1] if folder else named
    if folder:
        return named
    cache = cache_of(source)
    return [*named, cache, *(cache / name for name in source.folders), *map(Path, source.system)]


def found(source: Source, folder: str | os.PathLike | None = None) -> Path | None:
    """The first place that holds the first of the files, packed or not."""
    return next((place for place in places(source, folder) if path_of(source, source.files[0], place)), None)


def path_of(source: Source, file: File, place: Path) -> Path | None:
    """Where a file's content is in a folder: by itself, as .gz, or in the official archive."""
    names = [file.name, f"{file.name}.gz", *([source.archive.name] if source.archive else [])]
    return next((place / name for name in names if (place / name).is_file()), None)


def folder_of(source: Source, folder: str | os.PathLike | None = None) -> Path:
    """The folder that holds the files."""
    place = found(source, folder)
    if place is None:
        where = str(folder) if folder else " or ".join(map(str, places(source)))
        raise BadInput(f"{source.title} is not in {where}: put {_named(source)} there")
    return place


def _named(source: Source) -> str:
    return f"its {len(source.files)} files ({', '.join(file.name for file in source.files)})"


def content(source: Source, file: File, place: Path) -> bytes:
    """The unpacked bytes of one official file."""
    path = path_of(source, file, place)
    if path is None:
        raise BadInput(f"{place / file.name} is missing or damaged: no such file, nor {file.name}.gz")
    try:
        if source.archive and path.name == source.archive.name:
            with tarfile.open(path) as archive:
                member = next((m for m in archive if Path(m.name).name == file.name), None)
                taken = archive.extractfile(member) if member else None
                if taken is None:
                    raise BadInput(f"{path} is missing or damaged: it holds no {file.name}")
                return taken.read()
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise BadInput(f"{path} is missing or damaged: {error}") from error


def stamp(source: Source, place: Path) -> tuple[int, ...]:
    """When the files were last written: what has been read of them before still holds while this is the same."""
    paths = [path_of(source, file, place) for file in source.files]
    return tuple(path.stat().st_mtime_ns if path else 0 for path in paths)
