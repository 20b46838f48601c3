"""[data] What each site holds: datasets, files of your own, and how samples are dealt to sites. Public as `fm.data`."""

from fairmesh.data.columns import Column
from fairmesh.data.contract import Arrays, Contract
from fairmesh.data.datasets import (
    CIFAR10,
    COOS7,
    MNIST,
    Corrupted,
    Data,
    Digits,
    FashionMNIST,
    Fewer,
    HeldOut,
    ImageFolder,
    ImportedData,
    Npz,
    ParquetRows,
    Table,
)
from fairmesh.data.partitions import (
    BySite,
    Contrast,
    Dirichlet,
    Even,
    Instrument,
    OneClass,
    Partition,
    Pool,
    Quantity,
    Shards,
)
from fairmesh.data.preprocessing import Preprocessing
from fairmesh.data.reserve import reserve
from fairmesh.data.samples import Samples
from fairmesh.data.site import Site
from fairmesh.data.streams import Streamed
from fairmesh.data.tables import read_table
from fairmesh.data.units import split

__all__ = [
    "CIFAR10",
    "COOS7",
    "MNIST",
    "Arrays",
    "BySite",
    "Column",
    "Contract",
    "Contrast",
    "Corrupted",
    "Data",
    "Digits",
    "Dirichlet",
    "Even",
    "FashionMNIST",
    "Fewer",
    "HeldOut",
    "ImageFolder",
    "ImportedData",
    "Instrument",
    "Npz",
    "OneClass",
    "ParquetRows",
    "Partition",
    "Pool",
    "Preprocessing",
    "Quantity",
    "Samples",
    "Shards",
    "Site",
    "Streamed",
    "Table",
    "read_table",
    "reserve",
    "split",
]
