"""Sources of sites: published datasets, a user's own files, or a user's own function."""

from fairmesh.config.tables import register
from fairmesh.data.datasets.base import (
    Corrupted,
    Data,
    Fewer,
    HeldOut,
    ImportedData,
)
from fairmesh.data.datasets.coos7 import COOS7
from fairmesh.data.datasets.digits import Digits
from fairmesh.data.datasets.own import ImageFolder, Npz
from fairmesh.data.datasets.parquet import ParquetRows
from fairmesh.data.datasets.published import CIFAR10, MNIST, FashionMNIST
from fairmesh.data.datasets.table import Table

register(
    Data,
    {
        "digits": Digits,
        "fashion-mnist": FashionMNIST,
        "mnist": MNIST,
        "cifar-10": CIFAR10,
        "coos7": COOS7,
        "image-folder": ImageFolder,
        "table": Table,
        "npz": Npz,
        "parquet-rows": ParquetRows,
        "held-out": HeldOut,
        "fewer": Fewer,
        "corrupted": Corrupted,
        "import": ImportedData,
    },
)
