"""What a certificate is about, in plain values; every sentence follows from these."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

from fedloom.certificate.odds import ALMOST_NOTHING, certainty
from fedloom.errors import ConfigError
from fedloom.privacy.statements import Bundle, read_bundle
from fedloom.release.provenance import participants, provenance_of
from fedloom.release.standing import Worth, standing_of
from fedloom.runs.checkpoint import folder_of
from fedloom.runs.files import digest_of_file
from fedloom.runs.folder import RunFolder
from fedloom.settings import parse


@dataclass(frozen=True)
class Approval:
    """Who has approved, as whom, and when."""

    name: str
    role: str
    date: str

    @classmethod
    def of(cls, text: str) -> Approval:
        """What ``--approval "name, role, date"`` says."""
        parts = [part.strip() for part in text.split(",")]
        if len(parts) != 3 or not all(parts):
            raise ConfigError(f"--approval = '{text}' must be \"name, role, date\"")
        try:
            date.fromisoformat(parts[2])
        except ValueError as error:
            raise ConfigError(f"--approval = '{text}' must end with a date such as 2026-05-31") from error
        return cls(*parts)


@dataclass(frozen=True)
class SignedFigure:
    """What one silo has signed, by which key."""

    silo: str
    fingerprint: str
    unit: str
    epsilon: float
    delta: float
    date: str


@dataclass(frozen=True, kw_only=True)
class Matter:
    """A finished run, as far as a certificate tells of it."""

    run: str
    started: str  # a date
    method: str
    rounds: int
    data: str  # by name
    public: bool
    medical: bool
    knows_subjects: bool  # whether the data say whose each record is
    silos: tuple[str, ...]  # that took part
    deployed: bool
    blocks: tuple[str, ...]  # parts of the model that left
    payloads: tuple[str, ...]  # and what else did
    bytes: int
    validation: bool  # whether records were kept aside
    worth: str  # one of Worth
    guarantee: str
    objections: tuple[str, ...]  # but for what the worth says already
    unit: str
    trust: str
    tolerated: int
    epsilon: float = math.inf  # infinite: no bound holds
    delta: float = 0.0
    audit: tuple[str, ...]
    has_statements: bool  # of some silos, whether they hold or not
    signed: tuple[SignedFigure, ...]  # where all of them hold
    approvals: tuple[Approval, ...]
    checksums: dict[str, str]

    @property
    def is_bounded(self) -> bool:
        """Whether some epsilon holds, whoever promises it."""
        return math.isfinite(self.epsilon)

    @property
    def is_vacuous(self) -> bool:
        """Whether the bound is so wide that it hardly holds anybody back."""
        return certainty(self.epsilon, self.delta) > ALMOST_NOTHING

    def to_mapping(self) -> dict[str, Any]:
        """Plain values; what is infinite is null, as JSON has no such number."""
        return {**asdict(self), "epsilon": self.epsilon if self.is_bounded else None}

    @classmethod
    def of(cls, mapping: Mapping[str, Any]) -> Matter:
        """Read back what :meth:`to_mapping` gave, once it has been through JSON."""
        return parse(cls, {key: value for key, value in mapping.items() if value is not None})


def matter_of(folder: RunFolder, approvals: Sequence[Approval] = ()) -> Matter:
    """Read it from a finished run's folder."""
    provenance, standing, data = provenance_of(folder), standing_of(folder), folder.data_source
    settings, sent = folder.config.privacy, folder.egress()
    files = [folder_of(folder.path, folder.rounds_done) / "server.safetensors", folder.statements]
    return Matter(
        run=provenance.name,
        started=str(folder.environment.get("started", ""))[:10],
        method=provenance.method,
        rounds=provenance.rounds,
        data=data.name,
        public=data.public,
        medical=data.medical,
        knows_subjects=data.knows_subjects,
        silos=participants(folder),
        deployed=folder.is_deployed,
        blocks=tuple(dict.fromkeys(name.partition("@")[0] for row in sent for name in row["blocks"])),
        payloads=tuple(dict.fromkeys(name for row in sent for name in row["payloads"])),
        bytes=sum(row["bytes"] for row in sent),
        validation=folder.config.data.validation > 0,
        worth=standing.worth,
        guarantee=provenance.guarantee,
        objections=tuple(said for said in provenance.objections if said != standing.objection),
        unit=settings.unit,
        trust=settings.trust,
        tolerated=settings.tolerated,
        epsilon=math.inf if provenance.epsilon is None else provenance.epsilon,
        delta=provenance.delta or 0.0,
        audit=provenance.audit,
        has_statements=folder.statements.is_file(),
        signed=signed_figures(read_bundle(folder.statements)) if standing.worth is Worth.SIGNED else (),
        approvals=tuple(approvals),
        checksums={file.relative_to(folder.path).as_posix(): digest_of_file(file) for file in files if file.is_file()},
    )


def signed_figures(bundle: Bundle) -> tuple[SignedFigure, ...]:
    """What the silos of a bundle have signed, one by one."""
    bodies = [statement.body for statement in bundle.statements]
    return tuple(SignedFigure(b.silo, b.key, b.unit, b.epsilon, b.delta, b.date[:10]) for b in bodies)
