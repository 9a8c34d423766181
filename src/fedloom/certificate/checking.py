"""Whether a file of statements, or a certificate that holds them, is true: offline, on any machine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import fedloom
from fedloom.certificate.facts import KIND, SCHEMA, Certificate
from fedloom.certificate.matter import Matter, SignedFigure, signed_figures
from fedloom.errors import FedloomError
from fedloom.privacy.statements import DIGITS, Bundle, bundle_of, digest_of, verify
from fedloom.release.standing import Worth


@dataclass(frozen=True)
class Known:
    """What a reader knows from elsewhere: fingerprints of silos' keys, and the federation's charter."""

    keys: Mapping[str, str]
    charter: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Checked:
    """What silos have signed, and all that is wrong with it."""

    signed: tuple[SignedFigure, ...]
    findings: tuple[str, ...]
    unknown: tuple[str, ...] = ()  # silos whose key the reader does not know from elsewhere

    def to_mapping(self) -> dict[str, Any]:
        """What ``--json`` shows."""
        return {
            "verified": not self.findings,
            "silos": [
                asdict(figure)
                | {"epsilon": figure.epsilon if math.isfinite(figure.epsilon) else None}
                | {"key_known": figure.silo not in self.unknown}
                for figure in self.signed
            ],
            "findings": list(self.findings),
        }


def check_file(path: Path, known: Known) -> Checked:
    """Check a ``statements.json`` or a ``certificate.json``; what is neither is refused."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FedloomError(f"cannot read {path}: {error.strerror}") from error
    try:
        tree = json.loads(data)
        if not isinstance(tree, dict) or tree.get("kind") != KIND:
            return _check_bundle(bundle_of(data), known)
        return _check_certificate(tree, known)
    except (FedloomError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise FedloomError(f"{path} is no file of statements and no certificate: {error}") from error


def _check_bundle(bundle: Bundle, known: Known) -> Checked:
    signed = signed_figures(bundle)
    unknown = tuple(figure.silo for figure in signed if figure.silo not in known.keys)
    return Checked(signed, tuple(_findings(bundle, known)), unknown)


def _findings(bundle: Bundle, known: Known) -> Iterator[str]:
    for finding in verify(bundle, known.keys):
        yield f"silo '{finding.silo}': {finding.sentence}" if finding.silo else finding.sentence
    if known.charter is not None and digest_of(known.charter) != digest_of(bundle.charter):
        yield "it was signed under another charter than that of the federation's folder"
    stated = {statement.silo for statement in bundle.statements}
    yield from (
        f"silo '{silo}': its key is known, and it has signed nothing" for silo in known.keys if silo not in stated
    )


def _check_certificate(tree: dict[str, Any], known: Known) -> Checked:
    if tree["schema"] != SCHEMA:
        raise ValueError(f"its schema is {tree['schema']}, this version reads {SCHEMA}")
    certificate = Certificate(Matter.of(tree["matter"]), str(tree["statements"]))
    told = list(_untold(certificate, tree))
    if not certificate.statements:
        return Checked((), (*told, "nobody has signed it: it holds no statement of any silo"))
    found = _check_bundle(bundle_of(certificate.statements.encode()), known)
    return Checked(found.signed, (*told, *_unsigned(certificate.matter, found.signed), *found.findings), found.unknown)


def _untold(certificate: Certificate, tree: dict[str, Any]) -> Iterator[str]:
    """Sentences that somebody has changed; those of another version cannot be told from them."""
    if tree["fedloom"] != fedloom.__version__:
        yield f"it was made with fedloom {tree['fedloom']}, and this is {fedloom.__version__}, with other sentences"
    elif json.loads(json.dumps(certificate.to_mapping())) != tree:
        yield "its sentences are not those that follow from its figures"


def _unsigned(matter: Matter, signed: tuple[SignedFigure, ...]) -> Iterator[str]:
    """Figures of a certificate that are not those of the statements in it."""
    names = {figure.silo for figure in signed}
    yield from (f"silo '{silo}' took part, and has signed nothing" for silo in matter.silos if silo not in names)
    if matter.signed != (signed if matter.worth == Worth.SIGNED else ()):
        yield "the figures in its table are not those that the silos have signed"
    epsilon, delta = (max(bounds, default=0.0) for bounds in ([s.epsilon for s in signed], [s.delta for s in signed]))
    if not math.isclose(matter.epsilon, epsilon, rel_tol=DIGITS) or (matter.is_bounded and matter.delta != delta):
        yield "its epsilon and delta are not the largest that the silos have signed"
    if any(figure.unit != matter.unit for figure in signed):
        yield f"it promises something for each {matter.unit}, and the silos have signed for something else"
