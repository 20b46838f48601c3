"""A user's own files: a folder of images, a table, arrays."""

import csv
import functools
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fairmesh.data.datasets.base import Data
from fairmesh.data.partitions import (
    BySite,
    Pair,
    Partition,
    Pool,
)
from fairmesh.data.site import Site
from fairmesh.errors import BadInput, in_a_line, optional

_IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".gif", ".webp")


def _check_split(share: float, seed: int) -> None:
    if not 0 < share < 1:
        raise BadInput(f"test_share must lie in (0, 1), got {share}")
    if seed < 0:
        raise BadInput(f"seed must be >= 0, got {seed}")


def _split(samples: Pair, sites: ArrayLike | None, share: float, seed: int) -> Pool:
    """Returns a pool in which a share of each site's samples, drawn at random, at least one, is for testing."""
    names, index = _indexed(sites if sites is not None else [""] * len(samples[0]))
    testing = np.zeros(len(index), bool)
    generator = np.random.default_rng(seed)
    for k, name in enumerate(names):
        mine = generator.permutation(np.flatnonzero(index == k))
        count = max(1, round(share * len(mine)))
        if count >= len(mine):
            where = f"site {name!r} has" if sites is not None else "there are"
            raise BadInput(f"{where} {len(mine)} samples: too few to train and to test; give more, or leave it out")
        testing[mine[:count]] = True
    test = torch.from_numpy(testing)
    train, judge = ((samples[0][which], samples[1][which]) for which in (~test, test))
    if sites is None:
        return Pool(train, judge)
    of_sample = torch.from_numpy(index)
    return Pool(train, judge, of_sample[~test], of_sample[test], names)


def _indexed(values: ArrayLike) -> tuple[tuple[str, ...], np.ndarray]:
    """Returns the distinct values in order, whole numbers by size, and the index of each value among them."""
    distinct, index = np.unique(np.asarray(values), return_inverse=True)
    return tuple(str(value) for value in distinct), index.reshape(-1)


