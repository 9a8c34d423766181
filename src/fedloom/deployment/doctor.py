"""``fedloom federation doctor``: what stands in the way of a server or a silo, and what to do about it."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import Literal

from cryptography import x509
from packaging.requirements import Requirement

import fedloom
from fedloom.deployment.charter import Charter, load_records
from fedloom.deployment.confinement import bubblewrap
from fedloom.deployment.directories import ServerDirectory, SiloDirectory
from fedloom.deployment.expiry import expiries
from fedloom.deployment.vitals import LEAST, Home
from fedloom.errors import FedloomError, page_path
from fedloom.operations.spending import audited, refuse_held
from fedloom.operations.trail import AUDIT, Trail
from fedloom.privacy.ledger import Ledger

Level = Literal["ok", "warn", "fail"]
ROOM = 2**30  # bytes of disk, below which it is time to look
APART = timedelta(minutes=5)  # by which a clock may be behind what was written before
REACHING = 10.0  # seconds
ENGINE = "container"  # a variable that engines and systemd set inside of one
CONTAINER = (Path("/.dockerenv"), Path("/run/.containerenv"), Path("/var/run/secrets/kubernetes.io"))


@dataclass(frozen=True)
class Diagnosis:
    """One line of the doctor's."""

    about: str
    level: Level
    said: str
    remedy: str = ""


@dataclass(frozen=True)
class Patient:
    """A folder, and a silo's data where they were given."""

    home: Home
    data: Path | None = None
    source: str = ""

    @property
    def charter(self) -> Charter:
        """Of its federation."""
        return self.home.invitation.charter if isinstance(self.home, SiloDirectory) else self.home.charter


def examine(patient: Patient) -> list[Diagnosis]:
    """All that was looked at; what cannot be looked at has failed."""
    patient.charter.require_direct(patient.home.path)
    checks = SILO_CHECKS if isinstance(patient.home, SiloDirectory) else SERVER_CHECKS
    found = []
    for about, check in checks.items():
        try:
            found += [Diagnosis(about, *each) for each in check(patient)]
        except (FedloomError, OSError) as error:
            found.append(Diagnosis(about, "fail", str(error), f"see {page_path('how-to/operate.md')}"))
    return found


def exit_code(found: list[Diagnosis]) -> int:
    """0: all is well; 1: something will be wrong; 2: something is."""
    return max(("ok", "warn", "fail").index(each.level) for each in found)


Said = tuple[Level, str, str]


def _clock(patient: Patient) -> Iterator[Said]:
    """Against what was written before now, and against the machine's own word."""
    now = datetime.now(UTC)
    authority = patient.home.path / ("ca.crt" if isinstance(patient.home, SiloDirectory) else "keys/ca.crt")
    founded = x509.load_pem_x509_certificate(authority.read_bytes()).not_valid_before_utc
    last = max((datetime.fromisoformat(each.time) for each in Trail(patient.home.path / AUDIT).entries()), default=now)
    remedy = "set this machine's clock, and have it kept by NTP"
    if now < founded or now + APART < last:
        yield "fail", f"it says {now:%Y-%m-%d %H:%M} UTC, which is before what was written here earlier", remedy
        return
    kept = _output("timedatectl", "show", "--property=NTPSynchronized", "--value")
    if kept == "no":
        yield "warn", "it is not synchronized with any other", remedy
    else:
        yield "ok", f"{now:%Y-%m-%d %H:%M} UTC" + ("" if kept else "; whether it is synchronized is not known"), ""


def _disk(patient: Patient) -> Iterator[Said]:
    free = shutil.disk_usage(patient.home.path).free
    level: Level = "fail" if free < LEAST else "warn" if free < ROOM else "ok"
    remedy = "make room: a silo's round needs four times its model" if level != "ok" else ""
    yield level, f"{free / 2**30:.1f} GiB are free", remedy


def _certificates(patient: Patient) -> Iterator[Said]:
    for each in expiries(patient.home.path):
        if each.left() < timedelta():
            yield "fail", f"{each.path.name} expired on {each.ends:%Y-%m-%d}", each.remedy
        elif each.warning():
            yield "warn", f"{each.path.name} expires in {each.left().days} days", each.remedy
        else:
            yield "ok", f"{each.path.name} holds until {each.ends:%Y-%m-%d}", ""


def _keys(patient: Patient) -> Iterator[Said]:
    """Private keys are for their owner alone."""
    paths = sorted([*patient.home.path.glob("*.key"), *(patient.home.path / "keys").glob("*.key")])
    for path in paths:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            yield "fail", f"{path} can be read by others", f"chmod 600 {path}; if others were there, enroll anew"
            return
    if not paths:
        yield "fail", "there is no private key", "restore a backup, or enroll anew"
        return
    yield "ok", f"{len(paths)} for their owner alone", ""


def _audit(patient: Patient) -> Iterator[Said]:
    number, head = Trail(patient.home.path / AUDIT).head()
    yield "ok", f"whole up to line {number}, of hash {head[:16]}", ""


