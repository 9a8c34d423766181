"""Obtaining the full data sets: from a folder, from $FEDLOOM_DATA, or from public mirrors, always verified."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from fedloom.errors import ConfigError, DataError, unknown
from fedloom.federation.archives import ARCHIVES, Archive, cache_folder, contents, data_folder

Progress = Callable[[int, int], None]  # bytes done and bytes in all (0 if unknown) of the file under way

_CHUNK = 1 << 16
_ATTEMPTS = 3
_TIMEOUT_SECONDS = 30
_NETWORK_ERRORS = (
    urllib.error.URLError,
    http.client.HTTPException,
    ConnectionError,
    TimeoutError,
    ssl.SSLError,
)


def get(
    name: str,
    source_path: Path | None = None,
    destination: Path | None = None,
    progress: Progress | None = None,
    mirrors: Sequence[str] | None = None,
) -> Path:
    """Put the files of an archive into ``destination`` (the cache, unless told) and return their folder.

    Files that are already there and whole are kept. The others come from ``source_path`` if given, else from
    $FEDLOOM_DATA if they lie there, else from the mirrors; a download that was cut goes on where it stopped.
    """
    if name not in ARCHIVES:
        raise ConfigError(unknown("data set", name, ARCHIVES))
    archive = ARCHIVES[name]
    folder = (destination or cache_folder()) / archive.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, sha256 in archive.sha256.items():
            if not _is_whole(folder / file, sha256):
                part = _obtain(name, file, folder, source_path, progress, mirrors or archive.mirrors)
                _install(part, folder / file)
    except OSError as error:
        raise DataError(f"cannot write '{name}' into {folder}: {error.strerror}") from error
    return folder


def _obtain(
    name: str, file: str, folder: Path, source: Path | None, progress: Progress | None, mirrors: Sequence[str]
) -> Path:
    """A verified copy of one file beside its place, under a temporary name."""
    archive = ARCHIVES[name]
    local = _local(file, archive, source)
    if local is None:
        return _download(name, file, folder, progress or _silent, mirrors)
    contents(local, archive.sha256[file])
    part = folder / f"{file}.copy.part"
    shutil.copyfile(local, part)
    return part


def _silent(_done: int, _total: int) -> None:
    pass


def _local(file: str, archive: Archive, source: Path | None) -> Path | None:
    """The file in ``source`` or its subfolder for the archive; without a source, in $FEDLOOM_DATA."""
    base = source or data_folder()
    if base is None:
        return None
    candidates = [base / archive.folder / file] if source is None else [base / file, base / archive.folder / file]
    found = next((path for path in candidates if path.is_file()), None)
    if source is not None and found is None:
        raise DataError(f"{source} holds neither {file} nor {archive.folder}/{file}")
    return found


def _download(name: str, file: str, folder: Path, report: Progress, mirrors: Sequence[str]) -> Path:
    reasons = []
    for mirror in mirrors:
        # A part belongs to its mirror: others compress the same data to other bytes.
        tag = hashlib.sha256(mirror.encode()).hexdigest()[:8]
        part = folder / f"{file}.{tag}.part"
        try:
            if _fetch(mirror + file, part, ARCHIVES[name].sha256[file], report):
                return part
            reasons.append(f"{mirror} sent a damaged file or kept breaking off")
        except _NETWORK_ERRORS as error:
            reasons.append(f"{mirror}: {getattr(error, 'reason', None) or error}")
    raise DataError(
        f"could not download {file} of '{name}' ({'; '.join(reasons)}); try again later, give a folder that "
        f"holds it with --from PATH, or set FEDLOOM_DATA to a folder that holds {ARCHIVES[name].folder}/"
    )


def _fetch(url: str, part: Path, sha256: str, report: Progress) -> bool:
    """Fill ``part``, going on after a cut; whether it holds the right bytes in the end."""
    for _ in range(_ATTEMPTS):
        resumed = part.exists()
        if _transfer(url, part, report):
            if _is_whole(part, sha256):
                return True
            part.unlink()
            if not resumed:  # what the server sends is wrong, so asking again would only cost time
                return False
    return False


def _transfer(url: str, part: Path, report: Progress) -> bool:
    """Fetch what ``part`` still lacks; whether it is complete now."""
    start = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return True  # nothing lies beyond what we have; the checksum tells whether that is the file
        raise
    with response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            start = 0  # the server sends everything, whatever was asked
        length = int(response.headers.get("Content-Length") or 0)
        total = start + length if length else 0
        done = start
        with part.open("ab" if start else "wb") as stream:
            while chunk := _received(response):
                stream.write(chunk)
                done += len(chunk)
                report(done, total)
    return total in (0, done)


def _received(response: http.client.HTTPResponse) -> bytes:
    """The next bytes; none at the end, which a broken connection is too."""
    try:
        return response.read(_CHUNK)
    except _NETWORK_ERRORS:
        return b""


def _is_whole(path: Path, sha256: str) -> bool:
    try:
        contents(path, sha256)
    except DataError:
        return False
    return True


def _install(part: Path, target: Path) -> None:
    with part.open("rb+") as stream:
        os.fsync(stream.fileno())
    part.replace(target)
    for leftover in target.parent.glob(f"{target.name}.*.part"):
        leftover.unlink()
