"""A user's own files: a folder of images, arrays."""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.utils.data import Dataset

from fairmesh.config.ranges import Natural, Share
from fairmesh.data.datasets.base import Data
from fairmesh.data.partitions import BySite, Contrast, Instrument, Pair, Partition, Pool
from fairmesh.data.site import Site, with_sets
from fairmesh.data.streams import HELD_UP_TO, Streamed
from fairmesh.data.tables import numbered_labels
from fairmesh.data.units import UNGROUPED, Grouped, grouped_by, read_groups, warn_of_left_out
from fairmesh.errors import BadInput, optional, refusing

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".gif", ".webp")


def split_by_site(
    samples: Pair,
    sites: ArrayLike | None,
    share: float,
    seed: int,
    grouped: Grouped = UNGROUPED,
    unit: str | None = None,
) -> Pool:
    """Returns a pool in which a share of each site's samples, drawn at random, at least one, is for testing: whole
    units if there are any, and the latest if there are times. A site with a single sample or unit trains on it and is
    not measured."""
    names, index = indexed(sites if sites is not None else [""] * len(samples[0]))
    generator = np.random.default_rng(seed)
    testing, training = np.zeros(len(index), bool), np.ones(len(index), bool)
    for k in range(len(names)):
        mine = np.flatnonzero(index == k)
        if grouped is UNGROUPED:
            mine = generator.permutation(mine)
            testing[mine[: min(max(1, round(share * len(mine))), len(mine) - 1)]] = True
        else:
            testing[mine], training[mine] = grouped.division(mine, samples[1][mine], share, generator)
    training &= ~testing
    if not testing.any():
        if grouped.noun == "units" and len(index):
            called = f", the same {unit!r} in all its rows" if unit else ""
            raise BadInput(
                f"every site has a single unit{called}, so that none is left to test on; give sites with several "
                "units, or name a column in which rows that belong together are equal"
            )
        raise BadInput(f"there are too few {grouped.noun} ({len(index)} samples) to train and to test; give more")
    warn_of_left_out(int((~training & ~testing).sum()), len(index))
    of_sample, stays, tests = torch.from_numpy(index), torch.from_numpy(training), torch.from_numpy(testing)
    train, judge = ((samples[0][which], samples[1][which]) for which in (stays, tests))
    pool = Pool(train, judge, of_sample[stays], of_sample[tests], names)
    return Pool(train, judge) if sites is None else pool


def indexed(values: ArrayLike) -> tuple[tuple[str, ...], np.ndarray]:
    """Returns the distinct values in order, whole numbers by size, and the index of each value among them."""
    distinct, index = np.unique(np.asarray(values), return_inverse=True)
    return tuple(str(value) for value in distinct), index.reshape(-1)


def labels_of(values: Any, classes: tuple[str, ...], where: str) -> np.ndarray:
    """Returns the class of each value: its place among `classes` or, if none are given, among the distinct values."""
    if not classes:
        return indexed(values)[1]
    return numbered_labels([str(value) for value in np.asarray(values).tolist()], classes, where)


class FileRows(Dataset):
    """Some rows of files with their targets, read when they are asked for.

    Args:
        read: The number of a row -> its inputs.
        rows: The numbers.
        targets: Their targets.
    """

    def __init__(self, read: Callable[[int], Tensor], rows: Tensor, targets: Tensor):
        self._read, self._rows, self._targets = read, rows, targets

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        return self._read(int(self._rows[k])), self._targets[k]


def streamed_sites(
    targets: Tensor,
    names: Sequence[str] | None,
    data: Any,
    read: Callable[[int], Tensor],
    grouped: Grouped = UNGROUPED,
) -> list[Site]:
    """Returns sites whose samples are streamed.

    Args:
        targets: The target of every row.
        names: The site of every row, or None.
        data: The source, with a partition, a split, and settings of the stream.
        read: The number of a row -> its inputs. Worker processes get it.
        grouped: The units and times of the rows. Default: none.
    """

    def streamed(pair: Pair, where: str) -> Streamed:
        labels = None if pair[1].is_floating_point() else pair[1]
        return Streamed(FileRows(read, *pair), data.workers, data.prefetch, labels=labels)

    return sites_by_number(targets, names, data, streamed, grouped)


