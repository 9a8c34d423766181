"""Vectors of numbers, such as the embeddings that a public network gives of images."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.modalities.base import Modality
from fedloom.modalities.likelihoods import LIKELIHOODS
from fedloom.modalities.numbers import checked, decode, objection


def read(array: NDArray[Any], name: str) -> Tensor:
    """Vectors as they are, in float32."""
    return torch.from_numpy(np.array(checked(array, name), order="C"))


def encode(x: Tensor) -> NDArray[np.float32]:
    """Numbers in float32, in the memory of the host."""
    values: NDArray[np.float32] = x.float().cpu().numpy()
    return values


MODALITY = Modality(
    name="vector",
    plural="vectors",
    read=read,
    objection=objection,
    decode=decode,
    encode=encode,
    likelihoods=LIKELIHOODS,
    made_by="fedloom embed",
)
