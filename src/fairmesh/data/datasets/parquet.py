"""Rows of parquet files that are read when a batch needs them."""

import functools
import io
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fairmesh.config.ranges import Natural, Share
from fairmesh.data.datasets.base import Data, check_split
from fairmesh.data.datasets.own import image_planes, indexed, labels_of, read_image, streamed_sites
from fairmesh.data.partitions import BySite, Partition
from fairmesh.data.site import Site
from fairmesh.data.units import read_groups
from fairmesh.errors import BadInput, optional, refusing

_GROUPS = 2  # row groups of parquet files that a process keeps


@dataclass(frozen=True)
class ParquetRows(Data):
    """Rows of parquet files that are read when a batch needs them (`pip install 'fairmesh[parquet]'`).

    Use it for files that do not fit into memory. `Table` reads smaller ones, and knows categories and missing values.
    Here inputs are numbers as the file has them: one column per input, or one column of lists, or one of encoded
    images. Only the columns of targets and sites are read whole. A row group is the least that can be read, so files
    with small ones (about 1,000 rows) are fast.

    Args:
        file: The path of a file, or of a folder of .parquet files with the same columns.
        target: The column to predict.
        site: The column that says where a row was taken; None if the partition does not need it. Default: None.
        inputs: The columns to predict from; empty for all but `target`, `site`, `unit` and `time`. Default: ().
        predict: What the target is: "labels", numbered in order or as `classes` lists them, or "numbers". Default:
            "labels".
        partition: How the rows are dealt to nodes. Default: BySite(), one node per site.
        test_share: Share of each site's rows, drawn at random, that judges it, in (0, 1). Default: 0.2.
        seed: Seed of the split into training and test rows, >= 0. Default: 0.
        classes: The labels, in the order of their numbers; empty to number them in order. Default: ().
        size: (height, width) in pixels to which images are resized; None if all have one size. Images become (3,
            height, width), grey ones too. Default: None.
        workers: As for `Streamed`. Default: 0.
        prefetch: As for `Streamed`. Default: 2.
        unit: The column that says what each row belongs to, as for `Table`. Default: None.
        time: The column with the time of each row, as for `Table`. Default: None.

    Example:
        >>> import fairmesh as fm
        >>> data = fm.data.ParquetRows("visits.parquet", target="outcome", site="clinic", workers=2)
        >>> data.workers
        2
    """

    file: str
    target: str
    site: str | None = None
    inputs: tuple[str, ...] = ()
    predict: Literal["labels", "numbers"] = "labels"
    partition: Partition = field(default_factory=BySite)
    test_share: Share = 0.2
    seed: Natural = 0
    classes: tuple[str, ...] = ()
    size: tuple[int, ...] | None = None
    workers: int = 0
    prefetch: int = 2
    unit: str | None = None
    time: str | None = None

    def __post_init__(self):
        check_split(self)

    def sites(self) -> list[Site]:
        groups = RowGroups(self.file)
        values = groups.column(self.target)
        if self.predict == "numbers":
            targets = torch.from_numpy(np.asarray(values, np.float32))
        else:
            targets = torch.from_numpy(labels_of(values, self.classes, self.file))
        others = (self.target, self.site, self.unit, self.time)
        inputs = self.inputs or tuple(name for name in groups.names if name not in others)
        for name in inputs:
            groups.check(name)
        names = None if self.site is None else [str(name) for name in groups.column(self.site)]
        read = functools.partial(_inputs_of, groups, inputs, self.size)
        return streamed_sites(targets, names, self, read, read_groups(self, groups.column))

    def class_names(self) -> tuple[str, ...]:
        if self.predict == "numbers":
            return ()
        return self.classes or indexed(RowGroups(self.file).column(self.target))[0]


class RowGroups:
    """The row groups of parquet files, numbered one after another. Every process opens the files for itself.

    Args:
        path: A file, or a folder of files.
    """

    def __init__(self, path: str):
        with optional("parquet"):
            from pyarrow import parquet  # noqa: F401
        given = Path(path)
        self._files = sorted(given.glob("*.parquet")) if given.is_dir() else [given]
        if not self._files or not all(file.is_file() for file in self._files):
            raise BadInput(f"there is no parquet file {given}; give a file, or a folder that holds some")
        self._places: list[tuple[int, int]] = []  # file and number in it
        sizes = []
        for k in range(len(self._files)):
            metadata = self._file(k).metadata
            self._places += [(k, group) for group in range(metadata.num_row_groups)]
            sizes += [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._ends = np.cumsum(sizes)
        self.names = tuple(self._file(0).schema_arrow.names)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if not key.startswith("_open")}

    def _file(self, k: int) -> Any:
        from pyarrow import ArrowException, parquet

        if vars(self).get("_opened_by") != os.getpid():  # a forked worker must not share positions in files
            self._opened_by, self._open_files, self._open_groups = os.getpid(), {}, OrderedDict()
        if k not in self._open_files:
            with refusing(f"cannot read {self._files[k]} as parquet", OSError, ArrowException):
                self._open_files[k] = parquet.ParquetFile(self._files[k])
        return self._open_files[k]

    def check(self, name: str) -> None:
        """Raises BadInput if there is no such column."""
        if name not in self.names:
            raise BadInput(f"{self._files[0]} has no column {name!r}; it has {', '.join(self.names)}")

    def column(self, name: str) -> np.ndarray:
        """Returns a whole column."""
        self.check(name)
        parts = [self._file(k).read([name]).column(0).to_numpy() for k in range(len(self._files))]
        return np.concatenate(parts)

    def row(self, number: int, names: Sequence[str]) -> list[Any]:
        """Returns the values of some columns in a row."""
        group = int(np.searchsorted(self._ends, number, side="right"))
        file = self._file(self._places[group][0])
        if group not in self._open_groups:
            while len(self._open_groups) >= _GROUPS:
                self._open_groups.popitem(last=False)
            self._open_groups[group] = file.read_row_group(self._places[group][1], columns=list(names))
        self._open_groups.move_to_end(group)
        table = self._open_groups[group]
        at = number - (int(self._ends[group - 1]) if group else 0)
        return [table.column(name)[at].as_py() for name in names]


def _inputs_of(groups: RowGroups, names: Sequence[str], size: tuple[int, ...] | None, number: int) -> Tensor:
    """Returns the inputs of a row."""
    values = groups.row(number, names)
    first = values[0]
    encoded = first.get("bytes") if isinstance(first, dict) else first  # as Hugging Face stores images
    if len(values) == 1 and isinstance(encoded, bytes):
        return torch.from_numpy(image_planes(read_image(io.BytesIO(encoded), size), 3))
    missing = [name for name, value in zip(names, values) if value is None]
    if missing:
        raise BadInput(f"row {number} has no {missing[0]!r}; fill or leave out missing values")
    advice = "name the columns in inputs, or use a table, which knows categories"
    with refusing(f"row {number} has values that are no numbers in {', '.join(names)}", advice=advice):
        return torch.tensor(first if len(values) == 1 else values, dtype=torch.float32)
