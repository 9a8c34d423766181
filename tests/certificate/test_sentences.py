"""What a reader finds on a certificate, and what only somebody who knows the program would understand."""

from __future__ import annotations

import re

import pytest

from fedloom.certificate.facts import Certificate
from fedloom.certificate.matter import Approval, Matter
from fedloom.errors import ConfigError
from fedloom.release.standing import Worth
from matters import matter, simulated, unprotected

CANARIES = "canaries: 130 of 200 guesses right; epsilon is at least 0.9 at 95% confidence (delta 1e-05), claimed 1"
EVERY = [
    matter(),
    matter(epsilon=12.0),
    matter(unit="subject", medical=True),
    matter(objections=("an audit refuted the epsilon that is claimed",), audit=(CANARIES,)),
    simulated(Worth.STUDY, medical=True, knows_subjects=True, validation=True),
    simulated(Worth.STUDY, trust="distributed", tolerated=1),
    simulated(Worth.SIMULATION, public=True),
    unprotected(),
    unprotected(
        deployed=True, has_statements=True, guarantee="no DP guarantee can be shown: silo 'west' has not signed"
    ),
]


def answers(about: Matter) -> dict[str, str]:
    """The sentences below each question."""
    return {section.title: " ".join(section.sentences) for section in Certificate(about).sections}


@pytest.mark.parametrize(
    ("about", "first", "published", "whose", "attacker"),
    [
        (
            matter(),
            "Each record of every silo is protected within the limits below, and every silo that took part has signed",
            "yes: every silo that took part has signed for what was spent on its data",
            "That of each single record, at every silo. A person with several records is protected less",
            "the server and all other silos together gain nothing",
        ),
        (
            matter(unit="subject", medical=True),
            "Each patient of every silo is protected",
            "yes: every silo",
            "That of each patient, at every silo, with all records of the patient that this silo has.",
            "a silo's own machine, its people, or a fault in the program",
        ),
        (
            simulated(Worth.STUDY),
            "This is a study, not a promise to the people in the data: no silo has signed for it.",
            "No, not as something that protects the people in the data. One machine computed the noise of all silos, "
            "from a fast source of random numbers, and nobody signed for it",
            "By a promise, nobody's.",
            "the machine of the simulation, which held all records and all noise",
        ),
        (
            simulated(Worth.STUDY, trust="distributed", tolerated=2),
            "This is a study",
            "No, not as something that protects the people in the data.",
            "By a promise, nobody's.",
            "More than 2 silos that work together, or somebody who sees what a single silo sends",
        ),
        (
            simulated(Worth.SIMULATION, public=True),
            "This is a simulation on public data",
            "Yes, because the records are public already.",
            "That of each single record",
            "the machine of the simulation",
        ),
        (
            unprotected(),
            "There is no privacy guarantee: nothing limits what the results tell about a single record.",
            "No, not as something that protects anybody.",
            "Nobody's. A record from the data may be recognised in the results.",
            "Nothing but the results, and patience",
        ),
    ],
    ids=["signed", "patients", "study", "shared noise", "public", "none"],
)
def test_three_readers_find_their_answers(about: Matter, first: str, published: str, whose: str, attacker: str) -> None:
    """May I publish this? Whose privacy is protected? What would an attacker need?"""
    assert Certificate(about).verdict.startswith(first)
    found = answers(about)
    assert published in found["May this be published?"]
    assert whose in found["Whose privacy is protected?"]
    assert attacker in found["What would an attacker need?"]


def test_what_stands_against_a_run_comes_before_a_yes() -> None:
    for about in (matter(objections=("x is wrong",)), simulated(Worth.SIMULATION, objections=("x is wrong",))):
        found = answers(about)["May this be published?"]
        assert found.startswith("Not yet")
        assert "This stands against it: x is wrong. The program hands it on only where somebody takes the risk" in found
        assert Certificate(about).tone == "bad"


def test_odds_stand_beside_epsilon() -> None:
    found = answers(matter())
    assert "50 % sure that a certain record is in the data can become at most 73.1 % sure" in found["How strongly?"]
    assert "epsilon 1 and delta 1e-05 mean" in found["How strongly?"]
    assert "at most 1 in 100,000" in found["How strongly?"]
    several = found["Whose privacy is protected?"]
    # e^2 / (1 + e^2), and (e^10 + 0.128) / (1 + e^10), where 0.128 = 1e-5 (e^10 - 1) / (e - 1).
    assert "it is with 2 records up to 88.1 % and with 10 records up to 99.996 %" in several


