"""Whose pictures they are, and what is odd about them."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pydicom
import pytest
from PIL import Image
from pydicom.data import get_testdata_file
from typer.testing import CliRunner

from fedloom.cli import app
from fedloom.config import DataConfig
from fedloom.errors import ConfigError, DataError, FedloomWarning
from fedloom.federation.building import build_federation
from fedloom.federation.picture_check import check_pictures
from fedloom.federation.picture_folders import Layout
from fedloom.federation.records import Federation
from fedloom.settings import parse
from fedloom.streams import Streams


def picture(file: Path, value: int, size: tuple[int, int] = (12, 12)) -> None:
    """One that no other value gives."""
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(value).integers(0, 256, size[::-1], dtype=np.uint8)
    Image.fromarray(pixels).save(file)


def scan(file: Path, patient: str, value: int) -> None:
    header = pydicom.dcmread(str(get_testdata_file("MR_small.dcm")))
    header.PatientID = patient
    header.PixelData = (header.pixel_array + value).astype(np.uint16).tobytes()
    file.parent.mkdir(parents=True, exist_ok=True)
    header.save_as(file)


def built(root: Path, **settings: object) -> Federation:
    config = DataConfig(source="image-folders", path=str(root), partition="natural", **settings)  # type: ignore[arg-type]
    return build_federation(config, Streams(0))


def test_innermost_folders_are_subjects(tmp_path: Path) -> None:
    for subject in range(3):
        for number in range(4):
            picture(tmp_path / "a" / "well" / f"p{subject}" / f"{number}.png", 10 * subject + number)
            picture(tmp_path / "b" / f"q{subject}" / f"{number}.png", 100 + 10 * subject + number)
    federation = built(tmp_path, subjects="folder")
    assert federation.classes == ("well",)
    found = [silo.train.subject for silo in federation.silos]
    assert [sorted(set(each.tolist())) for each in found if each is not None] == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(DataError, match=r"p0 lies inside a class; .* data\.subjects = 'folder'"):
        built(tmp_path)
    picture(tmp_path / "b" / "loose.png", 999)
    with pytest.raises(DataError, match=r"loose\.png lies in no subject's folder"):
        built(tmp_path, subjects="folder")


def test_a_scan_names_its_patient_who_may_be_at_two_silos(tmp_path: Path) -> None:
    for number, (silo, patient) in enumerate([("a", "x"), ("a", "x"), ("a", "y"), ("b", "y"), ("b", "z"), ("b", "z")]):
        scan(tmp_path / silo / f"{number}.dcm", patient, number)
    with pytest.warns(FedloomWarning, match=r"1 of 3 subjects have pictures at more than one silo: .* for itself"):
        federation = built(tmp_path, subjects="dicom", window=(0, 2000))
    subjects = [set(silo.train.subject.tolist()) for silo in federation.silos if silo.train.subject is not None]
    assert subjects[0] <= {0, 1}
    assert subjects[1] <= {1, 2}
    picture(tmp_path / "a" / "nobodys.png", 7, size=(64, 64))
    with pytest.raises(DataError, match=r"nobodys\.png names no patient"):
        built(tmp_path, subjects="dicom", window=(0, 2000))


def test_settings_of_pictures_are_refused_where_there_are_none() -> None:
    for settings in ({"size": 8}, {"mode": "colour"}, {"window": (0.0, 1.0)}, {"subjects": "dicom"}, {"crop": "pad"}):
        config = DataConfig(source="mnist-sample", **settings)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=rf"data\.{next(iter(settings))} = .* 'mnist-sample' has none"):
            build_federation(config, Streams(0))
    asked_of_what_they_are = DataConfig(source="mnist-sample", size=28, mode="grey")
    assert build_federation(asked_of_what_they_are, Streams(0)).shape == (1, 28, 28)


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    root = tmp_path / "odd"
    for number in range(6):
        picture(root / "a" / f"{number}.png", number, size=(40, 40))
    picture(root / "a" / "small.png", 50, size=(5, 40))
    shutil.copy(root / "a" / "0.png", root / "a" / "again.png")
    picture(root / "b" / "only.png", 60, size=(40, 40))
    picture(root / "b" / "other.png", 61, size=(40, 40))
    (root / "b" / "test").mkdir()
    Image.open(root / "a" / "1.png").save(root / "b" / "test" / "leak.tif")  # one picture in two formats
    (root / "b" / "notes.doc").write_text("no picture")
    Image.fromarray(np.full((40, 40), 700, dtype=np.uint16)).save(root / "b" / "deep.png")
    return root


def test_everything_odd_is_listed_by_file(odd: Path) -> None:
    found = check_pictures(odd, Layout())
    told = {(each.file.name, each.what.replace(str(odd), "")) for each in found.findings}
    assert told == {
        ("notes.doc", "is no picture and is left out"),
        ("small.png", "is 5x40 pixels, most are 40x40 pixels"),
        ("small.png", "is 5x40 pixels, smaller than the 8 of a side"),
        ("deep.png", "is more than 8 bits, most are grey"),
        ("deep.png", "has values from 700 to 700 and no window of its own"),
        ("again.png", "is the same picture as /a/0.png"),
        ("leak.tif", "is the same picture as /a/1.png (one is held out, one is trained on)"),
    }
    assert (found.pictures, found.silos, found.is_usable) == (12, 2, True)
    assert found.sizes == {"40x40": 11, "5x40": 1}


def test_the_proposed_settings_take_the_pictures_as_they_are(odd: Path) -> None:
    (odd / "a" / "small.png").unlink()
    picture(odd / "a" / "large.png", 51, size=(90, 70))
    result = CliRunner().invoke(app, ["data", "check", str(odd)])
    assert result.exit_code == 0, result.output
    section = tomllib.loads(result.stdout.partition("start from:")[2])["data"]
    assert section == {
        "source": "image-folders", "path": str(odd), "size": 32, "mode": "grey", "window": [700.0, 701.0]
    }  # fmt: skip
    with pytest.warns(FedloomWarning, match=r"notes\.doc"):
        assert build_federation(parse(DataConfig, section), Streams(0)).shape == (1, 32, 32)


def test_what_no_setting_mends_stops(odd: Path) -> None:
    (odd / "a" / "2.png").write_bytes(b"no picture")
    result = CliRunner().invoke(app, ["data", "check", str(odd), "--json"])
    assert result.exit_code == 1
    stops = [each for each in json.loads(result.stdout)["findings"] if each["stops"]]
    assert [Path(each["file"]).name for each in stops] == ["2.png"]


@pytest.mark.parametrize("make", [lambda root: None, lambda root: (root / "a").mkdir()])
def test_a_folder_of_nothing_is_one_sentence(make: object, tmp_path: Path) -> None:
    assert callable(make)
    make(tmp_path)
    result = CliRunner().invoke(app, ["data", "check", str(tmp_path)])
    assert result.exit_code == 2
    assert "holds no" in result.stderr