def sites_by_number(
    targets: Tensor, names: ArrayLike | None, data: Any, made: Callable[[Pair, str], Any], grouped: Grouped
) -> list[Site]:
    """Returns sites whose samples are dealt by the numbers of their rows.

    Args:
        targets: The target of every row.
        names: The site of every row, or None.
        data: The source, with a partition and a split.
        made: Numbers of rows and their targets, and whose they are -> a set of samples.
        grouped: The units and times of the rows.
    """
    if isinstance(data.partition, Contrast | Instrument):
        raise BadInput(
            f"partition: {type(data.partition).__name__} changes images, which needs all of them in memory, and no "
            "units and times; use another partition, or smaller images"
        )
    pool = split_by_site((torch.arange(len(targets)), targets), names, data.test_share, data.seed, grouped)
    dealt = data.partition.sites(pool)
    sites = with_sets(dealt, made, ("train", "test"))
    return [
        grouped.named(site, {"train": rows.train[0], "test": rows.test and rows.test[0]})
        for site, rows in zip(sites, dealt)
    ]


@dataclass(frozen=True)
class ImageFolder(Data):
    """Images of your own, stored as folder/site/class/file.

    Inputs are bytes: (samples, height, width) if all images are grey, else (samples, 3, height, width).

    Args:
        folder: The folder that holds one folder per site.
        partition: How the images are dealt to nodes. Default: BySite(), one node per site.
        test_share: Share of each site's images, drawn at random, that judges it, in (0, 1). Default: 0.2.
        seed: Seed of the split into training and test images, >= 0. Default: 0.
        size: (height, width) in pixels to which images are resized; None if all have one size. Default: None.
        classes: The class names, in the order of their numbers; empty to number the names in alphabetical order. Sites
            that read their own folders must all give the same list. Default: ().
        stream: Whether images are read when a batch needs them, instead of once into memory; None if they take more
            than 1 GiB as bytes, by the size of the first. Default: None.
        workers: As for `Streamed`. Default: 0.
        prefetch: As for `Streamed`. Default: 2.
        channels: 1 if images are grey, or 3; None to find out, from all images in memory, or from the first of a
            stream. Default: None.
        unit: What the names of files of one unit, such as a patient, have in common: a regular expression, of which the
            first group is the unit, such as `"^([^_]+)_"` for `"P7_left.png"`. Images of one unit are not divided.
            None if every image is a unit of its own. Default: None.

    Example:
        >>> import fairmesh as fm
        >>> data = fm.data.ImageFolder("scans", size=(64, 64), classes=("healthy", "ill"))
        >>> data.size
        (64, 64)
    """

    folder: str
    partition: Partition = field(default_factory=BySite)
    test_share: Share = 0.2
    seed: Natural = 0
    size: tuple[int, ...] | None = None
    classes: tuple[str, ...] = ()
    stream: bool | None = None
    workers: int = 0
    prefetch: int = 2
    channels: int | None = None
    unit: str | None = None

    def __post_init__(self):
        if self.channels not in (None, 1, 3):
            raise BadInput(f"channels must be 1 or 3, got {self.channels}")
        if self.size is not None and (len(self.size) != 2 or min(self.size) < 1):
            raise BadInput(f"size is a height and a width >= 1, got {self.size}")

    def left_to_rows(self) -> dict[str, str]:
        number = "data.classes is left out, so that an image of another class changes the numbers of all; name them"
        form = "data.channels is left out, so that a single image decides what form all have; name it"
        return ({} if self.classes else {"numbers": number}) | ({"form": form} if self.channels is None else {})

    def sites(self) -> list[Site]:
        return [replace(site, left_to_rows=self.left_to_rows()) for site in self._dealt()]

    def _dealt(self) -> list[Site]:
        files = _image_files(Path(self.folder))
        labels = torch.from_numpy(labels_of([path.parent.name for path in files], self.classes, self.folder))
        names = [path.parent.parent.name for path in files]
        grouped = grouped_by(self._units_of(files), self.folder)
        first = read_image(files[0], self.size)
        channels = self.channels or (3 if first.ndim == 3 else 1)
        size = len(files) * channels * first.shape[0] * first.shape[1]
        if self.stream or (self.stream is None and size > HELD_UP_TO):
            read = functools.partial(_planes_of, files, self.size, channels)
            return streamed_sites(labels, names, self, read, grouped)
        stamped = tuple(path.stat().st_mtime_ns for path in files)
        images = _images(tuple(files), self.size, stamped, self.channels)
        if grouped is not UNGROUPED:
            return sites_by_number(labels, names, self, lambda pair, _: (images[pair[0]], pair[1]), grouped)
        return self.partition.sites(split_by_site((images, labels), names, self.test_share, self.seed))

    def _units_of(self, files: Sequence[Path]) -> list[str] | None:
        if self.unit is None:
            return None
        with refusing(f"unit = {self.unit!r} is no regular expression", re.error):
            pattern = re.compile(self.unit)
        if pattern.groups < 1:
            raise BadInput(f"unit = {self.unit!r} has no group in brackets that is the unit, such as '^([^_]+)_'")
        matches = [(path, pattern.search(path.name)) for path in files]
        for path, match in matches:
            if match is None:
                raise BadInput(f"unit = {self.unit!r} does not fit the name of {path}; rename it, or change unit")
        return [str(match[1]) for _, match in matches if match]

    def class_names(self) -> tuple[str, ...]:
        return self.classes or indexed([path.parent.name for path in _image_files(Path(self.folder))])[0]


