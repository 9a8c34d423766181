"""The IDX format of MNIST and its relatives: unsigned bytes behind a header of big-endian sizes."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import DataError

_UNSIGNED_BYTE = 0x08


def decode(raw: bytes, name: str) -> NDArray[np.uint8]:
    """The array in an IDX file's bytes; ``name`` is what a complaint calls the file."""
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] != _UNSIGNED_BYTE or len(raw) < 4 + 4 * raw[3]:
        raise DataError(f"{name} is not an IDX file of unsigned bytes")
    start = 4 + 4 * raw[3]
    shape = struct.unpack(f">{raw[3]}I", raw[4:start])
    values = np.frombuffer(raw, dtype=np.uint8, offset=start)
    expected = int(np.prod(shape, dtype=np.int64))
    if len(values) != expected:
        raise DataError(f"{name} announces {expected} values but holds {len(values)}")
    return values.reshape(shape)


def encode(array: NDArray[np.uint8]) -> bytes:
    """An array of unsigned bytes as the bytes of an IDX file."""
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, _UNSIGNED_BYTE, array.ndim, *array.shape)
    return header + array.tobytes()
