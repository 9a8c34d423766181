"""One picture in a file, whatever its format, as the pixels that are learned from.

What is done to a picture depends on that picture and on declared settings alone, never on other records: so nothing is
learned about the others before a mechanism guards them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from fedloom.config import DataConfig
from fedloom.errors import DataError
from fedloom.federation import medical_files
from fedloom.federation.medical_files import Deep
from fedloom.outline import in_outline

MODES = {"grey": "L", "colour": "RGB"}
LEVELS = 255
PILLOW = ("PNG", "JPEG", "WEBP", "TIFF")
DEEP = "more than 8 bits"


@dataclass(frozen=True)
class PictureRule:
    """What is done to each picture by itself; the usual rule leaves it as it is."""

    size: int = 0  # of each side, in pixels; 0: as it is
    crop: str = "centre"  # how a picture becomes a square: "centre", "pad" or "stretch"
    mode: str = "auto"  # "grey" or "colour"; "auto": as it is
    window: tuple[float, ...] = ()  # the values that become black and white, where a picture has more than 256 levels

    @classmethod
    def of(cls, config: DataConfig) -> PictureRule:
        """The rule that settings declare."""
        if config.window and not (len(config.window) == 2 and config.window[0] < config.window[1]):
            raise DataError(
                f"data.window = {list(config.window)} must be two numbers: what becomes black, and, above it, what "
                "becomes white"
            )
        return cls(config.size, config.crop, config.mode, config.window)


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture as it is in its file: the pixels, and whose it is where the file says so."""

    __repr__ = in_outline

    content: Image.Image | Deep
    patient: str = ""

    @property
    def kind(self) -> str:
        """Its colours or its depth, in a word that people know."""
        if isinstance(self.content, Deep):
            return DEEP
        return {mode: name for name, mode in MODES.items()}.get(self.content.mode, f"mode {self.content.mode}")

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        return self.content.size


def _pillow(file: Path, content: bytes | None = None) -> Picture:
    with Image.open(file if content is None else io.BytesIO(content), formats=PILLOW) as image:
        if (pages := getattr(image, "n_frames", 1)) > 1:
            raise DataError(f"{file} holds {pages} pictures; save each as a file of its own")
        turned = ImageOps.exif_transpose(image)  # a camera's picture as people see it
        turned.load()
    if turned.mode.startswith(("I", "F")):
        return Picture(Deep(np.asarray(turned, dtype=np.float32), ()))
    return Picture(turned)


def _dicom(file: Path) -> Picture:
    found, patient = medical_files.read_dicom(file)
    if isinstance(found, Deep):
        return Picture(found, patient)
    return Picture(Image.fromarray(found), patient)


def _nifti(file: Path) -> Picture:
    return Picture(medical_files.read_nifti(file))


FORMATS: dict[str, Callable[[Path], Picture]] = {
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff"), _pillow),
    ".dcm": _dicom,
    ".nii": _nifti,
    ".nii.gz": _nifti,
}
KNOWN = "PNG, JPEG, WebP, TIFF, DICOM or NIfTI"


def reader_of(file: Path) -> Callable[[Path], Picture] | None:
    """What reads a file, by its name; a file without an ending may be DICOM, which says so inside."""
    name = file.name.lower()
    if found := next((read for ending, read in FORMATS.items() if name.endswith(ending)), None):
        return found
    return _dicom if not file.suffix and medical_files.is_dicom(file) else None


def open_picture(file: Path) -> Picture:
    """A picture as it is in its file."""
    read = reader_of(file)
    if read is None:
        raise DataError(f"{file} is no picture that can be read; give {KNOWN} files")
    with _named(file):
        return read(file)


def picture_within(content: bytes, place: Path) -> Picture:
    """A picture whose file lies inside another one, at a place that complaints name."""
    with _named(place):
        return _pillow(place, content)


@contextmanager
def _named(file: Path) -> Iterator[None]:
    try:
        yield
    except UnidentifiedImageError as error:
        raise DataError(f"cannot read {file} as an image: it is damaged, or of another kind than its name") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"cannot read {file} as an image: {error}") from error


def pixels_of(picture: Picture, rule: PictureRule, file: Path) -> NDArray[np.uint8]:
    """A picture's pixels by the rule, (channels, height, width)."""
    content = picture.content
    image = _eight_bits(content, rule, file) if isinstance(content, Deep) else content
    image = _squared(_in_mode(image, rule, file), rule)
    pixels: NDArray[np.uint8] = np.asarray(image)
    return pixels[None] if image.mode == "L" else np.moveaxis(pixels, 2, 0)


def _eight_bits(deep: Deep, rule: PictureRule, file: Path) -> Image.Image:
    window = rule.window or deep.window
    if not window:
        low, high = deep.range
        raise DataError(
            f"{file} has more than 256 levels ({low:g} to {high:g}) and no window of its own; data.window = [LOW, HIGH]"
            " says what becomes black and what white"
        )
    low, high = window
    share = np.clip((deep.values - low) / (high - low), 0, 1)
    return Image.fromarray(np.rint(LEVELS * (1 - share if deep.inverted else share)).astype(np.uint8))


def _in_mode(image: Image.Image, rule: PictureRule, file: Path) -> Image.Image:
    if rule.mode == "auto":
        if image.mode not in MODES.values():
            raise DataError(
                f"{file} has mode {image.mode}, which is neither grey (L) nor colour (RGB); data.mode = 'grey' or "
                "'colour' makes it so"
            )
        return image
    if image.has_transparency_data:  # what is transparent becomes black
        clear = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", clear.size, (0, 0, 0, 255)), clear).convert("RGB")
    return image if image.mode == MODES[rule.mode] else image.convert(MODES[rule.mode])


def _squared(image: Image.Image, rule: PictureRule) -> Image.Image:
    if not rule.size or image.size == (rule.size, rule.size):
        return image
    sides, how = (rule.size, rule.size), Image.Resampling.LANCZOS
    squares: dict[str, Callable[[], Image.Image]] = {
        "centre": lambda: ImageOps.fit(image, sides, how),
        "pad": lambda: ImageOps.pad(image, sides, how),
        "stretch": lambda: image.resize(sides, how),
    }
    return squares[rule.crop]()


class PictureReader:
    """Reads pictures by one rule, and insists that all come out alike."""

    def __init__(self, rule: PictureRule) -> None:
        self._rule = rule
        self._first: tuple[Path, tuple[Any, ...]] | None = None

    def read(self, file: Path) -> tuple[NDArray[np.uint8], str]:
        """A picture's pixels, and whose it is where its file says so."""
        return self.take(open_picture(file), file)

    def take(self, picture: Picture, file: Path) -> tuple[NDArray[np.uint8], str]:
        """The same of a picture that is open already."""
        pixels = pixels_of(picture, self._rule, file)
        if self._first is None:
            self._first = (file, pixels.shape)
        first, shape = self._first
        if pixels.shape != shape:
            raise DataError(
                f"{file} is {_told(pixels.shape)}, but {first} is {_told(shape)}; all images must have one size and "
                "mode: data.size = 64 and data.mode = 'grey' make them alike, and 'fedloom data check' lists all files"
            )
        return pixels, picture.patient


def _told(shape: tuple[Any, ...]) -> str:
    channels, height, width = shape
    return f"{width}x{height} {'grey' if channels == 1 else 'colour'}"
