from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fedloom.errors import RunFolderError
from fedloom.runs.files import (
    append_lines,
    folder_appearing,
    read_lines,
    write_atomically,
    write_folder_atomically,
)
from support import names_in


def fail_with(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert names_in(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("number", "why"),
    [(errno.ENOSPC, "no space is left on the disk"), (errno.EDQUOT, "no space is left"), (errno.EIO, "Input/output")],
)
def test_a_failed_write_keeps_the_old_file_and_says_why(
    number: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder = tmp_path / "file", tmp_path / "folder"
    write_atomically(path, b"old")
    write_folder_atomically(folder, {"a": b"old"})
    fail_with(monkeypatch, number)
    with pytest.raises(RunFolderError, match=f"cannot write .*file: {why}"):
        write_atomically(path, b"new")
    with pytest.raises(RunFolderError, match=f"cannot write .*folder: {why}"):
        write_folder_atomically(folder, {"a": b"new"})
    with pytest.raises(RunFolderError, match=f"cannot write .*log: {why}"):
        append_lines(tmp_path / "log", [{"round": 1}])
    assert path.read_bytes() == b"old"
    assert (folder / "a").read_bytes() == b"old"
    assert names_in(tmp_path) == ["file", "folder", "log"]


def test_a_folder_appears_with_all_its_files_and_replaces_an_old_one(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "folder"
    write_folder_atomically(folder, {"a": b"1", "b": b"2"})
    write_folder_atomically(folder, {"a": b"3"})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"a": b"3"}
    assert names_in(tmp_path / "deep") == ["folder"]


@pytest.mark.parametrize("trouble", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt(), ValueError("bad")], ids=repr)
def test_nothing_is_left_of_a_folder_that_was_not_finished(trouble: BaseException, tmp_path: Path) -> None:
    def half() -> None:
        with folder_appearing(tmp_path / "new") as folder:
            (folder / "file").write_bytes(b"half")
            assert not (tmp_path / "new").exists()
            raise trouble

    with pytest.raises((RunFolderError, KeyboardInterrupt, ValueError)):
        half()
    assert names_in(tmp_path) == []


def test_a_folder_that_came_in_between_is_not_replaced(tmp_path: Path) -> None:
    def late() -> None:
        with folder_appearing(tmp_path / "new") as folder:
            (folder / "mine").write_bytes(b"1")
            (tmp_path / "new").mkdir()
            (tmp_path / "new" / "theirs").write_bytes(b"2")

    with pytest.raises(RunFolderError, match=r"cannot write .*new"):
        late()
    assert (names_in(tmp_path), names_in(tmp_path / "new")) == (["new"], ["theirs"])


def test_lines_are_appended_and_a_line_cut_short_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    assert read_lines(path) == []
    append_lines(path, [{"round": 1}, {"round": 2, "name": "Köln\u2028"}])
    append_lines(path, [{"round": 3}])
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    assert read_lines(path) == [{"round": 1}, {"round": 2, "name": "Köln\u2028"}]
