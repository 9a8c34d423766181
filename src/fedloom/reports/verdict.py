"""One sentence of judgement that everything about a run opens with, and its colour.

The bounds are few, and docs/evaluation.md derives them. Whether samples look like their own group is not among what is
asked: a single blurred image does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedloom.errors import FedloomError
from fedloom.privacy.ledger import format_epsilon
from fedloom.privacy.summary import NONE
from fedloom.reports.audits import best_area
from fedloom.reports.logs import UNREADABLE, finite
from fedloom.runs.folder import RunFolder
from fedloom.runs.guarantee import guarantee_of
from fedloom.runs.health import COLLAPSED

Tone = Literal["green", "amber", "red"]
TONES: tuple[Tone, ...] = ("green", "amber", "red")
WORDS = {"green": "Good", "amber": "With care", "red": "Not usable"}

FEWEST = 100  # samples; fewer say nothing
NEAR, FAR = 0.8, 0.2  # of the way from what is worth nothing to what real records are worth
BLURRED, GRAINY = 0.5, 2.0  # times the contrast of real records
SILENT = 0.1  # share of latent dimensions, up to which a code says too little
SUSPECT, COPYING = 0.05, 0.5  # share of samples that may be copies; by chance it is 0.01
TELLING, TOLD = 0.6, 0.75  # of pairs in which an attack tells a training record from another; by guessing it is 0.5


@dataclass(frozen=True)
class Verdict:
    """What to think of a run."""

    tone: Tone
    sentence: str


@dataclass(frozen=True)
class Clause:
    """A part of the sentence, with the tone that it asks for."""

    tone: Tone
    text: str


@dataclass(frozen=True)
class Judged:
    """What verdict.json holds; numbers are finite or None."""

    round: int = 0
    groups: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    utility: Mapping[str, float | None] = field(default_factory=dict)
    of_classes: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)
    missing: str = ""  # why there are no numbers


@dataclass(frozen=True)
class Circumstances:
    """What a verdict goes by beside those numbers."""

    privacy: str  # in a few words
    guaranteed: bool
    public: bool  # the data: then no guarantee is missed
    state: Mapping[str, Any] = field(default_factory=dict)  # of the run
    refuted: bool = False  # the claim of privacy, by an attack
    told: float | None = None  # share of pairs in which the best attack knows the training record; None: not tried


def verdict_of(folder: RunFolder) -> Verdict:
    """The verdict on a run folder, any file of which may be damaged."""
    try:
        judged = read_judged(folder.path / "verdict.json")
    except UNREADABLE:
        judged = Judged(missing="verdict.json is damaged")
    return verdict(judged, circumstances_of(folder))


def circumstances_of(folder: RunFolder) -> Circumstances:
    """What its files say; where they cannot be read, nothing is in a run's favour."""
    try:
        summary = guarantee_of(folder)
        epsilon, delta = summary.epsilon, summary.delta
        guaranteed = epsilon is not None and delta is not None and not summary.guarantee.startswith(NONE)
        words = NONE
        if guaranteed and epsilon is not None:
            unit = folder.config.privacy.unit
            words = f"epsilon {format_epsilon(epsilon)} (delta {delta:g}) for each {unit} of a silo"
    except Exception:  # a stranger's ledger may hold anything where events and budgets stand
        guaranteed, words = False, f"{NONE} can be shown"
    try:
        public, state = folder.data_source.public, folder.status
        refuted, told = folder.audit.get("refuted") is True, best_area(folder.audit)
    except (FedloomError, AttributeError, TypeError, *UNREADABLE):
        public, state, refuted, told = False, {}, False, None
    return Circumstances(words, guaranteed, public, state, refuted, told)


def read_judged(path: Path) -> Judged:
    """The numbers in verdict.json; raises what reading a hostile JSON file may raise."""
    if not path.exists():
        return Judged(missing="this run was never judged; 'fedloom evaluate' does it")
    found = _mapping(json.loads(path.read_text(encoding="utf-8")))
    utility, number = _mapping(found.get("utility")), found.get("round")
    return Judged(
        round=number if type(number) is int and 0 <= number < 10**9 else 0,
        groups={str(group): _numbers(row) for group, row in _mapping(found.get("groups")).items()},
        utility=_numbers(utility),
        of_classes={
            str(name): (finite(pair[0]), finite(pair[1]))
            for name, pair in _mapping(utility.get("of_classes")).items()
            if isinstance(pair, list) and len(pair) == 2
        },
        missing=str(found.get("missing", "")),
    )


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _numbers(value: Any) -> dict[str, float | None]:
    return {key: finite(number) for key, number in _mapping(value).items()}


