"""Pictures of the studio for docs/studio.md: small runs are trained, and a headless Chromium looks at their pages.

python scripts/make_studio_pictures.py [RUNS-FOLDER]   (a folder that holds the runs already is taken as it is)
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from PIL import Image
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

from fedloom.config import load_config
from fedloom.experiment import train
from fedloom.studio.server import Listener, server_of
from fedloom.studio.studio import Studio

OUT = Path(__file__).parents[1] / "docs" / "images"
COMMON = (
    *("rounds=15", "evaluation.every=5", "evaluation.metrics=['sliced-wasserstein']", "evaluation.samples=100"),
    *("data.silos=2", "data.records_per_silo=600", "engine.workers=1", "engine.threads=1"),
)
PRIVATE = ("privacy.mechanism=dp-sgd", "rounds=5")
RUNS = {
    "groups": (),
    "plane": ("method.name=fedvae", "model.latent=2"),
    "private/open": ("rounds=5",),
    "private/eps-2": (*PRIVATE, "privacy.epsilon=2"),
    "private/eps-8": (*PRIVATE, "privacy.epsilon=8"),
}


@dataclass(frozen=True)
class Shot:
    """A page as somebody sees it."""

    address: str
    width: int = 1440
    height: int = 900
    dark: bool = False


def shots(keys: dict[str, str]) -> dict[str, Shot]:
    """Every picture by its name."""
    compared = "&".join(f"run={keys[name]}" for name in ("groups", "plane"))
    return {
        "studio-runs": Shot(""),
        "studio-run": Shot(f"runs/{keys['groups']}"),
        "studio-compare-dark": Shot(f"compare?{compared}", dark=True),
        "studio-privacy": Shot("privacy", height=640),
        "studio-release": Shot(f"runs/{keys['private/eps-8']}/release", height=720, dark=True),
        "studio-explorer": Shot(f"runs/{keys['plane']}/explore"),
        "studio-phone": Shot("", 390, 844),
    }


@contextmanager
def studio_over(root: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A studio that works, by its address, and the keys of its runs."""
    place, studio = Listener.of("127.0.0.1", 0, "", works=True), Studio.over(root, root / "papers", works=True)
    server = server_of(studio, place.door)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [place.listener]}, daemon=True)
    thread.start()
    try:
        yield place.address, {entry.name: entry.key for entry in studio.catalogue.entries().values()}
    finally:
        server.handle_exit(2, None)
        thread.join()
        place.listener.close()


def look(browser: Chrome, base: str, shot: Shot, file: Path) -> None:
    """Take one picture."""
    size = {"width": shot.width, "height": shot.height, "deviceScaleFactor": 1, "mobile": shot.width < 500}
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if shot.dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    browser.get(base + shot.address)
    time.sleep(4)  # until what comes by itself has come
    browser.save_screenshot(str(file))
    with Image.open(file) as picture:
        few = picture.convert("RGB").quantize(256)  # colours: half of the bytes, because the wheel has the pictures too
    few.save(file, optimize=True)


def main() -> None:
    """Train what is missing, and look."""
    root = Path(sys.argv[1]) if sys.argv[1:] else Path(mkdtemp()) / "runs"
    for name, settings in RUNS.items():
        if not (root / name / "status.json").is_file():
            train(load_config("demo", [*COMMON, *settings]), root / name)
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for argument in ("--headless=new", "--no-sandbox", "--hide-scrollbars"):
        options.add_argument(argument)
    with studio_over(root) as (address, keys):
        browser = Chrome(options=options, service=Service(shutil.which("chromedriver") or "chromedriver"))
        try:
            browser.get(address)
            base = address.partition("?")[0]
            for name, shot in shots(keys).items():
                look(browser, base, shot, OUT / f"{name}.png")
        finally:
            browser.quit()


if __name__ == "__main__":
    main()
