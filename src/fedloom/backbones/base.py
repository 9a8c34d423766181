"""The one interface of all extractors, and the image preparation they share."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional

from fedloom.errors import ConfigError, DataError


class Backbone(ABC):
    """A frozen extractor: images in [0, 1] become float32 feature vectors on the extractor's device."""

    name: str  # network and input resolution, as it stands in metric keys
    dimension: int | None  # length of a feature vector; None where it follows the input

    def __init__(self, name: str, dimension: int | None, device: torch.device | str, batch_size: int) -> None:
        self.name = name
        self.dimension = dimension
        self.device = torch.device(device)
        self.batch_size = batch_size

    @abstractmethod
    def extract(self, images: Tensor) -> Tensor:
        """Features of one batch that already lies on the device."""

    @property
    def head(self) -> Tensor:
        """The public head's weights, (classes, d)."""
        raise ConfigError(f"backbone '{self.name}' has no class head; choose one that was trained on classes")

    @torch.inference_mode()
    def classify(self, features: Tensor) -> Tensor:
        """The public head's logits for features, without a bias; images are extracted once for both."""
        return features.to(self.device) @ self.head.T

    @torch.inference_mode()
    def features(self, x: Tensor) -> Tensor:
        """(n, C, H, W) in [0, 1] to (n, d) float32."""
        # TensorFloat-32 would let a GPU's features drift from a CPU's by a thousandth.
        with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
            parts = [self.extract(part.to(self.device)) for part in torch.split(x, self.batch_size)]
        return torch.cat(parts).to(torch.float32)

    def logits(self, x: Tensor) -> Tensor:
        """(n, C, H, W) in [0, 1] to (n, classes) float32, where there is a public head."""
        return self.classify(self.features(x))


def in_colour(images: Tensor) -> Tensor:
    """Three channels: colour as it is, grey repeated."""
    if images.shape[1] not in (1, 3):
        raise DataError(f"this backbone needs grey or colour images, not {images.shape[1]} channels")
    return images.expand(-1, 3, -1, -1)


def require_height_and_width(images: Tensor) -> None:
    """Complain about what cannot be resized."""
    if images.dim() != 4:
        raise DataError(f"this backbone needs images (channels, height, width), not {tuple(images.shape[1:])}")


def resized(images: Tensor, resolution: int) -> Tensor:
    """Square images of that side, bilinear and antialiased."""
    require_height_and_width(images)
    return functional.interpolate(images, size=(resolution, resolution), mode="bilinear", antialias=True)