def _image_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise BadInput(f"there is no folder {folder}; give one that holds images as site/class/file")
    files = sorted(path for path in folder.glob("*/*/*") if path.suffix.lower() in IMAGES and path.is_file())
    if not files:
        raise BadInput(f"{folder} holds no image at site/class/file, of {', '.join(IMAGES)}")
    return files


def _planes_of(files: Sequence[Path], size: tuple[int, ...] | None, channels: int, k: int) -> Tensor:
    return torch.from_numpy(image_planes(read_image(files[k], size), channels, files[k]))


@functools.lru_cache(maxsize=2)
def _images(
    files: tuple[Path, ...], size: tuple[int, int] | None, stamped: tuple[int, ...], channels: int | None
) -> Tensor:
    pictures = [read_image(path, size) for path in files]
    channels = channels or (3 if any(picture.ndim == 3 for picture in pictures) else 1)
    sizes = [f"{picture.shape[0]} x {picture.shape[1]}" for picture in pictures]
    for path, size_of in zip(files, sizes):
        if size_of != sizes[0]:
            raise BadInput(f"{path} is {size_of}, but {files[0]} is {sizes[0]}; give size = (height, width)")
    return torch.from_numpy(np.stack([image_planes(picture, channels, path) for path, picture in zip(files, pictures)]))


def image_planes(picture: np.ndarray, channels: int, path: object = "the image") -> np.ndarray:
    """Returns an image as the model sees it: (height, width) if all are grey, else (3, height, width)."""
    if channels == 1 and picture.ndim == 3:
        raise BadInput(f"{path} has colours, but others are grey; give channels = 3, or convert it")
    if channels == 1:
        return np.array(picture)
    return np.stack([picture] * 3) if picture.ndim == 2 else np.ascontiguousarray(picture.transpose(2, 0, 1))


