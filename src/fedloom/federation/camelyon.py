"""Camelyon17 as WILDS (Koh et al., ICML 2021) distributes it: metadata.csv and patches/, tumour or not, five hospitals.

Patches of one patient are alike, so nothing is ever held out patch by patch. A smaller metadata.csv gives a smaller
data set: only the patches that it lists are read, 27 kB of memory each.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from fedloom.errors import ConfigError, DataError
from fedloom.federation.arrays import Examples, assemble
from fedloom.federation.records import Dataset

Split = Literal["official", "patients"]

VALIDATION_HOSPITAL, TEST_HOSPITAL = 1, 2  # of the official split
COLUMNS = ("patient", "node", "x_coord", "y_coord", "tumor", "center")
HELD_OUT_SHARE = 5  # of a hospital's patients one in five


def load_camelyon(path: str, split: Split) -> Dataset:
    """The hospitals as silos, the patients as subjects.

    ``official``: hospital 2 is held out, hospital 1 (validation) left out. ``patients``: all five are silos, and the
    last fifth of each one's patients, at least one, is held out.
    """
    root = Path(path).expanduser()
    if not path or not (root / "metadata.csv").is_file():
        raise ConfigError(f"data.path = '{path}' must name the WILDS folder of Camelyon17, with metadata.csv in it")
    rows = _metadata(root / "metadata.csv")
    hospital, patient = (np.array([row[name] for row in rows], dtype=np.int64) for name in ("center", "patient"))
    table = Examples(
        x=torch.from_numpy(np.stack([_patch(root, row) for row in rows])),
        y=np.array([("normal", "tumor")[row["tumor"]] for row in rows]),
        owner=np.array([f"hospital-{number}" for number in hospital]),
        subject=patient,
    )
    held = hospital == TEST_HOSPITAL if split == "official" else _last_patients(hospital, patient)
    kept = ~held & (hospital != VALIDATION_HOSPITAL) if split == "official" else ~held
    if not held.any() or not kept.any():
        raise DataError(f"{root}: the '{split}' split needs patches to train on and patches to hold out")
    return assemble("camelyon17", table.rows(np.flatnonzero(kept)), table.rows(np.flatnonzero(held)))


def _metadata(file: Path) -> list[dict[str, int]]:
    with file.open(newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream)
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise DataError(f"{file} has no column '{missing[0]}'")
        try:
            rows = [{name: int(row[name]) for name in COLUMNS} for row in reader]
        except (TypeError, ValueError):  # whose text quotes the record
            raise DataError(
                f"{file} holds something that is not a whole number in one of {', '.join(COLUMNS)}"
            ) from None
    if not rows:
        raise DataError(f"{file} lists no patch")
    return rows


def _patch(root: Path, row: dict[str, int]) -> NDArray[np.uint8]:
    of = f"patient_{row['patient']:03d}_node_{row['node']}"
    file = root / "patches" / of / f"patch_{of}_x_{row['x_coord']}_y_{row['y_coord']}.png"
    try:
        with Image.open(file) as image:
            return np.moveaxis(np.asarray(image.convert("RGB")), 2, 0)
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"cannot read {file} as an image: {error}") from error


def _last_patients(hospital: NDArray[np.int64], patient: NDArray[np.int64]) -> NDArray[np.bool_]:
    held = np.zeros(len(patient), dtype=np.bool_)
    for number in np.unique(hospital):
        members = np.unique(patient[hospital == number])
        count = max(len(members) // HELD_OUT_SHARE, 1) if len(members) > 1 else 0
        held |= (hospital == number) & np.isin(patient, members[len(members) - count :])
    return held
