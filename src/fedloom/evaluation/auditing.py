"""The audits of a run: what attacks find, beside what the run claims.

An attack that succeeds refutes a claim; one that fails is no evidence of privacy. Three attacks:

    canaries     guess, from each canary's score under the released model, whether it was trained on; so many right
                 guesses rule out small epsilons (Steinke, Nasr, Jagielski, NeurIPS 2023)
    membership   tell training records from held-out ones by loss, by the closest output, by the nearest sample, and by
                 the density of samples over that of other records (DOMIAS, van Breugel et al., AISTATS 2023)
    outliers     how often an outlier that was put in is recognisable: the closest output of the generator is as close
                 to it as outputs are to 95 % of typical training records, and nearer to it than to any of these and to
                 any outlier that was not put in
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedloom.errors import ConfigError
from fedloom.evaluation.attacks import Target, TrainingRecords, targets_of, trained_on
from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.neighbours import nearest
from fedloom.federation.records import Canaries, Records
from fedloom.outline import in_outline
from fedloom.privacy.accounting import default_delta
from fedloom.privacy.audits import (
    CONFIDENCE,
    Exposure,
    Rate,
    attack_area,
    audit_canaries,
    density_scores,
    distances_between,
    recognisable,
    true_positive_rate,
    usual_distance,
)

SHOWN = 10  # outliers in a picture
FALSE_POSITIVES = (0.001, 0.01)
NO_CANARIES = "canaries: the run has none (audit.canaries), so no lower bound of epsilon could be found"
NO_TRACE = "canaries: nothing that generates left their silos, so their coins could not be guessed"
NO_OUTLIERS = "outliers: none were put in (data.outliers), so their exposure was not measured"


@dataclass(frozen=True)
class Claim:
    """What a ledger says was spent on one silo's data."""

    epsilon: float
    delta: float


@dataclass(frozen=True)
class Effort:
    """How much an audit looks at."""

    records: int = 500  # of each kind, at most
    samples: int = 2000  # of each group
    confidence: float = CONFIDENCE
    search: bool = True  # for the closest outputs: hundreds of times through the generator, forwards and backwards

    def __post_init__(self) -> None:
        if not 0.5 <= self.confidence < 1:
            raise ConfigError(f"confidence = {self.confidence} must be at least 0.5 and below 1")


@dataclass(frozen=True, eq=False)
class Pictures:
    """Some outliers, what a generator makes of each, and the typical training record nearest to that."""

    __repr__ = in_outline

    outliers: Tensor
    outputs: Tensor
    typical: Tensor


@dataclass(frozen=True, eq=False)
class Findings:
    """What one attack found: plain values, sentences for people, and pictures by generator."""

    values: Any
    sentences: Sequence[str]
    pictures: Mapping[str, Pictures] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Audit:
    """An evaluation under attack; ``claims`` are those of the silos that claim an epsilon."""

    evaluation: Evaluation
    claims: Mapping[str, Claim]
    effort: Effort

    def targets(self) -> Iterator[tuple[Target, TrainingRecords]]:
        """Every released generator with what it learned from."""
        for target in targets_of(self.evaluation):
            yield target, trained_on(self.evaluation.real.federation, target)

    def some(self, purpose: str, records: Records) -> Records:
        """A random choice of records, always the same."""
        order = self.evaluation.streams.permutation(f"audit/{purpose}", len(records))
        return records.take(order[: self.effort.records])

    def held_out(self, target: Target, trained: TrainingRecords) -> Records:
        """Held-out records of a target's groups and of the classes it learned: others would be told by their class."""
        test = self.evaluation.real.federation.test
        alike = torch.isin(test.group, torch.tensor(target.groups)) & torch.isin(test.y, trained.typical.y)
        return test.take(torch.nonzero(alike).flatten())


# Canaries