def read_image(path: Any, size: tuple[int, ...] | None) -> np.ndarray:
    """Returns the bytes of an image file: (height, width) if it is grey, else (height, width, 3)."""
    with optional("images"):
        from PIL import Image
    with refusing(f"cannot read the image {path}", OSError, SyntaxError), Image.open(path) as image:
        if image.mode.startswith(("I", "F")):
            raise BadInput(f"{path} has more than 8 bits per pixel; store it with 8, or give arrays as .npz")
        image = image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")
        if size is not None:
            image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
        return np.asarray(image)


@dataclass(frozen=True)
class Npz(Data):
    """Arrays of a .npz file: inputs `x` (samples, ...), targets `y`, and `site`, numbers or names of the sites.

    The file may also hold test samples as `x_test`, `y_test` and `site_test`. Otherwise a share of each site's samples
    is held out.

    Args:
        file: The path of the file.
        partition: How the samples are dealt to nodes. Default: BySite(), one node per site.
        test_share: Share of each site's samples, drawn at random, that judges it if the file has no test samples, in
            (0, 1). Default: 0.2.
        seed: Seed of the split into training and test samples, >= 0. Default: 0.
        unit: The array that says what each sample belongs to, such as its patient; samples of one unit are not divided.
            None if every sample is a unit of its own. Default: None.
        time: The array with the time of each sample, as for `Table`. Default: None.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> import fairmesh as fm
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.savez(f"{folder}/cells.npz", x=np.zeros((20, 3)), y=np.arange(20) % 2, site=["A", "B"] * 10)
        ...     [site.name for site in fm.data.Npz(f"{folder}/cells.npz").sites()]
        ['A', 'B']
    """

    file: str
    partition: Partition = field(default_factory=BySite)
    test_share: Share = 0.2
    seed: Natural = 0
    unit: str | None = None
    time: str | None = None

    def sites(self) -> list[Site]:
        arrays = read_arrays(Path(self.file))
        train = self._pair(arrays, "")
        if "x_test" not in arrays:
            grouped = read_groups(self, lambda name: self._array(arrays, name))
            if grouped is not UNGROUPED:
                return sites_by_number(
                    train[1], arrays.get("site"), self, lambda pair, _: (train[0][pair[0]], pair[1]), grouped
                )
            return self.partition.sites(split_by_site(train, arrays.get("site"), self.test_share, self.seed))
        if self.unit or self.time:
            raise BadInput(
                f"{self.file} has test samples of its own (x_test), so that unit and time divide nothing; remove "
                "them, or put all samples into x"
            )
        pool = Pool(train, self._pair(arrays, "_test"))
        if "site" in arrays:
            if "site_test" not in arrays:
                raise BadInput(f"{self.file} names the sites of x but not of x_test; add site_test")
            names, index = indexed(np.concatenate([arrays["site"], arrays["site_test"]]))
            sites, test_sites = torch.from_numpy(index).tensor_split([len(arrays["site"])])
            pool = replace(pool, sites=sites, test_sites=test_sites, site_names=names)
        return self.partition.sites(pool)

    def _array(self, arrays: dict[str, np.ndarray], name: str) -> np.ndarray:
        if name not in arrays:
            raise BadInput(f"{self.file} has no array {name!r}; it has {', '.join(arrays) or 'none'}")
        return arrays[name]

    def _pair(self, arrays: dict[str, np.ndarray], suffix: str) -> Pair:
        inputs, targets = (torch.from_numpy(np.ascontiguousarray(self._array(arrays, f"{k}{suffix}"))) for k in "xy")
        sites = arrays.get(f"site{suffix}")
        if len(inputs) != len(targets) or (sites is not None and len(sites) != len(inputs)):
            lengths = [len(array) for array in (inputs, targets, sites) if array is not None]
            raise BadInput(f"{self.file}: x{suffix}, y{suffix} and site{suffix} are not of one length: {lengths}")
        return inputs, targets if targets.is_floating_point() else targets.long()


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    with refusing(f"cannot read {path} as .npz"), np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}
