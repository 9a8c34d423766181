"""Named random streams: every random number is a pure function of (seed, purpose, silo, round, step, index).

The generator is Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Its 64-bit
key is a digest of the root seed and the purpose; its 128-bit counter is (index, step, round, silo), 32 bits each.
Nothing is carried from one draw to the next, so the numbers do not depend on the engine, on how silos are chunked or
padded, on the device, or on what was drawn before; resuming a run needs no generator state at all.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIER_A, _MULTIPLIER_B = 0xD2511F53, 0xCD9E8D57
_WEYL_A, _WEYL_B = 0x9E3779B9, 0xBB67AE85
PORTION = 2**16  # draws among very many that are in memory at once

Word = int | Tensor
Key = tuple[Word, Word]


def philox(counter: tuple[Tensor, Word, Word, Word], key: Key) -> tuple[Tensor, ...]:
    """Ten rounds of Philox-4x32 on int64 tensors that hold 32-bit words; returns four words per counter.

    A word that all counters share may be a number, which needs no way to the device and no work there.
    """
    c0: Any
    c1: Any
    c2: Any
    c3: Any
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The product of two 32-bit words wraps in int64; masking after the arithmetic shift restores the high word.
        product_a, product_b = c0 * _MULTIPLIER_A, c2 * _MULTIPLIER_B
        c0, c1, c2, c3 = (
            ((product_b >> 32) & _MASK) ^ c1 ^ k0,
            product_b & _MASK,
            ((product_a >> 32) & _MASK) ^ c3 ^ k1,
            product_a & _MASK,
        )
        k0, k1 = (k0 + _WEYL_A) & _MASK, (k1 + _WEYL_B) & _MASK
    return c0, c1, c2, c3


class Draws(ABC):
    """Everything that can be drawn, whosever key it is drawn with."""

    @abstractmethod
    def key(self, purpose: str) -> Key:
        """The Philox key of a purpose: one for all, or one for each entry of a counter's silos."""

    def words(
        self,
        purpose: str,
        count: int,
        *,
        silo: int | Tensor = 0,
        round: int = 0,
        step: int | Tensor = 0,
        first: int = 0,
        device: torch.device | str = "cpu",
    ) -> tuple[Tensor, ...]:
        """Four 32-bit words for each of ``count`` indices; tensors in ``silo`` and ``step`` add leading dimensions."""
        index = torch.arange(first, first + count, dtype=torch.int64, device=device)
        step_word, silo_word = (
            word.to(device, torch.int64).unsqueeze(-1) if isinstance(word, Tensor) else word for word in (step, silo)
        )
        low, high = (_spread(word, silo_word) for word in self.key(purpose))
        return philox((index, step_word, round, silo_word), (low, high))

    def uniform(
        self,
        purpose: str,
        count: int,
        *,
        silo: int | Tensor = 0,
        round: int = 0,
        step: int | Tensor = 0,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """``count`` float64 numbers in (0, 1), one per index, with 32 bits of resolution."""
        word = self.words(purpose, count, silo=silo, round=round, step=step, device=device)[0]
        return _unit(word)

    def normal(
        self,
        purpose: str,
        rows: int,
        width: int,
        *,
        silo: int | Tensor = 0,
        round: int = 0,
        step: int | Tensor = 0,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Standard normal float32 numbers, shape (..., rows, width); a row does not depend on the number of rows."""
        blocks = math.ceil(width / 4)
        words = self.words(purpose, rows * blocks, silo=silo, round=round, step=step, device=device)
        u0, u1, u2, u3 = ((word.to(torch.float32) + 0.5) * 2.0**-32 for word in words)
        radius_a, radius_b = torch.sqrt(-2.0 * torch.log(u0)), torch.sqrt(-2.0 * torch.log(u2))
        angle_a, angle_b = 2.0 * math.pi * u1, 2.0 * math.pi * u3
        quads = torch.stack(
            (
                radius_a * torch.cos(angle_a),
                radius_a * torch.sin(angle_a),
                radius_b * torch.cos(angle_b),
                radius_b * torch.sin(angle_b),
            ),
            dim=-1,
        )
        return quads.reshape(*quads.shape[:-2], rows, blocks * 4)[..., :width]

    def permutation(
        self,
        purpose: str,
        count: int,
        *,
        silo: int | Tensor = 0,
        round: int = 0,
        step: int | Tensor = 0,
        shorter: int | Tensor = 0,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """A random order of ``range(count)``: indices sorted by a 62-bit draw of their own.

        Tensors in ``silo`` and ``step`` give one order for each of their entries; where ``shorter`` says by how much,
        it is an order of so many fewer indices, and what lies beyond comes last.
        """
        high, low, _, _ = self.words(purpose, count, silo=silo, round=round, step=step, device=device)
        rank = ((high >> 1) << 31) | (low >> 1)
        last = count - (shorter.to(device).unsqueeze(-1) if isinstance(shorter, Tensor) else shorter)
        rank = torch.where(torch.arange(count, device=device) < last, rank, 1 << 62)
        return torch.argsort(rank, dim=-1, stable=True)

    def chosen(self, purpose: str, count: int, most: int, *, round: int = 0) -> Tensor:
        """The first ``most`` of :meth:`permutation`, found in memory for so many and one portion of the draws."""
        ranks = places = torch.empty(0, dtype=torch.int64)
        for first in range(0, count, PORTION):
            high, low, _, _ = self.words(purpose, min(PORTION, count - first), round=round, first=first)
            ranks = torch.cat((ranks, ((high >> 1) << 31) | (low >> 1)))
            places = torch.cat((places, torch.arange(first, first + len(high))))
            order = torch.argsort(ranks, stable=True)[:most]  # of equal ranks the lower place is first, as there
            ranks, places = ranks[order], places[order]
        return places

    def heads(self, purpose: str, count: int, rate: float, *, round: int = 0) -> Tensor:
        """Which of ``count`` coins, of this rate each, show heads; so many coins at a time."""
        found = [torch.empty(0, dtype=torch.int64)]
        for first in range(0, count, PORTION):
            word = self.words(purpose, min(PORTION, count - first), round=round, first=first)[0]
            found.append(first + torch.nonzero(_unit(word) < rate).flatten())
        return torch.cat(found)


def _unit(word: Tensor) -> Tensor:
    """32-bit words as float64 numbers in (0, 1)."""
    return (word.to(torch.float64) + 0.5) / 2.0**32


@dataclass(frozen=True)
class Streams(Draws):
    """The random numbers of one experiment; ``seed`` is all there is to remember."""

    seed: int

    def digest(self, purpose: str) -> bytes:
        """SHA-256 over seed and name: 256 bits for code that brings a generator of its own."""
        return hashlib.sha256(f"{self.seed}/{purpose}".encode()).digest()

    def key(self, purpose: str) -> tuple[int, int]:
        """The Philox key of a purpose: 64 bits of its digest."""
        digest = self.digest(purpose)
        return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")

    def torch_seed(self, purpose: str, *, silo: int = 0) -> int:
        """A seed for code that insists on torch's own generator, such as the initialisation of a module."""
        high, low, _, _ = self.words(purpose, 1, silo=silo)
        return int(((high >> 1) << 31 | (low >> 1)).item())


@dataclass(frozen=True)
class PackedStreams(Draws):
    """The random numbers of several experiments at once: each entry of ``silo`` has a seed of its own."""

    seeds: tuple[int, ...]

    def key(self, purpose: str) -> Key:
        """The two words of each seed's key."""
        keys = {seed: Streams(seed).key(purpose) for seed in self.seeds}
        words = torch.tensor([keys[seed] for seed in self.seeds])
        return words[:, 0], words[:, 1]


def _spread(word: Word, silo_word: Word) -> Word:
    """A word of a key where there is one for each silo, beside those."""
    if not isinstance(word, Tensor):
        return word
    assert isinstance(silo_word, Tensor), "each silo has a seed of its own"
    return word.to(silo_word.device).reshape(silo_word.shape)


def streams_of(seeds: Sequence[int]) -> Draws:
    """The random numbers of silos that belong to these seeds; a key that all share costs least."""
    return Streams(seeds[0]) if len(set(seeds)) == 1 else PackedStreams(tuple(seeds))
