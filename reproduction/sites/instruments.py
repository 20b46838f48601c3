"""What a site's instrument does to grey images (samples, height, width) with values in [0, 1], and to their labels."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from reproduction.sites.sources import Generator

Change = Callable[[Tensor, Generator], Tensor]  # of a site's images or rows
Relabel = Callable[[Tensor, Generator], Tensor]  # of a site's labels


def mirrored(images: Tensor, rng: Generator) -> Tensor:
    return images.flip(-1)


def blurred(width: int) -> Change:
    """A box filter of width x width pixels."""
    return lambda images, rng: F.avg_pool2d(
        images[:, None], width, stride=1, padding=width // 2, count_include_pad=False
    )[:, 0]


def faint(contrast: float, black: float = 0.0) -> Change:
    """A lower contrast over a raised black level."""
    return lambda images, rng: black + contrast * images


def noisy(spread: float) -> Change:
    """Gaussian noise per pixel."""

    def change(images: Tensor, rng: Generator) -> Tensor:
        noise = torch.from_numpy(rng.standard_normal(images.shape, dtype="float32"))
        return (images + spread * noise).clamp(0, 1)

    return change


def coarse(block: int) -> Change:
    """A lower resolution: blocks of block x block pixels have one value."""
    return lambda images, rng: F.interpolate(F.avg_pool2d(images[:, None], block), scale_factor=block)[:, 0]


def turned(degrees: float) -> Change:
    """A rotation about the centre."""

    def change(images: Tensor, rng: Generator) -> Tensor:
        if degrees % 90 == 0:
            return images.rot90(round(degrees / 90), (-2, -1))
        c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
        grid = F.affine_grid(
            torch.tensor([[c, -s, 0.0], [s, c, 0.0]]).expand(len(images), -1, -1),
            [len(images), 1, *images.shape[1:]],
            align_corners=False,
        )
        return F.grid_sample(images[:, None], grid, align_corners=False)[:, 0]

    return change


def shifted(right: int, down: int) -> Change:
    """A shift by whole pixels; what leaves the image is lost."""

    def change(images: Tensor, rng: Generator) -> Tensor:
        height, width = images.shape[-2:]
        padded = F.pad(images, (max(right, 0), max(-right, 0), max(down, 0), max(-down, 0)))
        return padded[:, max(-down, 0) :, max(-right, 0) :][:, :height, :width]

    return change


def thick(steps: int = 1) -> Change:
    """Thicker strokes: each pixel takes the maximum of its 3 x 3 neighbourhood, `steps` times."""

    def change(images: Tensor, rng: Generator) -> Tensor:
        for _ in range(steps):
            images = F.max_pool2d(images[:, None], 3, stride=1, padding=1)[:, 0]
        return images

    return change


def thin(images: Tensor, rng: Generator) -> Tensor:
    """Thinner strokes: each pixel takes the minimum of itself and its right and lower neighbours."""
    return -F.max_pool2d(F.pad(-images[:, None], (0, 1, 0, 1)), 2, stride=1)[:, 0]


def half_of(change: Change) -> Change:
    """Changes a random half of the images."""

    def changed(images: Tensor, rng: Generator) -> Tensor:
        chosen = torch.from_numpy(rng.permutation(len(images)) < len(images) // 2)
        return torch.where(chosen[:, None, None], change(images, rng), images)

    return changed


def then(*changes: Change) -> Change:
    """One change after another."""

    def changed(images: Tensor, rng: Generator) -> Tensor:
        for change in changes:
            images = change(images, rng)
        return images

    return changed


def calibrated(gain: float, offset: float, columns: int) -> Change:
    """A drift of the first columns of a table, in units of their standard deviation."""

    def change(rows: Tensor, rng: Generator) -> Tensor:
        return torch.cat([gain * rows[:, :columns] + offset, rows[:, columns:]], dim=1)

    return change


def renamed(names: Mapping[int, int]) -> Relabel:
    """Another convention of labels."""

    def change(labels: Tensor, rng: Generator) -> Tensor:
        table = torch.arange(int(max(labels.max(), *names)) + 1)
        for old, new in names.items():
            table[old] = new
        return table[labels]

    return change


def mistaken(share: float, classes: int) -> Relabel:
    """A share of the labels is replaced by another class, each equally likely."""

    def change(labels: Tensor, rng: Generator) -> Tensor:
        wrong = torch.from_numpy(rng.random(len(labels)) < share)
        others = (labels + torch.from_numpy(rng.integers(1, classes, len(labels)))) % classes
        return torch.where(wrong, others, labels)

    return change
