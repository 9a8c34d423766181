"""Ctrl-C and a request to end, at any moment: one sentence, exit code 130, and nothing that was kept is lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import typer

INTERRUPTED = 130


@contextmanager
def stoppable(folder: Path) -> Iterator[None]:
    """Say how a run that is stopped here goes on; a request to end counts as Ctrl-C, which background jobs ignore."""
    before = signal.signal(signal.SIGTERM, _interrupt) if _is_main() else None
    try:
        yield
    except KeyboardInterrupt as error:
        begun = (folder / "run.toml").is_file()
        goes_on = f"`fedloom resume {folder}` goes on" if begun else "nothing had been written yet"
        raise stopped(goes_on) from error
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def stopped(what: str = "") -> typer.Exit:
    """The end of a command that was interrupted; whoever is impatient from now on changes nothing."""
    if _is_main():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    typer.echo("; ".join(filter(None, ("stopped", what))), err=True)
    return typer.Exit(INTERRUPTED)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
