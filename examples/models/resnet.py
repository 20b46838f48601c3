"""ResNet-18 with BatchNorm at three clinics whose scanners differ in contrast and brightness.

`fairmesh run examples/models/resnet.toml` imports this file. The layers have torchvision's names, so its weights load
into ResNet18(classes=1000). With torchvision itself, the experiment file says
`model = { name = "import", path = "torchvision.models:resnet18", arguments = { num_classes = 4 } }`.
"""

import torch
from torch import Tensor, nn

import fairmesh as fm


class Block(nn.Module):
    """Two convolutions and a shortcut around them."""

    def __init__(self, channels: int, to: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, to, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(to)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(to, to, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(to)
        self.downsample = None
        if stride != 1 or channels != to:
            self.downsample = nn.Sequential(nn.Conv2d(channels, to, 1, stride, bias=False), nn.BatchNorm2d(to))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(inputs)))))
        hidden += inputs if self.downsample is None else self.downsample(inputs)
        return self.relu(hidden)


class ResNet18(nn.Module):
    """ResNet-18. The published one has a width of 64."""

    def __init__(self, classes: int = 1000, width: int = 64):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Block(width, width, 1), Block(width, width, 1))
        self.layer2 = nn.Sequential(Block(width, 2 * width, 2), Block(2 * width, 2 * width, 1))
        self.layer3 = nn.Sequential(Block(2 * width, 4 * width, 2), Block(4 * width, 4 * width, 1))
        self.layer4 = nn.Sequential(Block(4 * width, 8 * width, 2), Block(8 * width, 8 * width, 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * width, classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        hidden = self.layer4(self.layer3(self.layer2(self.layer1(hidden))))
        return self.fc(self.avgpool(hidden).flatten(1))


def clinic(number: int, images: int = 64, size: int = 64) -> fm.Site:
    """Returns images with a bright spot in one of four corners, as the scanner of a clinic shows them."""
    generator = torch.Generator().manual_seed(number)
    labels = torch.arange(images) % 4
    pixels, half = torch.randn(images, 3, size, size, generator=generator), size // 2
    for pixel, label in zip(pixels, labels.tolist()):
        row, column = half * (label // 2), half * (label % 2)
        pixel[:, row : row + half, column : column + half] += 1.0
    pixels = pixels * (1.0 + number) + 2.0 * number  # contrast and brightness
    rows = images // 4
    return fm.Site(
        (pixels[rows:], labels[rows:]), test=(pixels[:rows], labels[:rows]), name=("north", "south", "east")[number]
    )


def sites() -> list[fm.Site]:
    return [clinic(number) for number in range(3)]