def _versions(_: Patient) -> Iterator[Said]:
    """fedloom's own requirements, those of the direct wire among them."""
    asked = [Requirement(each) for each in metadata.requires("fedloom") or []]
    extras, remedy = ("direct", "operations"), "pip install 'fedloom[direct]'"
    wanted = [each for each in asked if not each.marker or any(each.marker.evaluate({"extra": e}) for e in extras)]
    for each in wanted:
        try:
            there = metadata.version(each.name)
        except metadata.PackageNotFoundError:
            yield "fail", f"the package {each.name} is missing", remedy
            continue
        if not each.specifier.contains(there, prereleases=True):
            yield "fail", f"{each.name} is {there}, and {each} is needed", remedy
    yield "ok", f"fedloom {fedloom.__version__}; it must be the same on every machine of the federation", ""


def _policy(patient: Patient) -> Iterator[Said]:
    assert isinstance(patient.home, SiloDirectory)
    policy, path = patient.home.policy(), patient.home.path / "policy.toml"
    if not policy.methods or not policy.blocks:
        yield "warn", "it agrees to nothing", f"edit {path}: methods, blocks, payloads"
    elif policy.privacy == "none":
        yield "warn", "it asks for no privacy", f'set privacy = "dp-sgd" in {path} before records of patients are used'
    else:
        yield "ok", f"{', '.join(policy.methods)}; epsilon at most {policy.max_epsilon:g}", ""


def _data(patient: Patient) -> Iterator[Said]:
    """Readable, and of the kind that the charter declares."""
    assert isinstance(patient.home, SiloDirectory)
    if patient.data is None:
        yield "warn", "they were not looked at", "add --data PATH, as for 'fedloom federation join'"
        return
    try:
        own = load_records(patient.data, patient.source, patient.charter.modality)
        patient.charter.at_a_silo(patient.home.name, own)
    except (FedloomError, OSError) as error:
        yield "fail", str(error), f"{page_path('how-to/own-data.md')} says how records are given"
        return
    yield "ok", f"{len(own.train)} records as the charter declares them", ""


def _ledger(patient: Patient) -> Iterator[Said]:
    home = patient.home.path
    refuse_held(home)
    if not (home / "ledger.sqlite").is_file():
        yield "ok", "there is none yet", ""
        return
    with closing(Ledger(home / "ledger.sqlite", read_only=True)) as ledger:
        audited(ledger, home)
        yield "ok", f"{ledger.chain().charges} charges, all that the audit log knows of", ""


def _server_there(patient: Patient) -> Iterator[Said]:
    """A connection by TLS, and a certificate of the federation's own authority."""
    host, port = patient.charter.host, patient.charter.port
    name = "ca.crt" if isinstance(patient.home, SiloDirectory) else "keys/ca.crt"
    context = ssl.create_default_context(cafile=str(patient.home.path / name))
    try:
        with (
            socket.create_connection((host, port), REACHING) as plain,
            context.wrap_socket(plain, server_hostname=host) as connection,
        ):
            yield "ok", f"{host}:{port} answers with the federation's certificate, {connection.version()}", ""
    except ssl.SSLCertVerificationError as error:
        yield "fail", f"{host}:{port} is not this federation's: {error.verify_message}", "compare fingerprints"
    except OSError as error:
        remedy = "is it served? may this machine call that port? (outgoing only: nothing calls a silo)"
        yield "fail", f"{host}:{port} does not answer: {error}", remedy


def _confinement(_patient: Patient) -> Iterator[Said]:
    if bubblewrap():
        yield "ok", "bubblewrap works", ""
    elif os.environ.get(ENGINE) or any(path.exists() for path in CONTAINER):
        yield "ok", "this is a container, which takes bubblewrap's place", ""
    else:
        remedy = "install bubblewrap, or run the container or the hardened unit in deploy/"
        yield "warn", "processes have all rights of this user", remedy


def _admitted(patient: Patient) -> Iterator[Said]:
    assert isinstance(patient.home, ServerDirectory)
    missing = [silo for silo in patient.charter.silos if silo not in patient.home.keys_admitted()]
    if missing:
        yield "warn", f"not admitted: {', '.join(missing)}", "'fedloom federation admit' with what they send"
    else:
        yield "ok", f"all {len(patient.charter.silos)} are admitted", ""


def _public_set(patient: Patient) -> Iterator[Said]:
    assert isinstance(patient.home, ServerDirectory)
    path = patient.home.settings.public_set
    if not path:
        yield "ok", "none: runs are not measured on records", ""
        return
    patient.charter.at_the_server(load_records(Path(path), modality=patient.charter.modality))
    yield "ok", f"{path} is as the charter declares", ""


def _output(*command: str) -> str:
    """What a program says; empty where it is not there, or cannot say."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=REACHING, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


Check = Callable[[Patient], Iterator[Said]]
COMMON: dict[str, Check] = {
    "clock": _clock,
    "disk": _disk,
    "certificates": _certificates,
    "keys": _keys,
    "audit log": _audit,
    "versions": _versions,
}
SILO_CHECKS = COMMON | {
    "policy": _policy,
    "data": _data,
    "ledger": _ledger,
    "server": _server_there,
    "confinement": _confinement,
}
SERVER_CHECKS = COMMON | {"silos": _admitted, "public set": _public_set, "server": _server_there}
