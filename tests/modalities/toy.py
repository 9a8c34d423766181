"""The third modality as a package that somebody has installed, and records of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from fedloom import registry
from plugins import install

HERE = Path(__file__).parent
FILES = (HERE / "counts.py", HERE / "counts.toml")  # all that it takes
STEPS, SIZE = 5, 40
RATES = {"ct": (2.0, 4.0, 8.0, 4.0, 2.0), "mri": (9.0, 6.0, 3.0, 1.0, 1.0)}


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """The modality on the import path, of this process and of those that it starts."""
    folder.mkdir(exist_ok=True)
    module, _ = FILES
    install(folder, "counts", "1.0", module.read_text(encoding="utf-8"), {"fedloom.modalities": {"counts": "MODALITY"}})
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        registry._installed.cache_clear()
        yield
    registry._installed.cache_clear()
    sys.modules.pop("counts", None)


def write_counts(path: Path) -> Path:
    """Two silos of each group, every silo with records of its group's rates."""
    drawn = np.random.default_rng(3)
    silos = [(group, f"{group}-{number}") for group in RATES for number in range(2)]
    arrays = {}
    for split, size in (("train", SIZE), ("test", 10)):
        arrays[f"x_{split}"] = np.concatenate([drawn.poisson(RATES[group], (size, STEPS)) for group, _ in silos])
        arrays[f"group_{split}"] = np.repeat([group for group, _ in silos], size)
        arrays[f"owner_{split}"] = np.repeat([silo for _, silo in silos], size)
    np.savez(path, modality="counts", **arrays)  # type: ignore[arg-type]
    return path
