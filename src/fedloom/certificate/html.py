"""A certificate as one page of HTML that needs nothing from elsewhere."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256

from fedloom.certificate.facts import Certificate, glued
from fedloom.templating import render, style_of


def html_of(certificate: Certificate) -> str:
    """The page; its style is the only thing in it that a browser may carry out."""
    style = style_of("certificate/page.css")
    digest = b64encode(sha256(style.encode()).digest()).decode()
    values = {"certificate": certificate, "style": style, "digest": f"sha256-{digest}", "glued": glued}
    return f"{render('certificate/templates/certificate.html', values)}\n"
