"""Images by their lowest frequencies: short vectors of which people see pictures.

The transform is public and fitted to nothing: the orthonormal discrete cosine transform (Ahmed, Natarajan, Rao,
"Discrete Cosine Transform", IEEE Transactions on Computers, 1974) of 28 x 28 pixels, of which the lowest frequencies
along both sides are kept and scaled to length 1 together. Its transpose leads back to a picture.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from fedloom.modalities.base import Modality, Tiles
from fedloom.modalities.likelihoods import LIKELIHOODS
from fedloom.modalities.numbers import decode, objection
from fedloom.modalities.vector import encode, read

SIDE = 28  # of an image, in pixels


def of_images(images: Tensor, kept: int) -> Tensor:
    """The ``kept`` x ``kept`` lowest frequencies of images (n, 28, 28) as float32 rows of length 1."""
    waves = _waves(kept)
    found = (waves @ images.to(torch.float64) @ waves.T).flatten(1)
    lengths: Tensor = torch.linalg.vector_norm(found, dim=1, keepdim=True)
    return (found / lengths.clamp_min(1e-300)).to(torch.float32)


@cache
def _waves(kept: int) -> Tensor:
    """(kept, 28): orthonormal cosines, from the constant one on."""
    place, number = torch.arange(SIDE, dtype=torch.float64), torch.arange(kept, dtype=torch.float64)
    waves = torch.cos(math.pi * number.unsqueeze(1) * (2 * place + 1) / (2 * SIDE)) * math.sqrt(2 / SIDE)
    waves[0] /= math.sqrt(2)
    return waves


def tiles(x: Tensor) -> Tiles | None:
    """The picture of these frequencies alone, each as bright as it can be; what lies below black is black."""
    kept = math.isqrt(x[0].numel())
    if x.dim() != 2 or kept**2 != x.shape[1] or kept > SIDE:
        return None
    waves = _waves(kept)
    pictures = waves.T @ x.cpu().to(torch.float64).reshape(-1, kept, kept) @ waves
    brightest = pictures.amax(dim=(1, 2), keepdim=True).clamp_min(1e-300)
    pixels: Tiles = (255 * (pictures / brightest).clamp(0, 1)).round().byte().unsqueeze(3).numpy()
    return pixels


MODALITY = Modality(
    name="frequencies",
    plural="images by their frequencies",
    read=read,
    objection=objection,
    decode=decode,
    encode=encode,
    tiles=tiles,
    likelihoods=LIKELIHOODS,
    values="lowest frequencies of 28 x 28 pixels, row by row",
    learned_as="vector",
)
