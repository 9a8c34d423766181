"""Parts by what they hold: a folder of files whose names are their digests, filled from any offset on."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Iterator
from hashlib import file_digest, sha256
from pathlib import Path

from fedloom.deployment.direct.letters import WireError
from fedloom.engines.remote.frames import Frame
from fedloom.runs.files import explained

CHUNK = 2**20  # bytes
YOUNG = 3600.0  # seconds that a file is left alone which nobody has named yet


class PartStore:
    """Whole parts lie under their digest; what has come of others lies beside, for each sender by itself."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with explained(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def path(self, digest: str) -> Path:
        """Where a whole part lies."""
        return self._folder / digest

    def keep(self, frame: Frame) -> None:
        """All parts of a frame."""
        for name, part in frame.parts.items():
            target = self.path(frame.digests[name])
            if not target.exists():
                temporary = target.with_suffix(f".{os.getpid()}")
                with explained(target):
                    temporary.write_bytes(part)
                    temporary.replace(target)

    def has(self, digest: str, size: int) -> bool:
        """Whether a part is here, whole."""
        path = self.path(digest)
        return path.is_file() and path.stat().st_size == size

    def had(self, digest: str, sender: str) -> int:
        """The bytes that have come of a part from a sender."""
        path = self._begun(digest, sender)
        return path.stat().st_size if path.is_file() else 0

    def receive(self, digest: str, size: int, offset: int, chunks: Iterable[bytes], sender: str) -> int:
        """Write what comes while it comes; returns how many bytes are here. A part that is another one is dropped."""
        path = self._begun(digest, sender)
        with explained(path), path.open("ab") as file:
            if file.tell() != offset:
                raise WireError(f"a part goes on at {file.tell()}, not at {offset}")
            found = sha256()
            if offset:
                with path.open("rb") as before:
                    found = file_digest(before, sha256)
            for chunk in chunks:
                if file.tell() + len(chunk) > size:
                    raise WireError("a part is longer than it was said to be")
                file.write(chunk)
                found.update(chunk)
            here = file.tell()
        if here == size:
            if found.hexdigest() != digest:
                path.unlink()
                raise WireError("a part is not what its digest says")
            with explained(path):
                path.replace(self.path(digest))
        return here

    def chunks(self, digest: str, offset: int = 0) -> Iterator[bytes]:
        """A whole part's bytes, piece by piece."""
        with self.path(digest).open("rb") as file:
            file.seek(offset)
            while chunk := file.read(CHUNK):
                yield chunk

    def read(self, digests: Collection[str]) -> dict[str, bytes]:
        """Whole parts."""
        return {digest: self.path(digest).read_bytes() for digest in digests}

    def drop(self, digests: Collection[str], sender: str, named: Collection[str]) -> None:
        """What a sender brought of parts that no letter names, and does not offer any more."""
        for digest in digests:
            self._begun(digest, sender).unlink(missing_ok=True)
            if digest not in named:
                self.path(digest).unlink(missing_ok=True)

    def sweep(self, named: Collection[str], older: float = YOUNG) -> None:
        """Drop what no letter names, unless it was written just now: its letter may be on its way."""
        for path in self._folder.iterdir():
            if path.name.partition(".")[0] not in named and time.time() - path.stat().st_mtime > older:
                path.unlink(missing_ok=True)

    def _begun(self, digest: str, sender: str) -> Path:
        return self._folder / f"{digest}.{sender}"
