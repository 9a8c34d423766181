"""Backups of a server's or a silo's folder, in one file; what is restored pays nothing before it is confirmed."""

from __future__ import annotations

import io
import json
import os
import secrets
import shutil
import sqlite3
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import fedloom
from fedloom.deployment.directories import FEDERATION, SILO, ServerDirectory, SiloDirectory
from fedloom.errors import ConfigError, FedloomError
from fedloom.operations.spending import HOLD, Hold
from fedloom.operations.trail import AUDIT, Trail, now
from fedloom.privacy.registry import FILE, KEY, registry_folder
from fedloom.runs.files import digest_of_file, explained, folder_appearing

SCHEMA, MANIFEST, HOME, REGISTRY = 1, "manifest.json", "home", "registry"
PASSING = ("logs", "door")  # that the next start makes anew
REMAINS = (".lock", ".tmp", "-journal", "-wal", "-shm")
MAGIC = b"SQLite format 3\0"


@dataclass(frozen=True)
class Manifest:
    """What a backup says of itself."""

    schema: int
    version: str  # of fedloom
    kind: str  # the file that makes a folder a server's or a silo's
    name: str
    time: str
    lines: int  # of the audit log, and the hash of the last
    head: str
    files: dict[str, str]  # path -> SHA-256

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """The one in an unpacked backup."""
        try:
            found = cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"this is no backup that 'fedloom federation backup' made: {error}") from error
        if found.schema != SCHEMA:
            raise ConfigError(f"the backup has schema {found.schema}; this version reads {SCHEMA}")
        return found


def back_up(folder: Path, file: Path) -> Manifest:
    """Write a folder into a file, its databases as they are after a whole commit; it may be at work meanwhile."""
    kind, name = (SILO, SiloDirectory.open(folder).name) if SiloDirectory.is_at(folder) else (FEDERATION, "")
    name = name or ServerDirectory.open(folder).charter.name
    if file.exists():
        raise ConfigError(f"{file} exists already; choose another name")
    lines, head = Trail(folder / AUDIT).head()
    files: dict[str, str] = {}
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with (
            explained(file),
            tempfile.TemporaryDirectory() as scratch,
            open(temporary, "wb", opener=_for_its_owner) as raw,
            tarfile.open(fileobj=raw, mode="w:gz") as archive,
        ):
            for member, path in _members(folder, kind):
                whole = _settled(path, Path(scratch) / "copy")
                files[member] = digest_of_file(whole)
                archive.add(whole, member)
            manifest = Manifest(SCHEMA, fedloom.__version__, kind, name, now(), lines, head, files)
            _add(archive, MANIFEST, json.dumps(asdict(manifest), indent=2).encode())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
    return manifest


def restore(file: Path, folder: Path, registry: Path | None = None) -> tuple[Manifest, Hold | None]:
    """Unpack a backup into a new folder. A silo's is put under a hold: what it paid after the backup is not in it."""
    if folder.exists():
        raise ConfigError(f"{folder} exists already; choose another folder, or move it away")
    with folder_appearing(folder, mode=0o700) as home, tempfile.TemporaryDirectory(dir=home.parent) as scratch:
        manifest = _unpacked(file, Path(scratch))
        for entry in sorted((Path(scratch) / HOME).iterdir()):
            shutil.move(entry, home / entry.name)
        (home / "logs").mkdir(exist_ok=True)
        if manifest.kind != SILO:
            return manifest, None
        hold = Hold(secrets.token_hex(8), manifest.time, manifest.lines, manifest.head)
        hold.write(home)
        Trail(home / AUDIT).note("restored", {"backup": manifest.time, "ticket": hold.ticket})
        _settle_registry(Path(scratch) / REGISTRY, registry or registry_folder())
    return manifest, hold


def _members(folder: Path, kind: str) -> Iterator[tuple[str, Path]]:
    """What belongs into the archive, under which name."""
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        passing = inside.parts[0] in PASSING or path.name.endswith(REMAINS) or inside == Path(HOLD)
        if path.is_file() and not path.is_symlink() and not passing:
            yield f"{HOME}/{inside}", path
    if kind == SILO:
        for name in (FILE, KEY):
            if (path := registry_folder() / name).is_file():
                yield f"{REGISTRY}/{name}", path


def _settled(path: Path, copy: Path) -> Path:
    """A copy of a file that does not change any more; of a database, one between two commits."""
    with path.open("rb") as file:
        is_database = file.read(len(MAGIC)) == MAGIC
    copy.unlink(missing_ok=True)
    if not is_database:
        shutil.copy2(path, copy)
        return copy
    address = f"{path.absolute().as_uri()}?mode=ro"
    with closing(sqlite3.connect(address, uri=True)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    copy.chmod(path.stat().st_mode)
    return copy


def _unpacked(file: Path, folder: Path) -> Manifest:
    """All files of a backup, each compared with its digest."""
    try:
        with tarfile.open(file) as archive:
            archive.extractall(folder, filter="data")
    except (OSError, tarfile.TarError, EOFError, ValueError, zlib.error) as error:
        raise ConfigError(f"{file} is no backup that can be read: {error}") from error
    manifest = Manifest.read(folder / MANIFEST)
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {MANIFEST}
    for name in sorted(there | set(manifest.files)):
        if name not in there or digest_of_file(folder / name) != manifest.files.get(name):
            raise FedloomError(f"{file} is damaged: '{name}' is not what was backed up")
    return manifest


def _settle_registry(backup: Path, registry: Path) -> None:
    """A registry that is there already is the newer one, and stays."""
    if (registry / FILE).exists() or not (backup / FILE).is_file():
        return
    with explained(registry):
        registry.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in (FILE, KEY):
            shutil.copyfile(backup / name, registry / name)
            (registry / name).chmod(0o600)


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), 0o600
    archive.addfile(member, io.BytesIO(data))


def _for_its_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
