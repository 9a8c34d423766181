"""The few numbers by which a run is judged in one sentence: cheap, found at its end and by ``fedloom evaluate``.

They are kept apart from metrics, in verdict.json, and say nothing by themselves: each has a mark beside it. How far
samples lie from held-out records stands between what other real records reach (the floor) and what their average,
repeated, reaches; copies stand beside what held-out records would give by chance. What they say is decided where
people read it, in ``reports.verdict``; docs/evaluation.md says from which bounds on.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.errors import MissingExtraError
from fedloom.evaluation.classification import confusion, fit_head, recalls
from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.needs import EVERY_LABEL, SAMPLES, TOLD_CLASSES
from fedloom.evaluation.neighbours import nearest, neighbour_radii
from fedloom.evaluation.sliced_wasserstein import sliced_wasserstein
from fedloom.evaluation.spread import spread
from fedloom.federation.records import Records, concatenate
from fedloom.streams import Streams

ACTIVE = 0.01  # variance of a latent mean over records from which a dimension carries something (Burda et al., 2016)
COMPARED = 1000  # samples and held-out records of a group, at most
SEARCHED, SEARCHED_VALUES = 20_000, 200_000_000  # training records of a group, and numbers in them, at most
LEARNED, WIDEST = 5000, 4096  # records that a classifier learns from, and numbers in one of them, at most
RARE = 0.01  # of held-out records are as much nearer to training records than a copy must be

# Which records are compared is the same in all runs.
_CHOICE = Streams(0)


@dataclass(frozen=True)
class GroupJudgement:
    """One group's samples beside its records; None where it cannot be known."""

    samples: int
    spread: float | None  # how much samples differ among each other, as a share of what records do
    sharpness: float | None  # contrast between neighbouring pixels, as a share of that of records
    distance: float | None  # sliced Wasserstein distance of samples to held-out records,
    floor: float | None  # of other real records,
    average: float | None  # and of the records' average, repeated
    copies: float | None  # share of samples much nearer to a training record than to a held-out one
    active: int | None  # latent dimensions of the merged encoder that carry something,
    latent: int | None  # of so many


@dataclass(frozen=True)
class UtilityJudgement:
    """How often a classifier is right about held-out records, by what it learned from."""

    samples: float
    records: float | None  # unknown to a server without records
    chance: float  # the share of the most frequent class
    of_classes: dict[str, tuple[float | None, float | None]]  # the same two in each class


def judge(evaluation: Evaluation, round_number: int) -> dict[str, Any]:
    """All numbers as plain values; ``missing`` says why there are none."""
    groups: dict[str, Any] = {}
    missing, utility = "", None
    if not SAMPLES.met(evaluation):
        missing = SAMPLES.reason
    elif not all(map(len, evaluation.real.held_out.values())):
        missing = "there are no held-out records to compare samples with"
    else:
        groups = {group: asdict(_of_group(evaluation, group)) for group in evaluation.groups}
        utility = _utility(evaluation)
    return {"round": round_number, "groups": groups, "utility": utility and asdict(utility), "missing": missing}


