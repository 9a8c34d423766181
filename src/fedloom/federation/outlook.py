"""A federation on one screen: who holds how many records of which groups and labels, and not one of them."""

from __future__ import annotations

from fedloom.federation.records import Federation, Silo
from fedloom.shown import Shown


def shown_federation(federation: Federation) -> Shown:
    """Name, kind and number of records, and a row for each silo."""
    records = federation.held
    shape = " x ".join(map(str, federation.shape))
    lines = [
        f"{records:,} {federation.modality.plural} of shape {shape}, {len(federation.test):,} held out",
        f"groups: {', '.join(federation.groups)}; {len(federation.classes)} classes",
    ]
    rows = [_row(federation, silo) for silo in federation.known]
    title = f"{federation.name}: {len(federation)} silo" + ("" if len(federation) == 1 else "s")
    return Shown(title, lines, ("silo", "records", "groups", "labels"), rows)


def _row(federation: Federation, silo: Silo) -> tuple[str, ...]:
    labels = sorted(set(silo.train.y.tolist()))
    known = [_class_name(federation, label) for label in labels if label >= 0]
    some = ", ".join(known[:3]) + (f" and {len(known) - 3} more" if len(known) > 3 else "")
    return silo.name, f"{len(silo):,}", ", ".join(federation.groups[group] for group in silo.groups), some


def _class_name(federation: Federation, label: int) -> str:
    """Numbers stand for themselves where nobody named the classes."""
    return federation.classes[label] if federation.classes else str(label)
