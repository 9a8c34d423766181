"""What images and vectors have in common: uint8 values that stand for x / 255, and floats that stand for themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.errors import DataError


def decode(x: Tensor) -> Tensor:
    """uint8 values become [0, 1], everything else float32."""
    return x / 255.0 if x.dtype == torch.uint8 else x.to(torch.float32)


def objection(x: Tensor) -> str:
    """Values of other types, or without bounds."""
    if not x.is_floating_point() and x.dtype != torch.uint8:
        return f"{x.dtype} values; give uint8 images or floats"
    return "" if torch.isfinite(x).all() else "values that are not finite"


def outside(x: Tensor, low: float, high: float) -> str:
    """On which side values leave an interval, in words that show no value; empty where they do not."""
    if not x.numel():
        return ""
    least, most = (float(value) for value in torch.aminmax(x))
    sides = [f"below {low:g}"] * (least < low) + [f"above {high:g}"] * (most > high)
    return f"values {' and '.join(sides)}" if sides else ""


def checked(array: NDArray[Any], name: str) -> NDArray[Any]:
    """uint8 as it is, floats as float32."""
    if array.dtype != np.uint8 and not np.issubdtype(array.dtype, np.floating):
        raise DataError(f"{name} holds {array.dtype} values; give uint8 images or floats")
    if array.ndim < 2 or array.ndim > 4 or 0 in array.shape or (array.ndim == 2 and array.dtype == np.uint8):
        raise DataError(
            f"{name} has shape {array.shape}; give images of shape (n, height, width) or "
            f"(n, channels, height, width), or float features of shape (n, d), with at least one example"
        )
    if array.dtype == np.uint8:
        return array
    array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise DataError(f"{name} holds values that are not finite")
    return array
