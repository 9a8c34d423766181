"""Every backbone by its name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, runtime_checkable

import torch

from fedloom.backbones.base import Backbone
from fedloom.backbones.efficientnet import EfficientNetLite
from fedloom.backbones.inception import Inception2015
from fedloom.backbones.own import OwnModule
from fedloom.backbones.pixels import Pixels
from fedloom.backbones.timm_models import TimmModel
from fedloom.errors import ConfigError, unknown
from fedloom.registry import Registry


@runtime_checkable
class BackboneFactory(Protocol):
    """Makes a backbone; resolution 0 is its native one, empty weights are its own."""

    def __call__(self, *, device: torch.device | str, resolution: int, weights: str) -> Backbone:
        """Build it on a device."""
        ...


_OWN: dict[str, BackboneFactory] = {
    "efficientnet-lite0": partial(EfficientNetLite, 0),
    "efficientnet-lite2": partial(EfficientNetLite, 2),
    "inception-2015": Inception2015,
    "pixels": Pixels,
}
BACKBONES: Registry[BackboneFactory] = Registry("backbone", "fedloom.backbones", BackboneFactory, lambda: _OWN)

# Families of backbones: "timm/<model>", "module/<package.file:name>".
FAMILIES: dict[str, Callable[[str], BackboneFactory]] = {
    "timm": lambda model: partial(TimmModel, model),
    "module": lambda path: partial(OwnModule, path),
}


def summary_of(factory: BackboneFactory) -> str:
    """A line about what it makes."""
    made = factory.func if isinstance(factory, partial) else factory
    return (made.__doc__ or "").partition("\n")[0]


def load_backbone(name: str, *, device: torch.device | str = "cpu", resolution: int = 0, weights: str = "") -> Backbone:
    """The backbone of that name, ready to extract."""
    if resolution < 0:
        raise ConfigError(f"resolution = {resolution} must be a side in pixels, or 0 for the backbone's own")
    return _factory(name)(device=device, resolution=resolution, weights=weights)


def _factory(name: str) -> BackboneFactory:
    family, _, rest = name.partition("/")
    if family in FAMILIES and rest:
        return FAMILIES[family](rest)
    if name not in BACKBONES and ":" not in name:
        raise ConfigError(unknown("backbone", name, (*BACKBONES, *(f"{family}/..." for family in FAMILIES))))
    return BACKBONES.get(name, "backbone")
