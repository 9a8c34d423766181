"""Vectors of whole numbers modulo a power of two: how they are added, masked and sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedloom.errors import FedloomError, MissingExtraError

try:
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import CTR
except ModuleNotFoundError as error:
    raise MissingExtraError(f"secure sums need the package '{error.name}'; pip install 'fedloom[privacy]'") from error

Words = npt.NDArray[Any]  # uint32 or uint64
Integers = npt.NDArray[np.int64]
AT_ONCE = 2**18  # numbers of a mask made at once: they stay in the cache


@dataclass(frozen=True)
class Ring:
    """So many whole numbers modulo 2^bits."""

    size: int
    bits: int

    def __post_init__(self) -> None:
        if not 8 <= self.bits <= 64:
            raise FedloomError(f"numbers of {self.bits} bits cannot be summed; 8 to 64 are allowed")

    @property
    def kind(self) -> np.dtype[Any]:
        """The machine's numbers that hold them: 2^bits divides their modulus, so sums in them will do."""
        return np.dtype("<u4" if self.bits <= 32 else "<u8")

    @property
    def width(self) -> int:
        """Bytes of a number as it is sent."""
        return -(-self.bits // 8)

    def zeros(self) -> Words:
        """A sum of nothing."""
        return np.zeros(self.size, self.kind)

    def words(self, values: Integers) -> Words:
        """Whole numbers, negative ones too, as elements of the ring."""
        if values.shape != (self.size,):
            raise FedloomError(f"{values.shape} numbers came where {self.size} are summed")
        return self._reduced(values.astype(self.kind))

    def integers(self, words: Words) -> Integers:
        """The number next to zero that each element stands for."""
        lifted = np.left_shift(self._reduced(words.copy()).astype(np.uint64), np.uint64(64 - self.bits))
        return np.right_shift(lifted.view(np.int64), np.int64(64 - self.bits))

    def packed(self, words: Words) -> bytes:
        """The bytes that are sent, lowest first."""
        column = self._reduced(words.copy()).view(np.uint8).reshape(self.size, self.kind.itemsize)
        return column[:, : self.width].tobytes()

    def unpacked(self, data: bytes) -> Words:
        """The inverse of :meth:`packed`; anything else is refused."""
        if len(data) != self.size * self.width:
            raise FedloomError(f"{len(data)} bytes came for a sum of {self.size} numbers of {self.width} bytes")
        column = np.zeros((self.size, self.kind.itemsize), np.uint8)
        column[:, : self.width] = np.frombuffer(data, np.uint8).reshape(self.size, self.width)
        return column.view(self.kind).reshape(self.size)

    def mask(self, words: Words, seed: bytes, *, minus: bool = False) -> None:
        """Add the mask that a seed stands for, in place; or take it away."""
        change = np.subtract if minus else np.add
        for start, stream in self._stream(seed):
            part = words[start : start + len(stream)]
            change(part, stream, out=part)

    def _stream(self, seed: bytes) -> Iterator[tuple[int, Words]]:
        """AES-256 in counter mode, whose counter begins at 0: a seed is used for one mask alone."""
        cipher = Cipher(AES(seed), CTR(bytes(16))).encryptor()
        step = self.kind.itemsize
        for start in range(0, self.size, AT_ONCE):
            count = min(AT_ONCE, self.size - start)
            stream = cipher.update(bytes(step * count))
            yield start, np.frombuffer(stream, self.kind)

    def _reduced(self, words: Words) -> Words:
        if self.bits < 8 * words.itemsize:
            np.bitwise_and(words, words.dtype.type(2**self.bits - 1), out=words)
        return words
