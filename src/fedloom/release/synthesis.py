"""A synthetic data set: so many records of every group and class, from the generators of a finished run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedloom.errors import ConfigError, unknown
from fedloom.methods.generator import Generator
from fedloom.release.cards import dataset_card
from fedloom.release.formats import FORMATS, RecordKind, Writer
from fedloom.release.provenance import Limits, ReleasedRun, check_risk, pathway_of, provenance_of
from fedloom.release.release_folder import check_place, release_folder
from fedloom.streams import Streams

CHUNK = 1000  # records made at once; fixed, so that a record does not depend on how many are asked for
Counts = dict[str, dict[str, int]]  # of each group and class; the class is empty where there is none

# How frequent each class is in a group: of those that it has, or as the run knows them.
LABELS: dict[str, Callable[[Generator, str], Tensor]] = {
    "balanced": lambda generator, group: (generator.label_shares_of(group) > 0).double(),
    "prior": lambda generator, group: generator.label_shares_of(group),
}


@dataclass(frozen=True, kw_only=True)
class SynthesisOrder:
    """How many records are asked for, in what form, with which labels."""

    records: int  # in all
    form: str  # one of FORMATS
    labels: str = ""  # one of LABELS, or CLASS=SHARE,...; "prior" unless told, where the generators are told a class
    pathway: str = ""
    seed: int = 0
    licence: str = "unknown"
    device: torch.device | str = "cpu"


def synthesize(
    run: ReleasedRun,
    out: Path,
    order: SynthesisOrder,
    *,
    limits: Sequence[Limits] = (),
    accept_risk: bool = False,
    progress: Callable[[int, str], None] | None = None,
) -> dict[str, Any]:
    """Write a data set into a new folder and return what it holds; ``progress`` hears how many are done, and of whom.

    ``limits`` are those of the silos whose data the run learned from; what something stands against needs
    ``accept_risk``.
    """
    if order.form not in FORMATS:
        raise ConfigError("--format: " + unknown("format", order.form, FORMATS))
    check_place(out)
    provenance = provenance_of(run.folder, limits)
    generator = run.generator()
    pathway = pathway_of(generator, order.pathway)
    counts = counts_of(generator, pathway, order)
    check_risk(provenance, run.folder, accept_risk)
    way, labelled = generator.method.pathways[pathway], generator.method.pathways[pathway].labelled
    shape = tuple(generator.sample(1, group=generator.groups[0], pathway=pathway).shape[1:])
    kind = RecordKind(shape, generator.groups, generator.classes if labelled else (), generator.kind)
    contents = {
        "kind": "dataset",
        "format": order.form,
        "records": order.records,
        **kind.modality.schema(shape),
        **({"rules": list(kind.modality.rules)} if kind.modality.rules else {}),
        "labels": _labels(order) if labelled else None,
        "pathway": {"name": pathway, "summary": way.summary},
        "seed": order.seed,
        "counts": counts,
        "licence": order.licence,
    }
    card = dataset_card(provenance, contents)
    with release_folder(out, provenance, contents, card) as folder:
        _write(FORMATS[order.form](folder, kind), generator, pathway, counts, order, progress or (lambda *_: None))
    return contents


def _write(
    writer: Writer,
    generator: Generator,
    pathway: str,
    counts: Counts,
    order: SynthesisOrder,
    progress: Callable[[int, str], None],
) -> None:
    """Generate all records, chunk by chunk."""
    done = 0
    for group, of_group in counts.items():
        for label, count in of_group.items():
            for number in range(math.ceil(count / CHUNK)):
                rows = min(CHUNK, count - number * CHUNK)
                seed = Streams(order.seed).torch_seed(f"synthesize/{label}", silo=number)
                x = generator.sample(rows, group=group, pathway=pathway, label=label, seed=seed, device=order.device)
                writer.add(x, group, label)
                done += rows
                progress(done, f"{group} {label}".strip())
    writer.close()


def counts_of(generator: Generator, pathway: str, order: SynthesisOrder) -> Counts:
    """How many records of each group and class: groups alike, but for those without the classes; these by shares."""
    if order.records < 1:
        raise ConfigError(f"--n = {order.records} must be at least 1")
    labelled = generator.method.pathways[pathway].labelled
    if order.labels and not labelled:
        raise ConfigError(
            f"--labels = '{order.labels}' needs generators that are told a class, and those of method "
            f"'{generator.method.name}' are not"
        )
    if not labelled:
        of_groups = apportioned(order.records, torch.ones(len(generator.groups)))
        return {group: {"": count} for group, count in zip(generator.groups, of_groups, strict=True) if count}
    tables = {group: _shares(generator, group, _labels(order)) for group in generator.groups}
    of_groups = apportioned(order.records, torch.stack([*tables.values()]).any(dim=1))
    return {
        group: {label: c for label, c in zip(generator.classes, apportioned(count, tables[group]), strict=True) if c}
        for group, count in zip(generator.groups, of_groups, strict=True)
        if count
    }


def _shares(generator: Generator, group: str, labels: str) -> Tensor:
    """How frequent each class shall be in a group; of classes that are asked for, those that it has."""
    if "=" not in labels:
        if labels not in LABELS:
            raise ConfigError("--labels: " + unknown("choice of labels", labels, [*LABELS, "CLASS=SHARE,..."]))
        return LABELS[labels](generator, group)
    shares = torch.zeros(len(generator.classes), dtype=torch.float64)
    for part in labels.split(","):
        label, _, share = part.rpartition("=")
        try:
            shares[generator.classes.index(generator.class_of(label.strip()))] = float(share)
        except ValueError as error:
            raise ConfigError(f"--labels: '{part}' is not of the form CLASS=SHARE with a number") from error
    if not (torch.isfinite(shares).all() and bool((shares >= 0).all()) and shares.sum() > 0):
        raise ConfigError(f"--labels = '{labels}' must give shares of at least 0, and one above it")
    return torch.where(generator.label_shares_of(group) > 0, shares, 0.0)


def apportioned(total: int, shares: Tensor) -> list[int]:
    """Whole numbers that add up to ``total``, in proportion to the shares: those with the largest rest get one more.

    >>> apportioned(7, torch.tensor([1.0, 1.0, 0.5]))
    [3, 3, 1]
    """
    exact = shares.double() / shares.double().sum() * total
    whole = (exact + 1e-9).floor()
    rest = torch.argsort(whole - exact, stable=True)[: total - int(whole.sum())]
    whole[rest] += 1
    return [int(count) for count in whole]


def _labels(order: SynthesisOrder) -> str:
    return order.labels or "prior"
