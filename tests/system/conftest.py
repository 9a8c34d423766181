"""Tests that need more than Python: run by ``make test-system``, left out of every other call.

Debian packages chromium and chromium-driver, and selenium from PyPI. Selenium is told where both programs are, so it
downloads nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from places import Ground, Place

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,900",
)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """A headless Chromium with an empty profile that logs what its console says."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    assert all(programs.values()), f"install Debian's chromium and chromium-driver; found {programs}"
    options = ChromeOptions()
    options.binary_location = programs["chromium"] or ""
    for argument in (*ARGUMENTS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=Service(programs["chromedriver"]))
    yield driver
    driver.quit()


SECONDS = 360  # that a test may take, with its fixtures


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bound every test of this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(SECONDS))


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let fixtures know that their test has failed."""
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    found = Ground(tmp_path_factory.mktemp("federation"))
    yield found
    found.leave()


@pytest.fixture
def place(ground: Ground, request: pytest.FixtureRequest) -> Iterator[Place]:
    """A federation of three silos with all of them there; after a test that failed the next one gets another."""
    yield ground.place()
    if request.node.stash.get(FAILED, False):
        ground.leave()
