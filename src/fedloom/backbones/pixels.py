"""The values themselves as features: the plainest extractor, and the only one for vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.backbones.base import Backbone, resized
from fedloom.errors import ConfigError


class Pixels(Backbone):
    """Flattened values, at their own resolution or at one that is asked for."""

    def __init__(self, *, device: torch.device | str, resolution: int, weights: str) -> None:
        if weights:
            raise ConfigError(f"backbone 'pixels' has no weights; '{weights}' cannot be loaded into it")
        self.resolution = resolution
        super().__init__(f"pixels-{resolution}" if resolution else "pixels", None, device, batch_size=1024)

    def extract(self, images: Tensor) -> Tensor:
        """One row per example."""
        return (resized(images, self.resolution) if self.resolution else images).flatten(1)
