"""Where the rows of the bench come from: bundled, published and scikit-learn's data, as training and test pools."""

import functools
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairmesh.data.datasets.digits import load_digits
from fairmesh.data.datasets.published import pool_of
from fairmesh.errors import BadInput

Generator = np.random.Generator
_TEST_SHARE = 0.4  # of sets without official test rows
_GREY = torch.tensor([0.299, 0.587, 0.114])[:, None, None]  # luma of red, green and blue


class Pool(NamedTuple):
    """Rows to deal to sites. Test rows never occur among the training rows."""

    train: tuple[Tensor, Tensor]  # inputs, labels
    test: tuple[Tensor, Tensor]
    scale: int = 1  # images are reduced by this factor after an instrument has changed them


def digits(rng: Generator) -> Pool:
    """Returns the bundled digits, 8 x 8, values in [0, 1]; 40 % of them, drawn by `rng`, for testing."""
    images, labels = load_digits()
    return _cut(torch.as_tensor(images / 16.0, dtype=torch.float32), torch.as_tensor(labels), rng)


def mnist(rng: Generator) -> Pool:
    """Returns MNIST with its official test images, 28 x 28 bytes, to be reduced to 14 x 14."""
    pool = pool_of("mnist")
    return Pool(pool.train, pool.test, 2)


def fashion(rng: Generator) -> Pool:
    """Returns Fashion-MNIST with its official test images, 28 x 28 bytes, to be reduced to 14 x 14."""
    pool = pool_of("fashion-mnist")
    return Pool(pool.train, pool.test, 2)


def cifar(rng: Generator) -> Pool:
    """Returns CIFAR-10 with its official test images, 3 x 32 x 32 bytes, to be reduced to 16 x 16."""
    pool = pool_of("cifar-10")
    return Pool(pool.train, pool.test, 2)


def breast_cancer(rng: Generator) -> Pool:
    """Returns scikit-learn's breast cancer table, 569 rows of 30 columns; 40 % of them, drawn by `rng`, for testing.

    Columns are standardised by the mean and the standard deviation of the training rows."""
    inputs, labels = _table("breast-cancer", "load_breast_cancer")
    pool = _cut(torch.as_tensor(inputs, dtype=torch.float64), torch.as_tensor(labels, dtype=torch.int64), rng)
    mean, spread = pool.train[0].mean(dim=0), pool.train[0].std(dim=0)
    return Pool(
        (((pool.train[0] - mean) / spread).float(), pool.train[1]),
        (((pool.test[0] - mean) / spread).float(), pool.test[1]),
    )


def as_images(pixels: Tensor) -> Tensor:
    """Returns images of bytes, grey or in colours, as grey images (samples, height, width) with values in [0, 1]."""
    images = pixels.float() / 255.0 if pixels.dtype == torch.uint8 else pixels
    return (images * _GREY).sum(dim=1) if images.ndim == 4 else images


def _cut(inputs: Tensor, labels: Tensor, rng: Generator) -> Pool:
    order = torch.from_numpy(rng.permutation(len(labels)))
    test, train = order.tensor_split([round(_TEST_SHARE * len(labels))])
    return Pool((inputs[train], labels[train]), (inputs[test], labels[test]))


@functools.cache
def _table(name: str, loader: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the inputs and labels of a table from NAME.npz in $FAIRMESH_DATA, or else from scikit-learn."""
    folder = os.environ.get("FAIRMESH_DATA")
    path = Path(folder) / f"{name}.npz" if folder else None
    if path is not None and path.is_file():
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return arrays["inputs"], arrays["labels"]
        except (KeyError, ValueError, OSError) as error:
            raise BadInput(f"{path}: needs the arrays 'inputs' and 'labels': {error}; export it again") from error
    try:
        from sklearn import datasets
    except ModuleNotFoundError as error:
        raise BadInput(
            f"{name} comes with scikit-learn, which is not installed: pip install scikit-learn, or put {name}.npz into "
            "the folder of --data; `python -m reproduction.sites.sources FOLDER` writes it where scikit-learn is"
        ) from error
    found = getattr(datasets, loader)()
    return found.data, found.target


def export(folder: Path) -> Path:
    """Writes scikit-learn's table into a folder, for a machine without scikit-learn. Returns the file."""
    inputs, labels = _table("breast-cancer", "load_breast_cancer")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "breast-cancer.npz"
    np.savez_compressed(path, inputs=inputs, labels=labels)
    return path


if __name__ == "__main__":
    import sys

    print(export(Path(sys.argv[1])))
