"""The Inception network of 2015 that the standard FID is defined by, through torch-fidelity."""

from __future__ import annotations

import importlib
from pathlib import Path
from urllib.error import URLError

import torch
from torch import Tensor, nn

from fedloom.backbones.base import Backbone, in_colour
from fedloom.errors import ConfigError, DataError, MissingExtraError

_RESOLUTION = 299
_DIMENSION = 2048
_EXTRA = "install it with: pip install 'fedloom[fid]'"


class Inception2015(Backbone):
    """2048 pooled features as torch-fidelity computes them, from 8-bit colour images, and 1008 logits."""

    def __init__(self, *, device: torch.device | str, resolution: int, weights: str) -> None:
        if resolution not in (0, _RESOLUTION):
            raise ConfigError(f"backbone 'inception-2015' is defined at {_RESOLUTION} pixels only, not {resolution}")
        batch_size = 4 if torch.device(device).type == "cpu" else 128
        super().__init__(f"inception-2015-{_RESOLUTION}", _DIMENSION, device, batch_size=batch_size)
        self.network = _network(weights).to(self.device)

    def extract(self, images: Tensor) -> Tensor:
        """Round to 8 bits, then torch-fidelity's own resize and network."""
        pixels = (255.0 * in_colour(images).clamp(0.0, 1.0)).round().to(torch.uint8)
        features: Tensor = self.network(pixels)[0]
        return features

    @property
    def head(self) -> Tensor:
        """Of the 1008 classes; the original inception score, too, takes logits without the bias."""
        head = self.network.fc
        assert isinstance(head, nn.Linear)
        return head.weight


def _network(weights: str) -> nn.Module:
    try:
        module = importlib.import_module("torch_fidelity.feature_extractor_inceptionv3")
    except ImportError as error:
        raise MissingExtraError(f"backbone 'inception-2015' needs the package '{error.name}'; {_EXTRA}") from error
    except (RuntimeError, AttributeError, OSError) as error:
        # torchvision, which torch-fidelity imports, fails this way beside a torch of another build.
        raise MissingExtraError(
            "backbone 'inception-2015' needs a torchvision that was built for the installed torch "
            f"({torch.__version__}); {_EXTRA}"
        ) from error
    if weights:
        _check(Path(weights))
    try:
        network: nn.Module = module.FeatureExtractorInceptionV3(
            "inception-v3-compat", ["2048"], feature_extractor_weights_path=weights or None
        )
    except URLError as error:
        raise DataError(
            "the weights of backbone 'inception-2015' could not be downloaded; give the path of a local copy"
        ) from error
    return network.eval().requires_grad_(False)


def _check(path: Path) -> None:
    """Refuse a file that holds more than tensors, because torch-fidelity would unpickle all of it."""
    try:
        torch.load(path, weights_only=True, map_location="cpu")
    except OSError as error:
        raise DataError(f"cannot read the weights of backbone 'inception-2015' at {path}: {error.strerror}") from error
    except Exception as error:
        raise DataError(f"{path} is not a plain file of weights for backbone 'inception-2015'") from error
