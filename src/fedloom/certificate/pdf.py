"""The same certificate as PDF; the same facts give the same bytes."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from fedloom.certificate.facts import Certificate, glued
from fedloom.certificate.sentences import Passage
from fedloom.errors import MissingExtraError

try:
    import reportlab
    from reportlab.lib.colors import HexColor
    from reportlab.lib.pagesizes import A4
    from reportlab.lib.styles import ParagraphStyle
    from reportlab.lib.units import mm
    from reportlab.pdfbase import pdfmetrics
    from reportlab.pdfbase.ttfonts import TTFont
    from reportlab.platypus import Paragraph, SimpleDocTemplate, Table, TableStyle
except ModuleNotFoundError as error:
    raise MissingExtraError(
        f"a certificate as PDF needs the package '{error.name}'; install it with: pip install 'fedloom[certificate]'"
    ) from error

PLAIN, BOLD = "Vera", "VeraBd"
# The palette of templates/tokens.css by day; a test holds them together.
INK, QUIET, LINE, PANEL = "#1c2430", "#5a616d", "#dad5c8", "#f5f2ea"
TONES = {"good": "#0a6b45", "careful": "#8a5200", "bad": "#a8241c"}
MARGIN, TITLES = 16 * mm, 34 * mm
PADDING = 6  # that reportlab leaves within a page's frame
WIDTH = A4[0] - 2 * MARGIN
WORDS = 29 * mm
LEAST, MOST = 10, 44  # signs that a column is made for; longer texts take several lines
ROW = 5.5 * mm  # of a table, so that there is room to write

for _name in (PLAIN, BOLD):
    pdfmetrics.registerFont(TTFont(_name, Path(reportlab.__file__).parent / "fonts" / f"{_name}.ttf"))

BODY = ParagraphStyle("body", fontName=PLAIN, fontSize=8, leading=10.6, textColor=HexColor(INK), spaceAfter=1.5)
HEAD = ParagraphStyle("head", BODY, fontName=BOLD)
CELL = ParagraphStyle("cell", BODY, fontSize=7.2, leading=9.2, spaceAfter=0)
WORD = ParagraphStyle("word", CELL, fontName=BOLD)
SMALL = ParagraphStyle("small", CELL, textColor=HexColor(QUIET))
TITLE = ParagraphStyle("title", BODY, fontName=BOLD, fontSize=14, leading=18, spaceAfter=6)


def pdf_of(certificate: Certificate) -> bytes:
    """The page, on as much A4 paper as it takes."""
    file = BytesIO()
    document = SimpleDocTemplate(
        file,
        pagesize=A4,
        leftMargin=MARGIN - PADDING,
        rightMargin=MARGIN - PADDING,
        topMargin=9 * mm,
        bottomMargin=8 * mm,
        title=_shown(certificate.title),
        invariant=1,
    )
    parts = [_text(certificate.title, TITLE), _verdict(certificate), *map(_section, certificate.sections)]
    document.build([*parts, _text(certificate.footer, SMALL)])
    return file.getvalue()


def _verdict(certificate: Certificate) -> Any:
    tone = HexColor(TONES[certificate.tone])
    style = ParagraphStyle("verdict", BODY, fontName=BOLD, fontSize=10, leading=13.5, textColor=tone)
    return Table(
        [[_text(certificate.verdict, style)]],
        colWidths=[WIDTH],
        style=TableStyle(
            [
                ("BACKGROUND", (0, 0), (-1, -1), HexColor(PANEL)),
                ("LINEBEFORE", (0, 0), (0, -1), 4, tone),
                ("LEFTPADDING", (0, 0), (-1, -1), 10),
                ("TOPPADDING", (0, 0), (-1, -1), 5),
                ("BOTTOMPADDING", (0, 0), (-1, -1), 7),
            ]
        ),
        spaceAfter=6,
    )


def _section(section: Passage) -> Any:
    answer = [_text(sentence, BODY) for sentence in section.sentences]
    if section.rows:
        answer.append(_rows(section))
    return Table(
        [[_text(section.title, HEAD), answer]],
        colWidths=[TITLES, WIDTH - TITLES],
        style=TableStyle(
            [
                ("VALIGN", (0, 0), (-1, -1), "TOP"),
                ("LINEABOVE", (0, 0), (-1, 0), 0.5, HexColor(LINE)),
                ("LEFTPADDING", (0, 0), (-1, -1), 0),
                ("RIGHTPADDING", (0, 0), (-1, -1), 4),
                ("TOPPADDING", (0, 0), (-1, -1), 3),
                ("BOTTOMPADDING", (0, 0), (-1, -1), 2.5),
            ]
        ),
        splitInRow=1,
    )


def _words(section: Passage) -> Any:
    return Table(
        [[_text(word, WORD), _text(meaning, CELL)] for word, meaning in section.rows],
        colWidths=[WORDS, WIDTH - TITLES - WORDS - 4],
        style=TableStyle(
            [
                ("VALIGN", (0, 0), (-1, -1), "TOP"),
                ("LEFTPADDING", (0, 0), (-1, -1), 0),
                ("TOPPADDING", (0, 0), (-1, -1), 0),
                ("BOTTOMPADDING", (0, 0), (-1, -1), 1),
            ]
        ),
    )


def _rows(section: Passage) -> Any:
    if not section.headers:
        return _words(section)
    cells = [[_text(header, SMALL) for header in section.headers]]
    cells += [[_text(cell, CELL) for cell in row] for row in section.rows]
    return Table(
        cells,
        colWidths=_widths(section),
        rowHeights=[None, *[ROW if not any(row) else None for row in section.rows]],
        style=TableStyle(
            [
                ("VALIGN", (0, 0), (-1, -1), "TOP"),
                ("LINEBELOW", (0, 0), (-1, -1), 0.4, HexColor(LINE)),
                ("LEFTPADDING", (0, 0), (-1, -1), 0),
                ("TOPPADDING", (0, 0), (-1, -1), 1.5),
                ("BOTTOMPADDING", (0, 0), (-1, -1), 2),
            ]
        ),
        repeatRows=1,
    )


def _widths(section: Passage) -> list[float]:
    """Columns as wide as their longest text asks for, within the page."""
    columns = zip(section.headers, *section.rows, strict=True)
    wanted = [min(max(LEAST, *map(len, column)), MOST) + 2 for column in columns]
    return [(WIDTH - TITLES - 4) * each / sum(wanted) for each in wanted]


def _text(text: str, style: ParagraphStyle) -> Any:
    return Paragraph(escape(_shown(glued(text))), style)


def _shown(text: str) -> str:
    """What the font cannot show is written by its number: nothing of a name may vanish."""
    known = pdfmetrics.getFont(PLAIN).face.charToGlyph
    return "".join(sign if sign in "\n\t" or ord(sign) in known else f"\\u{ord(sign):04x}" for sign in text)
