"""Processes that charge a ledger and die by SIGKILL at a write; at module level, because the process imports them."""

from __future__ import annotations

import _sqlite3
import ctypes
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from fedloom.federation.records import Records, Silo
from fedloom.privacy.accounting import Budget, Gaussian
from fedloom.privacy.deployment import data_ledger
from fedloom.privacy.ledger import BudgetSpentError, Ledger
from fedloom.privacy.registry import VARIABLE
from fedloom.runs.files import write_atomically

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["fedloom.privacy.deployment", "fedloom.runs.files", "_sqlite3"])

EVENT, BUDGET = Gaussian(4.0, 0.2, 10), Budget(50.0, 1e-5, "rdp")


class _Vfs(ctypes.Structure):
    """SQLite's table of system functions; the last fields let callers replace single system calls."""


_Vfs._fields_ = [
    ("version", ctypes.c_int),
    ("file_size", ctypes.c_int),
    ("path_length", ctypes.c_int),
    ("next", ctypes.c_void_p),
    ("name", ctypes.c_char_p),
    ("data", ctypes.c_void_p),
    ("methods", ctypes.c_void_p * 13),
    ("set_call", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Vfs), ctypes.c_char_p, ctypes.c_void_p)),
    ("get_call", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Vfs), ctypes.c_char_p)),
]
_CALLS = {  # everything by which SQLite changes a file
    b"write": ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t),
    b"pwrite": ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64),
    b"pwrite64": ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64),
    b"ftruncate": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int64),
    b"unlink": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p),
}
_kept = []  # callbacks must outlive their use


def die_at_write(count: Iterator[int], number: int) -> None:
    """Let this process be killed just before SQLite's ``number``-th change to a file."""
    library = ctypes.CDLL(_sqlite3.__file__)
    library.sqlite3_vfs_find.restype = ctypes.POINTER(_Vfs)
    library.sqlite3_vfs_find.argtypes = [ctypes.c_char_p]
    vfs = library.sqlite3_vfs_find(None)
    for name, kind in _CALLS.items():
        address = vfs.contents.get_call(vfs, name)
        if not address:
            continue
        original = kind(address)

        def counted(*arguments, original=original):
            if next(count) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments)

        replacement = kind(counted)
        _kept.append((original, replacement))
        assert vfs.contents.set_call(vfs, name, ctypes.cast(replacement, ctypes.c_void_p)) == 0


def _live(path: Path, released: Path, rounds: int, number: int, content: str | None) -> None:
    """Rounds as a silo lives them: charge, then release; ``number`` 0 lets it live, -n kills it after n releases."""
    die_at_write(itertools.count(1), number)
    ledger = Ledger(path)
    ledger.enrol("north", "digest", BUDGET)
    for round in range(1, rounds + 1):
        ledger.charge("run", "north", round, "training", EVENT, content=content and f"{content}/{round}")
        with released.open("a") as file:
            file.write(f"{round}\n")
        if round == -number:
            os.kill(os.getpid(), signal.SIGKILL)


SILO = Silo(
    "north", Records(torch.zeros(20, 2), torch.zeros(20, dtype=torch.int64), torch.zeros(20, dtype=torch.int64))
)
RELEASES = {"update": EVENT, "moments": Gaussian(8.0)}


def _deploy(home: Path, sent: Path, rounds: int, number: int) -> None:
    """A run at a silo of a deployment, under a clock that runs backwards; killed also where an update is stored."""
    count, clock, fsync = itertools.count(1), itertools.count(10**9, -1000), os.fsync
    die_at_write(count, number)

    def counted(descriptor: int) -> None:
        if next(count) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(descriptor)

    os.fsync, time.time = counted, lambda: float(next(clock))
    os.environ[VARIABLE] = str(home / "registry")  # the server that forks these processes knows of no other
    ledger = data_ledger(home / "ledger.sqlite", SILO, epsilon=50.0)
    for round in range(1, rounds + 1):
        shelf = home / f"round-{round}"

        def store(data: bytes, shelf: Path = shelf) -> None:
            write_atomically(shelf, data)

        data = ledger.released(
            "run",
            "north",
            round,
            RELEASES,
            content=None,
            stored=shelf.read_bytes() if shelf.exists() else None,
            make=lambda: os.urandom(8),  # secure noise: no two are alike
            store=store,
        )
        with sent.open("a") as file:
            file.write(f"{round}/{data.hex()}\n")


def deploy(home: Path, sent: Path, rounds: int, number: int) -> bool:
    """Whether the silo survived the run."""
    return _survived(processes.Process(target=_deploy, args=(home, sent, rounds, number)))


def live(path: Path, released: Path, rounds: int, number: int, content: str | None) -> bool:
    """Whether the silo survived its rounds."""
    return _survived(processes.Process(target=_live, args=(path, released, rounds, number, content)))


def _survived(process: multiprocessing.process.BaseProcess) -> bool:
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode == 0


def _compete(path: Path, run: str, granted: Path, budget: Budget) -> None:
    ledger = Ledger(path)
    ledger.enrol("north", "digest", budget)
    for round in range(1, 100):
        try:
            ledger.charge(run, "north", round, "training", EVENT, content=None)
        except BudgetSpentError:
            return
        with granted.open("a") as file:
            file.write(f"{run}\n")


def compete(path: Path, granted: Path, budget: Budget, runs: int) -> None:
    """Several processes charge one ledger at once until it refuses."""
    rivals = [processes.Process(target=_compete, args=(path, f"run-{i}", granted, budget)) for i in range(runs)]
    for rival in rivals:
        rival.start()
    for rival in rivals:
        rival.join()
        assert rival.exitcode == 0
