"""What many silos keep, in few files: stacks of equal tensors whose rows are read one at a time."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedloom.errors import RunFolderError
from fedloom.runs.files import digest, explained, write_atomically
from fedloom.sharing.codec import packed

FILE_BYTES = 2**26  # of a file that overflow goes to: what is stacked in memory to write it

Key = TypeVar("Key")


def alike(tables: Mapping[Key, Mapping[str, Tensor]]) -> list[list[Key]]:
    """The keys of tables that can be stacked (equal names, shapes and dtypes), in the order given."""
    found: dict[tuple[tuple[str, torch.Size, torch.dtype], ...], list[Key]] = {}
    for key, table in tables.items():
        signature = tuple((name, table[name].shape, table[name].dtype) for name in sorted(table))
        found.setdefault(signature, []).append(key)
    return list(found.values())


def stacked(tables: Sequence[Mapping[str, Tensor]]) -> bytes:
    """Tables of equal tensors as the content of one file, a row for each."""
    return packed({name: torch.stack([table[name] for table in tables]) for name in tables[0]})


class StackFile:
    """A safetensors file whose tensors hold one row for each silo."""

    def __init__(self, path: Path, names: Sequence[str], rows: int, sha256: str) -> None:
        self.path, self.names, self.rows, self.sha256 = path, tuple(names), rows, sha256

    @classmethod
    def written(cls, path: Path, tables: Sequence[Mapping[str, Tensor]]) -> StackFile:
        """A new file, which is there for as long as somebody holds this object or one of its rows."""
        data = stacked(tables)
        write_atomically(path, data)
        file = cls(path, list(tables[0]), len(tables), digest(data))
        weakref.finalize(file, path.unlink, missing_ok=True)
        return file


class StoredRow(Mapping[str, Tensor]):
    """One silo's tensors in a file; each look reads them anew."""

    def __init__(self, file: StackFile, position: int) -> None:
        self.file, self.position = file, position

    def __iter__(self) -> Iterator[str]:
        return iter(self.file.names)

    def __len__(self) -> int:
        return len(self.file.names)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.file.names:
            raise KeyError(name)
        return self._read((name,))[name]

    def items(self) -> ItemsView[str, Tensor]:
        """All of them at the price of one."""
        return self._read(self.file.names).items()

    def _read(self, names: Sequence[str]) -> dict[str, Tensor]:
        try:
            with safe_open(self.file.path, framework="pt") as opened:
                return {name: opened.get_slice(name)[self.position : self.position + 1][0] for name in names}
        except (OSError, SafetensorError) as error:
            raise RunFolderError(f"{self.file.path} is gone or damaged ({error})") from error


class Distant(Mapping[str, Tensor]):
    """One silo's tensors that another process holds; each look asks for all of them."""

    def __init__(self, names: Sequence[str], holder: int, ask: Callable[[], dict[str, Tensor]]) -> None:
        self._names, self.holder, self._ask = tuple(names), holder, ask

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._ask()[name]

    def items(self) -> ItemsView[str, Tensor]:
        """All of them at the price of one."""
        return self._ask().items()


class Kept(Protocol):
    """Whoever holds on to tensors, wherever these lie."""

    source: Mapping[str, Tensor]


class Overflow:
    """A bound on what stays in memory; beyond it, everything moves into stack files of a folder.

    The folder is scratch: a checkpoint links to the files that it needs, and only checkpoints are read after a crash.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._held: list[weakref.ref[Kept]] = []
        self._bytes = self._files = 0
        shutil.rmtree(folder, ignore_errors=True)

    def admit(self, state: Kept) -> None:
        """Watch over one more; what lies in a checkpoint, which will be deleted, is read back first."""
        if isinstance(state.source, Distant):
            return  # it takes no memory of this process
        if isinstance(state.source, StoredRow):
            state.source = dict(state.source.items())
        self._held.append(weakref.ref(state))
        self._bytes += _size(state)
        if self._bytes <= self._limit:
            return
        alive = [found for reference in self._held if (found := reference()) is not None]
        self._bytes = sum(map(_size, alive))
        if self._bytes > self._limit:
            self._move_out(alive)
            alive, self._bytes = [], 0
        self._held = [weakref.ref(found) for found in alive]

    def close(self) -> None:
        """Remove the folder, since a crash needs nothing of it."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _move_out(self, states: Sequence[Kept]) -> None:
        with explained(self._folder):
            self._folder.mkdir(exist_ok=True)
        for numbers in alike({number: state.source for number, state in enumerate(states)}):
            rows = max(1, FILE_BYTES // max(1, _size(states[numbers[0]])))
            for start in range(0, len(numbers), rows):
                self._write([states[number] for number in numbers[start : start + rows]])

    def _write(self, states: Sequence[Kept]) -> None:
        self._files += 1
        path = self._folder / f"silos-{self._files}.safetensors"
        file = StackFile.written(path, [state.source for state in states])
        for position, state in enumerate(states):
            state.source = StoredRow(file, position)


def _size(state: Kept) -> int:
    return sum(tensor.nbytes for tensor in state.source.values())
