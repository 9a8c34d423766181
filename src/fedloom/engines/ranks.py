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
from torch._C._distributed_c10d import PrefixStore, TCPStore

from fedloom.engines.remote.frames import Frame
from fedloom.errors import ConfigError, FedloomError

T = TypeVar("T")
LEADER = 0
STARTS = "TORCHELASTIC_RESTART_COUNT"
ARRIVAL = timedelta(minutes=10)  # in which all ranks must have come
PATIENCE = timedelta(days=365)  # a rank waits for as long as the leader evaluates; a process that died is known at once


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
        rank, size, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    except ValueError as error:
        raise ConfigError(
            f"RANK, WORLD_SIZE and MASTER_PORT must be numbers, as launchers set them: {error}"
        ) from error
    host = environment["MASTER_ADDR"]
    try:
        if size > 1:
            here = rank == LEADER and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            store = TCPStore(host, port, size, here, timeout=ARRIVAL)
            # A launcher may keep its store when it starts ranks again, and addresses of those that died are in it.
            own = PrefixStore(f"start-{environment.get(STARTS, 0)}", store)
            own.set(str(rank), "")
            own.wait([str(each) for each in range(size)], ARRIVAL)  # gloo would have the PATIENCE of a year
            dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=PATIENCE)
    except RuntimeError as error:  # torch's own are of this kind
        if "EADDRINUSE" in str(error):
            raise ConfigError(f"port {host}:{port} is in use; take another one (torchrun --master-port)") from error
        raise FedloomError(f"the ranks did not find each other at {host}:{port}: {error}") from error
    return TorchRanks(rank, size)


def ranks_here(environment: Mapping[str, str] = os.environ) -> int:
    """How many ranks share this machine."""
    return int(environment.get("LOCAL_WORLD_SIZE", 1))


def started_again(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher has started the ranks anew, after one of them had failed."""
    return environment.get(STARTS, "0") != "0"


def place(environment: Mapping[str, str] = os.environ) -> None:
    """Take the GPU of this rank, of which every one on a machine needs its own."""
    number, count = int(environment.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    ranks = ranks_here(environment)
    if ranks > count:
        raise ConfigError(f"{ranks} ranks on this machine need a GPU each, and it has {count}; start so many at most")
    torch.cuda.set_device(number)


def _interruptibly(talk: Callable[[], T], rank: int) -> T:
    """Talk to another rank beside this thread, which hears of signals meanwhile."""
    found: queue.SimpleQueue[tuple[T] | Exception] = queue.SimpleQueue()

    def talked() -> None:
        try:
            found.put((talk(),))
        except Exception as error:  # whichever: nobody else would hear of it, and wait for ever
            found.put(error)

    threading.Thread(target=talked, daemon=True).start()
    came = found.get()
    if isinstance(came, RuntimeError):  # torch's own are of this kind
        raise _lost(rank) from came
    if isinstance(came, Exception):
        raise came
    return came[0]


def _lost(rank: int) -> LostRankError:
    return LostRankError(
        f"rank {rank} is gone: it was ended, or its machine cannot be reached; all up to the last checkpoint is kept, "
        "and 'fedloom resume' goes on from it on any number of ranks"
    )
