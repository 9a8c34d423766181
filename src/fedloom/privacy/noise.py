"""Where a mechanism's randomness comes from: the operating system, anew for every draw or by a key that it gave.

Whoever can foretell the coins of the sampling or the noise can undo the mechanism, so both come from here. A deployment
draws everything anew. A simulation, which must be able to do a round again as it was, keeps one secret for as long as
its run may be resumed, and draws from streams under a key that is made of that secret and of all that defines a query
(:func:`keyed`): the same query has the same noise, and two queries never share any.
"""

from __future__ import annotations

import hmac
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from fedloom.errors import ConfigError, MissingExtraError
from fedloom.privacy.discrete_gaussian import WordSource
from fedloom.streams import Draws, Streams

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import CipherContext

COINS, NOISE, WORDS = "privacy/coins", "privacy/noise", "privacy/words"


@dataclass(frozen=True)
class NoiseKey:
    """One step of one silo; what is no step of its training has a name for its use."""

    silo: int
    round: int
    step: int
    use: str = ""

    @property
    def name(self) -> str:
        """No other step or use has it."""
        return f"{self.silo}/{self.round}/{self.step}/{self.use}"

    def stream(self, purpose: str) -> str:
        """The name of a stream that no other use shares."""
        return f"{purpose}/{self.use}" if self.use else purpose


class StepDraws(Protocol):
    """What records are drawn by in several steps, and what their objectives draw; ``steps`` gives leading dimensions.

    A tensor in ``silo`` lies beside the last of these: one number for each silo that trains together with others.
    """

    def coins(self, count: int, silo: int | Tensor, round: int, steps: Tensor, /) -> Tensor:
        """Numbers in (0, 1), shape (*steps, count), float64."""
        ...

    def examples(self, purpose: str, rows: int, width: int, silo: int | Tensor, round: int, steps: Tensor, /) -> Tensor:
        """Standard normal numbers for the rows that an objective sees, (*steps, rows, width)."""
        ...


@dataclass(frozen=True)
class StreamDraws:
    """The named streams of one run, or of each silo's run."""

    streams: Draws

    def coins(self, count: int, silo: int | Tensor, round: int, steps: Tensor) -> Tensor:
        """Those of all steps, drawn at once where their numbers lie."""
        return coins(self.streams, count, silo=silo, round=round, step=steps, device=steps.device)

    def examples(self, purpose: str, rows: int, width: int, silo: int | Tensor, round: int, steps: Tensor) -> Tensor:
        """Float32; a row does not depend on the number of rows."""
        return self.streams.normal(purpose, rows, width, silo=silo, round=round, step=steps, device=steps.device)


class Randomness(StepDraws, Protocol):
    """Coins and noise for a step."""

    @property
    def repeatable(self) -> bool:
        """Whether the same noise_key always gives the same numbers, so that doing a round again is the same release."""
        ...

    def uniform(self, count: int, noise_key: NoiseKey, /) -> Tensor:
        """Numbers in (0, 1), float64."""
        ...

    def normal(self, count: int, noise_key: NoiseKey, device: torch.device | str = "cpu", /) -> Tensor:
        """So many standard normal numbers."""
        ...

    def words(self, noise_key: NoiseKey, /) -> WordSource:
        """Where noise in whole numbers is made of random words."""
        ...


@dataclass(frozen=True)
class StreamNoise(StreamDraws):
    """A function of the streams' key and the noise_key, whatever engine asks. Simulation only.

    Coins come from the named streams, the same on every device. Noise is too much for those: it comes from a fast
    generator of the device that asks, which the key seeds with 64 bits or more. Torch's generator of the CPU heeds
    only 32, with which two of many steps would share their noise.
    """

    streams: Streams

    @property
    def repeatable(self) -> bool:
        """A pure function of key and noise_key."""
        return True

    def uniform(self, count: int, noise_key: NoiseKey) -> Tensor:
        """A number in (0, 1) for each record, from the seed."""
        purpose = noise_key.stream(COINS)
        return coins(
            self.streams, count, silo=noise_key.silo, round=noise_key.round, step=noise_key.step, purpose=purpose
        )

    def normal(self, count: int, noise_key: NoiseKey, device: torch.device | str = "cpu") -> Tensor:
        """So many standard normal numbers in float32, on the device that is asked for."""
        return self.fill(torch.empty(count, device=device), noise_key)

    def words(self, noise_key: NoiseKey) -> WordSource:
        """Of a fast generator that the key seeds, one after the other."""
        source = np.random.SFC64(int.from_bytes(self.streams.digest(f"{WORDS}/{noise_key.name}"), "little"))
        return lambda count: source.random_raw(count)

    def fill(self, numbers: Tensor, noise_key: NoiseKey) -> Tensor:
        """Standard normal numbers, in place."""
        if numbers.device.type != "cpu":
            return numbers.normal_(generator=self.device_generator(noise_key.name, numbers.device))
        seed = int.from_bytes(self.streams.digest(f"{NOISE}/{noise_key.name}"), "little")
        half = math.ceil(len(numbers) / 2)  # by Box and Muller's transform, which is quicker than NumPy's own normals
        radius, angle = torch.empty(2, half)
        uniform = np.random.Generator(np.random.SFC64(seed))
        uniform.random(out=radius.numpy(), dtype=np.float32)
        uniform.random(out=angle.numpy(), dtype=np.float32)
        radius.neg_().log1p_().mul_(-2.0).sqrt_()
        angle.mul_(2.0 * math.pi)
        torch.mul(radius, angle.cos(), out=numbers[:half])
        rest = len(numbers) - half
        torch.mul(radius[:rest], angle[:rest].sin(), out=numbers[half:])
        return numbers

    def device_generator(self, name: str, device: torch.device | str) -> torch.Generator:
        """An accelerator's own generator, seeded for this name."""
        high, low = self.streams.key(f"{NOISE}/{name}")
        return torch.Generator(device).manual_seed(high << 32 | low)


