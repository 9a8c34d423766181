"""The sentences of a certificate: what an officer asks, and what may be answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fedloom.certificate.matter import Matter
from fedloom.certificate.odds import certainty, of_several, one_in, percent
from fedloom.privacy.ledger import format_epsilon
from fedloom.privacy.summary import NONE
from fedloom.release.provenance import FLAG
from fedloom.release.standing import Worth

MOST_NAMED = 12  # silos
ALONE = "one machine computed the noise of all silos, from a fast source of random numbers, and nobody signed for it"
KNOWN_PAYLOADS = {"records": "how many records a silo has"}
SEVERAL = (2, 10)  # records of one person, by which it is shown what becomes of a promise for single ones
LINES = 3  # to sign on, where nobody has approved yet


@dataclass(frozen=True)
class Passage:
    """A question with its answer; rows are a table, whose empty cells are to be filled in by hand."""

    title: str
    sentences: tuple[str, ...]
    headers: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def verdict(matter: Matter) -> str:
    """The first sentence."""
    whom = f"each {person(matter)} of every silo"
    if matter.worth == Worth.SIGNED:
        if matter.is_vacuous:
            return "Every silo that took part has signed, but for limits so wide that they promise almost nothing."
        return f"{whom.capitalize()} is protected within the limits below, and every silo that took part has signed."
    if matter.worth == Worth.STUDY:
        return "This is a study, not a promise to the people in the data: no silo has signed for it."
    if matter.worth == Worth.SIMULATION:
        return "This is a simulation on public data: it shows what silos could promise, and promises nothing itself."
    return f"There is no privacy guarantee: nothing limits what the results tell about a single {person(matter)}."


def sections_about(matter: Matter) -> tuple[Passage, ...]:
    """All questions but that about words, in the order in which an officer asks them."""
    written = ((title, tuple(write(matter))) for title, write in QUESTIONS.items())
    asked = tuple(Passage(title, sentences) for title, sentences in written if sentences)
    return (*asked, _signatures(matter), _approvals(matter), _checksums(matter))


def person(matter: Matter) -> str:
    """Whose data are protected as one."""
    if matter.unit == "record":
        return "record"
    return "patient" if matter.medical else "person"


def _may_be_published(matter: Matter) -> Iterator[str]:
    if matter.worth == Worth.SIGNED:
        if matter.objections:
            yield "Not yet, although every silo that took part has signed for what was spent on its data."
        elif matter.is_vacuous:
            yield "The silos agree to it, but do not count on protection: the limits below promise almost nothing."
        else:
            yield (
                "As far as this certificate reaches, yes: every silo that took part has signed for what was spent on "
                "its data. What is published cannot be called back, and the silos' own rules hold beside this page."
            )
    elif matter.worth == Worth.SIMULATION:
        yield "Yes, because the records are public already." if not matter.objections else "Not yet."
        yield f"Do not take this page for a promise about other data: {ALONE}."
    elif matter.worth == Worth.STUDY:
        yield "No, not as something that protects the people in the data."
        yield f"{ALONE.capitalize()}; whoever publishes the results answers for that alone."
    else:
        yield "No, not as something that protects anybody."
        if matter.guarantee == NONE:
            yield "It was learned from the records without any noise that would hide a single one."
        else:
            yield f"What the program says of this run: {matter.guarantee}."
    if matter.objections:
        yield f"This stands against it: {'; '.join(matter.objections)}."
    if matter.objections or matter.worth in (Worth.NONE, Worth.STUDY):
        yield f"The program hands it on only where somebody takes the risk by the option {FLAG}; the card then says so."


def _whose_privacy(matter: Matter) -> Iterator[str]:
    yield from _warnings(matter)
    if not matter.is_bounded:
        yield f"Nobody's. A {person(matter)} from the data may be recognised in the results."
        return
    if matter.worth == Worth.STUDY:
        yield "By a promise, nobody's. What follows is what the study computed, and holds if it is believed."
    if matter.unit == "subject":
        whom = person(matter)
        yield (
            f"That of each {whom}, at every silo, with all records of the {whom} that this silo has. "
            "Who has records at several silos is protected less: the epsilons of these silos add up."
        )
        return
    figures = " and ".join(
        f"with {count} records up to {percent(certainty(*of_several(matter.epsilon, matter.delta, count)))}"
        for count in SEVERAL
    )
    yield (
        "That of each single record, at every silo. A person with several records is protected less: where one record "
        f"lets an observer become up to {percent(certainty(matter.epsilon, matter.delta))} sure (see below), it is "
        f"{figures}."
    )


def _warnings(matter: Matter) -> Iterator[str]:
    if matter.unit == "subject" or not matter.is_bounded:
        return
    if matter.medical:
        yield (
            "Warning: the records are medical, and no patient is protected as a whole, because single records were "
            "asked for (the setting privacy.unit)."
        )
    if matter.knows_subjects:
        yield 'Warning: the data say whose each record is, so whole persons can be protected: privacy.unit = "subject".'


def _how_strong(matter: Matter) -> Iterator[str]:
    if not matter.is_bounded:
        return
    sure, whom = certainty(matter.epsilon, matter.delta), person(matter)
    yield (
        f"An observer who was 50 % sure that a certain {whom} is in the data can become at most {percent(sure)} sure "
        "by all that left the silos. At 50 % nothing would have been learned, at 100 % everything."
    )
    yield (
        f"This is what epsilon {format_epsilon(matter.epsilon)} and delta {matter.delta:g} mean: epsilon limits how "
        "much surer anybody becomes, and delta is the chance that this limit does not hold, "
        f"at most {one_in(matter.delta)}. They are those of the silo that has spent most."
    )
    if matter.is_vacuous:
        yield "This bound alone promises almost nothing: only attacks can show how much the results give away."


def _what_an_attacker_needs(matter: Matter) -> Iterator[str]:
    if matter.worth == Worth.NONE:
        yield (
            "Nothing but the results, and patience: a generator can hold single records, and whoever has it can look "
            "for them."
        )
        return
    if matter.worth == Worth.SIGNED:
        yield (
            "To pass these odds: a silo's own machine, its people, or a fault in the program. All that left the silos "
            "is not enough, with any computer and with all other records known."
        )
        yield (
            "Each silo added all of its own noise, from its operating system's secret random numbers. So nobody else "
            "need be trusted: the server and all other silos together gain nothing."
        )
        return
    yield (
        "To pass these odds: the machine of the simulation, which held all records and all noise, its people, a fault "
        "in the program, or a weakness of the noise, which came from a fast source of random numbers that is not made "
        "to resist attackers. The secret behind it was thrown away at the end."
    )
    if matter.trust == "local":
        yield "Other silos, or the server, would gain nothing by working together: each silo's noise is complete."
    else:
        yield (
            f"More than {matter.tolerated} silos that work together, or somebody who sees what a single silo sends, "
            "would also be enough: the silos share the noise, and only the sum over all of them is protected."
        )


def _what_left(matter: Matter) -> Iterator[str]:
    named = ", ".join(matter.silos[:MOST_NAMED])
    more = f" and {len(matter.silos) - MOST_NAMED:,} more" if len(matter.silos) > MOST_NAMED else ""
    marked = "public" if matter.public else "not marked as public"
    yield (
        f"Learned from: {matter.data} ({marked}), by the method {matter.method}, in {_count(matter.rounds, 'round')}. "
        f"Took part: {_count(len(matter.silos), 'silo')} ({named}{more})."
    )
    payloads = [KNOWN_PAYLOADS.get(name, name) for name in matter.payloads]
    parts = "; ".join(
        f"{name}: {', '.join(found)}"
        for name, found in (("parts of the model", matter.blocks), ("beside them", payloads))
        if found
    )
    left = "Left the silos" if matter.deployed else "Would leave the silos (here one machine held everything)"
    yield f"{left}: {matter.bytes:,} bytes ({parts}). Did not leave: the records, and all that is not named."


def _what_is_outside(matter: Matter) -> Iterator[str]:
    if matter.worth == Worth.NONE:
        return
    counted = "records" if matter.unit == "record" else f"{person(matter)}s"
    stay = "stay at the silo" if matter.deployed else "are shown by this simulation"
    outside = [
        f"how many {counted} each silo has, which counts as public",
        f"errors in training and figures of quality that were measured on real records: they {stay}",
        *(["the records that were kept aside to choose settings"] if matter.validation else []),
        "choosing this run after a look at others, each of which spends again",
    ]
    yield f"Not covered: {'; '.join(outside)}."


def _what_attacks_found(matter: Matter) -> Iterator[str]:
    if not matter.audit:
        yield "Nobody has attacked the results to test what is said here."
        return
    claimed = f"epsilon {format_epsilon(matter.epsilon)}" if matter.is_bounded else "nothing"
    yield f"Claimed is {claimed}. Found was: {'; '.join(matter.audit)}. An attack that fails is no evidence of privacy."


QUESTIONS: dict[str, Callable[[Matter], Iterator[str]]] = {
    "May this be published?": _may_be_published,
    "Whose privacy is protected?": _whose_privacy,
    "How strongly?": _how_strong,
    "What would an attacker need?": _what_an_attacker_needs,
    "What was learned from, and what left?": _what_left,
    "What is not protected?": _what_is_outside,
    "What did attacks find?": _what_attacks_found,
}


def _signatures(matter: Matter) -> Passage:
    title = "Who has signed?"
    if not matter.signed:
        some = "Not every silo in a way that holds; the reason stands above."
        none = "Nobody: no silo has signed for what was spent on its data."
        return Passage(title, (some if matter.has_statements else none,))
    headers = ("silo", "fingerprint of its key", "epsilon", "delta", "date")
    rows = tuple((s.silo, s.fingerprint, format_epsilon(s.epsilon), f"{s.delta:g}", s.date) for s in matter.signed)
    checked = (
        "These signatures were checked when this page was made, and epsilon was computed again from what each silo "
        "states. Ask each silo, by another way, whether the fingerprint is its own. Anybody can check them again: "
        "fedloom certificate verify certificate.json."
    )
    return Passage(title, (checked,), headers, rows)


def _approvals(matter: Matter) -> Passage:
    rows = tuple((each.name, each.role, each.date, "") for each in matter.approvals) or (("",) * 4,) * LINES
    return Passage("Who approves?", (), ("name", "role", "date", "signature"), rows)


def _checksums(matter: Matter) -> Passage:
    about = f"This page is about the run {matter.run}, begun on {matter.started}, and these files, by their checksums."
    return Passage("Which files?", (about,), ("file", "checksum"), tuple(matter.checksums.items()))


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
