"""Several processes for one run, on one machine or on several: ranks, which torch's launcher has started.

Rank 0 leads the run, and is the only one that writes its folder; the others do what it asks. Frames go between it and
them through gloo, also where steps are taken on GPUs: what a round sends and brings lies on the host, and its sums must
be added in an order that is known, which no reduction of a library promises.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from fedloom.engines.flower.frames import Frame
from fedloom.errors import ConfigError, FedloomError

T = TypeVar("T")
LEADER = 0
PATIENCE = timedelta(days=365)  # a rank waits for as long as the leader evaluates; one that died is known at once


class LostRankError(FedloomError):
    """A rank died, or its machine cannot be reached."""


class Ranks(Protocol):
    """The processes of a run as one of them sees them."""

    @property
    def rank(self) -> int:
        """Its own number."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def tell(self, rank: int, frame: Frame) -> None:
        """Hand a frame to another one, which waits for it."""
        ...

    def hear(self, rank: int) -> Frame:
        """Wait for another one's next frame."""
        ...


@dataclass(frozen=True)
class TorchRanks:
    """A process group of torch."""

    rank: int
    size: int

    def tell(self, rank: int, frame: Frame) -> None:
        """First its length, because who waits must make room."""
        data = torch.frombuffer(bytearray(frame.to_bytes()), dtype=torch.uint8)
        _interruptibly(lambda: (dist.send(torch.tensor([len(data)]), rank), dist.send(data, rank)), rank)

    def hear(self, rank: int) -> Frame:
        """In the order in which they were told."""

        def received() -> bytes:
            length = torch.zeros(1, dtype=torch.int64)
            dist.recv(length, rank)
            data = torch.empty(int(length), dtype=torch.uint8)
            dist.recv(data, rank)
            return data.numpy().tobytes()

        return Frame.of_bytes(_interruptibly(received, rank))

    def close(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def joined(environment: Mapping[str, str] = os.environ) -> TorchRanks:
    """This process among the others, once all of them are there."""
    try:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        if size > 1:
            dist.init_process_group("gloo", timeout=PATIENCE)
    except ValueError as error:
        raise ConfigError(f"RANK and WORLD_SIZE must be the numbers that a launcher sets: {error}") from error
    except (RuntimeError, OSError) as error:  # torch's own are of the first kind
        where = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
        if "EADDRINUSE" in str(error) or "in use" in str(error):
            raise ConfigError(f"port {where} is in use; take another one (torchrun --master-port)") from error
        raise FedloomError(f"the ranks did not find each other at {where}: {error}") from error
    return TorchRanks(rank, size)


def ranks_here(environment: Mapping[str, str] = os.environ) -> int:
    """How many ranks share this machine."""
    return int(environment.get("LOCAL_WORLD_SIZE", 1))


def started_again(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher has started the ranks anew, after one of them had failed."""
    return environment.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def place(environment: Mapping[str, str] = os.environ) -> None:
    """Take the GPU of this rank, of which every one on a machine needs its own."""
    number, count = int(environment.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    ranks = ranks_here(environment)
    if ranks > count:
        raise ConfigError(f"{ranks} ranks on this machine need a GPU each, and it has {count}; start so many at most")
    torch.cuda.set_device(number)


def _interruptibly(talk: Callable[[], T], rank: int) -> T:
    """Talk to another rank beside this thread, which hears of signals meanwhile."""
    found: queue.SimpleQueue[T | RuntimeError] = queue.SimpleQueue()

    def talked() -> None:
        try:
            found.put(talk())
        except RuntimeError as error:
            found.put(error)

    threading.Thread(target=talked, daemon=True).start()
    if isinstance(came := found.get(), RuntimeError):
        raise _lost(rank) from came
    return came


def _lost(rank: int) -> LostRankError:
    return LostRankError(
        f"rank {rank} is gone: it was ended, or its machine cannot be reached; all up to the last checkpoint is kept, "
        "and 'fedloom resume' goes on from it on any number of ranks"
    )
