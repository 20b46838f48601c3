"""The official files of the published datasets: their names, their addresses, and where they are looked for."""

import gzip
import os
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairmesh.errors import BadInput


@dataclass(frozen=True)
class File:
    """One official file, under its unpacked name."""

    name: str
    md5: str = ""  # of the unpacked bytes, since distributions repack them; "" if it is not known
    bytes: int = 0  # unpacked; 0 if it is not known
    url: str = ""  # of the single file, packed if the address ends in .gz


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
    record: str = ""  # where Zenodo is asked for the files' addresses and checksums


def _idx(base: str, *sums: str) -> tuple[File, ...]:
    names = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    sizes = (47_040_016, 60_008, 7_840_016, 10_008)
    return tuple(File(name, md5, size, f"{base}{name}.gz") for name, md5, size in zip(names, sums, sizes))


SOURCES = {
    source.name: source
    for source in (
        Source(
            "fashion-mnist",
            "Fashion-MNIST",
            _idx(
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",  # this website answers no https
                "f4a8712d7a061bf5bd6d2ca38dc4d50a",
                "9018921c3c673c538a1fc5bad174d6f9",
                "8181f5470baa50b63fa0f6fddb340f0a",
                "15d484375f8d13e6eb1aabb0c3f46965",
            ),
            licence="MIT",
            home="https://github.com/zalandoresearch/fashion-mnist",
            system=("/usr/share/datasets/fashion-mnist",),  # Debian's package dataset-fashion-mnist
        ),
        Source(
            "mnist",
            "MNIST",
            _idx(
                "https://ossci-datasets.s3.amazonaws.com/mnist/",
                "6bbc9ace898e44ae57da46a324031adb",
                "a25bea736e30d166cdddb491f175f624",
                "2646ac647ad5339dbf082846283269ea",
                "27ae3e4e09519cfbb04c329615203637",
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
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            ),
        ),
        Source(
            "coos7",
            "COOS7",
            # Their checksums are not known here. A download is checked against the one in the Zenodo record; afterwards
            # only the layout is checked.
            (File("COOS7_v1.1_test4.hdf5"), File("COOS7_v1.1_test3.hdf5")),
            licence="stated in its Zenodo record",
            home="https://arxiv.org/abs/1906.07282",
            record="https://zenodo.org/api/records?q=COOS7",
        ),
    )
}


def cache_of(source: Source) -> Path:
    """Returns the folder that downloads go to by default."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "fairmesh" / source.name


def places(source: Source, folder: str | os.PathLike | None = None) -> list[Path]:
    """Returns where the files are looked for, in order.

    That is the given folder and no other, or else $FAIRMESH_DATA, the cache and the system's folders."""
    names = (source.name, *source.folders)
    if folder:
        return [Path(folder), *(Path(folder, name) for name in names)]
    own = os.environ.get("FAIRMESH_DATA")
    first = [*(Path(own, name) for name in names), Path(own)] if own else []
    return [*first, cache_of(source), *map(Path, source.system)]


def found(source: Source, folder: str | os.PathLike | None = None) -> Path | None:
    """Returns the first place that holds all files, packed or not; else the first that holds any."""
    looked = places(source, folder)
    whole = (place for place in looked if is_whole(source, place))
    return next(whole, next((place for place in looked if any(paths_of(source, place))), None))


def inventory(source: Source, folder: str | os.PathLike | None = None) -> dict[str, Any]:
    """Returns what is here of a dataset, in a folder or where it is looked for; sizes that are not known are None."""
    place = found(source, folder)
    paths = set(paths_of(source, place)) if place else set()
    return {
        "name": source.name,
        "title": source.title,
        "found": str(place) if place else None,
        "bytes": sum(path.stat().st_size for path in paths if path) or None,
        "bytes_unpacked": sum(file.bytes for file in source.files) or None,
        "licence": source.licence,
        "source": source.home,
        "looked_in": list(map(str, places(source, folder))),
    }


def is_whole(source: Source, place: Path) -> bool:
    """Returns whether a folder holds all files, packed or not."""
    return all(paths_of(source, place))


def paths_of(source: Source, place: Path) -> list[Path | None]:
    """Returns for each official file what holds its content in a folder: the file, its .gz, or the official archive;
    None if nothing does."""
    archive = [source.archive.name] if source.archive else []
    names_of = [(file.name, f"{file.name}.gz", *archive) for file in source.files]
    return [next((place / name for name in names if (place / name).is_file()), None) for names in names_of]


def contents(source: Source, place: Path) -> list[bytes]:
    """Returns the unpacked bytes of every official file, in order."""
    paths = paths_of(source, place)
    if source.archive and place / source.archive.name in paths:
        return from_archive(source, place / source.archive.name)
    return [unpacked(path or place / file.name) for file, path in zip(source.files, paths)]


def unpacked(path: Path) -> bytes:
    """Returns a file's bytes, unpacked if its name ends in .gz."""
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(path, error) from error


def from_archive(source: Source, path: Path) -> list[bytes]:
    """Returns the bytes of every official file, read from the archive, in order."""
    wanted = {file.name: b"" for file in source.files}
    try:
        with tarfile.open(path) as archive:
            for member in archive:  # once through: seeking in a packed archive unpacks it again
                name = Path(member.name).name
                if name in wanted and (file := archive.extractfile(member)):
                    wanted[name] = file.read()
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise damaged(path, error) from error
    for name, content in wanted.items():
        if not content:
            raise damaged(path, f"it holds no {name}")
    return list(wanted.values())


def damaged(path: Path, reason: object) -> BadInput:
    """Returns the error to raise about a file that cannot be used."""
    return BadInput(f"{path} is missing or damaged: {reason}; `fairmesh data check` looks at all of them")


def stamp(source: Source, place: Path) -> tuple[int, ...]:
    """Returns when the files were last written. What was read of them stays valid while this does not change."""
    return tuple(path.stat().st_mtime_ns if path else 0 for path in paths_of(source, place))
