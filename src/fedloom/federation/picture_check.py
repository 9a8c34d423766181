"""What is odd in folders of pictures, file by file, before anybody learns from them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedloom.errors import DataError, MissingExtraError
from fedloom.federation.medical_files import Deep
from fedloom.federation.picture_files import DEEP, MODES, Picture, open_picture
from fedloom.federation.picture_folders import Layout, PictureFile, silos_of, strangers_in
from fedloom.outline import in_outline

LEAST = 8  # pixels of a side; what is smaller shows nothing
SIZES = (28, 32, 64, 128)  # of which one is proposed


@dataclass(frozen=True)
class Oddity:
    """One thing that is wrong or odd with one file."""

    file: Path
    what: str
    stops: bool = False  # no setting mends it


@dataclass(frozen=True, eq=False)
class _Seen:
    __repr__ = in_outline

    place: PictureFile
    kind: str
    size: tuple[int, int]
    has_window: bool
    range: tuple[float, float]  # of deep pictures
    patient: str
    digest: str


@dataclass(frozen=True)
class PictureReport:
    """What was found, and settings that take the pictures as they are."""

    pictures: int
    silos: int
    sizes: dict[str, int]  # how many pictures have which size
    kinds: dict[str, int]
    findings: tuple[Oddity, ...]
    settings: dict[str, object]  # of data; empty: none would do

    @property
    def is_usable(self) -> bool:
        """Whether the proposed settings can be trained with as they are."""
        return not any(finding.stops for finding in self.findings)


def check_pictures(root: Path, layout: Layout) -> PictureReport:
    """Look at every file below a folder of silos."""
    if not root.is_dir():
        raise DataError(f"{root} is no folder; give one that holds a folder of pictures for each silo")
    seen: list[_Seen] = []
    findings = [Oddity(file, "is no picture and is left out") for file in strangers_in(root)]
    for place in silos_of(root, layout):
        try:
            seen.append(_seen(place, open_picture(place.file)))
        except MissingExtraError:
            raise
        except DataError as error:
            findings.append(Oddity(place.file, str(error).removeprefix(f"{place.file} "), stops=True))
    settings = _settings(seen)
    findings += [*_odd(seen), *_small(seen, layout.rule.size), *_alike(seen), *_travelling(seen)]
    return PictureReport(
        pictures=len(seen),
        silos=len({each.place.silo for each in seen}),
        sizes=dict(Counter(f"{width}x{height}" for width, height in (each.size for each in seen)).most_common()),
        kinds=dict(Counter(each.kind for each in seen).most_common()),
        findings=tuple(findings),
        settings=settings,
    )


def _seen(place: PictureFile, picture: Picture) -> _Seen:
    content = picture.content
    pixels = np.ascontiguousarray(content.values if isinstance(content, Deep) else np.asarray(content))
    # Two files may hold one picture in different formats: what is compared is what is learned from.
    digest = hashlib.sha256(f"{pixels.shape}{pixels.dtype}".encode() + pixels.tobytes()).hexdigest()
    return _Seen(
        place=place,
        kind=picture.kind,
        size=picture.size,
        has_window=isinstance(content, Deep) and bool(content.window),
        range=content.range if isinstance(content, Deep) else (0.0, 255.0),
        patient=picture.patient,
        digest=digest,
    )


def _settings(seen: Sequence[_Seen]) -> dict[str, object]:
    """Settings of data that make all pictures alike; nothing is proposed that is not needed."""
    if not seen:
        return {}
    found: dict[str, object] = {}
    sizes, kinds = {each.size for each in seen}, {each.kind for each in seen}
    if len(sizes) > 1:
        smallest = min(min(size) for size in sizes)
        found["size"] = max((size for size in SIZES if size <= smallest), default=SIZES[0])
    if len(kinds) > 1 or not kinds <= {*MODES, DEEP}:
        found["mode"] = "colour" if any(kind not in ("grey", DEEP) for kind in kinds) else "grey"
    unwindowed = [each.range for each in seen if each.kind == DEEP and not each.has_window]
    if unwindowed:
        low, high = min(low for low, _ in unwindowed), max(high for _, high in unwindowed)
        found["window"] = [low, high if high > low else low + 1]
    return found


def _odd(seen: Sequence[_Seen]) -> Iterator[Oddity]:
    """Those of another size or mode than most."""
    for aspect, words in (("size", "{0[0]}x{0[1]} pixels"), ("kind", "{0}")):
        counts = Counter(getattr(each, aspect) for each in seen)
        if len(counts) > 1:
            ((usual, _),) = counts.most_common(1)
            for each in seen:
                if (own := getattr(each, aspect)) != usual:
                    yield Oddity(each.place.file, f"is {words.format(own)}, most are {words.format(usual)}")
    for each in seen:
        if each.kind == DEEP and not each.has_window:
            low, high = each.range
            yield Oddity(each.place.file, f"has values from {low:g} to {high:g} and no window of its own")


def _small(seen: Sequence[_Seen], size: int) -> Iterator[Oddity]:
    for each in seen:
        if min(each.size) < max(size, LEAST):
            width, height = each.size
            yield Oddity(each.place.file, f"is {width}x{height} pixels, smaller than the {max(size, LEAST)} of a side")


def _alike(seen: Sequence[_Seen]) -> Iterator[Oddity]:
    """Each picture that occurred before, whether at the same silo, at another, or among those held out."""
    first: dict[str, PictureFile] = {}
    for each in sorted(seen, key=lambda one: one.place.held_out):
        before = first.setdefault(each.digest, each.place)
        if before is not each.place:
            across = " (one is held out, one is trained on)" if before.held_out != each.place.held_out else ""
            yield Oddity(each.place.file, f"is the same picture as {before.file}{across}")


def _travelling(seen: Sequence[_Seen]) -> Iterator[Oddity]:
    homes: dict[str, str] = {}
    for each in seen:
        subject = each.place.subject or each.patient
        if subject and homes.setdefault(subject, each.place.silo) != each.place.silo:
            yield Oddity(each.place.file, f"is of a subject who is at silo '{homes[subject]}' too")