def verdict(judged: Judged, about: Circumstances) -> Verdict:
    """The worst of what there is to say decides the tone; what is wrong comes first, privacy last."""
    if about.state.get("state") == "diverged":
        reason = f"training diverged in round {about.state.get('round')} ({about.state.get('reason')})"
        return Verdict("red", f"{WORDS['red']}: {reason}; {about.privacy}.")
    clauses = list(_clauses(judged))
    privacy = [Clause("red", "the claim of privacy was refuted by an attack")] if about.refuted else []
    privacy += _membership(about.told)
    if not about.guaranteed and not about.public:
        privacy.append(Clause("amber", f"{about.privacy}, and the data are not public"))
    else:
        privacy.append(Clause("green", about.privacy))
    tone = max((clause.tone for clause in (*clauses, *privacy)), key=TONES.index)
    clauses.sort(key=lambda clause: -TONES.index(clause.tone))
    lead = WORDS[tone] if judged.groups else "Not judged"
    return Verdict(tone, f"{lead}: {'; '.join(clause.text for clause in (*clauses, *privacy))}.")


def _membership(told: float | None) -> list[Clause]:
    """What the best attack on membership came to, where one was tried."""
    if told is None:
        return []
    tone: Tone = "red" if told > TOLD else "amber" if told > TELLING else "green"
    return [Clause(tone, f"attacks tell training records from others in {told:.0%} of pairs (50% by guessing)")]


def _clauses(judged: Judged) -> Iterator[Clause]:
    if not judged.groups:
        yield Clause("amber", judged.missing or "there are no numbers to judge by")
        return
    fewest = min(row.get("samples") or 0 for row in judged.groups.values())
    if fewest < FEWEST:
        yield Clause("amber", f"{fewest:.0f} samples of a group are too few to judge by")
        return
    yield _nearness(judged.groups)
    yield from _codes(judged.groups)
    yield from _usefulness(judged.utility)
    yield _copying(judged.groups)


def way(row: Mapping[str, float | None]) -> float | None:
    """How far samples came from the records' average (0) to the records themselves (1, as others of them are)."""
    distance, floor, average = (row.get(name) for name in ("distance", "floor", "average"))
    if distance is None or floor is None or average is None or average <= floor:
        return None
    return (average - distance) / (average - floor)


def _nearness(groups: Mapping[str, Mapping[str, float | None]]) -> Clause:
    """Of the group whose samples are farthest from its records."""
    known = {group: found for group, row in groups.items() if (found := way(row)) is not None}
    if len(known) < len(groups):
        return Clause("red", "samples are no finite numbers, or records do not differ")
    group = min(known, key=known.__getitem__)
    row, samples = groups[group], f"samples of {group}" if len(groups) > 1 else "samples"
    details, spread = [], row.get("spread")
    tone: Tone = "green" if known[group] >= NEAR else "amber" if known[group] >= FAR else "red"
    if spread is not None:
        details.append(f"{spread:.0%} of their variety")
        tone = "red" if spread < COLLAPSED else tone
    sharpness = row.get("sharpness")
    if sharpness is not None and not BLURRED <= sharpness <= GRAINY:
        details.append(f"{'blurred' if sharpness < BLURRED else 'grainy'}: {sharpness:.0%} of their contrast")
        tone = max(tone, "amber", key=TONES.index)
    what = {
        "green": f"{samples} come near to real records",
        "amber": f"{samples} are only roughly like real records",
        "red": f"{samples} are hardly nearer to real records than one average image"
        if known[group] >= -FAR
        else f"{samples} are farther from real records than their average is",
    }[tone]
    share = f"{max(0.0, min(1.0, known[group])):.0%} of the way from their average"
    return Clause(tone, f"{what} ({', '.join([share, *details])})")


def _codes(groups: Mapping[str, Mapping[str, float | None]]) -> Iterator[Clause]:
    """Only where the merged encoder is at fault."""
    known = [(row["active"], row["latent"]) for row in groups.values() if row.get("active") is not None]
    found = [(active, latent) for active, latent in known if active is not None and latent]
    if found:
        active, latent = min(found, key=lambda pair: pair[0] / pair[1])
        if active <= SILENT * latent:
            tone: Tone = "amber" if active else "red"
            yield Clause(tone, f"the encoder uses {active:.0f} of {latent:.0f} latent dimensions")


def _usefulness(utility: Mapping[str, float | None]) -> Iterator[Clause]:
    """Where records have labels that samples were told."""
    samples, records, chance = (utility.get(name) for name in ("samples", "records", "chance"))
    if samples is None or chance is None:
        return
    mark = records if records is not None else 1.0
    share = (samples - chance) / (mark - chance) if mark > chance else 0.0
    tone: Tone = "green" if share >= NEAR else "amber" if share >= FAR else "red"
    beside = f", {records:.0%} if learned from real ones" if records is not None else ""
    right = f"a classifier learned from samples is right about {samples:.0%} of real records"
    yield Clause(tone, f"{right} ({chance:.0%} by chance{beside})")


def _copying(groups: Mapping[str, Mapping[str, float | None]]) -> Clause:
    known = {group: copies for group, row in groups.items() if (copies := row.get("copies")) is not None}
    if not known:
        return Clause("green", "whether samples copy records cannot be told here")
    group = max(known, key=known.__getitem__)
    if known[group] <= SUSPECT:
        return Clause("green", "no sign of copying")
    tone: Tone = "red" if known[group] > COPYING else "amber"
    return Clause(tone, f"{known[group]:.0%} of the samples of {group} may be copies of training records")
