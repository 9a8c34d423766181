"""The report in a real browser, opened from disk."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fedloom.experiment import load, train
from fedloom.reports.report import write_report
from support import tiny_config, wait_for

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of one run, and one of two runs."""
    path = tmp_path_factory.mktemp("reports")
    for name in ("one", "two"):
        train(tiny_config("rounds=3", "evaluation.every=1", "method.prior=symmetrical"), path / name)
    write_report([load(path / "one")], path / "single.html")
    write_report([load(path / "one"), load(path / "two")], path / "both.html")
    return path


@pytest.fixture(params=["single.html", "both.html"])
def page(request: pytest.FixtureRequest, folder: Path, browser: Chrome) -> Iterator[Chrome]:
    """Each page, opened anew; whatever happens on it, the console stays silent."""
    browser.get((folder / request.param).as_uri())
    browser.get_log("browser")  # what came before
    browser.refresh()
    yield browser
    assert browser.get_log("browser") == []


def visible_pictures(page: Chrome) -> list[str]:
    found: list[str] = page.execute_script(
        "return [...document.querySelectorAll('.film img')].filter(one => one.offsetParent).map(one => one.src)"
    )
    return found


def test_the_slider_changes_every_picture(page: Chrome) -> None:
    from selenium.webdriver.common.keys import Keys

    slider = page.find_element("id", "slider")
    newest = visible_pictures(page)
    assert page.find_element("css selector", ".player output").text == "round 3"
    slider.send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    oldest = visible_pictures(page)
    assert page.find_element("css selector", ".player output").text == "round 1"
    assert {one.text for one in page.find_elements("css selector", ".player .shown")} == {"round 1"}
    assert len(oldest) == len(newest)
    assert all(old != new for old, new in zip(oldest, newest, strict=True))
    slider.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert visible_pictures(page) == newest


def test_every_picture_is_a_picture(page: Chrome) -> None:
    widths = page.execute_script("return [...document.images].map(one => one.complete && one.naturalWidth)")
    assert len(widths) > 10
    assert all(width > 0 for width in widths)


def test_a_curve_tells_its_values_under_the_pointer(page: Chrome) -> None:
    from selenium.webdriver import ActionChains

    chart = page.find_element("css selector", "section:not(details *) figure svg[data-snap=x]")
    page.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", chart)
    points = json.loads(chart.get_attribute("data-hover") or "")
    assert not page.find_element("class name", "tip").is_displayed()
    ActionChains(page).move_to_element(chart).perform()
    tip = page.find_element("class name", "tip")
    wait_for(lambda: tip.text == points[1][2])
    assert tip.text.startswith("round 2\n")
    ActionChains(page).move_to_element(page.find_element("tag name", "h1")).perform()
    wait_for(lambda: not tip.is_displayed())


def test_a_link_to_a_run_opens_it(folder: Path, browser: Chrome) -> None:
    browser.get((folder / "both.html").as_uri())
    details = browser.find_element("id", "run2")
    assert details.get_attribute("open") is None
    browser.find_element("css selector", "nav a[href='#run2']").click()
    wait_for(lambda: details.get_attribute("open") is not None)


def test_nothing_but_its_own_script_runs(page: Chrome) -> None:
    page.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.injected = 1'; document.body.append(s)"
    )
    assert page.execute_script("return window.injected") is None
    (complaint,) = page.get_log("browser")
    assert "Content Security Policy" in complaint["message"]


@pytest.mark.parametrize("width", [390, 768, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_every_screen(page: Chrome, width: int, scheme: str) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    try:
        page.execute_script("document.querySelectorAll('details').forEach(one => { one.open = true })")
        overflow = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.execute_script(overflow) == 0
        colour = page.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert colour == {"light": "rgb(253, 252, 249)", "dark": "rgb(18, 22, 29)"}[scheme]
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_it_prints_with_every_run_open(page: Chrome) -> None:
    page.execute_script(
        "addEventListener('beforeprint', () => {"
        " window.closed_in_print = document.querySelectorAll('details:not([open])').length })"
    )
    pdf = base64.b64decode(page.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"])
    assert pdf.startswith(b"%PDF")
    assert page.execute_script("return window.closed_in_print") == 0
