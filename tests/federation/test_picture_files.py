"""Pictures of every format, and what the declared rule makes of them: the numbers are derived by hand."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import nibabel
import numpy as np
import pydicom
import pytest
from numpy.typing import NDArray
from PIL import Image
from pydicom.data import get_testdata_file

from fedloom.config import DataConfig
from fedloom.errors import DataError, FedloomError
from fedloom.federation.picture_files import PictureReader, PictureRule, open_picture, pixels_of

RAMP = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20


def pixels(file: Path, rule: PictureRule | None = None) -> NDArray[np.uint8]:
    return pixels_of(open_picture(file), rule or PictureRule(), file)


@pytest.mark.parametrize("ending", ["png", "webp", "tif", "tiff"])
@pytest.mark.parametrize("colour", [False, True])
def test_formats_without_loss_give_back_what_was_saved(ending: str, colour: bool, tmp_path: Path) -> None:
    # WebP has no grey, and comes back in colours.
    content = np.stack([RAMP, RAMP[::-1], RAMP[:, ::-1]], axis=2) if colour or ending == "webp" else RAMP
    file = tmp_path / f"picture.{ending}"
    Image.fromarray(content).save(file, **({"lossless": True} if ending == "webp" else {}))
    wanted = np.moveaxis(content, 2, 0) if content.ndim == 3 else content[None]
    np.testing.assert_array_equal(pixels(file), wanted)


@pytest.mark.parametrize("ending", ["png", "tif"])
def test_a_window_says_what_is_black_and_what_is_white(ending: str, tmp_path: Path) -> None:
    file = tmp_path / f"deep.{ending}"
    Image.fromarray(np.array([[0, 1000, 2000, 3000, 65535]], dtype=np.uint16)).save(file)
    found = pixels(file, PictureRule(window=(1000, 3000)))
    assert found.tolist() == [[[0, 0, 128, 255, 255]]]
    with pytest.raises(DataError, match=r"more than 256 levels \(0 to 65535\) .* data\.window = \[LOW, HIGH\]"):
        pixels(file)


def test_modes_are_made_alike_and_what_is_transparent_is_black(tmp_path: Path) -> None:
    clear = np.full((2, 2, 4), 200, dtype=np.uint8)
    clear[..., 3] = [[255, 0], [0, 255]]
    Image.fromarray(clear).save(tmp_path / "clear.png")
    for mode, channels in (("grey", 1), ("colour", 3)):
        found = pixels(tmp_path / "clear.png", PictureRule(mode=mode))
        assert found.tolist() == [[[200, 0], [0, 200]]] * channels
    Image.fromarray(RAMP).convert("P").save(tmp_path / "palette.png")
    np.testing.assert_array_equal(pixels(tmp_path / "palette.png", PictureRule(mode="grey")), RAMP[None])
    with pytest.raises(DataError, match=r"has mode P, which is neither grey"):
        pixels(tmp_path / "palette.png")


@pytest.mark.parametrize(
    ("crop", "columns"),
    [("centre", [255, 255, 255, 255]), ("pad", [255, 255, 255, 255]), ("stretch", [0, 255, 255, 0])],
)
def test_a_wide_picture_becomes_a_square(crop: str, columns: list[int], tmp_path: Path) -> None:
    """Black at both ends, white between: what is cut away is missing, what is squeezed is there."""
    wide = np.zeros((4, 8), dtype=np.uint8)
    wide[:, 2:6] = 255
    Image.fromarray(wide).save(tmp_path / "wide.png")
    found = pixels(tmp_path / "wide.png", PictureRule(size=4, crop=crop))[0]
    assert found.shape == (4, 4)
    if crop == "pad":  # rows of black above and below, all columns squeezed between
        assert found[0].max() == found[-1].max() == 0
        assert found[1:3, 1:3].min() > 200
        assert found[:, 0].max() < 60
    else:
        assert [255 if value > 127 else 0 for value in found[1].tolist()] == columns


def test_a_camera_that_was_held_upright_is_turned(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by a quarter
    Image.fromarray(RAMP).save(tmp_path / "turned.png", exif=exif)
    np.testing.assert_array_equal(pixels(tmp_path / "turned.png")[0], np.rot90(RAMP, -1))


def test_a_dicom_picture_has_its_units_its_window_and_its_patient(tmp_path: Path) -> None:
    file = Path(str(get_testdata_file("CT_small.dcm")))
    header = pydicom.dcmread(file)
    raw = header.pixel_array
    found = pixels(file, PictureRule(window=(-160, 240)))
    units = raw * float(header.RescaleSlope) + float(header.RescaleIntercept)
    np.testing.assert_array_equal(found[0], np.rint(255 * np.clip((units + 160) / 400, 0, 1)).astype(np.uint8))
    assert open_picture(file).patient == header.PatientID

    header.WindowCenter, header.WindowWidth = [40, 600], [400, 2000]  # the first of two counts
    header.save_as(tmp_path / "own.dcm")
    np.testing.assert_array_equal(pixels(tmp_path / "own.dcm"), found)
    header.PhotometricInterpretation = "MONOCHROME1"  # the lowest value is white
    header.save_as(tmp_path / "inverted.dcm")
    assert np.abs(pixels(tmp_path / "inverted.dcm").astype(int) + found - 255).max() <= 1  # of rounding halves


def test_dicom_is_known_by_what_it_says_inside(tmp_path: Path) -> None:
    shutil.copy(str(get_testdata_file("MR_small.dcm")), tmp_path / "IM0001")
    assert pixels(tmp_path / "IM0001", PictureRule(window=(0, 1000))).shape == (1, 64, 64)
    (tmp_path / "README").write_text("no picture")
    with pytest.raises(DataError, match=r"README is no picture that can be read; give PNG"):
        open_picture(tmp_path / "README")


def test_nothing_of_a_dicom_header_is_read_that_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    read = pydicom.dcmread
    monkeypatch.setattr(pydicom, "dcmread", lambda file, specific_tags: asked.extend(specific_tags) or read(file))
    open_picture(Path(str(get_testdata_file("CT_small.dcm"))))
    assert {"PatientID", "PixelData"} <= set(asked)
    assert not {"PatientName", "PatientBirthDate", "InstitutionName", "StudyDate"} & set(asked)


def test_a_slice_of_nifti_stands_upright(tmp_path: Path) -> None:
    content = np.arange(6, dtype=np.int16).reshape(2, 3, 1)  # x runs to the right, y up
    nibabel.save(nibabel.Nifti1Image(content, np.eye(4)), tmp_path / "slice.nii.gz")
    found = pixels(tmp_path / "slice.nii.gz", PictureRule(window=(0, 5)))[0]
    assert found.tolist() == [[102, 255], [51, 204], [0, 153]]


def spoil_volume(folder: Path) -> Path:
    nibabel.save(nibabel.Nifti1Image(np.zeros((4, 5, 6), dtype=np.int16), np.eye(4)), folder / "v.nii")
    return folder / "v.nii"


def spoil_pages(folder: Path) -> Path:
    page = Image.fromarray(RAMP)
    page.save(folder / "pages.tif", save_all=True, append_images=[page])
    return folder / "pages.tif"


def spoil_dicom(folder: Path) -> Path:
    content = Path(str(get_testdata_file("CT_small.dcm"))).read_bytes()
    (folder / "cut.dcm").write_bytes(content[: len(content) // 2])
    return folder / "cut.dcm"


def spoil_frames(folder: Path) -> Path:
    header = pydicom.dcmread(str(get_testdata_file("CT_small.dcm")))
    header.NumberOfFrames = 3
    header.save_as(folder / "frames.dcm")
    return folder / "frames.dcm"


def spoil_report(folder: Path) -> Path:
    header = pydicom.dcmread(str(get_testdata_file("CT_small.dcm")))
    del header.PixelData
    header.save_as(folder / "report.dcm")
    return folder / "report.dcm"


def spoil_text(folder: Path) -> Path:
    (folder / "text.nii").write_text("no slice")
    return folder / "text.nii"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_volume, r"v\.nii is a volume of 4 x 5 x 6 values; save the slices"),
        (spoil_pages, r"pages\.tif holds 2 pictures; save each as a file of its own"),
        (spoil_dicom, r"cannot read .*cut\.dcm as DICOM"),
        (spoil_frames, r"frames\.dcm holds 3 frames"),
        (spoil_report, r"report\.dcm is DICOM without a picture"),
        (spoil_text, r"cannot read .*text\.nii as NIfTI"),
    ],
)
def test_what_is_no_single_picture_is_named(spoil: object, message: str, tmp_path: Path) -> None:
    assert callable(spoil)
    with pytest.raises(DataError, match=message) as caught:
        open_picture(spoil(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_compression_without_a_decoder_is_said_to_be_one() -> None:
    """Of pydicom's own files, which lie in its package."""
    with pytest.raises(DataError, match=r"JPEG-lossy\.dcm as DICOM: its compression needs a decoder; .*pylibjpeg"):
        open_picture(Path(str(get_testdata_file("JPEG-lossy.dcm"))))


