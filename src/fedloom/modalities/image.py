"""Images of any number of channels: (channels, height, width), pixels in [0, 1]."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.errors import DataError
from fedloom.modalities.base import Columns, Modality, Tiles
from fedloom.modalities.likelihoods import LIKELIHOODS
from fedloom.modalities.numbers import checked, decode, outside
from fedloom.modalities.numbers import objection as objection_to_numbers

CHANNELS = (1, 3)  # grey and colour, which every reader of PNG files understands alike


def read(array: NDArray[Any], name: str) -> Tensor:
    """Images without a channel axis get one; a channel axis at the end (1 or 3 long) moves to the front."""
    array = checked(array, name)
    if array.ndim == 2:
        raise DataError(
            f"{name} has shape {array.shape}; give images of shape (n, height, width) or (n, channels, height, width)"
        )
    if array.ndim == 3:
        array = array[:, None]
    elif array.shape[1] not in CHANNELS and array.shape[3] in CHANNELS:
        array = np.moveaxis(array, 3, 1)
    found = torch.from_numpy(np.array(array, order="C"))
    if complaint := objection(found):
        raise DataError(f"{name} holds {complaint}")
    return found


def objection(x: Tensor) -> str:
    """Floats that are no pixels."""
    if found := objection_to_numbers(x):
        return found
    strayed = outside(x, 0.0, 1.0) if x.is_floating_point() else ""
    return strayed and f"{strayed}, and pixels lie in [0, 1]; divide those from 0 to 255 by 255, or give them as uint8"


def encode(x: Tensor) -> NDArray[np.uint8]:
    """Pixels as uint8, which stand for x / 255."""
    pixels: NDArray[np.uint8] = (x.clamp(0, 1) * 255).round().byte().cpu().numpy()
    return pixels


def tiles(x: Tensor) -> Tiles | None:
    """The images themselves, where they are grey or have three colours."""
    return np.moveaxis(encode(x), 1, 3) if x.dim() == 4 and x.shape[1] in CHANNELS else None


def in_columns(x: Tensor) -> Columns:
    """A picture each; pixels that are none, as precise as they were made."""
    pictures = tiles(x)
    return {"values": x.float().flatten(1).cpu().numpy()} if pictures is None else {"image": pictures}


def from_columns(columns: Columns) -> NDArray[Any]:
    """Pictures, whose channels ``read`` moves to the front."""
    return columns["image"]


MODALITY = Modality(
    name="image",
    plural="images",
    read=read,
    objection=objection,
    decode=decode,
    encode=encode,
    tiles=tiles,
    likelihoods=LIKELIHOODS,
    network="conv",
    values="pixels in [0, 1]",
    is_picture=True,
    in_columns=in_columns,
    from_columns=from_columns,
)
