"""Features are extracted once and shared by all metrics; those of real records outlive the process."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedloom.backbones.base import Backbone
from fedloom.evaluation.frechet import Moments
from fedloom.modalities.numbers import decode
from fedloom.runs.files import write_atomically
from fedloom.sharing.codec import packed

# Raise it when an extractor's preparation of images changes, so that what was stored before is not found.
_SCHEMA = 1
_IN_MEMORY = 8


def content_digest(x: Tensor, extractor: str) -> str:
    """SHA-256 over the extractor's name and the values with their dtype and shape."""
    header = f"{_SCHEMA}/{extractor}/{x.dtype}/{tuple(x.shape)}/"
    digest = hashlib.sha256(header.encode())
    digest.update(x.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class FeatureCache:
    """One backbone's features and moments by content; ``stored`` ones also lie in ``folder``."""

    def __init__(
        self, backbone: Backbone, folder: Path | None = None, decode: Callable[[Tensor], Tensor] = decode
    ) -> None:
        self.backbone = backbone
        self.folder = folder
        self._decode = decode
        self._memory: OrderedDict[str, dict[str, Tensor]] = OrderedDict()

    def features(self, x: Tensor, *, stored: bool = False) -> Tensor:
        """(n, d) features of stored values, or of such as models make; slice the result for groups."""

        def compute() -> dict[str, Tensor]:
            return {"features": self.backbone.features(self._decode(x))}

        return self._recall(x, "features", compute, stored)["features"]

    def moments(self, x: Tensor, *, stored: bool = False) -> Moments:
        """The moments of the features; stored ones need no extraction at all."""

        def compute() -> dict[str, Tensor]:
            moments = Moments.of(self.features(x, stored=stored))
            return {"mean": moments.mean, "covariance": moments.covariance}

        found = self._recall(x, "moments", compute, stored)
        return Moments(found["mean"], found["covariance"], len(x))

    def _recall(
        self, x: Tensor, kind: str, compute: Callable[[], dict[str, Tensor]], stored: bool
    ) -> dict[str, Tensor]:
        """From memory, else from disk, else computed; what is found or computed is remembered."""
        key = f"{kind}-{content_digest(x, self.backbone.name)}"
        path = self.folder / f"{key}.safetensors" if stored and self.folder is not None else None
        found = self._memory.get(key) or _read(path, self.backbone.device)
        if found is None:
            found = compute()
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, packed({name: tensor.cpu() for name, tensor in found.items()}))
        self._memory[key] = found
        self._memory.move_to_end(key)
        while len(self._memory) > _IN_MEMORY:
            self._memory.popitem(last=False)
        return found


def _read(path: Path | None, device: torch.device) -> dict[str, Tensor] | None:
    """The tensors of a cache file; a missing or damaged one counts as not there and is written anew."""
    if path is None or not path.is_file():
        return None
    try:
        return load_file(path, device=str(device))
    except (SafetensorError, OSError):
        return None
