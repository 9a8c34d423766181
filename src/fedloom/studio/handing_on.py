"""What a run's folder has to hand on, and what stands against it: certificate, data sets, generators, their cards."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedloom.errors import FedloomError
from fedloom.release.provenance import provenance_of
from fedloom.release.release_folder import CARD, MANIFEST
from fedloom.runs.folder import RunFolder
from fedloom.studio.catalogue import NotServedError, is_plain

CERTIFICATE = "certificate"  # the folder, as the command makes it
CERTIFICATE_TYPES = {
    "certificate.html": "text/html",
    "certificate.pdf": "application/pdf",
    "certificate.json": "application/json",
}
KINDS = ("dataset", "generators")  # folders of releases, with a number where there are several
LONGEST_CARD = 100_000  # characters
MOST_RELEASES = 100


@dataclass(frozen=True)
class Release:
    """One that has been made."""

    name: str
    path: Path
    card: str


@dataclass(frozen=True)
class HandingOn:
    """What a person must know before a run is handed on."""

    guarantee: str
    promise: str
    objections: Sequence[str]
    problem: str  # why it cannot be handed on at all
    certificate: Sequence[str]  # files that have been made
    verdict: str  # of that certificate
    releases: Sequence[Release]


def handing_on(folder: RunFolder) -> HandingOn:
    """Read it; a run that is not finished has a sentence instead."""
    found = {name: folder.path / CERTIFICATE / name for name in CERTIFICATE_TYPES}
    made = [name for name, path in found.items() if is_plain(path)]
    guarantee = promise = problem = ""
    objections: Sequence[str] = ()
    try:
        provenance = provenance_of(folder)
        guarantee, objections = provenance.guarantee, provenance.objections
        promise = provenance.privacy.get("promise", "")
    except FedloomError as error:
        problem = str(error)
    verdict = _verdict(found["certificate.json"]) if "certificate.json" in made else ""
    return HandingOn(guarantee, promise, objections, problem, made, verdict, list(_releases(folder.path)))


def certificate_file(run: Path, name: str) -> Path:
    """A file of a run's certificate, by its name."""
    path = run / CERTIFICATE / name
    if name not in CERTIFICATE_TYPES or not is_plain(path):
        raise NotServedError("there is no such file of a certificate")
    return path


def free_name(run: Path, kind: str) -> str:
    """Where the next release of a kind goes."""
    taken = {path.name for path in run.iterdir()}
    return next(name for name in _names(kind) if name not in taken)


def _names(kind: str) -> Iterator[str]:
    yield kind
    for number in range(2, MOST_RELEASES + 2):
        yield f"{kind}-{number}"


def _releases(run: Path) -> Iterator[Release]:
    pattern = re.compile(rf"({'|'.join(KINDS)})(-\d{{1,3}})?")
    for folder in sorted(path for path in run.iterdir() if pattern.fullmatch(path.name)):
        if is_plain(folder / CARD) and is_plain(folder / MANIFEST):
            with (folder / CARD).open(encoding="utf-8", errors="replace") as card:
                yield Release(folder.name, folder, card.read(LONGEST_CARD))


def _verdict(file: Path) -> str:
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["verdict"])
    except (OSError, ValueError, TypeError, KeyError):
        return "certificate.json is damaged"