def canaries(audit: Audit) -> Findings:
    """Guess every canary's coin, silo by silo."""
    targets = {
        found.silo: target
        for target, trained in sorted(audit.targets(), key=lambda each: -len(each[0].silos))  # its own comes last
        for found in trained.canaries
    }
    planted = [found for found in audit.evaluation.real.federation.canaries if found.silo in targets]
    if not planted:
        return Findings(None, [NO_TRACE if audit.evaluation.real.federation.canaries else NO_CANARIES])
    claims = [audit.claims.get(found.silo) for found in planted]
    claim = _weakest(claims)
    smallest = min(len(silo) for silo in audit.evaluation.real.federation.silos)
    found = audit_canaries(
        torch.cat([_ranks(_canary_scores(targets[each.silo], each)) for each in planted]),
        torch.cat([each.included for each in planted]),
        delta=claim.delta if claim else default_delta(smallest),
        confidence=audit.effort.confidence,
    )
    claimed = claim.epsilon if claim else None
    values = {
        **asdict(found),
        "included": sum(int(each.included.sum()) for each in planted),
        "claimed": claimed,
        "scores": {each.silo: "loss" if targets[each.silo].has_loss else "closest output" for each in planted},
        "refuted": found.refutes(claimed),
    }
    return Findings(values, [f"canaries: {found.sentence(claimed)}"])


def _canary_scores(target: Target, found: Canaries) -> Tensor:
    """Higher for canaries that look as if they were trained on."""
    if target.has_loss:
        return -target.losses(found.records).cpu()
    return -distances_between(target.values(found.records), target.reconstructions(found.records)).cpu()


def _ranks(scores: Tensor) -> Tensor:
    """From 0 to 1 within a silo, because the scores of different models do not compare."""
    return torch.argsort(torch.argsort(scores, stable=True), stable=True).double() / max(len(scores) - 1, 1)


def _weakest(claims: Sequence[Claim | None]) -> Claim | None:
    """What all of the claims together promise to every record; nothing if one of them promises nothing."""
    known = [claim for claim in claims if claim is not None]
    if len(known) < len(claims):
        return None
    return Claim(max(claim.epsilon for claim in known), max(claim.delta for claim in known))


# Membership


def membership(audit: Audit) -> Findings:
    """For each generator, and each way to score a record by it: how well training records are told from others."""
    found: list[dict[str, Any]] = []
    for target, trained in audit.targets():
        held_out = audit.some("held-out", audit.held_out(target, trained))
        half = len(held_out) // 2
        others, reference = held_out.take(torch.arange(half)), held_out.take(torch.arange(half, len(held_out)))
        members = audit.some("members", trained.typical)
        if not len(members) or not half:
            continue
        for attack, score in _scores(audit, target, reference).items():
            inside, outside = score(members).cpu(), score(others).cpu()
            found.append(
                {
                    "target": target.name,
                    "attack": attack,
                    "members": len(members),
                    "others": len(others),
                    "area": attack_area(inside, outside),
                    "true_positive_rates": {
                        f"{rate:g}": asdict(true_positive_rate(inside, outside, rate)) for rate in FALSE_POSITIVES
                    },
                }
            )
    if not found:
        return Findings([], ["membership: nothing that generates left a silo, so there was nothing to attack"])
    best = max(found, key=lambda row: row["area"])
    rate = best["true_positive_rates"][f"{FALSE_POSITIVES[-1]:g}"]
    return Findings(
        found,
        [
            f"membership: by {best['attack']} of {best['target']}, the best of {len(found)} attacks, a training record "
            f"scores above a held-out one in {best['area']:.1%} of pairs (guessing: 50%), and {rate['value']:.1%} of "
            f"{best['members']} are found when at most {FALSE_POSITIVES[-1]:.0%} of others are"
        ],
    )


def _scores(audit: Audit, target: Target, reference: Records) -> dict[str, Callable[[Records], Tensor]]:
    """Higher for records that look like members."""
    count = audit.effort.samples

    def closeness(records: Records, outputs: Tensor) -> Tensor:
        return -distances_between(target.values(records), outputs)

    def density(records: Records) -> Tensor:
        scores = torch.zeros(len(records), device=target.device)
        for kind in target.kinds(records):
            rows, others = target.of_kind(records, kind), target.values(reference.of_group(kind.group))
            if len(others):
                x = target.values(records.take(rows))
                scores[rows.to(target.device)] = density_scores(x, target.samples(count, kind), others)
        return scores

    ways: dict[str, Callable[[Records], Tensor]] = {
        "nearest sample": lambda records: closeness(records, target.samples_like(records, count)),
        "density of samples": density,
    }
    # Where records do not compare, no small step in the noise leads from one output to a nearer one.
    if target.modality.compares and audit.effort.search:
        ways = {"closest output": lambda records: closeness(records, target.reconstructions(records)), **ways}
    if target.has_loss:
        ways = {"loss": lambda records: -target.losses(records), **ways}
    return ways


