"""Any model of timm by its name, such as DINOv2, with the transform that timm evaluates it by."""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedloom.backbones.base import Backbone, in_colour, require_height_and_width
from fedloom.errors import ConfigError, DataError, MissingExtraError

_EXTRA = "install it with: pip install 'fedloom[backbones]'"


class TimmModel(Backbone):
    """A model of timm: pooled features before its head; weights from the hub, or from a file."""

    def __init__(self, model: str, *, device: torch.device | str, resolution: int, weights: str) -> None:
        timm = _timm(model)
        self.network: Any = _network(timm, model, resolution, weights).to(device)
        config = timm.data.resolve_model_data_config(self.network)
        self.side = resolution or int(config["input_size"][-1])
        self.whole = round(self.side / config["crop_pct"])  # the side before the middle is cut out
        self.mode = "bicubic" if config["interpolation"] == "bicubic" else "bilinear"
        self.mean, self.deviation = (
            torch.tensor(config[name], device=device).reshape(1, 3, 1, 1) for name in ("mean", "std")
        )
        suffix = f"-{hashlib.sha256(Path(weights).read_bytes()).hexdigest()[:12]}" if weights else ""
        batch_size = 4 if torch.device(device).type == "cpu" else 128
        dimension: Any = self.network.num_features
        super().__init__(f"timm-{model}-{self.side}{suffix}", dimension, device, batch_size)

    def extract(self, images: Tensor) -> Tensor:
        """Resize, cut out the middle, normalise, and pool what comes before the head."""
        require_height_and_width(images)
        whole = functional.interpolate(images, size=(self.whole, self.whole), mode=self.mode, antialias=True)
        edge = (self.whole - self.side) // 2
        middle = whole[..., edge : edge + self.side, edge : edge + self.side]
        normalised = (in_colour(middle).clamp(0.0, 1.0) - self.mean) / self.deviation
        features: Tensor = self.network.forward_head(self.network.forward_features(normalised), pre_logits=True)
        return features.flatten(1)

    @property
    def head(self) -> Tensor:
        """Of the classes that the model was trained on, where it was."""
        head = self.network.get_classifier()
        return head.weight if isinstance(head, nn.Linear) else super().head

    @torch.inference_mode()
    def classify(self, features: Tensor) -> Tensor:
        """The head's logits."""
        head = self.network.get_classifier()
        return head(features.to(self.device)) if isinstance(head, nn.Linear) else super().classify(features)


def _timm(model: str) -> Any:
    try:
        return importlib.import_module("timm")
    except ImportError as error:
        raise MissingExtraError(f"backbone 'timm/{model}' needs the package '{error.name}'; {_EXTRA}") from error
    except (RuntimeError, AttributeError, OSError) as error:
        # torchvision, which timm imports, fails this way beside a torch of another build.
        raise MissingExtraError(
            f"backbone 'timm/{model}' needs a torchvision that was built for the installed torch "
            f"({torch.__version__}); {_EXTRA}"
        ) from error


def _network(timm: Any, model: str, resolution: int, weights: str) -> nn.Module:
    if weights and not Path(weights).is_file():
        raise DataError(f"the weights of backbone 'timm/{model}' are not at {weights}")
    if not timm.is_model(model.partition(".")[0]):
        raise ConfigError(f"timm has no model '{model}'; timm.list_models() names them")
    options: dict[str, Any] = {"pretrained": True}
    if weights:
        options["pretrained_cfg_overlay"] = {"file": weights}
    if resolution:
        options["img_size"] = resolution
    try:
        with torch.random.fork_rng(devices=[]):
            network: nn.Module = timm.create_model(model, **options)
    except TypeError as error:
        raise ConfigError(f"backbone 'timm/{model}' has one resolution only; leave it out ({error})") from error
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"the weights of backbone 'timm/{model}' could not be loaded: {error}; give the path of a local copy"
        ) from error
    return network.eval().requires_grad_(False)
