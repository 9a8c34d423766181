"""One run on several ranks: ``--ranks N`` has torch's launcher start them here; ``torchrun`` starts them anywhere."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from fedloom.cli.interruption import INTERRUPTED
from fedloom.errors import FedloomError, FedloomWarning

if TYPE_CHECKING:
    from fedloom.config import Config
    from fedloom.experiment.on_ranks import Leader

VARIABLES = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}  # which every launcher sets
NumberOfRanks = Annotated[
    int | None,
    typer.Option(
        "--ranks", min=1, metavar="N", help="Train in N processes; with GPUs, on N of them.", show_default=False
    ),
]


def launch(words: Sequence[str], ranks: int) -> NoReturn:
    """Do a command in so many ranks on this machine; ends as rank 0 does."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable()  # the launcher's: rank 0 says what is to be said
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: the ranks share the cores
    place = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
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
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    warnings.simplefilter("ignore", FedloomWarning)  # the leader has the same
    try:
        follow_leader(ranks, given)
    except LostRankError as error:  # it has said why
        raise typer.Exit(2) from error
    raise typer.Exit
