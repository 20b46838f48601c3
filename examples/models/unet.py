"""A U-Net that finds cells in images of three laboratories, where experts left some pixels undecided.

`fairmesh run examples/models/unet.toml` imports this file.
"""

import torch
from torch import Tensor, nn

import fairmesh as fm

UNDECIDED = 255  # the label of pixels that do not count


def double(channels: int, to: int) -> nn.Module:
    """Returns two convolutions, each with a norm of single images."""
    return nn.Sequential(
        nn.Conv2d(channels, to, 3, padding=1), nn.GroupNorm(4, to), nn.ReLU(),
        nn.Conv2d(to, to, 3, padding=1), nn.GroupNorm(4, to), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """A U-Net with two levels. The published one has four, and a width of 64."""

    def __init__(self, classes: int = 2, width: int = 64):
        super().__init__()
        self.first, self.second, self.bottom = double(1, width), double(width, 2 * width), double(2 * width, 4 * width)
        self.pool = nn.MaxPool2d(2)
        self.up2, self.back2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), double(4 * width, 2 * width)
        self.up1, self.back1 = nn.ConvTranspose2d(2 * width, width, 2, 2), double(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        high = self.first(images)
        low = self.second(self.pool(high))
        hidden = self.back2(torch.cat([low, self.up2(self.bottom(self.pool(low)))], dim=1))
        return self.head(self.back1(torch.cat([high, self.up1(hidden)], dim=1)))  # (images, classes, height, width)


def laboratory(number: int, images: int = 40, size: int = 16) -> fm.Site:
    """Returns images of round cells with masks; laboratories differ in the size of their cells."""
    generator = torch.Generator().manual_seed(number)
    centres = size / 4 + size / 2 * torch.rand(images, 2, 1, 1, generator=generator)
    axis = torch.arange(size, dtype=torch.float32)
    distance = ((axis[:, None] - centres[:, 0]) ** 2 + (axis - centres[:, 1]) ** 2).sqrt()
    radius = 2.5 + number
    masks = (distance < radius).long()
    pixels = masks + 0.5 * torch.randn(images, size, size, generator=generator)
    masks[(distance - radius).abs() < 0.5] = UNDECIDED
    pixels, rows = pixels[:, None], images // 4
    return fm.Site(
        (pixels[rows:], masks[rows:]), test=(pixels[:rows], masks[:rows]), name=("north", "south", "east")[number]
    )


def sites() -> list[fm.Site]:
    return [laboratory(number) for number in range(3)]
