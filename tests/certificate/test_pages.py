"""HTML and PDF say the same, and a hostile name is text in both."""

from __future__ import annotations

from typing import Any

import pypdfium2
import pytest

from fedloom.certificate.facts import Certificate
from fedloom.certificate.html import html_of
from fedloom.certificate.matter import Approval, Matter, SignedFigure
from fedloom.certificate.pdf import pdf_of
from fedloom.release.standing import Worth
from html_pages import Page
from matters import ATTACK, matter, simulated, unprotected

HOSTILE: dict[str, Any] = {
    "run": ATTACK,
    "method": ATTACK,
    "data": ATTACK,
    "silos": (ATTACK,),
    "blocks": (ATTACK,),
    "payloads": (ATTACK,),
    "guarantee": ATTACK,
    "objections": (ATTACK,),
    "audit": (ATTACK,),
    "approvals": (Approval(ATTACK, ATTACK, "2026-05-31"),),
    "checksums": {ATTACK: "ab"},
}
SUBJECTS = [
    matter(),
    matter(approvals=(Approval("Jörg Müßig", "Beauftragter für Datenschutz", "2026-05-31"),)),
    simulated(Worth.STUDY, medical=True, knows_subjects=True),
    simulated(Worth.SIMULATION, public=True),
    unprotected(),
    matter(**HOSTILE, signed=(SignedFigure(ATTACK, ATTACK, "record", 1.0, 1e-5, ATTACK),)),
]


def dense(text: str) -> str:
    """Without spaces: where lines are broken does not matter."""
    return "".join(text.split())


def text_of(data: bytes) -> str:
    return "".join(page.get_textpage().get_text_range() for page in pypdfium2.PdfDocument(data))


@pytest.mark.parametrize("about", SUBJECTS, ids=lambda about: about.worth)
def test_both_pages_have_every_text_in_order(about: Matter) -> None:
    certificate = Certificate(about)
    page, pdf = dense(Page(html_of(certificate)).text), dense(text_of(pdf_of(certificate)))
    assert len(certificate.texts) > 30
    for shown in (page, pdf):
        place = 0
        for text in certificate.texts:
            place = shown.find(dense(text), place)
            assert place >= 0, text


def test_a_hostile_name_is_text() -> None:
    certificate = Certificate(SUBJECTS[-1])
    page = Page(html_of(certificate))
    assert page.text.count("<script>") >= 12
    assert not page.all("script")
    assert not {name for _, attributes in page.elements for name in attributes if name.startswith("on")}
    assert not page.values("href")
    assert not page.values("src")
    (policy,) = page.values("content")[:1]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")


@pytest.mark.parametrize("about", SUBJECTS[:-1], ids=lambda about: about.worth)
def test_one_sheet_of_paper_is_enough_and_the_same_facts_give_the_same_bytes(about: Matter) -> None:
    data = pdf_of(Certificate(about))
    assert len(pypdfium2.PdfDocument(data)) == 1
    assert pdf_of(Certificate(about)) == data


def test_what_the_font_cannot_show_is_not_left_out() -> None:
    text = text_of(pdf_of(Certificate(matter(approvals=(Approval("Łukasz 李", "officer", "2026-05-31"),)))))
    assert "Łukasz \\u674e" in text
