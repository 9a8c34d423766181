"""DICOM and NIfTI: one slice a file, in its own units, by pydicom and nibabel."""

from __future__ import annotations

import importlib
import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import DataError, MissingExtraError
from fedloom.outline import in_outline

SEPARATE = ("YBR_FULL", "YBR_FULL_422")  # brightness and colours apart; other kinds come out of a decoder as colours
MAGIC_AT, MAGIC = 128, b"DICM"
# Nothing else of a header is read: names, dates and comments stay where they are.
DICOM_TAGS = (
    "PatientID", "SamplesPerPixel", "PhotometricInterpretation", "PlanarConfiguration", "NumberOfFrames", "Rows",
    "Columns", "BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "RescaleSlope", "RescaleIntercept",
    "WindowCenter", "WindowWidth", "PixelData", "FloatPixelData", "DoubleFloatPixelData", "ModalityLUTSequence",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Deep:
    """A picture of more than 256 levels of grey, with the window that its file asks for."""

    __repr__ = in_outline

    values: NDArray[np.float32]  # (height, width)
    window: tuple[float, ...]  # what is black and what is white; empty: its file does not say
    inverted: bool = False  # the lowest value is white

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        return self.values.shape[1], self.values.shape[0]

    @property
    def range(self) -> tuple[float, float]:
        """The least and the largest value."""
        return float(self.values.min()), float(self.values.max())


def is_dicom(file: Path) -> bool:
    """Whether a file says of itself that it is DICOM."""
    with file.open("rb") as opened:
        return opened.read(MAGIC_AT + len(MAGIC))[MAGIC_AT:] == MAGIC


def read_dicom(file: Path) -> tuple[Deep | NDArray[np.uint8], str]:
    """A picture, colour or deep, and its patient's identifier."""
    pydicom = _package("pydicom", file, "DICOM")
    logging.getLogger("pydicom").setLevel(logging.CRITICAL)  # what stops it is said in a sentence of ours
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of what it reads all the same
            return _read(pydicom, file)
    except DataError:
        raise
    except Exception as error:  # pydicom lets through what its many decoders raise
        raise DataError(f"cannot read {file} as DICOM: {_why(str(error) or repr(error))}") from error


def _read(pydicom: Any, file: Path) -> tuple[Deep | NDArray[np.uint8], str]:
    header = pydicom.dcmread(file, specific_tags=list(DICOM_TAGS))
    frames = int(header.get("NumberOfFrames") or 1)
    if frames > 1:
        raise DataError(f"{file} holds {frames} frames; save each as a file of its own")
    if not {"PixelData", "FloatPixelData", "DoubleFloatPixelData"} & {element.keyword for element in header}:
        raise DataError(f"{file} is DICOM without a picture")
    pixels = header.pixel_array
    patient = str(header.get("PatientID") or "")
    if header.get("SamplesPerPixel", 1) > 1:
        return _colour(importlib.import_module("pydicom.pixels"), pixels, header, file), patient
    values = importlib.import_module("pydicom.pixels").apply_modality_lut(pixels, header)
    inverted = header.get("PhotometricInterpretation") == "MONOCHROME1"
    return Deep(np.asarray(values, dtype=np.float32), _own_window(header), inverted), patient


def _why(said: str) -> str:
    """The first line of what pydicom says; of a compression that nothing here decodes, what would."""
    if any(word in said for word in ("plugins", "decompress")):
        return "its compression needs a decoder; install some with: pip install 'pylibjpeg[all]'"
    return said.splitlines()[0].rstrip(":")


def _colour(tools: Any, pixels: NDArray[Any], header: Any, file: Path) -> NDArray[np.uint8]:
    if pixels.dtype != np.uint8:
        raise DataError(f"{file} has colours of {pixels.dtype.itemsize * 8} bits; save it with 8")
    kind = str(header.PhotometricInterpretation)
    found: NDArray[np.uint8] = tools.convert_color_space(pixels, kind, "RGB") if kind in SEPARATE else pixels
    return found


def _own_window(header: Any) -> tuple[float, ...]:
    """The first window that a file asks for."""
    centre, width = header.get("WindowCenter"), header.get("WindowWidth")
    if centre is None or width is None:
        return ()
    first_centre, first_width = (
        float(np.atleast_1d(np.asarray(each, dtype=np.float64))[0]) for each in (centre, width)
    )
    return (first_centre - first_width / 2, first_centre + first_width / 2) if first_width > 0 else ()


def read_nifti(file: Path) -> Deep:
    """A slice; a volume is refused, because which slices stand for it is for people to say."""
    nibabel = _package("nibabel", file, "NIfTI")
    try:
        image = nibabel.load(file)
        shape = tuple(length for length in image.shape if length > 1)
        if len(shape) != 2:
            raise DataError(
                f"{file} is a volume of {' x '.join(map(str, image.shape))} values; save the slices to be learned from "
                "as files of their own"
            )
        values = np.asarray(image.dataobj, dtype=np.float32).reshape(shape)
    except DataError:
        raise
    except Exception as error:  # of nibabel or gzip
        raise DataError(f"cannot read {file} as NIfTI: {error}") from error
    return Deep(np.ascontiguousarray(values.T[::-1]), ())  # axes run to the right and up; rows of pixels run down


def _package(name: str, file: Path, kind: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(
            f"{file} is {kind}, which needs the package '{name}'; install it with: pip install 'fedloom[medical]'"
        ) from error
