"""Blocks, payloads and states as tensors of flat names, and these as bytes: on disk, and between processes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedloom.errors import FedloomError
from fedloom.sharing.plan import Tensors

# Under which names things lie beside each other: "blocks/<block>@<owner>/<tensor>", "memory/<tensor>".
BLOCKS, PAYLOADS, AVERAGES, MEMORY, STATE, RECEIVED = (
    "blocks/",
    "payloads/",
    "averages/",
    "memory/",
    "state/",
    "received/",
)

SLOT = ":"  # between the copy of a block and its tensor, where many copies are one payload

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def placed(prefix: str, values: Mapping[str, Value]) -> dict[str, Value]:
    """Tensors, or tables of them, with a prefix before each name."""
    return {prefix + name: value for name, value in values.items()}


def under(prefix: str, values: Mapping[str, Value]) -> dict[str, Value]:
    """The inverse of :func:`placed`: those whose names begin so, without it."""
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def flat(prefix: str, parts: Mapping[Key, Mapping[str, Value]], mark: str = "/") -> dict[str, Value]:
    """Tables of tensors by key as one table."""
    return {f"{prefix}{key}{mark}{name}": tensor for key, part in parts.items() for name, tensor in part.items()}


def parts(
    prefix: str, tensors: Mapping[str, Tensor], key_of: Callable[[str], Key], mark: str = "/"
) -> dict[Key, Tensors]:
    """The inverse of :func:`flat`; ``key_of`` reads a key back. Names of single tensors hold no ``mark``."""
    found: dict[Key, Tensors] = {}
    for name, tensor in under(prefix, tensors).items():
        key, _, own = name.rpartition(mark)
        found.setdefault(key_of(key), {})[own] = tensor
    return found


def packed(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors as safetensors bytes; the format refuses tensors that share memory, so the second of them is copied."""
    known, own = set[int](), dict[str, Tensor]()
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        own[name] = tensor.clone(memory_format=torch.contiguous_format) if place in known else tensor.contiguous()
        known.add(place)
    return save(own)


def unpacked(data: bytes, what: str) -> Tensors:
    """The inverse of :func:`packed`; complaints say ``what`` it is."""
    try:
        return load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise FedloomError(f"'{what}' is not a table of tensors: {error}") from error