def keyed(secret: bytes, query: str) -> StreamNoise:
    """The randomness of one query, which is described in full; it tells nothing of the secret or of another query's."""
    return StreamNoise(Streams(int.from_bytes(hmac.digest(secret, query.encode(), "sha256"), "big")))


def coins(
    streams: Draws,
    count: int,
    *,
    silo: int | Tensor,
    round: int,
    step: int | Tensor,
    purpose: str = COINS,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Float64 numbers in (0, 1), shape (..., count); tensors in ``silo`` and ``step`` add leading dimensions.

    Four to a counter, because there is one for every record in every step.
    """
    words = streams.words(purpose, math.ceil(count / 4), silo=silo, round=round, step=step, device=device)
    return (torch.stack(words, dim=-1).flatten(-2)[..., :count].to(torch.float64) + 0.5) / 2.0**32


@dataclass(frozen=True)
class SecureNoise:
    """ChaCha20, keyed anew by the operating system for every draw; nothing is kept, nothing can be repeated.

    No noise_key determines what is drawn, so none is looked at.
    """

    @property
    def repeatable(self) -> bool:
        """Always false: the operating system gives no number twice."""
        return False

    def uniform(self, count: int, _: NoiseKey, /) -> Tensor:
        """Numbers in (0, 1), each from 64 bits of the operating system's."""
        return torch.from_numpy(_secure_uniform(count))

    def coins(self, count: int, _silo: int | Tensor, _round: int, steps: Tensor, /) -> Tensor:
        """Numbers in (0, 1) for each step and record, each from 64 bits of the operating system's."""
        return torch.from_numpy(_secure_uniform(count * steps.numel())).reshape(*steps.shape, count)

    def normal(self, count: int, _: NoiseKey, device: torch.device | str = "cpu", /) -> Tensor:
        """Float64, by Box and Muller's transform of 64-bit numbers: tails to 9.5 standard deviations."""
        half = math.ceil(count / 2)
        radius = np.sqrt(-2.0 * np.log(_secure_uniform(half)))
        angle = 2.0 * math.pi * _secure_uniform(half)
        numbers = np.concatenate((radius * np.cos(angle), radius * np.sin(angle)))[:count]
        return torch.from_numpy(numbers).to(device)

    def words(self, _: NoiseKey, /) -> WordSource:
        """Of one stream, keyed anew by the operating system."""
        stream = _secure_stream()
        return lambda count: np.frombuffer(stream.update(bytes(8 * count)), dtype=np.uint64)

    def examples(self, purpose: str, rows: int, width: int, _: int | Tensor, round: int, steps: Tensor, /) -> Tensor:
        """Standard normal numbers for each step and record, in float32."""
        numbers = self.normal(steps.numel() * rows * width, NoiseKey(0, round, 0, purpose))
        return numbers.to(torch.float32).reshape(*steps.shape, rows, width)


def _secure_uniform(count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    stream = _secure_stream().update(bytes(8 * count))
    return (np.frombuffer(stream, dtype=np.uint64).astype(np.float64) + 0.5) * 2.0**-64


def _secure_stream() -> CipherContext:
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"secure noise needs the package '{error.name}'; pip install 'fedloom[privacy]'"
        ) from error
    nonce = bytes(4) + os.urandom(12)  # the first four bytes are the block counter
    return Cipher(ChaCha20(os.urandom(32), nonce), mode=None).encryptor()


def deployment_noise(seed: int | None, device: torch.device | str = "cpu") -> SecureNoise:
    """The only randomness that a deployment may use; a fixed seed and a GPU's generator are refused."""
    if seed is not None:
        raise ConfigError(
            f"the noise seed is {seed}, but a deployment draws its noise from the operating system: leave it out"
        )
    if torch.device(device).type != "cpu":
        raise ConfigError(f"the noise device is '{device}', but a deployment draws its noise on the cpu")
    return SecureNoise()
