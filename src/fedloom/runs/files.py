"""Writing that survives a kill at any moment: temporary file, fsync, rename."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from fedloom.errors import RunFolderError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn a failed write into one sentence."""
    try:
        yield
    except OSError as error:
        why = "no space is left on the disk" if error.errno in _FULL else error.strerror
        raise RunFolderError(f"cannot write {path}: {why}") from error


def _sync(path: Path) -> None:
    """Put a file, or the list of a folder's files, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Either the old file or the whole new one is there, never a part; ``mode`` less what the process masks."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explained(path):
        try:
            with open(temporary, "wb", opener=partial(os.open, mode=mode)) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            _sync(path.parent)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


NO_LINKS: Mapping[str, Path] = {}


@contextlib.contextmanager
def folder_appearing(folder: Path, *, replaces: bool = False, mode: int = 0o777) -> Iterator[Path]:
    """A folder to write into that gets its name at the end, when all is on disk; after any failure there is none.

    One that lies there already is in the way, unless the new one ``replaces`` it; ``mode`` is less what the process
    masks.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    with explained(folder):
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir(mode)
            yield temporary
            for path in temporary.rglob("*"):
                _sync(path)
            _sync(temporary)
            if replaces and folder.exists():
                remove_folder(folder)
            temporary.rename(folder)
            _sync(folder.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def remove_folder(folder: Path) -> None:
    """It is gone at once: whoever is killed meanwhile leaves no half of it behind under its name."""
    doomed = folder.with_name(f".{folder.name}.{os.getpid()}.gone.tmp")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_unfinished(parent: Path) -> None:
    """What a killed process was writing or removing in a folder."""
    for unfinished in parent.glob(".*.tmp"):
        shutil.rmtree(unfinished, ignore_errors=True)


def write_folder_atomically(
    folder: Path, files: Mapping[str, bytes | list[bytes]], links: Mapping[str, Path] = NO_LINKS, mode: int = 0o777
) -> None:
    """A whole folder appears at once, of bytes or pieces of them; it shares ``links``, which are on disk, by name."""
    with folder_appearing(folder, replaces=True, mode=mode) as temporary:
        for name, data in files.items():
            with (temporary / name).open("wb") as file:
                file.writelines([data] if isinstance(data, bytes) else data)
        for name, path in links.items():
            _share(path, temporary / name)


def _share(path: Path, target: Path) -> None:
    """A second name for a file, or a copy where the file system knows no such thing."""
    try:
        target.hardlink_to(path)
    except OSError:
        shutil.copyfile(path, target)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file as a whole, so that nobody reads half of it."""
    write_atomically(path, json.dumps(content, indent=2).encode())


def append_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add JSON lines durably; a line that a kill cut short stays alone, and is dropped when the run resumes."""
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    with explained(path), path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            lines = (b"" if file.read(1) == b"\n" else b"\n") + lines
        file.write(lines)
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSON-lines file; nothing if there is no such file."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def digest(data: bytes) -> str:
    """The SHA-256 of some bytes, in hexadecimal."""
    return sha256(data).hexdigest()


def digest_of_file(path: Path) -> str:
    """SHA-256 in hexadecimal, without the whole file in memory."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def file_name(text: str) -> str:
    """A group's name as a file name."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in text)
