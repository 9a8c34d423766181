"""A person's own network as a backbone, named by its import path."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from fedloom.backbones.base import Backbone, resized
from fedloom.errors import ConfigError
from fedloom.registry import plugin_at


class OwnModule(Backbone):
    """An nn.Module at package.file:name, or whatever makes one when it is called; images in [0, 1] go in."""

    def __init__(self, path: str, *, device: torch.device | str, resolution: int, weights: str) -> None:
        if weights:
            raise ConfigError(f"backbone 'module/{path}' loads its own weights; remove '{weights}'")
        self.resolution = resolution
        self.network = _imported(path).to(device).eval().requires_grad_(False)
        # The weights are part of the name, so that features of an older network are never found in a cache.
        name = f"module-{path}-{resolution or 'native'}-{_digest(self.network)}"
        super().__init__(name, None, device, batch_size=4 if torch.device(device).type == "cpu" else 256)

    def extract(self, images: Tensor) -> Tensor:
        """What the network puts out, one row per image."""
        found = self.network(resized(images, self.resolution) if self.resolution else images)
        if not isinstance(found, Tensor) or len(found) != len(images):
            raise ConfigError(f"backbone '{self.name}' must give one row of features for each image")
        return found.flatten(1)


def _imported(path: str) -> nn.Module:
    found = plugin_at(path).load(f"backbone 'module/{path}'")
    made = found if isinstance(found, nn.Module) else found()
    if not isinstance(made, nn.Module):
        raise ConfigError(f"backbone 'module/{path}' is a {type(made).__name__}, not an nn.Module")
    return made


def _digest(network: nn.Module) -> str:
    found = hashlib.sha256()
    for name, tensor in network.state_dict().items():
        found.update(f"{name}/{tensor.dtype}/{tuple(tensor.shape)}".encode())
        found.update(tensor.cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()[:12]
