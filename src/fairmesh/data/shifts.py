"""How an instrument changes an image: its contrast, a mirror, a second camera."""

from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fairmesh.errors import BadInput

Transform = Literal["published", "formula"]

_CAST = torch.tensor([[0.2, 0.7, 0.1], [0.1, 0.3, 0.6], [0.6, 0.1, 0.3]])  # a second camera's red, green, blue of ours
_BLACK, _GAIN = 0.1, 0.5


def contrast_table(c: float, transform: Transform) -> np.ndarray:
    """Returns the value of each byte P in 0..255 at contrast c.

    "formula" is what the paper prints: clip(round((128 + c (P - 128))^1.1)), also for c = 1, with negative values set
    to zero before the power. "published" is what its authors' program does: clip before the power, truncate after it,
    and leave c = 1 unchanged."""
    level = np.arange(256, dtype=np.float64)
    if transform == "published" and c == 1:
        return level.astype(np.uint8)
    spread = 128 + c * (level - 128)
    if transform == "published":
        return np.clip(np.clip(spread, 0, 255) ** 1.1, 0, 255).astype(np.uint8)
    return np.clip(np.round(np.maximum(spread, 0) ** 1.1), 0, 255).astype(np.uint8)


def with_contrast(images: Tensor, c: float, transform: Transform) -> Tensor:
    """Returns images of bytes at contrast c."""
    if images.dtype != torch.uint8:
        raise BadInput(f"contrast is defined on bytes 0 to 255, but the images are {images.dtype}; store them as uint8")
    return torch.from_numpy(contrast_table(c, transform)[images.numpy()])


def mirrored(images: Tensor) -> Tensor:
    """Returns images flipped left to right."""
    _check_images(images)
    return images.flip(-1)


def through_second_camera(images: Tensor) -> Tensor:
    """Returns images as a fixed second camera would store them.

    It is out of focus (a 3 x 3 box filter), mixes the three colours differently, and has half the contrast over a
    raised black level. Bytes stay bytes; floats must lie in [0, 1]."""
    _check_images(images)
    top = 255.0 if images.dtype == torch.uint8 else 1.0
    if images.is_floating_point() and images.numel() and not 0 <= float(images.min()) <= float(images.max()) <= top:
        raise BadInput("a second camera takes bytes, or floats between 0 and 1; scale the images first")
    planes = images.unsqueeze(1) if images.ndim == 3 else images
    seen = F.avg_pool2d(planes.float() / top, 3, stride=1, padding=1, count_include_pad=False)
    if seen.shape[1] == 3:
        seen = torch.einsum("oc,nchw->nohw", _CAST, seen)
    seen = top * (_BLACK + _GAIN * seen)
    return (seen.round() if images.dtype == torch.uint8 else seen).to(images.dtype).reshape(images.shape)


def _check_images(images: Tensor) -> None:
    if images.ndim not in (3, 4) or not (images.dtype == torch.uint8 or images.is_floating_point()):
        raise BadInput(
            f"an instrument takes images (samples, height, width) or (samples, channels, height, width) of bytes or "
            f"floats, got {tuple(images.shape)} {images.dtype}"
        )
