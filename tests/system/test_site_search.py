"""The documentation's search in a real browser, in pages opened from disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from documentation import ROOT
from support import wait_for

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    return folder


@pytest.mark.parametrize("page", ["index.html", "how-to/gpu.html"])
def test_search_finds_pages_without_a_server(site: Path, browser: Chrome, page: str) -> None:
    browser.get((site / page).as_uri())
    browser.get_log("browser")  # what came before
    box = browser.find_element("css selector", "input.md-search__input")
    wait_for(box.is_displayed, "the search box", 20)
    box.click()
    box.send_keys("secure sum")
    first = "return document.querySelector('.md-search-result__link')?.href"
    wanted = (site / "security.html").as_uri()
    wait_for(lambda: browser.execute_script(first) == wanted, "the page on secure sums before all others", 20)
    assert browser.get_log("browser") == []