# Outliers


def outliers(audit: Audit) -> Findings:
    """For each generator: how often outliers that were put in, and others, are recognisable in its outputs.

    A run with ``data.outliers.share = 0`` is the control: nothing was put in, so all it shows was there without them.
    """
    unseen = audit.evaluation.real.federation.unseen_outliers
    if unseen is None:
        return Findings([], [NO_OUTLIERS])
    found: list[dict[str, Any]] = []
    said: list[str] = []
    pictures: dict[str, Pictures] = {}
    targets = list(audit.targets())
    spoiled = [each for each in targets if len(each[1].outliers)]
    for target, trained in spoiled or targets:
        kinds = _kinds(audit, target, trained, unseen)
        if not {"unseen_outliers", "typical", "unseen_typical"} <= set(kinds):
            continue
        typical, known = target.values(trained.typical), target.values(unseen)
        ways: dict[str, Callable[[Records], Tensor]] = {
            "reconstructed": target.reconstructions,
            "generated": partial(target.samples_like, count=audit.effort.samples),
        }
        for way, outputs_for in ways.items():
            made = {name: outputs_for(records) for name, (records, _) in kinds.items()}
            points = {name: target.values(records) for name, (records, _) in kinds.items()}
            limit = usual_distance(points["typical"], made["typical"])
            rates: dict[str, Rate] = {}
            for name, (_, own) in kinds.items():
                hits = recognisable(points[name], made[name], torch.cat([typical, known]), limit, own)
                rates[name] = Rate.of(int(hits.sum()), len(hits), audit.effort.confidence)
            exposure = Exposure(
                rates.get("outliers"), rates["unseen_outliers"], rates["typical"], rates["unseen_typical"]
            )
            counts = {name: len(records) for name, (records, _) in kinds.items()}
            row = {"target": target.name, "way": way, "limit": limit, "counts": counts, **asdict(exposure)}
            found.append({**row, "memorised": exposure.memorised})
            said.append(f"outliers: {target.name}: {_told(way, exposure)}")
            if way == "reconstructed":
                name = "outliers" if "outliers" in kinds else "unseen_outliers"
                shown = made[name][:SHOWN]
                pictures[target.name] = Pictures(points[name][:SHOWN], shown, typical[nearest(shown, typical)[1]])
    return Findings(found, said, pictures)


def _told(way: str, exposure: Exposure) -> str:
    outliers, unseen, typical = exposure.outliers, exposure.unseen_outliers, exposure.typical
    rest = (
        f"{unseen.value:.1%} of outliers never trained on, {typical.value:.1%} of typical training records"
        f"{'; training on them made them recognisable' if exposure.memorised else ''}"
    )
    if outliers is None:
        return f"no outlier was put in; {way} recognisably are {rest}"
    return (
        f"{outliers.value:.1%} ({outliers.low:.1%} to {outliers.high:.1%}) of outliers are {way} recognisably, {rest}"
    )


def _kinds(
    audit: Audit, target: Target, trained: TrainingRecords, unseen: Records
) -> dict[str, tuple[Records, Tensor | None]]:
    """The records of each kind, with their places among typical training records and unseen outliers, if they are some.

    An outlier is of the target's groups in turn, and its class is that of all outliers.
    """
    streams, most = audit.evaluation.streams, audit.effort.records
    typical = streams.permutation("audit/typical", len(trained.typical))[:most]
    others = streams.permutation("audit/unseen-outliers", len(unseen))[:most]
    groups = torch.tensor(target.groups)[torch.arange(len(others)) % len(target.groups)]
    kinds: dict[str, tuple[Records, Tensor | None]] = {
        "outliers": (audit.some("outliers", trained.outliers), None),
        "unseen_outliers": (
            replace(unseen.take(others), group=groups),
            len(trained.typical) + others.to(target.device),
        ),
        "typical": (trained.typical.take(typical), typical.to(target.device)),
        "unseen_typical": (audit.some("held-out", audit.held_out(target, trained)), None),
    }
    return {name: kind for name, kind in kinds.items() if len(kind[0])}


ATTACKS: dict[str, Callable[[Audit], Findings]] = {
    "canaries": canaries,
    "membership": membership,
    "outliers": outliers,
}