def test_colours_that_a_decoder_has_put_together_stay_as_they_are() -> None:
    assert pixels(Path(str(get_testdata_file("examples_jpeg2k.dcm")))).shape == (3, 480, 640)


def test_what_pydicom_forgives_is_forgiven_in_silence(recwarn: pytest.WarningsRecorder) -> None:
    open_picture(Path(str(get_testdata_file("MR_small_padded.dcm"))))
    assert not recwarn.list


@pytest.mark.parametrize(("package", "file"), [("pydicom", "a.dcm"), ("nibabel", "a.nii.gz")])
def test_a_missing_package_is_named(package: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / file).write_bytes(b"")
    with pytest.raises(FedloomError, match=r"pip install 'fedloom\[medical\]'"):
        open_picture(tmp_path / file)


@pytest.mark.parametrize("window", [(1.0,), (2.0, 2.0), (3.0, 1.0), (1.0, 2.0, 3.0)])
def test_a_window_has_two_ends(window: tuple[float, ...]) -> None:
    with pytest.raises(DataError, match="must be two numbers"):
        PictureRule.of(DataConfig(window=window))


def test_what_is_done_to_a_picture_does_not_depend_on_the_others(tmp_path: Path) -> None:
    """Else the others would be learned about before any mechanism guards them."""
    generator = np.random.default_rng(0)
    for number, shape in enumerate([(5, 9), (30, 20), (12, 12)]):
        Image.fromarray(generator.integers(0, 60000, shape).astype(np.uint16)).save(tmp_path / f"{number}.png")
    rule = PictureRule(size=8, window=(0, 50000), mode="grey")
    files = [tmp_path / f"{number}.png" for number in range(3)]
    together = PictureReader(rule)
    for file in files:
        np.testing.assert_array_equal(together.read(file)[0], PictureReader(rule).read(file)[0])
