"""The noise of DP-SGD for a whole chunk of silos, each from the randomness of its own run.

Why it is independent: every draw is seeded by a SHA-256 digest over the silo's key of this round, and over the round,
silo and step; a device counts the steps itself. A key is made of the run's secret and of all that defines the silo's
query (:mod:`fedloom.privacy.noise`). So no two steps, silos, rounds or runs share their noise, and whoever else trains
with a silo, in its chunk, pack or rank, changes nothing of what it draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.engines.fused_stack import Member
from fedloom.outline import in_outline
from fedloom.privacy.dp_sgd import divided
from fedloom.privacy.noise import NoiseKey, StreamNoise
from fedloom.sharing.plan import Tensors


@dataclass(frozen=True, eq=False)
class NoiseRoom:
    """Where a step's noise for one phase lies, always at the same place."""

    __repr__ = in_outline

    drawn: Tensor  # (silos, numbers), padded so that every silo's noise begins where memory is read fast
    flat: Tensor  # without the padding
    named: Tensors  # the same by parameter, and that of the count under the empty name

    @classmethod
    def of(cls, silos: int, shapes: Mapping[str, torch.Size], device: torch.device) -> NoiseRoom:
        """For parameters of these shapes."""
        numbers = 1 + sum(shape.numel() for shape in shapes.values())
        drawn = torch.zeros(silos, -(-numbers // 4) * 4, device=device)
        flat = drawn[:, :numbers]
        return cls(drawn, flat, divided(flat, shapes))


class HostNoise:
    """Silo by silo, as the plain loop draws it."""

    def __init__(
        self, members: Sequence[Member], secrets: Sequence[StreamNoise], round: int, rooms: Sequence[Tensor]
    ) -> None:
        """``rooms`` has one for each phase that touches records, (silos, numbers)."""
        self._sources = [(secret, member.index) for member, secret in zip(members, secrets, strict=True)]
        self._rooms, self._round, self._steps = rooms, round, 0

    def draw(self, silos: int) -> None:
        """The next step of the first ``silos`` silos."""
        for number, room in enumerate(self._rooms):
            step = self._steps * len(self._rooms) + number
            for row, (source, silo) in zip(room[:silos], self._sources[:silos], strict=True):
                noise_key = NoiseKey(silo, self._round, step)
                if row.device.type == "cpu":
                    source.fill(row, noise_key)
                else:
                    row.copy_(source.normal(len(row), noise_key))
        self._steps += 1


class DeviceNoise:
    """Silo by silo, each by a generator of the device with its own key; a GPU's (Philox) is a function of a counter."""

    def __init__(
        self,
        members: Sequence[Member],
        secrets: Sequence[StreamNoise],
        round: int,
        rooms: Sequence[Tensor],
        device: torch.device,
    ) -> None:
        """``rooms`` has one for each phase that touches records, (silos, numbers)."""
        self._rooms = rooms
        self._generators = [
            secret.device_generator(f"{round}/{member.index}", device)
            for member, secret in zip(members, secrets, strict=True)
        ]

    def draw(self, silos: int) -> None:
        """The next step of the first ``silos`` silos."""
        for room in self._rooms:
            for row, generator in zip(room[:silos], self._generators[:silos], strict=True):
                row.normal_(generator=generator)
