"""What is mailed holds no record of data that are not public, unless somebody asked for it; and then it says so."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from typer.testing import CliRunner

from fedloom.cli import app
from fedloom.evaluation.metric import METRICS, is_of_records
from fedloom.experiment import Run, load, train
from fedloom.reports.report import write_report
from html_pages import Page
from support import tiny_config

SECRET, WARD = "ward 7", "ward-7"  # folders that name somebody
RECORD_PANELS = ("reconstructions", "latent-space", "nearest-neighbours")


@pytest.fixture(scope="module")
def hospital(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on random images that are nobody's but two silos': each is told from every other."""
    folder = tmp_path_factory.mktemp("hospital") / SECRET
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, size=(120, 8, 8), dtype=np.uint8)
    owners, labels = np.repeat(["north", "south"], 60), np.tile(["well", "ill"], 60)
    np.savez(folder / "patients.npz", x_train=pixels, y_train=labels, owner_train=owners)
    settings = ["data.source=npz", f"data.path={folder / 'patients.npz'}", "data.partition=natural"]
    return train(tiny_config(*settings, "method.name=fedvae", "evaluation.samples=20"), folder / "run")


def written(run: Run, tmp_path: Path, **how: Any) -> tuple[Page, str, dict[str, Any]]:
    """The page, its text beside that of the numbers, and the numbers of the run."""
    out = tmp_path / "report.html"
    write_report([load(run.folder.path)], out, **how)
    html, numbers = out.read_text(encoding="utf-8"), out.with_suffix(".json").read_text(encoding="utf-8")
    return Page(html), html + numbers, json.loads(numbers)["runs"][0]


def pictures(page: Page) -> list[NDArray[np.uint8]]:
    """All pixels that a page shows."""
    found = [image["src"].partition("base64,")[2] for image in page.all("img")]
    return [np.array(Image.open(io.BytesIO(base64.b64decode(content)))) for content in found]


def records_in(page: Page, records: NDArray[np.uint8]) -> int:
    """How many records stand in some picture, pixel by pixel."""
    windows = [np.lib.stride_tricks.sliding_window_view(picture, (8, 8)) for picture in pictures(page)]
    tiles = {window.tobytes() for picture in windows for row in picture for window in row}
    return sum(record.tobytes() in tiles for record in records)


def banners(page: Page) -> int:
    return sum(paragraph.get("class") == "banner" for paragraph in page.all("p"))


def all_records(run: Run) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = np.load(run.config.data.path)["x_train"]
    return found


def test_a_report_that_is_mailed_holds_no_record(hospital: Run, tmp_path: Path) -> None:
    page, text, numbers = written(hospital, tmp_path)
    assert records_in(page, all_records(hospital)) == 0
    assert len(pictures(page)) == 2  # samples are there
    for name in RECORD_PANELS:
        assert numbers["panels"][name]["numbers"] == {}
        assert "these data are not public" in numbers["panels"][name]["missing"]
    assert '"points"' not in text
    assert "Real held-out" not in text
    assert [silo["classes"] for silo in numbers["silos"]] == [{}, {}]
    assert banners(page) == 0
    assert (numbers["public"], numbers["with_records"]) == (False, False)


def test_it_names_no_folder_and_no_digest_of_the_data(hospital: Run, tmp_path: Path) -> None:
    _, text, numbers = written(hospital, tmp_path)
    assert SECRET not in text
    assert str(hospital.folder.path.parent.parent) not in text
    assert hospital.folder.data_source.digest not in text
    assert numbers["config"]["data"]["path"] == "patients.npz"
    assert numbers["folder"] == "run"


def test_whoever_asks_for_records_gets_them_under_a_banner(hospital: Run, tmp_path: Path) -> None:
    page, text, numbers = written(hospital, tmp_path, with_records=True)
    assert records_in(page, all_records(hospital)) >= 12
    assert "points" in numbers["panels"]["latent-space"]["numbers"]
    assert banners(page) == 1
    style = re.search(r"<style>(.*)</style>", text, re.DOTALL)
    assert style is not None
    assert ".banner { position: fixed;" in style[1]  # on every page, printed ones as well
    assert not re.search(r"@media print \{.*\.banner \{[^}]*(display|position)", style[1], re.DOTALL)
    assert SECRET not in text  # nobody asked for that


