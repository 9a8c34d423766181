"""Damaged and hostile run folders: the report's own, seen through the studio."""

from __future__ import annotations

from pathlib import Path

import pytest

from html_pages import Page
from reports.test_hostile import ATTACK, DAMAGES
from studio.conftest import Ask


@pytest.mark.parametrize("damage", DAMAGES)
def test_no_damage_breaks_the_studio(damage: str, root: Path, ask: Ask, keys: dict[str, str]) -> None:
    """Whatever is wrong becomes a page or a sentence, and never markup of the run's own."""
    DAMAGES[damage][0](root / "four")
    client = ask(root)
    for path in ("/", f"/runs/{keys['four']}", f"/runs/{keys['four']}/explore"):
        answer = client.get(path, headers={"Accept": "text/html"})
        assert answer.status_code in (200, 400, 404), answer.text
        assert ATTACK not in answer.text
        page = Page(answer.text)
        assert all("src" in script for script in page.all("script"))
        assert not {name for _, attributes in page.elements for name in attributes if name.startswith("on")}
        assert all(source.startswith(("/static/", "/runs/")) for source in page.values("src"))
    assert client.get("/").status_code == 200
