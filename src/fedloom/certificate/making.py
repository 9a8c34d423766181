"""Writing a certificate: two pages of the same facts, and the facts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from fedloom.certificate.facts import Certificate
from fedloom.certificate.html import html_of
from fedloom.certificate.matter import Approval, matter_of
from fedloom.runs.files import explained, write_atomically
from fedloom.runs.folder import RunFolder


def make_certificate(folder: RunFolder, out: Path, approvals: Sequence[Approval] = ()) -> Certificate:
    """Write a finished run's certificate into a folder; an older one there is replaced."""
    from fedloom.certificate.pdf import pdf_of

    statements = folder.statements.read_text(encoding="utf-8") if folder.statements.is_file() else ""
    made = Certificate(matter_of(folder, approvals), statements)
    files = {
        "certificate.html": html_of(made).encode(),
        "certificate.pdf": pdf_of(made),
        "certificate.json": json.dumps(made.to_mapping(), indent=1, ensure_ascii=False).encode(),
    }
    with explained(out):
        out.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        write_atomically(out / name, data)
    return made
