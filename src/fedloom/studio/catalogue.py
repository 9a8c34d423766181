"""Which runs lie in the folder, and which of them may be read: plain files inside it, and nothing that leads out."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fedloom.errors import RunFolderError

DEEPEST = 4  # folders between the runs folder and a run: sweeps of sweeps
MOST_RUNS = 1000
MOST_FOLDERS = 10_000  # that are looked into; more is somebody's home, not a folder of runs
MOST_FILES = 50_000  # of one run
LARGEST_TEXT = 256_000_000  # bytes of a log
INSIDE = ("samples", "checkpoints")  # folders of a run that are read, beside the files at its top
TEXT = (".toml", ".json", ".jsonl")


class NotServedError(RunFolderError):
    """A run that is not there, or one that may not be read."""


@dataclass(frozen=True)
class FoundRun:
    """A run that was found; ``key`` stands for it in addresses, so that no name of a folder ever does."""

    key: str
    name: str  # the path within the runs folder
    path: Path


@dataclass
class Catalogue:
    """All runs below a folder, given without links in its path; links below it are not followed."""

    root: Path
    _found: dict[str, FoundRun] = field(default_factory=dict)

    def entries(self) -> dict[str, FoundRun]:
        """Every run by its key, in the order of their names."""
        found: dict[str, FoundRun] = {}
        waiting, looked = [(self.root, 0)], 0
        while waiting and looked < MOST_FOLDERS and len(found) < MOST_RUNS:
            folder, depth = waiting.pop()
            looked += 1
            if _is_run(folder):
                entry = self._entry(folder)
                found[entry.key] = entry
            elif depth < DEEPEST:
                waiting += [(path, depth + 1) for path in _folders_in(folder)]
        self._found = dict(sorted(found.items(), key=lambda item: item[1].name))
        return self._found

    def entry(self, key: str) -> FoundRun:
        """The run that a key stands for; another look is taken where none is known by it."""
        entry = self._found.get(key) or self.entries().get(key)
        if entry is None or not is_plain(entry.path / "run.toml"):
            raise NotServedError("there is no such run in the runs folder; it may have been moved")
        return entry

    def _entry(self, path: Path) -> FoundRun:
        name = path.relative_to(self.root).as_posix() if path != self.root else path.name
        return FoundRun(hashlib.sha256(os.fsencode(name)).hexdigest()[:16], name, path)


def _is_run(folder: Path) -> bool:
    try:
        return (folder / "run.toml").is_file()
    except OSError:  # not ours to read
        return False


def _folders_in(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as items:
            return [
                Path(item.path)
                for item in items
                if item.is_dir(follow_symlinks=False) and not item.name.startswith(".")
            ]
    except OSError:  # gone, or not ours to read
        return []


def is_plain(path: Path) -> bool:
    """Whether a path leads to a file without passing a link."""
    return path.is_file() and path.resolve() == path


def check(entry: FoundRun) -> None:
    """Refuse a run that holds a link, a device or a pipe where the studio reads, or a log beyond all measure."""
    for count, (place, item) in enumerate(_items(entry.path)):
        if count >= MOST_FILES:
            raise NotServedError(f"run '{entry.name}' is not shown: it holds more than {MOST_FILES:,} files")
        try:
            found = item.stat(follow_symlinks=False)
        except FileNotFoundError:  # an old checkpoint that was dropped just now
            continue
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            raise NotServedError(f"run '{entry.name}' is not shown: {place} is a link or no plain file")
        if place.endswith(TEXT) and found.st_size > LARGEST_TEXT:
            raise NotServedError(f"run '{entry.name}' is not shown: {place} has more than {LARGEST_TEXT:,} bytes")


def _items(run: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Everything at the top of a run, and all in those of its folders that are read, by its place in the run."""
    waiting = [""]  # texts and not paths, which take most of the time that a list of many runs takes
    while waiting:
        above = waiting.pop()
        try:
            with os.scandir(run / above) as items:
                for item in items:
                    place = f"{above}/{item.name}" if above else item.name
                    inside = bool(above) or item.name in INSIDE
                    folder = item.is_dir(follow_symlinks=False)
                    if inside or not (folder or _is_link_to_folder(item)):
                        yield place, item
                    if inside and folder:
                        waiting.append(place)
        except FileNotFoundError:  # the folder of such a checkpoint
            continue


def _is_link_to_folder(item: os.DirEntry[str]) -> bool:
    """Such as trackers leave beside a run's own files; nothing reads through them."""
    return item.is_symlink() and item.is_dir()