def test_the_command_asks_by_an_option(hospital: Run, tmp_path: Path) -> None:
    out = str(tmp_path / "out.html")
    for option, count in (([], 0), (["--with-records"], 1)):
        assert CliRunner().invoke(app, ["report", str(hospital.folder.path), "--out", out, *option]).exit_code == 0
        assert banners(Page(Path(out).read_text())) == count


def test_two_runs_wear_the_banner_of_one(hospital: Run, trained: Path, tmp_path: Path) -> None:
    runs, out = [load(hospital.folder.path), load(trained)], tmp_path / "both.html"
    write_report(runs, out)
    page = Page(out.read_text())
    assert records_in(page, all_records(hospital)) == 0
    assert banners(page) == 0
    write_report(runs, out, with_records=True)
    assert banners(Page(out.read_text())) == 1


def claimed_in_memory(run: Path) -> None:
    """An older run, of which nothing is known."""
    found = json.loads((run / "environment.json").read_text())
    del found["data"]
    (run / "environment.json").write_text(json.dumps(found))


def a_strange_claim(run: Path) -> None:
    found = json.loads((run / "environment.json").read_text())
    found["data"] = {"name": "mnist", "open": True}
    (run / "environment.json").write_text(json.dumps(found))


def no_environment(run: Path) -> None:
    (run / "environment.json").unlink()


def pictures_of_an_audit(run: Path) -> None:
    (run / "audit").mkdir()
    record = np.load(run.parent / "patients.npz")["x_train"][0]
    Image.fromarray(record).save(run / "audit" / "outliers-north.png")


def another_path_in_the_command(run: Path) -> None:
    found = json.loads((run / "environment.json").read_text())
    found["command"] = f"fedloom run x --out '/home/{WARD}/x' data.path=~/{WARD}/y"
    (run / "environment.json").write_text(json.dumps(found))


@pytest.mark.parametrize(
    "damage", [claimed_in_memory, a_strange_claim, no_environment, pictures_of_an_audit, another_path_in_the_command]
)
def test_no_damage_opens_the_page(hospital: Run, tmp_path: Path, damage: Any) -> None:
    folder = Path(shutil.copytree(hospital.folder.path.parent, tmp_path / SECRET))
    records = all_records(hospital)
    damage(folder / "run")
    page, text, _ = written(load(folder / "run"), tmp_path)
    assert records_in(page, records) == 0
    assert SECRET not in text
    assert WARD not in text


def test_public_records_stand_beside_samples(trained: Path, tmp_path: Path) -> None:
    page, _, numbers = written(load(trained), tmp_path)
    assert [image["alt"] for image in page.all("img") if image["alt"].startswith("Real")] == [
        f"Real held-out records of {group}" for group in ("mnist", "fashion-mnist")
    ]
    assert numbers["public"]
    assert "points" in numbers["panels"]["latent-space"]["numbers"]
    assert banners(page) == 0


def test_numbers_of_records_are_listed_as_outside_the_guarantee(trained: Path, tmp_path: Path) -> None:
    page, _, numbers = written(load(trained), tmp_path)
    found = set(numbers["outside_guarantee"])
    assert {"train/vae/nll", "blend/domain-cnn"} <= found
    assert found.isdisjoint({"seconds", "steps", "bytes"})
    assert "Outside any guarantee" in page.text


OF_RECORDS = {name: any(reading.of_records for reading in metric.readings) for name, metric in METRICS.listed()}


def test_metrics_are_of_records_unless_they_cannot_be() -> None:
    assert {name for name, found in OF_RECORDS.items() if not found} == {
        "cost",
        "fidelity",
        "inception-score",
        "lipschitz",
    }
    assert all(map(is_of_records, ("a-plug-in-that-is-gone/x/n10", "train/vae/loss")))
    assert not any(map(is_of_records, ("privacy/epsilon/max", "seconds", "steps", "cost/bytes-up/n3")))