@pytest.mark.parametrize(("epsilon", "vacuous"), [(4.5, False), (4.6, True)])
def test_a_bound_beyond_99_percent_is_said_to_promise_almost_nothing(epsilon: float, vacuous: bool) -> None:
    """e^4.595 / (1 + e^4.595) = 0.99."""
    about = matter(epsilon=epsilon)
    assert ("This bound alone promises almost nothing" in answers(about)["How strongly?"]) is vacuous
    assert ("promise almost nothing" in Certificate(about).verdict) is vacuous
    assert ("promise almost nothing" in answers(about)["May this be published?"]) is vacuous
    assert Certificate(about).tone == ("careful" if vacuous else "good")


@pytest.mark.parametrize(
    ("changes", "medical", "known"),
    [
        ({}, False, False),
        ({"medical": True}, True, False),
        ({"knows_subjects": True}, False, True),
        ({"medical": True, "knows_subjects": True}, True, True),
        ({"medical": True, "knows_subjects": True, "unit": "subject"}, False, False),
    ],
    ids=str,
)
def test_whoever_could_be_protected_as_a_patient_is_warned_of_first(
    changes: dict[str, object], medical: bool, known: bool
) -> None:
    found = answers(matter(**changes))["Whose privacy is protected?"]
    assert ("Warning: the records are medical, and no patient is protected as a whole" in found) is medical
    assert ("Warning: the data say whose each record is" in found) is known
    assert found.startswith("Warning") is (medical or known)


def test_who_took_part_and_what_left_and_stayed() -> None:
    found = answers(matter(silos=tuple(f"s{number}" for number in range(14)), validation=True))
    told = found["What was learned from, and what left?"]
    assert (
        "Learned from: the silos of federation fed (not marked as public), by the method fedvae, in 2 rounds." in told
    )
    assert "Took part: 14 silos (s0, s1, " in told
    assert "s11 and 2 more)" in told
    assert "4,096 bytes (parts of the model: encoder, decoder; beside them: how many records a silo has)" in told
    assert "Did not leave: the records" in told
    outside = found["What is not protected?"]
    assert "kept aside to choose settings" in outside
    assert "they stay at the silo" in outside


def test_an_audit_stands_beside_the_claim() -> None:
    found = answers(matter(audit=(CANARIES,)))["What did attacks find?"]
    assert found == f"Claimed is epsilon 1. Found was: {CANARIES}. An attack that fails is no evidence of privacy."
    assert "Nobody has attacked" in answers(matter())["What did attacks find?"]


def test_who_signed_is_told_by_silo_and_who_approves_by_name_or_by_hand() -> None:
    blank, given = (
        {section.title: section for section in Certificate(matter(approvals=approvals)).sections}
        for approvals in ((), (Approval("Ann", "officer", "2026-05-31"),))
    )
    assert blank["Who has signed?"].rows[0] == ("east", "aaaa bbbb", "1", "1e-05", "2026-03-01")
    assert blank["Who approves?"].rows == (("", "", "", ""),) * 3
    assert given["Who approves?"].rows == (("Ann", "officer", "2026-05-31", ""),)
    assert answers(unprotected())["Who has signed?"].startswith("Nobody")
    assert answers(EVERY[-1])["Who has signed?"].startswith("Not every silo in a way that holds")


# What people who know the program say, and a reader need not know.
JARGON = (
    "silo|record|noise|epsilon|delta|differential privacy|DP|generator|server|round|ledger|statement|fingerprint|"
    "canary|canaries|checksum|card|simulation|federation|confidence|outlier|membership|model|method|held-out|gradient|clip|"
    "dp-sgd|accountant|adjacency|Poisson|sampling|subject|payload|scope|checkpoint|encoder|decoder|seed"
)
NAMES = ("encoder", "decoder", "checkpoint", "subject")  # of parts and files and settings, shown as such


@pytest.mark.parametrize("about", EVERY, ids=lambda about: about.worth)
def test_no_word_is_left_unexplained_and_no_epsilon_without_its_sentence(about: Matter) -> None:
    certificate = Certificate(about)
    *asked, words = certificate.sections
    explained = {word for word, _ in words.rows}
    text = " ".join([certificate.verdict, *(sentence for section in asked for sentence in section.sentences)])
    used = {word.lower() for word in re.findall(rf"(?<!\w)({JARGON})s?(?!\w)", text)} - set(NAMES)
    known = {word.lower() for word in explained} | ({"canaries"} if "canary" in explained else set())
    assert used <= known
    assert not set("εδ√^±≤") & set(text)
    if re.search(r"epsilon \d", " ".join(text.split("Found was")[:1])):
        assert "can become at most" in text


@pytest.mark.parametrize(
    "text", ["Ann, officer", "Ann, officer, soon", "Ann, officer, 2026-13-01", ", officer, 2026-05-31", "A, b, c, d"]
)
def test_an_approval_has_a_name_a_role_and_a_date(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--approval = .* must "):
        Approval.of(text)
