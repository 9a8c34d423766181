"""One run on several ranks: ``--ranks N`` has torch's launcher start them here; ``torchrun`` starts them anywhere."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from fedloom.cli.interruption import INTERRUPTED
from fedloom.errors import ConfigError, FedloomError, FedloomWarning

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

    from fedloom.config import Config
    from fedloom.experiment.on_ranks import Leader

VARIABLES = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}  # which every launcher sets
LOOPBACK = {"lo", "lo0"}  # what systems call the network that ends at this machine
NumberOfRanks = Annotated[
    int | None,
    typer.Option(
        "--ranks", min=1, metavar="N", help="Train in N processes; with GPUs, on N of them.", show_default=False
    ),
]


def launch(words: Sequence[str], ranks: int) -> NoReturn:
    """Do a command in so many ranks on this machine; ends as rank 0 does."""
    if os.environ.keys() >= VARIABLES:
        raise ConfigError("--ranks starts processes, but a launcher has started this one already; leave it out")
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable()  # the launcher's: rank 0 says what is to be said
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: the ranks share the cores
    for _, name in socket.if_nameindex():
        if name in LOOPBACK:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    store = loopback_store()
    place = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="static",  # "c10d" unpickles what it finds in its store: who reaches that could run code here
        rdzv_endpoint=f"127.0.0.1:{store.port}",  # which this process serves already
        rdzv_configs={"rank": 0},
        local_addr="localhost",
        max_restarts=0,
    )
    try:
        elastic_launch(place, sys.executable)("-m", "fedloom", *words)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        if codes.get(0, 0) == -signal.SIGKILL:
            raise FedloomError(
                "rank 0 was killed, perhaps because memory ran out; all up to the last checkpoint is kept, and "
                "'fedloom resume' goes on from it"
            ) from error
        raise typer.Exit(max(codes.get(0, 0), 0) or 2) from error
    except SignalException as error:
        raise typer.Exit(INTERRUPTED) from error
    raise typer.Exit


def loopback_store() -> TCPStore:
    """Where ranks of this machine find each other; torch's own choice would listen on all networks."""
    from torch._C._distributed_c10d import TCPStore

    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    patience = timedelta(minutes=5)  # torch's own
    served = listening.detach()
    return TCPStore("127.0.0.1", port, None, True, patience, False, multi_tenant=True, master_listen_fd=served)


@contextmanager
def led(given: Callable[[], Config | None]) -> Iterator[Leader | None]:
    """The leader, if this is rank 0 of several; another rank follows it, and never comes back.

    ``given`` is what another rank was told to run, to be compared.
    """
    if not os.environ.keys() >= VARIABLES:
        yield None
        return
    from fedloom.engines.ranks import LEADER, LostRankError, joined
    from fedloom.experiment.on_ranks import Leader, follow_leader

    ranks = joined()
    if ranks.rank == LEADER:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it comes when another rank has failed, which is to be said
        leader = Leader(ranks)
        yield leader
        leader.close()
        ranks.close()
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    warnings.simplefilter("ignore", FedloomWarning)  # the leader has the same
    try:
        follow_leader(ranks, given)
    except LostRankError as error:  # it has said why
        raise typer.Exit(2) from error
    except SystemExit:  # of a signal; at a usual end the thread that still listens would complain in C++
        os._exit(INTERRUPTED)
    raise typer.Exit


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    """End, but first remove what silos keep on this rank's disk."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise SystemExit(INTERRUPTED)
