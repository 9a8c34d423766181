"""What silos can tell of synthetic rows of Adult at a share of their budget, beside what is so.

    python benchmarks/tables_fidelity.py adult.csv

The file, the columns and the training rows are those of ``benchmarks/tables.py``. Each run releases counts for
``fidelity`` at a twentieth of its budget; as many rows are drawn as there are training rows, and how far they are from
these is estimated from those counts, and computed. ``limit`` is what noise could hide if all counts differed alike.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from common import keep, show
from fedloom.config import Config
from fedloom.experiment import train
from fedloom.federation.records import Federation
from fedloom.settings import override, parse
from tables import SETTINGS, Adult

NAME = "tables_fidelity-cpu"
SHARE = 0.05


def compared(federation: Federation, epsilon: float, seed: int, *settings: str) -> dict[str, float]:
    """Both distances of one run."""
    count = sum(len(silo) for silo in federation.silos)
    asked = ("evaluation.metrics=['fidelity', 'marginals']", f"evaluation.samples={count}")
    private = (f"privacy.epsilon={epsilon}", f"seed={seed}", f"privacy.shares.fidelity={SHARE}")
    config = parse(Config, override({}, [*SETTINGS, *asked, *private, *settings]))
    with tempfile.TemporaryDirectory() as folder:
        row = train(config, Path(folder) / "run", federation).metrics()[-1]
    found = {}
    for ways in ("1-way", "2-way"):
        told, so, limit = (
            row[f"{key}/n{count}/group=adult"]
            for key in (f"fidelity/{ways}", f"marginals/{ways}", f"fidelity/{ways}-limit")
        )
        found |= {ways: so, f"{ways} told": told, f"{ways} off": told - so, f"{ways} limit": limit}
    return found


def main() -> None:
    """Central at several epsilons, and ten silos at one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="adult.csv")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    adult = Adult.read(options.path)
    central, ten = (adult.federation(adult.owners(silos, skewed=False)) for silos in (1, 10))
    trials: list[tuple[str, Federation, float, tuple[str, ...]]] = [
        *(("central", central, epsilon, ()) for epsilon in (0.3, 1.0, 3.0, 10.0)),
        ("10 IID, shared noise", ten, 1.0, ("privacy.trust=distributed",)),
        ("10 IID, own noise", ten, 1.0, ()),
    ]
    rows: list[dict[str, Any]] = []
    for what, federation, epsilon, settings in trials:
        for seed in range(options.seeds):
            rows.append(
                {"what": what, "epsilon": epsilon, "seed": seed} | compared(federation, epsilon, seed, *settings)
            )
            show("", rows[-1:])
    keep(NAME, rows, share=SHARE)


if __name__ == "__main__":
    main()
