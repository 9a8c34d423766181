"""Sockets in folders that their owner alone can enter: the way to a server on its own machine."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from fedloom.runs.files import write_atomically


class Door:
    """Where a federation's server is reached on its own machine; known by a file in the server's folder."""

    def __init__(self, note: Path) -> None:
        self._note = note

    def make(self) -> Path:
        """A new place for the socket; its name must be short, which that of the server's folder need not be."""
        folder = Path(tempfile.mkdtemp(prefix="fedloom-"))  # for its owner alone
        write_atomically(self._note, str(folder).encode())
        return folder / "door"

    def remove(self) -> None:
        """Remove the folder of the socket, and the note of where it is."""
        if self._note.is_file():
            shutil.rmtree(self._note.read_text(encoding="utf-8"), ignore_errors=True)
            self._note.unlink()

    @property
    def socket(self) -> Path | None:
        """Where the server listens, if it does."""
        return Path(self._note.read_text(encoding="utf-8")) / "door" if self._note.is_file() else None
