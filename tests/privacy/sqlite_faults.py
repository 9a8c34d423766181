"""Processes that charge a ledger and die by SIGKILL at a write; at module level, because the process imports them."""

from __future__ import annotations

import _sqlite3
import ctypes
import itertools
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from fedloom.privacy.accounting import Budget, Gaussian
from fedloom.privacy.ledger import BudgetSpentError, Ledger

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["fedloom.privacy.ledger", "_sqlite3"])

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


def live(path: Path, released: Path, rounds: int, number: int, content: str | None) -> bool:
    """Whether the silo survived its rounds."""
    process = processes.Process(target=_live, args=(path, released, rounds, number, content))
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