def _of_group(evaluation: Evaluation, group: str) -> GroupJudgement:
    records = evaluation.real.held_out[group]
    real = records.take(torch.arange(min(len(records), COMPARED))).values
    samples = records.modality.decode(evaluation.samples[group][:COMPARED].cpu())  # as the records are looked at
    other = _other_records(evaluation, group, len(real))
    if other is None:  # a server without records: one half of what is public beside the other
        other, real = real[: len(real) // 2], real[len(real) // 2 :]
    count = min(len(samples), len(real), len(other))
    average = real.mean(dim=0, keepdim=True).expand(count, *real.shape[1:])
    tables = {"distance": samples[:count], "floor": other[:count], "average": average}
    active, latent = _active(evaluation, group)
    return GroupJudgement(
        samples=len(samples),
        spread=_finite(spread(samples, real)),
        sharpness=_sharpness(evaluation, samples, real),
        copies=_copies(evaluation, group, samples, real),
        active=active,
        latent=latent,
        **{name: _finite(sliced_wasserstein(real[:count].flatten(1), x.flatten(1))) for name, x in tables.items()},
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _training(evaluation: Evaluation, group: str, count: int) -> Records | None:
    """Some training records of a group, always the same; None where they are out of reach."""
    if evaluation.real.federation.is_remote:
        return None
    records = evaluation.real.training[group]
    return records.take(_CHOICE.permutation("judged", len(records))[:count])


def _other_records(evaluation: Evaluation, group: str, count: int) -> Tensor | None:
    found = _training(evaluation, group, count)
    return None if found is None or not len(found) else found.values


def _sharpness(evaluation: Evaluation, samples: Tensor, real: Tensor) -> float | None:
    if not evaluation.real.federation.modality.is_picture:
        return None
    return _finite(_contrast(samples) / _contrast(real)) if _contrast(real) else None


def _contrast(images: Tensor) -> float:
    """Root mean square of the difference between neighbouring pixels."""
    steps = [images.double().diff(dim=dim).square().mean() for dim in (-1, -2)]
    return math.sqrt(sum(step.item() for step in steps) / 2)


def _copies(evaluation: Evaluation, group: str, samples: Tensor, real: Tensor) -> float | None:
    """The share of samples that lie nearer to a training record, as compared to held-out ones, than records do.

    Blurred samples lie near to everything, hence the comparison: a copy is near to what it was copied from alone.
    """
    known = _training(evaluation, group, min(SEARCHED, SEARCHED_VALUES // max(1, real[0].numel())))
    if known is None or not len(known) or len(real) < 2:
        return None
    of_records = nearest(real, known.values)[0] / neighbour_radii(real, 1)
    of_samples = nearest(samples, known.values)[0] / nearest(samples, real)[0]
    bound = of_records.nan_to_num(nan=1.0).quantile(RARE)
    return (of_samples < bound).double().mean().item()


@torch.no_grad()
def _active(evaluation: Evaluation, group: str) -> tuple[int | None, int | None]:
    """How many dimensions of the merged encoder's latents carry something, and of how many."""
    for vae in evaluation.autoencoders:
        if vae.group == group:
            codes = vae.codes(vae.held_out.take(torch.arange(min(len(vae.held_out), COMPARED)))).double()
            return int((codes.var(dim=0, correction=0) > ACTIVE).sum()), codes.shape[1]
    return None, None


def _utility(evaluation: Evaluation) -> UtilityJudgement | None:
    """Nothing where samples or records have no classes, or where there is nothing to fit a classifier with."""
    test, classes = evaluation.real.federation.test, evaluation.real.federation.classes
    if not (TOLD_CLASSES.met(evaluation) and EVERY_LABEL.met(evaluation)) or math.prod(test.shape) > WIDEST:
        return None
    x = torch.cat([samples[:LEARNED].flatten(1).cpu() for samples in evaluation.samples.values()])
    y = torch.cat([labels[:LEARNED] for labels in evaluation.labels.values()])
    try:
        of_samples = _learned(x, y, test, len(classes))
    except MissingExtraError:
        return None
    of_records = torch.full_like(of_samples, math.nan)
    shares = torch.bincount(test.y, minlength=len(classes)) / len(test)
    tables = [_training(evaluation, group, LEARNED) for group in evaluation.groups]
    known = [table for table in tables if table is not None and len(table) and not bool((table.y < 0).any())]
    if len(known) == len(tables):
        records = concatenate(known)
        of_records = _learned(records.values.flatten(1), records.y, test, len(classes))
    met = shares > 0
    return UtilityJudgement(
        samples=(of_samples[met] * shares[met]).sum().item(),
        records=_finite((of_records[met] * shares[met]).sum().item()),
        chance=shares.max().item(),
        of_classes={
            name: (_finite(one), _finite(other))
            for name, one, other in zip(classes, of_samples.tolist(), of_records.tolist(), strict=True)
        },
    )


def _learned(x: Tensor, y: Tensor, test: Records, classes: int) -> Tensor:
    """The share of right answers in each class of a classifier that learned from ``x``."""
    predicted = fit_head(x, y, classes).probabilities(test.values.flatten(1)).argmax(dim=1)
    return recalls(confusion(test.y, predicted, classes, classes), torch.arange(classes))
