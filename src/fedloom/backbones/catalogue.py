"""Every backbone by its name."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch

from fedloom.backbones.base import Backbone
from fedloom.backbones.efficientnet import EfficientNetLite
from fedloom.backbones.inception import Inception2015
from fedloom.backbones.pixels import Pixels
from fedloom.errors import ConfigError, unknown


class BackboneFactory(Protocol):
    """Makes a backbone; resolution 0 is its native one, empty weights are its own."""

    def __call__(self, *, device: torch.device | str, resolution: int, weights: str) -> Backbone:
        """Build it on a device."""
        ...


BACKBONES: dict[str, BackboneFactory] = {
    "efficientnet-lite0": partial(EfficientNetLite, 0),
    "efficientnet-lite2": partial(EfficientNetLite, 2),
    "inception-2015": Inception2015,
    "pixels": Pixels,
}


def load_backbone(name: str, *, device: torch.device | str = "cpu", resolution: int = 0, weights: str = "") -> Backbone:
    """The backbone of that name, ready to extract."""
    if name not in BACKBONES:
        raise ConfigError(unknown("backbone", name, BACKBONES))
    if resolution < 0:
        raise ConfigError(f"resolution = {resolution} must be a side in pixels, or 0 for the backbone's own")
    return BACKBONES[name](device=device, resolution=resolution, weights=weights)