def _labels(values: Any, classes: tuple[str, ...], where: str) -> np.ndarray:
    """Returns the class of each value: its place among `classes` or, if none are given, among the distinct values."""
    if not classes:
        return _indexed(values)[1]
    place = {name: k for k, name in enumerate(classes)}
    texts = [str(value) for value in np.asarray(values).tolist()]
    unknown = sorted(set(texts) - place.keys())
    if unknown:
        raise BadInput(f"{where} has the class {unknown[0]!r}, which is not among classes = {list(classes)}")
    return np.array([place[text] for text in texts])


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

    Example:
        >>> import fairmesh as fm
        >>> data = fm.data.ImageFolder("scans", size=(64, 64), classes=("healthy", "ill"))
        >>> data.size
        (64, 64)
    """

    folder: str
    partition: Partition = field(default_factory=BySite)
    test_share: float = 0.2
    seed: int = 0
    size: tuple[int, ...] | None = None
    classes: tuple[str, ...] = ()

    def __post_init__(self):
        _check_split(self.test_share, self.seed)
        if self.size is not None and (len(self.size) != 2 or min(self.size) < 1):
            raise BadInput(f"size is a height and a width >= 1, got {self.size}")

    def sites(self) -> list[Site]:
        files = _image_files(Path(self.folder))
        samples, sites = _images(
            tuple(files), self.size, tuple(path.stat().st_mtime_ns for path in files), self.classes
        )
        return self.partition.sites(_split(samples, sites, self.test_share, self.seed))


def _image_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise BadInput(f"there is no folder {folder}; give one that holds images as site/class/file")
    files = sorted(path for path in folder.glob("*/*/*") if path.suffix.lower() in _IMAGES and path.is_file())
    if not files:
        raise BadInput(f"{folder} holds no image at site/class/file, of {', '.join(_IMAGES)}")
    return files


@functools.lru_cache(maxsize=2)
def _images(
    files: tuple[Path, ...], size: tuple[int, int] | None, stamped: tuple[int, ...], classes: tuple[str, ...]
) -> tuple[Pair, tuple[str, ...]]:
    pictures = [_image(path, size) for path in files]
    colour = any(picture.ndim == 3 for picture in pictures)
    first = pictures[0].shape[:2]
    for path, picture in zip(files, pictures):
        if picture.shape[:2] != first:
            height, width = picture.shape[:2]
            raise BadInput(
                f"{path} is {height} x {width}, but {files[0]} is {first[0]} x {first[1]}; give size = (height, width)"
            )
    planes = [np.stack([p] * 3) if p.ndim == 2 else p.transpose(2, 0, 1) for p in pictures] if colour else pictures
    labels = _labels([path.parent.name for path in files], classes, str(files[0].parent.parent.parent))
    sites = tuple(path.parent.parent.name for path in files)
    return (torch.from_numpy(np.stack(planes)), torch.from_numpy(labels)), sites


def _image(path: Path, size: tuple[int, int] | None) -> np.ndarray:
    """Returns the bytes of an image: (height, width) if it is grey, else (height, width, 3)."""
    with optional("images"):
        from PIL import Image, UnidentifiedImageError
    try:
        with Image.open(path) as image:
            if image.mode.startswith(("I", "F")):
                raise BadInput(f"{path} has more than 8 bits per pixel; store it with 8, or give arrays as .npz")
            image = image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")
            if size is not None:
                image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
            return np.asarray(image)
    except (OSError, UnidentifiedImageError, SyntaxError) as error:
        raise BadInput(f"cannot read the image {path}: {in_a_line(error)}") from error


@dataclass(frozen=True)
class Table(Data):
    """Rows of a .csv file with a header, or of a .parquet file (`pip install 'fairmesh[parquet]'`).

    Args:
        file: The path of the file.
        target: The column to predict.
        site: The column that says where a row was taken; None if the partition does not need it. Default: None.
        inputs: The columns to predict from, all numbers; empty for all columns but `target`, `site` and `subgroup`.
            Default: ().
        predict: What the target is: "labels", numbered in order or as `classes` lists them, or "numbers" as they are.
            Default: "labels".
        standardize: Whether to scale each input to mean 0 and variance 1 over the training rows. Default: True.
        partition: How the rows are dealt to nodes. Default: BySite(), one node per site.
        test_share: Share of each site's rows, drawn at random, that judges it, in (0, 1). Default: 0.2.
        seed: Seed of the split into training and test rows, >= 0. Default: 0.
        classes: The labels, in the order of their numbers; empty to number them in order. Default: ().
        subgroup: The column that names the subgroup of each row, such as its scanner, for `objective.subgroups` and
            `result.subgroups()`. It never leaves the site, and is an input only if `inputs` names it. None for no
            subgroups. Default: None.

    Example:
        >>> import fairmesh as fm
        >>> data = fm.data.Table("patients.csv", target="outcome", site="hospital")
        >>> data.predict
        'labels'
    """

    file: str
    target: str
    site: str | None = None
    inputs: tuple[str, ...] = ()
    predict: Literal["labels", "numbers"] = "labels"
    standardize: bool = True
    partition: Partition = field(default_factory=BySite)
    test_share: float = 0.2
    seed: int = 0
    classes: tuple[str, ...] = ()
    subgroup: str | None = None

    def __post_init__(self):
        _check_split(self.test_share, self.seed)
        if self.site is None and isinstance(self.partition, BySite):
            raise BadInput("name the site column, or give a partition that needs none, such as even")

    def sites(self) -> list[Site]:
        return self.sites_of(self.read())

    def read(self) -> dict[str, np.ndarray]:
        """Returns the columns of the file, by name."""
        return _columns(Path(self.file))

    def input_names(self, columns: Mapping[str, np.ndarray]) -> tuple[str, ...]:
        """Returns which of the columns are inputs, in order."""
        for name in (self.target, *filter(None, (self.site, self.subgroup)), *self.inputs):
            if name not in columns:
                raise BadInput(f"{self.file} has no column {name!r}; it has {', '.join(columns)}")
        names = self.inputs or tuple(name for name in columns if name not in (self.target, self.site, self.subgroup))
        if not names:
            raise BadInput(f"{self.file} has no column to predict from other than target, site and subgroup")
        return names

    def sites_of(self, columns: Mapping[str, np.ndarray]) -> list[Site]:
        """Returns the sites if these are the columns of the file."""
        names = self.input_names(columns)
        inputs = torch.stack([_numbers(columns[name], name, self.file) for name in names], dim=1)
        if self.predict == "numbers":
            targets = _numbers(columns[self.target], self.target, self.file)
        else:
            labels = _filled(columns[self.target], self.target, self.file)
            targets = torch.from_numpy(_labels(labels, self.classes, f"{self.file}, column {self.target}"))
        sites = _filled(columns[self.site], self.site, self.file) if self.site else None
        if self.subgroup is None:
            pool = _split((inputs, targets), sites, self.test_share, self.seed)
            return self.partition.sites(_standardized(pool) if self.standardize else pool)
        known, subgroups = _indexed(_filled(columns[self.subgroup], self.subgroup, self.file))
        inputs = torch.cat([inputs, torch.from_numpy(subgroups).to(inputs.dtype).unsqueeze(1)], dim=1)
        pool = _split((inputs, targets), sites, self.test_share, self.seed)
        pool = _standardized(pool, keep_last=True) if self.standardize else pool
        return _with_subgroups(self.partition.sites(pool), known)


def _with_subgroups(sites: list[Site], names: tuple[str, ...]) -> list[Site]:
    """Returns sites whose last input column, the number of a subgroup, has become the subgroup of each sample."""

    @functools.cache
    def apart(key: int) -> tuple[Tensor, Tensor, list[str]]:
        inputs, targets = of_key[key]
        return inputs[:, :-1], targets, [names[int(k)] for k in inputs[:, -1].tolist()]

    of_key = {id(samples): samples for site in sites for samples in (site.train, site.test) if samples is not None}
    return [
        replace(site, train=apart(id(site.train)), test=None if site.test is None else apart(id(site.test)))
        for site in sites
    ]


def _standardized(pool: Pool, keep_last: bool = False) -> Pool:
    """Returns the pool with inputs of mean 0 and variance 1 over the training rows; the last column may be kept."""
    values = pool.train[0]
    mean, spread = values.mean(0), values.std(0, correction=0)
    spread = torch.where(spread > 0, spread, 1.0)
    if keep_last:
        mean[-1], spread[-1] = 0.0, 1.0
    train, test = (((inputs - mean) / spread, targets) for inputs, targets in (pool.train, pool.test))
    return Pool(train, test, pool.sites, pool.test_sites, pool.site_names)


def _columns(path: Path) -> dict[str, np.ndarray]:
    """Returns the columns of a table, by name."""
    try:
        if path.suffix.lower() == ".parquet":
            return _parquet(path)
        if path.suffix.lower() != ".csv":
            raise BadInput(f"{path}: a table is a .csv or a .parquet file")
        with path.open(encoding="utf-8-sig", newline="") as lines:
            header, *rows = [row for row in csv.reader(lines) if row] or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"cannot read {path}: {in_a_line(error)}") from error
    if not rows:
        raise BadInput(f"{path} needs a header and rows below it")
    if len(header) == 1 and ";" in header[0]:
        raise BadInput(f"{path}: its values are separated by semicolons; save it with commas, and a point for decimals")
    for i, row in enumerate(rows):
        if len(row) != len(header):
            raise BadInput(f"{path}: row {i + 1} has {len(row)} values, but the header names {len(header)} columns")
    return {name.strip(): np.array(values) for name, values in zip(header, zip(*rows))}


def _parquet(path: Path) -> dict[str, np.ndarray]:
    with optional("parquet"):
        from pyarrow import ArrowException, parquet
    try:
        table = parquet.read_table(path)
    except ArrowException as error:
        raise BadInput(f"cannot read {path}: {in_a_line(error)}") from error
    if not table.num_rows:
        raise BadInput(f"{path} has no rows")
    return {name: table.column(name).to_numpy() for name in table.column_names}


def _numbers(column: np.ndarray, name: str, file: str) -> Tensor:
    try:
        numbers = np.asarray(column, np.float64)
        bad = np.flatnonzero(~np.isfinite(numbers))
    except (ValueError, TypeError):
        numbers, bad = column, np.array([i for i, value in enumerate(column) if not _is_number(value)])
    if len(bad):
        raise BadInput(
            f"{file}: row {bad[0] + 1} of column {name!r} is {str(column[bad[0]])!r}, not a finite number; "
            "fill it, or name the columns to use in inputs"
        )
    return torch.from_numpy(numbers.astype(np.float32))


def _is_number(value: Any) -> bool:
    try:
        return bool(np.isfinite(float(value)))
    except (ValueError, TypeError):
        return False


def _filled(column: np.ndarray, name: str, file: str) -> np.ndarray:
    """Returns the column's values; refuses missing ones. Whole numbers written as text become numbers, so that 10
    comes after 9."""
    missing = [i for i, value in enumerate(column) if value is None or value != value or str(value).strip() == ""]
    if missing:
        raise BadInput(f"{file}: row {missing[0] + 1} of column {name!r} is empty; fill it, or leave the row out")
    text = column.astype(str)
    return text.astype(np.int64) if all(re.fullmatch(r"\s*-?\d{1,18}\s*", value) for value in text) else text


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
    test_share: float = 0.2
    seed: int = 0

    def __post_init__(self):
        _check_split(self.test_share, self.seed)

    def sites(self) -> list[Site]:
        arrays = _arrays(Path(self.file))
        if "x_test" not in arrays:
            return self.partition.sites(_split(self._pair(arrays, ""), arrays.get("site"), self.test_share, self.seed))
        train, test = self._pair(arrays, ""), self._pair(arrays, "_test")
        if "site" not in arrays:
            return self.partition.sites(Pool(train, test))
        if "site_test" not in arrays:
            raise BadInput(f"{self.file} names the sites of x but not of x_test; add site_test")
        names, index = _indexed(np.concatenate([arrays["site"], arrays["site_test"]]))
        of_sample = torch.from_numpy(index)
        cut = len(arrays["site"])
        return self.partition.sites(Pool(train, test, of_sample[:cut], of_sample[cut:], names))

    def _pair(self, arrays: dict[str, np.ndarray], suffix: str) -> Pair:
        for name in (f"x{suffix}", f"y{suffix}"):
            if name not in arrays:
                raise BadInput(f"{self.file} has no array {name!r}; it has {', '.join(arrays) or 'none'}")
        inputs, targets = (torch.from_numpy(np.ascontiguousarray(arrays[f"{k}{suffix}"])) for k in "xy")
        sites = arrays.get(f"site{suffix}")
        if len(inputs) != len(targets) or (sites is not None and len(sites) != len(inputs)):
            raise BadInput(
                f"{self.file}: x{suffix}, y{suffix} and site{suffix} are not of one length: {len(inputs)}, "
                f"{len(targets)}" + (f", {len(sites)}" if sites is not None else "")
            )
        return inputs, targets if targets.is_floating_point() else targets.long()


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise BadInput(f"cannot read {path} as .npz: {in_a_line(error)}") from error
